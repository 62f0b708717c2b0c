import math

import pytest
import torch

from tokencredit.learn.optim import build_optimizer, clip_gradients, hidden_matrices, schedule


def test_schedules_by_hand():
    linear = schedule("linear", warmup=3, total=13, final_scale=0.2)
    assert [linear(s) for s in (0, 1, 2, 3, 8, 13, 20)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.6, 0.2, 0.2])
    cosine = schedule("cosine", total=4)
    assert [cosine(s) for s in range(5)] == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0])


def test_clip_by_hand():
    p = torch.zeros(2, requires_grad=True)
    p.grad = torch.tensor([3.0, -4.0])
    assert clip_gradients([p], None) == 5
    assert clip_gradients([p], 2.0, math.inf) == 4
    torch.testing.assert_close(p.grad, torch.tensor([1.5, -2.0]))
    assert clip_gradients([p], 1.25).item() == pytest.approx(2.5)
    torch.testing.assert_close(p.grad, torch.tensor([0.75, -1.0]))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_resumes_exactly(name):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        groups = [{"params": model[:2].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.5}]
        optimizer = build_optimizer(groups, name, hidden=hidden_matrices(model))
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule("linear", total=10))

    def train(model, optimizer, schedule, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.arange(5)).square().sum().backward()
            optimizer.step()
            schedule.step()

    whole, first, second = make(), make(), make()
    train(*whole, 4)
    train(*first, 2)
    for before, after in zip(first, second, strict=True):
        after.load_state_dict(before.state_dict())
    train(*second, 2)
    for expected, parameter in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(expected, parameter)
    assert [group["lr"] for group in second[1].param_groups] == [group["lr"] for group in whole[1].param_groups]
