"""Module path of Lightning Fabric; the code is in `fabric/throughput/`."""

from fabric.throughput.flops import get_available_flops as get_available_flops
from fabric.throughput.flops import measure_flops as measure_flops
from fabric.throughput.throughput import T as T
from fabric.throughput.throughput import Throughput as Throughput
from fabric.throughput.throughput import ThroughputMonitor as ThroughputMonitor
