"""Errors, files, processes, and one file for each dependency whose internals are used."""
