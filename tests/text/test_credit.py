"""Credit by worked numbers, on completions whose scores, values and KL are written down; and in short real runs."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.configs import text_config
from helpers.files import read_jsonl, read_metrics
from helpers.models import changed_weights, copy_weights
from helpers.proofs import proofs
from helpers.rewards import vowels
from tokencredit.core.estimator_table import ESTIMATORS
from tokencredit.core.estimators import estimate
from tokencredit.distributed.processes import Processes
from tokencredit.errors import RunStopped
from tokencredit.report import page
from tokencredit.report.reading import read_run
from tokencredit.settings.data import ScoreConfig
from tokencredit.settings.model import CriticConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, EvalConfig, KLConfig, OptimConfig, RunConfig, UpdateConfig
from tokencredit.text.batch import Batch
from tokencredit.text.credit import Credit
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rollout_passes import ReferenceOutputs, rollout_values

T, F = True, False
NO_CRITIC = CriticConfig(kind="none")
UNSCALED = {"kl": KLConfig(coef=0.0)}


def credit_of(**changes):
    return Credit(PPOConfig(**changes), lambda x: x)


def scored_of(tokenizer, scores, *, lengths=None, kl=None, values=None, truncated=None, dense=None, bootstrap=None):
    """Completions of these lengths, 2 tokens if nothing is said; `kl` is one number per token."""
    rows = len(scores)
    lengths = torch.tensor(lengths or [2] * rows)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    zeros = torch.zeros(mask.shape)
    prompts = Prompts(["A film"], tokenizer).batch(0, rows)
    rollout = Rollout(
        prompt_ids=prompts.ids,
        prompt_mask=prompts.mask,
        response_ids=zeros.long(),
        mask=mask,
        logprobs=zeros,
        values=None if values is None else torch.tensor(values),
        truncated=torch.tensor(truncated or [False] * rows),
    )
    reference = ReferenceOutputs() if kl is None else ReferenceOutputs(zeros, torch.tensor(kl) * mask)
    after = None if bootstrap is None else torch.tensor(bootstrap)
    return Batch(
        prompts,
        rollout,
        [""] * rows,
        reference=reference,
        bootstrap=after,
        scores=torch.tensor(scores),
        dense=dense,
        of_texts=dense is None or any(scores),
    )


def grouped(per_prompt=2, batch_size=4, **advantage):
    return {
        "critic": NO_CRITIC,
        "rollout": RolloutConfig(batch_size=batch_size, per_prompt=per_prompt),
        "advantage": AdvantageConfig(**({"estimator": "group_relative", "whiten": "none"} | advantage)),
    }


ROUNDING = [[1e-7, -2e-7], [3e-7, 0.0], [-1e-7, 1e-7], [0.0, 2e-7]]
CREDITS = [
    {"values": True},
    grouped(whiten="batch"),
    grouped(whiten="none"),
    grouped(estimator="leave_one_out", whiten="batch"),
    {"advantage": AdvantageConfig(estimator="uniform"), "critic": NO_CRITIC},
]


@pytest.mark.parametrize("changes", CREDITS)
@pytest.mark.parametrize("score", [0.0, -3.0, 0.1])
def test_scores_that_are_all_equal_give_next_to_no_update(changes, score, tokenizer):
    changes = dict(changes)
    values = [[score, score]] * 4 if changes.pop("values", False) else None
    scored = scored_of(tokenizer, [score] * 4, kl=ROUNDING, values=values)
    credit = credit_of(**{"rollout": RolloutConfig(batch_size=4), **changes})
    if credit.args.advantage.estimator == "uniform":
        credit.give(scored)  # its first batch has no baseline yet
    _, experience = credit.give(scored)
    assert experience.advantages.abs().max() < 1e-3


def test_scores_that_differ_are_normalised_and_whitened(tokenizer):
    scored = scored_of(tokenizer, [1.0, 3.0, 2.0, 6.0], kl=ROUNDING)
    _, experience = credit_of(**grouped()).give(scored)
    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0]) * 0.5**0.5
    torch.testing.assert_close(experience.advantages, expected[:, None].expand(4, 2), rtol=1e-4, atol=1e-6)
    _, experience = credit_of(rollout=RolloutConfig(batch_size=4)).give(replace_values(scored))
    assert float(experience.advantages.std(correction=0)) == pytest.approx(1, abs=1e-5)


def replace_values(scored):
    return replace(scored, rollout=replace(scored.rollout, values=torch.zeros(scored.rollout.mask.shape)))


def test_the_kl_is_taken_off_after_the_groups_normalisation(tokenizer):
    kl = [[1.0, 2.0], [0.0, 1.0], [4.0, -1.0], [0.5, 0.5]]  # 3, 1, 3 and 1 nats per completion
    _, experience = credit_of(**grouped(), kl=KLConfig(coef=0.1)).give(
        scored_of(tokenizer, [1.0, 3.0, 2.0, 6.0], kl=kl)
    )
    # groups (1, 3) and (2, 6); sample deviations √2 and √8; KL ± 1 about its mean of 2
    one, other = 1 / (2**0.5 + 1e-4), 2 / (8**0.5 + 1e-4)
    expected = torch.tensor([-one - 0.1, one + 0.1, -other - 0.1, other + 0.1])
    torch.testing.assert_close(experience.advantages, expected[:, None].expand(4, 2))
    # Where all scores of a group are equal the KL alone is left, at its price.
    batch, experience = credit_of(**grouped(), kl=KLConfig(coef=0.1)).give(scored_of(tokenizer, [1.0] * 4, kl=kl))
    expected = torch.tensor([-0.1, 0.1, -0.1, 0.1])
    torch.testing.assert_close(experience.advantages, expected[:, None].expand(4, 2))
    # The rewards and returns that are written down hold it as ever.
    torch.testing.assert_close(batch.rewards.sum(1), 1 - 0.1 * torch.tensor([3.0, 1.0, 3.0, 1.0]))
    torch.testing.assert_close(batch.returns[:, 0], batch.rewards.sum(1))


@pytest.mark.parametrize("changes", [{"scale": False}, {"estimator": "leave_one_out"}])
def test_without_a_division_the_kl_is_a_part_of_the_score(changes, tokenizer):
    kl = [[1.0, 2.0], [0.0, 1.0], [4.0, -1.0], [0.5, 0.5]]
    scored = scored_of(tokenizer, [1.0, 3.0, 2.0, 6.0], kl=kl)
    batch, experience = credit_of(**grouped(**changes), kl=KLConfig(coef=0.1)).give(scored)
    name = changes.get("estimator", "group_relative")
    options = {"group_size": 2} | {key: value for key, value in changes.items() if key != "estimator"}
    expected, _ = estimate(name, batch.rewards, options=options, mask=scored.rollout.mask)
    torch.testing.assert_close(experience.advantages, expected)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("normalize", ["batch", "running"])
def test_scores_that_differ_by_noise_are_not_blown_up(normalize, shift, tokenizer):
    credit = credit_of(score=ScoreConfig(normalize=normalize, shift_mean=shift))
    scores = torch.tensor([0.0, 1e-7, 2e-7, 0.0], dtype=torch.float64) + 0.5
    for _ in range(2):
        normal = credit.normalize(scores)
        assert (normal - (0 if shift else 0.5)).abs().max() < 2e-3
    spread = torch.tensor([0.0, 0.4], dtype=torch.float64) + 0.5
    credit = credit_of(score=ScoreConfig(normalize=normalize, shift_mean=shift))
    low, high = credit.normalize(spread).tolist()
    assert high - low == pytest.approx(2, rel=1e-6)


def test_the_baseline_is_the_mean_of_earlier_scores(tokenizer):
    uniform = AdvantageConfig(estimator="uniform", whiten="none")
    credit = credit_of(advantage=uniform, critic=NO_CRITIC, **UNSCALED)
    batches = [[0.0, 0.0], [4.0, 4.0], [1.0, 1.0]]
    given = [float(credit.give(scored_of(tokenizer, scores))[0].advantages[0, 0]) for scores in batches]
    assert given == pytest.approx([0.0, 4.0, 1 - 2])


def test_overlong_completions_pay_at_their_last_token(tokenizer):
    score = ScoreConfig(overlong=[4, 2.0], missing_eos_penalty=0.5, clip=3.0)
    credit = credit_of(
        score=score,
        rollout=RolloutConfig(max_new_tokens=6),
        critic=NO_CRITIC,
        advantage=AdvantageConfig(estimator="reward_to_go"),
        **UNSCALED,
    )
    scored = scored_of(tokenizer, [1.0, 9.0, 1.0, 1.0], lengths=[2, 3, 6, 6], truncated=[F, F, F, T])
    rewards = credit.give(scored)[0].rewards
    # 2 of 6 tokens are free, the third costs a quarter of 2; the sixth all of it, and one is cut off as well.
    assert rewards.sum(1).tolist() == [1.0, 3.0 - 0.5, 1.0 - 2.0, 1.0 - 2.0 - 0.5]
    assert rewards[:, 5].tolist() == [0.0, 0.0, -1.0, -1.5]


BOOTSTRAP = {
    "advantage": AdvantageConfig(estimator="gae", gamma=0.5, lam=0.5, bootstrap=True, whiten="none"),
    "rollout": RolloutConfig(max_new_tokens=2),
    **UNSCALED,
}


def test_a_bootstrap_by_hand(tokenizer):
    dense, values = [[1.0, 2.0], [1.0, 2.0]], [[3.0, 4.0], [3.0, 4.0]]
    scored = scored_of(tokenizer, [0.0, 0.0], values=values, truncated=[F, T], dense=dense, bootstrap=[0.0, 8.0])
    batch, _ = credit_of(**BOOTSTRAP).give(scored)
    # δ₁ = 2 − 4 = −2, or 2 + 0.5 · 8 − 4 = 2 where it was cut off; δ₀ = 1 + 0.5 · 4 − 3 = 0; A₀ = δ₀ + 0.25 δ₁
    assert batch.advantages.tolist() == [[-0.5, -2.0], [0.5, 2.0]]
    assert batch.returns.tolist() == [[2.5, 2.0], [3.5, 6.0]]


@pytest.mark.parametrize("name", ["gae", "td", "monte_carlo", "n_step", "decoupled_gae", "reward_to_go"])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_critic_that_is_right_gives_the_advantages_of_the_longer_text(name, cut, tokenizer):
    """It knows what is still to come from the cut on; before that it may say anything."""
    generator = torch.Generator().manual_seed(cut)
    rewards, values = torch.randn(2, 3, 9, generator=generator, dtype=torch.float64)
    to_come = torch.zeros(3, 10, dtype=torch.float64)
    for step in reversed(range(9)):
        to_come[:, step] = rewards[:, step] + 0.9 * to_come[:, step + 1]
    values[:, cut:] = to_come[:, cut:9]
    options = {"gamma": 0.9, "lam": 0.8, "lam_returns": 0.7, "n": 4}
    longer, _ = estimate(name, rewards, values, options=options)
    settings = AdvantageConfig(estimator=name, bootstrap=True, whiten="none")
    read = {key: options[key] for key in ESTIMATORS[name].settings}
    credit = credit_of(advantage=replace(settings, **read), rollout=RolloutConfig(max_new_tokens=cut), **UNSCALED)
    scored = scored_of(
        tokenizer,
        [0.0] * 3,
        lengths=[cut] * 3,
        values=values[:, :cut].tolist(),
        truncated=[T] * 3,
        dense=rewards[:, :cut].tolist(),
        bootstrap=to_come[:, cut].tolist(),
    )
    torch.testing.assert_close(credit.give(scored)[0].advantages, longer[:, :cut].float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dense", [None, [[1.0, 2.0], [1.0, 2.0]]])
def test_a_bootstrap_beside_a_score_of_the_whole_text_is_refused(dense, tokenizer):
    scored = scored_of(
        tokenizer, [0.0, 1.0], values=[[0.0] * 2] * 2, truncated=[F, T], dense=dense, bootstrap=[0.0] * 2
    )
    with pytest.raises(RunStopped, match=r"advantage\.bootstrap is True, and the reward scores whole completions"):
        credit_of(**BOOTSTRAP).give(scored)


MASKED = {
    "ppo": UpdateConfig(mask_truncated=True, minibatches=1),
    "rollout": RolloutConfig(batch_size=4, max_new_tokens=3),
}


def test_completions_that_were_cut_off_are_left_out_of_the_loss_and_of_whitening(tokenizer):
    scored = scored_of(
        tokenizer, [1.0, 3.0, 50.0, 5.0], lengths=[1, 2, 3, 1], truncated=[F, F, T, F], values=[[0.0] * 3] * 4
    )
    batch, experience = credit_of(**MASKED, **UNSCALED).give(scored)
    kept = torch.tensor([[T, F, F], [T, T, F], [F, F, F], [T, F, F]])
    assert torch.equal(experience.mask, kept)
    assert torch.equal(experience.inputs["mask"], kept)
    assert experience.lengths.tolist() == [[scored.rollout.prompt_mask.sum(1)[0], n] for n in (1, 2, 0, 1)]
    # whitened: γ = 1, V = 0 and λ = 0.95 leave 1; 0.95 · 3 and 3; 5
    left = torch.tensor([1.0, 2.85, 3.0, 5.0])
    expected = (left - left.mean()) / left.std(correction=0)
    torch.testing.assert_close(experience.advantages[kept], expected)
    assert (experience.advantages[2] == 0).all()
    assert batch.rollout.mask.sum() == 7, "what is written down holds all of them"


def test_the_scores_of_completions_that_were_cut_off_count_in_their_groups(tokenizer):
    scores, cut = [1.0, 3.0, 2.0, 6.0], [F, T, F, F]
    changes = grouped() | {"ppo": UpdateConfig(mask_truncated=True)}
    scored = scored_of(tokenizer, scores, truncated=cut)
    _, experience = credit_of(**changes, **UNSCALED).give(scored)
    one, other = 1 / (2**0.5 + 1e-4), 2 / (8**0.5 + 1e-4)
    assert experience.advantages[experience.mask].tolist() == pytest.approx([-one] * 2 + [-other] * 2 + [other] * 2)


def test_a_batch_of_completions_that_were_all_cut_off_has_credit_and_nothing_to_learn(tokenizer):
    scored = scored_of(tokenizer, [1.0, 2.0], truncated=[T, T], values=[[0.0] * 2] * 2)
    batch, experience = credit_of(**MASKED, **UNSCALED).give(scored)
    assert not experience.mask.any()
    assert batch.advantages.isfinite().all()
    assert experience.advantages.isfinite().all()


AUTO, PREFIXES = AdvantageConfig(lam="auto", whiten="none"), CriticConfig(prefix_every=1)


def with_prefixes(tokenizer, scores, prefixes, values):
    return replace(scored_of(tokenizer, scores, values=values), prefixes=torch.tensor(prefixes))


def test_values_are_the_fit_and_what_the_critic_adds(tokenizer):
    """Each row's values come from the others: rows 0 and 2 are alike, and so are 1 and 3."""
    scores, prefixes, values = [1.0, 0.0] * 8, [[0.5, 1.0], [0.5, 0.0]] * 8, [[0.25, 0.0]] * 16
    credit = credit_of(advantage=AdvantageConfig(whiten="none"), critic=PREFIXES, **UNSCALED)
    batch, experience = credit.give(with_prefixes(tokenizer, scores, prefixes, values))
    assert batch.fitted[:, 1].tolist() == pytest.approx([1.0, 0.0] * 8, abs=0.15)
    assert batch.fitted[:, 0].tolist() == pytest.approx([0.5] * 16, abs=0.1)
    torch.testing.assert_close(batch.rollout.values, batch.fitted, rtol=0.0, atol=0.01)  # this critic tells nothing
    # The critic learns the rest, from where it is.
    torch.testing.assert_close(experience.critic_outputs, torch.tensor(values))
    torch.testing.assert_close(experience.critic_targets, batch.returns - batch.fitted)
    # An own loss reads all of both.
    assert torch.equal(experience.values, batch.rollout.values)
    assert torch.equal(experience.returns, batch.returns)


