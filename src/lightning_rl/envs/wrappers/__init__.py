"""Wrappers of Gymnasium and vector envs."""
