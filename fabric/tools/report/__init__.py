"""`fabric report`: the files of a run as one page, as text or as JSON."""
