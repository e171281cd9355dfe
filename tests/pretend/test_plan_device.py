"""The peaks that `fabric plan` predicts, against those that the pretend device counts."""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from fabric.tools.plan.simulate import Case, simulate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measured(*case):
    return benchmark().measured(*case)


def predicted(*case):
    return benchmark().predicted(*case)


def benchmark():
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    import plan

    return plan


@pytest.mark.parametrize(
    ("model", "optimizer", "precision", "strategy"),
    [
        ("mlp", "Adam", "32-true", "ddp"),
        ("convnet", "SGD", "bf16-mixed", "zero1"),
        ("transformer", "Adam", "bf16-mixed", "zero3"),
        ("checkpointed", "Adam", "32-true", "zero2"),
        ("embedding", "SGD", "32-true", "zero1"),
        ("lora", "Adam", "bf16-mixed", "ddp"),
        ("mlp", "SGD", "32-true", "pipeline"),
    ],
)
def test_the_predicted_peak_is_that_of_the_device(ranks, model, optimizer, precision, strategy):
    case = (model, optimizer, 8)
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # in which no test has used the device
        found = [fresh.submit(predicted, strategy, precision, world, *case).result(60) for world in (1, 2, 3)]
    for world, prediction in enumerate(found, 1):
        assert not prediction.error
        peaks = ranks.run(measured, strategy, precision, *case, world_size=world)
        assert prediction.peak.bytes == pytest.approx(max(peaks), rel=0.01)  # promised: 5 %


def plan_after_a_backward():
    model = torch.nn.Linear(2, 2, device="sim")
    model(torch.ones(1, 2, device="sim")).sum().backward()

    def loop():
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

    return simulate(Case(1), loop).error


def test_a_plan_after_a_backward_on_the_device_is_refused(ranks):
    assert (
        "before the first use of a device" in ranks.run(plan_after_a_backward, world_size=1, group=False)[0]
    )
