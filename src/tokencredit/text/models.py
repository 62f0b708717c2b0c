"""The actor-critic: a causal language model, the value head on its trunk, and how both are loaded and saved."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.core.logprobs import token_stats
from tokencredit.learn.update import Evaluation
from tokencredit.runs.errors import ConfigError

VALUE_HEAD_FILE = "value_head.safetensors"


class ActorCritic(nn.Module):
    """A causal language model whose last normalised hidden state also serves a value head.

    The model is used in two halves, so that no `[batch, time, vocabulary]` tensor is ever needed: `hidden` runs the
    trunk, and the vocabulary projection happens where its result is wanted, at response positions only.
    Dropout is off: the probabilities that sampled a token must be those that training starts from.
    """

    def __init__(self, lm: PreTrainedModel, value_head: str = "linear"):
        super().__init__()
        self.lm = lm.eval()
        self.value_head = build_value_head(value_head, lm.get_output_embeddings().weight.shape[1])
        self.softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any = None) -> Tensor:
        """Last normalised hidden states `[batch, time, width]`; `cache`, if given, is read and extended."""
        outputs = self.lm.get_decoder()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return outputs.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of hidden states, in float32."""
        logits = self.lm.get_output_embeddings()(hidden).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def values(self, hidden: Tensor) -> Tensor:
        """Values, in float32, of the states that hidden states `[..., width]` stand for: `[...]`."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value_head(hidden.float()).squeeze(-1)

    def forward(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        response_ids: Tensor,
        mask: Tensor,
        temperature: float,
        entropy: bool = False,
        reference: ActorCritic | None = None,
        ref_hidden: Tensor | None = None,
    ) -> Evaluation:
        """Evaluate given responses: what training needs of each token, with gradients.

        Args:
            prompt_ids: `[batch, prompt]`, padded on the left.
            prompt_mask: `[batch, prompt]`, true at the prompt's own tokens.
            response_ids: `[batch, time]`, padded on the right; what stands in the padding matters to nothing before it.
            mask: `[batch, time]`, true at sampled tokens; the vocabulary projection is computed for no others.
            temperature: divides the logits, as it did in sampling.
            entropy: also compute the entropy of each position's distribution.
            reference: also compute the exact KL to this model, from its hidden states.
            ref_hidden: `[batch, time, width]`, what `reference.response_hidden` gave for the same responses.

        Returns:
            log-probabilities (nats), values of the states before each token, entropies and exact KL (nats) or None;
            each `[batch, time]` in float32.
        """
        hidden = self.response_hidden(prompt_ids, prompt_mask, response_ids)
        return self.evaluate(hidden, response_ids, mask, temperature, entropy, reference, ref_hidden)

    def response_hidden(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor) -> Tensor:
        """Hidden states `[batch, time, width]` of the states before each response token; arguments as in `forward`."""
        start, length = prompt_ids.shape[1], response_ids.shape[1]
        input_ids = torch.cat([prompt_ids, response_ids[:, :-1]], dim=1)
        attention_mask, position_ids = positions(prompt_mask, length - 1)
        return self.hidden(input_ids, attention_mask, position_ids)[:, start - 1 :]

    def evaluate(
        self,
        hidden: Tensor,
        response_ids: Tensor,
        mask: Tensor,
        temperature: float,
        entropy: bool = False,
        reference: ActorCritic | None = None,
        ref_hidden: Tensor | None = None,
    ) -> Evaluation:
        """The second half of `forward`, from the hidden states that `response_hidden` gave."""
        projection = self.lm.get_output_embeddings()
        ref = None
        if reference is not None and ref_hidden is not None:
            ref_projection = reference.lm.get_output_embeddings()
            ref = (ref_hidden, ref_projection.weight, ref_projection.bias)
        stats = token_stats(
            hidden,
            projection.weight,
            response_ids,
            bias=projection.bias,
            ref=ref,
            mask=mask,
            temperature=temperature,
            softcap=self.softcap,
            entropy=entropy,
        )
        assert stats.logprobs is not None
        return Evaluation(stats.logprobs, self.values(hidden), stats.entropy, stats.kl)


def positions(prompt_mask: Tensor, response_length: int) -> tuple[Tensor, Tensor]:
    """Attention mask and position ids of left-padded prompts followed by `response_length` tokens.

    The padding on a response's right is not masked: causal attention lets no token before it see it, and a mask that
    is true everywhere lets attention take its fastest path.
    """
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(prompt_mask), response_length)], dim=1)
    return mask, (mask.long().cumsum(1) - 1).clamp(min=0)


def build_value_head(kind: str, width: int) -> nn.Module:
    """A value head whose last layer starts at zero, so that an untrained critic says 0 rather than noise."""
    last = nn.Linear(width if kind == "linear" else 4 * width, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return last if kind == "linear" else nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), last)


def resolve(name: str, part: str) -> str:
    """The folder behind `builtin:reviews` (`part` is policy or sentiment); any other name as it is.

    Raises:
        ConfigError: an unknown built-in world, or a folder that holds no model.
    """
    if name == "builtin:reviews":
        return str(files("tokencredit") / "demo" / "reviews" / part)
    if name.startswith("builtin:"):
        raise ConfigError(f"{name!r} is not a built-in world; there is one, builtin:reviews")
    folder = Path(name)
    looks_like_path = folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if folder.exists() or looks_like_path:
        if not (folder.expanduser() / "config.json").is_file():
            raise ConfigError(f"{name!r} is not a model folder: it has no config.json")
        return str(folder.expanduser())
    return name


def load_language_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model, with float32 weights, and its tokenizer.

    Raises:
        ConfigError: the name leads to no causal language model, to no tokenizer, or to one that cannot end a text.
    """
    folder = resolve(name, "policy")
    try:
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot load a language model from {name!r}: {error}") from error
    if not end_ids(lm, tokenizer):
        raise ConfigError(
            f"the tokenizer of {name!r} has no end-of-sequence token, so no completion could ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    check_projection(name, lm)
    return lm, tokenizer


def end_ids(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token id that ends a text: the tokenizer's, and those the model's generation settings add.

    Ids outside the vocabulary, which some architectures have by default, can never be sampled and do not count.
    """
    listed = lm.generation_config.eos_token_id if lm.generation_config else None
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
    return sorted(i for i in ids if 0 <= i < lm.config.get_text_config().vocab_size)


def room_for_prompts(lm: PreTrainedModel, max_new_tokens: int) -> int | None:
    """The longest prompt that leaves room for a completion in the model's context; None if that has no known end."""
    context = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    return None if context is None else context - max_new_tokens


@torch.no_grad()
def check_projection(name: str, lm: PreTrainedModel) -> None:
    """Make sure that hidden states and output projection give the very logits that the model itself gives.

    Raises:
        ConfigError: they do not, because the model scales or shapes its logits in a way of its own.
    """
    ids = torch.arange(min(4, lm.config.get_text_config().vocab_size)).unsqueeze(0)
    model = ActorCritic(lm)
    mask, position_ids = positions(torch.ones_like(ids, dtype=torch.bool), 0)
    ours = model.logits(model.hidden(ids, mask, position_ids))
    theirs = lm(input_ids=ids, attention_mask=mask).logits.float()
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
        raise ConfigError(f"{name!r} shapes its logits in a way that is not supported: {type(lm).__name__}")


def save_policy(folder: Path, model: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write an ordinary Hugging Face folder, with the value head in a file beside the model."""
    model.lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(
        {key: value.contiguous() for key, value in model.value_head.state_dict().items()}, folder / VALUE_HEAD_FILE
    )


def load_value_head(folder: Path, model: ActorCritic) -> None:
    """Read back the value head that `save_policy` wrote."""
    model.value_head.load_state_dict(load_file(folder / VALUE_HEAD_FILE))
