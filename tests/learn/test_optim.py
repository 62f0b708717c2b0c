from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from tokencredit.learn.optim import build_optimizer, clip_gradients, hidden_matrices, schedule

# --- optimisers -----------------------------------------------------------------------------------------------------


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1))


def make_groups(model):
    return [
        {"params": model[:3].parameters(), "lr": 0.1, "weight_decay": 0.01},
        {"params": model[3].parameters(), "lr": 0.5},
    ]


def train(model, steps, *optimizers):
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(torch.arange(5)) - step).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_same(model, other):
    for expected, parameter in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_adamw_by_hand():
    # At the first step the bias corrections cancel: m̂ = g, √v̂ = |g|, so θ ← θ (1 − lr · decay) − lr · sign(g)
    parameter = nn.Parameter(torch.tensor([2.0, -3.0]))
    parameter.grad = torch.tensor([0.5, -20.0])
    build_optimizer([{"params": [parameter], "lr": 0.1, "weight_decay": 0.01}]).step()
    torch.testing.assert_close(parameter.data, torch.tensor([2 * 0.999 - 0.1, -3 * 0.999 + 0.1]))


def test_groups_keep_their_own_rates():
    optimizer = build_optimizer(make_groups(make_model()), eps=1e-6)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.01), (0.5, 0.0)]
    assert all(group["eps"] == 1e-6 for group in optimizer.param_groups)
    assert all(group["fused"] for group in optimizer.param_groups)


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model, expected = make_model(), make_model()
    optimizer = build_optimizer(make_groups(model), "muon", hidden=hidden_matrices(model))
    train(model, 3, optimizer)

    matrix = expected[1].weight
    first = [p for p in expected[:3].parameters() if p is not matrix]
    muon = torch.optim.Muon([matrix], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": first, "lr": 0.1, "weight_decay": 0.01}, {"params": expected[3].parameters(), "lr": 0.5}],
        weight_decay=0.0,
    )
    train(expected, 3, muon, adamw)
    assert_same(expected, model)


def test_hidden_matrices():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.tied, self.head = nn.Embedding(7, 4), nn.Linear(4, 7), nn.Linear(4, 7)
            self.tied.weight = self.embedding.weight
            self.hidden, self.frozen, self.value = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
            self.frozen.requires_grad_(False)

    model = Model()
    assert [id(p) for p in hidden_matrices(model, exclude=[model.head.weight])] == [id(model.hidden.weight)]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizer_resumes_exactly(name):
    def make():
        model = make_model()
        optimizer = build_optimizer(make_groups(model), name, hidden=hidden_matrices(model))
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule("linear", total=10))

    def go(model, optimizer, scheduler, steps):
        for _ in range(steps):
            train(model, 1, optimizer)
            scheduler.step()

    whole, first, second = make(), make(), make()
    go(*whole, 4)
    go(*first, 2)
    for before, after in zip(first, second, strict=True):
        after.load_state_dict(before.state_dict())
    go(*second, 2)
    for expected, parameter in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(expected, parameter)
    rates = [[group["lr"] for group in optimizer.param_groups] for _, optimizer, _ in (whole, second)]
    assert rates[0] == rates[1]
    assert rates[0][0] == pytest.approx(0.1 * 0.6)


def test_muon_alone_and_a_closure():
    parameter = nn.Parameter(torch.eye(3))
    optimizer = build_optimizer([{"params": [parameter], "lr": 0.1}], "muon", hidden=[parameter])

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    assert not torch.equal(parameter, torch.eye(3))


def test_accelerate_can_wrap_it():
    accelerate = pytest.importorskip("accelerate")
    model = make_model()
    optimizer = build_optimizer(make_groups(model), "muon", hidden=hidden_matrices(model))
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped = accelerator.prepare_optimizer(optimizer)
    expected = make_model()
    train(expected, 2, build_optimizer(make_groups(expected), "muon", hidden=hidden_matrices(expected)))
    train(model, 2, wrapped)
    assert_same(expected, model)
    accelerator.state._reset_state(reset_partial_state=True)  # it is the whole process's


