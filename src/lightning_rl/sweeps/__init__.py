"""Searches over settings: points, trials and the processes that run them."""
