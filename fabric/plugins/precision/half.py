"""Lightning Fabric has `HalfPrecision` under this path."""

from fabric.plugins.precision.true import HalfPrecision as HalfPrecision
