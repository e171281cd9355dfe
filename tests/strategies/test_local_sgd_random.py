"""strategy="local_sgd": random loops equal the definition, in which one process has the models of all ranks.

The loop fuzzer (`tests/fuzz`) has no such loops: what it compares with is one model on the joined batch.
"""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import StepLR

from fabric import Fabric
from fabric.strategies import LocalSGDStrategy

SEEDS = 25
OPTIMIZERS = [
    partial(SGD, lr=0.1),
    partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    partial(Adam, lr=0.02),
    partial(AdamW, lr=0.02, amsgrad=True, foreach=True),
    partial(RMSprop, lr=0.01, momentum=0.5, centered=True),
]
OUTER = [
    None,
    None,
    partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    partial(Adam, lr=0.05, weight_decay=0.1),
]


class Net(nn.Module):
    """Two heads, of which a batch uses one, and a parameter of one number."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, way):
        return (self.left if way else self.right)(torch.tanh(self.norm(self.body(x)))) * self.scale


class Rank:
    """What one rank has: the models, and their optimizers with schedules."""

    def __init__(self, seed, fabric=None):
        rng = random.Random(seed)
        self.fabric, self.models, self.optimizers, self.schedules = fabric, [], [], []
        for _ in range(rng.choice([1, 1, 2])):
            torch.manual_seed(rng.randrange(99))
            net = Net()
            parts = [list(net.parameters())]
            if rng.random() < 0.4:
                parts = [[*net.body.parameters(), net.scale, *net.norm.parameters()],
                         [*net.left.parameters(), *net.right.parameters()]]  # fmt: skip
            own = [rng.choice(OPTIMIZERS)(part) for part in parts]
            if fabric is not None:
                net, *own = fabric.setup(net, *own)
            self.models.append(net)
            self.optimizers += [(len(self.models) - 1, optimizer) for optimizer in own]
        self.schedules = [StepLR(optimizer, 2, 0.5) for _, optimizer in self.optimizers]

    def gradients(self, which, rank, data, parts, clip, zero):
        """Of one step of an optimizer, from several batches."""
        place, optimizer = self.optimizers[which]
        model = self.models[place]
        model.zero_grad() if zero else optimizer.zero_grad()
        for part in range(parts):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1000 * data + 10 * part + rank))
            loss = model(x, (data + part * rank) % 3).pow(2).mean() / parts
            if self.fabric is None:
                loss.backward()
                continue
            with self.fabric.no_backward_sync(model, enabled=part < parts - 1):
                self.fabric.backward(loss)
        if clip:
            if self.fabric is not None:
                self.fabric.clip_gradients(model, optimizer, **clip)
            elif "max_norm" in clip:
                nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], **clip)
            else:
                nn.utils.clip_grad_value_([p for g in optimizer.param_groups for p in g["params"]], **clip)

    def values(self):
        return [{name: value.clone() for name, value in model.state_dict().items()} for model in self.models]


class Defined:
    """All ranks in one process. The end of a round: the mean of parameters and floating buffers, or a step of
    the outer optimizer; before a save the means of moments, too.
    """

    def __init__(self, seed, world, sync_every, outer):
        self.ranks, self.sync_every = [Rank(seed) for _ in range(world)], sync_every
        self.held = [self.parameters(self.ranks[0], which) for which in range(len(self.ranks[0].optimizers))]
        self.alike = [[nn.Parameter(p.detach().clone()) for p in held] for held in self.held]
        self.outer = [outer and outer(alike) for alike in self.alike]
        self.steps = [0] * len(self.held)

    @staticmethod
    def parameters(rank, which):
        return [p for group in rank.optimizers[which][1].param_groups for p in group["params"]]

    def step(self, which, *args):
        for number, rank in enumerate(self.ranks):
            rank.gradients(which, number, *args)
            rank.optimizers[which][1].step()
        self.steps[which] += 1
        if self.steps[which] == self.sync_every:
            self.end([which])

    @torch.no_grad()
    def end(self, which):
        whose = {self.ranks[0].optimizers[n][0] for n in which}
        for place in whose:
            for buffers in zip(*[rank.models[place].buffers() for rank in self.ranks], strict=True):
                self.mean([b for b in buffers if b.is_floating_point()])
        for n in which:
            self.steps[n] = 0
            of_ranks = list(zip(*[self.parameters(rank, n) for rank in self.ranks], strict=True))
            for ps in of_ranks:
                self.mean(ps)
            if self.outer[n] is not None:
                for before, ps in zip(self.alike[n], of_ranks, strict=True):
                    before.grad = before - ps[0]
                self.outer[n].step()
                for before, ps in zip(self.alike[n], of_ranks, strict=True):
                    [p.copy_(before) for p in ps]

    @staticmethod
    def mean(tensors):
        if tensors:
            mean = sum(tensors[1:], tensors[0].clone()) / len(tensors)
            [tensor.copy_(mean) for tensor in tensors]

    @torch.no_grad()
    def one_state(self):
        """What a save makes of all ranks."""
        self.end([n for n, steps in enumerate(self.steps) if steps])
        for n in range(len(self.held)):
            for ps in zip(*[self.parameters(rank, n) for rank in self.ranks], strict=True):
                states = [r.optimizers[n][1].state for r in self.ranks]
                entries = [state.get(p, {}) for state, p in zip(states, ps, strict=True)]
                there = [entry for entry in entries if entry]
                for key in there[0] if there else ():
                    made = there[0][key].clone()
                    if key != "step":
                        made = torch.stack([entry[key] for entry in there]).mean(0)
                    for state, p in zip(states, ps, strict=True):
                        state[p][key] = made.clone()


def statements(seed):
    """(sync_every, outer, world, lines): a line is a word and what it is about."""
    rng = random.Random(seed)
    count = len(Rank(seed).optimizers)
    lines = []
    for _ in range(rng.choice([4, 8, 14])):
        word = rng.choice(["step"] * 8 + ["save", "end", "resume", "look", "schedule", "whole"])
        clip = rng.choice([None, None, {"max_norm": 0.05}, {"clip_value": 0.01}])
        about = (rng.randrange(count), rng.randrange(99), rng.choice([1, 1, 2, 3]), clip, rng.random() < 0.3)
        lines.append((word, about))
    return rng.choice([1, 2, 3, 5]), rng.choice(OUTER), rng.choice([2, 2, 3]), lines


def defined(seed):
    sync_every, outer, world, lines = statements(seed)
    all_ranks = Defined(seed, world, sync_every, outer)
    seen = []
    for word, about in lines:
        if word in ("step", "schedule"):
            all_ranks.step(*about)
        if word in ("save", "resume", "end", "whole"):
            all_ranks.one_state()
        elif word == "schedule":
            [rank.schedules[about[0]].step() for rank in all_ranks.ranks]
        seen.append([rank.values() for rank in all_ranks.ranks])
    return seen


def on_a_rank(seed, folder):
    torch.set_default_dtype(torch.float64)
    try:
        return _on_a_rank(seed, folder)
    finally:
        torch.set_default_dtype(torch.float32)


def _on_a_rank(seed, folder):
    sync_every, outer, world, lines = statements(seed)
    strategy = LocalSGDStrategy(sync_every, outer_optimizer=outer)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    mine = Rank(seed, fabric)
    seen = []
    for number, (word, about) in enumerate(lines):
        optimizers = [optimizer for _, optimizer in mine.optimizers]
        state = {"models": mine.models, "optimizers": optimizers, "schedules": mine.schedules}
        if word in ("step", "schedule"):
            which, data, parts, clip, zero = about
            clip = clip and {"clip_val" if "clip_value" in clip else "max_norm": next(iter(clip.values()))}
            mine.gradients(which, fabric.global_rank, data, parts, clip, zero)
            optimizers[which].step()
        if word == "end":
            strategy.end_round()
        elif word == "whole":
            with fabric.whole(mine.models[0]):
                pass
        elif word in ("save", "resume"):
            fabric.save(folder / f"{number}", state, format="sharded" if about[4] else "full")
        elif word == "schedule":
            mine.schedules[about[0]].step()
        if word == "resume":
            if about[2] > 1:  # in a new run
                strategy = LocalSGDStrategy(sync_every, outer_optimizer=outer)
                fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
                fabric.launch()
                mine = Rank(seed, fabric)
            optimizers = [optimizer for _, optimizer in mine.optimizers]
            state = {"optimizers": optimizers, "models": mine.models, "schedules": mine.schedules}
            fabric.load(folder / f"{number}", state)
        seen.append(copy.deepcopy(mine.values()))
    return seen


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_random_loop_is_the_definition(ranks, tmp_path, seed):
    torch.set_default_dtype(torch.float64)
    try:
        want, world = defined(seed), statements(seed)[2]
    finally:
        torch.set_default_dtype(torch.float32)
    found = ranks.run(on_a_rank, seed, tmp_path, world_size=world)
    for number, line in enumerate(statements(seed)[3]):
        for rank, seen in enumerate(found):
            text = f"line {number} {line}, rank {rank}: "
            torch.testing.assert_close(
                seen[number], want[number][rank], rtol=1e-9, atol=1e-12, msg=lambda m, t=text: t + m
            )
