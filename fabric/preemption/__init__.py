"""Signals and deadlines that request the end of the job (`fabric.should_stop`)."""
