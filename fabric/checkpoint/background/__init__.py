"""Saves in the background of the loop: `fabric.save(..., wait=False)`."""
