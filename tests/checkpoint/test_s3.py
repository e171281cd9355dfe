"""Checkpoints in an object store: moto's server of S3 on this machine, by s3fs. Skipped without these two."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fabric import Fabric
from fabric.core.errors import ConfigurationError, DamagedCheckpointError

pytest.importorskip("s3fs", reason="pip install torch-fabric[remote-tests]")
pytestmark = pytest.mark.slow
server = pytest.importorskip("moto.server", reason="pip install torch-fabric[remote-tests]")


@pytest.fixture(scope="module")
def address():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    store.start()
    host, port = store.get_host_and_port()
    yield f"http://{host}:{port}"
    store.stop()


@pytest.fixture
def env(address, monkeypatch):
    """What a user has in the environment; the store has one bucket, new."""
    import fsspec
    from s3fs import S3FileSystem

    given = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    given["AWS_DEFAULT_REGION"] = "us-east-1"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    store = fsspec.filesystem("s3")
    store.mkdir("bucket")
    yield given
    store.rm("bucket", recursive=True)
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def store(env):
    """As another program sees the store."""
    from s3fs import S3FileSystem

    return S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


def trained(fabric, seed=0):
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters()))
    fabric.backward(model(torch.ones(4, 3)).sum())
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed}


def values(state):
    moments = [entry["exp_avg"].tolist() for entry in state["optimizer"].optimizer.state.values()]
    return [p.tolist() for p in state["model"].parameters()], moments, state["step"]


def objects(store):
    return sorted(name.removeprefix("bucket/") for name in store.find("bucket"))


@pytest.mark.parametrize("url", ["s3://bucket/a.pt", "s3://bucket/deep/er/a.pt"])
def test_what_was_saved_last_is_loaded(fabric, store, url):
    fabric.save(url, trained(fabric, seed=1))
    state = trained(fabric, seed=2)
    fabric.save(url, state)
    assert objects(store) == [url.removeprefix("s3://bucket/")]
    other = trained(fabric, seed=3)
    assert fabric.load(url, other) == {}
    assert values(other) == values(state)
    with store.open(url) as file:
        assert torch.load(file, weights_only=True)["step"] == 2
    with pytest.raises(FileNotFoundError):
        fabric.load("s3://bucket/none.pt")


def test_no_bucket_is_made_that_is_there(fabric, store, monkeypatch):
    from s3fs import S3FileSystem

    async def refused(*args, **kwargs):
        raise PermissionError("s3:CreateBucket")

    monkeypatch.setattr(S3FileSystem, "_mkdir", refused)
    fabric.save("s3://bucket/a.pt", {"step": 1})
    assert objects(store) == ["a.pt"]


def test_a_changed_object_is_found(fabric, store):
    url = "s3://bucket/a.pt"
    fabric.save(url, trained(fabric))
    held = bytearray(store.cat_file(url))
    held[len(held) // 2] ^= 4
    store.pipe_file(url, bytes(held))
    state = trained(fabric, seed=1)
    before = values(state)
    with pytest.raises(DamagedCheckpointError, match=url):
        fabric.load(url, state)
    store.pipe_file(url, bytes(held[: len(held) // 2]))
    with pytest.raises(DamagedCheckpointError, match=url):
        fabric.load(url, state)
    assert values(state) == before


def test_the_newest_that_is_whole(fabric, store):
    states = [trained(fabric, seed=seed) for seed in range(4)]
    paths = [fabric.save_latest("s3://bucket/run", s, step=s["step"], keep=2) for s in states]
    assert paths[-1] == "s3://bucket/run/step-00000003.pt"
    assert objects(store) == ["run/step-00000002.pt", "run/step-00000003.pt"]
    other = trained(fabric, seed=9)
    assert fabric.load_latest("s3://bucket/run", other) == 3
    assert values(other) == values(states[3])
    store.pipe_file(paths[-1], store.cat_file(paths[-1])[:-100])
    with pytest.warns(UserWarning, match="step-00000003.pt cannot be loaded"):
        assert fabric.load_latest("s3://bucket/run", other) == 2
    assert values(other) == values(states[2])
    assert fabric.load_latest("s3://bucket/nowhere", other) is None


def test_what_another_program_has_written_since_is_seen(fabric, store):
    fabric.save_latest("s3://bucket/run", {"step": 1}, step=1)
    assert fabric.load_latest("s3://bucket/run", state := {"step": 0}) == 1
    held = store.cat_file("s3://bucket/run/step-00000001.pt")
    fabric.save("s3://bucket/b.pt", {"step": 2, "more": torch.ones(1000)})
    store.pipe_file("s3://bucket/run/step-00000002.pt", store.cat_file("s3://bucket/b.pt"))
    assert fabric.load_latest("s3://bucket/run", state) == 2
    assert state["step"] == 2
    store.pipe_file("s3://bucket/run/step-00000002.pt", held)  # of another size
    assert fabric.load("s3://bucket/run/step-00000002.pt") == {"step": 1}


def test_beside_the_loop(fabric, store):
    state = trained(fabric, seed=1)
    expected = values(state)
    saving = fabric.save("s3://bucket/a.pt", state, wait=False)
    with torch.no_grad():
        state["model"].weight.zero_()
    saving.wait()
    fabric.save_latest("s3://bucket/run", trained(fabric), step=7, wait=False)
    other = trained(fabric, seed=2)
    fabric.load("s3://bucket/a.pt", other)  # waits for the one before
    assert values(other) == expected
    assert objects(store) == ["a.pt", "run/step-00000007.pt"]


def test_an_error_beside_the_loop_is_told(fabric, env, monkeypatch):
    from s3fs.core import S3File

    def refused(file):
        raise PermissionError("s3:PutObject")

    monkeypatch.setattr(S3File, "commit", refused)
    saving = fabric.save("s3://bucket/a.pt", {"step": 1}, wait=False)
    with pytest.raises(PermissionError, match="s3:PutObject"):
        saving.wait()


def test_what_the_loop_writes_meanwhile_is_no_part_of_the_save(fabric, store, monkeypatch):
    import fsspec

    def meanwhile(data, file):
        with fsspec.open("s3://bucket/of-the-loop", "wb") as own:
            own.write(b"metrics")
        assert store.exists("s3://bucket/of-the-loop")
        raise OSError("connection lost")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", meanwhile)
        with pytest.raises(OSError, match="connection lost"):
            fabric.save("s3://bucket/a.pt", {"step": 2})
    assert store.cat_file("s3://bucket/of-the-loop") == b"metrics"


LAST = """
import torch
from fabric import Fabric
Fabric(accelerator="cpu", devices=1).save("s3://bucket/last.pt", {"w": torch.ones(9)}, wait=False)
"""


def test_a_save_beside_the_loop_may_be_the_last_act_of_a_script(fabric, env):
    done = subprocess.run([sys.executable, "-c", LAST], env={**os.environ, **env}, timeout=120)
    assert done.returncode == 0
    assert fabric.load("s3://bucket/last.pt")["w"].equal(torch.ones(9))


KILLED = """
import os, signal, fsspec, torch
from fabric import Fabric
from fabric.checkpoint import torch_io
fsspec.config.conf["s3"] = {"default_block_size": 5 << 20}  # parts of the upload
fabric = Fabric(accelerator="cpu", devices=1)
fabric.save("s3://bucket/a.pt", {"step": 1, "w": torch.ones(4 << 20)})
def seal(self, facts):
    os.kill(os.getpid(), signal.SIGKILL)
