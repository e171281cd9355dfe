"""Modules built without memory for their weights, whose values are made later."""
