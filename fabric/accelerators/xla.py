"""A module path of Lightning Fabric. Its names are defined in `fabric/core/lightning_names.py`."""

from fabric.core.lazy import lazy_names

__getattr__ = lazy_names(__name__)
