"""Turn what the argument parser says into what its user needs."""

import re

from lightning_rl.system.declared import in_short


def explain(message: str, cure: str) -> str:
    """Rewrite a message of the parser, without its inner workings.

    Args:
        message: of the parser.
        cure: what to do about code of others.
    """
    if name := re.search(r"Importing '([^']+)' is not allowed", message):
        return (
            f"'{name[1]}' is code of others, and the configuration comes from a checkpoint. {cure}"
        )
    return in_short(message)
