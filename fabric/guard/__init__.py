"""Compare calls before they run; report deadlocks by rank, call, file and line."""
