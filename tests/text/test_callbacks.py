"""Callbacks: which objects are refused, and that the methods of the base class are the stages of the trainer."""

from unittest.mock import Mock

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from helpers.commands import imported
from helpers.configs import text_config
from helpers.proofs import proofs
from helpers.runs import metrics
from tokencredit import Callback, ConfigError, PPOConfig, PPOTrainer
from tokencredit.errors import RunStopped
from tokencredit.text.callbacks import EVENTS, check_callbacks
from tokencredit.text.pipeline import Stages

STAGES = ("iteration", "rollout", "reference", "reward", "update", "evaluation", "audit")


def having(*methods, base=object):
    """An object with methods of these names."""
    return type("Watcher", (base,), {method: lambda self, *args, **kwargs: None for method in methods})()


def test_every_stage_has_two_methods():
    assert set(EVENTS) - {"after_minibatch"} == {f"{when}_{stage}" for when in ("before", "after") for stage in STAGES}


@pytest.mark.parametrize(
    "callback",
    [
        having("after_update"),
        having("before_rollout", "save", "_after_step", base=Callback),
        Callback(),
        Mock(spec=Callback),
    ],
)
def test_callbacks_pass(callback):
    assert check_callbacks([callback]) == [callback]


def test_a_method_that_belongs_to_the_object_counts():
    callback = having()
    with pytest.raises(ConfigError, match="has no callback method"):
        check_callbacks([callback])
    callback.before_update = print
    assert check_callbacks([callback]) == [callback]


def test_a_method_that_belongs_to_the_object_is_called_after_each_minibatch():
    callback, called = having("before_update"), []
    assert Stages(None, [callback, Callback()]).caller("after_minibatch") is None
    callback.after_minibatch = lambda trainer, metrics: called.append(metrics)
    Stages(None, [callback]).caller("after_minibatch")({"minibatch": 1})
    assert called == [{"minibatch": 1}]


def test_a_value_is_no_method():
    callback = having("after_update")
    callback.after_hours = 3
    assert check_callbacks([callback]) == [callback]
    callback.after_hours = print
    with pytest.raises(ConfigError, match="has a method after_hours, which is never called"):
        check_callbacks([callback])


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (
            having("after_updates"),
            r"callbacks\[1\] \(Watcher\) has a method after_updates, .* did you mean after_update\?",
        ),
        (
            having("before_rolout", base=Callback),
            r"before_rolout, which is never called; did you mean before_rollout\?",
        ),
        (having("on_rollout_end"), r"on_rollout_end, which is never called; did you mean after_rollout\?"),
        (having("on_update_start", "after_update"), r"on_update_start, .*; did you mean before_update\?"),
        (having("on_step_end"), r"on_step_end, which is never called; use after_iteration"),
        (
            having("on_qqqqqqqqq"),
            r"on_qqqqqqqqq, which is never called; subclass tokencredit.Callback, which has before_iteration, ",
        ),
        (
            having("iteration_end"),
            r"callbacks\[1\] is <.*>, which has no callback method; subclass tokencredit.Callback",
        ),
        (print, r"callbacks\[1\] is <built-in function print>, which has no callback method"),
        (Callback, r"callbacks\[1\] is the class Callback; pass an instance, Callback\(\)"),
        (
            having("on_log", base=TrainerCallback),
            r"\(Watcher\) is a transformers.TrainerCallback, .* on_log → after_iter",
        ),
        (
            EarlyStoppingCallback(),
            r"\(EarlyStoppingCallback\) .*subclass tokencredit.Callback, .*on_evaluate → after_eval",
        ),
        (TrainerCallback(), r"is a transformers.TrainerCallback, .* subclass tokencredit.Callback"),
    ],
)
def test_other_objects_are_refused(callback, message):
    with pytest.raises(ConfigError, match=message):
        check_callbacks([Callback(), callback])


def test_the_check_imports_neither_transformers_nor_torch():
    program = "from tokencredit.text.callbacks import Callback, check_callbacks\ncheck_callbacks([Callback()])"
    assert imported(program, "torch", "transformers") == []


def test_the_trainer_refuses_before_it_loads_anything():
    config = PPOConfig.from_dict({"model.name": "./nowhere"})
    with pytest.raises(ConfigError, match="did you mean after_rollout"):
        PPOTrainer(args=config, callbacks=[having("after_rolout")])


def test_the_trainer_calls_each_method_in_turn(tmp_path):
    called = []

    class Watcher(Callback):
        def after_iteration(self, trainer, metrics, samples):
            metrics["mine"] = 7.0
            called.append(("after_iteration", metrics["iteration"], len(samples)))

    def recorded(event):
        def method(self, trainer, **results):
            called.append((event, sorted(results)))

        return method

    for event in EVENTS:
        if event != "after_iteration":
            setattr(Watcher, event, recorded(event))
    settings = {"rollout": {"batch_size": 4, "max_new_tokens": 4}, "run.dir": str(tmp_path / "run"), "run.samples": 2}
    settings |= {"eval": {"every": 1, "samples": 2}, "ppo": {"epochs": 1, "minibatches": 1}, "run.iterations": 1}
    settings |= {"model.dtype": "float32"}
    trainer = PPOTrainer(args=PPOConfig.from_dict(settings), callbacks=[Watcher()])
    metrics, _ = trainer.iteration(1)
    assert called == [
        ("before_iteration", []),
        ("before_rollout", []),
        ("after_rollout", ["rollout"]),
        ("before_reference", []),
        ("after_reference", ["reference"]),
        ("before_reward", []),
        ("after_reward", ["scores"]),
        ("before_update", []),
        ("after_minibatch", ["metrics"]),
        ("after_update", ["metrics"]),
        ("before_evaluation", []),
        ("after_evaluation", ["metrics"]),
        ("after_iteration", 1, 2),
    ]
    assert metrics["mine"] == 7.0


