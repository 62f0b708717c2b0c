import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.learn import minibatches
from tokencredit.learn.minibatches import length_batches


def tokens(rows, lengths):
    return len(rows) * int(lengths[rows].amax(0).sum())


def cost(batches, lengths, overhead):
    return sum(overhead + tokens(rows, lengths) for rows in batches)


def every_cut(rows):
    """All ways to cut a sequence into neighbouring batches."""
    if len(rows) == 0:
        yield []
    for size in range(1, len(rows) + 1):
        for rest in every_cut(rows[size:]):
            yield [rows[:size], *rest]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=7),
    overhead=st.sampled_from([0, 5, 100]),
    slack=st.none() | st.integers(0, 60),
)
def test_length_batches_have_the_least_cost(lengths, overhead, slack):
    lengths = torch.tensor(lengths)
    budget = None if slack is None else int(lengths.sum(1).max()) + slack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minibatches, "PASS_OVERHEAD", overhead)
        batches = length_batches(lengths, budget)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(lengths))), "each row once"
    allowed = [
        cut
        for cut in every_cut(lengths.sum(1).argsort(descending=True, stable=True))
        if budget is None or all(tokens(rows, lengths) <= budget for rows in cut)
    ]
    assert cost(batches, lengths, overhead) == min(cost(cut, lengths, overhead) for cut in allowed)
    if budget is not None:
        assert all(tokens(rows, lengths) <= budget for rows in batches)


def test_length_batches_by_hand(monkeypatch):
    # Together 4 · 100 tokens; apart 100 + 3 · 10 and one more pass at 20.
    monkeypatch.setattr(minibatches, "PASS_OVERHEAD", 20)
    first, second = length_batches(torch.tensor([10, 100, 10, 10]))
    assert first.tolist() == [1]
    assert sorted(second.tolist()) == [0, 2, 3]


def test_rows_of_one_length_stay_together():
    [rows] = length_batches(torch.full((500,), 64))
    assert rows.tolist() == list(range(500))


def test_a_row_longer_than_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"budget is 9; it must be at least 10, the tokens of the longest row"):
        length_batches(torch.tensor([3, 10]), 9)
