"""Lightning Fabric has `MixedPrecision` under this path."""

from fabric.plugins.precision.mixed import MixedPrecision as MixedPrecision
