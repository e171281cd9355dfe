"""One error tree, each error also a builtin that users catch."""

from __future__ import annotations

import pytest

from fabric.core import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigurationError", ValueError),
        ("ArgumentTypeError", TypeError),
        ("UsageError", RuntimeError),
        ("DamagedCheckpointError", RuntimeError),
        ("LaunchError", RuntimeError),
        ("RankError", RuntimeError),
        ("CollectiveMismatch", RuntimeError),
        ("CollectiveMismatch", ValueError),
        ("MissingExtraError", ImportError),
        ("ContractError", AssertionError),
    ],
)
def test_each_error_is_a_builtin_too(name, builtin):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.FabricError)
    assert issubclass(kind, builtin)
    assert name in errors.__doc__
    assert builtin.__name__ in errors.__doc__


def test_the_tree_has_no_other_branches():
    own = {name for name, value in vars(errors).items() if isinstance(value, type)}
    shown = {word for word in errors.__doc__.split() if word.endswith(("Error", "Mismatch"))}
    assert own == shown
