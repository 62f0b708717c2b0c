"""The audit of texts: against a policy of five tokens whose values are known exactly, and in every kind of run."""

import json
import random
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from helpers.commands import refused
from helpers.configs import quiet, text_config
from helpers.files import TIMES, drop_keys, read_metrics
from helpers.proofs import proofs
from helpers.warm import together
from helpers.words import END, PROMPT, WORTH, model, tokenizer
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.report.reading import read_run, with_audit
from tokencredit.runs.folder import RunFolder
from tokencredit.settings.data import PromptsConfig, ScoreConfig
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import read_config
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, AuditConfig, KLConfig, OptimConfig, UpdateConfig
from tokencredit.text.audit.completion_auditor import AuditTooSmall
from tokencredit.text.audit.continuations import batch_by_position
from tokencredit.text.audit.cost import Pace, expected
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.audit_run import audit_completions
from tokencredit.user_code.user_objects import load_object

pytestmark = pytest.mark.slow

LENGTH = 4


def whole(completion_ids, **_):
    """A score of the whole completion, which no sum over tokens gives."""
    return [score(ids) for ids in completion_ids]


def score(ids):
    return float(WORTH[ids].sum() + (0.7 if 1 in ids and 2 in ids else 0.0) * len(ids))


def dense(completion_ids, **_):
    """A number per token, which depends on the tokens before it."""
    return [[paid(ids[: t + 1]) for t in range(len(ids))] for ids in completion_ids]


def paid(ids):
    return float(WORTH[ids[-1]]) * len(set(ids))


def trainer_of(folder, reward=whole, **changes):
    """A trainer whose policy has moved away from its reference."""
    groups = {
        "model": ModelConfig(dtype="float32"),
        "prompts": PromptsConfig(text="a b"),
        "rollout": RolloutConfig(batch_size=8, max_new_tokens=LENGTH),
        "ppo": UpdateConfig(epochs=1, minibatches=1),
        "kl": KLConfig(coef=0.3),
        "audit": AuditConfig(every=1, completions=2, continuations=40, states=None),
        "run": quiet(folder, 2),
    }
    trainer = PPOTrainer(model(), reward, PPOConfig(**(groups | changes)), processing_class=tokenizer())
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            if parameter.requires_grad:
                parameter += 0.15 * torch.randn_like(parameter)
    return trainer


@torch.no_grad()
def exact(trainer, reward, gamma):
    """V of each prefix, and Q of each of its tokens, by going through all completions from their ends."""
    prefixes = [p for n in range(LENGTH) for p in product(range(5), repeat=n) if END not in p]
    log_p, log_ref = {}, {}
    for n in range(LENGTH):
        rows = [p for p in prefixes if len(p) == n]
        ids = torch.tensor([[*PROMPT, *p] for p in rows])
        for found, lm in ((log_p, trainer.policy.lm), (log_ref, trainer.reference.lm)):
            found.update(zip(rows, lm(ids).logits[:, -1].double().log_softmax(-1), strict=True))
    values, actions = {}, {}
    for prefix in sorted(prefixes, key=len, reverse=True):
        q = -trainer.credit.kl.coef * (log_p[prefix] - log_ref[prefix])
        for token in range(5):
            ids = [*prefix, token]
            over = token == END or len(ids) == LENGTH
            q[token] += paid(ids) if reward is dense else score(ids) * over
            q[token] += 0.0 if over else gamma * values[tuple(ids)]
        values[prefix], actions[prefix] = float((log_p[prefix].exp() * q).sum()), q
    return values, actions


