"""`fabric.find_batch_size`: arguments, and steps on the host whose error of memory is raised by hand.

tests/pretend/test_batch_size_device.py has those of a device with a limit.
"""

import gc
import re
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, TensorDataset

from fabric import Fabric
from fabric.batch_size import search
from fabric.batch_size import undo as undo_module
from fabric.batch_size.undo import StepUndo
from fabric.core.errors import (
    ArgumentTypeError,
    ConfigurationError,
    UsageError,
)
from fabric.core.tree import flatten
from fabric.launch import garbage


def on(device, monkeypatch):
    """A Fabric whose device has this type for the check of arguments."""
    fabric = Fabric(accelerator="cpu")
    monkeypatch.setattr(type(fabric.strategy), "root_device", torch.device(device))
    return fabric


def step(batch_size):
    raise AssertionError("no try is expected")


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (
            {"step": 3},
            ArgumentTypeError,
            "got 3 as step. It calls step(batch_size) with several sizes. Write `def ",
        ),
        (
            {"start": 0},
            ConfigurationError,
            "start=0 is no number of rows. Write an int of 1 or more: start=8.",
        ),
        (
            {"start": 2.0},
            ArgumentTypeError,
            "start=2.0 is no number of rows. Write an int of 1 or more: start=8.",
        ),
        (
            {"global_batch": True},
            ArgumentTypeError,
            "global_batch=True is no number of rows. Write an int of",
        ),
        ({"global_batch": -4}, ConfigurationError, "global_batch=-4 is no number of rows. Write an int of 1"),
        (
            {},
            UsageError,
            "found no model that is set up, to restore it. Write model, optimizer = fabric.setup(",
        ),
    ],
)
def test_bad_arguments(monkeypatch, given, kind, text):
    fabric = on("meta", monkeypatch)
    with pytest.raises(kind, match=re.escape(text)):
        fabric.find_batch_size(**{"step": step, "global_batch": 8, **given})


def test_the_host_has_no_limit():
    text = (
        "The host's memory has no limit that ends in an error: the kernel ends the process. Write Fabric(acc"
    )
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        Fabric(accelerator="cpu").find_batch_size(step, global_batch=8)


def test_launch_is_required():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    with pytest.raises(UsageError, match=r"find_batch_size\(\) was used before fabric.launch\(\)"):
        fabric.find_batch_size(step, global_batch=8)


def test_gradients_are_in_the_way(monkeypatch):
    fabric = on("cpu", monkeypatch)
    model = fabric.setup(nn.Linear(2, 2))
    fabric.backward(model(torch.ones(1, 2)).sum())
    monkeypatch.setattr(type(fabric.strategy), "root_device", torch.device("meta"))
    text = "found gradients, which the tries would change. Write optimizer.zero_grad() before it."
    with pytest.raises(UsageError, match=re.escape(text)):
        fabric.find_batch_size(step, global_batch=8)


# tries on the host, where the step itself raises the error of memory


class Net(nn.Module):
    """Has buffers, random numbers, a counter that is no tensor, and a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        # No bias: its gradient would be rounding, by which Adam would move it.
        self.layers = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)
        )
        self.calls, self.seen = 0, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.seen += x.sum()
        return self.layers(x)


class Full(torch.autograd.Function):
    """Identity whose backward is out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("sim:0: out of memory. Tried to allocate 3 GB.")


class Run:
    """Two steps of training, then what `meanwhile` does, then three steps more."""

    def __init__(self, strategy, precision, meanwhile):
        world = dist.get_world_size()
        self.fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=precision)
        self.fabric.launch()
        torch.manual_seed(3)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        rows = torch.randn(24 * world, 4)
        loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
        self.loader = self.fabric.setup_dataloaders(loader)
        self.found = []
        for at in range(5):
            if at == 2:
                meanwhile(self)
            self.step(4)
        state = self.fabric.strategy.get_module_state_dict(self.model)
        self.found += [
            state,
            self.model.calls,
            self.model.seen,
            torch.rand(3),
            self.optimizer.param_groups[0]["lr"],
        ]
        self.position = self.loader.state_dict()
        self.fabric.strategy.teardown()

    def step(self, batch_size, full=""):
        (rows,) = next(iter(self.loader))
        if full == "forward":
            raise torch.OutOfMemoryError("sim:0: out of memory. Tried to allocate 3 GB.")
        out = self.model(rows[:batch_size])
        out = Full.apply(out) if full == "backward" else out
        loss = out.pow(2).mean()
        self.fabric.backward(loss)
        self.found.append(self.fabric.all_reduce(loss.detach()).item())
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
        if full == "step":
            raise RuntimeError("CUDA error: out of memory") from None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def tries(run):
    last = dist.get_world_size() - 1
    undo, kept = StepUndo(run.fabric.strategy), run.found
    texts = []
    for full in ("", "forward", "backward", "step", ""):

        def step(size, full=full):
            run.step(size, full if run.fabric.global_rank == last else "")

        run.found = []
        texts.append(search._out_of_memory(run.fabric.strategy, step, 3, undo))
        assert [p.grad for p in run.model.parameters() if p.grad is not None] == []
    run.found = kept
    memory = f"rank {last}: sim:0: out of memory"
    assert texts == ["", memory, memory, f"rank {last}: CUDA error: out of memory", ""]


