"""The one error tree. Every error also derives from the builtin that a user would catch.

FabricError
- ConfigurationError (ValueError): arguments that are wrong, impossible here, or contradict each other
- ArgumentTypeError (TypeError): a value of the wrong kind
- UsageError (RuntimeError): a call at the wrong time or on the wrong object
- NoLoggerError (UsageError, IndexError): `fabric.logger` of a Fabric without loggers
- DamagedCheckpointError (UsageError): a file of a checkpoint is not what was written
- LaunchError (RuntimeError): processes that could not be started or joined
- RankError (RuntimeError): another rank failed inside a call that all ranks make
- CollectiveMismatch (RuntimeError, ValueError): ranks called different things, or with different data
- ReplicasDivergedError (RuntimeError): values that must be equal on ranks are not
- MissingExtraError (ImportError): an optional package is not installed
- ContractError (AssertionError): a strategy does not keep what every strategy promises
"""


class FabricError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(FabricError, ValueError):
    """An argument is wrong, is impossible on this machine, or contradicts another argument."""


class ArgumentTypeError(FabricError, TypeError):
    """An argument has the wrong kind of value."""


class UsageError(FabricError, RuntimeError):
    """A call came at the wrong time or on the wrong object."""


class NoLoggerError(UsageError, IndexError):
    """`fabric.logger` was read, and there is none."""


class DamagedCheckpointError(UsageError):
    """A file of a checkpoint is missing, was cut short or changed, or is something else altogether."""


class LaunchError(FabricError, RuntimeError):
    """Processes could not be started, or one of them failed.

    `exit_code` is that of the rank that failed: 128 + n if signal n ended it.
    """

    exit_code = 1
    """Of the rank that failed: 128 + n if signal n ended it."""


class RankError(FabricError, RuntimeError):
    """Another rank failed inside a call that all ranks make together."""


class CollectiveMismatch(FabricError, RuntimeError, ValueError):
    """Ranks made different calls where all must make the same; every rank gets this, with one table."""


class ReplicasDivergedError(FabricError, RuntimeError):
    """Ranks hold different values of what must be equal on all of them; all raise this, with one text."""


class MissingExtraError(FabricError, ImportError):
    """An optional package is needed and not installed."""


class ContractError(FabricError, AssertionError):
    """A strategy does not keep what every strategy promises; raised by `fabric.testing.check_strategy`."""
