"""DeepSpeed's configuration: keywords, a dictionary, a file, a variable; and what contradicts."""

from __future__ import annotations

import json

import pytest
import torch
from test_deepspeed import (
    WORLD,
    Net,
    Plain,
    Split,
    assert_same,
    batch,
    ended,
    launched,
    loss_of,
    trained,
    values,
)
from torch.optim import AdamW

from fabric import Fabric
from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.integrations.deepspeed import DeepSpeedStrategy

pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own
BUCKETS = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1234}}


def test_keywords_a_dictionary_a_file_and_a_variable_say_the_same(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BUCKETS))
    expected = DeepSpeedStrategy(stage=1, reduce_bucket_size=1234).config
    assert expected["zero_optimization"]["stage"] == 1
    assert expected["zero_optimization"]["reduce_bucket_size"] == 1234
    given = json.loads(json.dumps(BUCKETS))
    assert DeepSpeedStrategy(config=given).config == expected
    assert given == BUCKETS
    assert DeepSpeedStrategy(config=file).config == DeepSpeedStrategy(config=str(file)).config == expected
    monkeypatch.setenv("FABRIC_DEEPSPEED_CONFIG_PATH", str(file))
    assert DeepSpeedStrategy().config == expected
    assert DeepSpeedStrategy(config={"zero_optimization": {"stage": 3}}).layout.stage == 3  # goes first


@pytest.mark.parametrize(
    ("name", "stage", "offloaded"),
    [
        ("deepspeed", 2, set()),
        ("deepspeed_stage_1", 1, set()),
        ("deepspeed_stage_1_offload", 1, {"offload_optimizer"}),
        ("deepspeed_stage_2", 2, set()),
        ("deepspeed_stage_2_offload", 2, {"offload_optimizer"}),
        ("deepspeed_stage_3", 3, set()),
        ("deepspeed_stage_3_offload", 3, {"offload_optimizer", "offload_param"}),
        ("deepspeed_stage_3_offload_nvme", 3, {"offload_optimizer", "offload_param"}),
    ],
)
def test_names(name, stage, offloaded):
    zero = Fabric(accelerator="cpu", devices=2, strategy=name).strategy.config["zero_optimization"]
    assert zero["stage"] == stage
    assert {key for key in zero if key.startswith("offload_")} == offloaded
    devices = {zero[key]["device"] for key in offloaded}
    assert devices <= ({"nvme"} if name.endswith("nvme") else {"cpu"})


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        (
            {"stage": 3, "config": BUCKETS},
            ConfigurationError,
            r"DeepSpeedStrategy\(stage=3\) and zero_optimization.stage=1 in config contradict each other",
        ),
        ({"stage": 0}, ConfigurationError, "with stage 0 splits nothing: that is DDP"),
        ({"zero_optimization": False}, ConfigurationError, "without zero_optimization splits nothing"),
        (
            {"config": 3},
            ArgumentTypeError,
            "config must be a dictionary or the path of a JSON file, but is a int",
        ),
        (
            {"config": "/not/there.json"},
            ConfigurationError,
            "config names /not/there.json, which cannot be read",
        ),
        (
            {"config": {"gradient_accumulation_steps": 4}},
            ConfigurationError,
            "gradient_accumulation_steps=4 in config: how many backwards make a step is your loop's",
        ),
    ],
)
def test_keywords_that_cannot_be(keywords, error, text):
    with pytest.raises(error, match=text):
        DeepSpeedStrategy(**keywords)


