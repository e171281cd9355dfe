"""Context parallelism: sequences sharded over ranks."""
