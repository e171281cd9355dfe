"""`TorchAOPrecision`: linear layers that multiply in float8, or whose weights are stored in int8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from fabric.core.errors import ConfigurationError
from fabric.core.extras import import_package
from fabric.core.registry import did_you_mean
from fabric.integrations.linears import check_settings, replace_linears
from fabric.precision.true import TruePrecision
from fabric.strategies.ddp._torch import leave_out_of_ddp

if TYPE_CHECKING:
    from torch.nn import Linear, Module

Mode = Literal["float8", "int8-weights"]


class TorchAOPrecision(TruePrecision):
    """Linear layers of torchao. `precision="float8"` is this with its defaults.

    In the mode "float8" the parameters are unchanged and trained; each product scales its factors to float8.
    GPUs without float8 (before compute capability 8.9) and CPUs compute the same numbers by emulation,
    slowly. It runs under every strategy. In the mode "int8-weights" weights are stored in int8, with a scale
    per row, and are fixed. Create optimizers after `fabric.setup_module(model)`, from parameters that require
    gradients then. It does not run under strategies that shard parameters.

    Args:
        mode: One of the modes above.
        dtype: Dtype of everything else: torch.bfloat16, for example.
        ignore_modules: Names of modules whose linear layers are left unchanged, such as the last one.
        config: In the mode "float8" a `torchao.float8.Float8LinearConfig`; None: one scale per tensor.

    Raises:
        ConfigurationError: Unknown `mode`, or a `config` for "int8-weights".
        ArgumentTypeError: `dtype` is not one of 16 or 32 bits, or `ignore_modules` is not a set of names.
        MissingExtraError: torchao is not installed.
    """

    def __init__(
        self,
        mode: Mode = "float8",
        dtype: torch.dtype = torch.float32,
        ignore_modules: set[str] | None = None,
        config: Any = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigurationError(
                f"TorchAOPrecision({mode!r}) is not a mode.{did_you_mean(mode, get_args(Mode))} "
                f"Write one of {', '.join(map(repr, get_args(Mode)))}."
            )
        if config is not None and mode != "float8":
            raise ConfigurationError(
                f"TorchAOPrecision({mode!r}, config=...): only the mode 'float8' has a config. Leave it out."
            )
        self._feature = f"TorchAOPrecision({mode!r})"
        self.mode, self.config = mode, config
        self.ignored = check_settings(self._feature, dtype, ignore_modules or ())
        import_package("torchao", self._feature, "torchao", least="0.18")
        super().__init__(dtype)
        self.precision = mode
        self.replaces_parameters = mode == "int8-weights"

    def convert_module(self, module: Module) -> Module:
        """Replace the linear layers of `module` and cast the rest to `dtype`. All ranks must call this."""
        module = super().convert_module(module)
        make = self._float8 if self.mode == "float8" else _int8
        replace_linears(module, make, self._feature, self.ignored, self.replaces_parameters)
        if self.replaces_parameters:
            leave_out_of_ddp(
                module, [name for name, p in module.named_parameters() if type(p.data) is not Tensor]
            )
        return module

    def _float8(self, layer: Linear) -> Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = self.config or Float8LinearConfig(emulate=not _has_float8(layer.weight.device))
        made: Module = convert_to_float8_training(layer, config=config)
        return made


def _int8(layer: Linear) -> Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer.weight.requires_grad_(False)
    quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
    return layer


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
