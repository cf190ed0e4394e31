"""Read statistics of data that scale a policy: once, because they become its state."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import do_weights_follow, require
from lightning_rl.extend.files import expanded, read_json
from lightning_rl.extend.spaces import names_in, order_of

FILES = ("meta/stats.json", "dataset_statistics.json", "norm_stats.json")
"""Files in directories of LeRobot's datasets, OpenVLA's models and openpi's models."""

KINDS = ("mean", "std", "min", "max", "q01", "q99")
"""Statistics; a mapping with one of them belongs to one feature."""

OTHER_NAMES = {"action": ("actions", ""), "observation.state": ("state",)}
"""Further names of features, as in openpi, and the top of a file of actions alone."""

BOUNDS = (("q01", "q99"), ("min", "max"))
"""Statistics of the actions for -1 and 1, the preferred pair first."""

SMALL_SPAN = 1e-3
"""Warn of a number of an action whose span is a smaller part of the largest span."""

Statistics = dict[str, dict[str, Any]]
"""By feature, such as `bridge.action`: numbers by the name of the statistic, such as `q01`."""


def read_statistics(path: str) -> Statistics:
    """Read the statistics of a LeRobot dataset, of OpenVLA or of openpi.

    A dataset's `info.json` adds `names`, such as those of joints, to its features.

    Args:
        path: JSON file, or a directory with one of `FILES`.

    Raises:
        ConfigurationError: if there is no such file, or it cannot be read.
    """
    place = expanded(path)
    files = [place / name for name in FILES] if place.is_dir() else [place]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ConfigurationError(
            f"No statistics at {path}: give the JSON file that came with the model or the dataset, "
            f"or a directory with {' or '.join(FILES)}."
        )
    statistics = dict(_features(read_json(file), ""))
    info = file.with_name("info.json")
    features: Any = read_json(info).get("features") if info.is_file() else {}
    described = features.values() if isinstance(features, dict) else [features]
    require(
        all(isinstance(feature, dict) for feature in described),
        f"{info} is damaged: its features are {features!r:.200}. Restore it, or remove it.",
    )
    for name in statistics.keys() & features.keys():
        statistics[name]["names"] = features[name].get("names")
    return statistics


def grouped(state: Mapping[str, Tensor]) -> Statistics:
    """Return statistics with names such as `action.mean` by feature."""
    features: Statistics = {}
    for name, value in state.items():
        feature, _, kind = name.rpartition(".")
        features.setdefault(feature, {})[kind] = value
    return features


