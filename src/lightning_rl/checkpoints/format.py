"""Define the content of a checkpoint, and read it as data, without running code."""

import io
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from lightning_rl.system.errors import ConfigurationError, reason_of
from lightning_rl.system.tensors import check_records, load_tensors

SCHEMA = 5
"""Version of the content of checkpoints."""

CONFIG_KEY = "rl_config"
"""Key of the run's configuration, as YAML."""

STATE_KEY = "lightning_rl"
"""Key of schema, kind, counters and random streams."""

DESCRIPTION_KEY = "policy"
"""Key in that state: the policy's settings besides its weights, see `policies.description`."""

SPACES_KEY = "spaces"
"""Key in that state: the policy's spaces, see `rollout.spaces`."""

SIGNATURE_KEY = "signature"
"""Key in that state: the signature of this user's own code, see `checkpoints.own`."""

CONTENTS_KEY = "contents"
"""Key in that state: the list of all keys of the checkpoint."""

ANOTHER = "Give another checkpoint, such as best.ckpt or an iteration_*.ckpt of the same run."

MOST_REPEATED = 2**20
"""Bytes that a tensor may have even if its storage is smaller: one number, expanded."""

FULL, WEIGHTS = "full", "weights"
"""The kinds of checkpoints: a run resumes from `full`; a policy acts with `weights`."""

TYPES: dict[str, Any] = {
    **{"state_dict": {}, "optimizer_states": [], "lr_schedulers": [], "loops": {}},
    **{"callbacks": {}, "epoch": 0, "global_step": 0, "pytorch-lightning_version": ""},
    CONFIG_KEY: "",
    STATE_KEY: {
        **{"env_steps": 0, "ranks": [], "guards": {}},
        "computing": {"compiled": False, "steps": {"compiled": False}},
        "updates": {"done": 0, "per_env_step": 0.0, "learning_starts": 0},
    },
    "RLDataModule": {"collectors": [], "replays": []},
}
"""Values of the types that a checkpoint has, by key."""

KEPT_WITH_WEIGHTS = ("epoch", "global_step", "pytorch-lightning_version", "state_dict", CONFIG_KEY)
KEPT_OF_THE_STATE = ("env_steps", DESCRIPTION_KEY, SPACES_KEY)


@cache
def own_version() -> str:
    """Return the version of this package; a checkout that is not installed has none."""
    try:
        return version("lightning-rl")
    except PackageNotFoundError:
        return "(not installed)"


def header() -> dict[str, Any]:
    """Return the header of a full checkpoint."""
    return {"schema": SCHEMA, "kind": FULL, "version": own_version()}


def weights_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Reduce a full checkpoint to the weights-only kind."""
    entries = {key: checkpoint[key] for key in KEPT_WITH_WEIGHTS if key in checkpoint}
    state = checkpoint[STATE_KEY]
    state_entries = {key: state[key] for key in KEPT_OF_THE_STATE if key in state}
    return entries | {STATE_KEY: header() | {"kind": WEIGHTS} | state_entries}


def readable(value: Any, name: str) -> Any:
    """Return a value with NumPy's numbers as Python's, because no other class may be read back.

    Raises:
        ConfigurationError: naming an object in it that `read_checkpoint` would refuse.
    """
    value = value.item() if isinstance(value, np.generic) else value
    kind = type(value)
    if kind in (dict, OrderedDict):
        pairs = {
            readable(k, name): readable(v, f"{name}.{k}".lstrip(".")) for k, v in value.items()
        }
        content = copy(value)  # torch's state dicts have attributes
        content.clear()
        content.update(pairs)
        return content
    if kind in (list, tuple):
        return kind(readable(child, f"{name}.{i}") for i, child in enumerate(value))
    if not isinstance(value, torch.Tensor) and kind not in (bool, int, float, str, type(None)):
        try:
            _through_file(value)
        except Exception as error:  # pickling raises many types
            raise ConfigurationError(
                f"A checkpoint cannot hold {name}, of the type {kind.__module__}.{kind.__name__}: "
                "it holds numbers, texts and tensors, in lists, tuples and dicts, because other "
                "objects could run code when they are read. Save it in this form."
            ) from error
    return value


def through_checkpoint(value: Any, name: str) -> Any:
    """Return a value as a checkpoint returns it; see `readable`."""
    return _through_file(readable(value, name))


def _through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def read_checkpoint(
    path: str | Path, map_location: Callable[..., Any] | str | None = "cpu", *, verify: bool = True
) -> dict[str, Any]:
    """Read numbers, texts and tensors; `verify` also checks the checksums of tensors."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError("it is not a regular file")  # reading a pipe may never end
        _check_sums(path, verify)
        # Memory-mapped: reading counters loads no tensors.
        content = load_tensors(path, map_location=map_location, mmap=not verify)
    except Exception as error:  # a damaged file raises many types
        raise ConfigurationError(_unreadable(Path(path), error)) from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"The file {path} is not a checkpoint of rl-cli.")
    check_schema(content, f"The checkpoint {path}")
    check_tensors(content, f"The checkpoint {path}")
    return content


