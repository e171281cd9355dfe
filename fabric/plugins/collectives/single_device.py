"""A module path of Lightning Fabric; the code is in `fabric/collectives/single_device.py`."""

from fabric.collectives.single_device import SingleDeviceCollective as SingleDeviceCollective
