"""Read files of weights as data, and compare them with a model's."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import import_extra, reason_of, require
from lightning_rl.extend.files import expanded, load_tensors, read_json

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Suffixes of files of weights."""

NAMES_OF_WEIGHTS = (
    *("model.safetensors", "model-*-of-*.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin"),
)
"""Names of weights in directories of transformers and LeRobot, the preferred first."""

WEIGHTS = f"a file of weights ({', '.join(SUFFIXES)}), or a directory that holds one"
"""Description of a valid path, for messages."""


class KeyReport(NamedTuple):
    """Differences between the names in a file of weights and a model."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]

    def __str__(self) -> str:
        kinds = zip(("missing", "unexpected", "of another shape"), self, strict=True)
        return "; ".join(f"{len(k)} {name}: {', '.join(k[:5])}" for name, k in kinds if k)

    def check(self, source: str, strict: bool | None) -> None:
        """Refuse weights that do not fit, or warn; see `fitting`.

        Raises:
            ConfigurationError: unless `strict` is False, if there are differences.
        """
        if not any(self):
            return
        text = f"The weights in {source} do not fit the model: {self}."
        cure = ", or set strict: false" if strict else ""
        # None, unlike False, means that the caller has no setting `strict`.
        require(strict is False, f"{text} Load the model they were saved from{cure}.")
        warnings.warn(f"{text} Missing weights keep random values.", stacklevel=3)


def fitting(
    state: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    source: str,
    strict: bool | None = None,
) -> dict[str, Tensor]:
    """Return the weights whose names and shapes are in a model's state dict `state`.

    Raises:
        ConfigurationError: unless `strict` is False, if names or shapes differ. None stands for a
            caller without this setting.
    """
    report = compared(state, weights)
    report.check(source, strict)
    return {k: v for k, v in weights.items() if k in state and k not in report.mismatched}


def compared(state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> KeyReport:
    """Compare the names and shapes of weights with a model's state dict `state`."""
    pairs = (state, weights), (weights, state)
    missing, surplus = ([k for k in a if k not in b] for a, b in pairs)
    mismatched = [k for k in state if k in weights and weights[k].shape != state[k].shape]
    return KeyReport(missing, surplus, mismatched)


def weights_at(path: str, setting: str) -> dict[str, Tensor]:
    """Read a file or a directory of weights; `setting` names the path in messages.

    Raises:
        ConfigurationError: if there are no weights.
    """
    weights: dict[str, Tensor] = {}
    for file in _files_of_weights(path, setting):
        weights |= load_weights(file)
    return weights


def _files_of_weights(path: str, setting: str) -> list[Path]:
    place = expanded(path)
    require(place.exists(), f"No weights at {path}: {setting} must be {WEIGHTS}.")
    if place.is_file():
        return [place]
    refuse_adapter(place)
    # In the order of preference: safetensors cannot hold code.
    for name in NAMES_OF_WEIGHTS:
        shards = [place / name] if "*" not in name else sorted(place.glob(name))
        if shards and shards[0].is_file():
            return shards
    files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES)
    names = ", ".join(file.name for file in files) or "none"
    require(len(files) == 1, f"{setting} must be {WEIGHTS}; the directory {path} holds {names}.")
    return files


def refuse_adapter(place: Path) -> None:
    """Refuse a directory of an adapter of peft where a whole model is needed.

    Raises:
        ConfigurationError: for such a directory.
    """
    file = place / "adapter_config.json"
    base = read_json(file).get("base_model_name_or_path") if file.is_file() else None
    require(
        not file.is_file(),
        f"{place} holds an adapter for {base or 'another model'}, not a whole model. Merge the two "
        "where the adapter was trained (merge_and_unload of peft), save the result by "
        "save_pretrained, and give that directory.",
    )


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a file with a state dict, also under a key such as `state_dict`; no code runs.

    Raises:
        ConfigurationError: for objects that could run code, no state dict, or several.
    """
    require(path.is_file(), f"{path} is not a regular file: it is not read.")
    try:
        if path.suffix == ".safetensors":
            return dict(
                import_extra(
                    "safetensors.torch", "Needed here: pip install -e '.[vla]'."
                ).load_file(path)
            )
        content = load_tensors(path, map_location="cpu")
    except ConfigurationError:
        raise
    except Exception as error:  # a damaged or malicious file fails in many ways
        raise ConfigurationError(
            f"{path} is refused: it is damaged, or holds objects besides tensors, which can run "
            f"any code ({reason_of(error)}). Save the state_dict alone, best as .safetensors."
        ) from error
    # A checkpoint wraps the state dict: {"state_dict": ..., "epoch": ...}.
    entries = {"": content} | (content if isinstance(content, dict) else {})
    states = {name: value for name, value in entries.items() if _is_state_dict(value)}
    # Of several dicts, those with the usual names win.
    preferred = [name for name in ("state_dict", "model_state_dict") if name in states]
    states = {name: states[name] for name in preferred[:1] or states}
    require(
        len(states) == 1,
        f"{path} holds {'several state dicts: ' + ', '.join(states) if states else 'no state_dict'}"
        "; save model.state_dict() alone.",
    )
    (state,) = states.values()
    # DistributedDataParallel adds `module.`.
    return {str(key).removeprefix("module."): value for key, value in state.items()}


def _is_state_dict(value: Any) -> bool:
    tensors = isinstance(value, dict) and len(value) > 0
    return tensors and all(isinstance(tensor, Tensor) for tensor in value.values())
