"""The run report: each rank appends its steps and events to a file of its own.

A slice: the package works without this folder.
"""
