"""Accelerators: cpu, cuda, mps and any other that torch.accelerator reports. Lazy: loads no torch."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.accelerators.accelerator import Accelerator as Accelerator
    from fabric.accelerators.cpu import CPUAccelerator as CPUAccelerator
    from fabric.accelerators.cuda import CUDAAccelerator as CUDAAccelerator
    from fabric.accelerators.cuda import find_usable_cuda_devices as find_usable_cuda_devices
    from fabric.accelerators.mps import MPSAccelerator as MPSAccelerator
    from fabric.accelerators.select import ACCELERATOR_REGISTRY as ACCELERATOR_REGISTRY
    from fabric.accelerators.usable import find_usable_devices as find_usable_devices

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ACCELERATOR_REGISTRY": "fabric.accelerators.select",
        "Accelerator": "fabric.accelerators.accelerator",
        "CPUAccelerator": "fabric.accelerators.cpu",
        "CUDAAccelerator": "fabric.accelerators.cuda",
        "MPSAccelerator": "fabric.accelerators.mps",
        "find_usable_cuda_devices": "fabric.accelerators.cuda",
        "find_usable_devices": "fabric.accelerators.usable",
    },
)
