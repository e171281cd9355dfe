"""`SplitBatch`: a process whose batch is divided over its devices. `ReplicatedSplitBatch`: DDP around it."""

from __future__ import annotations

from contextlib import ExitStack
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import DataParallel, Module

from fabric.core.torch_internals import in_function_transform, shallow_copy
from fabric.core.traits import Traits
from fabric.strategies.layouts.layout import Whole
from fabric.strategies.layouts.parts import CallParts, gather_outputs
from fabric.strategies.layouts.replicate import Replicate
from fabric.utilities.apply_func import move_data_to_device
from fabric.utilities.compile import eager, is_compiled, recompile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Parameter

    from fabric.core.topology import Topology

_NOT_AVERAGED = "_ddp_params_and_buffers_to_ignore"
"""Where DDP looks for names of parameters that the user keeps out of it."""

ACCELERATORS = ("cpu", "cuda", "mps")
"""torch copies a model to several devices of one process for CUDA only; of mps there is one."""


class SplitBatch(Whole):
    """The forward's batch in one part for each device, outputs gathered on the first; else plain torch.

    Only `model(...)` is split. Other methods of the user's module run on it directly, with all rows. State
    dicts are those of the user's module.
    """

    traits = Traits(data_parallel=True, accelerators=ACCELERATORS)

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        """The devices of this process; the strategy sets them."""

    def wrap(self, module: Module, topology: Topology) -> Module:
        """The module that splits its batches; `module` itself where there is one device."""
        return split_module(module, self.devices)

    def unwrap(self, wrapped: Module) -> Module:
        """The user's module."""
        return unsplit(wrapped)


class ReplicatedSplitBatch(Replicate):
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

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        super().__init__(settings)
        self.devices: list[torch.device] = []
        """The devices of this process; the strategy sets them."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "devices": self.devices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.devices = state["devices"]

    def wrap(self, module: Module, topology: Topology) -> Module:
        """DDP around the splitting module. All ranks must call this."""
        split = split_module(module, self.devices)
        if split is not module and hasattr(module, _NOT_AVERAGED):
            setattr(split, _NOT_AVERAGED, [f"module.{name}" for name in getattr(module, _NOT_AVERAGED)])
        return super().wrap(split, topology)

    def unwrap(self, wrapped: Module) -> Module:
        """The user's module inside DDP."""
        return unsplit(super().unwrap(wrapped))


def split_module(module: Module, devices: list[torch.device]) -> Module:
    """`module` behind a forward that splits batches over `devices`; `module` itself for a single one."""
    if len(devices) < 2:
        return module
    if devices[0].type == "cpu":
        return HostSplit(module, len(devices))
    return DeviceSplit(module, devices)


def unsplit(wrapped: Module) -> Module:
    """The module that `split_module` was given, also behind torch.compile."""
    while is_compiled(wrapped):
        wrapped = wrapped._orig_mod  # type: ignore[assignment]
    return wrapped.module if isinstance(wrapped, _Split) else wrapped


class _Split(Module):
    """What stands around a user's `module` whose batches are split; it shows names as they are there."""

    module: Module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """The user's module's parameters under its own names, for error messages; none with recurse=False."""
        if recurse:
            yield from self.module.named_parameters(prefix, recurse, remove_duplicate)


