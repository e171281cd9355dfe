import pickle
import warnings

import pytest
import torch

from fabric.core import errors
from fabric.utilities.enums import LightningEnum
from fabric.utilities.exceptions import MisconfigurationException
from fabric.utilities.types import Optimizable, ReduceOp, Stateful, Steppable
from fabric.utilities.warnings import PossibleUserWarning, disable_possible_user_warnings


class Mode(LightningEnum):
    FULL_SHARD = "full"
    NONE = "off"


def test_members_compare_in_any_case():
    assert Mode.FULL_SHARD == "FULL"
    assert (Mode.FULL_SHARD != "Full") is False
    assert Mode.FULL_SHARD != "off"
    assert Mode.FULL_SHARD != 3
    assert Mode.FULL_SHARD == Mode.FULL_SHARD
    assert {Mode.NONE: 1}[Mode.NONE] == 1
    assert pickle.loads(pickle.dumps(Mode.NONE)) is Mode.NONE


@pytest.mark.parametrize(
    ("text", "source", "member"),
    [
        ("full_shard", "key", Mode.FULL_SHARD),
        ("Full-Shard", "key", Mode.FULL_SHARD),
        ("full", "key", None),
        ("FULL", "value", Mode.FULL_SHARD),
        ("none", "value", None),
        ("off", "any", Mode.NONE),
        ("none", "any", Mode.NONE),
    ],
)
def test_members_from_text(text, source, member):
    assert Mode.try_from_str(text, source) is member
    if member is not None:
        assert Mode.from_str(text, source) is member
        return
    with pytest.raises(errors.ConfigurationError, match=f"'{text}' is not a {source} of Mode.*Write one of"):
        Mode.from_str(text, source)


def test_compatible_names_are_the_real_things():
    assert MisconfigurationException is errors.ConfigurationError
    assert ReduceOp is torch.distributed.ReduceOp
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert isinstance(optimizer, Optimizable)
    assert isinstance(optimizer, Steppable)
    assert isinstance(optimizer, Stateful)
    assert not isinstance(torch.nn.Linear(1, 1), Steppable)


def test_possible_warnings_can_be_silenced_and_others_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("maybe", PossibleUserWarning, stacklevel=1)
        disable_possible_user_warnings()
        warnings.warn("maybe", PossibleUserWarning, stacklevel=1)
        warnings.warn("surely", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["maybe", "surely"]


def test_possible_warnings_can_be_silenced_by_module():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        disable_possible_user_warnings(module="some_other_module")
        warnings.warn("maybe", PossibleUserWarning, stacklevel=1)
    assert len(caught) == 1
