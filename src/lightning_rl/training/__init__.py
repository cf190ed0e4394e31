"""The trainer, its data and its callbacks."""
