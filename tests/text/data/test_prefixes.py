"""Scores of prefixes, and runs whose values are fitted to them."""

import math
from dataclasses import replace

import pytest
import torch
from tokenizers import AddedToken

from helpers.configs import text_config
from helpers.files import read_metrics
from helpers.rewards import vowels
from tokencredit import load
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.data import EnvironmentConfig, FunctionTerm
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import AdvantageConfig
from tokencredit.text.data.prefixes import choose_spacing, prefix_scores, usual_end
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.models.model_loading import load_tokenizer
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards.calls import Term
from tokencredit.text.rollout_passes import rollout_values

EVERY = CriticConfig(prefix_every=1)


def trainer_of(folder, *reward_funcs, **groups):
    return PPOTrainer(args=text_config(folder, **{"critic": EVERY} | groups), reward_funcs=list(reward_funcs) or None)


def test_a_prefix_scores_what_its_text_does_alone(tmp_path):
    trainer = trainer_of(
        tmp_path, Term("vowels", 2.0, vowels, prefix=True), Term("length", 1.0, lambda completions: [9.0] * 8)
    )
    batch, tokenizer = trainer.collect(), trainer.tokenizer
    for row, length in enumerate(batch.rollout.response_lengths().tolist()):
        ids = batch.rollout.response_ids[row, :length].tolist()
        texts = [tokenizer.decode(ids[:start], skip_special_tokens=True) for start in range(length)]
        # Without the other term.
        expected = [2 * score for score in vowels(texts)]
        assert batch.prefixes[row, :length].tolist() == pytest.approx(expected)
    # Every third prefix, whose score the two tokens after it have too.
    sparse = prefix_scores(trainer.pipeline.terms, batch.prompts, batch.rollout, tokenizer, 3)
    torch.testing.assert_close(sparse[:, 3:6], batch.prefixes[:, 3:4].expand(-1, 3))


def test_equal_prefixes_are_scored_once_unless_their_columns_differ(tmp_path):
    calls = []

    def wanted(completions, answer, **columns):
        calls.append(len(completions))
        return [float(answer) for answer in answer]

    rows = [{"prompt": "This movie", "answer": str(number)} for number in (0, 0, 1, 1)]
    args = text_config(tmp_path, critic=EVERY)
    trainer = PPOTrainer(args=args, reward_funcs=Term("wanted", 1.0, wanted, prefix=True), train_dataset=rows)
    batch = trainer.collect()
    assert batch.prefixes[:, 0].tolist() == [float(answer) for answer in batch.prompts.columns["answer"]]
    prefixes = {
        (answer, *ids[:start])
        for answer, ids in zip(
            batch.prompts.columns["answer"], batch.rollout.columns(None)["completion_ids"], strict=True
        )
        for start in range(len(ids))
    }
    assert calls == [8, len(prefixes)]


def test_the_classifier_of_a_configuration_gives_values_and_lambda(tmp_path):
    trainer = PPOTrainer(
        args=text_config(
            tmp_path / "run",
            2,
            critic=EVERY,
            advantage=AdvantageConfig(lam="auto"),
            rollout=RolloutConfig(batch_size=32, max_new_tokens=8),
        )
    )
    prompts = trainer.prompts.batch(0, 1)
    (alone,) = trainer.pipeline.terms[0].function(prompts.prompts, [""])
    assert float(trainer.collect().prefixes[0, 0]) == pytest.approx(alone, rel=1e-5)
    trainer.train()
    for row in read_metrics(tmp_path / "run"):
        assert 0 <= row["lam"] < 0.95
        assert row["explained_variance"] > 0.3  # of returns that this batch has not yet been fitted to
        assert math.isfinite(row["seconds/prefixes"])
    # The saved policy has the same values: those of the fit to all batches, and the critic's share.
    policy = load(tmp_path / "run")
    prompt, text = "This movie was", " really good and I liked"
    tokens, values = policy.tokens(text, prompt), policy.values(text, prompt)
    scores = trainer.pipeline.terms[0].function(
        [prompt] * len(tokens), ["".join(tokens[:n]) for n in range(len(tokens))]
    )
    fit = zip(*trainer.credit.prefixes.coefficients(), strict=True)
    rest = rollout_values(trainer.policy, policy._read(text, prompt), None)[0].tolist()
    expected = [float(a + b * s + c * r) for (a, b, c), s, r in zip(fit, scores, rest, strict=False)]
    assert values == pytest.approx(expected, abs=1e-4)
    assert max(values) - min(values) > 0.01


