"""Dtypes, autocast and loss scaling around forward, backward and step."""
