"""Lightning Fabric has `DoublePrecision` under this path."""

from fabric.plugins.precision.true import DoublePrecision as DoublePrecision
