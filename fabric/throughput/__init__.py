"""Batches, samples, tokens and FLOP per second over a rolling window."""
