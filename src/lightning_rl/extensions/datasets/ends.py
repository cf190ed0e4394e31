"""Decide how recorded episodes ended, from the flags of their dataset."""

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import require

Ends = Literal["success", "terminated", "truncated"]
"""How episodes ended if the dataset has no flag for it: see `EndRule`."""

FLAGS = ("terminated", "truncated", "done")
"""Flags at an episode's last step."""


class EndRule:
    """Rule that decides how the episodes of a dataset ended.

    The flag `terminated` of a dataset decides. With `truncated` alone, an episode that ended
    without truncation is terminal. Without these flags, `ends` decides.

    Args:
        columns: columns of the dataset, by `terminated`, `truncated`, `done`, `success`.
        ends: `terminated` or `truncated`: every episode; `success`: terminal if the episode
            succeeded, else truncated. Default: `success`.
        path: path of the dataset.
        earlier_rules: rules (texts) that decided ends before the dataset was copied.

    Attributes:
        words: the rule, for a message.
        assumed: whether the rule is a guess: neither the dataset nor `ends` decides.
        decided: the rule behind ends that the dataset itself does not record; else empty.

    Raises:
        ConfigurationError: if `ends` is given although the dataset records it.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        ends: Ends | None,
        path: object,
        earlier_rules: Iterable[str] = (),
    ) -> None:
        recorded = [columns[name] for name in ("terminated", "truncated") if name in columns]
        require(
            ends is None or not recorded,
            f"ends is {ends!r}, but the dataset at {path} records how episodes ended, in "
            f"{' and '.join(recorded)}: remove ends.",
        )
        self._ends, self.assumed = ends or "success", not recorded and ends is None
        if "terminated" in columns:
            self.words = (
                f"an episode is terminated if {columns['terminated']} is true, else truncated"
            )
        elif recorded:
            self.words = f"an episode is terminated unless {columns['truncated']} is true"
        elif self._ends != "success":
            self.words = f"every episode is {self._ends} (ends)"
        elif "success" in columns:
            self.words = "an episode is terminated if it succeeded, else truncated"
        else:
            self.words = "every episode is truncated, because no column records a terminal end"
        self.decided = "; ".join(earlier_rules) if recorded else self.words
        if recorded and self.decided:
            self.words += f" (before it was copied: {self.decided})"

    def apply(
        self, length: int, flags: Mapping[str, np.ndarray], success: bool | None, name: str
    ) -> tuple[Tensor, Tensor]:
        """Return `terminated` and `truncated`, [L] bool each, of an episode.

        Args:
            length: L.
            flags: [L] bool each, from the dataset, by names of `FLAGS`.
            success: whether the episode succeeded; None if unknown.
            name: name of the episode, for messages.

        Raises:
            ConfigurationError: for an end before the last step, or contradicting flags.
        """
        for flag, values in flags.items():
            # The last step alone may end an episode.
            early = np.flatnonzero(values[:-1])
            if len(early):
                raise ConfigurationError(
                    f"{name} contradicts itself: {flag} is true at step {early[0]}, and "
                    f"{len(values) - 1 - early[0]} steps follow. Split the episode there, or "
                    "correct the column."
                )
        terminated, truncated, done = (
            bool(flags[flag][-1]) if flag in flags else None for flag in FLAGS
        )
        # `done` must equal terminated or truncated; a missing flag contradicts nothing.
        if (done is False and (terminated or truncated)) or (
            done and terminated is False and truncated is False
        ):
            recorded = {"terminated": terminated, "truncated": truncated, "done": done}
            raise ConfigurationError(
                f"{name} contradicts itself: at its last step "
                f"{', '.join(f'{k} is {v}' for k, v in recorded.items() if v is not None)}. "
                "Correct the columns."
            )
        # Without a flag for it: first what `truncated` implies, then the rule `ends`.
        if terminated is None:
            if done is False:
                terminated = False
            elif truncated is not None:
                terminated = not truncated
            else:
                terminated = bool(success) if self._ends == "success" else self._ends != "truncated"
        # Without a flag at its end, the collector stopped the episode: it is truncated.
        ends = torch.zeros(2, length, dtype=torch.bool)
        ends[0, -1], ends[1, -1] = terminated, bool(truncated) or not terminated
        return ends[0], ends[1]


def as_flags(values: np.ndarray, name: str) -> np.ndarray:
    """Return values [L] as bool; `name` is for the message.

    Raises:
        ConfigurationError: for a value that is neither 0 nor 1.
    """
    invalid = values[~np.isin(values, (0, 1))]
    require(len(invalid) == 0, f"{name} holds {invalid[:1]}, but a flag is 0 or 1. Correct it.")
    return values.astype(bool)


def check_times(frames: np.ndarray, seconds: np.ndarray | None, fps: float, name: str) -> None:
    """Refuse rows that are not 1 / fps apart: `frame_index` [L], `timestamp` [L] or None.

    Raises:
        ConfigurationError: for the first wrong row.
    """
    gaps = np.flatnonzero(np.diff(frames) != 1)
    if len(gaps):
        previous_frame, next_frame = frames[gaps[0] : gaps[0] + 2]
        raise ConfigurationError(
            f"{name} has frame_index {next_frame} after {previous_frame}: frames are missing or "
            "out of order. Restore the frames, or leave the episode out."
        )
    if seconds is None:
        return
    # Tolerance of a quarter of a frame, as for videos.
    is_off = ~(np.abs(seconds - seconds[0] - np.arange(len(frames)) / fps) <= 0.25 / fps)
    if is_off.any():
        row = int(is_off.argmax())
        raise ConfigurationError(
            f"{name} contradicts itself: its timestamp is {seconds[row]:g} s at row {row} and "
            f"{seconds[0]:g} s at row 0, but info.json says {fps:g} frames per second. Correct fps "
            "or the timestamps, or restore the frames that are missing."
        )