def test_lambda_follows_the_batches_that_the_run_learns_from(tokenizer):
    """The end is known from the first token on, so δ of that token is all its credit, and λ adds chance alone."""
    credit = credit_of(advantage=AUTO, critic=PREFIXES, **UNSCALED)
    assert credit.lam == 0.95, "nothing is known yet"
    scored = with_prefixes(tokenizer, [1.0, 0.0] * 8, [[0.5, 1.0], [0.5, 0.0]] * 8, [[0.0, 0.0]] * 16)
    credit.give(scored, fit=False)
    assert credit.lam == 0.95, "an audit changes nothing"
    batch, _ = credit.give(scored)
    assert credit.metrics() == {"kl_coef": 0.0, "lam": credit.lam, "critic_share": 0.0}, "a critic that says 0"
    options = {"gamma": 1.0, "lam": credit.lam}
    advantages, _ = estimate("gae", batch.rewards, batch.rollout.values, options=options, mask=scored.rollout.mask)
    assert torch.equal(batch.advantages, advantages)


def test_lambda_stays_what_it_is_unless_it_is_auto(tokenizer):
    scored = with_prefixes(tokenizer, [1.0, 0.0] * 8, [[0.5, 1.0], [0.5, 0.0]] * 8, [[1.0, 1.0], [0.0, 0.0]] * 8)
    for advantage in (AdvantageConfig(lam=0.9), AdvantageConfig(estimator="td")):  # td reads none
        credit = credit_of(advantage=advantage, critic=PREFIXES, **UNSCALED)
        credit.give(scored)
        assert credit.lam == (0.9 if advantage.estimator == "gae" else 0.95)
        share = credit.metrics().pop("critic_share")
        assert credit.metrics() == {"kl_coef": 0.0, "critic_share": share}
        again, _ = credit.give(scored)
        added = again.rollout.values - again.fitted
        assert added[1::2].abs().max() == 0, "the critic says 0"
        assert 0 < added[::2].min() <= share <= added[::2].max() <= 1


