"""Categories of warnings that may be false alarms, and a function that ignores them. For user code."""

import warnings


class PossibleUserWarning(UserWarning):
    """A probable mistake of the user, which may be intended."""


class RanksDifferWarning(PossibleUserWarning):
    """Several ranks will probably compute other results than one process; `fabric check` fails on it."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore every `PossibleUserWarning` from now on.

    Args:
        module: A regular expression for the name of the module that warns; empty means all.
    """
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
