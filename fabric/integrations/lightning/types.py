"""Lightning Fabric's type aliases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Parameter

from fabric.checkpoint.checkpoint_io import CheckpointIO
from fabric.core.precision import PrecisionInput, PrecisionName
from fabric.core.registry import Registry
from fabric.core.types import PathLike, Stateful
from fabric.plugins.environments.cluster_environment import ClusterEnvironment
from fabric.precision.precision import Precision

ProcessGroup = torch.distributed.ProcessGroup if torch.distributed.is_available() else object
CollectibleGroup = ProcessGroup
group: Any = getattr(torch.distributed, "group", None)
_AcceleratorRegistry = Registry
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = _DEVICE | Callable[[Any, str], Any] | dict[Any, Any] | None
_PARAMETERS = Iterator[Parameter]
_PATH = PathLike
_PLUGIN_INPUT = Precision | ClusterEnvironment | CheckpointIO
_PRECISION_INPUT = PrecisionInput
_PRECISION_INPUT_STR = PrecisionName
_Stateful = Stateful
