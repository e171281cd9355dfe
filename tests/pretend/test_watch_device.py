"""A device that stops: the host waits in a line of the user's, and the watchdog says for what."""

import os
import re
import sys
import threading
import time

import sim
import torch
from counting import fabric_of


class Listener:
    """Stands in for stderr; says when a table has come."""

    def __init__(self):
        self.text, self.told = "", threading.Event()

    def write(self, text):
        self.text += text
        if "Where the ranks are" in text:
            self.told.set()

    def flush(self):
        pass


def stopped(told, busy):
    os.environ["FABRIC_HANG_REPORT_AFTER"] = "1"
    stderr, sys.stderr = sys.stderr, Listener()
    fabric = fabric_of("ddp")
    try:
        x = torch.ones(2, device=fabric.device)
        fabric.barrier()
        if fabric.global_rank == 0 and busy:
            sys.stderr.told.wait(3)  # at one place, and the device does nothing wrong
        elif fabric.global_rank == 0:
            with sim.stalled():
                threading.Thread(target=lambda: sys.stderr.told.wait(60) and sim._sim.stall(False)).start()
                assert x.sum().item() == 2
            told.touch()
        elif not busy:  # in no call of all ranks, or the table would be asked for here, now and then
            while not told.exists():
                time.sleep(0.05)
        return sys.stderr.text
    finally:
        fabric.barrier()
        fabric.strategy.find_part("hang report").watchdog.stop()
        sys.stderr = stderr
        os.environ["FABRIC_HANG_REPORT_AFTER"] = "off"


def test_a_device_that_has_stopped_is_reported_with_the_users_line(ranks, tmp_path):
    text, _ = ranks.run(stopped, tmp_path / "told", False, world_size=2)
    assert re.search(r"rank 0 has waited \d+ s in work of sim:0 .*Where the ranks are:", text)
    assert re.search(r"  0 +\S+ +work of sim:0 +\d+ s +\S*test_watch_device.py:\d+ in stopped", text)


def test_a_host_that_is_busy_is_not(ranks, tmp_path):
    assert ranks.run(stopped, tmp_path / "told", True, world_size=2)[0] == ""
