"""Whether this job has to end soon: signals and deadlines (`fabric.should_stop`)."""
