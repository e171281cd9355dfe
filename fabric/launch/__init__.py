"""Start the ranks of a job and supervise them to their end: signals, exit codes, parent death, stores."""
