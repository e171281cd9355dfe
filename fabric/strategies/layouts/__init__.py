"""How parameters sit on ranks: whole (`layout.py`, the base of all), replicated, split, in stages."""
