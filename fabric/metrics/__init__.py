"""Metrics over all ranks, equal to those of one process with all data; one or two messages."""