def check_tensors(content: Any, name: str) -> None:
    """Refuse tensors that claim more memory than the file holds (stride 0, sparse layout)."""
    # A stack instead of recursion: a damaged file may be nested deeper than Python recurses.
    waiting = [content]
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.Tensor):
            # Sparse and quantized tensors have no such storage.
            dense = node.layout == torch.strided and not node.is_quantized
            if not dense or node.nbytes > max(node.untyped_storage().nbytes(), MOST_REPEATED):
                raise ConfigurationError(
                    f"{name} cannot be read: a tensor of shape {list(node.shape)} is incomplete. "
                    f"{ANOTHER}"
                )
        elif isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list | tuple):
            waiting += node


@contextmanager
def restoring(part: str) -> Iterator[None]:
    """Turn the errors of restoring a part of a checkpoint, of many types, into one message."""
    try:
        yield
    except ConfigurationError:
        raise
    except (
        *(ArithmeticError, AssertionError, AttributeError, LookupError),
        *(MemoryError, TypeError, ValueError, RuntimeError, gymnasium.error.Error),
    ) as error:
        raise ConfigurationError(
            f"The checkpoint's {part} cannot be restored ({type(error).__name__}: "
            f"{reason_of(error)}): its content does not fit this run. {ANOTHER}"
        ) from error


def check_types(saved: Any, like: Any, name: str) -> None:
    """Refuse a saved value, or a value in it, of another type than that in `like`."""
    if like is None or (saved is None and not isinstance(like, int | float | str)):
        return  # a part that the run or this one did not have
    kinds: Any = (int, float) if isinstance(like, float) else type(like)
    if not isinstance(saved, kinds):
        raise ConfigurationError(
            f"{name} cannot be restored: it is of the type {type(saved).__name__}, but must be of "
            f"the type {type(like).__name__}. {ANOTHER}"
        )
    for key, child in like.items() if isinstance(like, dict) else ():
        if key in saved:  # the keys differ between versions
            check_types(saved[key], child, f"{name}: {key}" if ":" not in name else f"{name}.{key}")


def check_schema(checkpoint: dict[str, Any], name: str = "The checkpoint") -> None:
    """Refuse a checkpoint of another version."""
    state = checkpoint.get(STATE_KEY)
    if not isinstance(state, dict):
        raise ConfigurationError(
            f"{name} was not written by lightning_rl: it has no key '{STATE_KEY}', so no run can "
            "resume from it. Use a checkpoint of rl-cli or RLTrainer."
        )
    schema, release = state.get("schema"), own_version()
    if schema == SCHEMA:
        check_types(checkpoint, TYPES, name)
        _check_complete(checkpoint, name)
        return
    writer = f"lightning_rl {state['version']}" if "version" in state else "an early lightning_rl"
    if isinstance(schema, int) and schema > SCHEMA:
        cure = "Upgrade lightning_rl."
    else:
        cure = "Use the version that wrote it, or train again."
    raise ConfigurationError(
        f"{name} has schema {schema}, written by {writer}; this is lightning_rl {release}, "
        f"which reads schema {SCHEMA}. {cure}"
    )


def with_contents(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the list of its keys on two levels."""
    state = dict(checkpoint[STATE_KEY])
    listed = {**checkpoint, STATE_KEY: state}
    state[CONTENTS_KEY] = {
        str(key): list(map(str, value)) if isinstance(value, dict) else None
        for key, value in listed.items()
    }
    return listed


def _check_complete(checkpoint: dict[str, Any], name: str) -> None:
    contents = checkpoint[STATE_KEY].get(CONTENTS_KEY)
    for key, children in contents.items() if isinstance(contents, dict) else ():
        value = checkpoint.get(key)
        names = set(map(str, value)) if isinstance(value, dict) else set()
        listed = map(str, children) if isinstance(children, list) else ()
        missing = [f"{key}.{child}" for child in listed if child not in names]
        if key not in checkpoint or missing:
            raise ConfigurationError(
                f"{name} lacks '{missing[0] if key in checkpoint else key}', which it had when it "
                f"was written: the file was changed. {ANOTHER}"
            )


def _check_sums(path: str | Path, verify: bool) -> None:
    with zipfile.ZipFile(path) as archive:
        check_records(archive, path)
        for name in archive.namelist():
            # The checksums of tensors take as long as loading them.
            if verify or "/data/" not in name:
                with archive.open(name) as record:
                    # `zipfile` compares the checksum at the end of the record.
                    while record.read(2**20):
                        pass


def _unreadable(path: Path, error: Exception) -> str:
    reason = reason_of(error)
    if "Weights only load failed" in reason:
        reason = "it holds objects besides numbers, texts and tensors, and could run code"
    elif isinstance(error, zipfile.BadZipFile):
        empty = path.stat().st_size == 0
        reason = "it is empty" if empty else "it is damaged, or not a checkpoint at all"
    return f"The checkpoint {path} cannot be read: {reason}. {ANOTHER}"
