import math
from types import SimpleNamespace

import pytest
import torch

from tokencredit.distributed.processes import Processes
from tokencredit.text.batch import distinct_over_processes, text_hashes, text_metrics, token_pairs


def test_pairs_by_hand():
    ids = torch.tensor([[1, 2, 1, 2, 9], [1, 2, 3, 3, 3]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    count, distinct, in_rows = token_pairs(ids, mask)
    # 12 21 12, and 12 23 33 33
    assert (count, len(distinct), in_rows) == (7, 4, 5)


def test_a_single_token_has_no_pair():
    count, distinct, in_rows = token_pairs(torch.tensor([[7]]), torch.tensor([[True]]))
    assert (count, len(distinct), in_rows) == (0, 0, 0)


def test_shares_of_pairs_are_unknown_without_a_pair():
    rollout = SimpleNamespace(response_ids=torch.tensor([[7]]), mask=torch.tensor([[True]]))
    batch = SimpleNamespace(rollout=rollout, prompts=SimpleNamespace(texts=["a"]), completions=["b"])
    assert text_metrics(batch, Processes()) == pytest.approx(
        {"distinct": 1, "distinct_2": math.nan, "repetition": math.nan}, nan_ok=True
    )


def test_texts_of_two_processes_are_counted_once():
    own, others = text_hashes(["a", "a", "ab"], ["b", "b", ""]), text_hashes(["a", "c"], ["b", "d"])
    assert int(own.min()) >= 0
    two = SimpleNamespace(gather=lambda numbers: torch.cat([numbers, others, torch.tensor([-1])]))
    assert distinct_over_processes(own, two) == 3, "a+b in both, ab without a completion, c+d"
