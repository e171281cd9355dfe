"""`make demo`: digits.py on 2 processes (DDP), then the same file on 1 process, and the two side by side.

Exit code 1 if they differ by more than the tolerance stated below.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LOSS_TOLERANCE = 1e-4
"""Relative. Sums of floats depend on their order; measured: below 1e-6."""
ACCURACY_TOLERANCE = 1 / 360
"""One held-out image, whose two best classes may be a rounding error apart."""


def run(devices, epochs, folder):
    """The numbers of each epoch of `digits.py` on so many processes; what it prints is passed through."""
    history = Path(folder) / f"{devices}.json"
    print(f"$ python examples/digits.py --accelerator cpu --devices {devices}", flush=True)
    command = [sys.executable, str(Path(__file__).with_name("digits.py")), "--accelerator", "cpu"]
    command += ["--devices", str(devices), "--epochs", str(epochs), "--history", str(history)]
    # One thread per process in both runs, so that samples/s compare processes and not thread pools.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    code = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        sys.exit(code)
    print(flush=True)
    return json.loads(history.read_text())


def compare(several, single, devices):
    """Print the table; returns whether all epochs agree."""
    n = f"{devices} processes"
    print("       |  loss                     |  held-out accuracy        |  samples/s")
    print(f" epoch |  {n:<12}  1 process  |  {n:<12}  1 process  |  {n:<12}  1 process")
    print("-------+---------------------------+---------------------------+-------------------------")
    worst_loss = worst_accuracy = 0.0
    for a, b in zip(several, single, strict=True):
        print(
            f" {a['epoch']:>5} |  {a['loss']:<12.6f}  {b['loss']:<9.6f}  "
            f"|  {a['accuracy']:<12.4f}  {b['accuracy']:<9.4f}  "
            f"|  {a['samples_per_s']:<12,.0f}  {b['samples_per_s']:,.0f}"
        )
        worst_loss = max(worst_loss, abs(a["loss"] - b["loss"]) / abs(b["loss"]))
        worst_accuracy = max(worst_accuracy, abs(a["accuracy"] - b["accuracy"]))
    same = worst_loss <= LOSS_TOLERANCE and worst_accuracy <= ACCURACY_TOLERANCE
    print("\none thread per process; global batches of 64 in both runs")
    print(f"largest difference: loss {worst_loss:.1e} (relative; tolerance {LOSS_TOLERANCE:.0e}),", end=" ")
    print(f"accuracy {worst_accuracy:.4f} (tolerance {ACCURACY_TOLERANCE:.4f}, one image)")
    print("the same numbers: yes" if same else "the same numbers: NO")
    return same


def main():
    """Run both and compare."""
    parser = argparse.ArgumentParser(description="The same loop on 2 processes and on 1.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        several, single = (run(devices, args.epochs, folder) for devices in (args.devices, 1))
    sys.exit(0 if compare(several, single, args.devices) else 1)


if __name__ == "__main__":
    main()
