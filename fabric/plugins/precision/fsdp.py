"""Lightning Fabric has `FSDPPrecision` under this path."""

from fabric.plugins.precision.mixed import FSDPPrecision as FSDPPrecision
