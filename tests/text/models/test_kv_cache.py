import torch
from transformers import AutoConfig, DynamicCache

from tokencredit.text.models.kv_cache import SPARE_TOKENS, SpareCapacityLayer, sampling_cache


def states(time, batch=3, seed=0):
    return torch.randn(2, batch, 2, time, 4, generator=torch.Generator().manual_seed(seed))


def test_it_holds_what_transformers_own_cache_holds():
    ours, theirs = sampling_cache(AutoConfig.for_model("gpt2", n_layer=1)), DynamicCache()
    assert isinstance(ours.layers[0], SpareCapacityLayer)
    for step, time in enumerate([5, *[1] * (SPARE_TOKENS + 3), 40]):  # past the first buffer, and past a larger one
        if step == 7:  # rows leave
            for cache in (ours, theirs):
                cache.batch_select_indices(torch.tensor([0, 2]))
        if step == 9:  # rows are repeated
            for cache in (ours, theirs):
                cache.batch_repeat_interleave(2)
        new = states(time, batch=3 if step < 7 else 2 if step < 9 else 4, seed=step)
        for mine, reference in zip(ours.update(*new, 0), theirs.update(*new, 0), strict=True):
            assert torch.equal(mine, reference)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_one_more_token_copies_nothing():
    layer = SpareCapacityLayer()
    layer.update(*states(5))
    place = layer.keys.data_ptr()
    for _ in range(SPARE_TOKENS):
        layer.update(*states(1))
        assert layer.keys.data_ptr() == place
    layer.update(*states(1))
    assert layer.keys.data_ptr() != place


def test_layers_that_look_back_a_limited_way_stay_as_they_are():
    config = AutoConfig.for_model(
        "gemma3_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    kinds = [type(layer).__name__ for layer in sampling_cache(config).layers]
    assert kinds == ["DynamicSlidingWindowLayer", "SpareCapacityLayer"]
