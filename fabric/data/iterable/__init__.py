"""Iterable datasets: sharding that is found out, and positions in streams."""
