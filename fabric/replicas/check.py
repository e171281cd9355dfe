"""`ReplicaCheck`: compares what must be equal on all ranks. A strategy of several ranks makes it at launch.

Hyper-parameters and counters are part of the call check of every verb (`facts`). Values are compared by
digests after synchronised backwards 1, 2, 4, ..., 1,024, 2,048, ..., at saves, at ends of epochs, and by
`fabric.check_replicas`. All ranks are in the same call there, so that the comparison cannot deadlock.
"""

from __future__ import annotations

import marshal
import weakref
import zlib
from collections import defaultdict
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from fabric.collectives.objects import gather_objects
from fabric.core._torch import is_fsdp
from fabric.core.backward_listeners import parameters_of
from fabric.core.errors import ReplicasDivergedError
from fabric.core.parts import Part
from fabric.core.source import user_line
from fabric.core.tree import flatten
from fabric.data.unequal import FirstRows, compare_rows, restore_forwards
from fabric.replicas._torch import has_backward_hooks, is_traceable_wrapper_subclass, loss_scale
from fabric.replicas.digest import WRITES, ComparedTensor, digest_of
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.collectives.channel import Channel

LONGEST_GAP = 1024
"""Synchronised backwards between two checks of values, once their distance has doubled up to it."""
_RAW = 1 << 32
"""Numbers of optimizers that were never set up begin here."""
_NOT_COMPARED = {"params", "param_names"}
_COMPARING = b"replicas compared"[:16]
"""The facts of messages by which a difference is looked up: equal on all ranks."""


class _Held:
    """A set-up model or optimizer, weakly; of an optimizer its steps, and the limits of its last clip."""

    def __init__(self, kind: str, number: int, real: Any, rank_local: Iterable[str] = ()) -> None:
        users = type(real).__bases__[1] if is_fsdp(real) else type(real)
        self.name = f"{kind} {number} ({users.__name__})"
        self.ref = weakref.ref(real)
        self.rank_local = frozenset(rank_local)
        buffers = real.named_buffers() if kind == "model" else ()
        self.shapes = {name: (buffer.shape, buffer.dtype) for name, buffer in buffers}
        self.steps = 0
        self.clip: tuple[Any, ...] = ()

    def count(self, *_: Any) -> None:
        """Count a step."""
        self.steps += 1


def make_part(strategy: Any) -> ReplicaCheck:
    """Return the replica check of a strategy of several ranks."""
    return ReplicaCheck(strategy, strategy.replica_check)


