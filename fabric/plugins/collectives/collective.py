"""A module path of Lightning Fabric; the code is in `fabric/collectives/collective.py`."""

from fabric.collectives.collective import Collective as Collective
