"""Module path of Lightning Fabric for its name of `ConfigurationError`."""

from fabric.core.errors import ConfigurationError

MisconfigurationException = ConfigurationError

__all__ = ["MisconfigurationException"]
