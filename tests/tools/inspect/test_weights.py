from copy import deepcopy

import pytest
import torch

from tokencredit.tools.inspect.parts import read_parts
from tokencredit.tools.inspect.weights import changes, effective_rank, unchanged


def test_effective_rank_by_hand():
    assert effective_rank(torch.eye(3)) == pytest.approx(3)
    assert effective_rank(torch.ones(2, 5)) == pytest.approx(1, abs=1e-4)
    # Singular values 3 and 1: exp(−3/4 log 3/4 − 1/4 log 1/4) = 4 / 3^(3/4).
    assert effective_rank(torch.tensor([[3.0, 0, 0], [0, 1, 0]])) == pytest.approx(4 / 3**0.75)
    assert effective_rank(torch.zeros(2, 3)) is None


def test_changes_by_hand(load):
    lm = load("gpt2")
    other = deepcopy(lm)
    weight = other.transformer.h[1].mlp.c_fc.weight
    weight.data *= 1.5
    models = read_parts("base", lm), read_parts("tuned", other)
    rows = {row.name: row for row in changes(*models)}
    assert list(rows)[:3] == ["wte", "wpe", "layer 1 attn.c_attn"]
    assert len(rows) == 2 + 2 * 4
    changed = rows.pop("layer 2 mlp.c_fc")
    assert changed.relative_norm == pytest.approx(0.5)
    assert changed.effective_rank == pytest.approx(effective_rank(weight.detach()), rel=1e-4)
    assert changed.parameters == 32 * 128
    assert {(row.relative_norm, row.effective_rank) for row in rows.values()} == {(0.0, None)}
    assert not unchanged(*models)
    assert unchanged(models[0], models[0])


def test_tied_matrices_count_once(models):
    names = [row.name for row in changes(*models)]
    assert len(names) == len(set(names))
    tied = models[0].lm.config.tie_word_embeddings
    assert any(name in ("lm_head", "embed_out") for name in names) is not tied


def test_a_matrix_that_was_zero(load):
    base, other = load("gpt2"), load("gpt2")
    for lm in (base, other):
        lm.transformer.wpe.weight.data.zero_()
        lm.transformer.h[0].mlp.c_fc.weight.data.zero_()
    other.transformer.wpe.weight.data[3] = 1
    rows = {row.name: row for row in changes(read_parts("base", base), read_parts("tuned", other))}
    assert rows["wpe"].relative_norm == 1
    assert rows["wpe"].effective_rank == pytest.approx(1)
    assert (rows["layer 1 mlp.c_fc"].relative_norm, rows["layer 1 mlp.c_fc"].effective_rank) == (0, None)
