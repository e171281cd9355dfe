"""The category of warnings that may be false alarms, and the switch that silences them. Used by user code."""

import warnings


class PossibleUserWarning(UserWarning):
    """Something that is probably, but not surely, a mistake of the user."""


class RanksDifferWarning(PossibleUserWarning):
    """Several ranks will probably compute something else than one process; `fabric check` fails for it."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Ignore every `PossibleUserWarning` from now on.

    Args:
        module: A regular expression for the name of the module that warns; empty means all.
    """
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)