def test_prefixes_of_a_reward_that_reads_whole_texts_are_scored_with_their_end(tmp_path, capsys):
    def of_whole(completions, **columns):
        return [float(len(text.split()[0])) if text.endswith(".") else 5.0 for text in completions]

    rollout = RolloutConfig(batch_size=32, max_new_tokens=24)
    trainer = trainer_of(tmp_path / "run", Term("whole", 1.0, of_whole, prefix=True), rollout=rollout)
    batch, tokenizer = trainer.collect(), trainer.tokenizer
    (stop,) = usual_end(batch.rollout, tokenizer, lambda counts: counts)
    assert tokenizer.decode([stop]) == "."
    assert batch.ended.end == [stop]
    ids = batch.rollout.response_ids[0].tolist()
    number = ids.index(stop)  # of the first sentence
    assert number > 2
    found = [float(scores[0, number]) for scores in (batch.prefixes, batch.ended.scores)]
    assert found == [5.0, *of_whole([tokenizer.decode(ids[:number]) + "."])]
    trainer.credit.give(batch)
    assert trainer.credit.prefixes.end == [stop]
    again = trainer.pipeline.scored(batch, rollout, values=True)
    assert again.ended is None, "it is tried once"
    torch.testing.assert_close(again.prefixes, batch.ended.scores)
    trainer_of(tmp_path / "once", Term("whole", 1.0, of_whole, prefix=True), rollout=rollout).iteration(1)
    assert "prefixes are scored with '.' after them" in capsys.readouterr().out


def test_the_usual_end_has_a_text():
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.add_tokens([AddedToken("<|eom|>", special=True)])  # special, and none of `all_special_ids`
    (stop,), eom, unknown = tokenizer(".")["input_ids"], len(tokenizer) - 1, len(tokenizer) + 8
    ids = torch.tensor([[stop, eom], [stop, unknown], [eom, eom]])
    mask, numbers = torch.ones_like(ids, dtype=torch.bool), torch.zeros(ids.shape)
    completed = Rollout(ids, mask, ids, mask, numbers, truncated=torch.zeros(3, dtype=torch.bool))
    assert usual_end(completed, tokenizer, lambda counts: counts) == [stop]
    cut = replace(completed, truncated=torch.ones(3, dtype=torch.bool))
    assert usual_end(cut, tokenizer, lambda counts: counts) == []


def test_a_number_per_token_of_a_prefix_with_an_end_is_refused(tmp_path):
    def per_token(completions, completion_ids):
        return [[1.0] * len(ids) for ids in completion_ids]

    trainer = trainer_of(tmp_path, Term("per_token", 1.0, per_token, prefix=True, retries=0))
    batch, end = trainer.sample(), trainer.tokenizer(".")["input_ids"]
    with pytest.raises(RunStopped, match="scores prefixes, and gave a number per token; leave out prefix: true"):
        prefix_scores(trainer.pipeline.terms, batch.prompts, batch.rollout, trainer.tokenizer, 1, end)


def test_an_own_estimator_gets_scores_of_the_text_alone(tmp_path):
    def own(rewards, mask, prefix_scores):
        return prefix_scores * mask, rewards

    term = Term("vowels", 1.0, vowels, prefix=True)
    trainer = trainer_of(tmp_path, term, advantage=AdvantageConfig(estimator=own))
    assert trainer.args.critic.ours
    assert trainer.collect().ended is None


