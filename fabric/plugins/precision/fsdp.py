"""Lightning Fabric has `FSDPPrecision` under this path."""

from fabric.precision.mixed import FSDPPrecision as FSDPPrecision
