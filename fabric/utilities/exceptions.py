"""The name under which migrated code catches configuration errors. Defines nothing itself."""

from fabric.core.errors import ConfigurationError

MisconfigurationException = ConfigurationError

__all__ = ["MisconfigurationException"]
