"""Formats of checkpoints beside torch's file."""
