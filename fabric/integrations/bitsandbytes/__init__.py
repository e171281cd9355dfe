"""Linear layers in 4 and 8 bits, by the package bitsandbytes."""
