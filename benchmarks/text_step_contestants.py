"""The contestants of `text_step.py`, one process each: `python text_step_contestants.py NAME SHAPE FOLDER`.

Every contestant repeats a PPO iteration and calls `lap` after each. Between laps it waits for a line on its standard
input, so that the iterations of all contestants can be interleaved. TRL lives in a separate environment;
libraries are imported only when their contestant runs.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

CLIP, VALUE_COEF, KL_COEF, GAMMA, LAM, LR = 0.2, 0.5, 0.05, 1.0, 0.95, 1e-5
ENDLESS = 10**6


@dataclass(frozen=True)
class Shape:
    """A size of model and batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    prompt: int
    new: int
    epochs: int
    minibatches: int


SHAPES = {
    "tiny": Shape(layers=2, width=64, heads=2, vocabulary=1_024, batch=64, prompt=8, new=24, epochs=4, minibatches=4),
    "mini": Shape(
        layers=4, width=256, heads=4, vocabulary=50_257, batch=32, prompt=16, new=48, epochs=4, minibatches=2
    ),
    "small": Shape(
        layers=12, width=768, heads=12, vocabulary=50_257, batch=8, prompt=16, new=32, epochs=2, minibatches=2
    ),
}
SHAPES |= {
    "short": replace(SHAPES["mini"], new=64),
    "long": replace(SHAPES["mini"], new=1_024),
    "uneven": replace(SHAPES["mini"], new=256),
}
Lap = Callable[..., None]
"""Reports an iteration: the seconds of its stages and, as keywords, other figures."""


def tokencredit(
    shape: Shape,
    folder: Path,
    lap: Lap,
    dtype: str = "auto",
    stop_at_eos: bool = False,
    max_grad_norm: float | None = 1.0,
    **critic,
) -> None:
    """This library; `critic` goes to that group of its configuration."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command does
    from tokencredit import (
        CriticConfig,
        KLConfig,
        ModelConfig,
        OptimConfig,
        PPOConfig,
        PPOTrainer,
        PromptsConfig,
        RewardModelTerm,
        RolloutConfig,
        RunConfig,
        UpdateConfig,
    )

    config = PPOConfig(
        model=ModelConfig(name=str(folder / "policy"), dtype=dtype),
        critic=CriticConfig(lr=LR, coef=VALUE_COEF, **critic),
        prompts=PromptsConfig(dataset=str(folder / "prompts.jsonl")),
        reward=[RewardModelTerm(reward_model=str(folder / "reward"))],
        rollout=RolloutConfig(batch_size=shape.batch, max_new_tokens=shape.new, stop_at_eos=stop_at_eos),
        ppo=UpdateConfig(epochs=shape.epochs, minibatches=shape.minibatches, clip=CLIP),
        kl=KLConfig(coef=KL_COEF),
        optim=OptimConfig(lr=LR, schedule="constant", warmup=0, max_grad_norm=max_grad_norm),
        run=RunConfig(dir=str(folder / "run"), iterations=ENDLESS, trackers=[], show_every=0),
    )
    trainer = PPOTrainer(args=config)
    for number in range(1, ENDLESS):
        metrics, _ = trainer.iteration(number)
        stages = {name.removeprefix("seconds/"): x for name, x in metrics.items() if name.startswith("seconds/")}
        lap(stages, length=metrics["length"])


def same_work(shape: Shape, folder: Path, lap: Lap) -> None:
    """This library with TRL's settings: a separate critic, float32, no gradient clipping."""
    tokencredit(shape, folder, lap, max_grad_norm=None, dtype="float32", kind="separate", head="linear")


def as_it_comes(shape: Shape, folder: Path, lap: Lap) -> None:
    """This library with a trunk shared by policy and critic, and its default dtype."""
    tokencredit(shape, folder, lap)


def as_they_end(shape: Shape, folder: Path, lap: Lap) -> None:
    """This library with responses of varying length."""
    tokencredit(shape, folder, lap, stop_at_eos=True)


