from torch import nn

from tokencredit.learn.training_mode import checkpointing_modules, disable_noise, training, training_modules


class Attention(nn.Module):
    """Reads a rate of its own, as attention does."""

    def __init__(self, rate):
        super().__init__()
        self.attention_dropout = rate


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_jitter_noise = 0.1


class Layer(nn.Module):
    """Reads the rate of its child, and may compute its activations twice."""

    def __init__(self, rate, checkpointing=False):
        super().__init__()
        self.attention, self.router = Attention(rate), Router()
        self.drops = nn.ModuleDict({"default": nn.Dropout(rate)})
        self.gradient_checkpointing = checkpointing


class Model(nn.Module):
    def __init__(self, rate=0.0, checkpointing=False):
        super().__init__()
        self.layers = nn.ModuleList([Layer(rate, checkpointing), Layer(rate, checkpointing)])
        self.layerdrop = 0.5
        self.gradient_checkpointing = checkpointing


def test_only_what_drops_or_checkpoints_is_in_training_mode():
    assert training_modules(Model()) == []
    model = Model(checkpointing=True)
    assert training_modules(model) == checkpointing_modules(model) == list(model.layers)
    model = Model(rate=0.1)
    names = {type(module).__name__ for module in training_modules(model)}
    assert names == {"Attention", "Layer", "ModuleDict", "Dropout"}


def test_modes_are_set_one_by_one_and_restored():
    model = Model(checkpointing=True).eval()
    odd = model.layers[1].router.train()
    before = [module.training for module in model.modules()]
    try:
        with training(training_modules(model)):
            assert all(layer.training for layer in model.layers)
            assert not model.training
            assert not model.layers[0].router.training
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [module.training for module in model.modules()] == before
    assert odd.training


def test_noise_is_disabled_and_dropout_if_asked():
    model = Model(rate=0.1)
    disable_noise(model, dropout=False)
    assert model.layerdrop == model.layers[0].router.input_jitter_noise == 0
    assert model.layers[0].attention.attention_dropout == model.layers[0].drops["default"].p == 0.1
    disable_noise(model, dropout=True)
    assert model.layers[0].attention.attention_dropout == model.layers[0].drops["default"].p == 0
    assert training_modules(model) == []


def test_rates_that_an_adapter_keeps_by_name_count():
    layer = Attention(0.0)
    layer.rank_dropout = {"default": 0.2}
    assert training_modules(layer) == [layer]
    disable_noise(layer, dropout=True)
    assert layer.rank_dropout == {"default": 0.0}
