"""Load weights, and libraries of pretrained models, with messages that name the cure."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import reason_of
from lightning_rl.extensions.vla.weight_files import fitting, weights_at


def fill_with_weights(
    model: nn.Module, path: str, strict: bool = True, setting: str = "path"
) -> None:
    """Load a file or a directory of weights into a model.

    `strict` refuses weights with other names or shapes; otherwise warn. `setting` is for messages.

    Raises:
        ConfigurationError: if there are no weights, or they do not fit.
    """
    weights = weights_at(path, setting)
    model.load_state_dict(fitting(model.state_dict(), weights, path, strict), strict=False)


@contextmanager
def one_message(beginning: str) -> Iterator[None]:
    """Replace errors of libraries by one message that starts with `beginning`.

    Raises:
        ConfigurationError: instead of any other error in the block.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{beginning}: {reason_of(error)}") from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Hide progress bars and advice of transformers."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def extra(name: str) -> Any:
    """Import a module of the extra `vla`.

    Raises:
        ConfigurationError: if the import fails.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"{name.split('.')[0]} is needed here, but cannot be used ({error}): pip install "
            "-e '.[vla]'. If the error names torchvision, uninstall torchvision, which is "
            "not needed: a build for another torch version breaks the import."
        ) from error