@pytest.mark.parametrize("seeds", [5, *proofs(25)])
def test_the_audit_is_within_its_standard_error_of_the_exact_values(seeds, tmp_path, covered):
    """Over many seeds, with scores of whole texts and of tokens, with and without a discount, and the price of KL."""
    errors = {"values": [], "advantages": []}
    for number, (reward, gamma) in enumerate(product((whole, dense), (1.0, 0.9))):
        more = {
            "advantage": AdvantageConfig(gamma=gamma),
            "rollout": RolloutConfig(batch_size=64, max_new_tokens=LENGTH),
        }
        trainer = trainer_of(tmp_path / str(number), reward, **more)
        values, actions = exact(trainer, reward, gamma)
        for seed in range(seeds):
            audit = trainer.auditor.audit(25 * number + seed)
            ids, mask = audit.batch.rollout.response_ids, audit.batch.rollout.mask
            for row in range(len(audit.rows)):
                tokens = ids[row][mask[row]].tolist()
                for at, token in enumerate(tokens):
                    prefix, truth = tuple(tokens[:at]), audit.truth
                    value, action = values[prefix], float(actions[prefix][token])
                    errors["values"].append(float((truth.values[row, at] - value) / truth.value_errors[row, at]))
                    error = truth.advantages[row, at] - (action - value)
                    errors["advantages"].append(float(error / truth.advantage_errors[row, at]))
    for found in errors.values():
        covered(found)


@torch.no_grad()
def test_with_a_bootstrap_a_cut_completion_is_worth_its_rewards_and_the_critics_value(tmp_path):
    """For the last token that is Q itself, and no continuation is needed."""
    settings = AuditConfig(every=1, completions=20, continuations=2, states=None)
    trainer = trainer_of(tmp_path, dense, advantage=AdvantageConfig(gamma=0.9, bootstrap=True), audit=settings)
    audit = trainer.auditor.audit(1)
    scored, policy = audit.batch, trainer.policy
    cut = scored.rollout.truncated.nonzero()[:, 0].tolist()
    assert cut
    for row in cut:
        ids = scored.rollout.response_ids[row].tolist()
        hidden = policy.lm.transformer(torch.tensor([[*PROMPT, *ids]])).last_hidden_state[:, -1]
        kl = policy.lm(torch.tensor([[*PROMPT, *ids]])).logits.log_softmax(-1)[0, -2, ids[-1]]
        kl -= trainer.reference.lm(torch.tensor([[*PROMPT, *ids]])).logits.log_softmax(-1)[0, -2, ids[-1]]
        q = float(audit.truth.advantages[row, -1] + audit.truth.values[row, -1])
        assert abs(float(policy.critic(hidden))) > 0.01
        assert q == pytest.approx(paid(ids) - 0.3 * float(kl) + 0.9 * float(policy.critic(hidden)), abs=1e-4)


NO_CRITIC = CriticConfig(kind="none")
KINDS = {
    "shared, overlong": {"score": ScoreConfig(overlong=[2, 0.5], missing_eos_penalty=0.3)},
    "separate, full": {
        "critic": CriticConfig(kind="separate"),
        "kl": KLConfig(coef=0.3, place="both", estimator="full"),
    },
    "lora, loss": {
        "model": ModelConfig(dtype="float32", lora=LoraConfig(rank=2)),
        "kl": KLConfig(coef=0.3, place="loss", estimator="k3"),
    },
    "none, alone": {
        "critic": NO_CRITIC,
        "advantage": AdvantageConfig(estimator="reward_to_go"),
        "kl": KLConfig(coef=0.0),
    },
    "uniform": {"critic": NO_CRITIC, "advantage": AdvantageConfig(estimator="uniform")},
    "groups": {
        "critic": NO_CRITIC,
        "advantage": AdvantageConfig(estimator="group_relative"),
        "rollout": RolloutConfig(batch_size=8, per_prompt=4, max_new_tokens=LENGTH),
    },
    "dense, λ 0.9": {"reward": dense, "advantage": AdvantageConfig(lam=0.9)},
    "dense, bootstrap": {"reward": dense, "advantage": AdvantageConfig(bootstrap=True)},
    "running, filters": {
        "score": ScoreConfig(normalize="running"),
        "rollout": RolloutConfig(batch_size=8, max_new_tokens=LENGTH, top_k=3, min_new_tokens=2),
    },
    "batch, bfloat16": {
        "score": ScoreConfig(normalize="batch", shift_mean=True),
        "model": ModelConfig(dtype="bfloat16"),
    },
}


