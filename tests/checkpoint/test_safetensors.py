"""safetensors files: what they hold, who reads them, what is refused, and damages."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from fabric import Fabric
from fabric.checkpoint.formats import safetensors
from fabric.checkpoint.portable import LazyTensor
from fabric.cli import main
from fabric.core.errors import ConfigurationError, DamagedCheckpointError, MissingExtraError
from fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from fabric.utilities.cloud_io import get_filesystem


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embed.weight


class Untied(Tied):
    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros(12, 4))


@pytest.fixture
def fabric():
    return Fabric(accelerator="cpu", devices=1)


def net(kind=Tied, seed=0):
    torch.manual_seed(seed)
    return kind()


def same(got, expected):
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, equal_nan=True)


def header_of(path):
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


# roundtrips


@pytest.mark.parametrize("wait", [True, False])
def test_a_model_is_read_by_us_and_by_the_package(fabric, tmp_path, wait):
    model, path = fabric.setup(net()), tmp_path / "deep" / "model.safetensors"
    saving = fabric.save(path, {"model": model}, wait=wait)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if saving is not None:
        with torch.no_grad():
            model.module.embed.weight.zero_()
        saving.wait()
    assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]
    same(load_file(path), {name: value for name, value in expected.items() if name != "head.weight"})
    for load in (lambda m: fabric.load(path, {"net": m}), lambda m: fabric.load_raw(path, m)):
        other = fabric.setup(net(seed=1))
        assert not load(other)
        same(other.state_dict(), expected)
        assert other.module.head.weight is other.module.embed.weight
    same(fabric.load(path), expected)


def test_the_header_says_who_wrote_it_and_is_that_of_the_package(fabric, tmp_path):
    model = fabric.setup(net())
    fabric.save(tmp_path / "a.safetensors", {"model": model})
    ours = header_of(tmp_path / "a.safetensors")
    said = ours.pop("__metadata__")
    facts = {"torch": torch.__version__, "strategy": type(fabric.strategy).__name__, "world_size": 1}
    assert json.loads(said.pop("fabric-facts")) == facts
    assert re.fullmatch("[0-9a-f]{8}", said.pop("fabric-crc32"))
    assert json.loads(said.pop("fabric-ties")) == {"head.weight": "embed.weight"}
    assert said == {"format": "pt"}
    save_model(model.module, tmp_path / "b.safetensors")
    theirs = header_of(tmp_path / "b.safetensors")
    assert theirs.pop("__metadata__") == {"head.weight": "embed.weight"}
    facts = [{k: (v["dtype"], v["shape"]) for k, v in header.items()} for header in (ours, theirs)]
    assert facts[0] == facts[1]


SOME = {
    "odd": torch.arange(3, dtype=torch.int8),
    "wide": torch.randn(3, 2, dtype=torch.float64),
    "number": torch.tensor(7),
    "none": torch.empty(0, 3),
    "half": torch.randn(5).bfloat16(),
    "eighth": torch.randn(5).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64).conj(),
    "minus": torch.randn(3, dtype=torch.complex64).conj().imag,
    "turned": torch.randn(4, 3).t(),
    "part": torch.randn(10)[2:5],
    "learned": nn.Parameter(torch.ones(2)),
    "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
    'n"\\ä\u2028': torch.ones(1),
}


@pytest.mark.parametrize("state", [SOME, {"weights": SOME}], ids=["flat", "named"])
@pytest.mark.parametrize("url", [False, True])
def test_a_dictionary_of_tensors_of_any_type(fabric, tmp_path, state, url):
    path = f"memory://safe/{os.urandom(4).hex()}.safetensors" if url else tmp_path / "a.safetensors"
    fabric.save(path, state)
    loaded = fabric.load(path)
    resolved = {k: v.detach().resolve_conj().resolve_neg() for k, v in SOME.items()}
    same(loaded, resolved)
    assert all([type(value) is torch.Tensor for value in loaded.values()])
    if url:
        TorchCheckpointIO().remove_checkpoint("memory://safe")
    else:
        same(load_file(path), resolved)
        wanted = {"odd": 0} if state is SOME else {"weights": {"odd": 0}}
        fabric.load(path, wanted)
        assert wanted.get("weights", wanted)["odd"].equal(SOME["odd"])


def test_two_names_of_one_tensor_are_both_there_again(fabric, tmp_path):
    tensor, path = torch.randn(1000), tmp_path / "a.safetensors"
    fabric.save(path, {"a": tensor, "b": tensor, "view": tensor[1:]})
    assert 8000 <= path.stat().st_size < 8700
    same(load_file(path), {"a": tensor, "view": tensor[1:]})
    same(fabric.load(path), {"a": tensor, "b": tensor, "view": tensor[1:]})
    other = net(Untied)
    fabric.save(path, {"model": net()})
    fabric.load(path, {"model": other})
    assert other.head.weight.equal(other.embed.weight)
    assert other.head.weight is not other.embed.weight


@pytest.mark.parametrize("name", ["pt", "format", "fabric-ties", "fabric-crc32"])
def test_any_name_is_that_of_a_tensor(fabric, tmp_path, name):
    path = tmp_path / "a.safetensors"
    tensor = torch.randn(3)
    for state in ({name: tensor}, {"a": tensor, name: tensor}, {name: tensor, "z": tensor}):
        fabric.save(path, state)
        same(fabric.load(path), state)


def test_ties_of_a_file_of_others(fabric, tmp_path):
    path = tmp_path / "a.safetensors"
    tensor = torch.randn(3)
    for metadata in ({"format": "pt", "author": "me"}, {"fabric-ties": "{}", "b": "pt"}):
        save_file({"pt": tensor}, path, metadata=metadata)
        same(fabric.load(path), {"pt": tensor})
    model = net()
    save_model(model, path, metadata={"format": "pt"})
    same(fabric.load(path), model.state_dict())
    for wrong in ("[", "[1]", "3", '{"b": []}'):
        save_file({"pt": tensor}, path, metadata={"fabric-ties": wrong})
        with pytest.raises(DamagedCheckpointError, match=r"a\.safetensors is damaged: "):
            fabric.load(path)


def test_a_tied_name_that_a_file_of_others_lacks(fabric, tmp_path):
    model = net()
    weights = {name: value for name, value in model.state_dict().items() if name != "embed.weight"}
    save_file(weights, tmp_path / "a.safetensors")
    torch.save(weights, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.pt"):
        for wrapped in (True, False):
            other = net(seed=1)
            fabric.load_raw(tmp_path / name, fabric.setup(other) if wrapped else other)
            same(other.state_dict(), model.state_dict())
        with pytest.raises(RuntimeError, match=r"Missing key.*embed\.weight"):
            fabric.load_raw(tmp_path / name, net(Untied))


def test_a_file_is_known_by_what_is_in_it(fabric, tmp_path):
    fabric.save(tmp_path / "a.safetensors", {"w": torch.ones(2)})
    (tmp_path / "a.safetensors").rename(tmp_path / "a.bin")
    assert fabric.load(tmp_path / "a.bin")["w"].equal(torch.ones(2))
    for root in (str(tmp_path), f"memory://{os.urandom(4).hex()}"):
        fabric.save(f"{root}/b.pt", {"model": net(), "step": 3})
        get_filesystem(root).mv(f"{root}/b.pt", f"{root}/b.safetensors")
        state = {"model": net(seed=1), "step": 0}
        fabric.load(f"{root}/b.safetensors", state)
        assert state["step"] == 3
        same(state["model"].state_dict(), net().state_dict())
        fabric.save(f"{root}/c.safetensors", {"w": torch.ones(2)})
        get_filesystem(root).mv(f"{root}/c.safetensors", f"{root}/c.bin")
        assert fabric.load(f"{root}/c.bin")["w"].equal(torch.ones(2))
        TorchCheckpointIO().remove_checkpoint(root)


def test_a_filter_takes_part_of_it(fabric, tmp_path):
    path = tmp_path / "a.safetensors"
    fabric.save(path, {"model": net()}, filter={"model": lambda name, value: "norm" not in name})
    assert list(load_file(path)) == ["embed.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.weight"):
        fabric.load(path, {"model": net()})
    with pytest.warns(match="2 of 6 tensors of Tied loaded"):
        fabric.load(path, {"model": net()}, strict=False)


def test_what_does_not_fit_is_told_as_of_a_full_file(fabric, tmp_path):
    wrong = {"embed.weight": torch.ones(3, 3), "hed.weight": torch.ones(2), "head.weight": torch.ones(1)}
    for name in ("a.pt", "a.safetensors"):
        fabric.save(tmp_path / name, {"model": wrong})
    told = []
    for name in ("a.pt", "a.safetensors"):
        with pytest.raises(RuntimeError) as caught:
            fabric.load(tmp_path / name, {"model": net()})
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "torch.Size([3, 3])" in told[0]
    assert "torch.Size([12, 4])" in told[0]


def test_what_was_loaded_stays_when_the_file_is_written_over(fabric, tmp_path):
    path = tmp_path / "a.safetensors"
    fabric.save(path, {"w": torch.ones(10_000)})
    held = fabric.load(path)
    path.write_bytes(b"")
    assert held["w"].sum() == 10_000


def test_rights_stay_and_what_was_there_is_replaced(fabric, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_text("before")
    path.chmod(0o640)
    fabric.save(path, {"w": torch.ones(2)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
    (tmp_path / "fresh").touch()
    fabric.save(tmp_path / "b.safetensors", {"w": torch.ones(2)})
    assert (tmp_path / "b.safetensors").stat().st_mode == (tmp_path / "fresh").stat().st_mode
    os.mkfifo(tmp_path / "pipe.safetensors")
    reader = subprocess.Popen(["cat", tmp_path / "pipe.safetensors"], stdout=subprocess.PIPE)
    fabric.save(tmp_path / "pipe.safetensors", {"w": torch.ones(2)})
    assert len(reader.communicate()[0]) > 16
    assert (tmp_path / "pipe.safetensors").is_fifo()


def test_a_save_that_fails_leaves_the_old_file(fabric, tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    fabric.save(path, {"w": torch.ones(2)})

    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "write_all", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.safetensors'"):
        fabric.save(path, {"w": torch.zeros(2)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
    assert fabric.load(path)["w"].equal(torch.ones(2))


# what is refused


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


REFUSED = [
    (
        lambda m: {"model": m, "optimizer": torch.optim.SGD(m.parameters()), "step": 1, "a": 1, "b": 2},
        "state has 'model' (OrderedDict), 'optimizer' (dict), 'step' (int) and 2 more. Write "
        'fabric.save("PATH", {"model": model}), and the rest to a file of its own, or all of it to a name '
        'like "model.pt".',
    ),
    (lambda m: {"a": m, "b": m}, "state has 'a' (OrderedDict), 'b' (OrderedDict). Write fabric.save("),
    (lambda m: {"optimizer": torch.optim.SGD(m.parameters())}, "state['optimizer'] has 'state' (dict)"),
    (lambda m: {"w": torch.ones(2), "step": 3}, "state has 'step' (int). Write"),
    (
        lambda m: {"model": Extra(2, 2)},
        "state['model'] has '_extra_state' (dict). Write fabric.save(",
    ),
    (lambda m: {"w": {"w": torch.ones(2, dtype=torch.complex128)}}, "'w' (a tensor of torch.complex128). "),
    (lambda m: {"w": torch.ones(2).to_sparse()}, "'w' (a sparse, quantized or nested tensor). "),
    (lambda m: {"w": {0: torch.ones(2)}}, "state['w'] has the key 0 (int). "),
    (lambda m: {"__metadata__": torch.ones(2)}, "state has the key '__metadata__' (str). "),
    (lambda m: {"x": Path("a")}, "state has 'x' (path). "),
    (lambda m: {"model": nn.ReLU()}, "state['model'] has no tensor. "),
    (lambda m: {}, "state has no tensor. "),
]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_what_it_cannot_hold(fabric, tmp_path, make, text, wait):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ConfigurationError) as caught:
        fabric.save(path, make(net()), wait=wait)
    start = f"{path} can hold the tensors of one model and nothing else, but "
    assert str(caught.value).startswith(start)
    assert text.replace("PATH", str(path)) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_it_is_one_file(fabric, tmp_path):
    with pytest.raises(ConfigurationError, match=r"a name that ends with \.safetensors is one file\. Write "):
        fabric.save(tmp_path / "a.safetensors", {"model": net()}, format="sharded")


def test_one_model_is_loaded_from_it(fabric, tmp_path):
    model, path = net(), tmp_path / "a.safetensors"
    fabric.save(path, {"model": model})
    for strict in (True, False):
        with pytest.raises(KeyError, match=r"state has 'model', 'step'\. Load it with fabric\.load_raw\("):
            fabric.load(path, {"model": model, "step": 1}, strict=strict)
    with pytest.raises(KeyError, match="has no 'step' for state"):
        fabric.load(path, {"step": 1})


def test_without_the_package(fabric, tmp_path, monkeypatch):
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    text = r'needs the package safetensors, 0\.8 or newer\. Run `pip install "torch-fabric\[safetensors\]"`'
    for wait in (True, False):
        with pytest.raises(MissingExtraError, match=text):
            fabric.save(tmp_path / "b.safetensors", {"model": net()}, wait=wait)
    with pytest.raises(MissingExtraError, match=text):
        fabric.load(tmp_path / "a.safetensors")
    fabric.save(tmp_path / "a.pt", {"model": net()})


def test_the_package_is_imported_where_it_is_used():
    code = "import sys, torch, fabric.checkpoint.torch_io as io; "
    code += "io.TorchCheckpointIO().save_checkpoint({}, sys.argv[1]); assert 'safetensors' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "/dev/null"], check=True)


class Recorded(CheckpointIO):
    def __init__(self):
        self.called = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.called.append((path, sorted(checkpoint)))

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return {"step": path}

    def remove_checkpoint(self, path):
        pass


def test_a_checkpoint_io_of_others_gets_such_names_and_any_content(tmp_path):
    storage = Recorded()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[storage])
    path = tmp_path / "a.safetensors"
    fabric.save(path, {"model": net(), "step": 1})
    assert storage.called == [(path, ["model", "step"])]
    assert fabric.load(path) == {"step": path}


# damages


def flip(path, place, bit):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_flipped_bits_are_found_and_nothing_is_loaded(fabric, tmp_path):
    path, model = tmp_path / "a.safetensors", fabric.setup(net())
    fabric.save(path, {"model": model})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    whole, draw = path.read_bytes(), random.Random(0)
    start = 8 + int.from_bytes(whole[:8], "little")
    places = [(place, draw.randrange(8)) for place in range(120)]  # the length, and what we put in the header
    places += [(draw.randrange(start), draw.randrange(8)) for _ in range(100)]
    places += [(draw.randrange(start, len(whole)), draw.randrange(8)) for _ in range(100)]
    for place, bit in places:
        flip(path, place, bit)
        with pytest.raises(DamagedCheckpointError, match=r"a\.safetensors is damaged: "):
            fabric.load(path, {"model": model})
        path.write_bytes(whole)
    same(model.state_dict(), before)
    fabric.load(path, {"model": model})
    flip(path, start + 4, 0)
    unchecked = Fabric(accelerator="cpu", devices=1, plugins=[TorchCheckpointIO(verify=False)])
    unchecked.load(path, {"model": model})


def test_every_bit_of_the_digest_counts(fabric, tmp_path):
    """A hexadecimal number may be written with "A" for "a", and with a blank for a leading zero."""
    path = tmp_path / "a.safetensors"
    digest, number = b"", 0
    while not (digest.startswith(b"0") and {*b"abcdef"} & {*digest}):
        fabric.save(path, {"values": torch.tensor([number])})
        whole, number = path.read_bytes(), number + 1
        at = whole.index(b'crc32": "') + len(b'crc32": "')
        digest = whole[at : at + 8]
    for place in range(at, at + 8):
        for bit in range(8):
            flip(path, place, bit)
            with pytest.raises(DamagedCheckpointError, match=r"a\.safetensors is damaged: "):
                fabric.load(path)
            path.write_bytes(whole)


def test_a_file_that_was_cut_or_is_something_else(fabric, tmp_path):
    path = tmp_path / "a.safetensors"
    for verify in (True, False):
        fabric = Fabric(accelerator="cpu", devices=1, plugins=[TorchCheckpointIO(verify=verify)])
        fabric.save(path, {"model": net()})
        whole = path.read_bytes()
        for data in [
            *[whole[:size] for size in (0, 3, 8, 50, len(whole) // 2, len(whole) - 1)],
            whole + b"0",
        ]:
            path.write_bytes(data)
            with pytest.raises(DamagedCheckpointError, match=r"a\.safetensors is damaged: "):
                fabric.load(path)
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint file at .*b\.safetensors"):
        fabric.load(tmp_path / "b.safetensors")


def test_a_file_that_the_package_wrote_anew_has_no_digest(fabric, tmp_path):
    path = tmp_path / "a.safetensors"
    fabric.save(path, {"w": torch.ones(2)})
    save_file({"w": torch.zeros(2)}, path, metadata=header_of(path)["__metadata__"])
    assert fabric.load(path)["w"].equal(torch.zeros(2))


# directories of Hugging Face


def hugging(folder, model, shards=3):
    """As `save_pretrained` writes: tied names once, no word of them."""
    folder.mkdir()
    weights = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    where = {key: names[i % shards] for i, key in enumerate(weights)}
    for name in names:
        held = {key: weights[key].contiguous() for key in weights if where[key] == name}
        save_file(held, folder / name, metadata={"format": "pt"})
    (folder / safetensors.INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    (folder / "config.json").write_text("{}")
    return where


def test_an_index_is_as_good_as_its_directory(fabric, tmp_path):
    model, folder = net(), tmp_path / "hub"
    hugging(folder, model)
    save_file({"other": torch.ones(1)}, folder / "model.safetensors")  # what it does not mean
    for name in (safetensors.INDEX, "model.fp16.safetensors.index.json"):
        (folder / safetensors.INDEX).rename(folder / name)
        for load in (
            lambda m, p=folder / name: fabric.load(p, {"model": m}),
            lambda m, p=folder / name: fabric.load_raw(p, m),
        ):
            other = net(seed=1)
            load(other)
            same(other.state_dict(), model.state_dict())
        (folder / name).rename(folder / safetensors.INDEX)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint file at "):
        fabric.load(folder / "none.safetensors.index.json")


@pytest.mark.parametrize("single", [True, False])
def test_a_directory_of_hugging_face(fabric, tmp_path, single):
    model, folder = net(), tmp_path / "hub"
    hugging(folder, model)
    if single:
        shutil.rmtree(folder)
        folder.mkdir()
        save_model(model, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (lambda m: fabric.load(folder, {"model": m}), lambda m: fabric.load_raw(folder, m)):
        other = fabric.setup(net(seed=1))
        load(other)
        same(other.state_dict(), model.state_dict())
        assert other.module.head.weight is other.module.embed.weight
    assert "norm.weight" in fabric.load(folder)


def test_damaged_directories_of_hugging_face(fabric, tmp_path):
    where = hugging(tmp_path / "hub", net())
    first = where["embed.weight"]
    index = tmp_path / "hub" / safetensors.INDEX

    def told():
        with pytest.raises(DamagedCheckpointError) as caught:
            fabric.load_raw(tmp_path / "hub", net())
        return str(caught.value)

    text = index.read_text()
    index.write_text(text.replace('"embed.weight"', '"embed.weigth"'))
    assert "index.json is damaged: its files are not those that it lists (KeyError('embed.weigth'))" in told()
    for wrong in (
        text[:-5],
        "[]",
        '{"weight_map": [1]}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../b"}}',
    ):
        index.write_text(wrong)
        assert "damaged: " in told()
        assert "model.safetensors.index.json" in told()
    index.write_text(text)
    data = (tmp_path / "hub" / first).read_bytes()
    (tmp_path / "hub" / first).write_bytes(data[:-4])
    assert f"{first} is damaged: " in told()
    (tmp_path / "hub" / first).unlink()
    assert f"index.json is damaged: {first} is missing" in told()
    assert first in told()


def test_another_directory(fabric, tmp_path):
    with pytest.raises(IsADirectoryError, match="is a directory, not a checkpoint"):
        fabric.load(tmp_path)


def test_only_what_is_used_is_read(fabric, tmp_path, monkeypatch):
    hugging(tmp_path / "hub", net())
    read = []
    original = LazyTensor.read
    monkeypatch.setattr(
        LazyTensor, "read", lambda self, into=None: read.append(self.shape) or original(self, into)
    )
    held = TorchCheckpointIO().load_checkpoint(tmp_path / "hub")
    assert not read
    assert held["embed.weight"].shape == (12, 4)
    assert held["embed.weight"].fill(torch.empty(2, 3), [3, 1]).equal(net().embed.weight.detach()[3:5, 1:4])
    assert not read
    fabric.load(tmp_path / "hub", {"norm.weight": 0})
    assert read[0] == (4,)


# consolidate


def test_consolidate(fabric, tmp_path, capsys):
    model = fabric.setup(net())
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
    state = {"model": model, "optimizer": optimizer, "step": 3}
    fabric.save(tmp_path / "c", state, format="sharded")
    output = tmp_path / "deep" / "model.safetensors"
    assert main(["consolidate", str(tmp_path / "c"), "--output", str(output)]) == 0
    text = f"is now also one file: {output}, with the model only: without 'optimizer', 'step'"
    assert text in capsys.readouterr().err
    assert "embed.weight" in load_file(output)
    other = net(seed=1)
    fabric.load(output, {"model": other})
    same(other.state_dict(), model.state_dict())
    assert [entry.name for entry in output.parent.iterdir()] == ["model.safetensors"]


def test_consolidate_what_has_no_model_or_several(fabric, tmp_path, capsys):
    output = str(tmp_path / "m.safetensors")
    for state, code, text in [
        (
            {"ema": net(), "student": net(), "step": 1},
            2,
            "has ['ema', 'student']. Write state =",
        ),
        ({"step": 1}, 2, "has none. Write state = fabric.load("),
        ({"ema": net(), "model": net()}, 0, "with the model only: without 'ema'"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, 0, "is now also one file"),
        ({"ema": net(), "step": 1}, 0, "with the model only: without 'step'"),
        ({"model": Extra(2, 2)}, 2, "state['model'] has '_extra_state' (dict). Write fabric.save("),
        ({"model": Extra(2, 2), "ema": net()}, 2, "state['model'] has '_extra_state' (dict). Write"),
        ({"net": Extra(2, 2), "step": 1}, 2, "state['net'] has '_extra_state' (dict). Write fabric.save("),
        ({"net": net(), "part": {"w": torch.ones(1), "i": 1}}, 2, "has ['net', 'part']. Write state ="),
    ]:
        fabric.save(tmp_path / "c", state, format="sharded")
        assert main(["consolidate", str(tmp_path / "c"), "--output", output, "--force"]) == code
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "pipe", "link"])
def test_an_index_names_files_of_its_directory_only(fabric, tmp_path, name):
    hugging(tmp_path / "hub", net())
    (tmp_path / "outside").write_bytes(b"x")
    os.mkfifo(tmp_path / "hub" / "pipe")
    (tmp_path / "hub" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "hub" / safetensors.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(DamagedCheckpointError, match=rf"index\.json is damaged: .*{name}"):
        fabric.load_raw(tmp_path / "hub", net())


def test_the_cache_of_hugging_face_links_to_its_blobs(fabric, tmp_path):
    blobs, snapshot = tmp_path / "models--a" / "blobs", tmp_path / "models--a" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    hugging(snapshot, net())
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("..", "..", "blobs", str(number)))
    fabric.load_raw(snapshot, net())
