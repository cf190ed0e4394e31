"""Reinforcement learning for embodied agents, structured by PyTorch Lightning."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_rl.system import registration  # noqa: F401  # register the tasks with Gymnasium

_MODULES = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from lightning_rl.checkpoints.registry import renamed

        raise AttributeError(f"module 'lightning_rl' has no attribute '{name}'{renamed(name)}")
    return getattr(import_module(str(_MODULES[name])), name)