small = partial(text_config, iterations=2)


def each_token(completion_ids, **columns):
    return [[float(token % 3) for token in ids] for ids in completion_ids]


def test_the_masked_share_is_there_whenever_completions_may_be_left_out(tokenizer):
    """A mean over iterations would otherwise miss those in which none was."""
    for ppo, truncated, share in (
        (UpdateConfig(mask_truncated=True), [F, F], 0.0),
        (UpdateConfig(mask_truncated=True), [F, T], 0.5),
        (UpdateConfig(), [F, T], None),
    ):
        scored = scored_of(tokenizer, [0.0, 1.0], values=[[0.0] * 2] * 2, truncated=truncated)
        batch, _ = credit_of(ppo=ppo).give(replace(scored, terms={"vowels": [0.0, 1.0]}))
        assert batch.metrics(Processes()).get("masked") == share


@pytest.mark.parametrize("estimator", ["gae", *proofs("group_relative")])
@pytest.mark.parametrize(
    "kl",
    [
        KLConfig(estimator="k3"),
        KLConfig(place="both", estimator="full"),
        *proofs(KLConfig(place="loss", estimator="k2")),
    ],
)
def test_rewards_that_are_all_0_change_no_weight(estimator, kl, tmp_path):
    """Cached steps and full passes of the same model round apart, and Adam makes a full step of any gradient."""
    grouped = estimator == "group_relative"
    args = small(
        tmp_path / "run",
        rollout=RolloutConfig(batch_size=8, max_new_tokens=8, per_prompt=4 if grouped else 1),
        advantage=AdvantageConfig(estimator=estimator),
        critic=CriticConfig(kind="none" if grouped else "shared"),
        kl=kl,
        optim=OptimConfig(warmup=0),
    )
    trainer = PPOTrainer(args=args, reward_funcs=lambda completions, **columns: [0.0] * len(completions))
    before = copy_weights(trainer.policy)
    trainer.iteration(1)
    assert not changed_weights(trainer.policy, before)


