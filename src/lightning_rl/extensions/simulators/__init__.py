"""Envs of GPU simulators and of EnvPool."""