def floor(shape: Shape, folder: Path, lap: Lap) -> None:
    """The bare passes of an iteration in plain PyTorch: a floor on its time."""
    import torch
    from torch.nn.functional import log_softmax
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "policy").eval() for _ in range(2))
    critic, judge = (AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval() for _ in range(2))
    optimizer = torch.optim.AdamW([*policy.parameters(), *critic.parameters()], lr=LR, fused=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    all_prompts = tokenizer(texts, return_tensors="pt").input_ids
    start = shape.prompt - 1

    def logprobs_of(model, rows):
        # Logits at the response's positions only.
        logits = model(rows[:, :-1], logits_to_keep=shape.new).logits
        return log_softmax(logits, dim=-1).gather(-1, rows[:, shape.prompt :, None]).squeeze(-1)

    def values_of(rows):
        return critic.score(critic.transformer(rows[:, :-1]).last_hidden_state[:, start:]).squeeze(-1)

    first = 0
    while True:
        clock = time.perf_counter()
        stages = {}

        def done(stage, clock=clock, stages=stages):
            stages[stage] = time.perf_counter() - clock - sum(stages.values())

        with torch.no_grad():
            rows = all_prompts[first : first + shape.batch]
            first = (first + shape.batch) % len(all_prompts)
            cache, inputs, old = None, rows, []
            for _ in range(shape.new):
                out = policy(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                distribution = log_softmax(out.logits[:, -1], dim=-1)
                inputs = torch.multinomial(distribution.exp(), 1)
                old.append(distribution.gather(-1, inputs))
                rows = torch.cat([rows, inputs], dim=1)
            old_logprobs, old_values = torch.cat(old, dim=1), values_of(rows)
            done("rollout")
            ref_logprobs = logprobs_of(reference, rows)
            done("reference")
            scores = judge(rows).logits.squeeze(-1)
            done("reward")
            rewards = -KL_COEF * (old_logprobs - ref_logprobs)
            rewards[:, -1] += scores
            deltas = rewards + GAMMA * torch.cat([old_values[:, 1:], torch.zeros(shape.batch, 1)], dim=1) - old_values
            advantages = torch.zeros_like(deltas)
            running = torch.zeros(shape.batch)
            for t in reversed(range(shape.new)):
                running = deltas[:, t] + GAMMA * LAM * running
                advantages[:, t] = running
            returns = advantages + old_values
            advantages = (advantages - advantages.mean()) / advantages.std()
        for _ in range(shape.epochs):
            for part in torch.randperm(shape.batch).chunk(shape.minibatches):
                logprobs, values = logprobs_of(policy, rows[part]), values_of(rows[part])
                ratio = (logprobs - old_logprobs[part]).exp()
                gain = torch.minimum(ratio * advantages[part], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[part])
                loss = -gain.mean() + VALUE_COEF * 0.5 * (values - returns[part]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        done("update")
        lap(stages)


def trl(shape: Shape, folder: Path, lap: Lap) -> None:
    """TRL's PPOTrainer, from a version that still has one."""
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    class Laps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            lap({})

    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    rows = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "policy") for _ in range(2))
    critic, judge = (AutoModelForSequenceClassification.from_pretrained(folder / "reward") for _ in range(2))
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=str(folder / "trl"),
            total_episodes=shape.batch * ENDLESS,
            per_device_train_batch_size=shape.batch,
            local_rollout_forward_batch_size=shape.batch,
            num_mini_batches=shape.minibatches,
            num_ppo_epochs=shape.epochs,
            response_length=shape.new,
            temperature=1.0,
            learning_rate=LR,
            kl_coef=KL_COEF,
            vf_coef=VALUE_COEF,
            gamma=GAMMA,
            lam=LAM,
            num_sample_generations=0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=judge,
        value_model=critic,
        train_dataset=rows.map(
            lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=["prompt"]
        ),
        callbacks=[Laps()],
    )
    trainer.train()


CONTESTANTS = {f.__name__: f for f in (trl, floor, same_work, as_it_comes, as_they_end)}


def peak_gigabytes() -> float:
    """Peak memory of this process so far (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def main() -> None:
    name, shape, folder = sys.argv[1:]
    started = time.perf_counter()
    answers = sys.stdout
    sys.stdout = sys.stderr  # keep library output out of the protocol

    def lap(stages: dict[str, float], **figures: float) -> None:
        nonlocal started
        seconds = time.perf_counter() - started
        answer = {"seconds": seconds, "peak": peak_gigabytes(), "stages": stages} | figures
        print(json.dumps(answer), file=answers, flush=True)
        if not sys.stdin.readline():
            raise SystemExit
        started = time.perf_counter()

    CONTESTANTS[name](SHAPES[shape], Path(folder), lap)


if __name__ == "__main__":
    main()
