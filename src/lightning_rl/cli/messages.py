"""Turn what the argument parser says into what its user needs."""

from collections.abc import Sequence

from lightning_rl.system.declared import in_short
from lightning_rl.system.permission import CURE


def explain(message: str, typed: Sequence[str] = (), cure: str = CURE) -> str:
    """Rewrite a message of the parser."""
    return f"{in_short(message)} {cure}" if "is not allowed" in message else in_short(message)
