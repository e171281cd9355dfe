"""A module path of Lightning Fabric; the code is in `fabric/precision/precision.py`."""

from fabric.core.lazy import lazy_names
from fabric.precision.precision import PRECISION_REGISTRY as PRECISION_REGISTRY
from fabric.precision.precision import Precision as Precision

__getattr__ = lazy_names(__name__)
