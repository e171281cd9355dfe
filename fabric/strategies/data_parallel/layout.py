"""`SplitBatch`: the batch of a process is split over its devices. `ReplicatedSplitBatch`: DDP around it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import DataParallel, Module

from fabric.core.compile import eager, uncompiled
from fabric.core.errors import UsageError
from fabric.core.traits import Traits
from fabric.core.tree import flatten, unflatten
from fabric.strategies.data_parallel.parts import MicrobatchArgs
from fabric.strategies.ddp._torch import NOT_AVERAGED, leave_out_of_ddp
from fabric.strategies.ddp.replicate import Replicate
from fabric.strategies.layout import Layout
from fabric.utilities.apply_func import move_data_to_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Parameter

    from fabric.core.topology import Topology

ACCELERATORS = ("cpu", "cuda", "mps")
"""Supported accelerators: torch replicates a model over several devices for CUDA only."""


class SplitBatch(Layout):
    """Splits the batch of a forward over the devices, and gathers outputs on the first one; else plain torch.

    Only `model(...)` is split. Other methods of the user's module run on it directly, with all rows. State
    dicts are those of the user's module.
    """

    traits = Traits(data_parallel=True, accelerators=ACCELERATORS)

    def wrap(self, module: Module, topology: Topology) -> Module:
        """Return the module with batches split over devices; `module` itself for a single device or
        the CPU.
        """
        split: Module = module
        if len(self.devices) > 1 and self.devices[0].type != "cpu":
            split = DeviceSplit(module, self.devices)
            leave_out_of_ddp(split, [f"module.{name}" for name in getattr(module, NOT_AVERAGED, [])])
        return super().wrap(split, topology)

    def unwrap(self, wrapped: Module) -> Module:
        """Return the user's module."""
        inner: Module = uncompiled(super().unwrap(wrapped))
        return inner.module if isinstance(inner, DeviceSplit) else inner


class ReplicatedSplitBatch(SplitBatch, Replicate):
    """DDP between processes around a module that splits the process's batch over its devices.

    Args:
        settings: Keywords of `torch.nn.parallel.DistributedDataParallel`.
    """

    traits = Traits(
        needs_launch=True,
        data_parallel=True,
        one_process_per_node=True,
        accelerators=ACCELERATORS,
    )


class DeviceSplit(DataParallel[Module]):
    """torch's DataParallel with trees as arguments and outputs, and the caller's autocast dtype in its
    threads.

    Args:
        module: The user's module, on the first device.
        devices: Device of each replica.
    """

    def __init__(self, module: Module, devices: list[torch.device]) -> None:
        super().__init__(module, device_ids=devices)
        self.training = module.training

    # Not compiled: each call creates new replicas, which would be compiled again.
    forward = eager(DataParallel.forward)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield the user's parameters with the user's names, for errors; none with recurse=False."""
        if recurse:
            yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> Any:
        """Return the arguments of each replica, on its device.

        Raises:
            ConfigurationError: The arguments cannot be split (see `MicrobatchArgs`).
        """
        parts = MicrobatchArgs(inputs, kwargs or {}, len(device_ids))
        kind = self.src_device_obj.type
        moved = [
            move_data_to_device(part, torch.device(kind, index))
            for part, index in zip(parts, device_ids[: len(parts)], strict=True)
        ]
        return [args for args, _ in moved], [kwargs for _, kwargs in moved]

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Run the replicas in parallel, each in the caller's grad mode and autocast."""
        kind = self.src_device_obj.type
        autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        calls: Any = [partial(_under_autocast, replica, autocast) for replica in replicas]
        outputs: list[Any] = super().parallel_apply(calls, inputs, kwargs)
        return outputs

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Return one output on the first device: tensors joined along dim 0, 0-dim tensors as a vector.

        Raises:
            UsageError: The outputs are no trees of tensors (and Nones) of one structure.
        """
        flat = [flatten(output) for output in outputs]
        leaves = [leaf for own, _ in flat for leaf in own]
        if any([spec != flat[0][1] for _, spec in flat]) or any(
            [not isinstance(leaf, torch.Tensor | None) for leaf in leaves]
        ):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            raise UsageError(
                f"forward returned {kinds} on the replicas of dp or ddp2, which cannot be joined. Return "
                "tensors, in the same containers for any number of rows: they are joined along dim 0."
            )
        columns = zip(*[own for own, _ in flat], strict=True)
        joined = [super(DeviceSplit, self).gather(column, output_device) for column in columns]
        return unflatten(joined, flat[0][1], outputs[0])


def _under_autocast(replica: Module, autocast: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """Run a replica's forward in a thread, where torch would use the default autocast dtype."""
    with torch.autocast(*autocast):
        return replica(*args, **kwargs)
