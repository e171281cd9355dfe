"""The table of accelerators that users choose from by name."""

from fabric.accelerators.cpu import CPUAccelerator
from fabric.accelerators.cuda import CUDAAccelerator
from fabric.accelerators.mps import MPSAccelerator
from fabric.core.registry import Registry

ACCELERATOR_REGISTRY = Registry("accelerator", "fabric.accelerators")
"""Third parties add theirs with `register`, or with an entry point of the group "fabric.accelerators"."""

CPUAccelerator.register_accelerators(ACCELERATOR_REGISTRY)
CUDAAccelerator.register_accelerators(ACCELERATOR_REGISTRY)
MPSAccelerator.register_accelerators(ACCELERATOR_REGISTRY)
