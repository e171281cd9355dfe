"""Metrics over all ranks: what one process that saw all data would compute, in one or two messages."""
