"""Lightning Fabric has `HalfPrecision` under this path."""

from fabric.precision.true import HalfPrecision as HalfPrecision
