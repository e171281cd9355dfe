"""The table of accelerators that users choose from by name."""

from fabric.core.registry import Registry

ACCELERATOR_REGISTRY = Registry("accelerator", "fabric.accelerators")
"""Third parties add theirs with `register`, or with an entry point of the group "fabric.accelerators"."""

ACCELERATOR_REGISTRY.register("cpu", "fabric.accelerators.cpu:CPUAccelerator", "the host")
ACCELERATOR_REGISTRY.register("cuda", "fabric.accelerators.cuda:CUDAAccelerator", "NVIDIA and AMD GPUs")
ACCELERATOR_REGISTRY.register("mps", "fabric.accelerators.mps:MPSAccelerator", "GPUs of Apple silicon")
ACCELERATOR_REGISTRY.register("tpu", "fabric.integrations.tpu.accelerator:TPUAccelerator", "Google's TPUs")
