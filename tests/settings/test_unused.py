"""A setting that would change nothing is refused by its key, from YAML, flags and Python alike."""

import json
import re
from dataclasses import asdict, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import yaml

from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import ROWS, Condition, flat, refuse_unused, settings_of
from tokencredit.settings.parts import OWN
from tokencredit.settings.reader import grouped
from tokencredit.settings.run_kind import CONTROL, OFFLINE, RUN_KINDS, TEXT
from tokencredit.settings.text import PPOConfig

FUNCTION = [{"function": "length"}]
DATA = {"prompts.dataset": "prompts.jsonl"}

# Kind of run, settings, the key that is refused, and why it has no effect beside the others.
UNUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("text", {"model.lora.alpha": 8.0}, "model.lora.alpha", "without model.lora.rank"),
    ("text", {"model.lora.dropout": 0.1}, "model.lora.dropout", "without model.lora.rank"),
    ("text", {"model.lora.target_modules": ["q_proj"]}, "model.lora.target_modules", "without model.lora.rank"),
    *[
        (
            "text",
            {"critic.kind": "separate", f"critic.lora.{key}": value},
            f"critic.lora.{key}",
            "without critic.lora.rank",
        )
        for key, value in [("alpha", 8.0), ("dropout", 0.1), ("target_modules", ["q_proj"])]
    ],
    ("reward-model", {"model.quantization": "nf4"}, "model.quantization", "without model.lora.rank"),
    *[
        ("reward-model", {f"model.lora.{key}": value}, f"model.lora.{key}", "without model.lora.rank")
        for key, value in [("alpha", 8.0), ("dropout", 0.1), ("target_modules", ["q_proj"])]
    ],
    *[
        (
            kind,
            {"model.quantization": "nf4", "model.adapter": "merge"},
            "model.quantization",
            "without model.adapter: continue",
        )
        for kind in ("text", "sft", "dpo")
    ],
    (
        "text",
        {"rollout.engine": "continuous", "rollout.cache": "dynamic"},
        "rollout.cache",
        "without rollout.engine: local",
    ),
    ("text", {"rollout.max_age": 1}, "rollout.max_age", "without rollout.engine: continuous"),
    ("text", {"rollout.engine_memory": 0.5}, "rollout.engine_memory", "without rollout.engine: vllm"),
    (
        "text",
        {"rollout.engine": "vllm", "rollout.server": "http://localhost:1", "rollout.engine_memory": 0.5},
        "rollout.engine_memory",
        "with rollout.server",
    ),
    ("text", {"rollout.server": "http://localhost:1"}, "rollout.server", "without rollout.engine: vllm"),
    *[
        ("text", {"rollout.engine": "vllm", f"rollout.{key}": value}, f"rollout.{key}", "without rollout.server")
        for key, value in [("server_folder", "weights"), ("server_timeout", 60.0)]
    ],
    ("text", {"critic.lr": 0.1, "critic.coef": 0.0}, "critic.lr", "without critic.coef or critic.epochs"),
    ("text", {"critic.detach": True, "critic.coef": 0}, "critic.detach", "without critic.coef or critic.epochs"),
    (
        "text",
        {"critic.detach": True, "critic.coef": 0, "critic.epochs": 1},
        "critic.detach",
        "without critic.kind: separate or critic.coef",
    ),
    ("text", {"critic.pretrain": 2, "critic.coef": 0}, "critic.pretrain", "without critic.coef or critic.epochs"),
    ("text", {"critic.loss": "histogram", "critic.coef": 0}, "critic.loss", "without critic.coef or critic.epochs"),
    ("text", {"critic.loss": "histogram", "critic.clip": 0.5}, "critic.clip", "without critic.loss: mse"),
    (
        "text",
        {"critic.prefix_every": 2, "critic.kind": "none", "advantage.estimator": "uniform"},
        "critic.prefix_every",
        "without advantage.estimator: one of your own and with critic.kind: none",
    ),
    *[
        (run_kind, {f"audit.{key}": value}, f"audit.{key}", "without audit.every")
        for run_kind, rows in {"text": "completions", "control": "episodes"}.items()
        for key, value in {rows: 8, "continuations": 4, "states": 2, "seconds": 1.0}.items()
    ],
    ("text", {"critic.trunk_lr": 0.1}, "critic.trunk_lr", "without critic.kind: separate"),
    (
        "text",
        {"critic.trunk_lr": 0.1, "critic.kind": "separate", "critic.detach": True},
        "critic.trunk_lr",
        "with critic.detach",
    ),
    (
        "text",
        {"critic.trunk_lr": 0.1, "critic.kind": "separate", "critic.coef": 0},
        "critic.trunk_lr",
        "without critic.coef or critic.epochs",
    ),
    ("text", {"critic.name": "reward-model"}, "critic.name", "without critic.kind: separate"),
    ("text", {"critic.head": "linear", "critic.activation": "relu"}, "critic.activation", "without critic.head: mlp"),
    *[
        (
            "text",
            {"critic.kind": "none", "advantage.estimator": "reward_to_go", f"critic.{key}": value},
            f"critic.{key}",
            "with critic.kind: none",
        )
        for key, value in [
            ("lr", 0.1),
            ("coef", 1.0),
            ("clip", None),
            ("pretrain", 2),
            ("layers", 1),
            ("head", "linear"),
            ("activation", "relu"),
            ("init", "zeros"),
            ("detach", True),
            ("epochs", 1),
            ("loss", "histogram"),
        ]
    ],
    ("text", DATA | {"prompts.text": "This movie was really"}, "prompts.text", "with prompts.dataset"),
    ("text", {"prompts.split": "test"}, "prompts.split", "without prompts.dataset"),
    ("text", {"prompts.config_name": "en"}, "prompts.config_name", "without prompts.dataset"),
    (
        "text",
        {"eval.dataset": "held-out.jsonl", "eval.text": "A"},
        "eval.text",
        "with eval.dataset",
    ),
    ("text", {"eval.split": "test"}, "eval.split", "without eval.dataset"),
    ("text", {"score.shift_mean": False}, "score.shift_mean", "with score.normalize: none"),
    *[
        (run_kind, {f"advantage.{key}": value}, f"advantage.{key}", f"without advantage.estimator: {needs}")
        for run_kind, adaptive in (("text", ", length_adaptive_gae"), ("control", ""))
        for key, value, needs in [
            ("lam_returns", 0.5, f"decoupled_gae{adaptive}, one of your own"),
            ("alpha", 0.1, f"{adaptive}, one of your own".removeprefix(", ")),
            ("n", 3, "n_step"),
        ]
    ],
    ("text", {"advantage.kwargs": {"tau": 1.0}}, "advantage.kwargs", "without advantage.estimator: one of your own"),
    ("control", {"advantage.kwargs": {"tau": 1.0}}, "advantage.kwargs", "without advantage.estimator: one of your own"),
    ("text", {"ppo.kwargs": {"width": 1.0}}, "ppo.kwargs", "without ppo.loss: one of your own"),
    ("control", {"ppo.kwargs": {"width": 1.0}}, "ppo.kwargs", "without ppo.loss: one of your own"),
    ("text", {"critic.kwargs": {"width": 1.0}}, "critic.kwargs", "without critic.kind: one of your own"),
    ("text", {"advantage.scale": False}, "advantage.scale", "without advantage.estimator: group_relative"),
    (
        "text",
        {"critic.kind": "none", "advantage.estimator": "reward_to_go", "advantage.bootstrap": True},
        "advantage.bootstrap",
        "with critic.kind: none",
    ),
    *[
        (
            run_kind,
            {"advantage.estimator": "td", "advantage.lam": 0.5},
            "advantage.lam",
            "without advantage.estimator: gae",
        )
        for run_kind in ("text", "control")
    ],
    (
        "text",
        {"advantage.estimator": "uniform", "critic.kind": "none", "advantage.gamma": 0.9},
        "advantage.gamma",
        "without advantage.estimator: gae, td",
    ),
    *[
        (
            "control",
            {"algorithm": "policy_gradient", f"ppo.{key}": value},
            f"ppo.{key}",
            "with algorithm: policy_gradient",
        )
        for key, value in [
            ("epochs", 8),
            ("minibatches", 2),
            ("clip", 0.1),
            ("clip_high", 0.3),
            ("dual_clip", 3.0),
            ("target_kl", 0.1),
        ]
    ],
    *[
        (
            "text",
            {"ppo.loss": loss, f"ppo.{key}": value} | ({"ppo.clip": 3e-4} if loss == "gspo" else {}),
            f"ppo.{key}",
            f"without ppo.loss: {needs}",
        )
        for loss, key, value, needs in [
            ("gspo", "dual_clip", 3.0, "clip"),
            ("cispo", "dual_clip", 3.0, "clip"),
            ("dppo_tv", "dual_clip", 3.0, "clip"),
            ("dppo_tv", "clip", 0.1, "clip, gspo, cispo, sao"),
            ("dppo_kl", "clip_high", 0.3, "clip, gspo, cispo, sao"),
            ("clip", "divergence_limit", 0.1, "dppo_tv, dppo_kl"),
            ("cispo", "divergence_limit", 0.1, "dppo_tv, dppo_kl"),
        ]
    ],
    (
        "text",
        {"ppo.loss": "cispo", "ppo.clip": 0.1, "ppo.clip_high": 4.0},
        "ppo.clip",
        "with ppo.loss: cispo and ppo.clip_high",
    ),
    *[
        ("text", {f"off_policy.{key}": value}, f"off_policy.{key}", "with off_policy.correct: none")
        for key, value in [("level", "sequence"), ("bounds", [0.5, 2.0])]
    ],
    (
        "text",
        {"off_policy.correct": "clip", "off_policy.proximal": "behavior"},
        "off_policy.correct",
        "without off_policy.proximal: recomputed, interpolated",
    ),
    (
        "text",
        {
            "rollout.engine": "continuous",
            "rollout.max_age": 2,
            "off_policy.proximal": "interpolated",
            "off_policy.correct": "clip",
            "off_policy.level": "sequence",
        },
        "off_policy.level",
        "with off_policy.proximal: interpolated",
    ),
    *[
        ("text", {"off_policy.support": "truncated"} | settings, "off_policy.support", why)
        for settings, why in [
            ({"rollout.top_k": 20}, "without off_policy.proximal: behavior"),
            ({"rollout.top_p": 0.9, "off_policy.proximal": "behavior"}, "without rollout.top_k"),
            (
                {"rollout.engine": "continuous", "rollout.top_k": 20, "off_policy.proximal": "behavior"},
                "without rollout.engine: local",
            ),
        ]
    ],
    ("text", {"kl.coef": 0.0, "kl.place": "loss"}, "kl.place", "without kl.coef"),
    ("text", {"kl.coef": 0.0, "kl.estimator": "k3"}, "kl.estimator", "without kl.coef"),
    ("text", {"kl.coef": 0.0, "kl.horizon": 100.0}, "kl.horizon", "without kl.target"),
    ("text", {"kl.horizon": 100.0}, "kl.horizon", "without kl.target"),
    ("text", {"kl.error_clip": 1.0}, "kl.error_clip", "without kl.target"),
    *[
        (
            run_kind,
            {"optim.schedule": "constant", "optim.final_scale": 0.5},
            "optim.final_scale",
            "with optim.schedule: constant",
        )
        for run_kind in RUN_KINDS
    ],
    *[
        (
            run_kind,
            {"optim.max_grad_norm": None, "optim.grad_norm": "max"},
            "optim.grad_norm",
            "without optim.max_grad_norm",
        )
        for run_kind in RUN_KINDS
    ],
    *[
        (run_kind, {f"model.lora.{key}": value}, f"model.lora.{key}", "without model.lora.rank")
        for run_kind in ("sft", "dpo")
        for key, value in {"alpha": 8.0, "dropout": 0.1, "target_modules": ["q_proj"]}.items()
    ],
    *[
        (run_kind, settings, key, why)
        for run_kind in ("sft", "reward-model", "dpo")
        for settings, key, why in [
            ({"data.template": "{{ a }}", "data.column": "b"}, "data.column", "with data.template"),
            ({"data.held_out": 0.1, "eval.dataset": "a.jsonl"}, "data.held_out", "with eval.dataset"),
            ({"data.split": "test"}, "data.split", "without data.dataset"),
            ({"data.config_name": "en"}, "data.config_name", "without data.dataset"),
            ({"eval.split": "test"}, "eval.split", "without eval.dataset"),
            ({"eval.config_name": "en"}, "eval.config_name", "without eval.dataset"),
            ({"data.epochs": 2.0, "run.iterations": 5}, "run.iterations", "with data.epochs"),
        ]
    ],
    ("dpo", {"dpo.label_noise": 0.2}, "dpo.label_noise", "without dpo.loss: robust"),
    ("text", {"kl.coef": 0.0, "stop.kl": 5.0}, "stop.kl", "without kl.coef"),
    ("text", {"stop.patience": 3}, "stop.patience", "without stop.reward or stop.kl"),
    ("control", {"stop.patience": 3}, "stop.patience", "without stop.reward"),
    ("text", {"run.samples": 0, "run.show_every": 2}, "run.show_every", "without run.samples"),
    *[
        ("text", {f"sharding.{key}": value}, f"sharding.{key}", "with run.shard: none")
        for key, value in [
            ("layers", ["transformer.h.*"]),
            ("reshard_after_forward", False),
            ("offload", "frozen"),
            ("sampling", "layers"),
        ]
    ],
    (
        "control",
        {"critic.kind": "none", "advantage.estimator": "reward_to_go", "advantage.bootstrap": False},
        "advantage.bootstrap",
        "with critic.kind: none",
    ),
    ("control", {"env.clip": 5.0}, "env.clip", "without env.normalize_observations or env.normalize_rewards"),
    ("control", {"agent.hidden": [], "agent.activation": "relu"}, "agent.activation", "without agent.hidden"),
    ("control", {"agent.context": 4}, "agent.context", "without agent.policy: transformer"),
    ("control", {"agent.heads": 2}, "agent.heads", "without agent.policy: transformer"),
    ("control", {"eval.homework_tags": True}, "eval.homework_tags", "without eval.every"),
    *[
        (
            "control",
            {"eval.episodes": 0, f"eval.{key}": value},
            f"eval.{key}",
            "without eval.episodes or eval.videos",
        )
        for key, value in [("every", 5), ("greedy", False)]
    ],
    *[
        (
            "control",
            {"critic.kind": "none", "advantage.estimator": "reward_to_go", f"critic.{key}": value},
            f"critic.{key}",
            "with critic.kind: none",
        )
        for key, value in [("lr", 0.1), ("coef", 0.5), ("clip", None), ("epochs", 1)]
    ],
]
FROM_PYTHON = {
    "prompts.column": "question",
    "prompts.template": "question",
}
"""Settings that rows given from Python may read; the commands refuse them."""
OF_TURNS = {
    "env.max_turns": 3,
    "env.turn_tokens": 5,
    "env.observation_tokens": 5,
    "env.timeout": 5.0,
    "advantage.unit": "turn",
}
"""Settings that an environment or tools given from Python may read; the commands refuse them."""

COLUMNS = ("run_kind", "settings", "key", "why")
IDS = [f"{run_kind}-{'-'.join(map(str, settings))}" for run_kind, settings, _, _ in UNUSED]
pairs = pytest.mark.parametrize(COLUMNS, UNUSED, ids=IDS)
FIRST = {run_kind: number for number, (run_kind, *_) in reversed(list(enumerate(UNUSED)))}
first_pairs = pytest.mark.parametrize(
    COLUMNS,
    [
        pytest.param(*row, marks=[] if number == FIRST[row[0]] else pytest.mark.proof)
        for number, row in enumerate(UNUSED)
    ],
    ids=IDS,
)
"""The first of each kind of run; the others are left to the proofs, since a file is parsed as flags are."""


def built(kind, settings):
    """A configuration as a program makes it: from the classes of its groups."""
    hints, given = get_type_hints(kind), {}
    for name, value in settings.items():
        option = next((o for o in (hints[name], *get_args(hints[name])) if is_dataclass(o)), None)
        if get_origin(hints[name]) is list and option is not None:
            value = [built(option, entry) for entry in value]
        elif option is not None:
            value = built(option, value)
        given[name] = value
    return kind(**given)


def in_python(kind, settings):
    """The same, but with the fields set afterwards, and checked when the trainer is made."""
    config = kind()
    for key, value in flat(settings).items() if "reward" not in settings else ():
        *groups, name = key.split(".")
        group = config
        for part in groups:
            owner, at, group = group, part, getattr(group, part)
        setattr(owner, at, {name: value}) if isinstance(group, dict) else setattr(group, name, value)
    if "reward" in settings:
        config.reward = built(kind, settings).reward
    return replace(config)


