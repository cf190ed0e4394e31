"""Collectors on other machines, by Ray."""
