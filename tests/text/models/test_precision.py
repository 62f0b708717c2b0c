import json

import pytest
import torch

from tokencredit.errors import ConfigError
from tokencredit.learn.experience import like_lengths
from tokencredit.processes import Processes
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RolloutConfig, RunConfig
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.engines.sampling import sample
from tokencredit.text.models import precision
from tokencredit.text.models.precision import Precision, bfloat16_helps, choose
from tokencredit.text.scoring_passes import rollout_logprobs
from tokencredit.text.trainer import PPOTrainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _new_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def faster(monkeypatch, half):
    """Let bfloat16 take this share of float32's time."""
    monkeypatch.setattr(precision, "_seconds", lambda layers, inputs, enabled: half if enabled else 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_asked_for_is_taken(dtype, monkeypatch):
    monkeypatch.setattr(precision, "bfloat16_helps", lambda *_: pytest.fail("nothing to try out"))
    processes = Processes()
    chosen = choose(dtype, 64, processes, None)
    assert chosen == Precision(dtype, processes.device)
    assert (chosen.choices, chosen.notes) == ({}, [])


@pytest.mark.parametrize(("half", "expected"), [(0.7, "bfloat16"), (0.8, "float32"), (3.0, "float32")])
def test_auto_takes_bfloat16_where_it_is_clearly_faster(half, expected, monkeypatch):
    faster(monkeypatch, half)
    chosen = choose("auto", 64, Processes(), None)
    assert chosen.dtype == expected
    assert chosen.choices == {"model.dtype": expected}
    (note,) = chosen.notes
    assert note.startswith(f"model.dtype auto: {expected}, timed now, and kept for later runs in ")


def test_a_machine_is_timed_once_per_width_and_stays_with_the_result(monkeypatch, tmp_path):
    faster(monkeypatch, 0.5)
    assert choose("auto", 64, Processes(), None).dtype == "bfloat16"
    faster(monkeypatch, 2.0)
    again = choose("auto", 64, Processes(), tmp_path / "no run yet")
    assert again.dtype == "bfloat16"
    assert again.notes[0].startswith("model.dtype auto: bfloat16, as timed on 2")
    assert choose("auto", 32, Processes(), None).dtype == "float32"


@pytest.mark.parametrize("file", ["choices.json", "config.yaml"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_keeps_what_it_chose_also_one_of_a_version_that_wrote_it_into_its_configuration(
    dtype, file, tmp_path, monkeypatch
):
    monkeypatch.setattr(precision, "bfloat16_helps", lambda *_: pytest.fail("nothing to try out"))
    old = {"model": {"dtype": dtype}}
    (tmp_path / file).write_text(json.dumps({"model.dtype": dtype} if file == "choices.json" else old))
    chosen = choose("auto", 64, Processes(), tmp_path)
    assert chosen.dtype == dtype
    assert chosen.choices == {"model.dtype": dtype}
    assert chosen.notes == [f"model.dtype auto: {dtype}, as when this run began"]
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    assert choose(other, 64, Processes(), tmp_path).dtype == other


@pytest.mark.parametrize("text", ['{"model.dtype": "float16"}', '{"model.dtype": ["float32"]}', "[]", "{"])
def test_a_choice_that_cannot_be_read_is_named(text, tmp_path):
    (tmp_path / "choices.json").write_text(text)
    with pytest.raises(ConfigError, match=r"choices\.json"):
        choose("auto", 64, Processes(), tmp_path)


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_is_asked_and_not_timed(native, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    half, reason = precision.choose_for_machine(64, torch.device("cuda"))
    assert half == native
    assert reason == f"since this GPU {'computes in' if native else 'only emulates'} bfloat16"
    assert not (tmp_path / "cache").exists()


def test_trying_out_draws_no_random_numbers_of_the_run():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert bfloat16_helps(32, CPU) in (True, False)
    assert torch.equal(torch.rand(3), expected)


def built_in(dtype, folder):
    """A trainer of the built-in world, whose completions end where they end."""
    args = PPOConfig(
        model=ModelConfig(dtype=dtype),
        rollout=RolloutConfig(batch_size=64, max_new_tokens=48),
        run=RunConfig(dir=str(folder), iterations=1, trackers=[], show_every=0),
    )
    return PPOTrainer(args=args)


@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1e-4), ("bfloat16", 0.02)])
@pytest.mark.slow
def test_passes_that_cut_a_batch_apart_agree(dtype, largest, tmp_path):
    """With logits in bfloat16 they were 0.05 nats apart."""
    trainer = built_in(dtype, tmp_path)
    rollout = trainer.collect().rollout
    assert rollout.mask.sum(1).unique().numel() > 10
    apart = torch.zeros_like(rollout.logprobs)
    with trainer.pipeline.precision.no_grad():
        for rows in like_lengths(rollout.lengths(), 200):
            part = Rollout(**{name: x if x is None else x[rows] for name, x in vars(rollout).items()})
            apart[rows] = (rollout_logprobs(trainer.policy, part, 1.0, None) - rollout.logprobs[rows]).abs()
    assert apart.max() < largest


@pytest.mark.slow
def test_what_is_recorded_is_what_was_drawn_from(tmp_path):
    """Sampling's own log-probabilities, from a KV cache, beside those that bfloat16 records in their place."""
    trainer = built_in("bfloat16", tmp_path)
    engine, settings = trainer.pipeline.engine, trainer.args.rollout
    prompts = trainer.prompts.batch(0, 64)
    uniforms = torch.rand(64, settings.max_new_tokens, generator=torch.Generator().manual_seed(0))
    recorded = engine.generate(prompts, settings, uniforms)
    with trainer.pipeline.precision.no_grad():
        drawn = sample(trainer.policy, prompts, uniforms, settings, trainer.tokenizer, engine.end_ids)
    assert torch.equal(drawn.response_ids, recorded.response_ids)
    apart = (drawn.logprobs - recorded.logprobs)[drawn.mask]
    assert apart.abs().mean() < 8e-4, "1.2e-3 with both rounded to bfloat16, 4.3e-3 with one of them"
    assert apart.abs().max() < 0.04