def test_an_update_with_nothing_in_the_loss_takes_no_step(tmp_path):
    """Momentum and weight decay alone would move the weights."""
    args = small(
        tmp_path / "run",
        rollout=RolloutConfig(batch_size=16, max_new_tokens=20),
        ppo=UpdateConfig(epochs=2, minibatches=2, mask_truncated=True),
        optim=OptimConfig(weight_decay=0.1, warmup=0),
        run=RunConfig(dir=str(tmp_path / "run"), iterations=9, samples=0, trackers=[]),
    )
    trainer = PPOTrainer(args=args, reward_funcs=vowels)
    assert trainer.iteration(1)[0]["steps"] > 0, "the optimizer has momentum now"
    honest = trainer.pipeline.engine
    trainer.pipeline.engine = AllCut(honest)
    before = copy_weights(trainer.policy)
    metrics, _ = trainer.iteration(2)
    assert not changed_weights(trainer.policy, before)
    assert (metrics["steps"], metrics["bad_steps"], metrics["masked"], metrics["truncated"]) == (0, 0, 1.0, 1.0)
    assert math.isfinite(metrics["advantage_std"])
    trainer.pipeline.engine = honest
    assert trainer.iteration(3)[0]["steps"] > 0


class AllCut:
    """An engine all of whose completions were cut off."""

    def __init__(self, engine):
        self.engine = engine

    def generate(self, *args, **options):
        rollout = self.engine.generate(*args, **options)
        return replace(rollout, truncated=torch.ones_like(rollout.truncated))

    def __getattr__(self, name):
        return getattr(self.engine, name)


