"""Read weights as data, and compare them with a model's."""

import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.files import expanded

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""How the names of files of weights end."""

WEIGHTS = f"a file of weights ({', '.join(SUFFIXES)}), or a directory that holds one"
"""What a path of weights may be, for messages."""


class KeyReport(NamedTuple):
    """How the names in a file of weights differ from those of a model."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    def __str__(self) -> str:
        kinds = zip(("missing", "unexpected", "of another shape"), self, strict=True)
        return "; ".join(f"{len(k)} {name}: {', '.join(k[:5])}" for name, k in kinds if k)


def fill_with_weights(
    model: nn.Module, path: str, strict: bool = True, setting: str = "path"
) -> None:
    """Load a file of weights, or those of a directory, into a model.

    Args:
        model: whose parameters and buffers are written.
        path: of the file or the directory.
        strict: refuse weights whose names or shapes are not the model's; else warn.
        setting: what the user calls the path, for the messages.

    Raises:
        ConfigurationError: where there are none, or they do not fit.
    """
    weights: dict[str, Tensor] = {}
    for file in _files_of_weights(path, setting):
        weights |= load_weights(file)
    model.load_state_dict(fitting(model.state_dict(), weights, path, strict), strict=False)


def fitting(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], source: str, strict: bool
) -> dict[str, Tensor]:
    """Return the weights with a name and shape of a model's state dict `own`.

    Raises:
        ConfigurationError: with `strict`, if names or shapes differ, naming them and `source`.
    """
    wrong = [k for k in own if k in weights and weights[k].shape != own[k].shape]
    missing, surplus = ([k for k in a if k not in b] for a, b in ((own, weights), (weights, own)))
    check_report(KeyReport(missing, surplus, wrong), source, strict)
    return {k: v for k, v in weights.items() if k in own and k not in wrong}


def _files_of_weights(path: str, setting: str) -> list[Path]:
    """Return a file, or the files in a directory that hold one model, whole or in shards."""
    place = expanded(path)
    require(place.exists(), f"No weights at {path}: {setting} must be {WEIGHTS}.")
    if place.is_file():
        return [place]
    whole = place / "model.safetensors"
    if whole.is_file():
        return [whole]
    shards = sorted(place.glob("model-*-of-*.safetensors"))
    if shards:
        return shards
    files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES)
    found = ", ".join(file.name for file in files) or "none"
    require(len(files) == 1, f"{setting} must be {WEIGHTS}; the directory {path} holds {found}.")
    return files


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a file of weights, without running anything in it.

    It is a state dict, or holds one under any name, such as `state_dict` or `model_state_dict`.

    Raises:
        ConfigurationError: if the file holds objects that are neither plain values nor tensors,
            no state dict, or several.
    """
    try:
        if path.suffix == ".safetensors":
            return dict(extra("safetensors.torch").load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except ConfigurationError:
        raise
    except Exception as error:  # a damaged or malicious file fails in many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(
            f"{path} is refused: it is damaged, or holds objects and not only tensors, and reading "
            f"those can run any code ({reason}). Save the state_dict alone, best as .safetensors."
        ) from error
    found = {"": content} | (content if isinstance(content, dict) else {})
    states = {name: value for name, value in found.items() if _is_state_dict(value)}
    named = [name for name in ("state_dict", "model_state_dict") if name in states]
    states = {name: states[name] for name in named[:1] or states}
    require(
        len(states) == 1,
        f"{path} holds {'several state dicts: ' + ', '.join(states) if states else 'no state_dict'}"
        "; save model.state_dict() alone.",
    )
    (state,) = states.values()
    return {str(key).removeprefix("module."): value for key, value in state.items()}


def _is_state_dict(value: Any) -> bool:
    """Tell whether something is tensors by name."""
    tensors = isinstance(value, dict) and len(value) > 0
    return tensors and all(isinstance(one, Tensor) for one in value.values())


def check_report(report: KeyReport, source: str, strict: bool) -> None:
    """Refuse, or warn of, weights that do not fit.

    Raises:
        ConfigurationError: with `strict`, naming keys.
    """
    if not any(report):
        return
    text = f"The weights in {source} do not fit the model: {report}."
    require(not strict, f"{text} Load the model they were saved from, or set strict: false.")
    warnings.warn(f"{text} What is missing keeps random values.", stacklevel=3)


@contextmanager
def one_message(beginning: str) -> Iterator[None]:
    """Turn an error of transformers or peft, which raise many kinds, into one line.

    Args:
        beginning: of the message.

    Raises:
        ConfigurationError: if an error is raised within.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigurationError(f"{beginning}: {reason}") from error


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Keep bars of weights that are loaded, and advice on generating text, from the screen."""
    said = transformers.utils.logging
    level, bars = said.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity_error()
    said.disable_progress_bar()
    try:
        yield
    finally:
        said.set_verbosity(level)
        if bars:
            said.enable_progress_bar()


def extra(name: str) -> Any:
    """Import a module of the extra `vla`.

    Raises:
        ConfigurationError: where it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"{name.split('.')[0]} is needed for this and is not usable ({error}): "
            "pip install 'lightning-rl[vla]'. If the error names torchvision, uninstall that: it "
            "is not needed, and one built for another torch breaks the import."
        ) from error