def choose(
    statistics: Statistics,
    feature: str,
    key: str | None,
    source: object,
    cure: str = "Give a file that has them.",
    order: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the statistics of a feature, of the dataset `key` if there are several datasets.

    `order` are the names of the env's numbers; a dataset with another order is permuted.

    Raises:
        ConfigurationError: if there are none, or several; the message names those in `source`, and
            the `cure` if there are none. Also if the dataset has other names than `order`.
    """
    # openpi, and files of actions alone, use other names.
    names = (feature, *OTHER_NAMES.get(feature, ()))
    fitting = [
        n for n in statistics if n in names or n.endswith(tuple(f".{end}" for end in names if end))
    ]
    if key is not None:
        # Dots on both sides: a whole part of the dotted name must match.
        fitting = [name for name in fitting if f".{key}." in f".{name}."]
    # Without a key, the name alone wins over names of single datasets.
    elif feature in fitting:
        fitting = [feature]
    present = ", ".join(name or "statistics without a name" for name in statistics) or "none"
    suffix = "" if key is None else f" in statistics_key: {key}"
    require(
        bool(fitting),
        f"{source} has no statistics of '{feature}'{suffix}; it has {present}. {cure}",
    )
    require(
        len(fitting) == 1,
        f"{source} has the statistics of several datasets for {feature}{suffix}: "
        f"{', '.join(fitting)}. Choose the dataset: statistics_key: "
        f"{fitting[0].removesuffix(feature).strip('.') or 'NAME'}.",
    )
    chosen_statistics = dict(statistics[fitting[0]])
    # A dataset may record the joints in another order than the env.
    recorded = names_in(chosen_statistics.pop("names", None), len(order))
    indices = order_of(recorded, order, fitting[0], str(source))
    for kind, value in chosen_statistics.items() if indices is not None else ():
        tensor = numbers(value, f"{source}: {kind} of {fitting[0]}")
        # Other entries, such as a count, do not have one number per joint.
        if tensor.shape[-1:] == (len(order),):
            chosen_statistics[kind] = tensor[..., indices]
    return chosen_statistics


def action_bounds_of(
    path: str, key: str | None, size: int, order: Sequence[str] = ()
) -> tuple[Tensor, Tensor]:
    """Return what `read_action_bounds` returns; NaN, two tensors [A], if weights follow."""
    if do_weights_follow():
        # NaN shows at once if the statistics are used before the weights are loaded.
        return torch.full((size,), torch.nan), torch.full((size,), torch.nan)
    return read_action_bounds(path, key, size, order)


def read_action_bounds(
    path: str, key: str | None, size: int, order: Sequence[str] = ()
) -> tuple[Tensor, Tensor]:
    """Return the actions for -1 and 1, two tensors [A], of a file.

    The file has `q01` and `q99`, or `min` and `max`. Where its `mask` is false, a number is not
    scaled, as in OpenVLA.

    Args:
        path: see `read_statistics`.
        key: see `choose`.
        size: A.
        order: see `choose`.

    Raises:
        ConfigurationError: if the file is missing, or has no such statistics.
    """
    values = choose(read_statistics(path), "action", key, path, order=order)
    pair = next((pair for pair in BOUNDS if set(pair) <= values.keys()), None)
    if pair is None:
        raise ConfigurationError(
            f"{path} needs q01 and q99, or min and max, of actions; it has {', '.join(values)}."
        )
    low, high, mask = (
        numbers(values.get(name, [1] * size), f"{path}: {name} of actions").flatten()
        for name in (*pair, "mask")
    )
    for part in (low, high, mask):
        require(
            part.numel() == size,
            f"{path} has actions of {part.numel()} numbers, but the env's have {size}.",
        )
    indices = [i for i in range(size) if low[i] > high[i]]
    require(
        not indices,
        f"{path}: {pair[0]} is above {pair[1]} in the numbers {indices} of an action (from 0): "
        "compute the statistics again.",
    )
    # Bounds of -1 and 1 leave a number unscaled.
    scaled, unit = mask > 0, torch.ones(size)
    return with_width(low.where(scaled, -unit), high.where(scaled, unit), path)


def numbers(values: Any, name: str) -> Tensor:
    """Return finite numbers as float32 [...]; `name` is for messages.

    Raises:
        ConfigurationError: for other values.
    """
    try:
        tensor = torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigurationError(f"{name} are not numbers: {error}.") from error
    require(bool(tensor.isfinite().all()), f"{name} must be finite numbers, got {values}.")
    return tensor


def with_width(low: Tensor, high: Tensor, source: object) -> tuple[Tensor, Tensor]:
    """Give constant numbers a width.

    A number that was constant in the data keeps its value for every output. Warn of it, and of
    numbers with a much smaller span than others: they hardly depend on the output.

    Args:
        low: [A], the action for -1.
        high: [A], the action for 1.
        source: origin of the numbers, for the warning.
    """
    span = high - low
    small = [i for i in range(len(span)) if span[i] < SMALL_SPAN * span.max()]
    if small:
        warnings.warn(
            f"{source}: the numbers {small} of an action (from 0) have spans of "
            f"{[float(f'{span[i]:.3g}') for i in small]}, and others up to {span.max():.3g}: the "
            "policy keeps them nearly constant. If they should move, give statistics of data in "
            "which they do.",
            stacklevel=2,
        )
    # Relative to the number, because float32 has about 7 digits.
    width = 1e-6 * high.abs().clamp(min=1.0)
    flat = span < width
    return torch.where(flat, low - width, low), torch.where(flat, high + width, high)


def _features(tree: Mapping[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if any(kind in tree for kind in KINDS):
        yield name, dict(tree)
        return
    for key, child in tree.items():
        if isinstance(child, dict):
            yield from _features(child, f"{name}.{key}" if name else key)
