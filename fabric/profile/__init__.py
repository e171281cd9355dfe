"""`fabric.profile`: a trace of torch's profiler per rank, and a table of phases."""
