"""Formats of checkpoints other than the file of `torch.save`."""
