"""Jobs by TRL beside Tokencredit, at the same tokens: reward and KL per iteration, and time (`make beside-trl`).

    PYTHON benchmarks/beside_trl.py [--worlds builtin subj=FOLDER few-words=examples/few-words/run.yaml]
        [--methods ours ppo grpo rloo] [--seeds 1 2 3 4 5]

`ppo` is TRL 1.9.2's PPOTrainer, the last one, in an environment with `torch==2.13.0 trl==1.9.2`; `grpo` and `rloo` are
TRL 1.16's. The worlds of folders are made by benchmarks/worlds.py; those of an example have its policy, prompts, reward
and number of tokens, and its score is not normalized. All run on one thread with the main job's settings: 40 iterations
of 64 completions of 24 tokens, 4 epochs of 4 minibatches, a rate of 1e-4 that decays, a KL coefficient of 0.05 nats per
sequence. `ours` is the default, in bfloat16 where the CPU has its instructions; TRL's models are in float32.
Differences of TRL:

- Advantages of `ours` and `ppo` are whitened. RLOO clips the ratio of whole completions.
- `ours` scores the prefixes of completions too, where the reward can: equal tokens are not equal calls of the reward.
- The rate decays to 0 and not to a tenth, without a warm-up. No rate was tuned for TRL.
- `ppo`: λ = 0.95, a critic of the policy's size, initialised from it, with the policy's rate, no gradient clipping.
- `grpo`, `rloo`: groups of 8 completions. RLOO takes the KL from the reward, as we do. GRPO has it in the loss (k3);
  rewards are not divided by the group's deviation, its default, so that its β is a price in units of the reward too.

Reward and KL (whole distributions, summed over tokens) of each batch as it was sampled, and at the end of 256 fresh
completions, are measured by one function, whose time does not count; the batches of `ours` have the run's metrics,
whose KL is that of the sampled tokens. Figures go to benchmarks/findings-data/beside-trl.json, by world, method and
seed; finished runs are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

sys.path.append(str(Path(__file__).parents[1] / "src"))  # for the environment of TRL 1.9.2
from tokencredit.settings.reader import read_yaml
from tokencredit.settings.text import PPOConfig
from tokencredit.text.rewards.terms import build_terms, score

DATA = Path(__file__).parent / "findings-data" / "beside-trl.json"
REVIEWS = Path(__file__).parents[1] / "src" / "tokencredit" / "demo" / "reviews"
BUILTIN = {
    "model.name": str(REVIEWS / "policy"),
    "reward": [{"classifier": str(REVIEWS / "sentiment"), "label": "NEGATIVE"}],
    "prompts.text": ["This movie was really"],
}
ITERATIONS, BATCH, GROUP, MINIBATCHES, EPOCHS, PRICE = 40, 64, 8, 4, 4, 0.05
FRESH = 256
"""Completions of the trained policy that are measured at the end."""
PADDING = 255
"""A byte that occurs in no text; the policies give it no probability to speak of."""


OF_AN_EXAMPLE = ("model", "prompts", "reward")
"""The parts of an example's configuration that make a world, beside the number of tokens."""


def settings_of(world: str) -> dict[str, Any]:
    """The settings of a world: the built-in one, `NAME=FOLDER`, or `NAME=FILE` of an example."""
    path = Path(world.partition("=")[2])
    if path.suffix == ".yaml":
        example = read_yaml(path)
        parts = {part: example[part] for part in OF_AN_EXAMPLE if part in example}
        length = {"rollout.max_new_tokens": example["rollout"]["max_new_tokens"]}
        return {"model": {"name": BUILTIN["model.name"]}} | parts | length
    return BUILTIN if world == "builtin" else json.loads((path / "world.json").read_text())


