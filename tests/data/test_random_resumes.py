"""Random training loops that are saved in the middle, and others that go on from there in other objects.

From the save on everything is the same, to the bit: batches, what is drawn for them and by the loop, dropout,
losses, norms, the schedule, the loss scale, the weights.
"""

from __future__ import annotations

import os
import random
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fabric import Fabric
from fabric.strategies import DDPStrategy, FSDPStrategy, ZeRO1Strategy

EPOCHS = 3
DRAWS = {
    "torch": lambda: torch.rand(()),
    "python": random.random,
    "numpy": lambda: float(numpy.random.rand()),
    "nothing": float,
}
STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": ZeRO1Strategy,
    "zero2": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"),
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
}
OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "adamw": lambda p: AdamW(p, lr=0.01, amsgrad=True),
}


class Rows(Dataset):
    """(number, four features and something drawn)."""

    def __init__(self, count, draw):
        self.count, self.draw = count, draw

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        x = torch.randn(4, generator=torch.Generator().manual_seed(number))
        return number, x + DRAWS[self.draw]()


class Stream(IterableDataset):
    def __init__(self, count, draw):
        self.rows = Rows(count, draw)

    def __iter__(self):
        return map(self.rows.__getitem__, range(len(self.rows)))


def loader_of(drawn):
    keywords = {"num_workers": drawn["workers"]}
    if drawn["workers"]:
        keywords |= {"persistent_workers": drawn["persistent"], "prefetch_factor": drawn["prefetch"]}
        keywords |= {"multiprocessing_context": "fork"}
    count, batch, kind = drawn["count"], drawn["batch"], drawn["kind"]
    rows = Rows(count, drawn["draw"])
    if kind == "batches":
        sampler = BatchSampler(RandomSampler(rows), batch, drawn["drop_last"])
        return DataLoader(rows, batch_sampler=sampler, **keywords)
    keywords |= {"batch_size": batch, "drop_last": drawn["drop_last"]}
    if kind == "stream":
        return DataLoader(Stream(count, drawn["draw"]), **keywords)
    if kind == "given":
        return DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(3), **keywords)
    samplers = {
        "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, count + 1), count),
        "subset": lambda: SubsetRandomSampler(range(0, count, 2)),
    }
    if kind in samplers:
        return DataLoader(rows, sampler=samplers[kind](), **keywords)
    return DataLoader(rows, shuffle=kind == "shuffled", **keywords)


def program(seed):
    rng = random.Random(seed)
    kinds = ["shuffled", "ordered", "given", "weighted", "subset", "batches", "stream"]
    choices = {
        "strategy": [*STRATEGIES],
        "world": [1, 2, 2, 2],
        "precision": [None, None, "16-mixed", "bf16-mixed", "64-true"],
        "optimizer": [*OPTIMIZERS],
        "kind": kinds,
        "draw": [*DRAWS],
        "workers": [0, 0, 1, 2],
        "persistent": [False, True],
        "prefetch": [1, 2, 3],
        "uneven": [None, None, "pad", "exact", "drop"],
        "count": [24, 25, 31, 40],
        "batch": [2, 3, 4],
        "drop_last": [False, False, True],
        "per_rank": [False, True],
        "parts": [1, 1, 2, 3],
        "at": [*range(1, 12)],
        "evaluates": [False, True],
        "format": ["full", "sharded"],
        "wait": [False, True],
    }
    return {name: rng.choice(values) for name, values in choices.items()}


def train(drawn, path, goes_on):
    """What is seen from the save on, and at last the weights; None: there was no save."""
    fabric = Fabric(
        accelerator="cpu",
        devices=drawn["world"],
        strategy=STRATEGIES[drawn["strategy"]](),
        precision=drawn["precision"],
    )
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
    if goes_on:
        nn.init.ones_(net[0].weight)
    optimizer = OPTIMIZERS[drawn["optimizer"]](net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(loader_of(drawn), uneven=drawn["uneven"])
    others = fabric.setup_dataloaders(DataLoader(Rows(10, "nothing"), 2))
    fabric.seed_everything(7, verbose=False, per_rank=drawn["per_rank"])
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader, "step": 0}
    state |= {"rng": fabric.rng_state(), "precision": fabric.strategy.precision, "epoch": 0}
    if goes_on:
        random.random(), numpy.random.rand(), torch.rand(3)
        fabric.load(path, state)
    seen, saved = [], goes_on
    for epoch in range(state["epoch"], EPOCHS):
        state["epoch"] = epoch
        for numbers, x in loader:
            state["step"] = step = state["step"] + 1
            steps = step % drawn["parts"] == 0
            with fabric.no_backward_sync(model, enabled=not steps):
                loss = model(x).square().mean()
                fabric.backward(loss)
            norm = None
            if steps:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            draws = [float(draw()) for draw in DRAWS.values()]
            seen.append(repr([epoch, step, numbers, x, loss, norm, draws, schedule.get_last_lr()]))
            if drawn["evaluates"] and step % 4 == 0:
                model.eval()
                with torch.no_grad():
                    seen.append(repr([model(x) for _, x in others]))
                model.train()
            if not saved and step >= drawn["at"] and steps:
                fabric.save(path, state, format=drawn["format"], wait=drawn["wait"])
                seen, saved = [], True
    fabric.strategy.finish_save()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    return (seen, weights) if saved else None


def both(drawn, folder):
    before = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = train(drawn, folder / "run.pt", False)
            return whole, whole and train(drawn, folder / "run.pt", True)
    finally:
        for name in os.environ.keys() - before.keys():  # seed_everything's
            del os.environ[name]


def check(ranks, seed, folder):
    drawn = program(seed)
    for whole, rest in ranks.run(both, drawn, folder, world_size=drawn["world"]):
        if whole is not None:
            assert rest[0] == whole[0], (seed, drawn)
            torch.testing.assert_close(rest[1], whole[1], rtol=0, atol=0, msg=f"{seed} {drawn}")


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_go_on_as_they_were(ranks, seed, tmp_path):
    check(ranks, seed, tmp_path)


@pytest.mark.slow
def test_many_random_runs_go_on_as_they_were(ranks, tmp_path):
    for seed in range(100, 160):
        (tmp_path / str(seed)).mkdir()
        check(ranks, seed, tmp_path / str(seed))
