"""Updates of a small policy, a table of logits and values, in the processes that a launcher starts; a program, too."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tokencredit.core.off_policy import correction
from tokencredit.core.vocab_projection import TokenStats
from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import shard, whole
from tokencredit.learn.experience import Experience
from tokencredit.learn.learner import Learner
from tokencredit.learn.minibatches import minibatches
from tokencredit.learn.objective import (
    CriticOutputs,
    Interpolation,
    Objective,
    Passes,
    PolicyOutputs,
    SequenceObjective,
    WeightedObjective,
)
from tokencredit.learn.optim import build_optimizer, hidden_matrices, schedule
from tokencredit.learn.state import sharded_parameters
from tokencredit.learn.update import UpdateSettings
from tokencredit.runs.checkpoint import read_checkpoint, size_of, write_checkpoint

STATES, ACTIONS, ROWS, TIME = 6, 5, 11, 7
SHARES = {1: (11,), 3: (3, 7, 1)}
"""Rows of each process, by the number of processes."""
CASES = {
    "plain": ({}, {}),
    "whitened minibatches": ({}, {"whiten_minibatches": True}),
    "target KL": ({}, {"target_kl": 1.0, "epochs": 6}),
    "fewer rows than processes": ({}, {"minibatches": 6, "epochs": 1}),
    "micro-batches": ({}, {"micro_batch_tokens": 16}),
    "critic-only steps": ({}, {"critic_epochs": 2, "minibatches": 5}),
    "constant reduction": ({"reduction": "constant"}, {"minibatches": 6}),
    "by sequence": ({"reduction": "sequence"}, {"minibatches": 6}),
    "GSPO": ({"kind": SequenceObjective, "clip": 0.05}, {"micro_batch_tokens": 16}),
    "DPPO": ({"kind": partial(WeightedObjective, divergence="tv", divergence_limit=0.05)}, {"micro_batch_tokens": 16}),
    "importance weights": ({"weighted": True}, {"micro_batch_tokens": 16, "critic_epochs": 1}),
    "interpolated by age": (
        {"aged": True, "interpolation": Interpolation("clip", high=1.1)},
        {"micro_batch_tokens": 16, "critic_epochs": 1},
    ),
}
"""Settings of the objective and of the update; `weighted` and `aged` are of the experience."""
EXPERIENCE = ("weighted", "aged")
SEPARATE = {
    "separate critic": {"micro_batch_tokens": None},
    "separate critic, micro-batches": {"minibatches": 2},  # several rows in a process
    "separate critic, not clipped": {"max_grad_norm": None},
    "separate critic, critic-only steps": {"critic_epochs": 2},
    "separate critic, whitened": {"whiten_minibatches": True, "target_kl": 1.0},
    "adapter on a frozen actor": {"adapter": True},
    "Muon": {"optimizer": "muon"},
}
"""Settings with an actor and a critic that are sharded if there are several processes."""
REMEMBERS = {"optimizer": "muon", "minibatches": 2, "critic_epochs": 1}
"""Settings of a learner whose moments and generator a checkpoint has to keep."""


class FunctionPasses(Passes):
    """Passes whose critic is a function of states."""

    def __init__(self, critic, separate_critic=False, evaluate=None):
        self.values, self.separate_critic = critic, separate_critic
        self.function = evaluate or (lambda model, inputs, loss: model(inputs, loss))

    def evaluate(self, model, inputs, loss):
        return self.function(model, inputs, loss)

    def critic(self, inputs):
        return CriticOutputs(self.values(inputs["states"]))


class TablePolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.randn(STATES, ACTIONS))
        self.value = nn.Parameter(torch.randn(STATES))

    def forward(self, inputs, policy_loss):
        distribution = torch.distributions.Categorical(logits=self.logits[inputs["states"]])
        logprobs, entropy, mask = distribution.log_prob(inputs["actions"]), distribution.entropy(), inputs["mask"]
        loss = policy_loss(TokenStats(logprobs[mask], entropy[mask], None), slice(None))
        stats = TokenStats(logprobs.detach(), entropy.detach(), None)
        return PolicyOutputs(loss, stats, CriticOutputs(self.value[inputs["states"]]))


class Net(nn.Module):
    """Logits of states; its narrowest matrix has fewer rows than there are processes."""

    def __init__(self, outputs):
        super().__init__()
        self.states, self.layer = nn.Embedding(STATES, 8), nn.Linear(8, 8)
        self.narrow, self.outputs = nn.Linear(8, 2), nn.Linear(2, outputs)

    def forward(self, states):
        return self.outputs(self.narrow(torch.tanh(self.layer(self.states(states)))))


class SeparatePolicy(nn.Module):
    """An actor and a critic with a value head, like those of language models; optionally with a small adapter."""

    def __init__(self, adapter):
        super().__init__()
        self.actor, self.critic, self.head = Net(ACTIONS), Net(4), nn.Linear(4, 1)
        self.adapter = nn.Linear(ACTIONS, ACTIONS) if adapter else None
        if adapter:
            self.actor.requires_grad_(False)

    def values(self, states):
        return self.head(self.critic(states)).squeeze(-1)

    def forward(self, inputs, policy_loss):
        logits = self.actor(inputs["states"])
        distribution = torch.distributions.Categorical(logits=logits if self.adapter is None else self.adapter(logits))
        logprobs, entropy, mask = distribution.log_prob(inputs["actions"]), distribution.entropy(), inputs["mask"]
        loss = policy_loss(TokenStats(logprobs[mask], entropy[mask], None), slice(None))
        stats = TokenStats(logprobs.detach(), entropy.detach(), None)
        return PolicyOutputs(loss, stats, CriticOutputs(self.values(inputs["states"])))


def experience_of(seed, processes, *, weighted=False, aged=False):
    """This process's rows of a batch, no wider than its longest; one row has no token in the loss."""
    random = torch.Generator().manual_seed(seed)
    states, actions = (torch.randint(n, (ROWS, TIME), generator=random) for n in (STATES, ACTIONS))
    lengths = torch.tensor([2, 1, 3, 0, 7, 5, 6, 2, 4, 3, 1])
    mask = torch.arange(TIME) < lengths.unsqueeze(1)
    numbers = [torch.randn(ROWS, TIME, generator=random) for _ in range(4)]
    prompts = torch.arange(ROWS).unsqueeze(1).expand(ROWS, 3) * (torch.arange(3) >= 1)
    inputs = {"states": states, "actions": actions, "mask": mask, "prompt_ids": prompts}
    every = mask & (torch.rand(ROWS, TIME, generator=random) < 0.7).index_fill(1, torch.tensor([0]), True)
    whole = Experience(inputs, mask, lengths.clamp(min=1), numbers[0] - 1.5, *numbers[1:], value_mask=every)
    if weighted:
        weights = correction(whole.logprobs, whole.logprobs + numbers[3], mask, outside="mask", low=0.5, high=2.0)
        whole = replace(whole, weights=weights)
    if aged:
        age = torch.randint(4, (ROWS, TIME), generator=random)
        whole = replace(whole, behavior_logprobs=whole.logprobs, age=age)
    shares = SHARES[processes.count]
    first = sum(shares[: processes.rank])
    own = whole.select(slice(first, first + shares[processes.rank]))
    width = max(int(own.lengths.max()), 1)

    def cut(name, x):
        return x[:, 1:] if name == "prompt_ids" and processes.rank else x[:, :width] if x.dim() > 1 else x

    return own.map(cut)


