"""A run's models from their configurations alone, and the passes of its iteration: timed on random weights, measured on
fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from tokencredit.core.vocab_projection import TokenStats
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.learn.training_mode import disable_noise, training, training_modules
from tokencredit.settings.data import ClassifierTerm, RewardModelTerm
from tokencredit.settings.model import ModelConfig
from tokencredit.text.data.prefixes import Reading, policy_passes
from tokencredit.text.data.prefixes import work as weights
from tokencredit.text.engines.local.sampling import Decoding
from tokencredit.text.engines.local.static_kv_cache import StaticDecoding, static_obstacle
from tokencredit.text.models.actor_critic import ActorCritic, Inputs
from tokencredit.text.models.adapters import AdapterSwitch, add_adapter, enable_checkpointing, lora_config
from tokencredit.text.models.architecture import cut_layers, fuse_gelu, layer_limit, trunk_of
from tokencredit.text.models.critic import build_critic, saved_start
from tokencredit.text.models.kv_cache import steps_of
from tokencredit.text.models.model_loading import as_config_error, base_model, read_tokenizer, resolve
from tokencredit.text.models.peft_models import check_adapted, saved_config
from tokencredit.text.models.precision import Precision, check_quantised, dense_forward, round_frozen, weight_bits
from tokencredit.text.models.run_models import Models
from tokencredit.text.ppo_learner import build_learner
from tokencredit.text.rewards.reward_models import context, may_share
from tokencredit.tools.plan.work import BatchShape, Work, base_config
from tokencredit.user_code.parts import read_by_parts


def build_skeletons(work: Work) -> tuple[ActorCritic, ActorCritic | None]:
    """The policy with its adapter and critic, and the reference model if it is one of its own; or `ConfigError`."""
    config, args = work.config, work.config.critic
    lm, reference, adapter = causal_lm(work.lm_config, config.model), None, adapter_config(config.model)
    rounds = work.half and not work.sharded
    if config.kl.coef > 0 and adapter is None:
        reference = ActorCritic(causal_lm(work.lm_config, config.model)).requires_grad_(False)
        if rounds:
            round_frozen(reference.lm)
    bits = weight_bits(AutoModelForCausalLM, config.model.name, config.model, work.lm_config.to_dict())
    shares = bool(args.lora.rank)
    trunk, switch = critic_trunk(work) if args.kind == "separate" and not shares else None, None
    quantise(lm, 0 if config.model.adapter == "merge" else bits)
    check_quantised(config, lm)
    if adapter is not None:
        add_adapter(lm, adapter, "model.lora")
        switch = AdapterSwitch(lm) if shares else None
        if rounds and work.device == "cuda":
            round_frozen(lm)
    elif shares:
        raise ConfigError(f"critic.lora.rank is {args.lora.rank}, and the policy has no adapter; set model.lora.rank")
    check_adapted(config.model.name, lm)
    if switch is not None:
        switch.add_critic(args)
    if config.model.gradient_checkpointing:
        for part in filter(None, (lm, trunk)):
            enable_checkpointing(part, switch)
    init = "zeros" if args.init == "saved" else args.init
    critic, _ = build_critic(replace(args, name=None, init=init), config.model, lm, trunk, switch)
    return ActorCritic(lm, critic), reference


def quantise(lm: PreTrainedModel, bits: float) -> None:
    """Quantise the linear layers of a model to so many bits, 0 for none, except for the output projection."""
    if not bits:
        return
    head = lm.get_output_embeddings()
    for name, layer in [*lm.named_modules()]:
        if layer is not head and isinstance(layer, nn.Linear | Conv1D):
            lm.set_submodule(name, Codes(layer, bits))


class Codes(nn.Linear):
    """A linear layer that takes the memory of a quantised one, and dequantises to zeros."""

    def __init__(self, layer: nn.Linear | Conv1D, bits: float):
        """Replace a layer."""
        rows, columns = (layer.weight.T if isinstance(layer, Conv1D) else layer.weight).shape
        super().__init__(columns, rows, bias=False, device="meta")
        codes = torch.zeros(int(rows * columns * bits / 8), dtype=torch.uint8, device=layer.weight.device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        vars(self.weight)["quant_state"] = SimpleNamespace(shape=torch.Size((rows, columns)))
        self.bias = layer.bias

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Zeros in the place of its dequantised weight."""
        return torch.zeros(self.out_features, self.in_features, dtype=dtype, device=self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """The pass of a quantised layer."""
        return dense_forward(self, x)


def causal_lm(sizes: Any, args: ModelConfig, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A language model of this configuration, or a trunk, prepared as a loaded one is."""
    with as_config_error(f"a language model from {args.name!r}"):
        # A copy, since cutting a trunk's layers changes its configuration.
        sizes = copy.deepcopy(sizes)
        if kind is AutoModel:
            weight_bits(kind, args.name, args, sizes.to_dict())  # refuses a quantised trunk
        vars(sizes).pop("quantization_config", None)
        model: PreTrainedModel = kind.from_config(sizes, dtype=torch.float32, trust_remote_code=args.trust_remote_code)
    fuse_gelu(model)
    disable_noise(model, dropout=not args.dropout)
    model.eval()
    return model


def adapter_config(args: ModelConfig) -> Any:
    """The PEFT configuration of the trained adapter; None if the whole model is trained."""
    if args.lora.rank:
        return lora_config(args.lora)
    folder = resolve(args.name, "policy")
    return None if args.adapter == "merge" or base_model(args.name, folder) is None else saved_config(folder)


def critic_trunk(work: Work) -> PreTrainedModel:
    """The trunk of a separate critic: a saved one's, the one of `critic.name`, or the policy's."""
    args, model = work.config.critic, work.config.model
    saved = saved_start(args, model)
    name = args.name if saved is None or saved.trunk is None else str(saved.trunk)
    if name is None:
        trunk = trunk_of(causal_lm(work.lm_config, model))
    else:
        trunk = causal_lm(base_config(model, name), model, AutoModel)
    if (limit := layer_limit(args.layers, trunk)) is not None:
        cut_layers(trunk, limit)
    return trunk


class RewardSkeleton(NamedTuple):
    """A reward model of this configuration, without its weights."""

    model: PreTrainedModel
    batch_size: int
    limit: int | None
    """Longest text in tokens."""
    prefix: bool
    """Its scores of prefixes count, if anything reads them."""

    def read(self, length: int) -> None:
        """A batch of texts of so many tokens."""
        ids = torch.ones(self.batch_size, min(length, self.limit or length), dtype=torch.long)
        with torch.no_grad():
            self.model(input_ids=ids, attention_mask=torch.ones_like(ids))


def reward_skeletons(work: Work) -> list[RewardSkeleton]:
    """The classifiers and reward models of the configured terms."""
    skeletons = []
    for term in work.config.reward:
        if not isinstance(term, ClassifierTerm | RewardModelTerm):
            continue
        source = term.classifier if isinstance(term, ClassifierTerm) else term.reward_model
        folder = resolve(source, "sentiment")
        with as_config_error(f"a classifier from {source!r}"):
            config = AutoConfig.from_pretrained(base_model(source, folder) or folder)
            config.pad_token_id = config.pad_token_id or 0
            model = AutoModelForSequenceClassification.from_config(config, dtype=getattr(torch, term.dtype)).eval()
            limit = context(model, read_tokenizer(source, folder))
        skeletons.append(RewardSkeleton(model, term.batch_size, limit, term.weight != 0))
    return skeletons


def prefix_passes(work: Work, readers: Sequence[RewardSkeleton], policy: int) -> float | None:
    """The work of scoring prefixes, in forward passes of a policy with so many weights; None if none are scored."""
    config, every = work.config, work.config.critic.prefix_every
    off = every == 0 or not (config.critic.ours or "prefix_scores" in read_by_parts(config))
    if off or config.advantage.bootstrap or config.several_turns() or not any(reader.prefix for reader in readers):
        return None
    models = [(weights(x.model), x.limit if may_share(x.model) else 0) for x in readers if x.prefix]
    prompt, passes = float(work.mean.prompt), policy_passes(config)
    if every == "auto":
        every = Reading.estimate(models, policy * passes, prompt, config.rollout.max_new_tokens).spacing()
    return Reading.estimate(models, policy, prompt, work.mean.new).share(every)


class SumOfLogprobs:
    """A loss with the cost of the run's, `additive` like it: if false, several chunks are projected twice."""

    def __init__(self, additive: bool):
        self.additive = additive

    def __call__(self, now: TokenStats, at: slice) -> Tensor:  # noqa: ARG002  (the PolicyLoss protocol)
        """The sum of all statistics."""
        return torch.stack([x.sum() for x in now if x is not None]).sum()


class SkeletonPasses:
    """Passes of a run's models over random rows."""

    def __init__(self, work: Work, device: torch.device):
        """Build the models on a device."""
        self.work, self.precision = work, Precision(work.dtype, device)
        with device:
            self.policy, self.reference = build_skeletons(work)
        models = Models(self.policy, self.reference, cast(Any, None), self.precision, [])
        self.optimizer = build_learner(work.config, models, Processes()).optimizer
        cache = work.config.rollout.cache
        static = cache == "static" or (cache == "auto" and work.device == "cuda")
        self.static = static and not work.sharded and static_obstacle(self.policy) is None

    def inputs(self, rows: int, batch: BatchShape) -> Inputs:
        """Rows of random tokens; the first begins with padding."""
        device, vocabulary = self.precision.device, self.work.lm_config.get_text_config().vocab_size
        prompt_mask = torch.ones(rows, batch.prompt, dtype=torch.bool, device=device)
        prompt_mask[0, : batch.prompt > 1] = False
        return {
            "prompt_ids": torch.randint(vocabulary, (rows, batch.prompt), device=device),
            "prompt_mask": prompt_mask,
            "response_ids": torch.randint(vocabulary, (rows, batch.new), device=device),
            "mask": torch.ones(rows, batch.new, dtype=torch.bool, device=device),
        }

    def score(self, inputs: Inputs) -> None:
        """Log-probs of the policy, without gradients."""
        with self.precision.no_grad():
            self.policy.logprobs(inputs, self.work.config.rollout.temperature)

    def refer(self, inputs: Inputs) -> None:
        """Log-probs of the reference model and, for `kl.place: both`, the policy's exact KL to it."""
        config, reference = self.work.config, self.reference or self.policy
        with self.precision.no_grad():
            _, hidden = reference.logprobs(inputs, config.rollout.temperature)
            if config.kl.place == "both":
                inputs = inputs | {"ref_hidden": hidden}
                self.policy(inputs, config.rollout.temperature, reference=reference, values=False)

    def value(self, inputs: Inputs) -> None:
        """Values of the critic, without gradients."""
        with self.precision.no_grad():
            self.policy.critic_outputs(inputs)

    def train(self, inputs: Inputs) -> None:
        """Forward and backward pass of policy and critic."""
        config = self.work.config
        loss, kl = SumOfLogprobs(additive=config.ppo.loss != "gspo"), None
        if hidden := self.work.reference_width:
            kl = self.reference or self.policy
            inputs = inputs | {"ref_hidden": torch.zeros(*inputs["mask"].shape, hidden)}
        with training(training_modules(self.policy)), self.precision.updates():
            with self.precision.autocast():
                outputs = self.policy(inputs, config.rollout.temperature, loss, config.ppo.entropy_coef > 0, kl)
            (outputs.policy_loss + (0 if outputs.values is None else outputs.values.sum())).backward()

    @contextmanager
    def sampling(self, batch: BatchShape) -> Iterator[Sampling]:
        """A rollout of this batch, with its copy of the weights for static decoding."""
        decoding = StaticDecoding(self.policy) if self.static else None
        weights = nullcontext(self.policy) if decoding is None else decoding.weights()
        with self.precision.no_grad(), weights as model:
            yield Sampling(self, batch, model, steps_of if decoding is None else decoding.steps)


class Sampling:
    """A rollout in the course of sampling."""

    def __init__(self, passes: SkeletonPasses, batch: BatchShape, model: ActorCritic, steps: Any):
        """Prepare random prompts for a model."""
        inputs, rollout = passes.inputs(batch.rows, batch), passes.work.config.rollout
        self.ids, self.model, self.per_prompt = inputs["prompt_ids"], model, rollout.per_prompt
        self.steps: Any = steps(model, inputs["prompt_mask"], batch.new)
        settings = replace(rollout, max_new_tokens=batch.new, min_new_tokens=0, stop=[], stop_at_eos=False)
        uniforms, nothing = torch.rand(batch.rows, batch.new, device=self.ids.device), self.ids.new_zeros(0)
        self.state = Decoding(uniforms, [nothing] * batch.rows, settings, self.ids.new_zeros(1), {})

    def prefill(self) -> None:
        """Read the prompts, and draw the first tokens."""
        self._draw(self.steps.prompts(self.ids, self.per_prompt), self.ids)

    def step(self) -> None:
        """Run the last tokens, and draw the next."""
        self.steps.repeat(self._step, 1)

    def _step(self) -> None:
        tokens = self.state.last().unsqueeze(-1)
        self._draw(self.steps.next(tokens), tokens)

    def _draw(self, hidden: Tensor, tokens: Tensor) -> None:
        critic = self.model.critic
        values = critic(hidden) if critic is not None and critic.reads_last else None
        self.state.draw(self.model.logits(hidden), tokens, values)
