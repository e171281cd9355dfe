"""Saves that go on beside the loop: `fabric.save(..., wait=False)`."""