def learner_of(processes, objective, settings):
    objective = {name: value for name, value in objective.items() if name not in EXPERIENCE}
    kind = objective.pop("kind", Objective)
    torch.manual_seed(0)
    policy = TablePolicy()

    return Learner(
        policy,
        torch.optim.SGD(policy.parameters(), lr=0.5),
        FunctionPasses(lambda states: policy.value[states]),
        kind(**{"clip": 0.2, "value_clip": 0.3, "entropy_coef": 0.01} | objective),
        UpdateSettings(**{"epochs": 2, "minibatches": 3, "max_grad_norm": 1.0} | settings),
        schedule("constant"),
        torch.Generator().manual_seed(3),
        processes,
    )


def separate_learner(processes, adapter=False, optimizer="adamw", **settings):
    """A learner whose actor and critic are sharded if there are several processes."""
    torch.manual_seed(0)
    policy = SeparatePolicy(adapter)
    if processes.count > 1:
        for net in (policy.actor, policy.critic):
            shard(net, [net.layer])
    trained = [p for p in policy.parameters() if p.requires_grad]
    hidden = hidden_matrices(policy)

    return Learner(
        policy,
        build_optimizer([{"params": trained, "lr": 0.05, "weight_decay": 0.01}], optimizer, hidden=hidden),
        FunctionPasses(policy.values, separate_critic=True),
        Objective(clip=0.2, value_clip=0.3, entropy_coef=0.01),
        UpdateSettings(**{"epochs": 1, "minibatches": 4, "max_grad_norm": 0.5, "micro_batch_tokens": 8} | settings),
        schedule("constant"),
        torch.Generator().manual_seed(3),
        processes,
    )


