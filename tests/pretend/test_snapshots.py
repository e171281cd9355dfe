"""Copies of a device's state for saves beside the loop: in pinned memory, and the host waits once."""

from __future__ import annotations

import pytest
import torch
from counting import fabric_of, net
from sim import HostSyncs

from fabric.checkpoint.snapshot import Snapshot


def state_on(device):
    torch.manual_seed(0)
    whole = torch.randn(64, 8, device=device)
    weight = torch.nn.Parameter(torch.randn(5, 3, device=device))
    return {"whole": whole, "part": whole[3:5], "weight": weight, "many": [torch.ones(7, device=device)] * 9}


def test_the_host_waits_once_for_all_copies():
    state = state_on("sim")
    with HostSyncs() as waits:
        copy = Snapshot(None).of(state)
    assert sum(waits.kinds.values()) == 1, waits.places
    for name in ("whole", "part", "weight"):
        assert copy[name].device == torch.device("cpu")
        assert copy[name].is_pinned()
        assert copy[name].equal(state[name].cpu())
    assert copy["whole"].untyped_storage().data_ptr() == copy["part"].untyped_storage().data_ptr()
    assert isinstance(copy["weight"], torch.nn.Parameter)


def test_what_is_on_the_host_is_not_pinned_and_nobody_waits():
    with HostSyncs() as waits:
        copy = Snapshot(None).of(state_on("cpu"))
    assert not waits.kinds
    assert not copy["whole"].is_pinned()


def test_each_device_is_waited_for():
    state = [torch.full((3,), float(n), device=f"sim:{n}") for n in range(2)]
    with HostSyncs() as waits:
        copy = Snapshot(None).of(state)
    assert sum(waits.kinds.values()) == 2, waits.places
    assert [one.tolist() for one in copy] == [[0.0] * 3, [1.0] * 3]


def test_the_next_one_takes_the_memory_again():
    state = state_on("sim")
    first = Snapshot(None)
    place = first.of(state)["whole"].data_ptr()
    state["whole"].add_(1)
    second = Snapshot(first).of(state)
    assert second["whole"].data_ptr() == place
    assert second["whole"].equal(state["whole"].cpu())
    assert second["whole"].is_pinned()


def saved_beside(path):
    fabric = fabric_of("ddp")
    model = net(2)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    for _ in range(2):
        fabric.backward(model(torch.ones(8, 512, device=fabric.device)).pow(2).mean())
        optimizer.step()
    expected = {key: value.tolist() for key, value in model.state_dict().items()}
    with HostSyncs(of="snapshot.py") as waits:
        saving = fabric.save(path, {"model": model, "optimizer": optimizer}, wait=False)
    in_snapshot = sum([n for (_, place), n in waits.places.items() if "snapshot.py" in place])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.wait()
    loaded = fabric.load(path)["model"]
    assert {key: value.tolist() for key, value in loaded.items()} == expected
    return in_snapshot


@pytest.mark.device
def test_a_save_beside_the_loop_waits_once(ranks, tmp_path):
    assert ranks.run(saved_beside, str(tmp_path / "a.pt"), world_size=2) == [1, 0]
