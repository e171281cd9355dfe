"""`BitsandbytesPrecision`: linear layers whose weights are stored, or multiplied, in 4 or 8 bits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from fabric.core.errors import ConfigurationError
from fabric.core.extras import import_package
from fabric.core.registry import did_you_mean
from fabric.integrations.linears import check_settings, replace_linears
from fabric.precision.true import TruePrecision

if TYPE_CHECKING:
    from torch.nn import Module

Mode = Literal["nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"]


class BitsandbytesPrecision(TruePrecision):
    """Weights of linear layers in 4 or 8 bits; everything else in `dtype`.

    In the modes "nf4", "fp4", their double quantised forms ("-dq") and "int8" the weights are fixed. Trained
    are other parameters: adapters (to be listed in `ignore_modules`), norms, biases. "int8-training" keeps
    weights in `dtype`, trains them, and multiplies in 8 bits.

    Each rank quantises rank zero's weights. Checkpoints hold the quantised weights; plain ones are quantised
    while they are loaded. Create optimizers after `fabric.setup_module(model)`, from parameters that require
    gradients then. A weight that is shared with another kind of module (an embedding) is an error.

    Args:
        mode: One of the modes above.
        dtype: Dtype of everything else, and of products; None: bfloat16, or float16 on GPUs without it.
        ignore_modules: Names of modules whose linear layers are left unchanged.

    Raises:
        ConfigurationError: Unknown `mode`.
        ArgumentTypeError: `dtype` is not one of 16 or 32 bits, or `ignore_modules` is not a set of names.
        MissingExtraError: bitsandbytes is not installed.
    """

    def __init__(
        self, mode: Mode, dtype: torch.dtype | None = None, ignore_modules: set[str] | None = None
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigurationError(
                f"BitsandbytesPrecision({mode!r}) is not a mode.{did_you_mean(mode, get_args(Mode))} "
                f"Write one of {', '.join(map(repr, get_args(Mode)))}."
            )
        self._feature = f"BitsandbytesPrecision({mode!r})"
        if dtype is None:
            old = torch.cuda.is_available() and not torch.cuda.is_bf16_supported()
            dtype = torch.float16 if old else torch.bfloat16
        self.mode, self.ignored = mode, check_settings(self._feature, dtype, ignore_modules or ())
        import_package("bitsandbytes", self._feature, "bitsandbytes", least="0.49")
        super().__init__(dtype)
        self.replaces_parameters = mode != "int8-training"
        self.precision = f"bitsandbytes-{mode}"

    def convert_module(self, module: Module) -> Module:
        """Replace the linear layers of `module` and cast the rest to `dtype`. All ranks must call this."""
        from fabric.integrations.bitsandbytes import layers

        if self.mode.startswith("int8"):
            make: Any = partial(layers.eight_bits, trained=self.mode == "int8-training")
        else:
            kind, _, double_quant = self.mode.partition("-")
            make = partial(layers.four_bits, kind=kind, double_quant=bool(double_quant), compute=self.dtype)
        module = super().convert_module(module)
        replace_linears(module, make, self._feature, self.ignored, self.replaces_parameters)
        return module
