"""DeepSpeed where it is not installed."""

from __future__ import annotations

import importlib.util

import pytest

from fabric import Fabric
from fabric.core.errors import MissingExtraError


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_stage_3_offload"])
def test_a_missing_package(name):
    with pytest.raises(MissingExtraError) as caught:
        Fabric(accelerator="cpu", devices=2, strategy=name)
    assert str(caught.value) == (
        'strategy="deepspeed" needs the package deepspeed, which is not installed. Run `pip install '
        '"torch-fabric[deepspeed]"`, or write strategy="zero1", "zero2" or "fsdp", which need nothing else.'
    )
