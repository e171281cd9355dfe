"""A sequence divided over ranks. See `part.py`."""