def updated_separately(processes, settings):
    """Metrics of two updates, and the whole weights after them."""
    learner = separate_learner(processes, **settings)
    metrics = [learner.update(experience_of(seed, processes)) for seed in (1, 2)]
    return {"metrics": metrics, "weights": [whole(p).tolist() for p in learner.model.parameters()]}


def updated(processes, objective, settings):
    """Metrics of two updates, and the weights after them."""
    learner, options = (
        learner_of(processes, objective, settings),
        {x: objective[x] for x in EXPERIENCE if x in objective},
    )
    metrics = [learner.update(experience_of(seed, processes, **options)) for seed in (1, 2)]
    return {"metrics": metrics, "weights": [p.tolist() for p in learner.model.parameters()]}


def located(processes, field, make):
    """What a skipped step says of a number that is not finite in the last row, which another process may train on."""
    experience = experience_of(1, processes)
    spoilt = getattr(experience, field).clone()
    if processes.rank == processes.count - 1:
        spoilt[-1, 0] = math.nan
    errors = []
    make(epochs=1, minibatches=4).update(
        replace(experience, **{field: spoilt}), on_step=lambda _, error: errors.append(error)
    )
    return [(error.term, error.row) for error in errors if error is not None]


def rows_of_minibatches(processes):
    """The first input token, which is the row's number, of each row of this process, by minibatch."""
    drawn = minibatches(experience_of(1, processes), Objective(), 6, torch.Generator().manual_seed(5), processes)
    parts = []
    for part in drawn:
        tokens = part.inputs["prompt_ids"]
        assert tokens.shape[1] == 3, "padded to the longest prompt"
        assert not tokens[:, 0].any(), "on the left"
        assert tokens[:, -1].tolist() == part.rows.tolist()
        parts.append(part.rows.tolist() if part.real else [])
    return parts


def used_advantages(processes):
    """Advantages of this process's rows as an update with whitened minibatches used them, row by row; None outside."""
    learner, experience = learner_of(processes, {}, {"whiten_minibatches": True}), experience_of(1, processes)
    learner.update(experience)
    used = learner.used_advantages(experience, sum(SHARES[processes.count][: processes.rank]), ROWS)
    assert used.isnan().equal(~experience.mask)
    return [[x for x in row if not math.isnan(x)] for row in used.tolist()]


def compared(processes, cases):
    """Two updates of each case, from this process."""
    return {
        name: updated(processes, *CASES[name]) if name in CASES else updated_separately(processes, SEPARATE[name])
        for name in cases
    }


def results(processes):
    """What is no case, from this process."""
    answer = {}

    def table(**settings):
        return learner_of(processes, {}, settings)

    for field in ("advantages", "returns"):
        answer[f"{field} of the last row"] = located(processes, field, table)
        answer[f"{field} of the last row, sharded"] = located(processes, field, partial(separate_learner, processes))
    texts = processes.texts("ünï" * processes.rank)
    share = processes.share(10)
    return answer | {
        "minibatches": rows_of_minibatches(processes),
        "used advantages": used_advantages(processes),
        "texts": texts,
        "share of 10": [share.start, share.stop],
    }


def saved(processes, folder):
    """Metrics of an update after a checkpoint of everything that remembers, and the checkpoint's size."""
    learner = separate_learner(processes, **REMEMBERS)
    for seed in (1, 2):
        learner.update(experience_of(seed, processes))
    state = learner.state()
    if processes.main:
        folder.mkdir()
    processes.wait()
    write_checkpoint(folder, state, {}, processes)
    return {"size": size_of(state), "next": learner.update(experience_of(3, processes))}


def gone_on(processes, folder):
    """Metrics of the update after a checkpoint that other processes wrote."""
    learner = separate_learner(processes, **REMEMBERS)
    learner.load(read_checkpoint(folder, processes, sharded_parameters(learner.model)))
    return {"next": learner.update(experience_of(3, processes))}


if __name__ == "__main__":
    together, place, cases = Processes(), Path(sys.argv[1]), sys.argv[2:]
    answer = compared(together, cases)
    if (place / "of-one").is_dir():
        answer |= results(together) | {"saved": saved(together, place / "of-three")}
        answer["gone on"] = gone_on(together, place / "of-one")
    (place / f"{together.rank}.json").write_text(json.dumps(answer))
    together.close()
