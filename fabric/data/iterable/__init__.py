"""Iterable datasets: detection of datasets that shard themselves, and positions in streams."""