DAILY = ("shared, overlong", "separate, full", "lora, loss", "dense, bootstrap", "running, filters")


@pytest.mark.parametrize("kind", [*DAILY, *proofs(*(kind for kind in KINDS if kind not in DAILY))])
def test_every_kind_of_run_is_audited_and_left_as_it_was(kind, tmp_path):
    trainer = trainer_of(tmp_path, **KINDS[kind], audit=AuditConfig(every=1, completions=6, continuations=4))
    trainer.credit.give(trainer.collect())  # running means stand somewhere
    before = json.dumps(trainer._loop_state(), default=str)
    weights = {name: x.clone() for name, x in trainer.policy.state_dict().items()}
    audit = trainer.auditor.audit(3)
    assert json.dumps(trainer._loop_state(), default=str) == before
    assert all(torch.equal(x, weights[name]) for name, x in trainer.policy.state_dict().items())
    shown, advantages = next(iter(audit.advantages.items()))
    torch.testing.assert_close(advantages, audit.batch.advantages[audit.rows], atol=2e-6, rtol=1e-5)
    found, known = audit.judge(trainer.processes), audit.truth.values.isfinite()
    assert (found["critic"] is None) == (trainer.policy.critic is None)
    assert found["credit"]["shown"] == shown
    assert found["credit"]["tokens"] == known.sum() > 6
    assert not (known & ~audit.batch.rollout.mask[audit.rows]).any()
    assert all(x["correlation"].keys() == {"value", "low", "high"} for x in found["credit"]["estimators"].values())
    samples = audit.samples(trainer.tokenizer)
    for row, sample in enumerate(samples):
        length = len(sample["tokens"])
        assert [x is not None for x in sample["true_values"]] == known[row, :length].tolist()
        assert len(sample["true_advantage_errors"]) == length
    again = trainer.auditor.audit(3)
    assert audit.samples(trainer.tokenizer) == again.samples(trainer.tokenizer), "the same number, the same audit"
    assert samples != trainer.auditor.audit(4).samples(trainer.tokenizer)


def test_group_estimators_are_compared_though_the_run_samples_one_completion_per_prompt(tmp_path):
    trainer = trainer_of(tmp_path, rollout=RolloutConfig(batch_size=6, max_new_tokens=LENGTH))
    audit = replace(trainer.auditor, group=4).audit(1)
    assert len(audit.batch.scores) == 8
    assert audit.rows == [0, 4]
    scores = audit.batch.scores.view(2, 4)
    rest = (scores.sum(1) - scores[:, 0]) / 3
    kl = trainer.credit._rewards(audit.batch, audit.batch.scores)[1].sum(1).view(2, 4)
    rest_kl = (kl.sum(1) - kl[:, 0]) / 3
    expected = scores[:, 0] + kl[:, 0] - rest - rest_kl
    torch.testing.assert_close(audit.advantages["leave_one_out"][:, 0], expected)


def test_a_running_baseline_is_the_one_that_the_run_would_subtract(tmp_path):
    """That of earlier batches, in which the audited completions themselves have no part."""
    kind = KINDS["uniform"] | {"kl": KLConfig(coef=0.0)}
    trainer = trainer_of(tmp_path, **kind)
    trainer.credit.give(trainer.collect())
    audit = trainer.auditor.audit(1)
    expected = audit.batch.scores - trainer.credit.baseline.mean
    torch.testing.assert_close(audit.advantages["uniform"][:, 0], expected[audit.rows])


