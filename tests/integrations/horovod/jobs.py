"""What ranks under horovodrun or mpirun do: `jobs.py NAME,NAME FOLDER`, one after the other.

Rank zero writes FOLDER/NAME.json.
"""

import copy
import gc
import json
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn

from fabric import Fabric
from fabric.core.errors import ReplicasDivergedError
from fabric.integrations.horovod import HorovodStrategy, scale_learning_rate
from fabric.strategies import DDPStrategy
from fabric.testing import contract
from fabric.testing.promises import PROMISES
from fabric.wrappers import unwrap

STEPS = 20


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def batch(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def launched(**settings):
    fabric = Fabric(accelerator="cpu", devices=2, strategy=HorovodStrategy(**settings))
    fabric.launch()
    return fabric


def loss_of(model, x):
    return (model(x) - x[:, :2]).pow(2).mean()


def ready(fabric, kind=torch.optim.Adam):
    model = net()
    if fabric.global_rank:
        with torch.no_grad():
            [p.add_(1) for p in model.parameters()]  # rank zero's count
    return fabric.setup(model, kind(model.parameters(), lr=0.02))


def train(fabric, model, optimizer, steps=STEPS, clip=None, parts=1, closure=False):
    for step in range(steps):
        optimizer.zero_grad()
        if closure:

            def evaluate(x=batch(step, fabric.global_rank)):  # noqa: B008
                loss = loss_of(model, x)
                fabric.backward(loss)
                return loss

            assert optimizer.step(evaluate) > 0
            continue
        for part in range(parts):
            x = batch(step * parts + part, fabric.global_rank)
            with fabric.no_backward_sync(model, enabled=part < parts - 1):
                fabric.backward(loss_of(model, x) / parts)
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()


def plain(steps=STEPS, clip=None, parts=1, kind=torch.optim.Adam, world=2):
    model = net()
    optimizer = kind(model.parameters(), lr=0.02)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            x = torch.cat([batch(step * parts + part, rank) for rank in range(world)])
            (loss_of(model, x) / parts).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def furthest(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((p.detach() - q.detach()).abs().max().item() for p, q in pairs)


def equal(folder):
    fabric, told = launched(), {}
    for name, settings in {"steps": {}, "clipped": {"clip": 0.1}, "accumulated": {"parts": 3}}.items():
        model, optimizer = ready(fabric)
        train(fabric, model, optimizer, **settings)
        told[name] = furthest(model, plain(**settings))
    model, optimizer = ready(fabric, torch.optim.SGD)
    train(fabric, model, optimizer)
    told["sgd"] = furthest(model, plain(kind=torch.optim.SGD))
    told["kind"] = isinstance(optimizer, torch.optim.SGD)
    by_closure, stepped = ready(fabric, torch.optim.SGD)
    train(fabric, by_closure, stepped, closure=True)
    told["closure"] = furthest(by_closure, plain(kind=torch.optim.SGD))
    fabric.save(folder / "c.pt", {"model": model, "optimizer": optimizer})
    other, again = ready(fabric, torch.optim.SGD)
    fabric.load(folder / "c.pt", {"model": other, "optimizer": again})
    told["loaded"] = furthest(model, other)
    with fabric.whole(model) as alone:
        told["whole"] = 0.0 if alone is None else furthest(alone, model)
    rates = scale_learning_rate(again, fabric.world_size, warmup_steps=4)
    told["rates"] = [unwrap(again).param_groups[0]["lr"]]
    for _ in range(5):
        fabric.backward(loss_of(other, batch(0, 0)))
        again.step()
        again.zero_grad()
        rates.step()
        told["rates"].append(unwrap(again).param_groups[0]["lr"])
    return told


def fp16(folder):
    fabric = launched(compression="fp16")
    model, optimizer = ready(fabric)
    train(fabric, model, optimizer, 5)
    return furthest(model, plain(5))


def collected(folder):
    """Optimizers that are garbage, and collected on rank one only."""
    fabric = launched()
    for _ in range(2):
        model, optimizer = ready(fabric)
        train(fabric, model, optimizer, 1)
        del model, optimizer
    if fabric.global_rank:
        gc.collect()
    model, optimizer = ready(fabric)
    train(fabric, model, optimizer, 5)
    return furthest(model, plain(5))


def mixed(folder):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="horovod", precision="bf16-mixed")
    fabric.launch()
    model, optimizer = ready(fabric)
    train(fabric, model, optimizer, 5)
    return furthest(model, plain(5))


def joins(folder):
    """Rank one has half the batches."""
    fabric = launched()
    model, optimizer = ready(fabric, torch.optim.SGD)
    train(fabric, model, optimizer, 4 if fabric.global_rank else 8)
    last = fabric.strategy.join()
    expected = net()
    sgd = torch.optim.SGD(expected.parameters(), lr=0.02)
    for step in range(8):
        sgd.zero_grad()
        for rank in range(2 if step < 4 else 1):
            (loss_of(expected, batch(step, rank)) / 2).backward()
        sgd.step()
    return {"last": last, "error": furthest(model, expected) if fabric.global_rank == 0 else 0.0}


def promises(folder):
    """What every strategy promises."""
    fabric = launched()
    info = type("Info", (), {"rank": fabric.global_rank, "world_size": fabric.world_size})
    from fabric.testing import promises as module

    module.rank_info = lambda: info
    broken = {}
    for promise in PROMISES:
        place = Path(folder) / promise.__name__
        place.mkdir(exist_ok=True)
        try:
            contract.run_promise(promise.__name__, HorovodStrategy, "cpu", 2, str(place))
        except Exception:
            broken[promise.__name__] = traceback.format_exc()
    return broken


def refused(folder):
    fabric, told = launched(), {}

    def error(name, call):
        try:
            call()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    error("bf16", lambda: Fabric(accelerator="cpu", devices=2, strategy="horovod", precision="bf16-true"))
    error("devices", lambda: Fabric(accelerator="cpu", devices=3, strategy="horovod"))
    model = fabric.setup_module(nn.BatchNorm1d(2))
    error("buffers", fabric.strategy.join)
    del model
    model, _ = ready(fabric)
    error("no batch", fabric.strategy.join)
    model.module[0].weight.requires_grad_(False)
    error("frozen", lambda: fabric.backward(loss_of(model, batch(0, 0))))
    module = net()
    module[0].requires_grad_(False)
    model = fabric.setup_module(module)
    module[0].requires_grad_(True)
    error("thawed", lambda: fabric.backward(loss_of(model, batch(0, 0))))
    sparse = fabric.setup_module(nn.Embedding(4, 2, sparse=True))
    error("sparse", lambda: fabric.backward(sparse(torch.ones(1, dtype=torch.long)).sum()))
    return told


class Experts(nn.Module):
    """Of two layers of one shape a forward uses one, and normalises."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two, self.norm = nn.Linear(6, 2), nn.Linear(6, 2), nn.BatchNorm1d(2)

    def forward(self, x, second):
        return self.norm(self.two(x) if second else self.one(x))


def by_closure(fabric):
    model, optimizer = ready(fabric, torch.optim.LBFGS)
    for step in range(2):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, fabric.global_rank))
            fabric.backward(loss)
            return loss

        optimizer.step(closure)
    return model


def by_hand(fabric):
    """torch's own clipping, the user's own optimizer, a plain backward, two of them for one step."""
    module = net()
    mine = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = fabric.setup_module(module)
    for step in range(4):
        loss_of(model, batch(step, fabric.global_rank)).backward()
        fabric.backward(loss_of(model, batch(step + 9, fabric.global_rank)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        mine.step()
        model.zero_grad()
    return model


def copied(fabric):
    """A model that is averaged goes on as a copy, a group is added, and both take part in one backward."""
    module = net()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module[0].parameters(), lr=0.1))
    train(fabric, model, optimizer, 1)
    other = copy.deepcopy(model)
    optimizer.add_param_group({"params": list(module[2].parameters())})
    another = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        x = batch(step, fabric.global_rank)
        fabric.backward(loss_of(model, x) + loss_of(other, x))
        optimizer.step()
        another.step()
        optimizer.zero_grad()
        another.zero_grad()
    return nn.ModuleList([unwrap(model), unwrap(other)])


def experts(fabric):
    """Each rank uses another expert, a third is frozen, and buffers are rank zero's."""
    model = Experts()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(4):
        optimizer.zero_grad()
        fabric.backward(model(batch(step, fabric.global_rank), (step + fabric.global_rank) % 2).pow(3).mean())
        optimizer.step()
    return model


def state_of_rank_zero(fabric):
    """Rank zero's optimizer has a history."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if fabric.global_rank == 0:
        loss_of(model, batch(7, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = fabric.setup(model, optimizer)
    train(fabric, model, optimizer, 2)
    return model


def loops(folder):
    """Each on Horovod and on ddp, which are one: the furthest apart on any rank, and the ranks."""
    from horovod.torch import allgather_object

    told = {}
    for loop in (by_closure, by_hand, copied, experts, state_of_rank_zero):
        find = {"find_unused_parameters": loop is experts}
        models = []
        for strategy in (HorovodStrategy(**find), DDPStrategy(**find)):
            fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch()
            try:
                model = loop(fabric)
            except ReplicasDivergedError as error:  # under ddp ranks keep their own states
                told[f"{loop.__name__} under {type(strategy).__name__}"] = str(error)
                continue
            models.append({name: v.clone() for name, v in model.state_dict().items()})
        apart = [(models[0][name].float() - v).abs().max().item() for name, v in models[-1].items()]
        mine = [v.double().sum().item() for v in models[0].values()]
        ranks = allgather_object((apart, mine))
        told[loop.__name__] = max(max(apart) for apart, _ in ranks)
        told[f"ranks of {loop.__name__}"] = max(
            abs(a - b) for a, b in zip(ranks[0][1], ranks[1][1], strict=True)
        )
    return told


def uneven(folder, waits=1):
    """Rank one has fewer batches, and says nothing of it: it ends while rank zero waits for it."""
    fabric = launched()
    model, optimizer = ready(fabric)
    train(fabric, model, optimizer, 2)
    if fabric.global_rank == waits:
        time.sleep(10)  # Horovod stops within a second of the other's end, or this one sends in one
    if fabric.global_rank == 0:
        train(fabric, model, optimizer, 1)


def sends_late(folder):
    """As `uneven`, but rank one has ended before rank zero sends."""
    uneven(folder, waits=0)


def joins_alone(folder):
    """Rank one has as many batches, but does not join."""
    fabric = launched()
    model, optimizer = ready(fabric)
    train(fabric, model, optimizer, 2)
    if fabric.global_rank == 0:
        fabric.strategy.join()


def ddp(folder):
    """Another strategy on the same ranks."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = ready(fabric)
    train(fabric, model, optimizer, 5)
    return [fabric.world_size, furthest(model, plain(5))]


def dies(folder):
    fabric = launched()
    if fabric.global_rank == 1:
        raise SystemExit(3)
    fabric.barrier()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    for name in sys.argv[1].split(","):
        told = globals()[name](folder)
        import horovod.torch as hvd

        told = hvd.allgather_object(told) if name == "promises" else told
        if hvd.rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(told))
