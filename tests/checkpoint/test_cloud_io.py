from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from fabric.core.errors import ConfigurationError, MissingExtraError
from fabric.utilities.cloud_io import (
    append_text,
    get_filesystem,
    is_url,
    join_path,
    list_directory,
    local_path,
    read_text,
    write_text,
)


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """An empty directory on each kind of storage."""
    if request.param == "local":
        yield tmp_path / "root"
        return
    yield "memory://root"
    MemoryFileSystem().rm("/root", recursive=True)


def test_filesystem_of_a_path(tmp_path):
    assert isinstance(get_filesystem(tmp_path), LocalFileSystem)
    assert isinstance(get_filesystem(f"file://{tmp_path}"), LocalFileSystem)
    assert isinstance(get_filesystem("memory://x"), MemoryFileSystem)
    assert get_filesystem(tmp_path, auto_mkdir=True).auto_mkdir


def test_missing_driver_says_what_to_install():
    pytest.importorskip("fsspec")
    with pytest.raises(MissingExtraError, match="pip install"):
        get_filesystem("abfs://container/x")


def test_an_unknown_kind_of_url_is_named():
    with pytest.raises(ConfigurationError) as caught:
        get_filesystem("s33://container/x")
    assert "'s33://container/x' cannot be opened: Protocol not known: s33. Write a path" in str(caught.value)
    assert "`pip install fsspec s3fs`" in str(caught.value)


def test_kinds_of_paths(tmp_path):
    assert local_path(tmp_path) == tmp_path
    assert local_path("file:///x") == Path("/x")
    assert local_path("s3://bucket/x") is None
    assert is_url("s3://bucket/x")
    assert not is_url("a/b")
    assert join_path("s3://bucket/", "a", "b") == "s3://bucket/a/b"
    assert join_path("a", "b") == "a/b"


def test_text_is_written_read_appended_and_listed(root):
    path = join_path(root, "deep", "file.txt")
    assert read_text(path) is None
    assert list_directory(root) == []
    write_text(path, "ä\r\n")
    append_text(path, "b\n")
    assert read_text(path) == "ä\r\nb\n"
    write_text(path, "c")
    assert read_text(path) == "c"
    assert list_directory(join_path(root, "deep")) == ["file.txt"]
    assert list_directory(root) == ["deep"]


def test_local_files_get_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode
