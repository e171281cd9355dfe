"""The strategies of torch_xla, which does not load with the torch that fabric needs."""

from __future__ import annotations

from typing import Any, NoReturn

from fabric.core.errors import ConfigurationError


def refuse(asked: str, instead: str, **_: Any) -> NoReturn:
    """What `strategy="xla"` and its like are registered as.

    Raises:
        ConfigurationError: Always: it says what to write.
    """
    raise ConfigurationError(
        f"strategy={asked!r} is torch_xla's, whose last version (2.9) does not load with torch 2.10 or "
        "newer. Its successor torch_tpu makes TPUs devices like any other: write accelerator='tpu', "
        f'strategy={instead!r}, and run `pip install "torch-fabric[tpu]"`.'
    )
