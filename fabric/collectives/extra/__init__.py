"""Collectives that split trees along dim 0: reduce_scatter, all_to_all and scatter."""
