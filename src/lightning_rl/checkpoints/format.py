"""Say what a checkpoint holds, and read one as data: nothing in it is ever run."""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lightning_rl.system.errors import ConfigurationError

SCHEMA = 5
"""Grows when what a checkpoint holds changes so that another version could not read it."""

CONFIG_KEY = "rl_config"
"""Where a checkpoint keeps the configuration of its run, as YAML."""

SECTIONS = ("seed_everything", "exp_name", "output_dir", "model", "data", "trainer")
"""The top-level keys of a configuration."""

STATE_KEY = "lightning_rl"
"""Where a checkpoint keeps schema, kind, counters and random streams."""

DESCRIPTION_KEY = "policy"
"""Where, within that, it keeps what the function of its policy depends on beside the weights.

See `policies.description`."""

SPACES_KEY = "spaces"
"""Where, within that, it keeps the spaces of its policy, `observation_space` and `action_space`.

See `policies.spaces`."""

CONTENTS_KEY = "contents"
"""Where, within that, it keeps which keys it was written with."""

ANOTHER = "Give another one, such as best.ckpt or an iteration_*.ckpt of the same run."

MOST_REPEATED = 2**20
"""Bytes that a tensor may have without as many in the file: one number, expanded."""

FULL, WEIGHTS = "full", "weights"
"""The kinds: what a run needs to go on bit for bit; what it takes to act."""

KEPT_WITH_WEIGHTS = (
    "epoch",
    "global_step",
    "pytorch-lightning_version",
    "state_dict",
    CONFIG_KEY,
)
KEPT_OF_THE_STATE = ("env_steps", DESCRIPTION_KEY, SPACES_KEY)


@cache
def own_version() -> str:
    """Return the version of this package; a checkout that was never installed has none."""
    try:
        return version("lightning-rl")
    except PackageNotFoundError:
        return "(not installed)"


def header() -> dict[str, Any]:
    """Return what every full checkpoint says of itself."""
    return {"schema": SCHEMA, "kind": FULL, "version": own_version()}


def weights_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the weights-only kind of a full checkpoint."""
    kept = {key: checkpoint[key] for key in KEPT_WITH_WEIGHTS if key in checkpoint}
    state = checkpoint[STATE_KEY]
    kept_state = {key: state[key] for key in KEPT_OF_THE_STATE if key in state}
    return kept | {STATE_KEY: header() | {"kind": WEIGHTS} | kept_state}


def read_checkpoint(
    path: str | Path, map_location: Callable[..., Any] | str | None = "cpu", *, whole: bool = True
) -> dict[str, Any]:
    """Read a checkpoint: numbers, texts and tensors, and refuse a file that holds more.

    Args:
        path: of the file.
        map_location: see `torch.load`.
        whole: read all of it, and compare the sums that the file carries; where not, all but the
            content of tensors.

    Raises:
        ConfigurationError: where the file cannot be read, or is not a checkpoint of this version.
    """
    try:
        _check_sums(path, whole)
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=not whole)
    except Exception as error:  # a damaged file fails in many ways, all of them meaning the same
        raise ConfigurationError(_unreadable(Path(path), error)) from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"The checkpoint {path} holds no checkpoint of rl-cli.")
    check_schema(content, f"The checkpoint {path}")
    check_tensors(content, f"The checkpoint {path}")
    return content


def check_tensors(content: Any, name: str) -> None:
    """Refuse tensors that claim more than the file holds: to copy one would fill the memory.

    A stride of 0, or a sparse layout, makes terabytes of some bytes.

    Args:
        content: a tree.
        name: begins the message.

    Raises:
        ConfigurationError: naming the shape.
    """
    waiting = [content]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            dense = one.layout == torch.strided and not one.is_quantized
            if not dense or one.nbytes > max(one.untyped_storage().nbytes(), MOST_REPEATED):
                raise ConfigurationError(
                    f"{name} cannot be read: a tensor of the shape {list(one.shape)} is not whole "
                    f"in it. {ANOTHER}"
                )
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one


@contextmanager
def restoring(part: str) -> Iterator[None]:
    """Say in one message that a part of a checkpoint is not what was saved.

    Types, names and shapes that no run wrote end in errors of many kinds.

    Args:
        part: for the message.

    Raises:
        ConfigurationError: for any of them.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except (
        *(ArithmeticError, AssertionError, AttributeError, LookupError),
        *(MemoryError, TypeError, ValueError, RuntimeError),
    ) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigurationError(
            f"The checkpoint's {part} cannot be restored ({type(error).__name__}: {reason}): it is "
            f"not what this run would have saved. {ANOTHER}"
        ) from error


def check_schema(checkpoint: dict[str, Any], name: str = "The checkpoint") -> None:
    """Refuse a checkpoint of another version.

    Raises:
        ConfigurationError: saying which version wrote it, and what to do.
    """
    state = checkpoint.get(STATE_KEY)
    if not isinstance(state, dict):
        raise ConfigurationError(
            f"{name} was not written by lightning_rl: it has no key '{STATE_KEY}', so it says "
            "nothing of how to go on. Give one that rl-cli or RLTrainer wrote."
        )
    schema, here = state.get("schema"), own_version()
    if schema == SCHEMA:
        _check_complete(checkpoint, name)
        return
    writer = f"lightning_rl {state['version']}" if "version" in state else "an early lightning_rl"
    if isinstance(schema, int) and schema > SCHEMA:
        cure = "Upgrade lightning_rl."
    else:
        cure = "Use the version that wrote it, or train anew."
    raise ConfigurationError(
        f"{name} has schema {schema}, written by {writer}; this is lightning_rl {here}, which "
        f"reads schema {SCHEMA}. {cure}"
    )


def with_contents(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint that also says which keys it has, two levels deep."""
    state = dict(checkpoint[STATE_KEY])
    listed = {**checkpoint, STATE_KEY: state}
    state[CONTENTS_KEY] = {
        str(key): list(map(str, value)) if isinstance(value, dict) else None
        for key, value in listed.items()
    }
    return listed


def _check_complete(checkpoint: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint that lacks a key which it had when it was written."""
    contents = checkpoint[STATE_KEY].get(CONTENTS_KEY)
    for key, children in contents.items() if isinstance(contents, dict) else ():
        value = checkpoint.get(key)
        within = set(map(str, value)) if isinstance(value, dict) else set()
        lost = [] if children is None else [f"{key}.{one}" for one in children if one not in within]
        if key not in checkpoint or lost:
            raise ConfigurationError(
                f"{name} lacks '{lost[0] if key in checkpoint else key}', which it was written "
                f"with: it was changed since. {ANOTHER}"
            )


def _check_sums(path: str | Path, whole: bool) -> None:
    """Compare the sums in the file: of all of it, or of all but the content of tensors.

    Raises:
        zipfile.BadZipFile: where one is wrong.
    """
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if whole or "/data/" not in name:
                with archive.open(name) as record:
                    while record.read(2**20):
                        pass


def _unreadable(path: Path, error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "Weights only load failed" in reason:
        reason = "it holds more than numbers, texts and tensors, and would run code if it were read"
    elif isinstance(error, zipfile.BadZipFile):
        empty = path.stat().st_size == 0
        reason = "it is empty" if empty else "it is damaged, or not a checkpoint at all"
    return f"The checkpoint {path} cannot be read: {reason}. {ANOTHER}"
