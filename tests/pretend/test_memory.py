"""How many bytes a device holds at setup and in a step: of FSDP its part and one block, wherever the model
was built.
"""

import pytest
import torch
import torch.distributed as dist
from counting import LAYER, WIDTH, Block, fabric_of, net, peak, size_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fabric.strategies import DDPStrategy, FSDPStrategy, PipelineStrategy, ZeRO1Strategy

BLOCK = LAYER + WIDTH * 4
SMALL = 32 * 2**10
"""Biases and the head, in messages and in padded parts."""


def fsdp(**settings):
    return FSDPStrategy(auto_wrap_policy={Block}, **settings)


def setup(how, **settings):
    fabric = fabric_of(fsdp(**settings))
    with peak() as found:
        if how == "empty":
            with fabric.init_module(empty_init=True):
                model = net()
        elif how == "device":
            with fabric.init_module():
                model = net()
        elif how == "meta":
            with torch.device("meta"):
                model = net()
        else:
            model = net()
        whole = size_of(model)
        if how == "with an optimizer":
            optimizer = torch.optim.Adam(model.parameters())
            model, optimizer = fabric.setup(model, optimizer)
        else:
            model = fabric.setup_module(model)
    held = sum([p.to_local().nbytes for p in model.parameters()])
    weights = {key: value.norm() for key, value in fabric.strategy.get_module_state_dict(model).items()}
    return found.most / BLOCK, found.now, whole, held, weights


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("how", ["host", "with an optimizer", "empty", "meta", "device"])
def test_fsdp_brings_one_block_after_the_other(ranks, how, world):
    for most, now, whole, held, weights in ranks.run(setup, how, world_size=world):
        part = whole / world
        assert held - SMALL <= now <= held  # gloo may free a message of before
        assert now <= part + SMALL
        begun = whole if how == "device" else part  # which fabric.init_module() builds there
        assert most <= (begun + BLOCK + BLOCK / world + SMALL) / BLOCK
        if how != "meta":  # whose values are drawn on the device
            torch.testing.assert_close(weights, {k: v.norm() for k, v in net().state_dict().items()})


def test_offloaded_parameters_leave_the_device_block_by_block(ranks):
    for how in ("host", "empty"):
        for most, now, *_ in ranks.run(setup, how, world_size=2, cpu_offload=True):
            assert now == 0
            assert most <= 1.5 + SMALL / BLOCK


class Mixed(nn.Module):
    """Tied weights, a buffer, and a layer that is left whole."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.own = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.one.weight.kind = "tied"
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.own(self.two(torch.relu(self.one(x))) * self.scale)


def mixed():
    model = Mixed()
    fabric = fabric_of(FSDPStrategy(auto_wrap_policy=set(), ignored_states=list(model.own.parameters())))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    own = model.own.weight
    model, optimizer = fabric.setup(model, optimizer)
    assert {p.device for p in model.parameters()} | {model.scale.device} == {fabric.device}
    assert model.own.weight is own
    assert model.one.weight is model.two.weight
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2))
    fabric.backward(model(fabric.to_device(x[fabric.global_rank])).pow(2).mean())
    optimizer.step()
    state = fabric.strategy.get_module_state_dict(model)
    return {key: state[key].cpu() for key in ("one.weight", "two.weight", "two.bias", "scale")}


def test_what_is_left_whole_comes_to_the_device_and_ties_stay(ranks):
    plain = Mixed()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2)).flatten(0, 1)).pow(
        2
    ).mean().backward()
    optimizer.step()
    for state in ranks.run(mixed, world_size=2):
        for key, value in state.items():
            torch.testing.assert_close(value, plain.state_dict()[key])


def step(strategy, clip):
    """Most bytes in setup, and in a step beyond what stays; of ours, and of torch alone."""
    found = {}
    for own in (True, False):
        fabric = fabric_of({"ddp": DDPStrategy, "zero1": ZeRO1Strategy, "fsdp": fsdp}[strategy]())
        model = net()
        with peak() as setup:
            if own:
                model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
            else:
                model, optimizer = wrapped(strategy, model, fabric.device)
        x = torch.ones(8, WIDTH, device=fabric.device)
        for _ in range(3):
            with peak() as used:
                optimizer.zero_grad()
                loss = model(x).pow(2).mean()
                fabric.backward(loss) if own else loss.backward()
                if clip and own:
                    fabric.clip_gradients(model, optimizer, max_norm=0.1)
                elif clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        found[own] = setup.most / BLOCK, setup.now / BLOCK, used.most / BLOCK
        del model, optimizer, loss
        fabric.strategy.teardown()
    return found[True], found[False]


def wrapped(strategy, model, device):
    model.to(device)
    if strategy == "fsdp":
        mesh = init_device_mesh("sim", (dist.get_world_size(),))
        for block in [m for m in model if isinstance(m, Block)]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_step_takes_no_more_than_with_torch_alone(ranks, strategy, clip):
    for ours, torchs in ranks.run(step, strategy, clip, world_size=2):
        assert all([a <= b + 0.1 for a, b in zip(ours, torchs, strict=True)])


def stages():
    fabric = fabric_of(PipelineStrategy(num_microbatches=2))
    with peak() as found:
        model = fabric.setup_module(net())
    return (
        found.most / BLOCK,
        found.now / BLOCK,
        sum([p.nbytes for p in model.parameters() if p.numel()]) / BLOCK,
    )


def test_a_stage_of_a_pipeline_brings_its_own_blocks_and_one_of_the_others(ranks):
    for most, now, held in ranks.run(stages, world_size=2):
        assert now == held
        assert 3.9 < held < 4.1
        assert most <= held + 1.1