def compared(strategy, precision):
    plain, tried = Run(strategy, precision, lambda run: None), Run(strategy, precision, tries)
    # DDP orders its buckets anew after the first backward: three ranks add up in another order.
    rtol = 1e-5 if dist.get_world_size() > 2 else 0
    torch.testing.assert_close(tried.found, plain.found, rtol=rtol, atol=rtol / 10)
    assert tried.position == plain.position


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_tries_are_undone_and_no_rank_waits(ranks, strategy, world):
    ranks.run(compared, strategy, "32-true", world_size=world)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_loss_scale_is_as_before(ranks, strategy):
    ranks.run(compared, strategy, "16-mixed", world_size=2)


def failing(kind):
    strategy = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    strategy.launch()
    fabric, model = strategy, strategy.setup(nn.Linear(2, 1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=2))
    begun = iter(loader)
    next(begun)

    def step(size):
        if kind == "position":
            next(begun)
        if kind == "step" and fabric.global_rank:
            raise KeyError("labels")
        if kind == "verb" and fabric.global_rank:
            fabric.barrier()
        fabric.backward(model(torch.ones(size, 2)).sum())
        fabric.all_reduce(torch.ones(1))

    try:
        search._out_of_memory(fabric.strategy, step, 2, StepUndo(fabric.strategy))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        begun.close()  # in other tests of this rank an epoch is the outermost iteration again
        fabric.strategy.teardown()


def test_other_errors_end_the_search_on_all_ranks(ranks):
    for world in (2, 3):
        first, *others = ranks.run(failing, "step", world_size=world)
        assert first == "RankError: The step failed with a batch size of 2 on rank 1: KeyError: 'labels'"
        assert others == ["KeyError: 'labels'"] * (world - 1)
        for text in ranks.run(failing, "verb", world_size=world):
            assert text.startswith("CollectiveMismatch: ")
        for text in ranks.run(failing, "position", world_size=world):
            assert (
                "took a batch of an iteration that had begun before. Its position cannot be restored. Write"
                in text
            )


def beside_freed_memory():
    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    other = nn.Linear(2, 1)
    other.cache = torch.ones(1000)
    other.cache.untyped_storage().resize_(0)  # a copy of it would end the process
    with StepUndo(fabric.strategy):
        pass
    return other.cache.shape


def test_tensors_whose_memory_was_freed_are_left_alone(ranks):
    assert ranks.run(beside_freed_memory, world_size=1) == [torch.Size([1000])]


class Listing(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.losses = []


def interrupted_step(frozen):
    """Step as loops do that change rates and flags before the forward, where memory ends."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model, temperature = Listing(), nn.Parameter(torch.ones(()))
    first, second = model.parameters()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD([*model.parameters(), temperature], lr=0.5))
    loader = fabric.setup_dataloaders(
        DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=2, shuffle=True)
    )
    begun = iter(loader)
    next(begun)

    def step():
        optimizer.param_groups[0]["lr"] *= 0.5
        loss = (model(next(iter(loader))[0]) * temperature).sum()
        model.losses.append(loss.detach())
        fabric.backward(loss)
        first.requires_grad_(False)
        second.data.add_(1)
        raise torch.OutOfMemoryError("out of memory")

    if frozen:
        garbage.after_fork()
    undo, before, value = StepUndo(fabric.strategy), loader.state_dict(), second.item()
    try:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError), undo:
                step()
            flags = [parameter.requires_grad for parameter in (first, second)]
            yield optimizer.param_groups[0]["lr"], flags, temperature.grad, len(model.losses)
        yield second.item() == value, loader.state_dict() == before
    finally:
        gc.unfreeze()
        undo_module._inherited.clear()
        begun.close()
        fabric.strategy.teardown()


def interrupted_steps(frozen):
    return [*interrupted_step(frozen)]


def test_what_steps_change_before_an_error_is_restored(ranks):
    state = (0.5, [True, True], None, 0)
    for frozen in (False, True):
        (found,) = ranks.run(interrupted_steps, frozen, world_size=1)
        assert found == [state, state, (True, True)], f"forked: {frozen}"


class Lookahead(torch.optim.Optimizer):
    """A wrapper of the usual kind: it has its optimizer's groups, and slow weights of its own."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0
        self.slow = [p.detach().clone() for p in inner.param_groups[0]["params"]]

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(p.detach(), 0.5)
        return loss


class Broken(torch.optim.Optimizer):
    """An optimizer whose constructor has failed."""

    def __init__(self):
        pass


def undone_wrapper():
    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    model, broken = nn.Linear(2, 1), Broken()
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.1))
    before = [slow.clone() for slow in optimizer.slow]
    undo = StepUndo(fabric.strategy)
    try:
        with undo:
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
        equal = [torch.equal(*pair) for pair in zip(before, optimizer.slow, strict=True)]
        return optimizer.count, equal, len(optimizer.state), vars(broken)
    finally:
        fabric.strategy.teardown()


