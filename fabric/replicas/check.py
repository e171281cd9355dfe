"""`ReplicaCheck`: compares values that must be equal on all ranks. Strategies create it at launch.

Hyper-parameters and counters are part of the call check of every verb (`facts`). Values are compared by
digests after synchronised backwards 1, 2, 4, ..., 1,024, 2,048, ..., at saves, at ends of epochs, and by
`fabric.check_replicas`. All ranks are in the same call then, so that the comparison cannot deadlock.
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
from fabric.replicas._torch import has_backward_hooks, is_traceable_wrapper_subclass, loss_scale
from fabric.replicas.digest import WRITES, ComparedTensor, digest_of
from fabric.utilities.init import name_of, named_by_owner
from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.collectives.channel import Channel

MAX_INTERVAL = 1024
"""Largest number of synchronised backwards between two checks of values; the interval doubles up to it."""
_FIRST_RAW_NUMBER = 1 << 32
"""Lowest number for an optimizer that was never set up."""
_NOT_COMPARED = {"params", "param_names"}
_COMPARISON_FACTS = b"replicas compared"[:16]
"""The facts of messages that search for a difference: equal on all ranks."""


class _TrackedObject:
    """A weak reference to a set-up model or optimizer; of an optimizer also its steps and clip limits."""

    def __init__(self, kind: str, number: int, real: Any, rank_local: Iterable[str] = ()) -> None:
        user_class = type(real).__bases__[1] if is_fsdp(real) else type(real)
        self.name = f"{kind} {number} ({user_class.__name__})"
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
    """Return the replica check of a strategy with several ranks."""
    return ReplicaCheck(strategy, strategy.replica_check)


class ReplicaCheck(Part):
    """The set-up models and optimizers of a strategy, in order, and the schedule of comparisons.

    Args:
        strategy: A strategy with several ranks, whose process group exists.
        every: True: the schedule above. A number n: after every n synchronised backwards. False: only
            `fabric.check_replicas` compares.
    """

    name = "replica check"

    def __init__(self, strategy: Any, every: bool | int) -> None:
        self._strategy = weakref.proxy(strategy)
        self._every = every
        self._models: list[_TrackedObject] = []
        self._optimizers: dict[int, _TrackedObject] = {}
        self._tracked: weakref.WeakKeyDictionary[Any, _TrackedObject] = weakref.WeakKeyDictionary()
        self._shared: weakref.WeakKeyDictionary[Module, bool] = weakref.WeakKeyDictionary()
        self._num_optimizers = 0
        """Number of optimizers that were set up; equal on all ranks, even if some were garbage-collected."""
        self.backward_listeners: list[Callable[[Collection[Module]], None]] = []
        """Called on all ranks after each backward that synchronised models, until they are removed."""
        self._trains_models = False
        """Whether there was such a backward."""
        self.backwards = self.epochs = 0
        self._due = 1 if every is True else every
        self._steps_at_messages = (0, 0)
        """Optimizer steps at the last two messages. At the first one the facts were equal on all ranks."""
        self._steps_at_equal_values = 0
        self._comparing = self._warned = False
        self._compares_facts = every is not False and strategy.traits.lockstep
        """Whether hyper-parameters, counters and ends of epochs are compared."""
        # Without replicated states, each rank steps other parameters.
        self._compares_writes = "states" in strategy.traits.replicates

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
            tracked = _TrackedObject("model", len(self._models), model.module, rank_local)
            tracked.name = name_of(model.module)
            self._tracked[model.module] = tracked
            self._models.append(tracked)
        for optimizer in optimizers:
            tracked = self._tracked[optimizer] = _TrackedObject("optimizer", self._num_optimizers, optimizer)
            self._optimizers[self._num_optimizers] = tracked
            optimizer.register_step_post_hook(tracked.count)
            self._num_optimizers += 1

    def stepping(self, optimizer: Optimizer) -> None:
        """Compare an optimizer that was never set up, if it steps parameters of models that were."""
        models = [(tracked.name, module) for tracked in self._models if (module := tracked.ref()) is not None]
        names = {p: f"{name} of {model}" for model, module in models for name, p in module.named_parameters()}
        held = [names.get(p, "") for p in parameters_of(optimizer)]
        # An inner optimizer of a set-up one shares its state.
        is_inner = any([real.state is optimizer.state for _, _, real in self._live_optimizers()])
        if self._compares_facts and optimizer not in self._tracked and not is_inner and held and all(held):
            # Numbered by its parameters, since ranks may create such optimizers in any order.
            number = _FIRST_RAW_NUMBER + zlib.crc32("\0".join(held).encode())
            tracked = self._tracked[optimizer] = self._optimizers[number] = _TrackedObject(
                "optimizer", number, optimizer
            )
            tracked.name = f"the optimizer of {held[0]}, ... ({type(optimizer).__name__})"
            optimizer.register_step_post_hook(tracked.count)

    def clipping(self, optimizer: Optimizer, limits: dict[str, Any]) -> None:
        """Include the arguments of `clip_gradients` in the facts."""
        if (tracked := self._tracked.get(optimizer)) is not None:
            tracked.clip = tuple([(key, limit) for key, limit in limits.items() if limit is not None])

    # hyper-parameters and counters

    def facts(self) -> bytes:
        """Return 16 bytes that are equal on all ranks whose hyper-parameters and counters are equal."""
        if self._comparing or not self._compares_facts:
            return _COMPARISON_FACTS
        rows: list[Any] = [self._every, self.backwards, self.epochs]
        for number, tracked, real in self._live_optimizers():
            groups = [[v for k, v in group.items() if k not in _NOT_COMPARED] for group in real.param_groups]
            rows.append((number, tracked.steps, tracked.clip, groups, self._strategy.layout.writes(real)))
        self._steps_at_messages = self._steps_at_messages[1], sum([row[1] for row in rows[3:]])
        try:
            raw = marshal.dumps(rows, 2)  # equal bytes for equal values, on all ranks
        except ValueError:  # tensors and objects
            raw = marshal.dumps(_to_plain(rows), 2)
        return blake2b(raw, digest_size=16).digest()

    def _live_optimizers(self) -> list[tuple[int, _TrackedObject, Any]]:
        pairs = [(number, tracked, tracked.ref()) for number, tracked in self._optimizers.items()]
        return [pair for pair in pairs if pair[2] is not None]

    def differ(self, channel: Channel) -> None:
        """Find the difference when the facts of ranks differ. All ranks of the channel must call this.

        Returns without error if only optimizers differ that were garbage-collected on some ranks.

        Raises:
            ReplicasDivergedError: On all ranks, if hyper-parameters or counters differ.
        """
        from fabric.replicas import report

        local = {"place": user_line(), "steps": self._steps_at_messages, "facts": dict(self._named_facts())}
        local["alive"] = {number: tracked.name for number, tracked, _ in self._live_optimizers()}
        local["writes"] = {n: self._strategy.layout.writes(real) for n, _, real in self._live_optimizers()}
        rows = self._gather(local, channel, "replica check of hyper-parameters and counters")
        on_all_ranks = set.intersection(*[{*row["alive"]} for row in rows])
        self._optimizers = {n: tracked for n, tracked in self._optimizers.items() if n in on_all_ranks}
        text = report.fact_text(rows, on_all_ranks)
        if text is not None:
            raise ReplicasDivergedError(text)
        # Now, before the step, which would change the values.
        if any([row["writes"] != rows[0]["writes"] for row in rows]):
            self._compare_written(rows, channel)

    def _compare_written(self, rows: list[dict[str, Any]], channel: Channel) -> None:
        parts = {n: self._strategy.layout.owned_before_step(real) for n, _, real in self._live_optimizers()}
        local = {n: [int(digest_of(part)) for part in compared] for n, compared in parts.items() if compared}
        found = self._gather(local, channel, "replica check of parameters that some ranks wrote")
        for n in local:
            for rank, row in enumerate(rows):
                if row["writes"][n] and len({other[n][rank] for other in found}) > 1:
                    from fabric.replicas import report

                    raise ReplicasDivergedError(report.written_text(rows, self._optimizers[n].name, n))

    def _named_facts(self) -> Iterator[tuple[tuple[int, str, int], Any]]:
        """Yield ((object number, fact, parameter group), value), in the order of reports."""
        alive = self._live_optimizers()
        for n, _, real in alive:
            yield (n, "class", 0), f"{type(real).__module__}.{type(real).__qualname__}"
        for n, tracked, real in alive:
            yield (n, "number of parameter groups", 0), len(real.param_groups)
            for index, group in enumerate(real.param_groups):
                for key, value in group.items():
                    if key not in _NOT_COMPARED:
                        yield (n, key, index), _to_plain(value)
            yield from [((n, key, 0), _to_plain(value)) for key, value in tracked.clip]
        yield from [((n, "steps", 0), tracked.steps) for n, tracked, _ in alive]
        yield (-1, "replica_check", 0), self._every
        yield (-1, "synchronised backwards", 0), self.backwards
        yield (-1, "epochs", 0), self.epochs

    # values

    def synchronised(self, modules: Collection[Module] | None, only: list[Tensor] | None = None) -> None:
        """Count a backward (local SGD: a round) that synchronised these models. All ranks must call this.

        Raises:
            ReplicasDivergedError: A check was due, and the ranks differ.
        """
        held = {self._tracked[module]: module for module in modules or () if module in self._tracked}
        if held or any([self._is_shared(module) for module in modules or ()]):
            self._trains_models = True
        elif modules is not None or self._trains_models:  # steps of models compare free parameters, too
            return
        if not self._every:
            return
        self.backwards += 1
        if self.backwards >= self._due and not _is_capturing():
            self._due += min(self._due, MAX_INTERVAL) if self._every is True else self._every
            after_backward = self._strategy.layout.syncs_in_backward
            names = [tracked.name for tracked in held] or [*map(name_of, modules or ())]
            of = f", of {', '.join(names) or 'free parameters'}" if after_backward else ""
            # Of a step, a rank may have deleted some. Buffers of other models differ until their backward.
            buffers = [tracked for tracked, module in held.items() if module.training and after_backward]
            self.compare(f"replica check after backward {self.backwards}{of}", buffers=buffers, only=only)
        if modules is not None:
            for listener in [*self.backward_listeners]:
                listener(modules)

    def _is_shared(self, module: Module) -> bool:
        """Whether models that are compared share this module, which a layout made of their parameters."""
        if module not in self._shared:
            models = [model for tracked in self._models if (model := tracked.ref()) is not None]
            compared = {id(p) for model in models for p in model.parameters()}
            self._shared[module] = any([id(p) in compared for p in module.parameters()])
        return self._shared[module]

    def epoch_begun(self) -> int:
        """Return the number of synchronised backwards until now."""
        return self.backwards

    def epoch_ended(self, backwards_at_begin: int, uneven_rows: int) -> None:
        """Count an epoch that had backwards, by their number at its begin. All ranks must call this."""
        if self.backwards > backwards_at_begin and self._every and self._compares_facts:
            self.epochs += 1
            self.compare(f"replica check at the end of epoch {self.epochs}")

    def saving(self) -> None:
        """Compare all values before rank zero writes them. All ranks must call this."""
        if self._every:
            self.compare("replica check before a save")

    def compare(
        self, label: str, *, buffers: Collection[_TrackedObject] | None = (), only: Any = None
    ) -> None:
        """Compare all replicated values. All ranks must call this, with the same label.

        Args:
            label: The name of the call in the error for ranks that make different calls.
            buffers: Models whose buffers are compared, too; None: all. A forward may change them, and the
                next backward makes them equal.
            only: A tree of models, optimizers and tensors to compare, instead of all set-up objects.

        Raises:
            ReplicasDivergedError: On all ranks, if the values differ.
        """
        channel = self._strategy.channel()
        kinds = self._strategy.traits.replicates
        with torch.no_grad():
            if only is None:
                entries = self._entries(kinds, self._models, self._optimizers.values(), buffers)
                scale = loss_scale(getattr(self._strategy.precision, "scaler", None))
                if isinstance(scale, torch.Tensor) and self._compares_facts:
                    self._add_entry(entries, "loss scale", "the loss scale", scale)
            else:
                entries = self._entries_of(flatten(only)[0])
            digests = [
                digest_of([e.tensor for e in compared if e.tensor is not None])
                for compared in entries.values()
            ]
            numbers = torch.stack([digest.cpu() for digest in digests]).tolist() if digests else []
            shapes = [
                "\0".join([f"{e.name} {e.shape}" for e in compared]).encode() for compared in entries.values()
            ]
            hashes = [blake2b(text, digest_size=8).digest() for text in shapes]
            row = dict(zip(entries, zip(hashes, numbers, strict=True), strict=True))
            rows = self._gather(row, channel, label, comparing=False)
            if all([len({other[key] for other in rows if key in other}) == 1 for row in rows for key in row]):
                self._steps_at_equal_values = self._steps_at_messages[1]
            else:
                self._find_difference(entries, channel)

    def _entries_of(self, leaves: list[Any]) -> dict[Any, list[ComparedTensor]]:
        """Return the entries of the models, optimizers and tensors passed to `check_replicas`."""
        named = dict(enumerate(leaves))
        kinds = ("parameters", "buffers", "states")
        models = [
            _TrackedObject("model", n, leaf) for n, leaf in named.items() if isinstance(leaf, torch.nn.Module)
        ]
        optimizers = [leaf for leaf in named.items() if isinstance(leaf[1], torch.optim.Optimizer)]
        entries = self._entries(kinds, models, [_TrackedObject("optimizer", *pair) for pair in optimizers])
        held = [(tracked.name, module) for tracked in self._models if (module := tracked.ref()) is not None]
        names: dict[Any, str] = {
            p: f"{name} of {model}" for model, module in held for name, p in module.named_parameters()
        }
        for number, leaf in named.items():
            if isinstance(leaf, torch.Tensor):
                self._add_entry(entries, "tensors", names.get(leaf, f"tensor {number}"), leaf)
        return entries

    def _find_difference(self, entries: dict[Any, list[ComparedTensor]], channel: Channel) -> None:
        from fabric.replicas.values import first_difference

        local = {key: [entry.without_data() for entry in compared] for key, compared in entries.items()}
        details = {
            "place": user_line(),
            "steps": (self._steps_at_equal_values, self._steps_at_messages[1]),
            "entries": local,
        }
        rows = self._gather(details, channel, "replica check of tensors")
        tensors = {(key, e.name): e.tensor for key, compared in entries.items() for e in compared}

        def exchange(part: Any) -> list[Any]:
            return self._gather(part, channel, "replica check of values")

        text, small = first_difference(rows, tensors, channel.collective.rank_in_group, exchange)
        if text is not None:
            raise ReplicasDivergedError(text)
        if small and not self._warned:
            self._warned = True
            rank_zero_warn(f"{small} This warning is shown once. See fabric/replicas/README.md.")

    def _entries(
        self,
        kinds: tuple[str, ...],
        models: Any,
        optimizers: Any,
        buffers: Collection[_TrackedObject] | None = None,
    ) -> dict[Any, list[ComparedTensor]]:
        """Return this rank's replicated tensors. Ranks with the same key have the same tensors."""
        found: defaultdict[Any, list[ComparedTensor]] = defaultdict(list)
        add_entry = partial(self._add_entry, found)
        names: dict[Any, str] = {}
        for tracked in models:
            module = tracked.ref() or torch.nn.Module()
            for name, parameter in module.named_parameters():
                names.setdefault(parameter, named_by_owner(parameter) or f"{name} of {tracked.name}")
                if "parameters" in kinds:
                    add_entry(tracked.name, names[parameter], parameter)
            with_buffers = "buffers" in kinds and (buffers is None or tracked in buffers)
            for name, buffer in sorted(module.named_buffers()) if with_buffers else ():
                if name in tracked.shapes and name not in tracked.rank_local:
                    # A buffer whose shape has changed is a cache, which may differ by rank.
                    has_changed = tracked.shapes[name] != (buffer.shape, buffer.dtype)
                    add_entry(tracked.name, f"buffer {name} of {tracked.name}", buffer, rank_only=has_changed)
        for tracked in optimizers:
            if (real := tracked.ref()) is None:
                continue
            for index, group in enumerate(real.param_groups if "states" in kinds else ()):
                for key in [key for key, value in group.items() if isinstance(value, torch.Tensor)]:
                    name = f"{key} of {tracked.name}, parameter group {index}"
                    add_entry(tracked.name, name, group[key])
            for index, parameter in enumerate(parameters_of(real)):
                called = names.get(parameter) or named_by_owner(parameter)  # of a model that was deleted
                if called is None and "parameters" in kinds:
                    called = names[parameter] = f"parameter {index} of {tracked.name}"
                    add_entry(tracked.name, called, parameter)
                state = real.state.get(parameter, {}) if "states" in kinds else {}
                for key in sorted(state, key=str):
                    if isinstance(state[key], torch.Tensor) and _is_like(state[key], parameter):
                        name = f"state {key!r} of {called or f'parameter {index}'}"
                        add_entry(tracked.name, f"{name} in {tracked.name}", state[key])
        return found

    def _add_entry(self, found: Any, owner: str, name: str, tensor: Any, rank_only: bool = False) -> None:
        # The key contains the owner, so that only ranks that have not collected an object compare it.
        key = (owner, *self._strategy.layout.replica_key)
        local, writes = tensor, -1 if tensor.is_inference() else tensor._version
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None:
            index = mesh.get_coordinate() or [0] * mesh.ndim
            sharded = [dim for dim, how in enumerate(tensor.placements) if not how.is_replicate()]
            if all([mesh.size(dim) == 1 for dim in range(mesh.ndim) if dim not in sharded]):
                if isinstance(
                    tensor, torch.nn.Parameter
                ):  # no other rank has its values; all ranks change them
                    found[(*key, "sharded")].append(ComparedTensor(name, f"{writes} {WRITES}"))
                return
            key, local = (*key, *[(dim, index[dim]) for dim in sharded]), tensor.to_local()
        if rank_only:
            found[key].append(ComparedTensor(name))
        elif is_traceable_wrapper_subclass(local):  # quantised: values and scales
            for part in local.__tensor_flatten__()[0]:
                self._add_entry(found, owner, f"{part} of {name}", getattr(local, part))
        elif local.numel() and not local.is_meta and local.layout is torch.strided and not local.is_nested:
            shape = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
            writes = writes if self._compares_writes else -1
            found[key].append(ComparedTensor(name, shape, writes, has_backward_hooks(tensor), local))

    def _gather(self, row: Any, channel: Channel, label: str, comparing: bool = True) -> list[Any]:
        was_comparing, self._comparing = self._comparing, comparing or self._comparing
        try:
            return gather_objects(row, channel, label)
        finally:
            self._comparing = was_comparing


def _is_like(value: Tensor, parameter: Tensor) -> bool:
    """Whether a state has its parameter's layout, or is one number. Other states may differ by rank."""
    return hasattr(value, "device_mesh") == hasattr(parameter, "device_mesh") or value.numel() == 1


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured; the host cannot read a digest then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _to_plain(value: Any) -> Any:
    """Return a hyper-parameter as a plain value. For a device tensor, whose read would wait: its kind."""
    if isinstance(value, list | tuple):
        return tuple([_to_plain(item) for item in value])
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.is_cpu and value.numel() == 1 else f"a tensor on {value.device.type}"
    if isinstance(value, bool | int | float | complex | str | None):
        return value
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of NumPy
        return value.item()
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text
