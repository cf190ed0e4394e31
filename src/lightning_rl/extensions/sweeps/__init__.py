"""Searches over settings: points, trials and their processes."""
