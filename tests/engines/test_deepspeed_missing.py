"""DeepSpeed where it is not installed."""

from __future__ import annotations

import importlib.util
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fabric import Fabric
from fabric.core.errors import ConfigurationError, MissingExtraError, UsageError
from fabric.integrations.deepspeed.strategy import DeepSpeedStrategy
from fabric.strategies import DDPStrategy


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_stage_3_offload"])
def test_a_missing_package(name):
    with pytest.raises(MissingExtraError) as caught:
        Fabric(accelerator="cpu", devices=2, strategy=name)
    assert str(caught.value) == (
        'strategy="deepspeed" needs the package deepspeed, which is not installed. Run `pip install '
        '"torch-fabric[deepspeed]"`, or write strategy="zero1", "zero2" or "fsdp", which need nothing else.'
    )


class Bomb:
    def __reduce__(self):
        return os.mkdir, (self.target,)

    def __init__(self, target):
        self.target = str(target)


def load_engines_directory(path, weights_only):
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    kind = UsageError if weights_only is None else ConfigurationError
    with (
        mock.patch.object(DDPStrategy, "opened", DeepSpeedStrategy.opened),  # needs no engine so far
        pytest.raises(kind) as caught,
    ):
        fabric.load(path, {"step": 0}, weights_only=weights_only)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_only_is_never_dropped_on_the_way_to_the_engine(ranks, tmp_path, world_size):
    path = tmp_path / "engine"
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    torch.save(Bomb(tmp_path / "ran"), path / "checkpoint" / "mp_rank_00_model_states.pt")
    for text in ranks.run(load_engines_directory, path, True, world_size=world_size):
        assert text.startswith(f"weights_only=True was given for {path}, a directory of DeepSpeed's, which")
    assert not (tmp_path / "ran").exists()
    for text in ranks.run(load_engines_directory, path, None, world_size=world_size):
        assert f"has the parts of 0 ranks, and there are {world_size}" in text
