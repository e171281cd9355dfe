"""A sequence divided over ranks."""
