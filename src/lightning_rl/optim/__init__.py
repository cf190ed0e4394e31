"""Optimizer steps: objectives, gradients, learning rates and statistics."""
