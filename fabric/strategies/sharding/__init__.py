"""What layouts share whose parameters are parts of tensors (DTensor)."""
