"""Seconds of a run's passes on this machine, timed on a model of the same shape with random weights."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tokencredit.core.vocab_projection import TokenStats
from tokencredit.distributed.processes import Processes, threads
from tokencredit.learn.optim import build_optimizer, clip_gradients
from tokencredit.learn.state import trainable
from tokencredit.learn.training_mode import disable_noise, training, training_modules
from tokencredit.settings.model import LoraConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.local.sampling import Steps, sample
from tokencredit.text.engines.local.static_kv_cache import static_decoding
from tokencredit.text.models.actor_critic import ActorCritic, Inputs
from tokencredit.text.models.adapters import add_adapter, lora_config
from tokencredit.text.models.architecture import cut_layers, trunk_of
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.kv_cache import CachedSteps
from tokencredit.text.models.model_loading import fuse_gelu
from tokencredit.text.models.precision import Precision, round_frozen
from tokencredit.text.models.run_models import enable_checkpointing
from tokencredit.tools.plan.memory import Batch, activation_bytes, micro_rows
from tokencredit.tools.plan.shape import FLOAT, parameters
from tokencredit.tools.plan.work import Work

MEMORY = 4e9
"""Bytes that the timed model may take, with gradients and activations; a deeper or longer one is extrapolated."""
SECONDS = 15.0
"""All passes are timed in turns until this time is spent, at most `REPEATS` times each."""
REPEATS = 5
SHORT = 9
"""Tokens of a timed rollout; each decoding step is timed by itself."""


@dataclass(frozen=True)
class Timings:
    """Seconds of one process; passes are over `rows` rows of the mean length."""

    layers: int
    """Layers of the timed model."""
    rows: int
    prefill: float
    """Reading the prompts of a whole rollout, and sampling the first token."""
    steps: tuple[float, float]
    """A decoding step of a whole rollout, at its start and at its end."""
    scoring: float
    """A pass of the policy without gradients."""
    reference: float
    """A pass of the reference model; 0 without one."""
    critic: float
    """A pass of a separate critic without gradients; 0 without one."""
    training: float
    """Forward and backward pass of policy and critic."""
    critic_training: float
    """Forward and backward pass of the critic alone; 0 without `critic.epochs`."""
    optimizer: float
    """Gradient clipping and optimizer step, per minibatch."""


class SumOfLogprobs:
    """A loss of the updates' cost."""

    def __init__(self, additive: bool):
        """Store `PolicyLoss.additive` of the run's loss; if false, several chunks are projected twice."""
        self.additive = additive

    def __call__(self, now: TokenStats, at: slice) -> Tensor:  # noqa: ARG002  (the PolicyLoss protocol)
        """The sum of the log-probs."""
        assert now.logprobs is not None
        return now.logprobs.sum()


