"""Classes for collectives, on torch.distributed or on one device."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.collectives.collective import Collective as Collective
    from fabric.collectives.single_device import SingleDeviceCollective as SingleDeviceCollective
    from fabric.collectives.torch_collective import TorchCollective as TorchCollective

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Collective": "fabric.collectives.collective",
        "SingleDeviceCollective": "fabric.collectives.single_device",
        "TorchCollective": "fabric.collectives.torch_collective",
    },
)
