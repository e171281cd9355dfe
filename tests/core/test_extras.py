"""The error of an engine whose package is missing, too old or broken."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
import torch

from fabric.core.errors import MissingExtraError
from fabric.core.extras import import_package


def test_gives_the_module():
    assert import_package("torch.nn", 'strategy="x"', "x") is torch.nn
    assert import_package("torch", 'strategy="x"', "x", least="2.2.9") is torch


@pytest.mark.parametrize(
    ("arguments", "settings", "text"),
    [
        (
            ("no_such", 'strategy="x"', "x"),
            {},
            'strategy="x" needs the package no_such, which is not installed. '
            'Run `pip install "torch-fabric[x]"`.',
        ),
        (
            ("no_such.torch", "f()", "a b c"),
            {"instead": 'write strategy="ddp"'},
            'the package no_such, which is not installed. Run `a b c`, or write strategy="ddp".',
        ),
        (
            ("torch", "f()", "x"),
            {"least": "99.1"},
            f"f() needs torch 99.1 or newer, but {version('torch')} is",
        ),
        (
            ("torch.no_such", "f()", "x"),
            {},
            "does not load: ModuleNotFoundError: No module named 'torch.no_such'",
        ),
    ],
)
def test_says_what_to_install(arguments, settings, text):
    with pytest.raises(MissingExtraError) as info:
        import_package(*arguments, **settings)
    assert text in str(info.value)


def test_a_package_whose_library_does_not_load(tmp_path, monkeypatch):
    (tmp_path / "broken_engine.py").write_text("raise OSError('libengine.so: cannot open')")
    info = tmp_path / "broken_engine-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-engine\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        MissingExtraError, match=r"1\.2 is installed and does not load: OSError: libengine\.so"
    ):
        import_package("broken_engine", "f()", "x")
    assert "broken_engine" not in sys.modules
