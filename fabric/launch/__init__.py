"""Start the ranks of a job and supervise them until they exit: signals, exit codes, parent death, stores."""
