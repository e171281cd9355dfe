"""A subject for test_processes: `processes.py HOW WHAT [MORE]`. Launchers and environments, no Fabric."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fabric.core.cores import share_cores
from fabric.launch.functions.multiprocess import MultiprocessLauncher
from fabric.launch.script import ScriptLauncher
from fabric.plugins.environments import LocalEnvironment
from fabric.plugins.environments.rendezvous import rendezvous


def say(**what):
    # One write: lines of several ranks do not mix.
    os.write(1, (json.dumps(what) + "\n").encode())


def join(environment, seconds=60):
    share_cores(environment.world_size())  # as a strategy does
    rank, size = environment.global_rank(), environment.world_size()
    store = rendezvous(environment, rank, size, timedelta(seconds=seconds))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def add(environment):
    join(environment)
    total = torch.tensor([environment.global_rank() + 1.0])
    dist.all_reduce(total)
    say(
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        sum=total.item(),
        threads=torch.get_num_threads(),
        pid=os.getpid(),
    )
    dist.destroy_process_group()
    return {"rank": environment.global_rank(), "total": total}


def wait(environment):
    join(environment)
    dist.barrier()
    say(pid=os.getpid())
    time.sleep(60)


def compute(environment):
    assert torch.get_num_threads() == 2
    torch.randn(500, 500) @ torch.randn(500, 500)
    torch.randn(1_000_000).exp()


def give_lambda(environment):
    return {"f": lambda: 1}


SCRIPTS = ("script", "module")
PLACE = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
)
WORK = {"sum": add, "wait": wait, "threads": compute, "lambda": give_lambda}


def main():
    how, what, *more = sys.argv[1:]
    if more and os.path.isdir(more[0]):  # noqa: PTH112
        os.chdir(more[0])
    environment = LocalEnvironment()
    dropped = ("FABRIC_JOB_SECRET", "FABRIC_STORE_FD")  # by a rank that joins
    before = {name: value for name, value in os.environ.items() if name not in dropped}
    function = WORK[what]
    if how in SCRIPTS:
        ScriptLauncher(environment, 2).launch(function, environment)
    elif how == "cli":
        assert environment.creates_processes_externally
        function(environment)
    elif how == "lonely":
        environment.set_world_size(2)
        join(environment, seconds=2)
    else:
        threads = []  # a thread beside this one may hold a lock of the C library, which a fork would copy
        os.register_at_fork(before=lambda: threads.append(len([*Path("/proc/self/task").iterdir()])))
        for _ in range(2 if "twice" in more else 1):
            if what == "threads":
                compute(environment)
            result = MultiprocessLauncher(environment, 2, how).launch(function, environment)
            if what == "sum":
                say(result=[result["rank"], result["total"].item()], shared=result["total"].is_shared())
        if how == "fork":
            say(threads_at_forks=threads)
    # By JOINED a child process of a rank knows that it is no rank. The first process of a script is a rank.
    own = {name: os.environ[name] for name in os.environ.keys() - before.keys()} if how in SCRIPTS else {}
    assert own.keys() <= {"FABRIC_JOINED", "FABRIC_LAUNCHED", *PLACE}, own
    now = dict(os.environ) | {"FABRIC_JOINED": ""}
    wanted = before | own | {"FABRIC_JOINED": ""}
    assert now == wanted, {name for name, _ in now.items() ^ wanted.items()}


if __name__ == "__main__":
    main()
