"""Module path of Lightning Fabric; `core/lightning_names.py` maps its names."""

from fabric.core.lazy import lazy_names

__getattr__ = lazy_names(__name__)
