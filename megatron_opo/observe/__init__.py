"""Watching a run: metrics, logs on disk and in the terminal, kept samples, and the report."""