def test_build_optimizer_refuses():
    model = make_model()
    with pytest.raises(ValueError, match=r"optimizer is 'sgd'; it may be adamw, muon"):
        build_optimizer(make_groups(model), "sgd")
    with pytest.raises(ValueError, match=r"hidden has no matrix"):
        build_optimizer(make_groups(model), "muon")


# --- schedules ------------------------------------------------------------------------------------------------------


def test_schedules_by_hand():
    linear = schedule("linear", warmup=3, total=13, final_scale=0.2)
    assert [linear(s) for s in (0, 1, 2, 3, 8, 13, 20)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.6, 0.2, 0.2])
    cosine = schedule("cosine", total=4)
    assert [cosine(s) for s in range(5)] == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0])
    raised = schedule("cosine", total=4, final_scale=0.5)
    assert [raised(s) for s in (0, 2, 4, 9)] == pytest.approx([1, 0.75, 0.5, 0.5])
    constant = schedule("constant", warmup=1)
    assert [constant(s) for s in (0, 1, 10**6)] == [0.5, 1, 1]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear", partial(LinearLR, start_factor=1.0, end_factor=0.3, total_iters=10)),
        ("cosine", partial(CosineAnnealingLR, T_max=10, eta_min=0.3)),
    ],
)
def test_schedules_equal_those_of_torch(name, theirs):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    ours, theirs = schedule(name, total=10, final_scale=0.3), theirs(optimizer)
    for step in range(11):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "step"}, r"schedule is 'step'; it may be constant, linear, cosine"),
        ({"name": "linear", "total": 10, "final_scale": 1.5}, r"final_scale is 1\.5"),
        ({"name": "linear", "total": 10, "warmup": -1}, r"warmup is -1"),
        ({"name": "linear", "total": 3, "warmup": 3}, r"total is 3; it must be above warmup, which is 3"),
        ({"name": "cosine"}, r"total is 0"),
    ],
)
def test_schedule_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(**arguments)


# --- gradients ------------------------------------------------------------------------------------------------------


def with_gradients(*gradients):
    parameters = [nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def test_clip_by_norm_by_hand():
    parameters = [*with_gradients([3.0], [0.0, -4.0]), nn.Parameter(torch.zeros(1))]
    assert clip_gradients(parameters, 2.5).item() == pytest.approx(5)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([1.5]))
    torch.testing.assert_close(parameters[1].grad, torch.tensor([0.0, -2.0]))
    assert clip_gradients(parameters, 100.0).item() == pytest.approx(2.5)
    torch.testing.assert_close(parameters[1].grad, torch.tensor([0.0, -2.0]))


def test_clip_by_the_largest_element_by_hand():
    parameters = with_gradients([3.0], [0.0, -4.0], [])
    assert clip_gradients(parameters, 2.0, "max").item() == pytest.approx(4)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([1.5]))
    torch.testing.assert_close(parameters[1].grad, torch.tensor([0.0, -2.0]))


def test_without_a_limit_it_only_measures():
    parameters = with_gradients([3.0], [0.0, -4.0])
    assert clip_gradients(parameters, None).item() == pytest.approx(5)
    assert parameters[1].grad.tolist() == [0.0, -4.0]


def test_clip_refuses():
    with pytest.raises(ValueError, match=r"max_norm is 0\.0"):
        clip_gradients(with_gradients([1.0]), 0.0)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_without_a_gradient_the_norm_is_a_zero_on_the_parameters_device(max_norm):
    parameters = [torch.nn.Parameter(torch.zeros(3, device="meta"))]
    assert clip_gradients(parameters, max_norm).device.type == "meta"
    assert float(clip_gradients([torch.nn.Parameter(torch.zeros(3))], max_norm)) == 0
