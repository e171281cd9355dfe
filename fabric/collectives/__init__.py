"""Collectives on nestings of tensors and on objects: reduce, gather, broadcast."""