def flags(settings):
    """The same settings as arguments of the command."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


def check_message(text, key, why):
    assert re.match(rf"{re.escape(key)} is .*, which has no effect {re.escape(why)}\b.*; leave it out$", text), text


@pytest.mark.slow
@first_pairs
def test_a_setting_that_changes_nothing_is_refused_from_yaml(run_kind, settings, key, why, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(grouped(RUN_KINDS[run_kind].config, settings.items())))
    assert main([RUN_KINDS[run_kind].command, "--config", str(file)]) == 2
    check_message(capsys.readouterr().err.removeprefix("tokencredit: ").strip(), key, why)


@pytest.mark.slow
@pairs
def test_a_setting_that_changes_nothing_is_refused_from_flags(run_kind, settings, key, why, capsys):
    assert main([RUN_KINDS[run_kind].command, *flags(settings)]) == 2
    check_message(capsys.readouterr().err.removeprefix("tokencredit: ").strip(), key, why)


@pairs
@pytest.mark.parametrize("way", [built, in_python])
def test_a_setting_that_changes_nothing_is_refused_from_python(run_kind, settings, key, why, way):
    with pytest.raises(ConfigError) as caught:
        way(RUN_KINDS[run_kind].config, grouped(RUN_KINDS[run_kind].config, settings.items()))
    check_message(str(caught.value), key, why)


def test_the_message_says_what_to_do():
    with pytest.raises(ConfigError) as caught:
        PPOConfig.from_dict({"kl.horizon": 100})
    assert str(caught.value) == "kl.horizon is 100.0, which has no effect without kl.target; leave it out"


def test_every_setting_with_a_need_stands_in_the_table():
    tested = {(run_kind, re.sub(r"\[\d+\]", "[]", key)) for run_kind, _, key, _ in UNUSED}
    declared = {
        (name, key)
        for name, run_kind in RUN_KINDS.items()
        for key, rule in settings_of(run_kind.config).items()
        if rule.needs
    }
    # Estimators and algorithms that only the other kind of run has; a value is always its default; rows from Python.
    never = {("text", f"ppo.{key}") for key in ("epochs", "minibatches", "target_kl")}
    never.add(("control", "advantage.gamma"))
    never |= {(run_kind.name, "eval.every") for run_kind in OFFLINE}  # rows from Python; tests/text/offline
    assert declared - tested - never == {("text", key) for key in flat(FROM_PYTHON | OF_TURNS)}


@pytest.mark.parametrize("run_kind", RUN_KINDS.values(), ids=list(RUN_KINDS))
def test_every_need_names_settings_and_choices_that_there_are(run_kind):
    other = CONTROL if run_kind is TEXT else TEXT
    known, rules = flat(asdict(run_kind.config())), settings_of(run_kind.config)
    somewhere = {**flat(asdict(other.config())), **rules, **dict.fromkeys(ROWS)}
    for key, rule in rules.items():
        for need in rule.needs:
            for text in need.split(" or "):
                condition = Condition.read(text, known | dict.fromkeys(rules), key[: key.rfind(".") + 1])
                assert condition.key in known or condition.key in somewhere, (key, text)
                for value in condition.values:
                    settings = {condition.key: value}
                    if condition.key in known and condition.key not in ("ppo.minibatches", "advantage.lam"):
                        assert value in [*choices(run_kind.config, condition.key), OWN], (key, text, settings)


def choices(kind, key):
    group, _, name = key.partition(".")
    hint = get_type_hints(kind, include_extras=True)[group]
    options = [value for option in get_args(hint) for value in get_args(option) or [option]]
    return options if not name else choices(hint, name)


def test_a_default_passes_whatever_it_stands_beside():
    """Also the default of a group by itself, where the whole configuration's is another."""
    assert ControlConfig.from_dict({"optim.schedule": "constant", "optim.final_scale": 0.1}).optim.final_scale == 0.1
    assert ControlConfig.from_dict({"optim.schedule": "constant", "optim.final_scale": 0.0}).optim.final_scale == 0.0
    assert PPOConfig.from_dict({"kl.coef": 0, "kl.place": "reward"}).kl.place == "reward"


