"""Two warm ranks for all tests of this folder."""

import pytest

from fabric.testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    """As everywhere, but DeepSpeed warns of much, and forwards of torch's deprecated calls."""
    with RankPool(2, timeout=60.0, accelerator="cpu") as pool:
        yield pool
