"""`ReplicaCheck`: compares what must be equal on all ranks. A strategy of several ranks makes it at launch.

Hyper-parameters and counters are part of the call check of every verb (`facts`). Values are compared by
digests after synchronised backwards 1, 2, 4, ..., 1,024, 2,048, ..., at saves, at ends of epochs, and by
`fabric.check_replicas`. All ranks are in the same call there, so that the comparison cannot deadlock.
"""

from __future__ import annotations

import marshal
import weakref
from collections import defaultdict
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fabric.core.errors import ReplicasDivergedError
from fabric.core.source import user_place
from fabric.core.torch_internals import is_fsdp
from fabric.core.tree import flatten
from fabric.plugins.collectives.objects import gather_objects
from fabric.replicas import report
from fabric.replicas.digest import digest_of
from fabric.replicas.report import Entry
from fabric.replicas.rows import FirstRows, warn_of_unequal
from fabric.replicas.values import first_difference
from fabric.utilities.passes import parameters_of
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.plugins.collectives.channel import Channel

LONGEST_GAP = 1024
"""Synchronised backwards between two checks of values, once their distance has doubled up to it."""
_NOT_COMPARED = {"params", "param_names"}
_COMPARING = b"replicas compared"[:16]
"""The facts of messages by which a difference is looked up: equal on all ranks."""


class _Model:
    """A set-up model; weakly."""

    def __init__(self, number: int, module: Module, rank_local: Iterable[str]) -> None:
        kind = type(module).__bases__[1] if is_fsdp(module) else type(module)  # of the user's
        self.name = f"model {number} ({kind.__name__})"
        self.ref = weakref.ref(module)
        self.rank_local = frozenset(rank_local)
        self.shapes = {name: (buffer.shape, buffer.dtype) for name, buffer in module.named_buffers()}


class _Optimizer:
    """A set-up optimizer, weakly; its steps, and the limits of the last `clip_gradients`."""

    def __init__(self, number: int, optimizer: Optimizer) -> None:
        self.name = f"optimizer {number} ({type(optimizer).__name__})"
        self.ref = weakref.ref(optimizer)
        self.steps = 0
        self.clip: tuple[Any, ...] = ()

    def count(self, *_: Any) -> None:
        """Count a step."""
        self.steps += 1