def test_a_run_that_leaves_completions_out_trains_on_the_others(tmp_path):
    args = small(
        tmp_path / "run",
        rollout=RolloutConfig(batch_size=16, max_new_tokens=20),
        ppo=UpdateConfig(epochs=1, minibatches=4, mask_truncated=True),
    )
    PPOTrainer(args=args, reward_funcs=vowels).train()
    for row in read_metrics(tmp_path / "run"):
        assert 0 < row["truncated"] < 1
        assert row["truncated"] < row["masked"] < 1, "of tokens, and the longest completions are left out"
        assert 1 <= row["steps"] <= 4
        assert row["first_ratio_error"] < 1e-4
    quantities = [set(s["numbers"]) for s in report_samples(tmp_path / "run")]
    cut = [s["truncated"] for s in read_jsonl(tmp_path / "run" / "samples.jsonl")]
    assert ["clipped" not in names for names in quantities] == cut, "they have no gradient that clipping could cut"


def report_samples(folder):
    return page.credit(read_run(folder))


@pytest.mark.parametrize("critic", ["separate", *proofs("shared")])
def test_a_run_bootstraps_from_the_critic_where_completions_were_cut_off(critic, tmp_path):
    args = small(
        tmp_path / "run",
        critic=CriticConfig(kind=critic, init="orthogonal"),
        advantage=AdvantageConfig(estimator="td", gamma=0.9, bootstrap=True),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=16),
        **UNSCALED,
    )
    trainer = PPOTrainer(args=args, reward_funcs=each_token)
    scored = trainer.collect()
    rollout, after = scored.rollout, scored.bootstrap
    assert 0 < rollout.truncated.sum() < 8
    with torch.no_grad():
        # The same texts with any token more: its state's value is asked for where it was cut off.
        longer = {
            "response_ids": torch.cat([rollout.response_ids, torch.full((8, 1), 7)], 1),
            "mask": torch.cat([rollout.mask, rollout.truncated[:, None]], 1),
        }
        values = rollout_values(trainer.policy, replace(rollout, **longer), None)[:, -1]
    torch.testing.assert_close(after, values, atol=1e-5, rtol=1e-4)
    batch, _ = trainer.credit.give(scored)
    last = rollout.mask.sum(1) - 1
    returns = batch.returns.gather(1, last[:, None]).squeeze(1)
    rewards = batch.rewards.gather(1, last[:, None]).squeeze(1)
    torch.testing.assert_close(returns, rewards + 0.9 * after, atol=1e-5, rtol=1e-4)

    PPOTrainer(args=args, reward_funcs=each_token).train()
    for sample in read_jsonl(tmp_path / "run" / "samples.jsonl"):
        assert ("bootstrap" in sample) == sample["truncated"]
        worth = sample["rewards"][-1] + 0.9 * sample.get("bootstrap", 0.0)
        assert sample["returns"][-1] == pytest.approx(worth, abs=1e-4)
    # The page computes the run's own estimator to the same numbers.
    for shown in report_samples(tmp_path / "run"):
        assert shown["what_if"][0] == pytest.approx(shown["numbers"]["advantage"], abs=2e-4)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, *proofs({"top_p": 1.0}, {"min_new_tokens": 4})])
