"""A module path of Lightning Fabric; the code is in `fabric/checkpoint/torch_io.py`."""

from fabric.checkpoint.torch_io import TorchCheckpointIO as TorchCheckpointIO
