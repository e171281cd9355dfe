"""A path of Lightning Fabric; what is behind its names: `fabric/core/lightning_names.py`."""

from fabric.core.lazy import lazy_names

__getattr__ = lazy_names(__name__)
