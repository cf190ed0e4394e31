"""Names for those who write algorithms, policies, envs, collectors and datasets, by role."""

from lightning_rl.system.lazy import add_lazy_modules

ROLES = add_lazy_modules(__name__, __file__)
"""Modules of this package."""

__all__ = ()
