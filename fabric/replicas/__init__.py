"""The replica check: what must be equal on all ranks is compared, and a difference is an error on all ranks.

A slice: the package works without this folder.
"""
