"""Models that the user's function splits over a 2-D mesh."""