class ReplicaCheck(Part):
    """The models and optimizers of one strategy that were set up, in this order, and when they are compared.

    Args:
        strategy: Of several ranks, whose group exists.
        every: True: the schedule above. A number: after every so many synchronised backwards. False: only
            `fabric.check_replicas` compares.
    """

    name = "replica check"

    def __init__(self, strategy: Any, every: bool | int) -> None:
        self._strategy = weakref.proxy(strategy)
        self._every = every
        self._models: list[_Held] = []
        self._optimizers: dict[int, _Held] = {}
        self._held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()
        self._made = 0
        """Optimizers that were set up; the same on all ranks, whatever is garbage by now."""
        self.first_rows: list[Any] = []
        """Of each model until they are compared."""
        self.backwards = self.epochs = 0
        self._due = 1 if every is True else every
        self._equal_at = (0, 0)
        """Optimizer steps at the last two messages. At the first of them all ranks were equal."""
        self._values_equal_at = 0
        self._comparing = self._warned = self._normalizes = False
        self._counts = every is not False and strategy.traits.lockstep
        """Whether hyper-parameters, counters and ends of epochs are compared."""
        self._counts_writes = "states" in strategy.traits.replicates  # else each rank steps other parameters

    def added(
        self,
        model: Any | None,
        optimizers: Iterable[Optimizer],
        *,
        replicated: bool,
        rank_local: Iterable[str],
    ) -> None:
        """Compare a model and optimizers from now on, if they are replicated. All ranks must call this."""
        if not replicated:
            return
        if model is not None:
            one = self._held[model.module] = _Held("model", len(self._models), model.module, rank_local)
            self._models.append(one)
            if self._counts and not self.backwards:  # local SGD averages no gradients
                self.first_rows.append(FirstRows(model))
        for optimizer in optimizers:
            one = self._held[optimizer] = _Held("optimizer", self._made, optimizer)
            self._optimizers[self._made] = one
            optimizer.register_step_post_hook(one.count)
            self._made += 1

    def stepping(self, optimizer: Optimizer) -> None:
        """Compare an optimizer that was never set up, if it steps parameters of models that were."""
        models = [(one.name, module) for one in self._models if (module := one.ref()) is not None]
        names = {p: f"{name} of {model}" for model, module in models for name, p in module.named_parameters()}
        held = [names.get(p, "") for p in parameters_of(optimizer)]
        of_another = any(
            [real.state is optimizer.state for _, _, real in self._alive()]
        )  # a part of it steps
        if self._counts and optimizer not in self._held and not of_another and all(held):
            # By its parameters: each rank may make others in any order.
            number = _RAW + zlib.crc32("\0".join(held).encode())
            one = self._held[optimizer] = self._optimizers[number] = _Held("optimizer", number, optimizer)
            one.name = f"the optimizer of {held[0]}, ... ({type(optimizer).__name__})"
            optimizer.register_step_post_hook(one.count)

    def normalizing(self) -> None:
        """Compare no numbers of rows: the loop divides by all of them."""
        self._normalizes = True

    def clipping(self, optimizer: Optimizer, limits: dict[str, Any]) -> None:
        """Compare the limits that `clip_gradients` was called with."""
        if (one := self._held.get(optimizer)) is not None:
            one.clip = tuple([(key, limit) for key, limit in limits.items() if limit is not None])

    # hyper-parameters and counters

    def facts(self) -> bytes:
        """Return 16 bytes that are equal on all ranks whose hyper-parameters and counters are equal."""
        if self._comparing or not self._counts:
            return _COMPARING
        rows: list[Any] = [self._every, self.backwards, self.epochs]
        for number, one, real in self._alive():
            groups = [[v for k, v in group.items() if k not in _NOT_COMPARED] for group in real.param_groups]
            rows.append((number, one.steps, one.clip, groups, self._strategy.layout.writes(real)))
        self._equal_at = self._equal_at[1], sum([row[1] for row in rows[3:]])
        try:
            raw = marshal.dumps(rows, 2)  # of the same bytes for equal values, on all ranks
        except ValueError:  # a tensor, or an object of another kind
            raw = marshal.dumps(_plain(rows), 2)
        return blake2b(raw, digest_size=16).digest()

    def _alive(self) -> list[tuple[int, _Held, Any]]:
        pairs = [(number, one, one.ref()) for number, one in self._optimizers.items()]
        return [pair for pair in pairs if pair[2] is not None]

    def differ(self, channel: Channel) -> None:
        """The facts of the ranks differ: find out in what. All ranks of the channel must call this.

        Returns if nothing differs that is on all ranks: an optimizer may be garbage on some of them only.

        Raises:
            ReplicasDivergedError: Hyper-parameters or counters differ; on all ranks.
        """
        from fabric.replicas import report

        mine = {"place": user_line(), "steps": self._equal_at, "facts": dict(self._described())}
        mine["alive"] = {number: one.name for number, one, _ in self._alive()}
        mine["writes"] = {n: self._strategy.layout.writes(real) for n, _, real in self._alive()}
        rows = self._gather(mine, channel, "replica check of hyper-parameters and counters")
        everywhere = set.intersection(*[{*row["alive"]} for row in rows])
        self._optimizers = {n: one for n, one in self._optimizers.items() if n in everywhere}
        text = report.fact_text(rows, everywhere)
        if text is not None:
            raise ReplicasDivergedError(text)
        if any([row["writes"] != rows[0]["writes"] for row in rows]):  # the step will hide the difference
            self._compare_written(rows, channel)

    def _compare_written(self, rows: list[dict[str, Any]], channel: Channel) -> None:
        parts = {n: self._strategy.layout.owned_before_step(real) for n, _, real in self._alive()}
        mine = {n: [int(digest_of(part)) for part in some] for n, some in parts.items() if some}
        found = self._gather(mine, channel, "replica check of parameters that some ranks wrote")
        for n in mine:
            for rank, row in enumerate(rows):
                if row["writes"][n] and len({other[n][rank] for other in found}) > 1:
                    from fabric.replicas import report

                    raise ReplicasDivergedError(report.written_text(rows, self._optimizers[n].name, n))

    def _described(self) -> Iterator[tuple[tuple[int, str, int], Any]]:
        """((number of the object, what, parameter group), value), in the order in which they are reported."""
        alive = self._alive()
        for n, _, real in alive:
            yield (n, "class", 0), f"{type(real).__module__}.{type(real).__qualname__}"
        for n, one, real in alive:
            yield (n, "number of parameter groups", 0), len(real.param_groups)
            for place, group in enumerate(real.param_groups):
                for key, value in group.items():
                    if key not in _NOT_COMPARED:
                        yield (n, key, place), _plain(value)
            yield from [((n, key, 0), _plain(value)) for key, value in one.clip]
        yield from [((n, "steps", 0), one.steps) for n, one, _ in alive]
        yield (-1, "replica_check", 0), self._every
        yield (-1, "synchronised backwards", 0), self.backwards
        yield (-1, "epochs", 0), self.epochs

    # values

    def synchronised(self, modules: Iterable[Module], only: list[Tensor] | None = None) -> None:
        """Count a backward (local SGD: a round) that synchronised these models. All ranks must call this.

        Raises:
            ReplicasDivergedError: A check is due, and the ranks differ.
        """
        held = {self._held[module]: module for module in modules if module in self._held}
        if not held or not self._every:
            return
        self.backwards += 1
        if self.backwards == 1:
            restore_forwards(self.first_rows)
        if self.backwards >= self._due and not _is_capturing():
            self._due += min(self._due, LONGEST_GAP) if self._every is True else self._every
            label = (
                f"replica check after backward {self.backwards}, of {', '.join([one.name for one in held])}"
            )
            # Others may have updated buffers in a forward, which their next backward makes equal.
            self.compare(label, buffers=[one for one, module in held.items() if module.training], only=only)
            if self.first_rows and self.backwards > 1:
                first, self.first_rows = self.first_rows, []
                if not self._normalizes:
                    compare_rows(first, self._strategy)

    def epoch_begun(self) -> int:
        """Return the number of synchronised backwards up to now."""
        return self.backwards

    def epoch_ended(self, begun: int) -> None:
        """Count an epoch that had backwards; `begun`: how many there were before it. All ranks must call
        this.
        """
        if self.backwards > begun and self._every and self._counts:
            self.epochs += 1
            self.compare(f"replica check at the end of epoch {self.epochs}")

    def saving(self) -> None:
        """Compare all values before rank zero's are written. All ranks must call this."""
        if self._every:
            self.compare("replica check before a save")

    def compare(self, label: str, *, buffers: Collection[_Held] | None = (), only: Any = None) -> None:
        """Compare all values that ranks hold in common. All ranks must call this, with the same label.

        Args:
            label: Names the call where ranks make different ones.
            buffers: Models whose buffers are compared, too; None: all. A forward may change them, and the
                next backward makes them equal.
            only: A tree of models, optimizers and tensors, instead of all that was set up.

        Raises:
            ReplicasDivergedError: They differ; on all ranks.
        """
        channel = self._strategy.channel()
        kinds = self._strategy.traits.replicates
        with torch.no_grad():
            if only is None:
                entries = self._entries(kinds, self._models, self._optimizers.values(), buffers)
                scale = loss_scale(getattr(self._strategy.precision, "scaler", None))
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
            if all(
                [len({other[key] for other in rows if key in other}) == 1 for each in rows for key in each]
            ):
                self._values_equal_at = self._equal_at[1]
            else:
                self._look_up(entries, channel)

    def _entries_of(self, leaves: list[Any]) -> dict[Any, list[ComparedTensor]]:
        """Return the entries of models, optimizers and tensors that `check_replicas` was called with."""
        named = dict(enumerate(leaves))
        kinds = ("parameters", "buffers", "states")
        models = [_Held("model", n, leaf) for n, leaf in named.items() if isinstance(leaf, torch.nn.Module)]
        optimizers = [leaf for leaf in named.items() if isinstance(leaf[1], torch.optim.Optimizer)]
        entries = self._entries(kinds, models, [_Held("optimizer", *pair) for pair in optimizers])
        held = [(one.name, module) for one in self._models if (module := one.ref()) is not None]
        names: dict[Any, str] = {
            p: f"{name} of {model}" for model, module in held for name, p in module.named_parameters()
        }
        for number, leaf in named.items():
            if isinstance(leaf, torch.Tensor):
                self._put(entries, "tensors", names.get(leaf, f"tensor {number}"), leaf)
        return entries

    def _look_up(self, entries: dict[Any, list[ComparedTensor]], channel: Channel) -> None:
        from fabric.replicas.values import first_difference

        mine = {key: [entry.sent() for entry in some] for key, some in entries.items()}
        about = {"place": user_line(), "steps": (self._values_equal_at, self._equal_at[1]), "entries": mine}
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

    def _entries(
        self, kinds: tuple[str, ...], models: Any, optimizers: Any, buffers: Collection[_Held] | None = None
    ) -> dict[Any, list[ComparedTensor]]:
        """Return what this rank and others hold. Ranks with the same key hold the same tensors."""
        found: defaultdict[Any, list[ComparedTensor]] = defaultdict(list)
        put = partial(self._put, found)
        names: dict[Any, str] = {}
        for one in models:
            module = one.ref() or torch.nn.Module()
            for name, parameter in module.named_parameters():
                names.setdefault(parameter, f"{name} of {one.name}")
                if "parameters" in kinds:
                    put(one.name, names[parameter], parameter)
            known = "buffers" in kinds and (buffers is None or one in buffers)
            for name, buffer in sorted(module.named_buffers()) if known else ():
                if name in one.shapes and name not in one.rank_local:
                    grown = one.shapes[name] != (buffer.shape, buffer.dtype)  # a cache, this rank's own
                    put(one.name, f"buffer {name} of {one.name}", buffer, own=grown)
        for opt in optimizers:
            real = opt.ref()
            for place, group in enumerate(
                real.param_groups if real is not None and "states" in kinds else ()
            ):
                for key in [key for key, value in group.items() if isinstance(value, torch.Tensor)]:
                    put(opt.name, f"{key} of {opt.name}, parameter group {place}", group[key])
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
                    found[(*key, "sharded")].append(ComparedTensor(name, f"{writes} {WRITES}"))
                return
            key, local = (*key, *[(dim, place[dim]) for dim in sharded]), tensor.to_local()
        if own:
            found[key].append(ComparedTensor(name))
        elif is_traceable_wrapper_subclass(local):  # quantised: values and scales
            for part in local.__tensor_flatten__()[0]:
                self._put(found, owner, f"{part} of {name}", getattr(local, part))
        elif local.numel() and not local.is_meta and local.layout is torch.strided and not local.is_nested:
            shape = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
            writes = writes if self._counts_writes else -1
            found[key].append(ComparedTensor(name, shape, writes, has_backward_hooks(tensor), local))

    def _gather(self, row: Any, channel: Channel, label: str, comparing: bool = True) -> list[Any]:
        before, self._comparing = self._comparing, comparing or self._comparing
        try:
            return gather_objects(row, channel, label)
        finally:
            self._comparing = before


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
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of NumPy
        return value.item()
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text