def test_entropy_and_kl_of_filtered_samples_are_named_for_what_they_are(filters, tmp_path):
    """The policy is made surer of itself than the reference; top_k then draws likely tokens alone."""
    rollout = RolloutConfig(batch_size=8, max_new_tokens=8, **filters)
    evaluation = EvalConfig(every=1, samples=4, max_new_tokens=4)
    trainer = PPOTrainer(args=small(tmp_path / "run", rollout=rollout, eval=evaluation), reward_funcs=vowels)
    with torch.no_grad():
        trainer.policy.lm.get_input_embeddings().weight.mul_(1.1)
    scored = trainer.collect()
    metrics = trainer.credit.give(scored)[0].metrics(trainer.processes)
    rollout, reference, filtered = scored.rollout, scored.reference, bool(set(filters) - {"top_p"})
    with torch.no_grad():
        hidden = trainer.policy.response_hidden(rollout.inputs())
        log_p = trainer.policy.logits(hidden).log_softmax(-1)
    if filtered:
        entropy = -(log_p.exp() * log_p).sum(-1)[rollout.mask].mean()
    else:
        entropy = -rollout.logprobs[rollout.mask].mean()
        assert rollout.entropy is None
    assert metrics["entropy"] == pytest.approx(float(entropy), rel=1e-4)
    name, other = ("log_ratio", "kl") if filtered else ("kl", "log_ratio")
    assert metrics[name] == pytest.approx(float((rollout.logprobs - reference.logprobs).sum()) / 8, rel=1e-4)
    assert other not in metrics
    evaluated = trainer.evaluate()
    assert f"eval/{name}" in evaluated
    assert f"eval/{other}" not in evaluated


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}])
def test_an_exact_kl_is_the_metric_whatever_the_filters(filters, tmp_path):
    rollout = RolloutConfig(batch_size=8, max_new_tokens=8, **filters)
    args = small(tmp_path / "run", rollout=rollout, kl=KLConfig(place="both", estimator="full", target=3.0))
    trainer = PPOTrainer(args=args, reward_funcs=vowels)
    with torch.no_grad():
        trainer.policy.lm.get_input_embeddings().weight.mul_(0.9)
    scored = trainer.collect()
    metrics = trainer.credit.give(scored)[0].metrics(trainer.processes)
    inputs = scored.rollout.inputs()
    with torch.no_grad():
        log_p, log_q = (
            m.logits(m.response_hidden(inputs)).log_softmax(-1) for m in (trainer.policy, trainer.reference)
        )
    exact = (log_p.exp() * (log_p - log_q)).sum(-1)[scored.rollout.mask].sum() / 8
    assert metrics["kl"] == pytest.approx(float(exact), rel=1e-3)
    assert "log_ratio" not in metrics