class ReplicaCheck:
    """The models and optimizers of one strategy that were set up, in this order, and when they are compared.

    Args:
        strategy: Of several ranks, whose group exists.
        every: True: the schedule above. A number: after every so many synchronised backwards. False: only
            `fabric.check_replicas` compares.
    """

    def __init__(self, strategy: Any, every: bool | int) -> None:
        self._strategy = weakref.proxy(strategy)
        self._every = every
        self._models: dict[int, _Model] = {}
        self._optimizers: dict[int, _Optimizer] = {}
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._made = [0, 0]
        """Models and optimizers that were set up; the same on all ranks, whatever is garbage by now."""
        self._first: list[FirstRows] = []
        """Of each model, until they are compared."""
        self.backwards = self.epochs = 0
        self._due = 1 if every is True else every
        self._equal_at = (0, 0)
        """Optimizer steps at the last two messages. At the first of them all ranks were equal."""
        self._values_equal_at = 0
        self._raw, self._digest = b"", b""
        self._comparing = self._warned = False
        self._counts = every is not False and strategy.layout.in_step
        """Whether hyper-parameters, counters and ends of epochs are compared."""
        self._counts_writes = "states" in strategy.layout.replicates  # else each rank steps other parameters

    def add(
        self, module: Module | None, optimizers: Iterable[Optimizer], rank_local: Iterable[str] = ()
    ) -> None:
        """Compare a model and optimizers from now on. All ranks must call this."""
        if module is not None:
            number = self._numbers[module] = self._made[0]
            self._models[number] = _Model(number, module, rank_local)
            self._made[0] += 1
        for optimizer in optimizers:
            number = self._numbers[optimizer] = self._made[1]
            self._optimizers[number] = _Optimizer(number, optimizer)
            optimizer.register_step_post_hook(self._optimizers[number].count)
            self._made[1] += 1

    def watch_rows(self, wrapped: Any) -> None:
        """Compare the rows of the first forward of a model that `setup` returns. All ranks must call this."""
        if self._counts and not self.backwards:  # local SGD averages no gradients
            self._first.append(FirstRows(wrapped))

    def clipped(self, optimizer: Optimizer, **limits: Any) -> None:
        """Compare the limits that `clip_gradients` was called with."""
        number = self._numbers.get(optimizer)
        if number in self._optimizers:
            self._optimizers[number].clip = tuple([(k, v) for k, v in limits.items() if v is not None])

    # hyper-parameters and counters

    def facts(self) -> bytes:
        """Return 16 bytes that are equal on all ranks whose hyper-parameters and counters are equal."""
        if self._comparing or not self._counts:
            return _COMPARING
        rows: list[Any] = [self._every, self.backwards, self.epochs]
        steps = 0
        for number, one in self._optimizers.items():
            real = one.ref()
            if real is not None:
                steps += one.steps
                groups = [[v for k, v in g.items() if k not in _NOT_COMPARED] for g in real.param_groups]
                rows.append((number, one.steps, one.clip, groups))
        self._equal_at = self._equal_at[1], steps
        try:
            raw = marshal.dumps(rows, 2)  # of the same bytes for equal values, on all ranks
        except ValueError:  # a tensor, or an object of another kind
            raw = marshal.dumps(_plain(rows), 2)
        if raw != self._raw:
            self._raw, self._digest = raw, blake2b(raw, digest_size=16).digest()
        return self._digest

    def explain(self, channel: Channel) -> None:
        """The facts of the ranks differ: find out in what. All ranks of the channel must call this.

        Returns if nothing differs that is on all ranks: an optimizer may be garbage on some of them only.

        Raises:
            ReplicasDivergedError: Hyper-parameters or counters differ; on all ranks.
        """
        self._optimizers = {n: one for n, one in self._optimizers.items() if one.ref() is not None}
        mine = {"place": user_place(), "steps": self._equal_at, "facts": dict(self._described())}
        mine["alive"] = {number: one.name for number, one in self._optimizers.items()}
        rows = self._gather(mine, channel, "replica check of hyper-parameters and counters")
        everywhere = set.intersection(*[{*row["alive"]} for row in rows])
        self._optimizers = {n: one for n, one in self._optimizers.items() if n in everywhere}
        text = report.fact_text(rows, everywhere)
        if text is not None:
            raise ReplicasDivergedError(text)

    def _described(self) -> Iterator[tuple[tuple[int, str, int], Any]]:
        """((number of the object, what, parameter group), value), in the order in which they are reported."""
        alive = [(n, one, real) for n, one in self._optimizers.items() if (real := one.ref()) is not None]
        for n, _, real in alive:
            yield (n, "class", 0), f"{type(real).__module__}.{type(real).__qualname__}"
        for n, one, real in alive:
            yield (n, "number of parameter groups", 0), len(real.param_groups)
            for place, group in enumerate(real.param_groups):
                for key, value in group.items():
                    if key not in _NOT_COMPARED:
                        yield (n, key, place), _plain(value)
            for key, value in one.clip:
                yield (n, key, 0), _plain(value)
        for n, one, _ in alive:
            yield (n, "steps", 0), one.steps
        yield (-1, "replica_check", 0), self._every
        yield (-1, "synchronised backwards", 0), self.backwards
        yield (-1, "epochs", 0), self.epochs

    # values

    def synchronised(self, modules: Iterable[Module], only: list[Tensor] | None = None) -> None:
        """Count a backward (local SGD: a round) that synchronised these models. All ranks must call this.

        Raises:
            ReplicasDivergedError: A check is due, and the ranks differ.
        """
        known = [number for module in modules if (number := self._numbers.get(module)) is not None]
        if not known:
            return
        self.backwards += 1
        if self.backwards == 1:
            for first in self._first:
                first.settle()
        if self.backwards < self._due or _is_capturing():
            return
        self._due += min(self._due, LONGEST_GAP) if self._every is True else self._every
        names = ", ".join([self._models[number].name for number in known])
        self.compare(f"replica check after backward {self.backwards}, of {names}", buffers=True, only=only)
        if self._first and self.backwards > 1:
            self._compare_rows()

    def _compare_rows(self) -> None:
        """Compare the rows of first forwards; `normalize_gradients` of the first step is known by now."""
        mine, self._first = [first.rows for first in self._first], []
        if not self._strategy.layout.normalises:
            channel = self._strategy.channel()
            for rows in zip(*self._gather(mine, channel, "replica check of rows"), strict=True):
                warn_of_unequal([*rows])

    def epoch_ended(self, backwards_before: int) -> None:
        """Count an epoch that had backwards; `backwards_before`: how many there were when it began."""
        if self.backwards > backwards_before and self._every and self._counts:
            self.epochs += 1
            self.compare(f"replica check at the end of epoch {self.epochs}")

    def before_save(self) -> None:
        """Compare all values before rank zero's are written. All ranks must call this."""
        if self._every:
            self.compare("replica check before a save")

    def compare(self, label: str, *, buffers: bool = False, only: Any = None) -> None:
        """Compare all values that ranks hold in common. All ranks must call this, with the same label.

        Args:
            label: Names the call where ranks make different ones.
            buffers: Whether to compare buffers that the next backward makes equal, too.
            only: A tree of models, optimizers and tensors, instead of all that was set up.

        Raises:
            ReplicasDivergedError: They differ; on all ranks.
        """
        layout, channel = self._strategy.layout, self._strategy.channel()
        kinds = layout.replicates
        with torch.no_grad():
            if only is None:
                kinds = kinds if buffers else tuple([kind for kind in kinds if kind != "buffers"])
                entries = self._entries(kinds, self._models.values(), self._optimizers.values())
                scale = getattr(getattr(self._strategy.precision, "scaler", None), "_scale", None)
                if isinstance(scale, torch.Tensor) and self._counts:
                    self._put(entries, "loss scale", "the loss scale", scale)
            else:
                entries = self._entries_of(flatten(only)[0])
            digests = [
                digest_of([e.tensor for e in some if e.tensor is not None]) for some in entries.values()
            ]
            numbers = torch.stack([digest.cpu() for digest in digests]).tolist() if digests else []
            shapes = ["\0".join([f"{e.name} {e.shape}" for e in some]).encode() for some in entries.values()]
            hashes = [blake2b(text, digest_size=8).digest() for text in shapes]
            row = dict(zip(entries, zip(hashes, numbers, strict=True), strict=True))
            rows = self._gather(row, channel, label, comparing=False)
            if all([len({r[key] for r in rows if key in r}) == 1 for key in {k for r in rows for k in r}]):
                self._values_equal_at = self._equal_at[1]
            else:
                self._look_up(entries, channel)

    def _entries_of(self, leaves: list[Any]) -> dict[Any, list[Entry]]:
        """Return the entries of models, optimizers and tensors that `check_replicas` was called with."""
        named = dict(enumerate(leaves))
        kinds = ("parameters", "buffers", "states")
        models = [_Model(n, leaf, ()) for n, leaf in named.items() if isinstance(leaf, torch.nn.Module)]
        optimizers = [_Optimizer(n, o) for n, o in named.items() if isinstance(o, torch.optim.Optimizer)]
        entries = self._entries(kinds, models, optimizers)
        held = [(one.name, module) for one in self._models.values() if (module := one.ref()) is not None]
        names: dict[Any, str] = {
            p: f"{name} of {model}" for model, module in held for name, p in module.named_parameters()
        }
        for number, leaf in named.items():
            if isinstance(leaf, torch.Tensor):
                self._put(entries, "tensors", names.get(leaf, f"tensor {number}"), leaf)
        return entries

    def _look_up(self, entries: dict[Any, list[Entry]], channel: Channel) -> None:
        mine = {key: [entry.sent() for entry in some] for key, some in entries.items()}
        about = {"place": user_place(), "steps": (self._values_equal_at, self._equal_at[1]), "entries": mine}
        rows = self._gather(about, channel, "replica check of tensors")
        tensors = {(key, e.name): e.tensor for key, some in entries.items() for e in some}

        def exchange(part: Any) -> list[Any]:
            return self._gather(part, channel, "replica check of values")

        text, small = first_difference(rows, tensors, channel.collective.rank_in_group, exchange)
        if text is not None:
            raise ReplicasDivergedError(text)
        if small and not self._warned:
            self._warned = True
            rank_zero_warn(f"{small} Said once. See fabric/replicas/README.md.")

    def _entries(self, kinds: tuple[str, ...], models: Any, optimizers: Any) -> dict[Any, list[Entry]]:
        """Return what this rank and others hold. Ranks with the same key hold the same tensors."""
        found: defaultdict[Any, list[Entry]] = defaultdict(list)
        put = partial(self._put, found)
        names: dict[Any, str] = {}
        for one in models:
            module = one.ref() or torch.nn.Module()
            for name, parameter in module.named_parameters():
                names.setdefault(parameter, f"{name} of {one.name}")
                if "parameters" in kinds:
                    put(one.name, names[parameter], parameter)
            for name, buffer in sorted(module.named_buffers()) if "buffers" in kinds else ():
                if name in one.shapes and name not in one.rank_local:
                    grown = one.shapes[name] != (buffer.shape, buffer.dtype)  # a cache, this rank's own
                    put(one.name, f"buffer {name} of {one.name}", buffer, own=grown)
        for opt in optimizers:
            real = opt.ref()
            for place, parameter in enumerate(parameters_of(real) if real is not None else ()):
                if parameter not in names and "parameters" in kinds:
                    names[parameter] = f"parameter {place} of {opt.name}"
                    put(opt.name, names[parameter], parameter)
                state = real.state.get(parameter, {}) if "states" in kinds else {}
                for key in sorted(state, key=str):
                    if isinstance(state[key], torch.Tensor) and _is_like(state[key], parameter):
                        whose = names.get(parameter, f"parameter {place}")
                        put(opt.name, f"state {key!r} of {whose} in {opt.name}", state[key])
        return found

    def _put(self, found: Any, owner: str, name: str, tensor: Any, own: bool = False) -> None:
        # By owner, too: one that is garbage on some ranks is compared among the others.
        key = (owner, *self._strategy.layout.replica_key)
        local, writes = tensor, -1 if tensor.is_inference() else tensor._version
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            place = mesh.get_coordinate() or [0] * mesh.ndim
            sharded = [dim for dim, how in enumerate(tensor.placements) if not how.is_replicate()]
            if all([mesh.size(dim) == 1 for dim in range(mesh.ndim) if dim not in sharded]):
                if isinstance(tensor, torch.nn.Parameter):  # no other rank holds its values; all change them
                    found[(*key, "sharded")].append(Entry(name, f"{writes} {report.WRITES}"))
                return
            key, local = (*key, *[(dim, place[dim]) for dim in sharded]), tensor.to_local()
        if own:
            found[key].append(Entry(name))
        elif is_traceable_wrapper_subclass(local):  # quantised: values and scales
            for part in local.__tensor_flatten__()[0]:
                self._put(found, owner, f"{part} of {name}", getattr(local, part))
        elif local.numel() and not local.is_meta and local.layout is torch.strided and not local.is_nested:
            shape = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
            writes = writes if self._counts_writes else -1
            found[key].append(Entry(name, shape, writes, bool(tensor._backward_hooks), local))

    def _gather(self, row: Any, channel: Channel, label: str, comparing: bool = True) -> list[Any]:
        self._comparing = comparing
        try:
            return gather_objects(row, channel, label)
        finally:
            self._comparing = False


def _is_like(value: Tensor, parameter: Tensor) -> bool:
    """Whether a state is laid out as its parameter, or is one number; others may be of this rank's part."""
    return hasattr(value, "device_mesh") == hasattr(parameter, "device_mesh") or value.numel() == 1


def _is_capturing() -> bool:
    """Whether a CUDA graph is captured, in which the host cannot read a digest."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _plain(value: Any) -> Any:
    """Return a hyper-parameter as a plain value; of a tensor on a device its kind: reading it would wait."""
    if isinstance(value, list | tuple):
        return tuple([_plain(one) for one in value])
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.is_cpu and value.numel() == 1 else f"a tensor on {value.device.type}"
    if isinstance(value, bool | int | float | complex | str | None):
        return value
    return type(value).__name__
