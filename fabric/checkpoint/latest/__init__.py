"""`fabric.save_latest` and `fabric.load_latest`."""
