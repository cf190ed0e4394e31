"""Act with a trained policy, and export it."""