def test_a_run_with_filters_says_log_ratio_wherever_it_says_kl(tmp_path, capsys):
    rollout = RolloutConfig(batch_size=8, max_new_tokens=8, top_k=5)
    summary = PPOTrainer(args=small(tmp_path / "run", rollout=rollout), reward_funcs=vowels).train()
    out = capsys.readouterr().out
    numbers = [line for line in out.splitlines() if line.startswith(("iteration 1/", "reward 0", "reward -"))]
    assert len(numbers) == 2
    assert "log-ratio" in numbers[0]
    assert not any("KL" in line for line in numbers)
    assert summary["kl_last"] is None
    card = (tmp_path / "run" / "policy" / "README.md").read_text()
    assert "kl_last" not in card
    assert "log-ratio to the reference" in (tmp_path / "run" / "report.html").read_text()
    assert all("log-ratio" in shown["numbers"] for shown in report_samples(tmp_path / "run"))
    assert all("KL" not in shown["numbers"] for shown in report_samples(tmp_path / "run"))


def test_the_mean_of_values_is_there_with_a_critic_alone(tmp_path):
    trainer = PPOTrainer(args=small(tmp_path / "run", critic=CriticConfig(init="orthogonal")), reward_funcs=vowels)
    batch, _ = trainer.credit.give(trainer.collect())
    rollout = batch.rollout
    mean = float(rollout.values[rollout.mask].mean())
    assert batch.metrics(trainer.processes)["value_mean"] == pytest.approx(mean, rel=1e-4, abs=1e-7)
    none = small(tmp_path / "none", critic=NO_CRITIC, advantage=AdvantageConfig(estimator="reward_to_go"))
    trainer = PPOTrainer(args=none, reward_funcs=vowels)
    assert "value_mean" not in trainer.credit.give(trainer.collect())[0].metrics(trainer.processes)