def test_a_file_that_is_no_dictionary(tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    monkeypatch.setenv("FABRIC_DEEPSPEED_CONFIG_PATH", str(file))
    file.write_text("{")
    with pytest.raises(ConfigurationError, match=r"FABRIC_DEEPSPEED_CONFIG_PATH names .*, which is no JSON"):
        DeepSpeedStrategy()
    file.write_text("[1]")
    with pytest.raises(ConfigurationError, match="which holds a list, no dictionary"):
        DeepSpeedStrategy()


def test_precisions_that_cannot_be():
    with pytest.raises(ConfigurationError, match=r"64-true.*DeepSpeed's engine has no float64"):
        Fabric(accelerator="cpu", devices=2, strategy="deepspeed", precision="64-true")


def of_the_configuration(folder):
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 3}},
    }
    fabric = launched("2", config=config)
    on = Split(fabric)
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(fabric.strategy.optimizer_of(model))
    rates = []
    for step in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        on.backward(loss_of(model, on.part(batch(step)), aside=True))
        optimizer.step()
    before = values(fabric, [model])
    fabric.save(folder, {"model": model, "optimizer": optimizer})
    optimizer.zero_grad()
    on.backward(loss_of(model, on.part(batch(9)), aside=True))
    optimizer.step()
    after = values(fabric, [model])
    optimizer.zero_grad()
    fabric.load(folder, {"model": model, "optimizer": optimizer})
    assert torch.equal(values(fabric, [model])[0]["last.weight"], before[0]["last.weight"])
    on.backward(loss_of(model, on.part(batch(9)), aside=True))
    optimizer.step()
    assert torch.equal(values(fabric, [model])[0]["last.weight"], after[0]["last.weight"])
    fabric.strategy.teardown()
    return before, rates


def test_an_optimizer_and_a_schedule_of_the_configuration(ranks, tmp_path):
    found = ranks.run(of_the_configuration, str(tmp_path / "own"), world_size=WORLD)
    on, model = Plain(), Net()
    optimizer = AdamW(trained(model), lr=0.05, weight_decay=0.1)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = found[0][1][step]
        optimizer.zero_grad()
        on.backward(loss_of(model, batch(step), aside=True))
        optimizer.step()
    assert_same([models for models, _ in found], [model], rtol=1e-5, atol=1e-5)
    assert len(set(found[0][1])) > 2


def clipped_by_the_configuration(way):
    fabric = launched(way, config={"gradient_clipping": 0.3})
    on = Split(fabric)
    model = Net()
    model, optimizer = fabric.setup(model, AdamW(trained(model), lr=0.05, eps=0.1))
    for step in range(3):
        optimizer.zero_grad()
        on.backward(loss_of(model, on.part(batch(step)), aside=True) * 10)
        optimizer.step()
    return ended(fabric, [model])


@pytest.mark.parametrize("way", ["1", "2", "3"])
def test_clipping_by_the_configuration(ranks, way):
    found = ranks.run(clipped_by_the_configuration, way, world_size=WORLD)
    model = Net()
    optimizer = AdamW(trained(model), lr=0.05, eps=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (loss_of(model, batch(step), aside=True) * 10).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3) > 0.3
        optimizer.step()
    assert_same(found, [model], rtol=1e-4, atol=1e-4)


def refusals(way):
    told = []

    def tell(call):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is what is compared
            call()
        told.append(f"{type(caught.value).__name__}: {caught.value}")

    fabric = launched(way, config={"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    model = Net()
    tell(lambda: fabric.setup(model, AdamW(trained(model))))
    fabric.strategy.teardown()
    fabric = launched(way, config={"bf16": {"enabled": True}})
    return told


def test_both_have_an_optimizer(ranks):
    with pytest.raises(
        Exception, match=r"precision='32-true'\) and bf16.enabled=True in DeepSpeed's config"
    ) as e:
        ranks.run(refusals, "2", world_size=WORLD)
    assert "contradict each other. Write the precision in Fabric only" in str(e.value)


def made_whole(way, precision):
    """Split as it is made."""
    fabric = launched(way, precision=precision)
    on = Split(fabric)
    with fabric.init_module():
        model = Net()
    split = [p.numel() for p in model.parameters()]
    model, optimizer = fabric.setup(model, AdamW(trained(model), lr=0.05))
    for step in range(3):
        optimizer.zero_grad()
        on.backward(loss_of(model, on.part(batch(step)), aside=True))
        optimizer.step()
    return ended(fabric, [model]), split


@pytest.mark.parametrize("way", ["2", "3", "3 offloaded"])
def test_models_that_are_split_as_they_are_made(ranks, way):
    told = ranks.run(made_whole, way, "32-true", world_size=WORLD)
    model = Net()
    optimizer = AdamW(trained(model), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(step), aside=True).backward()
        optimizer.step()
    assert_same([found for found, _ in told], [model], rtol=1e-5, atol=1e-5)
    assert all([(sum(split) == 0) == way.startswith("3") for _, split in told])
