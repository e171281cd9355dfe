"""A module path of Lightning Fabric; the code is in `fabric/collectives/torch_collective.py`."""

from fabric.collectives.torch_collective import TorchCollective as TorchCollective
from fabric.collectives.torch_collective import default_pg_timeout as default_pg_timeout
