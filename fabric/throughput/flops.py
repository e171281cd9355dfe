"""Floating-point operations of a model, and peak rates of devices. Called by `throughput`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

import torch

from fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

_BF16, _F16, _F32, _F64, _I8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8
_TF32 = "tf32"
_Peaks: TypeAlias = "dict[torch.dtype | str, float]"

# Dense peaks in TFLOP/s (int8: TOP/s), matrix units with 32-bit accumulation where the device has them; data
# sheets often print twice that, "with sparsity". Where two names match, the first counts.
_A100: _Peaks = {_F64: 19.5, _F32: 19.5, _TF32: 156, _F16: 312, _BF16: 312, _I8: 624}
_H100_SXM: _Peaks = {_F64: 67, _F32: 67, _TF32: 494.7, _F16: 989.4, _BF16: 989.4, _I8: 1978.9}
_H100_NVL: _Peaks = {_F64: 60, _F32: 60, _TF32: 417.5, _F16: 835.5, _BF16: 835.5, _I8: 1670.5}
_PEAKS: dict[str, _Peaks] = {
    "b200": {_F64: 37, _F32: 75, _TF32: 1125, _F16: 2250, _BF16: 2250, _I8: 4500},
    "h200 nvl": _H100_NVL,
    "gh200": _H100_SXM,
    "h200": _H100_SXM,
    "h100 nvl": _H100_NVL,
    "h100 pcie": {_F64: 51.2, _F32: 51.2, _TF32: 378, _F16: 756, _BF16: 756, _I8: 1513},
    "h100": _H100_SXM,
    "a100": _A100,
    "a800": _A100,
    "a40": {_F32: 37.4, _TF32: 74.8, _F16: 149.7, _BF16: 149.7, _I8: 299.3},
    "a30": {_F64: 10.3, _F32: 10.3, _TF32: 82, _F16: 165, _BF16: 165, _I8: 330},
    "a10g": {_F32: 31.2, _TF32: 35, _F16: 70, _BF16: 70, _I8: 140},
    "a10": {_F32: 31.2, _TF32: 62.5, _F16: 125, _BF16: 125, _I8: 250},
    "a6000": {_F32: 38.7, _TF32: 77.4, _F16: 154.8, _BF16: 154.8, _I8: 309.7},
    "l40s": {_F32: 91.6, _TF32: 183, _F16: 362, _BF16: 362, _I8: 733},
    "l40": {_F32: 90.5, _TF32: 90.5, _F16: 181, _BF16: 181, _I8: 362},
    "l4": {_F32: 30.3, _TF32: 60, _F16: 121, _BF16: 121, _I8: 242.5},
    "rtx 4090": {_F32: 82.6, _TF32: 82.6, _F16: 165.2, _BF16: 165.2, _I8: 660.6},
    "rtx 4080 super": {_F32: 52.2, _TF32: 52.2, _F16: 104.4, _BF16: 104.4, _I8: 417.6},
    "rtx 4080": {_F32: 48.7, _TF32: 48.7, _F16: 97.5, _BF16: 97.5, _I8: 389.9},
    "rtx 3090": {_F32: 35.6, _TF32: 35.6, _F16: 71, _BF16: 71, _I8: 284},
    "rtx 3080": {_F32: 29.8, _TF32: 29.8, _F16: 59.5, _BF16: 59.5, _I8: 238},
    "v100-pcie": {_F64: 7, _F32: 14, _F16: 112},
    "v100": {_F64: 7.8, _F32: 15.7, _F16: 125},
    "t4": {_F32: 8.1, _F16: 65, _I8: 130},
    "mi300x": {_F64: 163.4, _F32: 163.4, _TF32: 653.7, _F16: 1307.4, _BF16: 1307.4, _I8: 2614.9},
}


def measure_flops(
    model: Module,
    forward_fn: Callable[[], Tensor],
    loss_fn: Callable[[Tensor], Tensor] | None = None,
) -> int:
    """Return the floating-point operations of a call of `forward_fn`, and of a backward pass with `loss_fn`.

    Matrix products, convolutions and attention are counted; a multiply-add counts as two. On the meta device
    it needs no memory: build the model and its input under `torch.device("meta")`.

    Args:
        model: The module that `forward_fn` runs; its gradients are not changed.
        forward_fn: Runs the forward pass and returns its output.
        loss_fn: Returns a scalar of the output, for the backward pass; None: no backward pass.

    Source: `torch.utils.flop_counter`.
    """
    from torch.utils.flop_counter import FlopCounterMode

    gradients = [parameter.grad for parameter in model.parameters()]
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            for parameter in model.parameters():
                parameter.grad = None
            loss_fn(output).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return int(counter.get_total_flops())


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return the published dense peak of `device` for `dtype` in FLOP/s; None (GPUs: and a warning): unknown.

    Args:
        device: A CUDA or ROCm device; others have no published peak.
        dtype: A dtype or its name, or "tf32". float32 means TF32 if torch may use it.

    Sources: NVIDIA's data sheets (https://www.nvidia.com/en-us/data-center/ , per product); for GeForce cards
    the appendices of the Ampere GA102 and Ada architecture papers; and AMD's data sheets
    (https://www.amd.com/en/products/accelerators).
    """
    if device.type != "cuda":
        return None
    return _peak_of(torch.cuda.get_device_name(device), dtype)


def _peak_of(device_name: str, dtype: torch.dtype | str) -> int | None:
    name = device_name.lower()
    # A suffix denotes another product: "RTX 3090 Ti", "RTX 4080 Laptop GPU".
    matches = [
        peaks for key, peaks in _PEAKS.items() if re.search(rf"\b{key}\b(?! (ti|super|laptop|d)\b)", name)
    ]
    peaks = matches[0] if matches else {}
    if isinstance(dtype, str) and dtype != _TF32:
        dtype = getattr(torch, dtype)
    if dtype is _F32 and _TF32 in peaks and torch.get_float32_matmul_precision() != "highest":
        dtype = _TF32
    if dtype not in peaks:
        rank_zero_warn(f"The peak FLOP/s of {device_name!r} with {dtype} is unknown. Pass available_flops=.")
        return None
    return int(peaks[dtype] * 1e12)
