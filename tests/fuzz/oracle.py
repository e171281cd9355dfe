"""What fuzzed programs are written in, and `Plain`: fabric's verbs in plain torch, in one process.

A program is `def program(fabric, note, folder)`. On ranks `fabric` is a real Fabric; in the oracle, which
has the joined batch, it is a Plain. A failing program stands alone, with this text in it: so nothing here
imports from its neighbours.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fabric.core.backward_listeners import add_backward_listener, add_step_listener

ROWS = 12  # of every joined batch: divides by 1, 2, 3 and 4 ranks


class Invalid(Exception):
    """The program reads what is a rank's own (a gradient before its sync): nobody owes it an answer."""


class OnPurpose(Exception):
    """What programs raise and catch."""


class Ranked(list):
    """One value for each rank."""


@dataclass
class Note:
    """One observation. `kind`: ranks have the "same" as the joined batch, its "mean", or "seen" parts."""

    kind: str
    name: str
    value: Any
    rank: int | None = None


class Notes:
    """What a program saw, in order. `rank` is None in the oracle, which stands for all of them."""

    def __init__(self, rank: int | None = None, plain: Plain | None = None) -> None:
        self.rank, self.plain, self.kept = rank, plain, []
        self.part = 0
        self.fabric: Any = plain

    def same(self, name: str, value: Any) -> None:
        """Alike on all ranks and in one process."""
        self.kept.append(Note("same", name, frozen(value)))

    def mean(self, name: str, value: Any) -> None:
        """A mean over the batch: the mean over ranks is that of the joined batch."""
        self.kept.append(Note("mean", name, frozen(value)))

    def seen(self, name: str, value: torch.Tensor) -> None:
        """Samples: those of all ranks together are the joined ones, in any order."""
        self.kept.append(Note("seen", name, (self.part, value.tolist())))

    def every(self, name: str, value: list[int], count: int) -> None:
        """All ranks together saw all numbers below `count`, each once."""
        if self.rank is None and not value:
            raise Invalid("nobody looked")
        self.kept.append(Note("seen", name, (self.part, list(range(count)) if self.rank is None else value)))

    def own(self, rank: int, name: str, value: Any) -> None:
        """What only this rank has."""
        self.kept.append(Note("same", name, frozen(value), rank))

    def each(self, name: str, value: Any) -> None:
        """One value for each rank: in the oracle a Ranked."""
        for rank, part in enumerate(value) if self.rank is None else [(self.rank, value)]:
            self.own(rank, name, part)

    def grads(self, name: str, model: nn.Module) -> None:
        """The whole gradients, after their synchronisation. All ranks."""
        if self.plain is not None:
            self.plain.check_synced(model)
        self.fabric.barrier()  # full_tensor() is torch's own collective: ranks that evaluate more come first
        self.same(name, [whole(p.grad) for p in model.parameters()])

    def promised(self, name: str, kept: bool) -> None:
        """True, whatever the oracle makes of it."""
        self.same(name, True if self.rank is None else kept)

    def optimizer(self, name: str, optimizer: Any) -> None:
        """The state dict, but for what it says of how (foreach, fused) the step is computed."""
        state = optimizer.state_dict()
        groups = [
            {k: v for k, v in group.items() if k not in ("foreach", "fused")}
            for group in state["param_groups"]
        ]
        self.same(name, {"state": state["state"], "groups": groups})


def frozen(value: Any) -> Any:
    """A copy of a tree, of plain tensors."""
    if isinstance(value, torch.Tensor):
        value = whole(value).detach().clone()
        return value.to_dense() if value.is_sparse else value
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return value


def whole(value: Any) -> Any:
    """Of a split tensor the whole one. All ranks."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# data


def floats(seed: int) -> torch.Tensor:
    """A joined batch (12, 4)."""
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(seed))


def words(seed: int) -> torch.Tensor:
    """A joined batch (12, 3) of numbers below 10."""
    return torch.randint(0, 10, (ROWS, 3), generator=torch.Generator().manual_seed(seed))


def share(fabric: Any, rows: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a joined batch; ranks that share data (a pipeline's) get the same."""
    rank, count = place(fabric)
    return rows.chunk(count)[rank]


