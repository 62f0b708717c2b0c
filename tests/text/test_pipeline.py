"""The pipeline around another engine than the local one, and the same for training and evaluation."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from helpers.configs import quiet, text_config
from helpers.models import loud
from tokencredit.report.reading import read_run
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import UpdateConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.pipeline import UnusableBatch
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards.calls import RewardError, Term
from tokencredit.text.rewards.reward_models import Classifier, load
from tokencredit.text.rollout_passes import evaluate_rollout


class Elsewhere:
    """An engine that gives tokens and log-probabilities alone, and hears of new weights."""

    def __init__(self, engine):
        self.engine, self.changes = engine, 0

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, prompts, settings, uniforms, per_prompt=1):
        return replace(self.engine.generate(prompts, settings, uniforms, per_prompt), values=None)

    def weights_changed(self):
        self.changes += 1


def trainer_of(folder, dtype="float32", **changes):
    args = PPOConfig(
        model=ModelConfig(dtype=dtype),
        rollout=RolloutConfig(batch_size=4, max_new_tokens=6),
        ppo=UpdateConfig(epochs=1, minibatches=1),
        run=quiet(folder, 2, save_every=2),
    )
    return PPOTrainer(args=replace(args, **changes))


def test_another_engine_trains_the_same(tmp_path):
    """The critic's values come from a pass of their own, and the engine is told of each change of the weights."""
    own = trainer_of(tmp_path / "own")
    other = trainer_of(tmp_path / "other")
    engine = other.pipeline.engine = Elsewhere(other.pipeline.engine)
    scored = own.collect(), other.collect()
    assert scored[1].rollout.values is not None
    torch.testing.assert_close(scored[0].rollout.values, scored[1].rollout.values)
    assert scored[0].completions == scored[1].completions
    other.train()
    assert engine.changes == 2
    longer = replace(other.args.run, iterations=3)
    again = trainer_of(tmp_path / "other", run=longer)
    engine = again.pipeline.engine = Elsewhere(again.pipeline.engine)
    again.train(resume_from_checkpoint=True)
    assert engine.changes == 2, "once for the checkpoint's weights, once for the third iteration's"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_local_engine_gives_what_a_full_pass_gives(dtype, tmp_path):
    trainer = trainer_of(tmp_path, dtype)
    rollout = trainer.collect().rollout
    with trainer.pipeline.precision.no_grad():
        now = evaluate_rollout(trainer.policy, rollout, 1.0, None)
    close = {"rtol": 0, "atol": 0} if dtype == "bfloat16" else {}
    torch.testing.assert_close(rollout.logprobs, now.logprobs, **close)
    torch.testing.assert_close(rollout.values, now.values, **close)


def test_values_are_computed_only_where_they_are_wanted(tmp_path):
    trainer = trainer_of(tmp_path, critic=CriticConfig(kind="separate"))
    settings = trainer.args.rollout
    prompts, uniforms = trainer.prompts.batch(0, 4), torch.rand(4, settings.max_new_tokens)
    assert trainer.pipeline.collect(prompts, settings, uniforms).rollout.values is None
    assert trainer.pipeline.collect(prompts, settings, uniforms, values=True).rollout.values is not None