class World:
    """A policy to train, its prompts, with the columns that the reward reads, and the reward."""

    def __init__(self, name: str):
        config = PPOConfig.from_dict({"rollout.max_new_tokens": 24} | settings_of(name))
        texts, file = config.prompts.text, config.prompts.dataset
        if file:
            rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
        else:
            rows = [{"prompt": text} for text in ([texts] if isinstance(texts, str) else texts)]
        self.columns = {row["prompt"]: row for row in rows}
        self.name, self.policy, self.prompts = name, config.model.name, list(self.columns)
        self.terms, self.tokens = build_terms(config.reward, "cpu"), config.rollout.max_new_tokens
        # TRL strips padding from texts, so padding can be neither the end-of-text token nor any token that is sampled.
        self.tokenizer = AutoTokenizer.from_pretrained(self.policy, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(PADDING)
        self.width = max(len(self.tokenizer(prompt)["input_ids"]) for prompt in self.prompts)

    def model(self, folder: str | Path | None = None) -> Any:
        """A language model in float32: the reference, or one from a folder."""
        return AutoModelForCausalLM.from_pretrained(folder or self.policy, dtype=torch.float32).eval()

    def rows(self, number: int) -> list[str]:
        """The first `number` prompts, cycled."""
        return [self.prompts[row % len(self.prompts)] for row in range(number)]

    def scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Reward of whole texts; models that score have a vocabulary of their own, so the ids are decoded."""
        split = slice(None, self.width), slice(self.width, None)
        prompts, completions = (self.texts(ids[:, part], mask[:, part]) for part in split)
        rows = [self.columns[prompt] for prompt in prompts]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        return torch.tensor(
            score(self.terms, prompts, completions, columns, mask[:, self.width :].sum(1).tolist()).totals
        )

    def texts(self, ids: Tensor, mask: Tensor) -> list[str]:
        """The rows as text."""
        return [self.tokenizer.decode(row[own], skip_special_tokens=True) for row, own in zip(ids, mask, strict=True)]

    def padded(self, prompts: list[str], completions: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and mask, `[batch, width + tokens]`: prompts padded on the left, completions on the right."""
        width = self.width
        first = self.tokenizer(prompts, padding="max_length", max_length=width, return_tensors="pt")
        ids = torch.full((len(prompts), width + self.tokens), PADDING)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        ids[:, :width], mask[:, :width] = first.input_ids, first.attention_mask.bool()
        for row, completion in enumerate(completions):
            ids[row, width : width + len(completion)] = torch.tensor(completion)
            mask[row, width : width + len(completion)] = True
        return ids, mask

    @torch.no_grad()
    def fresh(self, policy: Any, seed: int) -> tuple[Tensor, Tensor]:
        """Completions of a policy, through the end-of-text token."""
        torch.manual_seed(1000 + seed)
        prompts, end = self.rows(FRESH), self.tokenizer.eos_token_id
        asked = self.tokenizer(prompts, padding=True, return_tensors="pt")
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": self.tokens, "pad_token_id": PADDING}
        texts = policy.generate(**asked, **options)[:, asked.input_ids.shape[1] :].tolist()
        return self.padded(prompts, [text[: text.index(end) + 1] if end in text else text for text in texts])

    @torch.no_grad()
    def divergence(self, policy: Any, reference: Any, ids: Tensor, mask: Tensor) -> float:
        """Mean KL of policy to reference per sequence, of the distributions at each place after the prompt, in nats."""
        places = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "position_ids": places}
        own, other = (
            model(**inputs, use_cache=False).logits[:, self.width - 1 : -1].log_softmax(-1)
            for model in (policy, reference)
        )
        return float(((own.exp() * (own - other)).sum(-1) * mask[:, self.width :]).sum(1).mean())