def uneven(fabric: Any, rows: torch.Tensor) -> torch.Tensor:
    """As `share`, but the first has most."""
    rank, count = place(fabric)
    sizes = [len(rows) - count + 1] + [1] * (count - 1)
    return rows.split(sizes)[rank]


def place(fabric: Any) -> tuple[int, int]:
    """Which part of the data is this rank's, of how many; in the oracle there is one."""
    part = None if isinstance(fabric, Plain) else fabric.strategy.distributed_sampler_kwargs
    return (part["rank"], part["num_replicas"]) if part else (0, 1)


def parts(fabric: Any) -> int:
    """Of how many parts the joined batch is."""
    return place(fabric)[1]


def ranks(fabric: Any) -> list[int]:
    """The ranks that this process stands for."""
    return list(range(fabric.world_size)) if isinstance(fabric, Plain) else [fabric.strategy.topology.rank]


def ranked(fabric: Any, make: Any) -> Any:
    """make(rank) of this rank; in the oracle of each."""
    values = [make(rank) for rank in ranks(fabric)]
    return Ranked(values) if isinstance(fabric, Plain) else values[0]


def score(tree: Any) -> torch.Tensor:
    """The mean square of all that a model returns, a mean over rows."""
    return sum(tensor.square().mean() for tensor in tensors(tree))


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nest of dicts, lists, tuples and dataclasses that have gradients."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.is_floating_point() else []
    if is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in tensors(item)]


def scale_by_hand(model: nn.Module, factor: float) -> None:
    """Gradients times a number, local ones too: sums and means do not mind."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)


def clip_by_hand(fabric: Any, model: nn.Module, limit: float) -> None:
    """torch's clip of synchronised gradients."""
    if isinstance(fabric, Plain):
        fabric.check_synced(model)
    fabric.barrier()  # torch's norm of split gradients is a collective that Fabric does not see
    nn.utils.clip_grad_norm_(model.parameters(), limit)


def grads_by_hand(fabric: Any, model: nn.Module, loss: torch.Tensor, averaged: bool) -> None:
    """Gradients without a backward that Fabric sees; the loop averages them itself, or forgets to."""
    held = [p for p in model.parameters() if p.requires_grad]
    for p, grad in zip(held, torch.autograd.grad(loss, held, allow_unused=True), strict=True):
        p.grad = fabric.all_reduce(grad) if averaged and grad is not None else grad
    if isinstance(fabric, Plain):
        fabric.local |= dict.fromkeys(held, not averaged)


def slopes(call: Any, x: torch.Tensor) -> torch.Tensor:
    """A penalty on what outputs gain per input, row by row."""
    x = x.clone().requires_grad_()
    out = sum(tensor.sum() for tensor in tensors(call(x)))
    return torch.autograd.grad(out, x, create_graph=True)[0].square().mean()


def own_ddp(fabric: Any, model: nn.Module) -> nn.Module:
    """A forgotten DDP of the loop that this one was made from."""
    if isinstance(fabric, Plain) or fabric.world_size == 1:
        return model
    return nn.parallel.DistributedDataParallel(model)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Any:
    """In evaluation, and back."""
    model.eval()
    yield
    model.train()


def compiled(fabric: Any, model: nn.Module) -> nn.Module:
    """A compiled model computes the same."""
    return model if isinstance(fabric, Plain) else torch.compile(model, backend="eager")


# the oracle


