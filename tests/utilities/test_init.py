import pytest
import torch
from torch import nn

from fabric.utilities.init import EmptyInit, has_meta_parameters


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.uniform_,
        nn.init.normal_,
        lambda x: nn.init.constant_(x, 3.0),
        lambda x: nn.init.constant_(tensor=x, val=3.0),
        nn.init.ones_,
        nn.init.zeros_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
    ],
)
def test_init_functions_draw_nothing_and_leave_no_number(fill):
    tensor = torch.full((4, 4), 7.0)
    state = torch.get_rng_state()
    with EmptyInit():
        assert fill(tensor) is tensor
    assert tensor.isnan().all()
    assert torch.equal(torch.get_rng_state(), state)


def test_functions_of_several_steps_still_run():
    tensor = torch.full((4, 4), float("nan"))
    with EmptyInit():
        assert nn.init.trunc_normal_(tensor.clone()).isfinite().all()
        assert nn.init.orthogonal_(tensor.clone()).isfinite().all()
        assert nn.init.eye_(tensor.clone()).equal(torch.eye(4))


def test_layers_draw_nothing_and_other_code_keeps_its_effect():
    state = torch.get_rng_state()
    with EmptyInit():
        layers = nn.Sequential(
            nn.Linear(3, 3),
            nn.Conv2d(3, 3, 3),
            nn.MultiheadAttention(4, 2),
            nn.LSTM(2, 2),
            nn.Embedding(3, 2),
        )
        drawn = torch.equal(torch.get_rng_state(), state)
        norm = nn.BatchNorm1d(2)
        mine = torch.empty(2).fill_(5.0)
        random = torch.empty(2).uniform_(3, 4)
    assert drawn, "no random numbers may be drawn"
    assert sum(p.numel() for p in layers.parameters()) > 0
    assert norm.running_var.tolist() == [1, 1]
    assert mine.tolist() == [5, 5]
    assert (random >= 3).all()


def test_meta_parameters_and_buffers_are_found():
    assert not has_meta_parameters(nn.BatchNorm1d(2))
    assert has_meta_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    module = nn.Module()
    module.register_buffer("b", torch.empty(2, device="meta"))
    assert has_meta_parameters(module)