@pytest.mark.parametrize("normalize", ["running", "batch"])
def test_the_truth_is_on_the_scale_of_the_runs_scores(normalize, tmp_path):
    trainers = {
        name: trainer_of(tmp_path / name, score=ScoreConfig(normalize=name, **shift), kl=KLConfig(coef=0.0))
        for name, shift in (("none", {}), (normalize, {"shift_mean": True}))
    }
    plain, scaled = (trainer.auditor.audit(1) for trainer in trainers.values())
    scores = plain.batch.scores.double()
    mean, deviation = scores.mean(), scores.std(correction=0)
    close = {"equal_nan": True, "rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(scaled.truth.values, (plain.truth.values - mean) / deviation, **close)
    torch.testing.assert_close(scaled.truth.advantages, plain.truth.advantages / deviation, **close)
    assert trainers[normalize].credit.scores.state_dict() == trainer_of(tmp_path / "new").credit.scores.state_dict()


SAMPLING = {
    "plain": {},
    "stop": {"stop": ["a b", "c c"]},
    "stop and min": {"stop": ["a b", "c"], "min_new_tokens": 3},
    "min": {"min_new_tokens": 5},
    "no end": {"stop_at_eos": False},
    "filters": {"top_k": 3, "top_p": 0.9, "temperature": 0.7},
    "min_p": {"min_p": 0.2},
}


@pytest.mark.parametrize("name", ["stop and min", "filters", "min_p", *proofs("plain", "stop", "min", "no end")])
def test_continuations_sample_as_the_completion_was_sampled(name, tmp_path):
    """The same tokens, ends and log-probs from the same random numbers, wherever sampling sets in."""
    trainer = trainer_of(tmp_path)
    settings, engine = RolloutConfig(max_new_tokens=8, **SAMPLING[name]), trainer.pipeline.engine
    prompts = Prompts(["a b", "c", "d d a"], trainer.tokenizer).batch(0, 30)
    uniforms = torch.rand(30, 8, generator=torch.Generator().manual_seed(7))
    whole = engine.generate(prompts, settings, uniforms)
    lengths = whole.mask.sum(1)
    assert len(lengths.unique()) > 1 or name == "no end"
    for first in range(int(lengths.max())):
        at = (first + torch.arange(30)) % lengths  # rows begin at different places
        begun = [ids[:count] for ids, count in zip(whole.response_ids, at, strict=True)]
        part = engine.generate(prompts, settings, uniforms, 1, begun)
        for x in ("response_ids", "mask", "truncated"):
            assert torch.equal(getattr(part, x), getattr(whole, x)), (x, first)
        new = part.mask & (torch.arange(part.mask.shape[1]) >= at.unsqueeze(1))
        for x in ("logprobs", "values"):
            torch.testing.assert_close(getattr(part, x)[new], getattr(whole, x)[new], atol=1e-5, rtol=1e-5)


def test_states_are_batched_by_position():
    at = torch.tensor([5, 0, 9, 1, 6, 0])
    parts = [at[part].tolist() for part in batch_by_position(at, 3, None)]
    assert parts == [[0, 0, 1], [5, 6, 9]]
    assert [at[part].tolist() for part in batch_by_position(at, 3, 1)] == [[0, 0, 1], [5, 6], [9]]
    assert [at[part].tolist() for part in batch_by_position(at, 9, 0)] == [[0, 0], [1], [5], [6], [9]]
    assert batch_by_position(at[:0], 3, 0) == []


@pytest.mark.parametrize("spare", [0, 2])
def test_continuations_stay_within_the_context(spare, tmp_path):
    """GPT-Neo's attention has a fixed number of keys, padding included."""
    shape = {"vocab_size": 5, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
    context = len(PROMPT) + 12 + spare
    config = GPTNeoConfig(**shape, max_position_embeddings=context, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    args = PPOConfig(
        model=ModelConfig(dtype="float32"),
        prompts=PromptsConfig(text="a b"),
        rollout=RolloutConfig(batch_size=64, max_new_tokens=12),
        audit=AuditConfig(every=1, completions=8, continuations=8, states=None),
        run=quiet(tmp_path),
    )
    trainer = PPOTrainer(GPTNeoForCausalLM(config).eval(), whole, args, processing_class=tokenizer())
    audit = trainer.auditor.audit(1)
    assert audit.continuations == 8
    assert not audit.truth.values[audit.batch.rollout.mask[audit.rows]].isnan().any()


def noisy(completion_ids, **_):
    """A reward that draws from a generator of nobody's."""
    return [score(ids) + random.random() + float(torch.rand(())) for ids in completion_ids]


def test_a_run_with_audits_is_bit_for_bit_the_run_without(tmp_path):
    runs = []
    for every in (0, 1):
        settings = AuditConfig(every=1, completions=2, continuations=3) if every else AuditConfig()
        trainer = trainer_of(tmp_path / str(every), noisy, audit=settings, optim=OptimConfig(lr=1e-2))
        trainer.train()
        rows = read_metrics(tmp_path / str(every))
        assert ["audit/noise" in row for row in rows] == [bool(every)] * 2
        runs.append((drop_keys(rows, *TIMES, "audit/"), [p.tolist() for p in trainer.policy.parameters()]))
    assert runs[0] == runs[1]


def test_a_time_limit_leaves_fewer_continuations(tmp_path):
    settings = AuditConfig(every=1, completions=4, continuations=400, states=None, seconds=1e-6)
    trainer = trainer_of(tmp_path, audit=settings)
    audit = trainer.auditor.audit(1)
    assert audit.continuations == 4
    assert audit.record(1, settings, trainer.pipeline)["limits"] == {"seconds": 1e-6}
    assert 0 < audit.truth.values.isfinite().sum() < audit.batch.rollout.mask[audit.rows].sum()


@pytest.mark.parametrize(("name", "limit"), [("calls", 60), ("tokens", 150)])
def test_reward_calls_and_tokens_are_counted_and_stay_within_their_limits(name, limit, tmp_path):
    scored = []

    def counted(completion_ids, **_):
        scored.extend(completion_ids)
        return whole(completion_ids)

    size = AuditConfig(every=1, completions=4, continuations=40, states=None)
    trainer = trainer_of(tmp_path, counted, audit=replace(size, **{name: limit}))
    audit = trainer.auditor.audit(1)
    assert audit.cost.calls == len(scored)
    assert audit.truth.values.isfinite().any()
    assert limit / 2 < getattr(audit.cost, name) <= limit
    unlimited = replace(trainer.auditor, settings=size).audit(1)
    assert getattr(unlimited.cost, name) > limit
    assert unlimited.cost.calls <= expected(size, 1, Pace(LENGTH, None)).calls, "some completions are shorter"
    with pytest.raises(ConfigError, match=rf"audit.{name} is 3; it must be at least \d+, for the 4 completions whose"):
        trainer_of(tmp_path / "few", audit=replace(size, **{name: 3}))


def test_an_audit_whose_limit_leaves_no_continuation_is_skipped(tmp_path):
    trainer = trainer_of(tmp_path, audit=AuditConfig(every=1, completions=4, calls=4))
    with pytest.raises(AuditTooSmall, match=r"^audit\.calls is 4, which leaves no continuation; raise it, or lower"):
        trainer.auditor.audit(1)
    assert trainer.train().stopped_by == "iterations"
    assert not (tmp_path / "run" / "audit.json").exists()


def test_the_cost_of_an_audit_by_hand():
    """4 completions of 10 tokens in groups of 2; the two audited tokens have 4 states, each with 5 continuations."""
    size = AuditConfig(completions=4, states=2, continuations=5)
    pace = Pace(length=10, passes=0.1, reward=1.0, prefixes=0.5)
    assert expected(size, 2, pace) == pytest.approx((8 + 80, (8 + 40) * 10, 48 * 0.1 + 88 + 8 * 0.5))
    assert expected(size, 2, pace, prefix_every=5).calls == 8 + 80 + 8 * 2
    assert expected(replace(size, states=None), 2, pace).calls == 8 + 4 * 10 * 5
    halves = {"calls": 8 + 40, "tokens": (8 + 20) * 10, "seconds": 8 * 1.6 + 40 * 1.05}
    for limit in halves.items():
        assert expected(replace(size, **dict([limit])), 2, pace) == pytest.approx(tuple(halves.values()))
    rows = [{"seconds/rollout": 8.0, "seconds/reward": 16.0, "length": 12.0}] * 3
    assert Pace.of(rows, 16, 24) == (12.0, 0.5, 1.0, 0.0, 0.5)
    assert Pace.of([], 16, 24) == (24, None, 0.0, 0.0, 0.5)


TOGETHER = """
import json, sys, torch
from pathlib import Path
sys.path[:0] = {folders!r}
from test_texts import AuditConfig, exact, trainer_of, whole
settings = AuditConfig(every=1, completions=5, continuations=30, states=None)
trainer = trainer_of({run!r}, audit=settings)
audit = trainer.auditor.audit(2)
found = audit.judge(trainer.processes)
values, errors = exact(trainer, whole, 1.0)[0], []
rollout = audit.batch.rollout
for row in range(len(audit.rows)):
    tokens = rollout.response_ids[row][rollout.mask[row]].tolist()
    for at in range(len(tokens)):
        error = (audit.truth.values[row, at] - values[tuple(tokens[:at])]) / audit.truth.value_errors[row, at]
        errors.append(float(error))
file = Path({out!r}, f"{{trainer.processes.rank}}.json")
file.write_text(json.dumps({{"found": found, "errors": errors, "ids": rollout.response_ids.tolist()}}))
trainer.processes.close()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_processes_audit_completions_of_their_own_and_judge_them_together(tmp_path):
    script = tmp_path / "audit.py"
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    script.write_text(TOGETHER.format(folders=folders, run=str(tmp_path / "run"), out=str(tmp_path)))
    done = together(2, script, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one["found"] == two["found"], "both judge the completions of both"
    assert one["found"]["credit"]["tokens"] == len(one["errors"]) + len(two["errors"])
    assert len(one["ids"]) == len(two["ids"]) == 3, "5 completions, shared and rounded up"
    assert one["ids"] != two["ids"]
    errors = one["errors"] + two["errors"]
    assert max(map(abs, errors)) < 5
    assert sum(abs(x) < 1.96 for x in errors) / len(errors) > 0.75


def test_each_completion_is_audited_at_tokens_of_its_own(tmp_path):
    """Positions that all rows shared would be chance that intervals over rows do not hold."""
    audit = AuditConfig(every=1, completions=24, continuations=2, states=2)
    trainer = trainer_of(tmp_path / "run", audit=audit, rollout=RolloutConfig(batch_size=8, max_new_tokens=4))
    found = trainer.auditor.audit(1)
    known = found.truth.advantages.isfinite()
    lengths = [len(sample["tokens"]) for sample in found.samples(trainer.tokenizer)]
    assert len(set(lengths)) > 1
    assert len({tuple(row) for row in known.tolist()}) > 3
    for row, length in zip(known, lengths, strict=True):
        assert min(2, length) <= int(row.sum()) <= length


def test_no_more_texts_are_sampled_at_once_than_in_a_rollout(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path / "run", rollout=RolloutConfig(batch_size=8, max_new_tokens=4))
    sizes, engine = [], trainer.pipeline.engine
    generate = type(engine).generate

    def counted(self, prompts, *arguments):
        sizes.append(len(prompts.ids))
        return generate(self, prompts, *arguments)

    monkeypatch.setattr(type(engine), "generate", counted)
    settings = AuditConfig(every=1, completions=6, continuations=4, states=None)
    replace(trainer.auditor, settings=settings).audit(1)
    assert max(sizes[1:]) == 8


REWARDS = """
def short(completions, goal, **columns):
    return [-abs(len(text) - x) / 100 for text, x in zip(completions, goal)]

ROWS = [{"prompt": "This film was", "goal": 40}, {"prompt": "A film that", "goal": 80}]
OTHERS = [{"prompt": "This film was", "goal": 41}]
"""


def test_a_run_with_a_reward_and_rows_from_python_is_audited_there_and_by_the_command(tmp_path, monkeypatch, capsys):
    file = tmp_path / "mine.py"
    file.write_text(REWARDS + "\ndef other(completions, **columns):\n    return [1.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    mine = load_object("mine.py:short", "reward")
    rows, run = load_object("mine.py:ROWS", "data"), tmp_path / "run"
    args = text_config(run, run=quiet(run, 1, save_every=1), rollout=RolloutConfig(batch_size=8, max_new_tokens=6))
    trainer = PPOTrainer(reward_funcs=mine, train_dataset=rows, args=args)
    trainer.train()
    assert trainer.audit(AuditConfig(completions=6, continuations=2, states=1))["calls"] > 0
    size = ["--completions", "6", "--continuations", "2", "--states", "1", "--calls", "100"]
    given = ["--reward", "mine.py:short", "--prompts.dataset", "mine.py:ROWS"]
    (run / "audit.json").unlink()
    assert main(["audit", "run", *given, *size]) == 0, capsys.readouterr().err
    found = json.loads((run / "audit.json").read_text())
    assert {sample["prompt"] for sample in found["samples"]} == {"This film was", "A film that"}
    assert 0 < found["calls"] <= 100
    shown = capsys.readouterr().out
    assert re.search(r"this audit: about \d+ reward calls, \d+ tokens, \d+ s\n", shown)
    assert f", {found['calls']} reward calls and " in shown
    for arguments, message in (
        (
            given[:2],
            "was begun in Python with train_dataset, which its .*; a FILE.py is imported, so it trains under if ",
        ),
        (["--reward", "mine.py:other", *given[2:]], r"reward_funcs is other .*; the run had short .*: give the same"),
        ([*given[:2], "mine.py:other", *given[2:]], "--reward names 2 rewards, and the run had one"),
        ([*given[:3], "mine.py:OTHERS"], "train_dataset is 1 row of prompt, goal .*; the run had 2 rows of prompt"),
        ([*given, "--no-code"], "--no-code, but --reward"),
    ):
        assert re.search(message, refused(capsys, "audit", "run", *arguments, *size))


def test_a_trainer_from_python_audits_what_it_has_trained_and_the_command_refuses(tmp_path, capsys):
    trainer = trainer_of(tmp_path / "run", prompts=PromptsConfig(text="a b"))
    with pytest.raises(ConfigError, match="there is nothing to audit: no iteration is done"):
        trainer.audit()
    trainer.train()
    assert "trainer.audit()" in capsys.readouterr().out
    audit = trainer.audit(AuditConfig(completions=4, continuations=4, states=2))
    assert "estimator" in capsys.readouterr().out
    written = read_run(tmp_path / "run").audit
    assert written["credit"]["tokens"] == audit["credit"]["tokens"] > 0
    assert len(written["samples"]) == 4
    config = read_config(tmp_path / "run" / "config.yaml", PPOConfig)
    with pytest.raises(
        ConfigError, match="was begun in Python with reward_funcs, model, processing_class, which its folder"
    ):
        audit_completions(tmp_path / "run", config, AuditConfig(every=1))


def test_rewinding_a_run_removes_a_later_or_unreadable_audit(tmp_path):
    for text, after, kept in (('{"iteration": 30}', 30, True), ('{"iteration": 30}', 29, False), ("{", 50, False)):
        (tmp_path / "audit.json").write_text(text)
        RunFolder(tmp_path).rewind(after, {})
        assert (tmp_path / "audit.json").is_file() == kept
    RunFolder(tmp_path).rewind(1, {})


def test_an_audit_of_an_iteration_without_metrics_adds_to_no_row():
    rows = [{"iteration": 29}, {"iteration": 30}]
    of = {number: with_audit(rows, {"iteration": number, "metrics": {"audit/slope": 1.0}}) for number in (0, 29, None)}
    assert of[0] == rows
    assert [row.get("audit/slope") for row in of[29]] == [1.0, None]
    assert [row.get("audit/slope") for row in of[None]] == [None, 1.0]
