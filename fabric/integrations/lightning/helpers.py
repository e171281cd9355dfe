"""Lightning Fabric's private helpers, with the same arguments and results, implemented with ours."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from inspect import getmembers, isclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from fabric.accelerators.accelerator import Accelerator
from fabric.accelerators.cuda import CUDAAccelerator
from fabric.accelerators.generic import TorchAccelerator
from fabric.accelerators.mps import MPSAccelerator
from fabric.checkpoint.torch_io import TorchCheckpointIO
from fabric.core.compile import is_compiled, uncompiled
from fabric.core.errors import ConfigurationError
from fabric.data.order import set_epoch_of
from fabric.utilities.cloud_io import local_path
from fabric.utilities.seed import collect_rng_states, host_states, set_rng_states

if TYPE_CHECKING:
    from fabric.core.registry import Registry
    from fabric.core.types import PathLike


def call_register_accelerators(registry: Registry, base_module: str) -> None:
    """Call `register_accelerators(registry)` of each accelerator class of `base_module`."""
    for _, kind in getmembers(import_module(base_module), isclass):
        # The name of `TorchAccelerator` is that of another class, where torch was built for CUDA.
        if issubclass(kind, Accelerator) and kind not in (Accelerator, TorchAccelerator):
            kind.register_accelerators(registry)


def find_free_network_port() -> int:
    """Return a TCP port of this machine that is free at this moment."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _parse_gpu_ids(gpus: Any, include_cuda: bool = False, include_mps: bool = False) -> list[int] | None:
    """Return the indices of the GPUs that `gpus` names; None: it names none.

    Raises:
        ConfigurationError: This machine does not have them; or no kind of GPU is included.
    """
    kinds: list[Any] = [CUDAAccelerator] * include_cuda + [MPSAccelerator] * include_mps
    if not kinds:
        raise ConfigurationError(
            f"_parse_gpu_ids({gpus!r}) looks for no kind of GPU. Write include_cuda=True or include_mps=True."
        )
    if gpus in (0, "0") or gpus == []:
        return None
    found: list[int] = next((kind for kind in kinds if kind.is_available()), kinds[0]).parse_devices(gpus)
    return found


# tensors and ranks


def _convert_fp_tensor(tensor: Tensor, dst_type: Any) -> Tensor:
    return tensor.to(dst_type) if tensor.is_floating_point() else tensor


def _distributed_is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _get_default_process_group_backend_for_device(device: torch.device) -> str:
    return str(dist.Backend.default_device_backend_map.get(device.type, "gloo"))


def _sync_ddp_if_available(result: Tensor, group: Any = None, reduce_op: Any = None) -> Tensor:
    """Reduce `result` over ranks in place and return it; unchanged without a process group. All ranks must
    call this.

    Args:
        result: A tensor of equal shape on all ranks.
        group: A process group; None: all ranks.
        reduce_op: "mean" or "avg", another name of torch's ReduceOp, or one itself; None: the sum.
    """
    if not _distributed_is_initialized():
        return result
    name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    mean = name in ("mean", "avg") or name == dist.ReduceOp.AVG
    op = getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) and not mean else name
    dist.all_reduce(result, op=dist.ReduceOp.SUM if mean or op is None else op, group=group)
    if mean and not result.is_floating_point():
        return result.copy_(result / dist.get_world_size(group))
    return result.div_(dist.get_world_size(group)) if mean else result


def _gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensor of each rank in rank order, of any shapes. All ranks must call this."""
    if not _distributed_is_initialized():
        return [result]
    result, world = result.contiguous(), dist.get_world_size(group)
    shapes: list[Any] = [None] * world
    dist.all_gather_object(shapes, result.shape, group=group)
    largest = max(shape.numel() for shape in shapes)
    padded = result.new_zeros(largest)
    padded[: result.numel()] = result.detach().view(-1)
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded, group=group)
    return [flat[: shape.numel()].view(shape) for flat, shape in zip(gathered, shapes, strict=True)]


# random states and loaders


def _collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
    return collect_rng_states() if include_cuda else host_states()


def _set_rng_states(rng_state_dict: dict[str, Any]) -> None:
    set_rng_states(rng_state_dict)


def _set_sampler_epoch(dataloader: Any, epoch: int) -> None:
    """Set the epoch of a loader that was set up, or of the samplers of another loader."""
    if callable(getattr(dataloader, "set_epoch", None)):
        dataloader.set_epoch(epoch)
        return
    set_epoch_of(getattr(dataloader, "sampler", None), epoch)
    set_epoch_of(getattr(dataloader, "batch_sampler", None), epoch)


# files


def _is_local_file_protocol(path: PathLike) -> bool:
    return local_path(path) is not None


def _is_dir(fs: Any, path: PathLike, strict: bool = False) -> bool:
    """Whether `path` is a directory of an fsspec file system `fs`. On object stores, which have none,
    everything but files counts unless `strict`.
    """
    local = "file" in fs.protocol or "memory" in fs.protocol
    return bool(fs.isdir(str(path)) if strict or local else not fs.isfile(str(path)))


def _atomic_save(checkpoint: dict[str, Any], filepath: PathLike) -> None:
    """Write a checkpoint atomically."""
    TorchCheckpointIO().save_checkpoint(checkpoint, filepath)


def _load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Load a checkpoint from a path, a URL or an open file; arguments as in `torch.load`."""
    if hasattr(path_or_url, "read"):
        return torch.load(path_or_url, map_location, weights_only=weights_only is not False)
    return TorchCheckpointIO().load_checkpoint(path_or_url, map_location, weights_only)


class _NotYetLoadedTensor:
    """For `isinstance`, which is False: `_lazy_load` returns tensors that are read from the file on use."""


def _lazy_load(filename: PathLike) -> Any:
    """Load a file whose tensors are read on use. Objects that run code are an error."""
    return TorchCheckpointIO(verify=False).load_checkpoint(filename)


# settings of loggers


def _convert_params(params: dict[str, Any] | Namespace | None) -> dict[str, Any]:
    return vars(params) if isinstance(params, Namespace) else {} if params is None else params


def _flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Return `params` by names such as `optimizer/lr`, with unchanged values."""
    found: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{parent_key}{delimiter}{key}" if parent_key else str(key)
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        elif isinstance(value, Namespace):
            value = vars(value)
        found.update(_flatten_dict(value, delimiter, name) if isinstance(value, Mapping) else {name: value})
    return found


def _sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return `params` with numpy scalars as Python's, and all but numbers, strings and tensors as text."""
    plain = {
        key: value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value
        for key, value in params.items()
    }
    kept = (bool, int, float, str, Tensor)
    return {key: value if isinstance(value, kept) else str(value) for key, value in plain.items()}


def _add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics


# plugins and wrappers


def _load_external_callbacks(group: str) -> list[Any]:
    """Return the callbacks of all entry points of this group; each is a function that returns one or more."""
    found: list[Any] = []
    for point in entry_points(group=group):
        made = point.load()()
        found += list(made) if isinstance(made, list | tuple) else [made]
    return found


def _unwrap_compiled(obj: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the module without `torch.compile`, and {}; for another object itself, and None.

    torch does not keep the settings: use `fabric.core.compile.recompile(module, like=obj)`.
    """
    return (uncompiled(obj), {}) if is_compiled(obj) else (obj, None)
