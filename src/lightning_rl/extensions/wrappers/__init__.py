"""Wrappers of batched envs."""
