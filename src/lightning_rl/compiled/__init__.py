"""Compiled versions of the update and of env steps."""
