"""A path of Lightning Fabric; the code is in `fabric/throughput/throughput.py`."""

from fabric.throughput.throughput import Throughput as Throughput
from fabric.throughput.throughput import ThroughputMonitor as ThroughputMonitor
from fabric.throughput.throughput import measure_flops as measure_flops
