"""Ray where it is not installed."""

from __future__ import annotations

import importlib.util

import pytest

from fabric.core.errors import MissingExtraError
from fabric.integrations.ray import RayEnvironment


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_a_missing_package():
    with pytest.raises(MissingExtraError) as caught:
        RayEnvironment()
    assert str(caught.value) == (
        'RayEnvironment needs the package ray, which is not installed. Run `pip install "torch-fabric[ray]"`.'
    )
