"""Describe what the function of a policy depends on beside its weights, and compare two of them.

The same weights are another function behind another activation, another family of distributions,
another temperature or other action bounds, and a state dict tells of none of these.
"""

import zlib
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_rl.policies.base import Policy
from lightning_rl.system.torch_private import non_persistent_buffers_of

Description = dict[str, dict[str, Any]]
"""By the path of a module: the name of its class as `class`, where that says what it computes, and
its plain attributes and the buffers that its state dict leaves out, as `settings`."""

LISTED_ENTRIES = 64
"""A buffer with more entries is described by a checksum."""

NOT_OF_THE_FUNCTION = (
    *("training", "inplace", "has_critic", "joint_ratio", "micro_batch_size"),
    *("critic_keys", "critic_reads_apart", "ignore_keys"),
    *("noise_correlation", "state_size", "state_sizes"),
)
"""Attributes of modules and policies that say how they are trained, what a critic reads, or how
noise goes on: a clone, which has none, may begin to explore by any."""


class Differences(NamedTuple):
    """How two descriptions differ, in words: `PATH is a Tanh here, a ReLU there`."""

    classes: list[str]
    settings: list[str]


def describe(policy: Policy) -> Description:
    """Return the description of a policy, of plain values; its critic left out.

    Modules of other libraries but torch's layers are left out with all that is in them: their
    attributes are no settings of a policy, and change from version to version.
    """
    described: Description = {}
    _add(policy, "", {"torch", "lightning_rl"}, policy.critic_modules, described)
    return described


def differences(own: Description, saved: Description) -> Differences:
    """Compare what both descriptions have: other names, other weights, are told by a state dict."""
    classes, settings = [], []
    for path in own.keys() & saved.keys():
        here, there = own[path], saved[path]
        both = (here["class"], there["class"])
        if None not in both and both[0] != both[1]:
            classes.append(f"{path} is a {both[0]} and was a {both[1]}")
            continue  # so its settings have other names
        for name in here["settings"].keys() & there["settings"].keys():
            new, old = here["settings"][name], there["settings"][name]
            if _as_lists(new) != _as_lists(old):
                at = f"{path}.{name}" if path else name
                settings.append(f"{at} is {new} and was {old}")
    return Differences(sorted(classes), sorted(settings))


def _as_lists(value: Any) -> Any:
    """Return a setting as JSON has it, which knows no tuples."""
    return [_as_lists(one) for one in value] if isinstance(value, list | tuple) else value


def _add(
    module: nn.Module, path: str, packages: set[str], critic: tuple[str, ...], to: Description
) -> None:
    """Describe a module and those in it."""
    home = type(module).__module__
    if isinstance(module, Policy):
        packages = packages | {home.split(".")[0]}
    if path in critic or home.split(".")[0] not in packages or home.endswith("modules.dropout"):
        return
    computes = home.startswith("lightning_rl.") and not isinstance(module, Policy)
    named = computes or home == "torch.nn.modules.activation"
    to[path] = {"class": type(module).__name__ if named else None, "settings": _settings(module)}
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
    own = module.training_settings if isinstance(module, Policy) else ()
    return (*NOT_OF_THE_FUNCTION, *own)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return type(value) in (bool, int, float, str)


def _value_of(buffer: Tensor) -> Any:
    """Return the entries of a buffer, or what stands for them."""
    array = buffer.detach().cpu().contiguous()
    if array.numel() <= LISTED_ENTRIES:
        return array.tolist()
    return f"{list(array.shape)} with checksum {zlib.crc32(bytes(array.untyped_storage())):08x}"
