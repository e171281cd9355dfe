"""Watching ranks from beside: who waits for whom, and since when. Costs nothing while nothing waits."""
