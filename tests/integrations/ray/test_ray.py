"""Ranks as actors, on a cluster of two nodes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import loops
import pytest
import torch

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError, RayTaskError

from fabric import Fabric
from fabric.core.errors import ConfigurationError, LaunchError
from fabric.integrations.ray import RayEnvironment

pytestmark = pytest.mark.filterwarnings("ignore:::ray", "ignore::ResourceWarning", "ignore::FutureWarning")
HERE = Path(__file__).parent
SMALL = 100 * 2**20


@pytest.fixture(scope="module")
def cluster():
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": SMALL})
    made.add_node(num_cpus=1, object_store_memory=SMALL)
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def fabric_of(strategy="ddp", devices=2, **settings):
    return Fabric(accelerator="cpu", devices=devices, strategy=strategy, plugins=RayEnvironment(**settings))


def pids(folder):
    return [int(path.read_text()) for path in sorted(Path(folder).glob("pid-*"))]


def gone(folder):
    """Whether all processes that noted themselves have ended, within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not [pid for pid in pids(folder) if Path(f"/proc/{pid}").exists()]:
            return len(pids(folder)) == 2
        threading.Event().wait(0.2)
    return False


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_actors_on_two_nodes_train_what_plain_torch_trains(strategy):
    weights, places = fabric_of(strategy, placement="STRICT_SPREAD").launch(loops.train, 8)
    assert places == [(0, 0, 0), (1, 0, 1)]
    torch.testing.assert_close(weights, loops.plain(8, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("cluster")
def test_one_actor_by_default_is_one():
    weights, places = fabric_of("auto", devices=1).launch(loops.train, 3)
    assert places == [(0, 0, 0)]
    torch.testing.assert_close(weights, loops.plain(3, 1), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("cluster")
def test_the_cause_of_a_failed_rank_comes_through(tmp_path):
    with pytest.raises(LaunchError, match=r"^rank 1 of 2 failed: ValueError: no such thing$") as caught:
        fabric_of().launch(loops.fails, str(tmp_path))
    assert isinstance(caught.value.__cause__, RayTaskError)
    assert isinstance(caught.value.__cause__, ValueError)
    assert gone(tmp_path)


@pytest.mark.usefixtures("cluster")
def test_a_dead_actor_ends_the_others(tmp_path):
    with pytest.raises(LaunchError, match=r"failed: \w*Actor\w*Error") as caught:
        fabric_of().launch(loops.dies, str(tmp_path))
    assert isinstance(caught.value.__cause__, RayActorError)
    assert gone(tmp_path)


@pytest.mark.usefixtures("cluster")
def test_a_cluster_without_room():
    with pytest.raises(LaunchError, match=r"no room for 3 ranks \(1 CPU each\) in [23] s: it has"):
        fabric_of(devices=3, startup_seconds=2).launch(loops.train, 1)
    fabric = Fabric(accelerator="cuda", devices=2, plugins=RayEnvironment(startup_seconds=2))
    with pytest.raises(LaunchError, match=r"no room for 2 ranks \(1 CPU, 1 GPU each\)"):
        fabric.launch(loops.train, 1)
    _, places = fabric_of(devices=3, startup_seconds=2, min_workers=2).launch(loops.train, 1)
    assert len(places) == 2


def test_interrupted_by_hand_it_leaves_no_actor(cluster, tmp_path):
    code = (
        "import ray, loops\nfrom fabric import Fabric\nfrom fabric.integrations.ray import RayEnvironment\n"
        f"ray.init(address={cluster.address!r}, logging_level='ERROR', log_to_driver=False)\n"
        "fabric = Fabric(accelerator='cpu', devices=2, plugins=RayEnvironment())\n"
        f"fabric.launch(loops.waits, {str(tmp_path)!r})\n"
    )
    driver = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while len(pids(tmp_path)) < 2 and driver.poll() is None and time.monotonic() < deadline:
            threading.Event().wait(0.1)
        driver.send_signal(signal.SIGINT)
        _, said = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert "KeyboardInterrupt" in said
    assert gone(tmp_path)


def test_a_run_that_lost_a_node_goes_on_with_fewer_ranks(tmp_path):
    """The last test: the node stays lost."""
    ray.shutdown()
    handler = signal.getsignal(signal.SIGTERM)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": SMALL})
    second = made.add_node(num_cpus=1, object_store_memory=SMALL)
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)

    def lose():
        deadline = time.monotonic() + 120
        while len(pids(tmp_path)) < 2 and time.monotonic() < deadline:
            threading.Event().wait(0.1)
        made.remove_node(second, allow_graceful=False)

    loser = threading.Thread(target=lose)
    loser.start()
    try:
        fabric = fabric_of(min_workers=1, max_failures=2, placement="STRICT_SPREAD")
        first, world, weights = fabric.launch(loops.survives, str(tmp_path))
    finally:
        loser.join()
        ray.shutdown()
        made.shutdown()
        signal.signal(signal.SIGTERM, handler)
    assert (first, world) == (5, 1)
    expected = loops.net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        loops.loss_of(expected, torch.cat([loops.batch(step, rank) for rank in range(2)])).backward()
        optimizer.step()
    torch.testing.assert_close(weights, dict(expected.state_dict()), rtol=1e-5, atol=1e-6)


def test_bad_input():
    with pytest.raises(ConfigurationError, match="its ranks run on machines that this process does not see"):
        fabric_of(devices="auto")
    with pytest.raises(ConfigurationError, match=r"\(min_workers=0, max_failures=0\): a run has 1"):
        RayEnvironment(min_workers=0)
    with pytest.raises(LaunchError, match="Actors of Ray run a function, but launch\\(\\) got none"):
        fabric_of().launch()
