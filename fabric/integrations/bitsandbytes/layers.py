"""bitsandbytes' layers that load their own checkpoints and plain weights. Imported on first use."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import bitsandbytes.nn as bnb
from bitsandbytes import matmul

from fabric.checkpoint.portable import read_stored

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.nn import Linear


class FourBits(bnb.Linear4bit):
    """Linear layer with a weight in 4 bits. Loaded plain weights are cast to `plain` before quantisation."""

    plain: torch.dtype

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state.get(f"{prefix}weight")
        weight: Any = self.weight
        keys = [key for key in state if key.startswith(f"{prefix}weight.")]
        made = weight
        if saved is not None and saved.is_floating_point():
            saved = read_stored(saved).to(self.plain)
            made = _four(saved, weight.quant_type, weight.compress_statistics).to(weight.device)
        elif saved is not None and keys:
            stats = {key.removeprefix(f"{prefix}weight."): read_stored(state[key]) for key in keys}
            made = bnb.Params4bit.from_prequantized(read_stored(saved), stats, device=weight.device)
        weight.data, weight.quant_state = made.data, made.quant_state  # in place: layers may share it
        if saved is not None:
            state[f"{prefix}weight"] = weight.data
        super()._load_from_state_dict(state, prefix, *rest)
        unexpected: list[str] = rest[3]
        unexpected[:] = [key for key in unexpected if key not in keys]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        return _by_rows(super().forward, x)


class EightBits(bnb.Linear8bitLt):
    """Linear layer with a weight in 8 bits. Loaded plain weights are cast to `plain` before quantisation."""

    plain: torch.dtype

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state.get(f"{prefix}weight")
        if saved is not None and saved.is_floating_point():
            made = _eight(read_stored(saved).to(self.plain)).to(self.weight.device)
            state.update({f"{prefix}weight": made.data, f"{prefix}SCB": made.SCB})
        super()._load_from_state_dict(state, prefix, *rest)

    def init_8bit_state(self) -> None:
        """Prepare a forward. Unlike the base class it keeps the weight, which layers may share."""
        self.state.CB, self.state.SCB = self.weight.data, self.weight.SCB

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.weight.CB, self.weight.SCB = self.weight.data, self.weight.SCB.to(self.weight.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        return _by_rows(super().forward, x)


class TrainedEightBits(bnb.Linear8bitLt):
    """Trainable linear layer that multiplies in 8 bits by its current weight, also in evaluation.

    bitsandbytes' own layer evaluates with the weight of the last training forward: a later step, or a loaded
    checkpoint, would have no effect. Its kernel does not exist on a CPU.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
        self.state.is_training, self.state.CB = True, None
        return _by_rows(partial(matmul, B=self.weight, bias=self.bias, state=self.state), x)


def four_bits(layer: Linear, kind: str, double_quant: bool, compute: torch.dtype) -> Any:
    """Return the layer with its weight in 4 bits."""
    made = _like(layer, FourBits, quant_type=kind, compress_statistics=double_quant, compute_dtype=compute)
    made.weight = _four(layer.weight.data, kind, double_quant).to(layer.weight.device)
    # Otherwise an evaluation packs weights for a kernel without gradients, and training fails after it.
    made.support_avx512bf16_for_cpu = False
    return made


def eight_bits(layer: Linear, trained: bool) -> Any:
    """Return the layer with its weight in 8 bits; if `trained`, with the same weight and 8-bit products."""
    made = _like(layer, TrainedEightBits if trained else EightBits, has_fp16_weights=trained, threshold=6.0)
    made.weight = layer.weight if trained else _eight(layer.weight.data).to(layer.weight.device)
    return made


def _by_rows(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    # All products of bitsandbytes support two dimensions, also in backward; only some support others.
    out = product(x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


def _like(layer: Linear, kind: Any, **settings: Any) -> Any:
    made = kind(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta", **settings)
    made.bias, made.plain = layer.bias, layer.weight.dtype
    return made


def _four(weight: torch.Tensor, kind: str, double_quant: bool) -> Any:
    return bnb.Params4bit(weight, requires_grad=False, quant_type=kind, compress_statistics=double_quant)


def _eight(weight: torch.Tensor) -> Any:
    return bnb.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
