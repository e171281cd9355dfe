"""What differs between versions of torch: the floor, errors that name the version that can, one file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fabric
from fabric.core import torch_versions
from fabric.core.errors import MissingExtraError

ROOT = Path(fabric.__file__).parent.parent


def test_the_file_is_short_and_the_floor_is_the_one_of_the_package():
    """A second home of such differences would not be looked at when the floor rises."""
    assert len(Path(torch_versions.__file__).read_text().splitlines()) <= 150
    assert f'"torch>={torch_versions.FLOOR}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "imported", ["import fabric", "from fabric import Fabric", "import fabric.strategies.ddp.strategy"]
)
@pytest.mark.parametrize("first", ["", "import torch; "])
def test_an_older_torch_is_refused_before_anything_else_fails(tmp_path, first, imported):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch.version import __version__")
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.8.1+cu129'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT)]}; {first}{imported}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == (
        "fabric.core.errors.MissingExtraError: fabric needs torch 2.9 or newer, but 2.8.1+cu129 is "
        'installed. Run `pip install "torch>=2.9"`.'
    )


@pytest.mark.parametrize(
    ("found", "asked", "older"),
    [
        ("2.9.1", "2.11", True),
        ("2.10.0+cpu", "2.9", False),
        ("2.13.0a0+git12ab", "2.13", False),
        ("3.0", "2.15", False),
    ],
)
def test_versions_are_compared_as_numbers(monkeypatch, found, asked, older):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=found))
    assert torch_versions.older_than(asked) is older
    if older:
        with pytest.raises(
            MissingExtraError, match=re.escape(f"That needs torch {asked} or newer, but {found} is")
        ):
            torch_versions.require_torch(asked, "That", "Write this.")
    else:
        torch_versions.require_torch(asked, "That", "Write this.")


def test_the_version_is_found_without_importing_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_versions.torch_version() == torch.__version__
    assert "torch" not in sys.modules


def test_without_torch_nothing_is_refused(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(torch_versions, "find_spec", lambda name: None)
    assert torch_versions.torch_version() is None
    torch_versions.check_floor()
