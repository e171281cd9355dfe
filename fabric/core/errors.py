"""The errors of this package. Each also derives from the builtin class that a user would catch.

FabricError
- ConfigurationError (ValueError): arguments that are wrong, impossible on this machine, or contradictory
- ArgumentTypeError (TypeError): a value of the wrong kind
- UsageError (RuntimeError): a call at the wrong time or on the wrong object
- NoLoggerError (UsageError, IndexError): `fabric.logger` of a Fabric without loggers
- DamagedCheckpointError (UsageError): a file of a checkpoint is missing or was changed
- LaunchError (RuntimeError): processes that could not be started or joined
- RankError (RuntimeError): another rank failed inside a call that all ranks make
- CollectiveMismatch (RuntimeError, ValueError): ranks called different verbs, or one with different data
- ReplicasDivergedError (RuntimeError): values that must be equal on ranks are not
- MissingExtraError (ImportError): an optional package is not installed
- ContractError (AssertionError): a strategy violates the contract of all strategies
"""


class FabricError(Exception):
    """Base class of all errors of this package."""


class ConfigurationError(FabricError, ValueError):
    """An argument is wrong, is impossible on this machine, or contradicts another argument."""


class ArgumentTypeError(FabricError, TypeError):
    """An argument has the wrong kind of value."""


class UsageError(FabricError, RuntimeError):
    """A call at the wrong time or on the wrong object."""


class NoLoggerError(UsageError, IndexError):
    """`fabric.logger` was read, but this Fabric has no logger."""


class DamagedCheckpointError(UsageError):
    """A file of a checkpoint is missing, truncated, changed, or not part of a checkpoint."""


class LaunchError(FabricError, RuntimeError):
    """Processes could not be started, or one of them failed.

    `exit_code` is that of the rank that failed: 128 + n if signal n ended it.
    """

    exit_code = 1
    """The exit code of the rank that failed: 128 + n if signal n ended it."""


class RankError(FabricError, RuntimeError):
    """Another rank failed inside a call that all ranks make."""


class CollectiveMismatch(FabricError, RuntimeError, ValueError):
    """Ranks made different calls instead of the same one; every rank raises this, with the same table."""


class ReplicasDivergedError(FabricError, RuntimeError):
    """Values that must be equal on all ranks differ; every rank raises this, with the same text."""


class MissingExtraError(FabricError, ImportError):
    """A required optional package is not installed."""


class ContractError(FabricError, AssertionError):
    """A strategy violates the contract of all strategies; raised by `fabric.testing.check_strategy`."""
