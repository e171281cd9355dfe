"""The loss check: warns once of gradients whose average over ranks is not that of one process.

A slice: the package works without this folder.
"""
