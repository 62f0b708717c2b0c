"""The measurements of gpu.py, one method per part."""

from __future__ import annotations

import gc
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import costs
import psutil
import torch
from costs import Batch, Setup, Shape, config_of
from counting import Counts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedTokenizerFast

from tokencredit import (
    AdvantageConfig,
    CriticConfig,
    KLConfig,
    LoraConfig,
    ModelConfig,
    PPOConfig,
    PPOTrainer,
    RolloutConfig,
    RunConfig,
    UpdateConfig,
)
from tokencredit.text.callbacks import Callback
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.engines.local.sampling import sample
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.kv_cache import CachedSteps
from tokencredit.text.models.precision import Precision
from tokencredit.text.rollout_passes import rollout_logprobs

TINY_GPT2 = Shape("tiny GPT-2", "gpt2", 512, 32, 2, 4, 4, 8, 128, 256)
TINY_QWEN3 = Shape("tiny Qwen3", "qwen3", 512, 32, 2, 4, 2, 8, 64, 256)
SMALL = (
    Shape("small GPT-2", "gpt2", 4096, 256, 4, 4, 4, 64, 1024, 512),
    Shape("small Qwen3", "qwen3", 4096, 256, 4, 4, 2, 64, 768, 512),
)
"""Models of the correctness rows, which a CPU computes too."""
ROWS = 64
"""Completions of the decoding rows."""
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"}


class Row(NamedTuple):
    """A measurement; `met` is true if its goal is reached."""

    model: str
    name: str
    value: float | str
    unit: str = ""
    goal: str | None = None
    met: bool | None = None


@dataclass(frozen=True)
class Size:
    """Models and amounts of work."""

    name: str
    main: Shape
    others: tuple[Shape, ...]
    small: tuple[Shape, ...]
    batch: Batch
    """Shape of iterations; a minibatch is one micro-batch."""
    new: int
    """Tokens of the decoding row."""
    compared: int
    """Tokens per completion in comparisons with other samplers."""
    repeats: int
    growth: int


SIZES = {
    "full": Size(
        "full",
        costs.QWEN3_06B,
        (costs.GPT2, costs.QWEN3_17B),
        SMALL,
        Batch(rows=128, prompt=64, new=448, epochs=1, minibatches=4),
        new=1024,
        compared=128,
        repeats=3,
        growth=50,
    ),
    "smallest": Size(
        "smallest",
        TINY_QWEN3,
        (TINY_GPT2,),
        (TINY_GPT2, TINY_QWEN3),
        Batch(rows=8, prompt=4, new=12, epochs=1, minibatches=2),
        new=100,
        compared=8,
        repeats=2,
        growth=8,
    ),
}


