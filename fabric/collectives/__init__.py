"""Trees of tensors over ranks: pack, reduce, gather, broadcast, objects."""
