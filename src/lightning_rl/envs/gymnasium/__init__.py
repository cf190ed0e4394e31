"""Adapters of Gymnasium and EnvPool envs."""