@pytest.mark.parametrize(
    ("run_kind", "settings"),
    [
        (
            "text",
            {"eval.samples": 8, "eval.best_of": 2, "eval.text": "A"},
        ),  # `tokencredit evaluate` reads them
        ("text", {"run.save_every": 0, "run.keep_last": 1}),  # a run that is stopped writes a checkpoint
        ("text", {"critic.coef": 0.0, "critic.clip": None}),  # the metric is that loss
        ("text", {"critic.coef": 0.0, "critic.lr": 0.1, "critic.epochs": 2}),  # its own steps
        ("text", {"prompts.chat_template_kwargs": {"a": 1}}),  # `tokencredit generate --chat`
        ("text", {"rollout.stop_at_eos": False, "rollout.min_new_tokens": 4}),  # ends are not drawn before
    ],
)
def test_a_setting_with_some_effect_passes(run_kind, settings):
    config = RUN_KINDS[run_kind].config.from_dict(settings)
    refuse_unused(config, rows=())
    assert flat(settings).items() <= flat(asdict(config)).items()


@pytest.mark.parametrize("settings", [{key: value} for key, value in FROM_PYTHON.items()], ids=list(FROM_PYTHON))
def test_a_column_needs_rows(settings, capsys):
    group = next(iter(flat(settings))).rpartition(".")[0]
    refused_by_commands(settings, f"{group}.dataset or eval.dataset or train_dataset or eval_dataset", capsys)


@pytest.mark.parametrize("settings", [{key: value} for key, value in OF_TURNS.items()], ids=list(OF_TURNS))
def test_a_setting_of_turns_needs_an_environment_or_tools(settings, capsys):
    needs = "env.factory or tools or environment_factory"
    refused_by_commands(settings, needs, capsys)


def refused_by_commands(settings, needs, capsys):
    config = PPOConfig.from_dict(settings)  # for arguments from Python
    (key, value), *_ = flat(settings).items()
    told = f"{key} is {value!r}, which has no effect without {needs}; leave it out"
    with pytest.raises(ConfigError) as caught:
        refuse_unused(config, rows=())
    assert str(caught.value) == told
    assert main(["train", *flags(settings)]) == 2
    assert capsys.readouterr().err == f"tokencredit: {told}\n"
