"""Shorten what the argument parser says to what its user needs."""

import re


def shorten(message: str) -> str:
    """Drop the parser's inner workings from an error message, and keep the lines that name the setting and the cure."""
    return re.sub(r"\s+\n", "\n", message).strip()
