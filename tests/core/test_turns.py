import pytest
import torch

from tokencredit.core import ESTIMATORS, Turns, estimate, estimate_by_turn, extents


def flags(*rows):
    return torch.tensor(rows).bool()


MASK = flags([1, 1, 0, 1, 1, 0, 0], [1, 0, 0, 1, 0, 1, 1])
ENDS = flags([0, 1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 0, 0, 1])


def test_credit_by_turn_of_a_worked_example():
    """Two turns of two tokens: rewards 1 and 2, values 0.5 and 1 at their first tokens, γ = 0.5, λ = 0.5.

    δ₀ = 1 + 0.5 · 1 − 0.5 = 1, δ₁ = 2 − 1 = 1; A₁ = 1, A₀ = 1 + 0.25 · 1 = 1.25; G₀ = 1.75, G₁ = 2.
    """
    rewards = torch.tensor([[0.25, 0.75, 9.0, 2.5, -0.5, 9.0, 9.0]])
    values = torch.tensor([[0.5, 7.0, 7.0, 1.0, 7.0, 7.0, 7.0]])
    turns = Turns.of(MASK[:1], ENDS[:1])
    advantages, returns = estimate_by_turn("gae", rewards, values, turns=turns, options={"gamma": 0.5, "lam": 0.5})
    assert advantages.tolist() == [[1.25, 1.25, 0, 1, 1, 0, 0]]
    assert returns.tolist() == [[1.75, 1.75, 0, 2, 2, 0, 0]]
    assert turns.first.tolist() == flags([1, 0, 0, 1, 0, 0, 0]).tolist()


def test_sums_first_tokens_and_spreading():
    turns = Turns.of(MASK, ENDS)
    x = torch.arange(14.0).view(2, 7)
    assert turns.mask.tolist() == flags([1, 1, 0], [1, 1, 1]).tolist()
    assert turns.sum(x).tolist() == [[1, 7, 0], [7, 10, 25]]
    assert turns.at_first(x).tolist() == [[0, 3, 0], [7, 10, 12]]
    spread = turns.spread(torch.tensor([[1.0, 2, 9], [3, 4, 5]]))
    assert spread.tolist() == [[1, 1, 0, 2, 2, 0, 0], [3, 0, 0, 4, 0, 5, 5]]


def test_turns_that_touch_are_told_apart_by_their_ends():
    turns = Turns.of(flags([1, 1, 1]), flags([1, 0, 1]))
    assert turns.index.tolist() == [[0, 1, 1]]
    assert turns.first.tolist() == flags([1, 1, 0]).tolist()


def test_the_last_acted_token_ends_a_turn_without_a_flag():
    assert Turns.of(flags([1, 1, 0]), flags([0, 0, 0])).mask.tolist() == [[True]]


def test_numbers_on_observations_have_no_effect():
    rewards, values = torch.randn(2, 7, generator=torch.Generator().manual_seed(0)), torch.randn(2, 7)
    turns, options = Turns.of(MASK, ENDS), {"gamma": 0.9, "lam": 0.8}
    expected = estimate_by_turn("gae", rewards, values, turns=turns, options=options)
    rewards, values = (x.masked_fill(~MASK, torch.nan) for x in (rewards, values))
    for a, b in zip(expected, estimate_by_turn("gae", rewards, values, turns=turns, options=options), strict=True):
        assert torch.equal(a, b)


def transcript(generator):
    """A random transcript: for each turn its tokens, followed by an observation."""
    turns = []
    for _ in range(int(torch.randint(1, 7, (), generator=generator))):
        length, gap = torch.randint(1, 6, (2,), generator=generator).tolist()
        rewards, values = torch.randn(2, length, generator=generator, dtype=torch.float64).tolist()
        turns.append((rewards, values, gap - 1))
    return turns


def one_row(turns, width):
    rewards, values, mask, ends = [], [], [], []
    for turn_rewards, turn_values, gap in turns:
        rewards += turn_rewards + [5.0] * gap
        values += turn_values + [5.0] * gap
        mask += [1] * len(turn_rewards) + [0] * gap
        ends += [0] * (len(turn_rewards) - 1) + [1] + [0] * gap
    padding = [0] * (width - len(rewards))
    return rewards + padding, values + padding, mask + padding, ends + padding


@pytest.mark.parametrize("name", [name for name, needs in ESTIMATORS.items() if "gamma" in needs.settings])
def test_every_estimator_sees_turns_as_steps(name):
    """The same numbers whether a conversation came in one row of tokens, or each turn as one step of a row."""
    generator = torch.Generator().manual_seed(1)
    transcripts = [transcript(generator) for _ in range(6)]
    rows = [one_row(turns, 70) for turns in transcripts]
    rewards, values = (torch.tensor(x, dtype=torch.float64) for x in list(zip(*rows, strict=True))[:2])
    mask, ends = (torch.tensor(x).bool() for x in list(zip(*rows, strict=True))[2:])
    options = {"gamma": 0.9, "lam": 0.7, "lam_returns": 0.9, "alpha": 0.5, "n": 2}
    turns = Turns.of(mask, ends)
    # Every other episode is cut off, at its last token.
    cut = torch.arange(6).unsqueeze(1) % 2 == 1
    truncated = (torch.arange(70) == extents(mask).unsqueeze(1) - 1) & cut
    where = {"truncated": truncated, "bootstrap": torch.full_like(values, 0.3)}
    by_turn = estimate_by_turn(name, rewards, values, turns=turns, options=options, **where)
    for row, expected in enumerate(transcripts):
        steps = torch.tensor([[sum(r), v[0]] for r, v, _ in expected], dtype=torch.float64).T
        last = (torch.arange(len(expected)) == len(expected) - 1).unsqueeze(0) & cut[row]
        bootstrap = torch.full_like(steps[:1], 0.3)
        alone = estimate(name, steps[:1], steps[1:], options=options, truncated=last, bootstrap=bootstrap)
        for spread, step in zip(by_turn, alone, strict=True):
            lengths = [len(tokens) for tokens, _, _ in expected]
            torch.testing.assert_close(spread[row][mask[row]], step[0].repeat_interleave(torch.tensor(lengths)))
            assert not spread[row][~mask[row]].any()


def test_shapes_of_turns_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"ends has shape"):
        Turns.of(MASK, ENDS[:, :3])
    with pytest.raises(ValueError, match=r"mask has dtype"):
        Turns.of(MASK.long(), ENDS)
    with pytest.raises(ValueError, match=r"x has shape"):
        Turns.of(MASK, ENDS).sum(torch.zeros(2, 3))


def test_extents_end_with_the_last_true_column():
    assert extents(flags([1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1])).tolist() == [3, 0, 4]
    assert extents(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [0, 0]
