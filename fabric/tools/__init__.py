"""Commands around a job: before, during and after it. Importing this loads nothing."""
