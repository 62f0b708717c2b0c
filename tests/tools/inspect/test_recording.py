import pytest
import torch
from torch import nn

from tokencredit.errors import ConfigError
from tokencredit.tools.inspect.parts import Part
from tokencredit.tools.inspect.recording import edited_states, record


def test_outputs_add_up_to_the_states(models, ids):
    parts = models[0]
    seen = record("it", parts, ids)
    summed = seen.embedding + sum(seen.attention) + sum(seen.mlp)
    assert torch.allclose(summed, seen.states[-1], atol=1e-4)
    assert torch.allclose(
        parts.logprobs(seen.normed), parts.lm(input_ids=ids[None]).logits[0].log_softmax(-1), atol=1e-4
    )


def test_states_are_those_of_transformers(models, ids):
    parts = models[0]
    seen, theirs = record("it", parts, ids), parts.trunk(input_ids=ids[None], output_hidden_states=True).hidden_states
    assert torch.equal(seen.embedding, theirs[0][0])
    assert torch.allclose(seen.states[0], theirs[1][0], atol=1e-5)
    assert torch.allclose(seen.normed, theirs[2][0], atol=1e-5)


def test_post_norms_are_part_of_the_outputs(gemma2, ids):
    seen, layer = record("it", gemma2, ids), gemma2.layers[0]
    assert layer.attention_norm is layer.block.post_attention_layernorm
    assert torch.allclose(seen.attention[0], layer.attention_norm(seen.projected[0]))


def test_heads_go_through_the_projection(models, ids):
    parts = models[0]
    seen, layer = record("it", parts, ids), parts.layers[1]
    assert seen.heads[1].shape[1] % parts.heads == 0
    assert torch.allclose(layer.projection(seen.heads[1]), seen.projected[1], atol=1e-5)
    heads = [seen.output(Part("head", 2, head), parts.heads) for head in range(1, 5)]
    assert torch.equal(torch.cat(heads, dim=-1), seen.heads[1])


def test_a_layer_that_adds_something_else_is_refused(gpt2, ids):
    parts = gpt2[0]
    parts.layers[1].block.register_forward_hook(lambda _module, _args, output: output * 1.5)
    with pytest.raises(ConfigError, match="layer 2 of GPT2Model adds something else"):
        record("it", parts, ids)


def test_something_else_after_the_final_norm_is_refused(gpt2, ids):
    gpt2[0].norm.register_forward_hook(lambda _module, args, output: output if args[0].dim() == 2 else output * 2)
    with pytest.raises(ConfigError, match="does something else than its final norm"):
        record("it", gpt2[0], ids)


def test_no_hook_remains(gpt2, ids):
    record("it", gpt2[0], ids)
    edited_states(gpt2[0], ids, [{Part("mlp", 1): torch.zeros(12, 32)}])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt2[0].lm.modules() if isinstance(m, nn.Module))


def test_edits_with_the_own_outputs_change_nothing(models, ids):
    parts = models[0]
    seen = record("it", parts, ids)
    rows = [{part: seen.output(part, parts.heads)} for part in [*parts.components(), Part("attention", 2)]]
    states = edited_states(parts, ids, [{}, *rows])
    assert torch.allclose(states, seen.states[-1][-1].expand_as(states), atol=1e-4)


def test_edits_of_other_families(other, ids):
    seen = record("it", other, ids)
    states = edited_states(other, ids, [{part: seen.output(part, 4)} for part in other.components()])
    assert torch.allclose(states, seen.states[-1][-1].expand_as(states), atol=1e-4)
    (without,) = edited_states(other, ids, [{Part("mlp", 2): torch.zeros(12, 32)}])
    assert torch.allclose(without, (seen.states[-1] - seen.mlp[1])[-1], atol=1e-4)


def test_all_outputs_of_another_model_give_its_state(models, ids):
    base, tuned = models
    seen = record("it", tuned, ids)
    everything = {part: seen.output(part, tuned.heads) for part in tuned.components() if part.kind != "head"}
    everything |= {Part("attention", layer): seen.attention[layer - 1] for layer in (1, 2)}
    (state,) = edited_states(base, ids, [everything])
    assert torch.allclose(state, seen.states[-1][-1], atol=1e-4)


def test_edits_affect_their_row_and_layer_only(gpt2, ids):
    base, tuned = gpt2
    seen, own = record("it", tuned, ids), record("it", base, ids)
    mlp, head = Part("mlp", 2), Part("head", 2, 3)
    rows = edited_states(base, ids, [{}, {mlp: seen.output(mlp, 4)}, {head: torch.zeros(12, 8)}])
    assert torch.allclose(rows[0], own.states[-1][-1], atol=1e-5)
    # The last layer's MLP is the last summand.
    assert torch.allclose(rows[1] - rows[0], (seen.mlp[1] - own.mlp[1])[-1], atol=1e-4)
    assert not torch.allclose(rows[2], rows[0], atol=1e-2)


def test_rows_are_read_in_several_passes(gpt2, ids, monkeypatch):
    rows = [{Part("mlp", 1): torch.full((12, 32), float(x))} for x in range(5)]
    expected = edited_states(gpt2[0], ids, rows)
    monkeypatch.setattr("tokencredit.tools.inspect.recording.TOKENS", 2 * len(ids))
    assert torch.allclose(edited_states(gpt2[0], ids, rows), expected, atol=1e-5)
