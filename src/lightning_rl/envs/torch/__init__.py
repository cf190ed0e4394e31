"""Envs that are batched in torch."""
