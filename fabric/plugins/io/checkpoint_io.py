"""A module path of Lightning Fabric; the code is in `fabric/checkpoint/checkpoint_io.py`."""

from fabric.checkpoint.checkpoint_io import CheckpointIO as CheckpointIO
