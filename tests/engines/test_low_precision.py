"""Low-precision plugins without their packages: what to install; nothing else is imported."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial

import pytest
import torch

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, ConfigurationError, MissingExtraError
from fabric.plugins import BitsandbytesPrecision, TorchAOPrecision, TransformerEnginePrecision

BFLOAT16 = torch.bfloat16


@pytest.mark.parametrize(
    ("make", "module", "text"),
    [
        (
            lambda: BitsandbytesPrecision("nf4"),
            "bitsandbytes",
            "BitsandbytesPrecision('nf4') needs the package bitsandbytes, which is not installed. Run `pip "
            'install "torch-fabric[bitsandbytes]"`.',
        ),
        (
            lambda: Fabric(accelerator="cpu", devices=1, precision="float8"),
            "torchao",
            "TorchAOPrecision('float8') needs the package torchao, which is not installed. Run `pip install "
            '"torch-fabric[torchao]"`.',
        ),
        (
            lambda: Fabric(accelerator="cpu", devices=1, precision="transformer-engine"),
            "transformer_engine",
            "TransformerEnginePrecision needs the package transformer-engine, which is not installed. Run "
            '`pip install "torch-fabric[transformer-engine]"`.',
        ),
    ],
)
def test_a_missing_package(make, module, text):
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with pytest.raises(MissingExtraError) as caught:
        make()
    assert str(caught.value) == text
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BitsandbytesPrecision("nf5"), "is not a mode. Did you mean 'nf4'"),
        (lambda: TorchAOPrecision("int8"), "Write one of 'float8', 'int8-weights'."),
        (
            lambda: TransformerEnginePrecision(weights_dtype=torch.float32),
            "TransformerEnginePrecision(weights_dtype=torch.float32) needs torch.bfloat16 or torch.float16.",
        ),
        (
            lambda: Fabric(accelerator="cpu", devices=1, precision="nf4"),
            "precision='nf4' is not known. Known: 16-mixed, 16-true, 32-true, 64-true, bf16-mixed, "
            "bf16-true, float8, transformer-engine, transformer-engine-float16.",
        ),
    ],
)
def test_what_is_none(make, text):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "plugin", [partial(BitsandbytesPrecision, "nf4"), partial(TorchAOPrecision, "float8")]
)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"dtype": "bfloat16"},
            "dtype='bfloat16', that of everything else, must be torch.bfloat16, torch.float16 or "
            "torch.float32.",
        ),
        ({"dtype": torch.int8}, "dtype=torch.int8, that of everything else, must be"),
        ({"dtype": torch.float64}, "dtype=torch.float64, that of everything else, must be"),
        (
            {"ignore_modules": "lm_head"},
            "ignore_modules='lm_head' must be a set of names. Write ignore_modules={'lm_head'}.",
        ),
        (
            {"ignore_modules": {1}},
            "ignore_modules={1} must be a set of names. Write ignore_modules={'head'}.",
        ),
        ({"ignore_modules": torch.nn.Linear(1, 1)}, "must be a set of names."),
    ],
)
def test_bad_settings(plugin, given, text):
    with pytest.raises(ArgumentTypeError) as caught:
        plugin(**given)
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"{plugin.func.__name__}({plugin.args[0]!r}): ")
