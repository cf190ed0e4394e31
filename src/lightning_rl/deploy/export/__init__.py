"""Write a trained policy for where this package is not, and prove that it acts alike there."""

from lightning_rl.deploy.export.graph import ActingGraph, ports_of, why_not_traced
from lightning_rl.deploy.export.weights import is_exported, read_exported

__all__ = ["ActingGraph", "is_exported", "ports_of", "read_exported", "why_not_traced"]
