"""Distributions over actions."""