def test_an_optimizer_around_another_is_restored(ranks):
    assert ranks.run(undone_wrapper, world_size=1) == [(0, [True, True], 0, {})]


class Cycle:
    def __init__(self):
        self.itself = self


def collected_later():
    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    frozen = Cycle()
    garbage.after_fork()  # as in a forked rank
    own = Cycle()
    kept, dropped = weakref.ref(frozen), weakref.ref(own)
    try:
        StepUndo(fabric.strategy)
        del frozen, own
        gc.collect()
        return kept() is not None, dropped() is None
    finally:
        undo_module._inherited.clear()
        gc.collect()
        fabric.strategy.teardown()


def test_inherited_objects_stay_and_others_are_collected(ranks):
    assert ranks.run(collected_later, world_size=1) == [(True, True)]


OWN_FREEZE = """
import gc, weakref
from torch import nn
from fabric import Fabric
from fabric.batch_size.undo import StepUndo

fabric = Fabric(accelerator="cpu", devices=1)
model = nn.Linear(2, 2)
found = weakref.ref(model.weight)
gc.freeze()
StepUndo(fabric.strategy)
del model
assert found() is None
"""


def test_what_the_user_froze_is_freed_later():
    subprocess.run([sys.executable, "-c", OWN_FREEZE], check=True, timeout=120)


class Late(torch.optim.Optimizer):
    """An optimizer whose groups are there later."""

    def __init__(self):
        pass

    param_groups = property(lambda self: self.__dict__["inner"].param_groups)


def unusual_objects():
    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    late, lazy = Late(), nn.LazyLinear(3)
    try:
        with StepUndo(fabric.strategy):
            pass
        return vars(late), is_lazy(lazy.weight)
    finally:
        fabric.strategy.teardown()


def test_objects_that_are_not_ready_are_left_alone(ranks):
    assert ranks.run(unusual_objects, world_size=1) == [({}, True)]


class Numbered(TensorDataset):
    """A dataset whose epoch changes its values."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return 100 * self.epoch + index


def loader_of(fabric, kind):
    """A loader whose first epoch depends on what trials leave; None: the loop makes a loader in each step."""
    data, own = (TensorDataset if kind == "new loaders" else Numbered)(torch.arange(8)), {}
    if kind == "sampler":
        own = {"sampler": torch.utils.data.DistributedSampler(range(8), 1, 0)}
    if kind == "workers":
        own = {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
        own |= {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}

    def make(**more):
        return fabric.setup_dataloaders(
            DataLoader(data, batch_size=2, **own, **more), use_distributed_sampler=kind != "sampler"
        )

    return (lambda: make(shuffle=True)) if kind == "new loaders" else (lambda loader: lambda: loader)(make())


def epochs_after(kind, num_trials):
    fabric = Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    fabric.setup_module(nn.Linear(1, 1))
    loader = loader_of(fabric, kind)
    undo = StepUndo(fabric.strategy)
    try:
        for _ in range(num_trials):
            with undo:
                for _ in range(2):
                    next(iter(loader()))
        return [torch.cat(flatten([*loader()])[0]).tolist() for _ in range(2)]
    finally:
        fabric.strategy.teardown()


@pytest.mark.parametrize("kind", ["dataset", "sampler", "workers", "new loaders"])
def test_epochs_are_those_without_trials(ranks, kind):
    (plain,), (tried,) = [ranks.run(epochs_after, kind, num, world_size=1) for num in (0, 2)]
    assert tried == plain
    assert plain[0] != plain[1]
