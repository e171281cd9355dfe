"""Names of strategies and plugins for torch_xla, which does not load with the torch that fabric needs.

The classes import, `isinstance` of them is False, and constructing one is an error with the alternative.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fabric.accelerators.accelerator import Accelerator
from fabric.checkpoint.torch_io import TorchCheckpointIO
from fabric.core.errors import ConfigurationError
from fabric.plugins.environments.cluster_environment import ClusterEnvironment
from fabric.precision.precision import Precision
from fabric.strategies.parallel import ParallelStrategy
from fabric.strategies.single_device import SingleDeviceStrategy


def refuse(asked: str, instead: str, **_: Any) -> NoReturn:
    """Raise for `strategy="xla"` and similar names, which are registered with this function.

    Raises:
        ConfigurationError: Always, with the alternative.
    """
    raise _refusal(f"strategy={asked!r}", f"accelerator='tpu', strategy={instead!r}")


def _refusal(asked: str, instead: str) -> ConfigurationError:
    return ConfigurationError(
        f"{asked} is torch_xla's, whose last version (2.9) does not load with torch 2.10 or newer. Its "
        f"successor torch_tpu makes TPUs devices like any other: write {instead}, "
        'and run `pip install "torch-fabric[tpu]"`.'
    )


class _TorchXLA:
    """Base of classes that cannot be constructed."""

    _instead = "accelerator='tpu'"

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise _refusal(cls.__name__, cls._instead)


class XLAStrategy(_TorchXLA, ParallelStrategy):
    """Data parallel training with torch_xla. Constructing one raises a ConfigurationError."""

    _instead = "accelerator='tpu', strategy='ddp'"


class XLAFSDPStrategy(_TorchXLA, ParallelStrategy):
    """Sharded training with torch_xla. Constructing one raises a ConfigurationError."""

    _instead = "accelerator='tpu', strategy='fsdp'"


class SingleDeviceXLAStrategy(_TorchXLA, SingleDeviceStrategy):
    """One device of torch_xla. Constructing one raises a ConfigurationError."""

    _instead = "accelerator='tpu', strategy='single_device'"


class XLAPrecision(_TorchXLA, Precision):
    """Dtypes of torch_xla. Constructing one raises a ConfigurationError."""

    _instead = "accelerator='tpu', precision='bf16-true'"


class XLACheckpointIO(_TorchXLA, TorchCheckpointIO):
    """Checkpoints of torch_xla. Constructing one raises a ConfigurationError."""


class XLAEnvironment(_TorchXLA, ClusterEnvironment):
    """Processes started by torch_xla. Constructing one raises a ConfigurationError."""

    @staticmethod
    def detect() -> bool:
        """False: torch_xla starts no processes."""
        return False


class XLAAccelerator(_TorchXLA, Accelerator):
    """TPUs with torch_xla. Constructing one raises a ConfigurationError."""

    @staticmethod
    def auto_device_count() -> int:
        """0: torch_xla does not load."""
        return 0

    @staticmethod
    def is_available() -> bool:
        """False: torch_xla does not load."""
        return False


def _using_pjrt() -> bool:
    return False
