"""The place of `lightning_rl.extensions.managers` in earlier versions."""

from lightning_rl.system.lazy import names_of

__getattr__ = names_of("lightning_rl.extensions.managers")
