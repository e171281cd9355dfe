"""Code shared by the layouts whose parameters are parts of tensors (DTensor)."""
