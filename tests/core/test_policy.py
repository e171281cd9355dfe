"""What users write as `precision=`, row by row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fabric.core.errors import ConfigurationError
from fabric.core.precision import POLICIES, find_policy, parse_precision

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (64, "64-true"),
        ("64", "64-true"),
        ("64-true", "64-true"),
        (32, "32-true"),
        ("32", "32-true"),
        ("32-true", "32-true"),
        (16, "16-mixed"),
        ("16", "16-mixed"),
        ("16-mixed", "16-mixed"),
        ("16-true", "16-true"),
        ("bf16", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_what_may_be_written(written, name):
    assert parse_precision(written) is POLICIES[name]
    assert find_policy(written) is POLICIES[name]


@pytest.mark.parametrize(
    ("name", "param", "compute", "reduce", "output", "autocast", "loss_scale"),
    [
        ("64-true", F64, F64, F64, F32, False, False),
        ("32-true", None, F32, F32, None, False, False),
        ("16-true", F16, F16, F16, F32, False, False),
        ("bf16-true", BF16, BF16, BF16, F32, False, False),
        ("16-mixed", None, F16, F32, F32, True, True),
        ("bf16-mixed", None, BF16, F32, F32, True, False),
    ],
)
def test_what_each_name_means(name, param, compute, reduce, output, autocast, loss_scale):
    assert dataclasses.astuple(POLICIES[name]) == (name, param, compute, reduce, output, autocast, loss_scale)


def test_the_table_is_complete():
    assert set(POLICIES) == {"64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"}


@pytest.mark.parametrize("wrong", [8, "8", True, 16.0, 32.5, None, "", [16], {}, "half", "fp16", -16])
def test_what_names_no_precision(wrong):
    assert find_policy(wrong) is None
    with pytest.raises(ConfigurationError, match="is not known") as caught:
        parse_precision(wrong)
    assert repr(wrong) in str(caught.value)
    assert ", bf16-mixed" in str(caught.value), "all names are shown"


@pytest.mark.parametrize(
    ("wrong", "close"),
    [("bf16-mix", "bf16-mixed"), ("32true", "32-true"), ("16-tru", "16-true")],
)
def test_close_names_are_shown(wrong, close):
    with pytest.raises(ConfigurationError, match=r"Did you mean .*") as caught:
        parse_precision(wrong)
    assert repr(close) in str(caught.value).partition("?")[0]
