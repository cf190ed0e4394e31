"""Represent recorded episodes, and convert them to rollouts."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

import gymnasium
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import require
from lightning_rl.extend.rollout import (
    FieldSpec,
    allocate_rollout,
    leaves_of_tree,
    map_tree,
)
from lightning_rl.extend.spaces import StructuredActions, as_env_counts, choices_of, first_choice
from lightning_rl.extensions.datasets.ends import EndRule

Outside = Literal["clip", "refuse"]
"""Treatment of actions outside the bounds of a Box action space."""

STEPS = ("action", "reward", "terminated", "truncated", "intervened")
"""Attributes of an episode with one entry per step."""


CONDITION = "condition"
"""Field of a rollout, and key in the Dict observations of a `ConditionedPolicy`."""

CODES = {"absent": 0, "good": 1, "bad": 2}
"""Value of each condition in a rollout."""


@dataclass
class Episode:
    """One episode of L steps.

    Attributes:
        observation: [L+1, ...], a tensor or a tree; the last is the true final observation, unless
            `final_known` is false.
        action: [L, *A], executed actions; choices start at 0.
        reward: [L] float32, or float64 as in the dataset; NaN without rewards.
        terminated: [L] bool, only the last may be true.
        truncated: [L] bool, only the last may be true, also together with `terminated`.
        success: whether the episode succeeded; None if unknown.
        intervened: [L] bool, whether a person or a script chose the action instead of the policy.
        task: task in words, at the first step.
        extra: [L, ...] each, other numbers of each step by name: penalties, labels.
        final_known: whether the dataset holds the true final observation. If not, the last
            observation is a copy of the previous one: do not bootstrap from it.
        tasks: task of each step [L] if the task changes during the episode; else empty.
        end_rule: `EndRule` (text) that decided how the episode ended; empty if the dataset records
            it.
    """

    observation: Any
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    success: bool | None
    intervened: Tensor
    task: str
    extra: dict[str, Tensor] = field(default_factory=dict)
    final_known: bool = True
    tasks: tuple[str, ...] = ()
    end_rule: str = ""

    def __len__(self) -> int:
        return len(self.reward)

    @classmethod
    def of_steps(cls, steps: Mapping[str, Any], task: str = "") -> "Episode":
        """Make an episode of consecutive steps of one env, as in `ring_fragments.fragments`."""
        no = torch.zeros_like(steps["terminated"])
        fields = {"truncated": no, "intervened": no, **steps}
        extra = {"penalty": fields.pop("penalty")} if "penalty" in steps else {}
        return cls(**fields, success=None, task=task, extra=extra)

    def steps_with_successor(self) -> "Episode":
        """Return the episode, without its last step if its final observation is unknown."""
        # After a terminal step nothing bootstraps, so its missing next observation does no harm.
        if self.final_known or bool(self.terminated[-1:].any()):
            return self
        steps = len(self) - 1
        parts: dict[str, Any] = {name: getattr(self, name)[:steps] for name in STEPS}
        parts["observation"] = map_tree(lambda leaf: leaf[: steps + 1], self.observation)
        parts["extra"] = {name: values[:steps] for name, values in self.extra.items()}
        return replace(self, **parts, tasks=self.tasks[:steps], final_known=True)

    def to_rollout(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> TensorDict:
        """Return the episode as a rollout [1, L+1] of single actions, for `Replay.extend`."""
        fields: dict[str, FieldSpec] = dict.fromkeys(("continues", STEPS[-1]), ((), torch.bool))
        fields |= {"penalty": ((), torch.float32)} if "penalty" in self.extra else {}
        spaces = (observation_space, action_space)
        rollout = allocate_rollout(*spaces, 1, len(self), extra_fields=fields)
        self.write_into(rollout, 0)
        return rollout

    def write_into(self, rollout: TensorDict, row: int, chunk: int = 1, execute: int = 1) -> None:
        """Write the episode into a zeroed row of a rollout.

        Args:
            rollout: [N, T+1], with T >= ceil(L / execute); only its own fields are written.
            row: row of the rollout.
            chunk: K, actions per step. The episode's last action pads the last chunk.
            execute: executed actions per chunk.
        """
        # One slot per executed chunk: the frame in which it begins; then the last frame.
        starts = torch.arange(0, len(self), execute)
        steps, frames = len(starts), torch.cat((starts, torch.tensor([len(self)])))
        slots = map_tree(lambda leaf: leaf[row, : steps + 1], rollout.get("observation"))
        map_tree(Tensor.copy_, slots, map_tree(lambda leaf: leaf[frames], self.observation))
        # Without rewards (all NaN) write zeros: NaN would spread into every sum.
        reward = self.reward if self.reward.isfinite().any() else torch.zeros(len(self))
        fields = {"action": self.action, "reward": reward, "intervened": self.intervened}
        fields |= {name: self.extra[name] for name in ("penalty",) if name in self.extra}
        if "executed" in rollout.keys():
            # [S, K] steps of each chunk. Beyond the episode's end the last action stands, not
            # executed.
            at = starts[:, None] + torch.arange(chunk)
            executed = (at < len(self)) & (torch.arange(chunk) < execute)
            fields = {name: values[at.clamp(max=len(self) - 1)] for name, values in fields.items()}
            for name in fields.keys() - {"action"}:
                fields[name] = fields[name] * executed
            fields |= {"step_reward": fields["reward"], "executed": executed}
            fields["reward"] = fields["reward"].sum(1)
            fields["intervened"] = fields["intervened"].any(1)
            fields |= {name: fields[name].sum(1) for name in ("penalty",) if name in fields}
        fields["executed_action"] = fields["action"]
        for name, values in fields.items():
            if name in rollout.keys():
                rollout[name][row, :steps] = values.to(rollout[name])
        self._write_end(rollout, (row, steps - 1))

    def _write_end(self, rollout: TensorDict, last: tuple[int, int]) -> None:
        terminated, truncated = bool(self.terminated[-1]), bool(self.truncated[-1])
        rollout["terminated"][last] = terminated
        rollout["truncated"][last] = truncated
        rollout["done"][last] = terminated or truncated
        rollout["success"][last] = bool(self.success)
        # Only rows of ended episodes have storage for a final observation.
        if (terminated or truncated) and self.final_known:
            storage = rollout["final_observation"]
            new = storage.add(1)
            final = map_tree(lambda leaf: leaf[-1:], self.observation)
            map_tree(Tensor.copy_, map_tree(lambda leaf: leaf[new], storage.rows), final)
            rollout["final_index"][last] = new.start

    def check_lengths(self, name: str = "The episode") -> None:
        """Refuse an episode with a part that does not have one entry per step.

        Raises:
            ConfigurationError: naming the part.
        """
        length = len(self)
        # Observations have one entry more: the final one.
        parts: list[tuple[str, Sized, int]] = [
            (part, values, length + 1)
            for part, values in leaves_of_tree("observation", self.observation)
        ]
        parts += [(part, getattr(self, part), length) for part in STEPS]
        parts += [(f"extra {key}", values, length) for key, values in self.extra.items()]
        parts += [("tasks", self.tasks, length)] if self.tasks else []
        for part, values, expected in parts:
            require(
                len(values) == expected,
                f"{name} has {length} rewards, but {len(values)} entries in its {part} instead of "
                f"{expected}. Correct the dataset, or leave the episode out.",
            )

    def check_finite(self, columns: Mapping[str, str], name: str) -> None:
        """Refuse observations, actions and known rewards that are not finite.

        Raises:
            ConfigurationError: naming the step and, from `columns`, the column.
        """
        parts = dict(leaves_of_tree("observation", self.observation))
        parts["action"] = self.action
        if not self.reward.isnan().all():  # all NaN: the dataset has no rewards
            parts["reward"] = self.reward
        for part, values in parts.items():
            if not values.is_floating_point() or values.isfinite().all():
                continue
            step = int(values.isfinite().logical_not().nonzero()[0, 0])
            row = values[step].flatten()
            raise ConfigurationError(
                f"{name} has {row[~row.isfinite()][0]} in '{columns.get(part, part)}' at step "
                f"{step}, which is not finite. Correct it, or leave the episode out."
            )

    def clip_actions(self, space: gymnasium.Space[Any], refuse: bool, name: str) -> int:
        """Clip the actions to a Box; return the number of clipped actions.

        Raises:
            ConfigurationError: for a choice that the space does not have, and with `refuse` for an
                action outside of a Box.
        """
        action, first = self.action, first_choice(space)
        # Compare per number: an action of several parts may break one part's bounds only.
        flat = action.reshape(len(action), -1)
        box = space if isinstance(space, gymnasium.spaces.Box) else None
        bounds = (box.low, box.high) if box is not None else (0, np.array(choices_of(space)) - 1)
        low, high = (torch.as_tensor(bound).reshape(1, -1).to(flat) for bound in bounds)
        beyond = (flat < low) | (flat > high)
        outside = beyond.any(1)
        invalid = outside.clone() if refuse or box is None else torch.zeros_like(outside)
        if isinstance(space, StructuredActions):  # choices cannot be clipped
            for part in space.parts:
                if part.counts:
                    numbers = flat[:, part.start : part.stop]
                    unknown = beyond[:, part.start : part.stop] | (numbers != numbers.round())
                    invalid |= unknown.any(1)
        if invalid.any():
            step = int(invalid.int().argmax())
            env_action = as_env_counts(action[step].numpy(), first).tolist()
            raise ConfigurationError(
                f"{name} has the action {env_action} at step {step}, which is not in {space}. "
                "Correct it, leave the episode out, or use the action space of the recording."
            )
        if outside.any():
            self.action = flat.clamp(low, high).reshape(action.shape)
        return int(outside.sum())


class Episodes(Sequence[Episode]):
    """Episodes of a dataset, read on access and not cached.

    Attributes:
        path: path of the dataset.
        fps: frames per second; None if the dataset does not record it.
        lengths: steps of each episode.
        action_space: for a check of the actions; None: no check.
        actions_outside: treatment of actions outside its bounds.
        rule: decides how episodes ended; None if `read` does not use one.
        columns: column of each part of an observation, the action and the reward, for messages.
        first_action: number of the first choice in the files, see `first_choice`.
        encode: turns recorded observations into the env's; None if they are equal.
    """

    path: Path
    fps: float | None
    lengths: list[int]
    action_space: gymnasium.Space[Any] | None = None
    actions_outside: Outside = "clip"
    rule: EndRule | None = None
    columns: Mapping[str, str] = {}
    first_action: np.ndarray = np.asarray(0)
    encode: Callable[[Any], Any] | None = None
    _passed: frozenset[str] = frozenset()  # names of the episodes that lost their success again
    _told = 0  # how many of them a warning has counted

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Episode]:
        # Sequence's own iterator would stop at an IndexError inside `read`.
        return self.each(range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...

    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        if isinstance(index, slice):
            return list(self.each(range(*index.indices(len(self)))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.path} has {len(self)} episodes, but no episode {index}.")
        (episode,) = self.each([index % len(self)])
        return episode

    def each(self, numbers: Iterable[int]) -> Iterator[Episode]:
        """Read episodes by their numbers from 0; warn once about clipped actions.

        Raises:
            ConfigurationError: for numbers that are not finite, and for choices that the action
                space does not have.
        """
        # A reader that stops early ends this generator, and `finally` still warns.
        clipped = steps = 0
        try:
            for number in numbers:
                episode, name = self.read(number), self.name_of(number)
                episode.check_lengths(name)
                episode.check_finite(self.columns, name)
                if self.action_space is not None:
                    refuse = self.actions_outside == "refuse"
                    clipped += episode.clip_actions(self.action_space, refuse, name)
                steps += len(episode)
                if self.encode is not None:
                    episode.observation = self.encode(episode.observation)
                yield episode
        finally:
            if len(self._passed) > self._told:
                self._told = len(self._passed)
                rank_zero_warn(
                    f"Of the dataset at {self.path}, {len(self._passed)} of {len(self)} episodes "
                    "succeeded at a step, but not at the last one: they count as failures. To "
                    "count them as successes: rl-cli label --success <numbers>."
                )
            if clipped:
                rank_zero_warn(
                    f"{clipped:,} of {steps:,} actions of the dataset at {self.path} lie outside "
                    f"of {self.action_space}, and are clipped to it (set actions_outside: refuse "
                    "to refuse them)."
                )

    @abstractmethod
    def read(self, index: int) -> Episode:
        """Read an episode by its number from 0, without the checks of `each`."""

    @abstractmethod
    def spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """Return the spaces of observations and actions.

        Raises:
            ConfigurationError: if the dataset does not describe its actions.
        """

    def name_of(self, index: int) -> str:
        """Return the name of an episode for messages."""
        return f"Episode {index} of the dataset at {self.path}"

    def successes(self) -> list[bool | None]:
        """Return the success of each episode; None if unknown."""
        return [self.read(index).success for index in range(len(self))]

    def _success_of(self, flags: np.ndarray, name: str) -> bool:
        """Return the success of an episode: the last of its flags [L], as evaluations do."""
        if flags.any() and not flags[-1]:
            self._passed |= {name}
        return bool(flags[-1])

    def _with_steps(self, lengths: Sequence[int]) -> list[int]:
        # Refuse an empty dataset here, for all formats, rather than at its first use.
        numbers = [i for i, length in enumerate(lengths) if length > 0]
        require(bool(numbers), f"The dataset at {self.path} holds no finished episode: record one.")
        if len(numbers) < len(lengths):
            empty = ", ".join(str(i) for i, length in enumerate(lengths) if length <= 0)
            rank_zero_warn(
                f"The dataset at {self.path} has episodes without steps ({empty}): ignoring them "
                "gives later episodes lower numbers here."
            )
        return numbers
