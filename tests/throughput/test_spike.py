import json
import pickle

import pytest
import torch
import torch.distributed as dist

from fabric.core.errors import ConfigurationError
from fabric.utilities.spike import SpikeDetection, TrainingSpikeException


class Loop:
    """The part of a Fabric that the detector uses, over the default group where there is one."""

    def __init__(self):
        self.strategy = self
        self.is_global_zero = not dist.is_initialized() or dist.get_rank() == 0

    def reduce_boolean_decision(self, decision, all=True):
        votes = torch.tensor(int(decision))
        if dist.is_initialized():
            dist.all_reduce(votes)
        return bool(votes.item() > 0)


def first_spike(losses, path, **kwargs):
    """Index of the first loss that is a spike; None if none is."""
    detector = SpikeDetection(exclude_batches_path=path, **kwargs)
    for index, loss in enumerate(losses):
        try:
            detector.on_train_batch_end(Loop(), torch.tensor(float(loss)), None, index)
        except TrainingSpikeException as spike:
            return spike.batch_idx
    return None


@pytest.mark.parametrize(
    ("losses", "kwargs", "expected"),
    [
        ([1, 1, 1, 2.9], {}, None),
        ([1, 1, 1, 3], {}, 3),  # worse than the mean 1 by 2 * 1
        ([1, 1, 1, -100], {}, None),  # better
        ([1, 1, 1, -100], {"mode": "max"}, 3),
        ([1, 1, 1, 100], {"mode": "max"}, None),
        ([-1, -1, -1, 0.9], {}, None),
        ([-1, -1, -1, 1.1], {}, 3),
        ([1, 50, 1, 1], {"warmup": 3}, None),
        ([1, 1, 1.4], {"rtol": None, "atol": 0.5}, None),
        ([1, 1, 1.6], {"rtol": None, "atol": 0.5}, 2),
        ([0.1, 0.1, 0.5], {"atol": 1.0}, None),  # both bounds must be passed
        ([0.1, 0.1, 1.2], {"atol": 1.0}, 2),
        ([1, float("nan")], {}, 1),
        ([1, float("inf")], {}, 1),
        ([1, float("nan"), 1, 5], {"finite_only": False}, 3),
        ([float("nan"), 1], {"warmup": 1}, None),
        ([100, 1, 1, 5], {"window": 2}, 3),  # the mean forgets the 100
        ([100, 1, 1, 5], {"window": 3}, None),
        ([1, 1e9], {"rtol": None}, None),
        ([1, float("nan")], {"rtol": None}, 1),
    ],
)
def test_what_is_a_spike(tmp_path, losses, kwargs, expected):
    assert first_spike(losses, tmp_path, **kwargs) == expected


def test_bad_batches_are_written_and_the_spike_does_not_enter_the_mean(tmp_path):
    detector = SpikeDetection(exclude_batches_path=tmp_path / "run")
    for index, loss in enumerate([1.0, 9.0, 1.0, 9.0]):
        if loss == 1:
            detector.on_train_batch_end(Loop(), torch.tensor(loss), None, index)
            continue
        with pytest.raises(TrainingSpikeException, match=f"batch {index}!"):
            detector.on_train_batch_end(Loop(), torch.tensor(loss), None, index)
    assert json.loads((tmp_path / "run" / "skip_batches.json").read_text()) == [1, 3]


def test_state_goes_on(tmp_path):
    detector = SpikeDetection(exclude_batches_path=tmp_path / "bad.json")
    detector.on_train_batch_end(Loop(), torch.tensor(1.0), None, 0)
    detector.bad_batches = [7]
    resumed = SpikeDetection(exclude_batches_path=tmp_path / "bad.json")
    resumed.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    with pytest.raises(TrainingSpikeException):
        resumed.on_train_batch_end(Loop(), torch.tensor(5.0), None, 8)
    assert json.loads((tmp_path / "bad.json").read_text()) == [7, 8]


def spike_on_rank_one(path):
    losses = [1, 1, 50 if dist.get_rank() == 1 else 1, 1]
    return first_spike(losses, f"{path}/{dist.get_rank()}")


def test_one_ranks_spike_stops_all_and_rank_zero_writes(ranks, tmp_path):
    assert ranks.run(spike_on_rank_one, tmp_path, world_size=2) == [2, 2]
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")] == [
        "0/skip_batches.json"
    ]


def test_exception_pickles():
    error = pickle.loads(pickle.dumps(TrainingSpikeException(3)))
    assert (error.batch_idx, str(error)) == (3, "Training spike detected in batch 3!")
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("kwargs", [{"mode": "avg"}, {"rtol": None, "finite_only": False}])
def test_settings_that_find_nothing(kwargs):
    with pytest.raises(ConfigurationError, match="Pass"):
        SpikeDetection(**kwargs)
