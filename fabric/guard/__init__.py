"""Compare calls before they run; report hangs and deadlocks by rank, call, file and line."""
