import pytest
import torch

from fabric.utilities.optimizer import move_optimizer_to_device


def stepped(optimizer_class, **kwargs):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizer_class([parameter], **kwargs)
    parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer, optimizer.state[parameter]


@pytest.mark.parametrize(("fused", "step_device"), [(False, "cpu"), (True, "meta")])
def test_state_moves_in_place_and_host_step_counts_stay(fused, step_device):
    optimizer, state = stepped(torch.optim.AdamW, lr=0.1, fused=fused)
    move_optimizer_to_device(optimizer, "meta")
    assert {key: value.device.type for key, value in state.items()} == {
        "step": step_device,
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_plain_values_and_parameters_stay():
    optimizer, state = stepped(torch.optim.SGD, lr=0.1, momentum=0.9)
    state["count"] = 3
    move_optimizer_to_device(optimizer, torch.device("meta"))
    assert state["count"] == 3
    assert state["momentum_buffer"].is_meta
    assert not optimizer.param_groups[0]["params"][0].is_meta


@pytest.mark.gpu
def test_training_goes_on_after_a_round_trip():
    optimizer, state = stepped(torch.optim.AdamW, lr=0.1)
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.data, parameter.grad = parameter.data.cuda(), parameter.grad.cuda()
    move_optimizer_to_device(optimizer, "cuda")
    optimizer.step()
    assert state["step"].item() == 2