class Course:
    """Reward, KL, wall-clock and CPU seconds of training of each iteration."""

    def __init__(self, world: World, policy: Any):
        self.world, self.policy, self.reference = world, policy, world.model()
        self.figures: dict[str, list[float]] = {"reward": [], "kl": [], "clock": [], "cpu": []}
        self.start()

    def start(self) -> None:
        """Begin to count time."""
        self.began, self.apart = seconds(), (0.0, 0.0)

    def add(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Record a batch as it was sampled; returns its scores. The times are those up to its sampling."""
        paused = seconds()
        kl = self.world.divergence(self.policy, self.reference, ids, mask)
        self.stamp(paused)
        scores = self.world.scores(ids, mask)
        self.figures["reward"].append(four(scores.mean()))
        self.figures["kl"].append(four(kl))
        return scores

    def stamp(self, paused: tuple[float, float]) -> None:
        """Record the times of training up to a pause that ends now."""
        now = seconds()
        if self.figures["reward"]:
            for name, began, apart, at in zip(("clock", "cpu"), self.began, self.apart, paused, strict=True):
                self.figures[name].append(round(at - began - apart, 2))
        self.apart = tuple(a + b - c for a, b, c in zip(self.apart, now, paused, strict=True))


def seconds() -> tuple[float, float]:
    """Wall clock and CPU time of this process."""
    return time.perf_counter(), time.process_time()


def four(value: float | Tensor) -> float:
    """Round to four digits."""
    return float(f"{float(value):.4g}")


class Judge(nn.Module):
    """The reward in the form of TRL's PPO: a backbone, and a `score` layer from hidden states to rewards."""

    base_model_prefix = "backbone"

    def __init__(self, course: Course):
        super().__init__()
        self.score, self.add = nn.Identity(), course.add

    def backbone(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        """The reward as a hidden state `[batch, time, 1]`, equal at every token."""
        scores = self.add(input_ids, attention_mask.bool())
        return SimpleNamespace(hidden_states=[scores.view(-1, 1, 1).expand(-1, input_ids.shape[1], -1)])


SHARED = {"learning_rate": 1e-4, "bf16": False, "activation_checkpointing": False, "use_cpu": True, "report_to": []}
SHARED |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "temperature": 1.0}


def ppo(world: World, course: Course, seed: int, folder: str) -> None:
    """Train with TRL's PPOTrainer."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    critic = AutoModelForSequenceClassification.from_pretrained(world.policy, dtype=torch.float32, num_labels=1)
    critic.config.pad_token_id = PADDING
    prompts = Dataset.from_dict({"input_ids": [world.tokenizer(row)["input_ids"] for row in world.rows(BATCH)]})
    trainer = PPOTrainer(
        args=PPOConfig(
            output_dir=folder,
            seed=seed,
            total_episodes=ITERATIONS * BATCH,
            per_device_train_batch_size=BATCH,
            local_rollout_forward_batch_size=BATCH,
            num_mini_batches=MINIBATCHES,
            num_ppo_epochs=EPOCHS,
            response_length=world.tokens,
            stop_token="eos",
            kl_coef=PRICE,
            vf_coef=0.5,
            lam=0.95,
            num_sample_generations=0,
            **SHARED,
        ),
        processing_class=world.tokenizer,
        model=course.policy,
        ref_model=world.model(),
        reward_model=Judge(course),
        value_model=critic,
        train_dataset=prompts,
        eval_dataset=prompts,
    )
    course.start()
    trainer.train()


def grouped(method: str, world: World, course: Course, seed: int, folder: str) -> None:
    """Train with TRL's GRPOTrainer or RLOOTrainer."""
    import trl

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return course.add(*world.padded(prompts, completion_ids)).tolist()

    config, trainer = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[method]
    made = trainer(
        model=course.policy,
        reward_funcs=reward,
        args=config(
            output_dir=folder,
            seed=seed,
            max_steps=ITERATIONS * EPOCHS * MINIBATCHES,
            per_device_train_batch_size=BATCH // MINIBATCHES,
            steps_per_generation=MINIBATCHES,
            num_iterations=EPOCHS,
            num_generations=GROUP,
            max_completion_length=world.tokens,
            beta=PRICE,
            shuffle_dataset=False,
            **({"scale_rewards": "none"} if method == "grpo" else {}),
            **SHARED,
        ),
        processing_class=world.tokenizer,
        train_dataset=Dataset.from_dict({"prompt": world.rows(ITERATIONS * BATCH // GROUP)}),
    )
    course.start()
    made.train()


def ours(world: World, course: Course, seed: int, folder: str) -> None:
    """Train with Tokencredit's default settings."""
    from truth import BASE

    from tokencredit import Callback, PPOConfig, PPOTrainer

    class Times(Callback):
        def after_iteration(
            self, trainer: PPOTrainer, metrics: dict[str, float], samples: list[dict[str, Any]]
        ) -> None:
            course.figures["reward"].append(four(metrics["reward"]))
            course.figures["kl"].append(four(metrics["kl"]))
            course.stamp(seconds())

    settings = settings_of(world.name) | BASE
    settings |= {"run.iterations": ITERATIONS, "seed": seed, "run.dir": f"{folder}/run"}
    trainer = PPOTrainer(args=PPOConfig.from_dict(settings), callbacks=[Times()])
    course.start()
    trainer.train()
    course.policy = world.model(f"{folder}/run/policy")


METHODS = ("ours", "ppo", "grpo", "rloo")


def run(name: str, method: str, seed: int) -> dict[str, Any]:
    """Train once; returns the metrics per iteration, and those of fresh completions of the trained policy."""
    set_seed(seed)  # NumPy's too, which shuffles the minibatches of TRL's PPO
    world = World(name)
    course = Course(world, world.model())
    with tempfile.TemporaryDirectory() as folder:
        if method in ("grpo", "rloo"):
            grouped(method, world, course, seed, folder)
        else:
            {"ours": ours, "ppo": ppo}[method](world, course, seed, folder)
        if method != "ours":
            course.stamp(seconds())
        texts = world.fresh(course.policy.eval(), seed)
        kl = world.divergence(course.policy, course.reference, *texts)
        return course.figures | {"final": {"reward": four(world.scores(*texts).mean()), "kl": four(kl)}}


def read() -> dict[str, Any]:
    """The kept figures, by world, method and seed."""
    return json.loads(DATA.read_text()) if DATA.is_file() else {}


def main() -> int:
    """Run the missing runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", nargs="+", default=["builtin"], help="builtin, NAME=FOLDER or NAME=FILE")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for world in options.worlds:
            for method in options.methods:
                name = world.partition("=")[0]
                if "final" in read().get(name, {}).get(method, {}).get(str(seed), {}):
                    continue
                figures = run(world, method, seed)
                kept = read()  # another process may have added to it
                kept.setdefault(name, {}).setdefault(method, {})[str(seed)] = figures
                DATA.write_text(json.dumps(kept, separators=(",", ":")).replace('},"', '},\n"') + "\n")
                print(name, method, seed, figures["final"], f"{figures['clock'][-1]:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
