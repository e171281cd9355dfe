"""The replica check: compares values that must be equal on all ranks; a difference raises on all of them.

A slice: the package works without this folder.
"""
