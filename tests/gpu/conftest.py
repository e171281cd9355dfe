"""The pool of tests/conftest.py, whose ranks take a device each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from accelerated import KIND, MODULE

from fabric.testing import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two warm processes, or one where there is one device."""
    count = min(2, MODULE.device_count())
    # Only on the pretend device are warnings errors: nobody may have tried the torch of a GPU machine.
    settings = {"warnings_as_errors": KIND == "sim", "preload": ["pytest"]}
    with RankPool(count, timeout=90.0, accelerator=KIND, **settings) as pool:
        yield pool
