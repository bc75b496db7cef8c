"""Datasets before a run: what is in them, what is wrong with them, and the same in another file."""
