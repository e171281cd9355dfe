"""What a rank's memory grows by while a split model goes to files of Hugging Face, and comes from them."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from transformers import LlamaForCausalLM

from fabric import Fabric
from fabric.testing import RankPool

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
import pretrained
from checkpoint import most_of


@pytest.fixture(scope="module")
def ranks():
    """Processes of their own: in these, freed memory goes back at once, as by MALLOC of memory.py."""
    with RankPool(2, timeout=400.0, accelerator="cpu") as pool:
        yield pool


def grown(way, folder):
    """By the most resident memory of each kind, as a share of the model, on each rank."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="zero3")
    fabric.launch()
    malloc = ctypes.CDLL(None)
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        malloc.mallopt(option, 65536)
    folder = Path(folder)
    if way in pretrained.LOADS:
        most = most_of(lambda: pretrained.LOADS[way](fabric, pretrained.LARGE, folder))
    else:
        model = fabric.setup(LlamaForCausalLM(pretrained.config(pretrained.LARGE)))
        most = most_of(lambda: pretrained.SAVES[way](fabric, model, folder))
    return {kind: value / pretrained.size() for kind, value in most.items()}


def named(part):
    (way,) = [way for way in [*pretrained.SAVES, *pretrained.LOADS] if part in way]
    return way


def test_files_are_written_and_read_in_bounded_memory(ranks, tmp_path):
    """A file or a tensor is an eighth of the model; who gathers all of it has it whole."""
    place = tmp_path / "files"
    for rank in ranks.run(grown, named("files of"), str(place), world_size=2):
        assert rank["whole"] < 0.4, rank
    assert len([*place.glob("*.safetensors")]) > 7
    for way in (named("fabric.load"), named("from_pretrained")):
        for rank in ranks.run(grown, way, str(place), world_size=2):
            assert 0.45 < rank["anonymous"] < 0.8, (way, rank)  # its part is a half


def test_parts_are_written_in_bounded_memory(ranks, tmp_path):
    for rank in ranks.run(grown, named("directory of parts"), str(tmp_path), world_size=2):
        assert rank["whole"] < 0.3, rank


def test_the_measure_sees_a_whole_model(ranks, tmp_path):
    zero, one = ranks.run(grown, named("one file"), str(tmp_path), world_size=2)
    assert zero["whole"] > 0.95
    assert one["whole"] < 0.4
