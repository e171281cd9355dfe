"""`fabric doctor`: checks of machines, network and devices before a job. Importing this loads nothing."""