def test_scores_of_prefixes_that_nobody_gives_or_reads_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"critic\.prefix_every is 1, and no reward term scores prefixes; set prefix:"
    ):
        trainer_of(tmp_path, vowels)
    with pytest.raises(ConfigError, match=r"critic\.prefix_every is 1, and prefixes of several turns are not scored"):
        trainer_of(tmp_path, env=EnvironmentConfig(factory="builtin:grid"))
    with pytest.raises(ConfigError, match="a bootstrap needs rewards per token"):
        trainer_of(tmp_path, advantage=AdvantageConfig(bootstrap=True))


def test_a_number_per_token_is_no_score_of_a_prefix(tmp_path):
    def dense(completion_ids, **columns):
        return [[1.0] * len(ids) for ids in completion_ids]

    with pytest.raises(RunStopped, match="reward term 'dense' scores prefixes, and gave a number per token"):
        trainer_of(tmp_path, Term("dense", 1.0, dense, prefix=True)).train()


def test_by_default_as_many_prefixes_are_scored_as_cost_a_quarter_of_the_policys_passes(tmp_path):
    def every(*reward_funcs, **groups):
        return trainer_of(tmp_path, *reward_funcs, **{"critic": CriticConfig()} | groups).pipeline.prefix_every

    assert every() == 1, "the built-in classifier is small"
    # By hand: the prompt and half a completion per prefix, against a sampling step, the reference's, three per epoch.
    trainer = trainer_of(tmp_path)
    reader, lm = trainer.pipeline.terms[0].function, trainer.policy.lm
    weights = sum(p.numel() for p in reader.model.parameters()) - reader.model.get_input_embeddings().weight.numel()
    prompt, longest = float(trainer.prompts.batch(0, 1).mask.sum()), 2000
    own = sum(p.numel() for p in lm.parameters()) * (2 + 3 * trainer.args.ppo.epochs) * (prompt + longest)
    expected = math.ceil(longest * (prompt + longest / 2) * weights / (0.25 * own))
    assert expected > 1
    args = text_config(tmp_path, rollout=RolloutConfig(batch_size=8, max_new_tokens=longest))
    args = choose_spacing(args, trainer.pipeline.terms, lm, trainer.prompts)
    assert args.critic.prefix_every == expected
    # None where no term scores prefixes, or nothing would read them.
    assert every(vowels) == 0
    assert every(Term("vowels", 1.0, vowels, prefix=True)) == 1
    assert every(critic=CriticConfig(kind="none"), advantage=AdvantageConfig(estimator="uniform")) == 0
    assert every(env=EnvironmentConfig(factory="builtin:grid")) == 0
    assert every(Term("vowels", 0.0, vowels, prefix=True), Term("length", 1.0, vowels)) == 0, "nothing would be scored"
    for groups in (
        {"critic": CriticConfig(prefix_every=0)},
        {"critic": CriticConfig(kind="none"), "advantage": AdvantageConfig(estimator="uniform")},
        {"env": EnvironmentConfig(factory="builtin:grid")},
    ):
        with pytest.raises(ConfigError, match=r"the reward 'length' has prefix: true, which has no effect"):
            every(reward=[FunctionTerm(function="length", prefix=True)], **groups)
    # A resumed run keeps its number.
    terms, rows = trainer.pipeline.terms, trainer.prompts
    assert choose_spacing(text_config(tmp_path), terms, lm, rows, 7).critic.prefix_every == 7
    refused = r"critic\.prefix_every is 7, and no reward term scores prefixes; .* or begin a new run: it cannot change"
    with pytest.raises(ConfigError, match=refused):
        choose_spacing(text_config(tmp_path), [Term("vowels", 1.0, vowels)], lm, rows, 7)
