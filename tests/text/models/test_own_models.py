"""Models of one's own: a recurrent network without a KV cache, whose trunk is a plain module."""

import re

import pytest
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from helpers.configs import quiet, text_config
from tokencredit.errors import ConfigError
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import AuditConfig
from tokencredit.text.models.model_loading import load_tokenizer
from tokencredit.text.ppo_trainer import PPOTrainer


class GRUConfig(PreTrainedConfig):
    model_type = "gru"

    def __init__(self, vocab_size=2, hidden_size=16, **others):
        super().__init__(**others)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, 1


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.gru = nn.GRU(config.hidden_size, config.hidden_size, batch_first=True)

    def forward(self, input_ids, attention_mask):
        time, padding = torch.arange(input_ids.shape[1]), (attention_mask == 0).sum(1, keepdim=True)
        states, _ = self.gru(self.embed_tokens(input_ids.gather(1, (time + padding) % len(time))))
        back = ((time - padding) % len(time)).unsqueeze(-1).expand_as(states)
        return BaseModelOutput(last_hidden_state=states.gather(1, back))


class GRU(PreTrainedModel, GenerationMixin):
    config_class = GRUConfig

    def __init__(self, config, trunk=Trunk):
        super().__init__(config)
        self.model, self.lm_head = trunk(config), nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, attention_mask, **_):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, attention_mask).last_hidden_state))


class Padded(Trunk):
    """Runs through the padding."""

    def forward(self, input_ids, attention_mask=None):
        return BaseModelOutput(last_hidden_state=self.gru(self.embed_tokens(input_ids))[0])


def short(completions, **_):
    return [-len(text) / 100 for text in completions]


def trainer_of(folder, trunk=Trunk, model=None, cache="auto", **changes):
    tokenizer = load_tokenizer(ModelConfig())
    torch.manual_seed(0)
    lm = model or GRU(GRUConfig(vocab_size=len(tokenizer)), trunk)
    rollout = RolloutConfig(batch_size=8, max_new_tokens=6, cache=cache)
    args = text_config(folder, run=quiet(folder, 2), rollout=rollout, **changes)
    return PPOTrainer(lm, short, args, processing_class=tokenizer)


def test_a_model_without_a_cache_trains_by_full_passes_and_says_so_once(tmp_path, capsys):
    trainer = trainer_of(tmp_path / "run", audit=AuditConfig(every=2, completions=2, continuations=2, states=None))
    before = [x.clone() for x in trainer.policy.lm.parameters()]
    trainer.train()
    line = "Trunk takes no KV cache (cache or past_key_values), so each sampled token costs a full forward pass"
    assert capsys.readouterr().out.count(line) == 1
    assert any(not torch.equal(x, y) for x, y in zip(before, trainer.policy.lm.parameters(), strict=True))
    assert trainer.audit(AuditConfig(completions=4, continuations=4, states=2))["tokens"] > 0
    # Sampling token by token gives the log-probs of a full pass, groups and shorter completions included.
    prompts, settings = trainer.prompts.batch(0, 8, 4), trainer.args.rollout
    rollout = trainer.pipeline.collect(prompts, settings, torch.rand(8, 6), 4).rollout
    with torch.no_grad():
        torch.testing.assert_close(rollout.logprobs, trainer.policy.logprobs(rollout.inputs(), 1.0)[0])


def test_episodes_of_several_turns_run_the_whole_text_each_turn(tmp_path):
    trainer = trainer_of(tmp_path / "run")
    prompts, settings = trainer.prompts.batch(0, 2), trainer.args.rollout
    conversation = trainer.pipeline.engine.converse(prompts, settings, torch.rand(2, 6))
    conversation.sample([0, 1], [[], []], [2, 3], lambda row: None)
    conversation.sample([0], [[5, 6]], [2], lambda row: None)
    rollout = conversation.rollout()
    assert conversation.ids(0)[2:4] == [5, 6]
    with torch.no_grad():
        expected = trainer.policy.logprobs(rollout.inputs(), 1.0)[0] * rollout.mask
    torch.testing.assert_close(rollout.logprobs, expected)


@pytest.mark.parametrize(
    ("trunk", "changes", "message"),
    [
        (Padded, {}, "padded on the left.* step over tokens whose attention_mask is 0, or take a model"),
        (
            nn.Identity,
            {},
            "no projection to a vocabulary.*lm_head.*embed_tokens.*page .Python., under .your own model",
        ),
        (Trunk, {"cache": "static"}, "rollout.cache is static, and Trunk takes no KV cache"),
    ],
)
def test_a_model_that_cannot_be_trained_is_told_what_to_change(trunk, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, trunk, **changes)


def test_a_plain_module_is_told_the_shortest_way(tmp_path):
    with pytest.raises(ConfigError, match=re.escape('(docs page "Python", under "your own model")')):
        trainer_of(tmp_path, model=Trunk(GRUConfig()))
