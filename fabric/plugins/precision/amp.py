"""Lightning Fabric has `MixedPrecision` under this path."""

from fabric.precision.mixed import MixedPrecision as MixedPrecision
