"""The host never waits for the device in a steady step, and no verb copies to the host but what was asked
for.
"""

import warnings
from functools import partial

import pytest
import torch
from counting import Block, fabric_of, net
from sim import HostSyncs

from fabric.strategies import DDPStrategy, FSDPStrategy, PipelineStrategy, ZeRO1Strategy

STRATEGIES = {
    "ddp": DDPStrategy,
    "zero1": ZeRO1Strategy,
    "fsdp": partial(FSDPStrategy, auto_wrap_policy={Block}),
    "zero2": partial(FSDPStrategy, sharding_strategy="SHARD_GRAD_OP", auto_wrap_policy={Block}),
    "pipeline": partial(PipelineStrategy, num_microbatches=2),
}


def steps(strategy, precision, accumulate):
    fabric = fabric_of(STRATEGIES[strategy](), precision=precision)
    warnings.filterwarnings("ignore", message="fabric.log: this Fabric has no logger")
    model = fabric.setup_module(net(2))
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=1e-3))
    rows = torch.randn(4, 8, 512, generator=torch.Generator().manual_seed(1)).pin_memory()
    seen = []
    for number in range(6):
        with HostSyncs() as waits:
            optimizer.zero_grad()
            for micro in range(accumulate):
                last = micro == accumulate - 1
                with fabric.no_backward_sync(model, enabled=not last):
                    loss = model(fabric.to_device(rows[micro])).pow(2).mean()
                    fabric.backward(loss / accumulate)
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
            fabric.clip_gradients(model, optimizer, clip_val=0.01)
            optimizer.step()
        seen.append(
            (dict(waits.kinds), {f"{kind} @ {place}": n for (kind, place), n in waits.places.items()})
        )
        if number == 3:
            assert float(norm) > 0  # who asks for it waits
            fabric.log_dict({"loss": loss})
    return seen[1:]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_steady_step_waits_for_nothing(ranks, strategy, precision):
    for accumulate in (1, 2):
        for seen in ranks.run(steps, strategy, precision, accumulate, world_size=2):
            for number, (kinds, places) in enumerate(seen, 2):
                if number in (2, 4):  # ranks compare their replicas, in step 2 also first batches and losses
                    ours = ("fabric/replicas/", "fabric/loss_check/")[: 4 // number]
                    assert all(any(file in place for file in ours) for place in places), seen
                else:
                    assert kinds == {}, seen


def not_finite(strategy, folder):
    fabric = fabric_of(STRATEGIES[strategy]())
    model = fabric.setup_module(net(2))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(8, 512, device=fabric.device)

    def clip(factor, **kwargs):
        fabric.backward(model(x).pow(2).mean() * factor)
        return fabric.clip_gradients(model, optimizer, max_norm=1.0, **kwargs)

    assert clip(float("nan")).isnan()
    with pytest.raises(
        RuntimeError, match=r"is nan \(non-finite\).* call before this one \(.*test_host_syncs.py:"
    ):
        clip(1.0)
    optimizer.zero_grad()
    clip(1.0)
    clip(float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.save(folder / strategy, {"model": model})
    assert not (folder / strategy).exists()
    optimizer.zero_grad()
    clip(float("nan"), error_if_nonfinite=False)
    clip(1.0, error_if_nonfinite=False)
    fabric.save(folder / strategy, {"model": model})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_norm_that_is_not_finite_is_an_error_in_the_next_call(ranks, tmp_path, strategy):
    ranks.run(not_finite, strategy, tmp_path, world_size=2)
