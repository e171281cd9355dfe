"""Lightning Fabric has `DoublePrecision` under this path."""

from fabric.precision.true import DoublePrecision as DoublePrecision
