"""Errors, files, processes, and what is private to a dependency: one file for each."""
