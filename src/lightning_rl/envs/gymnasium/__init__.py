"""Envs of Gymnasium: made, stepped in line or in processes, brought back by replaying episodes."""