class PeakMemory(Callback):
    """Peak allocated bytes of each stage, on a GPU."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        for stage in ("rollout", "reference", "update"):
            setattr(self, f"before_{stage}", lambda trainer: torch.cuda.reset_peak_memory_stats())
            setattr(self, f"after_{stage}", lambda trainer, stage=stage, **results: self._note(stage))

    def _note(self, stage: str) -> None:
        self.peaks[stage] = torch.cuda.max_memory_allocated()


class Bench:
    """A device, a size, and the ceilings that were measured on the device."""

    def __init__(self, device: torch.device, size: Size, folder: Path):
        self.device, self.size, self.folder = device, size, folder
        self.cuda = device.type == "cuda"
        self.ceilings_of = costs.COPY if self.cuda else costs.Device(24e9, 1e10, 1e11)
        self.runs = 0

    def release(self) -> None:
        """Free the memory of the last part."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Synchronise the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int | None = None) -> float:
        """Median time of a call, after one warm-up call."""
        run()
        times = []
        for _ in range(repeats or self.size.repeats):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def goal(self, text: str, met: bool) -> tuple[str, bool] | tuple[()]:
        """A goal of speed or memory, which only a GPU has."""
        return (text, met) if self.cuda else ()

    def model(self, shape: Shape) -> Any:
        """Random weights, made on the device."""
        torch.manual_seed(0)
        with self.device:
            return AutoModelForCausalLM.from_config(config_of(shape)).eval()

    def trainer(self, shape: Shape, batch: Batch, lm: Any = None, callbacks: Any = (), **groups: Any) -> PPOTrainer:
        """A run in a folder of its own, in bfloat16 with a static cache unless `groups` says otherwise."""
        self.runs += 1
        options: dict[str, Any] = {
            "model": ModelConfig(dtype="bfloat16"),
            "rollout": RolloutConfig(
                batch_size=batch.rows, max_new_tokens=batch.new, stop_at_eos=False, cache="static"
            ),
            "ppo": UpdateConfig(
                epochs=batch.epochs,
                minibatches=batch.minibatches,
                micro_batch_tokens=batch.rows // batch.minibatches * (batch.prompt + batch.new),
            ),
            "kl": KLConfig(coef=0.05),
            "run": RunConfig(dir=str(self.folder / str(self.runs)), iterations=1000, save_every=0, samples=0),
        }
        words = " ".join(f"w{i}" for i in range(batch.prompt))
        return PPOTrainer(
            self.model(shape) if lm is None else lm,
            last_digits,
            PPOConfig(**options | groups),
            [{"prompt": words}],
            processing_class=tokenizer(shape.vocabulary),
            callbacks=callbacks,
        )

    def iterations(self, trainer: PPOTrainer, count: int) -> list[dict[str, float]]:
        """Metrics of iterations, after one warm-up iteration."""
        return [trainer.iteration(number)[0] for number in range(1, count + 2)][1:]

    def ceilings(self) -> Iterator[Row]:
        """Measured ceilings of the device: memory copy and matrix product."""
        side, numbers = (8192, 2**30) if self.cuda else (512, 2**22)
        a, b = (torch.empty(numbers, device=self.device).normal_() for _ in range(2))
        bandwidth = 8 * numbers / self.seconds(lambda: b.copy_(a), 5)
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        flops = 2 * side**3 / self.seconds(lambda: a @ b, 5)
        self.ceilings_of = costs.Device(self.ceilings_of.memory, bandwidth, flops)
        yield Row("", "copy, read and written", bandwidth / 1e12, "TB/s")
        yield Row("", f"bfloat16 matrix product of {side}", flops / 1e12, "TFLOP/s")

    def correctness(self) -> Iterator[Row]:
        """Float32 against the CPU, caches against each other, bfloat16, the first ratio, and a resumed run."""
        for shape in self.size.small:
            on_cpu = Bench(torch.device("cpu"), self.size, self.folder).model(shape)
            lm = self.model(shape)
            lm.load_state_dict(on_cpu.state_dict())
            batch = Batch(rows=8, prompt=8, new=48, minibatches=2, epochs=1)
            trainer = self.trainer(shape, batch, lm, model=ModelConfig(dtype="float32"))
            yield from self.agreement(shape, trainer, ActorCritic(on_cpu))
            yield self.first_ratio(shape, trainer, "float32", 1e-4)
            yield self.first_ratio(shape, self.trainer(shape, batch), "bfloat16", 5e-2)
            yield self.resumed(shape, batch)

    def agreement(self, shape: Shape, trainer: PPOTrainer, on_cpu: ActorCritic) -> Iterator[Row]:
        """Sampling accuracy: the same uniforms with both caches and on a CPU; the same texts in both dtypes."""
        settings = trainer.args.rollout
        prompts, uniforms = trainer.stream.next_batch()
        engine = trainer.pipeline.engine
        static = engine.generate(prompts, settings, uniforms)
        dynamic = replace(engine, decoding=None).generate(prompts, settings, uniforms)
        with torch.no_grad():
            there = sample(on_cpu, prompts.to(torch.device("cpu")), uniforms, settings, trainer.tokenizer, [0])
        for name, other in (("a growing cache", dynamic), ("a CPU", there)):
            same = float((other.response_ids.cpu() == static.response_ids.cpu()).float().mean())
            yield Row(shape.name, f"share of tokens as with {name}, float32", same, "", "1", same == 1)
        with torch.no_grad():
            full = rollout_logprobs(trainer.policy, static, 1.0, None).cpu()
            on_host = {name: x if x is None else x.cpu() for name, x in vars(static).items()}
            cpu = rollout_logprobs(on_cpu, Rollout(**on_host), 1.0, None)
        error = float((full - cpu).abs().max())
        yield Row(shape.name, "log-probs on the device and a CPU, float32", error, "nats", "≤ 1e-4", error <= 1e-4)
        with Precision("bfloat16", self.device).no_grad():
            half = rollout_logprobs(trainer.policy, static, 1.0, None).cpu()
        yield Row(shape.name, "log-probs in bfloat16 and float32, mean", float((half - full).abs().mean()), "nats")
        yield Row(shape.name, "log-probs in bfloat16 and float32, largest", float((half - full).abs().max()), "nats")

    def first_ratio(self, shape: Shape, trainer: PPOTrainer, dtype: str, goal: float) -> Row:
        """Deviation of the ratio of an update's first minibatch from 1."""
        error = trainer.iteration(1)[0]["first_ratio_error"]
        return Row(shape.name, f"first ratio error, {dtype}", error, "", f"≤ {goal:g}", error <= goal)

    def resumed(self, shape: Shape, batch: Batch) -> Row:
        """True if two iterations, a checkpoint and two more equal four iterations, bit for bit, in float32."""
        results = []
        for name, parts in (("whole", (4,)), ("resumed", (2, 4))):
            for number, iterations in enumerate(parts):
                folder = str(self.folder / f"{shape.name} {name}")
                run = RunConfig(dir=folder, iterations=iterations, save_every=2, samples=0)
                trainer = self.trainer(shape, batch, model=ModelConfig(dtype="float32"), run=run)
                with redirect_stdout(io.StringIO()):
                    trainer.train(resume_from_checkpoint=number > 0)
            lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
            results.append((trainer, [json.loads(line)["loss"] for line in lines]))
        (whole, losses), (again, losses_again) = results
        pairs = zip(whole.policy.parameters(), again.policy.parameters(), strict=True)
        same = losses == losses_again and all(torch.equal(a, b) for a, b in pairs)
        return Row(shape.name, "a resumed run, bit for bit, float32", "yes" if same else "no", "", "yes", same)

    def main(self) -> Iterator[Row]:
        """Iterations of the main shape with a shared critic."""
        yield from self.speed(self.size.main, self.size.batch)

    def others(self) -> Iterator[Row]:
        """Iterations of the other shapes, with half the rows: 1.7 B parameters with all take 96 GB."""
        for shape in self.size.others:
            yield from self.speed(shape, replace(self.size.batch, rows=self.size.batch.rows // 2))
            self.release()

    def speed(self, shape: Shape, batch: Batch) -> Iterator[Row]:
        """Time of rollout, update and the rest; memory by stage; kernels and syncs."""
        memory = PeakMemory() if self.cuda else None
        trainer = self.trainer(shape, batch, callbacks=[memory] if memory else ())
        metrics = self.iterations(trainer, self.size.repeats)
        middle = {key: statistics.median(row[key] for row in metrics) for key in metrics[0] if "seconds" in key}
        stages = {key.removeprefix("seconds/"): x for key, x in middle.items() if key != "seconds"}
        for stage, spent in stages.items():
            yield Row(shape.name, f"{stage}, share of an iteration", 100 * spent / middle["seconds"], "%")
        outside = 100 * (1 - sum(stages.values()) / middle["seconds"])
        yield Row(shape.name, "outside the stages", outside, "%", *self.goal("< 3", outside < 3))
        read, setup = batch.epochs * batch.rows * batch.length, Setup()
        rate = read / stages["update"]
        mfu = 100 * costs.iteration_flops(shape, batch, setup)["update"] / stages["update"] / costs.H200.flops
        goals = [("≥ 24,000", rate >= 24_000), ("≥ 25", mfu >= 25)] if shape == costs.QWEN3_06B else [(), ()]
        yield Row(shape.name, "update", rate, "tokens/s", *goals[0])
        yield Row(shape.name, "update, MFU of 989 TFLOP/s", mfu, "%", *goals[1])
        yield Row(shape.name, "rollout", batch.responses / stages["rollout"], "tokens/s")
        if memory:
            for stage in ("rollout", "reference", "update"):
                yield Row(shape.name, f"peak memory in {stage}", memory.peaks[stage] / 1e9, "GB")
        del trainer
        self.release()
        yield from self.minibatch_counts(shape, batch)

    def minibatch_counts(self, shape: Shape, batch: Batch) -> Iterator[Row]:
        """Kernels and syncs of a minibatch: those of two passes over it minus those of one."""
        trainer = self.trainer(shape, replace(batch, rows=batch.rows // batch.minibatches, minibatches=1))
        _, experience = trainer.credit.give(trainer.collect())
        counts = []
        for epochs in (1, 2):
            trainer.learner.settings = replace(trainer.learner.settings, epochs=epochs)
            counts.append(self.counted(lambda: trainer.learner.update(experience)))
        for name, once, twice in zip(("kernels", "waits"), *counts, strict=True):
            yield Row(shape.name, f"{name} per minibatch", float(twice - once))

    def counted(self, run: Callable[[], Any]) -> tuple[int, int]:
        """Kernel launches and syncs of a call: by the profiler on a GPU, else by the dispatcher."""
        if not self.cuda:
            with Counts() as counts:
                run()
            return sum(counts.kernels.values()), sum(counts.syncs.values())
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run()
        events = profiler.key_averages()
        launches, waits = (sum(event.count for event in events if event.key in names) for names in (LAUNCHES, WAITS))
        if not launches:
            raise RuntimeError("the profiler saw no launch, so it cannot count")
        return launches, waits

    def decoding(self) -> Iterator[Row]:
        """Sampling alone, of full length, against the bandwidth bound; and with a growing cache, shorter."""
        shape = self.size.main
        trainer = self.trainer(shape, self.size.batch, kl=KLConfig(coef=0))
        yield from self.decoded(shape, trainer, "static cache")
        new = self.size.compared
        spent = self.seconds(self.sampler(trainer, new, static=False), 1)
        yield Row(shape.name, f"growing cache, {ROWS} × {new} tokens", 1e3 * spent / new, "ms/step")

    def decoded(self, shape: Shape, trainer: PPOTrainer, name: str) -> Iterator[Row]:
        """Time of a rollout with a static cache, its share of the bound, kernels and waits per step."""
        new, few, many = self.size.new, 16, 48
        spent = self.seconds(self.sampler(trainer, new), 1)
        bound = costs.rollout_seconds(shape, Batch(ROWS, self.size.batch.prompt, new), self.ceilings_of)
        share = 100 * bound / spent
        yield Row(shape.name, f"{name}, {ROWS} × {new} tokens", 1e3 * spent / new, "ms/step")
        goal = self.goal("≥ 60", share >= 60)
        yield Row(shape.name, f"{name}, share of the measured bandwidth's bound", share, "%", *goal)
        short = [self.counted(self.sampler(trainer, count)) for count in (few, many)]
        launches, waits = ((after - before) / (many - few) for before, after in zip(*short, strict=True))
        yield Row(shape.name, f"{name}, launches per step", launches)
        yield Row(shape.name, f"{name}, waits per step", waits, "", *self.goal("≤ 0.1", waits <= 0.1))

    def sampler(self, trainer: PPOTrainer, new: int, static: bool = True) -> Callable[[], Any]:
        """Sample `new` tokens per row, without the scoring pass after it."""
        settings = replace(trainer.args.rollout, max_new_tokens=new)
        prompts = trainer.prompts.batch(0, ROWS).to(self.device)
        uniforms = torch.rand(ROWS, new, device=self.device)
        decoding = trainer.pipeline.engine.decoding
        steps = decoding.steps if static else CachedSteps

        def run() -> Any:
            weights = decoding.weights() if static else nullcontext(trainer.policy)
            with trainer.pipeline.precision.no_grad(), weights as model:
                return sample(model, prompts, uniforms, settings, trainer.tokenizer, [0], steps=steps)

        return run

    def engines(self) -> Iterator[Row]:
        """Sampling with each engine that is installed, the pass for log-probs included, in float32 and bfloat16."""
        shape, batch = self.size.main, replace(self.size.batch, new=self.size.compared)
        lm = self.model(shape)
        names = ("local", "continuous", *(["vllm"] if find_spec("vllm") else []))
        for name, dtype in product(names, ("float32", "bfloat16")):
            rollout = RolloutConfig(batch_size=batch.rows, max_new_tokens=batch.new, stop_at_eos=False, engine=name)
            trainer = self.trainer(shape, batch, lm, rollout=rollout, model=ModelConfig(dtype=dtype))
            prompts, uniforms = trainer.stream.next_batch()
            rollouts: list[Rollout] = []
            sample = partial(trainer.pipeline.engine.generate, prompts, rollout, uniforms)
            spent = self.seconds(lambda sample=sample, rollouts=rollouts: rollouts.append(sample()), 1)
            yield Row(shape.name, f"{name}, {dtype}", batch.responses / spent, "tokens/s")
            drawn = rollouts[-1].behavior_logprobs
            if drawn is not None:
                apart = float((drawn - rollouts[-1].logprobs).abs().mean())
                yield Row(shape.name, f"{name}, {dtype}, log-probs beside a full pass, mean", apart, "nats")
            del trainer, sample
            self.release()

    def variants(self) -> Iterator[Row]:
        """A critic of each kind, and an adapter, on short completions: time of an iteration beside that without one."""
        shape = self.size.main
        batch = replace(self.size.batch, new=min(self.size.batch.new, 192), epochs=4)
        spent: dict[str, dict[str, float]] = {}
        for name, groups in {
            "no critic": {"critic": CriticConfig(kind="none"), "advantage": AdvantageConfig(estimator="uniform")},
            "shared critic": {},
            "separate critic": {"critic": CriticConfig(kind="separate")},
            "LoRA, shared critic": {"model": ModelConfig(dtype="bfloat16", lora=LoraConfig(rank=16))},
        }.items():
            trainer = self.trainer(shape, batch, **groups)
            rows = self.iterations(trainer, 2)
            spent[name] = {key: statistics.median(row[key] for row in rows) for key in ("seconds", "seconds/update")}
            ratio = spent[name]["seconds"] / spent["no critic"]["seconds"]
            most = {"shared critic": 1.05, "separate critic": 1.5}.get(name)
            goal = () if most is None else self.goal(f"≤ {most}", ratio <= most)
            yield Row(shape.name, f"{name}, iteration", spent[name]["seconds"], "s")
            yield Row(shape.name, f"{name}, update", spent[name]["seconds/update"], "s")
            yield Row(shape.name, f"{name}, iteration over that without", ratio, "×", *goal)
            del trainer
            self.release()

    def compiled(self) -> Iterator[Row]:
        """The main shape with `model.compile`: update, and sampling with a static cache."""
        shape, batch = self.size.main, self.size.batch
        began = time.perf_counter()
        trainer = self.trainer(shape, batch, model=ModelConfig(dtype="bfloat16", compile=True))
        metrics = self.iterations(trainer, 2)
        update = statistics.median(row["seconds/update"] for row in metrics)
        mfu = 100 * costs.iteration_flops(shape, batch, Setup())["update"] / update / costs.H200.flops
        yield Row(shape.name, "compiled: first to last iteration", time.perf_counter() - began, "s")
        yield Row(shape.name, "compiled: update", batch.epochs * batch.rows * batch.length / update, "tokens/s")
        yield Row(shape.name, "compiled: update, MFU of 989 TFLOP/s", mfu, "%")
        yield from self.decoded(shape, trainer, "compiled static cache")

    def side_by_side(self) -> Iterator[Row]:
        """Reference times of the same work: a bare training step, and Transformers' samplers with bfloat16 weights."""
        shape, new = self.size.main, self.size.compared
        lm = self.model(shape)
        yield self.bare_step(shape, lm)
        lm = lm.to(torch.bfloat16).requires_grad_(False)
        prompts = torch.randint(shape.vocabulary, (ROWS, self.size.batch.prompt), device=self.device)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        for cache in ("dynamic", "static"):
            settings = GenerationConfig(**options, cache_implementation=cache)
            spent = self.seconds(partial(lm.generate, prompts, generation_config=settings), 1)
            yield Row(shape.name, f"generate, {cache} cache, {ROWS} × {new} tokens", 1e3 * spent / new, "ms/step")
        length = self.size.batch.prompt + new
        options = {
            "generation_config": GenerationConfig(**options, eos_token_id=-1),
            # By default it takes all memory, for blocks of 256 tokens.
            "continuous_batching_config": ContinuousBatchingConfig(
                num_blocks=ROWS * (length // 256 + 1), max_batch_tokens=ROWS * self.size.batch.prompt
            ),
        }
        spent = self.seconds(partial(lm.generate_batch, prompts.tolist(), **options), 1)
        yield Row(shape.name, f"continuous batching, {ROWS} × {new} tokens", 1e3 * spent / new, "ms/step")

    def bare_step(self, shape: Shape, lm: Any) -> Row:
        """Forward, backward and AdamW on the tokens of a minibatch, with the model's own loss of all positions."""
        batch = self.size.batch
        size = batch.rows // batch.minibatches, batch.length
        ids = torch.randint(shape.vocabulary, size, device=self.device)
        optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = lm(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()

        return Row(shape.name, "bare training step", ids.numel() / self.seconds(step), "tokens/s")

    def growth(self) -> Iterator[Row]:
        """Memory that is held after iterations of a small shape, from the fifth part on."""
        shape = self.size.others[0]
        trainer = self.trainer(shape, replace(self.size.batch, rows=8, new=min(32, self.size.batch.new)))
        held = []
        for number in range(1, self.size.growth + 1):
            trainer.iteration(number)
            self.wait()
            held.append(torch.cuda.memory_allocated() if self.cuda else psutil.Process().memory_info().rss)
        grown = (held[-1] - held[self.size.growth // 5]) / 1e6
        goal = self.goal("≤ 1", grown <= 1)
        yield Row(shape.name, f"memory grown over {self.size.growth} iterations", grown, "MB", *goal)


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one word per token."""
    words = {f"w{i}": i for i in range(vocabulary)}
    raw = Tokenizer(WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="w0", pad_token="w0")


def last_digits(prompts: list[str], completions: list[str]) -> list[float]:
    """A reward that differs between completions and costs nothing."""
    return [int(text[-1:] or 0) / 10 for text in completions]
