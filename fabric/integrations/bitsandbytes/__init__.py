"""Linear layers in 4 and 8 bits, with the package bitsandbytes."""
