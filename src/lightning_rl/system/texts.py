"""Tell what a text in a setting is: an import path, a file, a plain name.

A reader and the check of checkpoints ask the same function, so they cannot differ about a text.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

MODEL_FILES = (".xml", ".urdf", ".mjcf")
"""Suffixes of files of robots."""

SETTINGS_FILES = (".yaml", ".yml")
"""Suffixes of files of settings, which the parser reads in the place of a mapping."""

_ATTENTION = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")

OF_A_HUB: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("auto_map", "trust_remote_code", "quantization_config"), ()),
    **dict.fromkeys(("use_pretrained_backbone", "use_kernels", "kernel_config"), ()),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), _ATTENTION),
    **dict.fromkeys(("experts_implementation", "_experts_implementation"), _ATTENTION),
}
"""Settings of transformers with which a model downloads or imports code, and harmless values."""


def asks_a_hub(key: Any, value: Any) -> bool:
    """Return whether a setting of a model makes transformers download or import code."""
    if key not in OF_A_HUB or not value:
        return False
    texts = value.values() if isinstance(value, dict) else [value]
    # Each part of a composite model may have its own setting.
    return not all(text is None or text in OF_A_HUB[key] for text in texts)


def is_import_path(text: str) -> bool:
    """Return whether a text is `module.name`: identifiers and dots, and no file of a robot."""
    parts = text.split(".")
    identifiers = len(parts) > 1 and all(part.isidentifier() for part in parts)
    return identifiers and not is_model_file(text)


def is_model_file(text: str) -> bool:
    """Return whether a text names a file of a robot; its reader imports no such text."""
    return text.lower().endswith(MODEL_FILES)


def is_settings_file(text: str) -> bool:
    """Return whether the parser reads a text as a file of settings, if the file exists."""
    return text.endswith(SETTINGS_FILES)


def is_plain_name(text: Any) -> bool:
    """Return whether a value names an entry of a directory, never a place elsewhere."""
    return isinstance(text, str) and text not in ("", "..") and Path(text).name == text


def imported(path: str) -> Any:
    """Import an object by its path, `package.module.name`.

    Raises:
        ValueError: the text is no import path; nothing was imported.
        ImportError, AttributeError: there is no such object.
    """
    if not is_import_path(path):
        raise ValueError(f"'{path}' is not an import path, such as my_module.MyClass")
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
