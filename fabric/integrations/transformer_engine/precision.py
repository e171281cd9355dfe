"""`TransformerEnginePrecision`: linear layers of NVIDIA's Transformer Engine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabric.core.errors import ConfigurationError
from fabric.core.extras import import_package
from fabric.integrations.linears import replace_linears
from fabric.precision.precision import DefaultDtype
from fabric.precision.true import TruePrecision

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DTYPES = (torch.float16, torch.bfloat16)


class TransformerEnginePrecision(TruePrecision):
    """Forward passes under Transformer Engine's float8 autocast, with its layers in place of torch's.

    Written against its documentation (2.x) and never run by us: it needs CUDA, and GPUs with float8.

    Args:
        weights_dtype: Dtype of parameters: torch.bfloat16 or torch.float16.
        recipe: A recipe of `transformer_engine.common.recipe`, or keyword arguments of `DelayedScaling`;
            None: its defaults.
        replace_layers: Whether each `nn.Linear` whose sizes divide by 16 is replaced; None: if the model has
            no layers of Transformer Engine.
        fallback_compute_dtype: Dtype of everything that is not computed in float8; None: `weights_dtype`.

    Raises:
        ConfigurationError: `weights_dtype` is neither float16 nor bfloat16.
        MissingExtraError: transformer_engine is not installed.
    """

    def __init__(
        self,
        *,
        weights_dtype: torch.dtype,
        recipe: Mapping[str, Any] | Any | None = None,
        replace_layers: bool | None = None,
        fallback_compute_dtype: torch.dtype | None = None,
    ) -> None:
        if weights_dtype not in _DTYPES:
            raise ConfigurationError(
                f"TransformerEnginePrecision(weights_dtype={weights_dtype}) needs torch.bfloat16 or "
                "torch.float16."
            )
        self._feature = "TransformerEnginePrecision"
        import_package(
            "transformer_engine.pytorch", self._feature, "transformer-engine", "transformer-engine", "2.0"
        )
        super().__init__(weights_dtype)
        self.recipe, self.replace_layers = recipe, replace_layers
        self.compute = fallback_compute_dtype or weights_dtype
        self.precision = "transformer-engine" + "-float16" * (weights_dtype is torch.float16)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Replace the linear layers of `module` and cast it to `weights_dtype`. All ranks must call this.

        Raises:
            ConfigurationError: `replace_layers=True`, and the model has layers of Transformer Engine.
        """
        import transformer_engine.pytorch as te

        kinds = (te.Linear, te.LayerNorm)
        has_layers = any([isinstance(part, kinds) for part in module.modules()])
        if has_layers and self.replace_layers:
            raise ConfigurationError(
                f"{self._feature}(replace_layers=True): {type(module).__name__} has layers of Transformer "
                "Engine already. Leave replace_layers out."
            )
        if self.replace_layers is not False and not has_layers:
            replace_linears(module, self._linear, self._feature)
        return super().convert_module(module)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Context in which Transformer Engine multiplies in float8, and torch in the compute dtype."""
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        recipe = DelayedScaling(**self.recipe) if isinstance(self.recipe, dict) else self.recipe
        autocast = torch.autocast("cuda", dtype=self.compute)
        with DefaultDtype(self.dtype), autocast, te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            yield

    def _linear(self, layer: nn.Linear) -> Any:
        import transformer_engine.pytorch as te

        if layer.in_features % 16 or layer.out_features % 16:
            return layer
        made: Any = te.Linear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            params_dtype=self.dtype,
            device=layer.weight.device,
        )
        made.weight = layer.weight
        if layer.bias is not None:
            made.bias = layer.bias
        return made