def calibrate(work: Work, processes: Processes, memory: float | None) -> Timings | None:
    """Time a run's passes on the compute device; None if not even two layers of its model fit into `memory`.

    Models that are too large are timed with fewer layers and rows: twice, with one layer and with more, of which the
    difference is the time of a layer.
    """
    layers, rows = affordable(work)
    if memory is not None and size(work, layers, rows) > memory:
        return None
    all_layers, on_cpu = work.model.shape.layers, work.setup.device == "cpu"
    with threads(max(1, torch.get_num_threads() // work.setup.processes) if on_cpu else None):
        deep = timed(work, processes, layers, rows)
        return deep if layers == all_layers else extrapolated(timed(work, processes, 1, rows), deep, all_layers)


def affordable(work: Work) -> tuple[int, int]:
    """Layers and rows per pass of the timed model, which has at least two layers."""
    shape, setup, batch = work.model.shape, work.setup, work.mean
    rows = micro_rows(-(-batch.rows // batch.minibatches), batch, setup)
    layers = shape.layers
    while layers > 2 and size(work, layers, rows) > MEMORY:
        layers -= 1
    while rows > 1 and size(work, layers, rows) > MEMORY:
        rows -= 1
    return layers, rows


def size(work: Work, layers: int, rows: int) -> float:
    """Bytes of the timed model with its reference, gradients, moments and activations, about."""
    shape, setup, length = replace(work.model.shape, layers=layers, others=0), work.setup, work.mean.length
    copies = (2 if setup.lora_rank else 5) + 4 * (setup.critic == "separate")
    return FLOAT * copies * parameters(shape) + rows * length * activation_bytes(shape, length, setup)


def extrapolated(shallow: Timings, deep: Timings, layers: int) -> Timings:
    """Timings of a model with `layers` layers, by those of a model with one layer and one with more."""

    def line(first: float, second: float) -> float:
        return second + max(second - first, 0.0) / (deep.layers - 1) * (layers - deep.layers)

    one, more = vars(shallow), vars(deep)
    seconds: dict[str, Any] = {name: line(one[name], x) for name, x in more.items() if isinstance(x, float)}
    steps = line(shallow.steps[0], deep.steps[0]), line(shallow.steps[1], deep.steps[1])
    return replace(deep, steps=steps, **seconds)


def timed(work: Work, processes: Processes, layers: int, rows: int) -> Timings:
    """Timings of a model with this many layers, for passes over `rows` rows."""
    setup, batch, config = work.setup, work.mean, work.config
    precision = Precision(setup.dtype, processes.device)
    policy, reference = build(work, precision, layers)
    inputs = random_inputs(work, replace(batch, rows=rows), processes.device)
    loss = SumOfLogprobs(additive=config.ppo.loss != "gspo")
    # Of what an optimizer step costs, only the number of parameters depends on the layers; it is timed as a whole.
    group = [{"params": trainable(policy), "lr": 1e-9}]
    optimizer = build_optimizer(group)
    start, end = (Rollouts(work, policy, precision, processes, prompt) for prompt in rollout_prompts(batch))

    def scored(model: ActorCritic) -> None:
        with precision.no_grad():
            model.logprobs(inputs, config.rollout.temperature)

    def valued() -> None:
        with precision.no_grad():
            policy.critic_outputs(inputs)

    def train() -> None:
        with training(training_modules(policy)), precision.updates():
            with precision.autocast():
                outputs = policy(inputs, config.rollout.temperature, loss, config.ppo.entropy_coef > 0)
            (outputs.policy_loss + (0 if outputs.values is None else outputs.values.sum())).backward()

    def train_critic() -> None:
        with training(training_modules(policy)), precision.updates():
            with precision.autocast():
                values = policy.critic_outputs(inputs).values
            values.sum().backward()

    def step() -> None:
        clip_gradients(group[0]["params"], config.optim.max_grad_norm)  # type: ignore[arg-type]
        optimizer.step()

    calls: dict[str, Callable[[], None]] = {"start": start, "end": end, "scoring": partial(scored, policy)}
    if reference is not None:
        calls["reference"] = partial(scored, reference)
    if setup.critic == "separate":
        calls["critic"] = valued
    if config.critic.epochs:
        calls["critic_training"] = train_critic
    calls |= {"training": train, "optimizer": step}
    seconds = median_seconds(calls, processes)
    if reference is None and setup.reference:
        seconds["reference"] = seconds["scoring"]  # without the adapter
    first, last = start.step(), end.step()
    prefill = max(seconds.pop("start") - (start.new - 1) * first, 0.0)
    del seconds["end"]
    optional = {"reference": 0.0, "critic": 0.0, "critic_training": 0.0}
    return Timings(layers, rows, prefill, (first, last), **(optional | seconds))


def median_seconds(calls: Mapping[str, Callable[[], None]], processes: Processes) -> dict[str, float]:
    """Median seconds of each call, in turns, so that other programs disturb all of them alike; first all warm up."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    started = time.perf_counter()
    for turn in range(REPEATS):
        if turn and time.perf_counter() - started > SECONDS:
            break
        for name, call in calls.items():
            spent[name].append(seconds_of(call, processes))
    return {name: statistics.median(times) for name, times in spent.items()}


def seconds_of(call: Callable[[], None], processes: Processes) -> float:
    """Seconds of a call, until the run's device has computed it."""
    processes.settle()
    started = time.perf_counter()
    call()
    processes.settle()
    return time.perf_counter() - started


def build(work: Work, precision: Precision, layers: int) -> tuple[ActorCritic, ActorCritic | None]:
    """The policy with its critic, and the reference model if it is one of its own, with random weights."""
    config = work.config
    sizes = shortened(work.model.lm.config, layers)
    with torch.random.fork_rng(), torch.device(precision.device):
        torch.manual_seed(0)
        code = config.model.trust_remote_code
        lm = AutoModelForCausalLM.from_config(sizes, dtype=torch.float32, trust_remote_code=code)
    return assemble(lm, work, precision, layers)


def shortened(config: Any, layers: int) -> Any:
    """A model's configuration with its first layers only."""
    config = copy.deepcopy(config)
    text, count = config.get_text_config(), config.get_text_config().num_hidden_layers
    for key, value in list(vars(text).items()):  # such as layer_types
        if "layer" in key and isinstance(value, list) and len(value) == count:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    return config


def assemble(lm: Any, work: Work, precision: Precision, layers: int) -> tuple[ActorCritic, ActorCritic | None]:
    """Policy and reference model from a language model."""
    config, setup = work.config, work.setup
    fuse_gelu(lm)
    disable_noise(lm, dropout=not config.model.dropout)
    reference = None
    if setup.reference and not setup.lora_rank:
        reference = ActorCritic(copy.deepcopy(lm)).requires_grad_(False)
        if precision.bfloat16:
            round_frozen(reference.lm)
    trunk = None
    if setup.critic == "separate":
        trunk = copy.deepcopy(trunk_of(lm))
        count = min(layers, (setup.trunk or work.model.shape).layers)
        if count < layers:
            cut_layers(trunk, count)
    if setup.lora_rank:
        targets = config.model.lora.target_modules
        add_adapter(lm, lora_config(LoraConfig(rank=setup.lora_rank, target_modules=targets)), "model.lora")
    if setup.gradient_checkpointing:
        for part in (lm, *([] if trunk is None else [trunk])):
            enable_checkpointing(part)
    critic = None
    if setup.critic != "none":
        bins = setup.outputs if setup.outputs > 1 else None
        head = build_value_head(setup.head, work.model.shape.width, bins=bins)
        critic = Critic(head.to(precision.device), trunk, detach=config.critic.detach)
    return ActorCritic(lm, critic), reference


def random_inputs(work: Work, batch: Batch, device: torch.device) -> Inputs:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> Tensor:
        return torch.randint(work.model.shape.vocabulary, (batch.rows, length), generator=generator).to(device)

    prompt_mask = torch.ones(batch.rows, batch.prompt, dtype=torch.bool, device=device)
    if work.setup.padded:
        prompt_mask[0, 0] = batch.prompt == 1
    mask = torch.ones(batch.rows, batch.new, dtype=torch.bool, device=device)
    return {
        "prompt_ids": tokens(batch.prompt),
        "prompt_mask": prompt_mask,
        "response_ids": tokens(batch.new),
        "mask": mask,
    }


def rollout_prompts(batch: Batch) -> tuple[int, int]:
    """Tokens before short rollouts with the cache of a rollout's start and of its end."""
    return batch.prompt, batch.prompt + max(batch.new - SHORT, 0)


class Rollouts:
    """Short rollouts of the run's batch; keeps the seconds of each decoding step."""

    def __init__(self, work: Work, policy: ActorCritic, precision: Precision, processes: Processes, prompt: int):
        """Prepare prompts of `prompt` random tokens."""
        batch = work.mean
        inputs = random_inputs(work, replace(batch, prompt=prompt), precision.device)
        ids, mask = inputs["prompt_ids"], inputs["prompt_mask"]
        none: list[Any] = [""] * batch.rows
        self.policy, self.precision, self.processes = policy, precision, processes
        self.prompts = PromptBatch(prompts=none, texts=none, ids=ids, mask=mask, columns={})
        self.per_prompt, self.new = work.config.rollout.per_prompt, min(batch.new, SHORT)
        self.settings = replace(
            work.config.rollout, max_new_tokens=self.new, min_new_tokens=0, stop=[], stop_at_eos=False
        )
        self.uniforms = torch.rand(batch.rows, self.new, device=precision.device)
        self.decoding = static_decoding(policy, precision, compiled=False) if work.setup.static_cache else "off"
        self.spent: list[float] = []

    def __call__(self) -> None:
        """Sample once."""
        tokenizer: Any = None  # only stop strings need one
        with self.precision.no_grad(), weights(self.policy, self.decoding) as model:
            sample(
                model,
                self.prompts,
                self.uniforms,
                self.settings,
                tokenizer,
                [0],
                self.per_prompt,
                steps=self._steps,
                every=1,
            )

    def step(self) -> float:
        """Median seconds of a decoding step; 0 if there was none."""
        return statistics.median(self.spent or [0.0])

    def _steps(self, *args: Any) -> Steps:
        """The steps of a rollout, each of which is timed."""
        states = CachedSteps(*args) if isinstance(self.decoding, str) else self.decoding.steps(*args)
        repeat = states.repeat

        def timed_repeat(step: Callable[[], None], count: int) -> None:
            self.spent.append(seconds_of(lambda: repeat(step, count), self.processes) / count)

        states.repeat = timed_repeat  # type: ignore[method-assign]
        return states


@contextmanager
def weights(policy: ActorCritic, decoding: Any) -> Iterator[ActorCritic]:
    """The model that decodes: the policy itself, or its copy for static decoding."""
    if isinstance(decoding, str):
        yield policy
    else:
        with decoding.weights() as model:
            yield model