@pytest.mark.parametrize("event", ["before_update", "after_iteration", *proofs("after_update", "before_evaluation")])
def test_an_iteration_whose_callback_fails_is_resumed_after_its_update(event, tmp_path):
    """As a run that was never stopped, whose iteration 2 lacks no more than its evaluation."""

    def fail(self, trainer, **results):
        if len(trainer.record.history) == 1 and failing:
            results.get("metrics", {})["mine"] = "no number"
            raise ValueError("mine")

    def trained(name, resume=False):
        settings = {"rollout": {"batch_size": 4, "max_new_tokens": 4}, "run.dir": str(tmp_path / name)}
        settings |= {"kl.target": 1.0, "eval": {"every": 1, "samples": 2}}
        settings |= {"model.dtype": "float32", "ppo": {"epochs": 1, "minibatches": 1}, "run.iterations": 3}
        settings |= {"critic.prefix_every": 0, "run.allow_changed": ["callbacks[0]"]}
        watcher = type("Watcher", (Callback,), {event: fail})() if name == "cut" and failing else Callback()
        return PPOTrainer(args=PPOConfig.from_dict(settings), callbacks=[watcher]).train(resume_from_checkpoint=resume)

    failing = False
    trained("whole")
    failing = True
    with pytest.raises(RunStopped, match=rf"stopped in iteration 2: {event} of the callback Watcher raised Val"):
        trained("cut")
    done = 1 if event == "before_update" else 2
    assert max(int(folder.name) for folder in (tmp_path / "cut" / "checkpoints").iterdir()) == done
    failing = False
    trained("cut", resume=True)
    rows, expected = metrics(tmp_path / "cut"), metrics(tmp_path / "whole")
    timed = ("seconds", "tokens_per_second")
    for row, other in zip(rows, expected, strict=True):
        same = {key: x for key, x in other.items() if not key.startswith(timed) and (key in row or "eval/" not in key)}
        assert {key: x for key, x in row.items() if not key.startswith(timed)} == same
    assert [row["iteration"] for row in rows if "eval/reward" not in row] == [2] * (
        event in ("after_update", "before_evaluation")
    )


def test_callbacks_may_be_none_or_any_iterable():
    callback = Callback()
    assert check_callbacks(None) == []
    assert check_callbacks(each for each in [callback]) == [callback]
    with pytest.raises(ConfigError, match=r"callbacks is <.*Callback.*>; it must be a list of callbacks"):
        check_callbacks(callback)


def test_a_callback_method_of_another_signature_is_refused():
    def wrong(event, method):
        return type("Mine", (Callback,), {event: method})()

    for event, method, told in (
        ("before_rollout", lambda self: None, "takes self, trainer"),
        ("after_rollout", lambda self, trainer: None, "takes self, trainer, rollout"),
        ("after_rollout", lambda self, trainer, batch: None, "takes self, trainer, rollout"),
        ("after_iteration", lambda self, trainer, metrics: None, "takes self, trainer, metrics, samples"),
        ("after_update", lambda self, trainer, metrics, more: None, "takes self, trainer, metrics"),
        ("after_update", 3, "which is 3; it must be a method"),
    ):
        with pytest.raises(ConfigError, match=rf"callbacks\[0\] \(Mine\) has .*{event}.*{told}$"):
            check_callbacks([wrong(event, method)])
    for event, method in (
        ("after_rollout", lambda self, trainer, **results: None),
        ("after_iteration", lambda self, trainer, samples, metrics, more=None: None),
        ("before_update", lambda self, *args: None),
        ("before_update", None),
    ):
        check_callbacks([wrong(event, method)])


@pytest.mark.parametrize(
    ("event", "change", "name"),
    [
        ("after_rollout", lambda rollout: setattr(rollout, "values", rollout.values + 1), "rollout.values"),
        ("after_rollout", lambda rollout: rollout.logprobs.mul_(2), "rollout.logprobs"),
        ("after_reward", lambda scores: scores.totals.__setitem__(0, 9.0), "scores.totals"),
        ("after_update", lambda metrics: metrics.update(policy_loss=0.0), "metrics.policy_loss"),
    ],
)
def test_a_callback_that_changes_what_it_is_given_stops_the_run(event, change, name, tmp_path):
    mine = type("Mine", (Callback,), {event: lambda self, trainer, **results: change(**results)})()
    trainer = PPOTrainer(args=text_config(tmp_path / "run"), callbacks=[mine])
    with pytest.raises(RunStopped, match=rf"{event} of the callback Mine changed {name}; it may add metrics"):
        trainer.iteration(1)
