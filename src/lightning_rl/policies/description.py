"""Describe and compare the settings of a policy's function that a state dict does not contain."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_rl.checkpoints.registry import STATISTICS_FILES
from lightning_rl.policies.base import Policy
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.process import package_defaults
from lightning_rl.system.sharded import plain_class
from lightning_rl.system.torch_private import non_persistent_buffers_of

Description = dict[str, dict[str, Any]]
"""By module path: `class`, a name that affects outputs, or None; and `settings`, plain values."""

LISTED_ENTRIES = 64
"""Larger buffers are described by a checksum."""

NOT_OF_THE_FUNCTION = (
    *("training", "inplace", "has_critic", "has_entropy", "joint_ratio", "micro_batch_size"),
    *("critic_keys", "critic_reads_apart", "ignore_keys"),
    *("noise_correlation", "state_size", "state_sizes"),
)
"""Attributes that only affect training, a critic or exploration noise: they may differ."""

SOURCES = (*STATISTICS_FILES, "statistics_key")
"""Attributes that name statistics, see `with_statistics`."""

PIXEL_SCALING = ("pixel_mean", "pixel_std")
"""Buffers that earlier versions saved in the description, not in the weights."""

EARLIER = "An earlier version wrote the checkpoint without the statistics of its policy."


class Differences(NamedTuple):
    """Differences of two descriptions, as text."""

    classes: list[str]
    settings: list[str]


def describe(policy: Policy) -> Description:
    """Describe a policy without its critic, and without modules of libraries other than torch."""
    described: Description = {}
    # Skip attributes of other libraries' modules, which change between versions.
    _add(policy, "", {"torch", "lightning_rl"}, policy.critic_modules, described)
    return described


def differences(current: Description, saved: Description) -> Differences:
    """Compare the entries that both descriptions have."""
    classes, settings = [], []
    for path in current.keys() & saved.keys():
        entry, old_entry = current[path], saved[path]
        kinds = (entry["class"], old_entry["class"])
        # None: the class does not affect outputs.
        if None not in kinds and kinds[0] != kinds[1]:
            classes.append(f"{path} is a {kinds[0]} and was a {kinds[1]}")
            continue  # another class has other settings
        for name in (entry["settings"].keys() & old_entry["settings"].keys()) - set(SOURCES):
            new, old = entry["settings"][name], old_entry["settings"][name]
            # A tuple here is a list in a checkpoint.
            if _as_lists(new) != _as_lists(old):
                at = f"{path}.{name}" if path else name
                settings.append(f"{at} is {new} and was {old}")
    return Differences(sorted(classes), sorted(settings))


@package_defaults()
def with_statistics(
    module: nn.Module, saved: Mapping[str, Any], description: Description
) -> dict[str, Any]:
    """Return a checkpoint's state dict with the statistics that earlier versions did not save.

    Warn if a policy names other statistics than its checkpoint, because they are not used.

    Args:
        module: the algorithm or the policy; policies inside it may have `add_statistics`.
        saved: the checkpoint's state dict of `module`.
        description: the checkpoint's description of the policy.

    Raises:
        ConfigurationError: if a file of statistics is missing, or has changed since the run.
    """
    state = dict(saved)
    for path, part in module.named_modules():
        place, prefix = path.removeprefix("policy").removeprefix("."), f"{path}." if path else ""
        for name in PIXEL_SCALING:
            if isinstance(buffer := getattr(part, name, None), Tensor):
                value = _settings_of(description, place).get(name, buffer)
                state.setdefault(prefix + name, torch.as_tensor(value).view_as(buffer))
        if not hasattr(part, "add_statistics"):
            continue
        # Before `add_statistics`, which adds the key.
        is_earlier = f"{prefix}head.center" not in state
        try:
            origin = part.add_statistics(state, prefix)
        except ConfigurationError as error:
            raise ConfigurationError(f"{EARLIER} {error}") from error
        center, head = state[f"{prefix}head.center"], f"{place}.head".removeprefix(".")
        if is_earlier:
            recorded = _settings_of(description, head).get("center", _value_of(center))
            require(
                origin is None or recorded == _value_of(center),
                f"{EARLIER} {origin} has changed since the run: the center of the actions is "
                f"{_value_of(center)} and was {recorded}. Restore the file.",
            )
            if origin is not None:
                rank_zero_warn(
                    f"{EARLIER} They were read from {origin}; new checkpoints hold them."
                )
            continue
        sources = {name: getattr(part, name) for name in SOURCES if getattr(part, name, None)}
        current, settings = part.head.center, _settings_of(description, place)
        moved = any(settings.get(name) != value for name, value in sources.items())
        # NaN: the policy was built for loaded weights, and has read no file.
        if sources and (moved or not (current.isnan().any() or current.equal(center.to(current)))):
            rank_zero_warn(
                f"The statistics of {', '.join(sources.values())} are not used: statistics belong "
                "to the weights, and the policy keeps those of its checkpoint. To use others, "
                "train a new policy."
            )
    return state


def _settings_of(description: Description, path: str) -> dict[str, Any]:
    settings: dict[str, Any] = description.get(path, {}).get("settings", {})
    return settings


def _as_lists(value: Any) -> Any:
    return [_as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def _add(
    module: nn.Module, path: str, packages: set[str], critic: tuple[str, ...], to: Description
) -> None:
    home = plain_class(module).__module__
    if isinstance(module, Policy):
        packages = packages | {home.split(".")[0]}
    # Dropout does nothing in eval mode.
    if path in critic or home.split(".")[0] not in packages or home.endswith("modules.dropout"):
        return
    # A class matters where it computes: in modules of this package, and as an activation.
    computes = home.startswith("lightning_rl.") and not isinstance(module, Policy)
    has_name = computes or home == "torch.nn.modules.activation"
    name = plain_class(module).__name__ if has_name else None
    to[path] = {"class": name, "settings": _settings(module)}
    for name, child in module.named_children():
        _add(child, f"{path}.{name}" if path else name, packages, critic, to)


def _settings(module: nn.Module) -> dict[str, Any]:
    attributes = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _left_out(module) and _is_plain(value)
    }
    buffers = {
        name: _value_of(buffer)
        for name in non_persistent_buffers_of(module)
        if (buffer := getattr(module, name)) is not None
    }
    return attributes | buffers


def _left_out(module: nn.Module) -> tuple[str, ...]:
    ignored = module.training_settings if isinstance(module, Policy) else ()
    return (*NOT_OF_THE_FUNCTION, *ignored)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(entry) for entry in value)
    return type(value) in (bool, int, float, str)


def _value_of(buffer: Tensor) -> Any:
    array = buffer.detach().cpu().contiguous()
    if array.numel() <= LISTED_ENTRIES:
        return array.tolist()
    return f"{list(array.shape)} with checksum {zlib.crc32(bytes(array.untyped_storage())):08x}"