class HostSplit(_Split):
    """A module whose forward runs in `count` replicas on the CPU, one after the other, on shared parameters.

    Two runs with one seed so draw the same numbers in each replica, and activation checkpoints draw them
    again; in return, replicas do not run at the same time.

    Args:
        module: The user's module. Replica 0 is this very module; the others are shallow copies with their own
            buffers, whose changes are dropped, as are attributes that their forward sets.
        count: How many parts a batch has at most.
    """

    def __init__(self, module: Module, count: int) -> None:
        super().__init__()
        self.module = module
        self.count = count
        self.training = module.training

    # Replicas that are made anew in each call would be compiled anew: torch.compile leaves this to Python.
    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The gathered outputs of the replicas.

        Raises:
            ConfigurationError: The arguments cannot be split (see `CallParts`).
            UsageError: The outputs cannot be joined (see `gather_outputs`).
        """
        # Under vmap, rows are no dimension that is seen here.
        parts = CallParts(args, kwargs, 1 if in_function_transform() else self.count)
        if len(parts) == 1:
            return gather_outputs([self.module(*args, **kwargs)])
        replicas = [self.module, *[shallow_replica(self.module) for _ in range(1, len(parts))]]
        outputs = []
        for number, (replica, (own_args, own_kwargs)) in enumerate(zip(replicas, parts, strict=True)):
            try:
                outputs.append(replica(*own_args, **own_kwargs))
            except BaseException as error:
                if hasattr(error, "add_note"):  # Python 3.11
                    who = f"raised by replica {number} of {len(parts)}"
                    error.add_note(f"{who} (strategy dp or ddp2 splits the batch over replicas)")
                raise
        return gather_outputs(outputs)


class DeviceSplit(_Split, DataParallel[Module]):
    """torch's DataParallel with any tree in and out, and with the caller's autocast dtype in its threads.

    Args:
        module: The user's module, on the first device.
        devices: One for each replica.
    """

    def __init__(self, module: Module, devices: list[torch.device]) -> None:
        super().__init__(module, device_ids=devices)
        self.training = module.training

    forward = eager(DataParallel.forward)

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Any) -> Any:
        """The arguments of each replica, on its device."""
        parts = CallParts(inputs, kwargs or {}, len(device_ids))
        kind = self.src_device_obj.type
        moved = [
            move_data_to_device(part, torch.device(kind, index))
            for part, index in zip(parts, device_ids[: len(parts)], strict=True)
        ]
        return [args for args, _ in moved], [kwargs for _, kwargs in moved]

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Run the replicas at the same time, each in the caller's grad mode and autocast."""
        resumed = [_Resumed(replica, self.src_device_obj.type) for replica in replicas]
        outputs: list[Any] = super().parallel_apply(resumed, inputs, kwargs)  # type: ignore[arg-type]
        return outputs

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """One output, on the first device."""
        return gather_outputs(outputs)


class _Resumed:
    """A replica that runs, in any thread, in the grad mode and autocast of the thread that makes this object.

    Args:
        replica: What runs.
        device_type: Where; autocast has a state for each kind of device.
    """

    def __init__(self, replica: Module, device_type: str) -> None:
        self.replica = replica
        self.inference, self.grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        enabled = [kind for kind in {"cpu", device_type} if torch.is_autocast_enabled(kind)]
        self.autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in enabled]
        self.cache = torch.is_autocast_cache_enabled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.cache))
            return self.replica(*args, **kwargs)


def shallow_replica(module: Module) -> Module:
    """A copy of a module and all in it: the same parameters, clones of the buffers, fields of its own.

    What the fields hold (hooks, plain attributes) and scripted parts stay the original's.
    """
    originals = list(module.modules())
    replicas = {id(m): _copy(m) for m in originals if not is_compiled(m)}
    for m in originals:
        if is_compiled(m):
            replicas[id(m)] = recompile(replicas[id(m._orig_mod)], like=m)
    buffers: dict[int, torch.Tensor] = {}
    for m in originals:
        replica = replicas[id(m)]
        if replica is not m and not is_compiled(m):
            _fill(replica, m, replicas, buffers)
    return replicas[id(module)]


def _copy(module: Module) -> Module:
    # Torch's own hook for this: an RNN copies its list of weights there.
    shared = isinstance(module, torch.jit.ScriptModule)
    return module if shared else shallow_copy(module)


def _fill(
    replica: Module, original: Module, replicas: dict[int, Module], buffers: dict[int, torch.Tensor]
) -> None:
    fields = replica.__dict__
    fields["_parameters"] = dict(original._parameters)
    fields["_modules"] = {
        name: None if child is None else replicas[id(child)] for name, child in original._modules.items()
    }
    for buffer in original._buffers.values():
        if buffer is not None and id(buffer) not in buffers:
            buffers[id(buffer)] = buffer.clone()
    fields["_buffers"] = {
        name: None if buffer is None else buffers[id(buffer)] for name, buffer in original._buffers.items()
    }
    if fields.get("_compiled_call_impl") is not None:  # module.compile(): bound to the original
        fields["_compiled_call_impl"] = None
    for name, value in list(fields.items()):
        if isinstance(value, MethodType) and id(value.__self__) in replicas:
            fields[name] = MethodType(value.__func__, replicas[id(value.__self__)])
