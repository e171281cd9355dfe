"""The peaks that `fabric plan` predicts, against those that the pretend device counts."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measured(*case):
    return benchmark().measured(*case)


def benchmark():
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    import plan

    return plan


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "optimizer", "precision", "strategy"),
    [
        ("mlp", "Adam", "32-true", "ddp"),
        ("convnet", "SGD", "bf16-mixed", "zero1"),
        ("transformer", "Adam", "bf16-mixed", "zero3"),
        ("checkpointed", "Adam", "32-true", "zero2"),
        ("embedding", "SGD", "32-true", "zero1"),
        ("lora", "Adam", "bf16-mixed", "ddp"),
    ],
)
def test_the_predicted_peak_is_that_of_the_device(ranks, model, optimizer, precision, strategy, world):
    case = (model, optimizer, 8)
    found = benchmark().predicted(strategy, precision, world, *case)
    assert not found.error
    peaks = ranks.run(measured, strategy, precision, *case, world_size=world)
    assert found.peak.bytes == pytest.approx(max(peaks), rel=0.01)  # promised: 5 %
