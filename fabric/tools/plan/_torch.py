"""Private names of torch that `fabric plan` uses; `tests/core/test_torch_internals.py` tests each."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.futures import Future
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "group_norm", "layer_norm", "log", "log10", "log1p",
    "log2", "logsumexp", "native_layer_norm", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "reciprocal", "rsqrt", "sinh", "softplus", "tan",
)  # fmt: skip
FP32_OUT = ("softmax.int", "log_softmax.int", "cumsum", "sum", "sum.dim_IntList")
"""Operations that autocast of accelerators runs in float32, and that of the CPU does not: with float32
inputs; with a float32 output. Source: aten/src/ATen/autocast_mode.h, AT_FORALL_FP32.
"""


def group_names() -> Any:
    """Return the names of process groups by group."""
    return distributed_c10d._world.pg_names


def finished(result: Any) -> Any:
    """Return a completed request of torch.distributed."""
    future: Any = Future()
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)


def around_propagation(context: Any) -> None:
    """Patch torch for the rest of this process: run DTensor's shape propagation inside of `context()`.

    It computes shapes by operations on whole tensors, which no rank stores.
    """
    compute = ShardingPropagator._propagate_tensor_meta_non_cached

    def computed(*args: Any, **kwargs: Any) -> Any:
        with context():
            return compute(*args, **kwargs)

    vars_of: Any = ShardingPropagator
    vars_of._propagate_tensor_meta_non_cached = computed


def behave_as_accelerator() -> Any:
    """Patch torch for the rest of this process: on the CPU, optimizers choose the implementation that they
    choose on accelerators (foreach), and autocast the dtypes. Returns objects that must be kept alive.
    """
    known = _foreach_utils._get_foreach_kernels_supported_devices

    def devices() -> list[str]:
        return ["cpu", *known()]

    for module in (_foreach_utils, optimizers):
        vars(module)["_get_foreach_kernels_supported_devices"] = devices
    optimizers._foreach_supported_types.append(FakeTensor)
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    for name in (*FP32, *FP32_OUT):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            library.impl(name, _in_float32(name, name in FP32_OUT))
    return library


def _in_float32(name: str, out: bool) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        low = [a for a in args if isinstance(a, torch.Tensor) and a.dtype in (torch.bfloat16, torch.float16)]
        with torch.autocast("cpu", enabled=False):
            if low and out and kwargs.get("dtype") is None and (overload != "int" or len(args) < 3):
                return op(*args, **{**kwargs, "dtype": torch.float32})
            if low and not out:
                args = tuple([a.float() if any([a is one for one in low]) else a for a in args])
            return op(*args, **kwargs)

    return run