class Plain:
    """The verbs of a Fabric on `world_size` ranks, in one process without any."""

    is_global_zero, global_rank, local_rank, device = True, 0, 0, torch.device("cpu")

    def __init__(
        self,
        world_size: int,
        precision: str | None = None,
        replicas: int | None = None,
        rounding: float = 0.0,
    ) -> None:
        self.world_size, self.precision = world_size, precision
        self.rounding, self.dice = rounding, torch.Generator().manual_seed(1)
        self.replicas = world_size if replicas is None else replicas
        self.unsynced: list[nn.Module] = []
        self.local: dict[torch.nn.Parameter, bool] = {}
        self.halves: dict[torch.nn.Parameter, Any] = {}
        self.owners: dict[torch.nn.Parameter, list[nn.Module]] = {}
        self.owed: list[str] = []
        self.alone: Any = None

    def setup(self, module: Any, *optimizers: Any, scheduler: Any = None, **_: Any) -> Any:
        module = self.setup_module(module)
        self.setup_optimizers(*optimizers)
        given = [module, *optimizers, *([] if scheduler is None else [scheduler])]
        return module if len(given) == 1 else tuple(given)

    def setup_module(self, module: Any, **_: Any) -> Any:
        if self.precision == "bf16-mixed":
            for method in {"forward", "loss", "mixed", "encode"} & set(dir(module)):
                module.__dict__[method] = functools.partial(in_autocast, getattr(module, method))
        module.__dict__["module"] = module
        for p in module.parameters():
            if p in self.owners:  # models may share modules
                self.owners[p].append(module)
                continue
            self.owners[p] = [module]
            self._round(p)
            trained = p.requires_grad
            p.requires_grad_(True).register_post_accumulate_grad_hook(self._heard)
            p.requires_grad_(trained)
        return module

    def _heard(self, p: torch.nn.Parameter) -> None:
        self.local[p] = any(owner is other for owner in self.owners[p] for other in self.unsynced)
        self._round(p.grad)

    def _round(self, tensor: Any) -> None:
        if self.rounding and tensor.layout is torch.strided:
            with torch.no_grad():
                tensor.mul_(
                    1 + self.rounding * torch.randn(tensor.shape, generator=self.dice, dtype=tensor.dtype)
                )

    def setup_optimizers(self, *optimizers: Any) -> Any:
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def stepping(self, optimizer: Any, *_: Any) -> None:
        """Before each step of any optimizer."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._check_made(held)
        if any(self._is_local(p) for p in held):
            self.owed.append("a step with gradients that were never synchronised")

    def _check_made(self, held: Any) -> None:
        if any(p.grad is not None and p.grad is self.halves.get(p) and p.grad.any() for p in held):
            raise Invalid("gradients of a backward that failed are used")

    def _is_local(self, p: torch.nn.Parameter) -> bool:
        return self.world_size > 1 and self.local.get(p, False) and p.grad is not None and bool(p.grad.any())

    def check_synced(self, model: nn.Module) -> None:
        """Invalid where a rank would read its own part."""
        self._check_made(model.parameters())
        if any(self._is_local(p) for p in model.parameters()):
            raise Invalid("gradients are read before their synchronisation")

    @contextlib.contextmanager
    def no_backward_sync(self, module: Any, enabled: bool = True) -> Any:
        before = list(self.unsynced)
        if enabled:
            self.unsynced.append(module)
        try:
            yield
        finally:
            self.unsynced[:] = before

    def check_replicas(self, *_: Any) -> None:
        """One process has no replicas."""

    def setup_dataloaders(self, *loaders: Any, uneven: str | None = None, **_: Any) -> Any:
        """As one rank has them: what a shuffle's order is only Fabric knows; it promises the same for all."""
        from fabric import Fabric

        if self.alone is None:
            self.alone = Fabric(accelerator="cpu", devices=1, strategy="single_device")
        return self.alone.setup_dataloaders(*loaders, uneven=uneven)

    def backward(self, loss: torch.Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        try:
            loss.backward(*args, **kwargs)
        except OnPurpose:  # half of the gradients are there: users clear them, and go on
            self.halves.update({p: p.grad for p in self.local if p.grad is not None})
            raise

    def clip_gradients(self, module: Any, optimizer: Any, clip_val: Any = None, max_norm: Any = None) -> Any:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._check_made(held)
        if any(self._is_local(p) for p in held):
            self.owed.append("a clip of gradients that were never synchronised")
        if clip_val is not None:
            return nn.utils.clip_grad_value_(held, clip_val)
        return nn.utils.clip_grad_norm_(held, max_norm)

    def normalize_gradients(self, module: Any, num_items: Any, *, optimizer: Any = None) -> Any:
        held = module.parameters()
        if optimizer is not None:
            held = [p for group in optimizer.param_groups for p in group["params"]]
        for p in held:
            if p.grad is not None and num_items:
                p.grad /= num_items
        return num_items

    def seed_everything(self, seed: int, **_: Any) -> int:
        self.alone = None
        os.environ["FABRIC_GLOBAL_SEED"] = str(seed)
        torch.manual_seed(seed)
        return seed

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16-mixed")

    def init_module(self, empty_init: Any = None) -> Any:
        return contextlib.nullcontext()

    def load_raw(self, path: Any, obj: Any) -> None:
        obj.load_state_dict(torch.load(path, weights_only=True))

    def save(self, path: Any, state: dict, **_: Any) -> None:
        torch.save({k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}, path)

    def load(self, path: Any, state: dict | None = None, strict: bool = True, **_: Any) -> dict:
        held = torch.load(path, weights_only=True)
        for key in state or {}:
            value = held.pop(key)
            if hasattr(state[key], "load_state_dict"):
                state[key].load_state_dict(value)
            elif isinstance(state[key], nn.Parameter):
                state[key].data.copy_(value)
            else:
                state[key] = value
        return held

    def save_latest(self, directory: Any, state: dict, step: int, **_: Any) -> None:
        self.save(directory / f"step-{step}.pt", state)

    def load_latest(self, directory: Any, state: dict, strict: bool = True) -> int:
        path = max(directory.glob("step-*.pt"))
        self.load(path, state)
        return int(path.stem.removeprefix("step-"))

    def rng_state(self) -> Any:
        from fabric.utilities.seed import RngState

        return RngState(0, None)

    @contextlib.contextmanager
    def whole(self, model: Any) -> Any:
        modes = [(module, module.training) for module in model.modules()]
        mixed = {
            name: call for name, call in vars(model).items() if getattr(call, "func", None) is in_autocast
        }
        for name in mixed:  # what one rank does alone runs without autocast
            del model.__dict__[name]
        yield model
        model.__dict__.update(mixed)
        for module, training in modes:
            module.training = training

    # verbs on what each rank has

    def all_reduce(self, value: Any, reduce_op: str = "mean", **_: Any) -> Any:
        if not isinstance(value, Ranked):
            return value  # a mean over the batch: the joined one
        return fold(value, functools.partial(reduced, how=reduce_op))

    def all_gather(self, value: Any, uneven: str | None = None, **_: Any) -> Any:
        if not isinstance(value, Ranked):
            return value  # rows of a joined batch, put together by uneven="cat"
        return fold(value, (torch.cat) if uneven == "cat" else torch.stack)

    def gather(self, value: Ranked, dst: int = 0) -> Ranked:
        return Ranked(self.all_gather(value) if rank == dst else None for rank in range(self.world_size))

    def scatter(self, value: Ranked, src: int = 0) -> Ranked:
        return Ranked(value[src].chunk(self.world_size))

    def reduce_scatter(self, value: Ranked, reduce_op: str = "mean") -> Ranked:
        return Ranked(reduced(list(value), reduce_op).chunk(self.world_size))

    def all_to_all(self, value: Ranked) -> Ranked:
        parts = [tensor.chunk(self.world_size) for tensor in value]
        return Ranked(torch.cat([part[rank] for part in parts]) for rank in range(self.world_size))

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value[src] if isinstance(value, Ranked) else value

    def all_gather_object(self, value: Ranked) -> list:
        return list(value)

    def any(self, value: Any) -> bool:
        return any(value) if isinstance(value, Ranked) else bool(value)

    def all(self, value: Any) -> bool:
        return all(value) if isinstance(value, Ranked) else bool(value)

    def agree(self, value: Any) -> Any:
        return value

    def compute_metrics(self, metric: Any) -> Any:
        return metric.compute()

    def barrier(self, name: str | None = None) -> None:
        pass

    def print(self, *_: Any) -> None:
        pass

    def log_dict(self, values: Any, *_: Any, **__: Any) -> None:
        pass


def explodes(notes: list[Note], precision: str | None) -> bool:
    """Whether numbers got so large that rounding is all that is left of them."""
    limit = {"bf16-mixed": 1e2, "32-true": 1e5}.get(precision or "", 1e8)
    found = [tensor for note in notes for tensor in tensors(note.value) if tensor.numel()]
    return any([tensor.abs().nan_to_num(0.0, 0.0).max() > limit for tensor in found])


def rounding_decides(
    want: list[Note], program: Any, folder: Path, world: int, precision: str | None, replicas: int | None
) -> bool:
    """Whether one process differs from itself, too, if weights and gradients are rounded otherwise."""
    try:
        other, _ = run_plain(program, folder, world, precision, replicas, ROUNDING[precision])
    except Exception:  # a weight that changed is compared by the program itself
        return False
    pairs = zip(want, other, strict=True)
    return any([unlike(b.value, a.value, a.name, precision) for a, b in pairs])


def in_autocast(method: Any, *args: Any, **kwargs: Any) -> Any:
    """A call as a mixed precision computes it; outputs in the default dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        return upcast(method(*args, **kwargs))


def upcast(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(torch.get_default_dtype()) if tree.is_floating_point() else tree
    if is_dataclass(tree):
        return type(tree)(*(upcast(getattr(tree, field.name)) for field in fields(tree)))
    if isinstance(tree, dict):
        return {key: upcast(item) for key, item in tree.items()}
    return type(tree)(upcast(item) for item in tree) if isinstance(tree, list | tuple) else tree


def fold(trees: list, join: Any) -> Any:
    """One tree of many, leaf by leaf."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: fold([tree[key] for tree in trees], join) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(fold(list(parts), join) for parts in zip(*trees, strict=True))
    return join([torch.as_tensor(tree) for tree in trees])


def reduced(parts: list[torch.Tensor], how: str) -> torch.Tensor:
    stacked = torch.stack(parts)
    return {
        "mean": lambda: stacked.sum(0) / len(parts),
        "sum": lambda: stacked.sum(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
    }[how]()


# a run, and the comparison


def run_plain(
    program: Any,
    folder: Path,
    world_size: int,
    precision: str | None = None,
    replicas: int | None = None,
    rounding: float = 0.0,
) -> tuple[list[Note], Plain]:
    """The program in one process, on the joined batch."""
    plain = Plain(world_size, precision, replicas, rounding)
    notes = Notes(plain=plain)
    hook = register_optimizer_step_pre_hook(plain.stepping)
    try:
        with defaults(precision):
            program(plain, notes, folder)
    finally:
        hook.remove()
    return notes.kept, plain


class NeverCompared(Exception):
    """Optimizers stepped after backwards, and ranks compared no values."""


class Passes:
    """The number of outermost backward passes, and the optimizers that stepped with gradients."""

    def __init__(self) -> None:
        self.count = 0
        self.trained: dict[int, Any] = {}
        add_backward_listener(self)
        add_step_listener(self)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            self.trained[id(optimizer)] = optimizer  # alive until the program's end is checked

    def around_pass(self, run: Any, *args: Any, **kwargs: Any) -> None:
        run(*args, **kwargs)
        self.count += 1

    def after_nested_pass(self) -> None:
        """Not counted."""


def check_compared(fabric: Any, passes: Passes) -> None:
    """Drift is found by values that are compared at times: each loop that trains has such times."""
    check = fabric.strategy.find_part("replica check")
    if check is None or not check._compares_facts or check.backwards or passes.count < 2:
        return
    stepped = [t.name for t in check._optimizers.values() if t.steps > 1 and id(t.ref()) in passes.trained]
    if stepped:
        raise NeverCompared(", ".join(stepped))


def run_on_rank(program: Any, make_fabric: Any, folder: Path, precision: str | None = None) -> list[Note]:
    """The program on this rank. Notes are there, up to the error, as `error.notes`."""
    notes = Notes(rank=0)
    with defaults(precision):
        try:
            fabric = make_fabric()
            fabric.launch()
            if getattr(fabric.strategy, "process_group", None) is dist.GroupMember.NON_GROUP_MEMBER:
                return []
            notes.rank, notes.part, notes.fabric = ranks(fabric)[0], place(fabric)[0], fabric
            passes = Passes()
            program(fabric, notes, folder)
            fabric.strategy.finish_save()
            check_compared(fabric, passes)
        except BaseException as error:
            error.notes = notes.kept
            raise
    return notes.kept


@contextlib.contextmanager
def defaults(precision: str | None) -> Any:
    """Double unless a precision is named: differences are crisp then. What is set meanwhile goes."""
    before, environ = torch.get_default_dtype(), dict(os.environ)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if precision in (None, "64-true") else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        for name in os.environ.keys() - environ.keys():  # seed_everything's
            del os.environ[name]


TOLERANCES = {
    None: (1e-7, 1e-10),
    "64-true": (1e-5, 1e-6),
    "32-true": (1e-3, 1e-5),
    "bf16-mixed": (1e-1, 2e-2),  # FSDP computes norms and losses in it, too; what is missing is more
}


ROUNDING = {None: 4e-15, "64-true": 4e-15, "32-true": 1e-6, "bf16-mixed": 8e-3}
"""What ranks may round otherwise than one process: some units of the last place, relative to a number."""


def differences(plain: list[Note], by_rank: list[list[Note]], precision: str | None = None) -> list[str]:
    """One line for each observation that is not that of the joined batch, the first ones first."""
    found = []
    owed = [[n for n in plain if n.rank in (None, rank)] for rank in range(len(by_rank))]
    for rank, (mine, want) in enumerate(zip(by_rank, owed, strict=True)):
        if [n.name for n in mine] != [n.name for n in want]:
            return [f"rank {rank} noted {[n.name for n in mine]}, one process {[n.name for n in want]}"]
    shared = [[n for n in mine if n.rank is None] for mine in by_rank]
    for place, note in enumerate(n for n in plain if n.rank is None):
        values = [mine[place].value for mine in shared]
        if note.kind == "mean":
            found += unlike(sum(values) / len(values), note.value, note.name, precision)
        if note.kind == "seen":
            parts = dict(values)  # ranks that share data count once
            found += unlike(
                sorted(number for part in parts.values() for number in part),
                sorted(note.value[1]),
                note.name,
                precision,
            )
    for rank, (mine, want) in enumerate(zip(by_rank, owed, strict=True)):
        for got, note in zip(mine, want, strict=True):
            if note.kind == "same":
                lines = unlike(got.value, note.value, note.name, precision)
                found += [f"rank {rank}: {line}" for line in lines]
    return found


def unlike(got: Any, want: Any, name: str, precision: str | None) -> list[str]:
    """Where two trees differ."""
    if isinstance(want, dict) and isinstance(got, dict):
        if set(map(str, got)) != set(map(str, want)):  # states come in the order of first steps
            return [f"{name}: keys {list(got)}, not {list(want)}"]
        return [line for key in want for line in unlike(got[key], want[key], f"{name}.{key}", precision)]
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        if len(got) != len(want):
            return [f"{name}: {len(got)} items, not {len(want)}"]
        pairs = enumerate(zip(got, want, strict=True))
        return [line for i, (g, w) in pairs for line in unlike(g, w, f"{name}[{i}]", precision)]
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if got.shape != want.shape:
            return [f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"]
        if got.dtype != want.dtype:
            return [f"{name}: {got.dtype}, not {want.dtype}"]
        rtol, atol = TOLERANCES[precision]
        if precision == "bf16-mixed" and want.numel():  # a sum's noise is that of its largest terms
            atol += rtol * want.abs().max().item()
        wide = torch.complex128 if want.is_complex() else torch.float64
        got, want = got.to(wide), want.to(wide)
        if torch.allclose(got, want, rtol, atol, equal_nan=True):
            return []
        return [f"{name}: {(got - want).abs().max().item():.3g} apart"]
    if isinstance(want, float) and isinstance(got, float):
        return [] if abs(got - want) <= 1e-9 * max(1.0, abs(want)) else [f"{name}: {got}, not {want}"]
    return [] if type(got) is type(want) and got == want else [f"{name}: {got!r}, not {want!r}"]
