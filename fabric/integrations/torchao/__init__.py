"""Linear layers that multiply in float8, or store int8, with the package torchao."""