torch_io.DigestWriter.seal = seal
fabric.save("s3://bucket/a.pt", {"step": 2, "w": torch.zeros(4 << 20)}, wait=WAIT)
"""


@pytest.mark.parametrize("wait", [True, False])
def test_a_kill_in_the_midst_of_an_upload_leaves_the_old_object(fabric, env, store, wait):
    code = textwrap.dedent(KILLED).replace("WAIT", str(wait))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, timeout=120)
    assert done.returncode == -signal.SIGKILL
    [upload] = store.call_s3("list_multipart_uploads", Bucket="bucket")["Uploads"]  # parts were sent
    store.call_s3("abort_multipart_upload", Bucket="bucket", Key="a.pt", UploadId=upload["UploadId"])
    assert objects(store) == ["a.pt"]
    held = fabric.load("s3://bucket/a.pt")
    assert held["step"] == 1
    assert held["w"].equal(torch.ones(4 << 20))


def test_a_failed_save_leaves_the_old_object(fabric, store, monkeypatch):
    fabric.save("s3://bucket/a.pt", {"step": 1})

    def half(data, file):
        file.write(b"half")
        raise OSError("connection lost")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half)
        with pytest.raises(OSError, match="connection lost"):
            fabric.save("s3://bucket/a.pt", {"step": 2})
    fabric.save("s3://bucket/b.pt", {"step": 3})
    assert objects(store) == ["a.pt", "b.pt"]


def test_no_sharded_ones(fabric, env):
    with pytest.raises(ConfigurationError, match=r"s3://bucket/a is no path of a file system.*format='full'"):
        fabric.save("s3://bucket/a", {"step": 1}, format="sharded")


def on_ranks():
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="fsdp")
    fabric.launch()
    state = trained(fabric, seed=1)
    path = fabric.save_latest("s3://bucket/run", state, step=1)
    expected = fabric.strategy.get_module_state_dict(state["model"])
    other = trained(fabric, seed=2)
    assert fabric.load_latest("s3://bucket/run", other) == 1
    got = fabric.strategy.get_module_state_dict(other["model"])
    return path, {name: (value.tolist(), got[name].tolist()) for name, value in expected.items()}


def test_split_models_are_saved_whole(ranks, env, store):
    for path, pairs in ranks.run(on_ranks, world_size=2):
        assert path == "s3://bucket/run/step-00000001.pt"
        assert all([one == other for one, other in pairs.values()])
    assert objects(store) == ["run/step-00000001.pt"]
