"""Files, folders of runs, and printed lines."""

from lightning_rl.system.lazy import lazy_names

__all__, __getattr__ = lazy_names(__name__, __file__)