def test_the_whole_reward_is_the_score_and_what_tokens_earned(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.pipeline.terms = [
        Term("whole", 2.0, lambda completions, **_: [1.0] * len(completions)),
        Term("each", 0.5, lambda completion_ids, **_: [[1.0] * len(ids) for ids in completion_ids]),
    ]
    scored = trainer.collect()
    assert scored.scores.tolist() == [2.0] * 4
    assert scored.total_scores().tolist() == pytest.approx((2.0 + 0.5 * scored.rollout.mask.sum(1)).tolist())


def test_a_batch_with_a_non_finite_reward_is_unusable(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.pipeline.terms = [Term("odd", 1.0, lambda completions, **_: [float("nan")] * len(completions))]
    with pytest.raises(UnusableBatch, match="reward term 'odd' is nan") as caught:
        trainer.collect()
    assert len(caught.value.texts) == len(caught.value.rollout.mask) == 4


def test_a_batch_that_no_term_scores_is_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.pipeline.terms = [Term("odd", 1.0, lambda completions, **_: [None] * len(completions))]
    with pytest.raises(RewardError, match="no reward term scored any completion: odd returned None for all"):
        trainer.collect()
    trainer.pipeline.terms += [Term("watched", 0.0, lambda completions, **_: [1.0] * len(completions))]
    assert trainer.collect().scores.tolist() == [0.0] * 4


CHAT = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"
VOCABULARY = ["[UNK]", "[PAD]", "The", "sky", "is", "blue", "not", "green", "."]


class Says:
    """An engine that always writes the same."""

    recover, agreed, held = (staticmethod(nullcontext) for _ in range(3))

    def __init__(self, ids):
        self.ids = ids

    def generate(self, prompts, settings, uniforms, per_prompt=1):
        ids = torch.tensor([self.ids] * len(prompts.ids))
        mask, numbers = torch.ones_like(ids, dtype=torch.bool), torch.full(ids.shape, -1.0)
        return Rollout(prompts.ids, prompts.mask, ids, mask, numbers, torch.zeros(len(ids)).bool(), numbers)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizers):
    """A policy with each tokenizer, and a classifier that knows whole words alone."""
    parent = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, tokenizer in tokenizers.items():
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        LlamaForCausalLM(LlamaConfig(**shape, vocab_size=len(tokenizer))).save_pretrained(parent / name)
        tokenizer.save_pretrained(parent / name)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    reader = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    config = DistilBertConfig(dim=16, hidden_dim=16, n_layers=1, n_heads=2, vocab_size=len(VOCABULARY))
    loud(DistilBertForSequenceClassification(config), std=0.5).save_pretrained(parent / "classifier")
    reader.save_pretrained(parent / "classifier")
    return parent


@pytest.mark.parametrize("kind", ["sentencepiece", "unigram", "wordpiece", "bytes"])
def test_a_classifier_reads_the_words_that_were_written(kind, folders, tokenizers, tmp_path):
    """After "The sky is", " blue" is a word of its own: for rewards, samples and whoever asks for whole texts."""
    tokenizer = tokenizers[kind]
    whole, prompt = (tokenizer(text)["input_ids"] for text in ("The sky is blue.", "The sky is"))
    trainer = trainer_of(
        tmp_path, model=ModelConfig(name=str(folders / kind), dtype="float32"), prompts=PromptsConfig(text="The sky is")
    )
    trainer.pipeline.engine = Says([*whole[len(prompt) :], tokenizer.eos_token_id])
    folder = str(folders / "classifier")
    classifier = Classifier(folder, *load(folder, "cpu"), "LABEL_1")
    trainer.pipeline.terms = [Term("seen", 1.0, classifier)]
    scored = trainer.collect()
    assert scored.completions == [" blue."] * 4
    assert scored.texts() == ["The sky is blue."] * 4
    read = classifier.tokenizer.convert_ids_to_tokens(classifier.encode("The sky is", " blue."))
    assert read == ["The", "sky", "is", "blue", "."]
    assert scored.scores.tolist() == pytest.approx(classifier([""], ["The sky is blue."]) * 4, abs=1e-6)
    [glued] = classifier([""], ["The sky isblue."])
    assert abs(glued - scored.scores[0].item()) > 1e-3, "the classifier tells them apart"
    batch = trainer.credit.give(scored)[0]
    sample = batch.samples(tokenizer, [0], scored.rollout.logprobs)[0]
    assert sample["prompt"] + "".join(sample["tokens"]).removesuffix("</s>").rstrip() == "The sky is blue."


def test_a_prefill_and_what_was_sampled_are_one_turn_of_the_assistant(folders, tokenizers, tmp_path):
    tokenizer = tokenizers["sentencepiece"]
    trainer = trainer_of(tmp_path, model=ModelConfig(name=str(folders / "sentencepiece"), dtype="float32"))
    chatty = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=CHAT)
    question = [{"role": "user", "content": "Look up."}]
    rows = [{"prompt": [*question, {"role": "assistant", "content": "The sky is"}]}]
    prompts = Prompts(rows, chatty).batch(0, 2)
    blue = tokenizer(" blue")["input_ids"][1:]
    assert tokenizer.decode([*tokenizer("is")["input_ids"], *blue]) == "is blue"
    trainer.pipeline.engine, seen = Says(blue), {}

    def see(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids)
        return [[1.0] * len(ids) for ids in completion_ids]

    trainer.pipeline.terms = [Term("see", 1.0, see)]
    scored = trainer.pipeline.collect(prompts, trainer.args.rollout, torch.rand(2, 6))
    assert seen["prompts"] == [question] * 2
    assert seen["completions"] == [[{"role": "assistant", "content": "The sky is blue"}]] * 2
    assert seen["ids"] == [blue] * 2, "rewards of single tokens are those of the sampled ones"
    assert scored.completions == [" blue"] * 2
    assert scored.texts() == ["[user] Look up.[assistant] The sky is blue"] * 2, "what was read, and what was written"


def test_the_share_of_completions_with_a_stop_string_is_measured(tmp_path):
    for stop in ("e", "###"):
        rollout = RolloutConfig(batch_size=8, max_new_tokens=8, stop=[stop])
        run = quiet(tmp_path / str(len(stop)), samples=8)
        PPOTrainer(args=text_config(run.dir, rollout=rollout, run=run)).train()
        found = read_run(run.dir)
        having = sum(stop in "".join(sample["tokens"]) for sample in found.samples)
        assert found.metrics[0]["stopped"] == having / 8
