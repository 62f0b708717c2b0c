from copy import deepcopy

import pytest
import torch

from tokencredit.tools.inspect.parts import Part, read_parts
from tokencredit.tools.inspect.patching import (
    UNEMBEDDING,
    ablate,
    candidates,
    means,
    odds_of,
    patch,
    repeat,
    share,
    strongest,
)
from tokencredit.tools.inspect.question import Question, Text, choose, predict
from tokencredit.tools.inspect.recording import record

QUESTION = Question(9, torch.tensor([5, 6]), torch.tensor([9]), "")


def test_share():
    assert share(3.0, 1.0, 5.0) == 0.5
    assert share(0.0, 1.0, 5.0) == -0.25
    assert share(3.0, 5.0, 1.0) == 0.5
    assert share(1.0, 1.0, 1.0) is None


def test_the_strongest_parts_move_towards_the_tuned_model():
    patched = {Part("mlp", layer): float(layer) for layer in range(1, 8)}
    assert [part.layer for part in strongest(patched, 0.0, 8.0)] == [7, 6, 5, 4, 3]
    assert [part.layer for part in strongest(patched, 8.0, 0.0)] == [1, 2, 3, 4, 5]


def test_everything_patched_is_the_tuned_model(models, ids):
    base, tuned = models
    records = [record("it", parts, ids) for parts in models]
    nothing, everything = patch(base, tuned, records[1], ids, QUESTION, [set(), set(candidates(base))])
    before, after = odds_of(models, records, QUESTION)
    assert nothing == pytest.approx(before, abs=1e-4)
    # Heads are patched before the output projection, whose weights are the base's.
    with torch.no_grad():
        for layer, other in zip(base.layers, tuned.layers, strict=True):
            for mine, theirs in zip(layer.projection.parameters(), other.projection.parameters(), strict=True):
                mine.copy_(theirs)
    (same,) = patch(base, tuned, records[1], ids, QUESTION, [set(candidates(base))])
    assert same == pytest.approx(after, abs=1e-3)
    assert everything != pytest.approx(before, abs=1e-2)


def test_a_change_of_one_part_is_carried_by_it(load, ids):
    base = load("gpt2").requires_grad_(False)
    other = deepcopy(base)
    other.transformer.h[1].mlp.c_proj.weight += 0.1 * torch.randn(128, 32, generator=torch.Generator().manual_seed(1))
    models = (read_parts("base", base), read_parts("tuned", other))
    records = [record("it", parts, ids) for parts in models]
    before, after = odds_of(models, records, QUESTION)
    parts = candidates(models[0])
    values = patch(*models, records[1], ids, QUESTION, [{part} for part in parts])
    shares = {part: share(value, before, after) for part, value in zip(parts, values, strict=True)}
    assert shares.pop(Part("mlp", 2)) == pytest.approx(1, abs=1e-3)
    assert max(map(abs, shares.values())) < 1e-3


def test_a_change_of_the_final_norm_is_the_unembeddings(load, ids):
    base = load("llama").requires_grad_(False)
    other = deepcopy(base)
    other.model.norm.weight *= torch.linspace(0.5, 2, 32)
    models = (read_parts("base", base), read_parts("tuned", other))
    records = [record("it", parts, ids) for parts in models]
    before, after = odds_of(models, records, QUESTION)
    assert abs(after - before) > 0.01
    values = patch(*models, records[1], ids, QUESTION, [{UNEMBEDDING}, {Part("mlp", 1)}])
    assert values == pytest.approx([after, before], abs=1e-4)


def test_means_are_over_all_tokens(gpt2, ids):
    seen = [record("it", gpt2[0], text) for text in (ids, ids[:5] + 100)]
    mean = means(gpt2[0], seen)
    expected = torch.cat([x.mlp[1] for x in seen]).mean(0)
    assert torch.allclose(mean[Part("mlp", 2)], expected, atol=1e-5)
    assert torch.allclose(mean[Part("head", 1, 2)], torch.cat([x.heads[0][:, 8:16] for x in seen]).mean(0), atol=1e-5)
    assert set(mean) == set(gpt2[0].components())


def test_ablation_puts_in_the_mean(gpt2, ids):
    tuned = gpt2[1]
    seen = record("it", tuned, ids)
    mean = torch.linspace(-1, 1, 32)
    odds = ablate(tuned, {Part("mlp", 2): mean}, ids, QUESTION)[Part("mlp", 2)]
    state = (seen.states[-1] - seen.mlp[1])[QUESTION.position] + mean
    logits = tuned.lm.lm_head(tuned.norm(state))
    assert odds == pytest.approx(float(logits[[5, 6]].mean() - logits[9]), abs=1e-4)


def test_shares_in_another_text(gpt2, ids):
    parts, text = [Part("mlp", 1), Part("mlp", 2)], Text(ids + 7, 4)
    records = tuple(record("it", model, text.ids) for model in gpt2)
    question = choose(predict(gpt2, records, text), text, [], [])
    before, after = odds_of(gpt2, records, question)
    values = patch(*gpt2, records[1], text.ids, question, [{part} for part in parts])
    expected = [(value - before) / (after - before) for value in values]
    assert repeat(gpt2, records, text, [], [], parts) == pytest.approx(expected)


def test_no_share_where_nothing_changed(gpt2, ids):
    base = gpt2[0]
    records, parts = (record("it", base, ids),) * 2, [Part("mlp", 1)]
    assert repeat((base, base), records, Text(ids, 4), [], [], parts) == [None]
    assert repeat(gpt2, records, Text(ids, len(ids)), [], [], parts) == [None]


def test_a_change_of_the_output_projections_alone_is_carried_by_the_attentions(models, ids):
    base = models[0]
    changed = deepcopy(base.lm)
    tuned = read_parts("it", changed)
    torch.manual_seed(0)
    for layer in tuned.layers:
        for parameter in layer.projection.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    records = [record("it", parts, ids) for parts in (base, tuned)]
    start, end = odds_of((base, tuned), records, QUESTION)
    attentions = {part for part in candidates(tuned) if part.kind == "attention"}
    (value,) = patch(base, tuned, records[1], ids, QUESTION, [attentions])
    assert abs(end - start) > 1e-3
    assert share(value, start, end) == pytest.approx(1, abs=1e-3)


def test_of_an_attention_and_its_heads_one_is_named():
    patched = {Part("attention", 1): 3.0, Part("head", 1, 2): 2.5, Part("head", 2, 1): 2.0, Part("attention", 2): 1.0}
    assert strongest(patched, 0.0, 4.0) == [Part("attention", 1), Part("head", 2, 1)]
