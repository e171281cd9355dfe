"""The tree of values of a checkpoint, and its files: atomic, verified."""
