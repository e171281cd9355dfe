"""How parameters sit on ranks: whole, replicated, and (in time) sharded, split and staged."""
