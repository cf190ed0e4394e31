"""Show recorded frames, to train a classifier of success or a value."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from gymnasium.spaces import Discrete
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import TorchEnv
from lightning_rl.extend.envs import Observation
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.rollout import FieldSpec, leaves_of_tree, map_tree
from lightning_rl.extend.spaces import space_of
from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.extensions.datasets.label import LabelSettings, Rewards, by_task, returns_of
from lightning_rl.extensions.datasets.reader import read_episodes

FRAMES_PER_EPISODE = 100
"""Frames per episode of the env; the return is the percentage of correct answers."""

Negatives = Literal["all", "failures"]
"""The setting `negatives`."""


class RecordedFrames(TorchEnv):
    """Base class of envs that show random frames of recorded episodes; the action is the answer.

    A step scores the answer for the current frame (reward 1 if correct) and shows the next one. All
    frames stay in memory in the dataset's dtype, pictures as uint8, once per process.
    """

    start_size = 1
    _shown: tuple[Observation, dict[str, Tensor]] | None = None

    @abstractmethod
    def read(self) -> tuple[Observation, dict[str, Tensor]]:
        """Read the training frames: observations [F, ...]; `label` and other fields, [F] each."""

    def initial_state(self, uniform: Tensor) -> TensorDict:
        return TensorDict({"frame": self._random_frames(uniform)}, [len(uniform)])

    def observe(self, state: TensorDict) -> Observation:
        observation, _ = self._frames()
        return map_tree(lambda leaf: leaf.index_select(0, state["frame"]), observation)  # type: ignore[no-any-return]  # a tensor or a tree

    def transition(
        self, state: TensorDict, action: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        _, fields = self._frames()
        info = {name: values[state["frame"]] for name, values in fields.items()}
        is_correct = action == info["label"]
        next_state = TensorDict({"frame": self._random_frames(self.uniform(1))}, state.batch_size)
        return next_state, is_correct.float(), torch.zeros_like(is_correct), info

    def _random_frames(self, uniform: Tensor) -> Tensor:
        count = len(self._frames()[1]["label"])
        # `uniform` may round up to 1 in float32, so clamp.
        return (uniform[:, 0] * count).long().clamp_(max=count - 1)

    def _frames(self) -> tuple[Observation, dict[str, Tensor]]:
        # Read on first use: the env of an evaluation needs no frames.
        if self._shown is None:
            observation, fields = self.read()
            fields = {name: values.to(self.device) for name, values in fields.items()}
            self._shown = (observation.to(self.device), fields)
        return self._shown


class SuccessFramesEnv(RecordedFrames):
    """Env that shows random frames of recorded episodes; the action is the answer: 1 for success.

    `RewardClassifier` trains in it. Whole episodes are held out for evaluation, because consecutive
    frames are nearly equal.

    Args:
        num_envs: number of frames per step.
        path: path of a dataset, see `read_episodes`. Episodes without a success label are skipped.
        keys: rename columns of the dataset, see `read_episodes`. If it names parts of the
            observation, only these are shown: `{observation.images.front: observation.front}`.
        positive_frames: number of frames at the end of a successful episode that show success,
            including the true final observation if the dataset has it.
        negatives: frames without success: `all` other frames, or only frames of failed episodes.
        held_out: share of the successes and of the failures to hold out, at least one episode each.
        split_seed: draws the held-out episodes.
        device: device of the frames.

    Attributes:
        extra_fields: `label` [N] int64 of the frame, and `weight` [N] float32, which gives both
            classes the same total weight, with mean 1.

    Raises:
        ConfigurationError: for a missing dataset, and too few successful or
            failed episodes.
    """

    def __init__(
        self,
        num_envs: int,
        path: str,
        keys: dict[str, str] | None = None,
        positive_frames: int = 1,
        negatives: Negatives = "all",
        held_out: float = 0.2,
        split_seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        check_range("positive_frames", positive_frames, minimum=1)
        check_range("held_out", held_out, above=0, below=1)
        self._episodes = read_episodes(path, keys)
        self._positive_frames, self._negatives = positive_frames, negatives
        self._training, self.held_out = self._split(held_out, split_seed)
        space = space_of(self._episodes[self._training[0]].observation)
        super().__init__(num_envs, space, Discrete(2), FRAMES_PER_EPISODE, device)

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return super().extra_fields | {"label": ((), torch.int64), "weight": ((), torch.float32)}

    def frames_of(self, episodes: list[int]) -> tuple[Observation, Tensor]:
        """Return observations [F, ...] on the CPU and labels [F] int64 of labelled episodes."""
        frames, labels = [], []
        for number in episodes:
            episode = self._episodes[number]
            # An unknown final observation is a copy of the previous frame: leave it out.
            count = len(episode) + episode.final_known
            label = torch.zeros(count, dtype=torch.int64)
            if episode.success:
                label[-self._positive_frames :] = 1
            mask = (label == 1) | (not episode.success or self._negatives == "all")
            # The defaults bind count and mask now: a lambda would see the last episode's.
            frames.append(map_tree(lambda x, n=count, k=mask: x[:n][k], episode.observation))
            labels.append(label[mask])
        label = torch.cat(labels)
        return _joined(frames), label

    def read(self) -> tuple[Observation, dict[str, Tensor]]:
        observation, label = self.frames_of(self._training)
        # Both classes get the same total weight, with mean 1.
        weight = len(label) / (2 * label.bincount(minlength=2)).float()
        return observation, {"label": label, "weight": weight[label]}

    def _split(self, share: float, seed: int) -> tuple[list[int], list[int]]:
        successes = self._episodes.successes()
        kinds = {
            "successful": [i for i, success in enumerate(successes) if success],
            "failed": [i for i, success in enumerate(successes) if success is False],
        }
        path, unknown = self._episodes.path, sum(success is None for success in successes)
        generator = torch.Generator().manual_seed(seed)
        training, held_out = [], []
        for kind, numbers in kinds.items():
            # Without failures the beginnings of successful episodes show what no success looks
            # like.
            if kind == "failed" and not numbers and self._negatives == "all":
                self._check_beginnings(kinds["successful"])
                continue
            require(
                len(numbers) >= 2,
                f"The dataset at {path} has {len(numbers)} {kind} episodes, {len(successes)} in "
                f"all, of which {unknown} have no success label: a reward classifier needs at "
                "least two, because one is held out. Record more episodes; if a column has the "
                f"label, name it: keys: {{<column>: success}}"
                + ("." if kind == "successful" else "; or learn from all frames: negatives: all."),
            )
            order = [numbers[i] for i in torch.randperm(len(numbers), generator=generator)]
            # At least one episode on each side.
            count = min(max(1, round(share * len(order))), len(order) - 1)
            held_out += order[:count]
            training += order[count:]
        return sorted(training), sorted(held_out)

    def _check_beginnings(self, successes: list[int]) -> None:
        shortest = min(self._episodes.lengths[number] for number in successes)
        require(
            shortest > self._positive_frames,
            f"The dataset at {self._episodes.path} has no failed episode, and with {shortest} "
            "frames its shortest episode has no frame without success with positive_frames: "
            f"{self._positive_frames}. Lower positive_frames, or record failures.",
        )


class ReturnFramesEnv(RecordedFrames):
    """Env that shows random steps of recorded episodes; the answer is the bin of the return.

    `ValueFit` trains in it. The bins are equidistant, from -1 to 0 for returns of success, else
    from the lowest to the highest return. With several tasks, and without `language`, the
    observation has a one-hot of the task: as last numbers of a vector, or as key `task` of a Dict,
    in which an observation of another shape is the key `observation`.

    Args:
        num_envs: number of frames per step.
        path: of a dataset, see `read_episodes`.
        keys: see `SuccessFramesEnv`.
        reward: `success` or `env`, see `LabelSettings`.
        failure_cost: see `LabelSettings`.
        gamma: discount per step.
        bins: number of bins.
        folds: number of parts of the dataset, see `ValueFit`.
        split_seed: draws the parts.
        device: of the frames.

    Attributes:
        extra_fields: `label`, the bin, and `fold`, the part of the episode, [N] int64.

    Raises:
        ConfigurationError: for a missing dataset, fewer episodes than folds,
            and episodes without a success label.
    """

    def __init__(
        self,
        num_envs: int,
        path: str,
        keys: dict[str, str] | None = None,
        reward: Rewards = "success",
        failure_cost: float | None = None,
        gamma: float = 1.0,
        bins: int = 201,
        folds: int = 4,
        split_seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        check_range("bins", bins, minimum=2)
        check_range("folds", folds, minimum=2)
        self.settings: dict[str, Any] = {
            **{"keys": keys, "reward": reward, "failure_cost": failure_cost, "gamma": gamma},
            **{"bins": bins, "folds": folds, "split_seed": split_seed},
        }
        self.folds, self._split_seed = folds, split_seed
        self._episodes = read_episodes(path, keys)
        require(
            len(self._episodes) >= folds,
            f"The dataset at {path} has {len(self._episodes)} episodes, fewer than folds={folds}: "
            "record more, or lower folds.",
        )
        # Read no observations: the pictures of all episodes may not fit into memory.
        self._steps = [replace(episode, observation=None) for episode in self._episodes]
        # Tasks get their numbers in the order of their names, so that all processes agree.
        self._tasks = [0] * len(self._steps)
        for task, rows in enumerate(by_task(self._steps).values()):
            for row in rows:
                self._tasks[row] = task
        space = space_of(self.steps_of(0))
        super().__init__(num_envs, space, Discrete(bins), FRAMES_PER_EPISODE, device)

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return super().extra_fields | dict.fromkeys(("label", "fold"), ((), torch.int64))

    def __len__(self) -> int:
        return len(self._episodes)

    @cached_property
    def returns(self) -> list[Tensor]:
        """The returns [L] of each episode.

        Raises:
            ConfigurationError: for an episode without a success label, or without rewards.
        """
        names = ("reward", "failure_cost", "gamma")
        settings = LabelSettings(**{name: self.settings[name] for name in names})
        return returns_of(self._episodes.path, self._steps, settings)

    @cached_property
    def support(self) -> Tensor:
        """The centers [bins] of the bins."""
        low, high = -1.0, 0.0
        if self.settings["reward"] == "env":
            low, high = (float(bound) for bound in torch.cat(self.returns).aminmax())
        bins: int = self.settings["bins"]
        # Equal returns would make bins of width 0.
        return low + max(high - low, 1e-6) * torch.linspace(0, 1, bins, dtype=torch.float64)

    @property
    def longest(self) -> dict[str, int]:
        """Steps of the longest episode of each task, the unit of returns of success."""
        lengths = self._episodes.lengths
        return {task: max(lengths[i] for i in rows) for task, rows in by_task(self._steps).items()}

    def steps_of(self, number: int) -> Observation:
        """Return the observations [L, ...] of an episode, with the task if there are several."""
        return self._step_observations(self._episodes[number], self._tasks[number])

    def fold_of(self, number: int) -> int:
        """Return the part of an episode; it stays the same in a larger dataset."""
        # One permutation per block of `folds` episodes: new episodes change no earlier block.
        block, place = divmod(number, self.folds)
        generator = torch.Generator().manual_seed(self._split_seed + block)
        return int(torch.randperm(self.folds, generator=generator)[place])

    def read(self) -> tuple[Observation, dict[str, Tensor]]:
        observations = list(map(self._step_observations, self._episodes, self._tasks))
        returns = torch.cat(self.returns)
        low, high = self.support[0], self.support[-1]
        place = (returns - low) / (high - low) * (len(self.support) - 1)
        folds = [torch.full((len(part),), self.fold_of(i)) for i, part in enumerate(self.returns)]
        bins = place.round().long().clamp(0, len(self.support) - 1)
        return _joined(observations), {"label": bins, "fold": torch.cat(folds)}

    def _step_observations(self, episode: Episode, task: int) -> Observation:
        length, count = len(episode), max(self._tasks) + 1
        # Returns belong to steps, so the final observation stays out.
        observation: Any = map_tree(lambda leaf: leaf[:length], episode.observation)
        if count == 1 or (isinstance(observation, dict) and "language" in observation):
            return _joined([observation])
        mark = torch.eye(count)[task].expand(length, -1)
        if isinstance(observation, dict):
            return _joined([{**observation, "task": mark}])
        if observation.ndim == 2:
            return torch.cat((observation, mark.to(observation)), 1)
        # A picture, a matrix or a scalar has no room for further numbers.
        return _joined([{"observation": observation, "task": mark}])


def _joined(observations: Sequence[Any]) -> Observation:
    joined = map_tree(lambda *parts: torch.cat(parts), *observations)
    if isinstance(joined, dict):
        (_, leaf), *_ = leaves_of_tree("observation", joined)
        return TensorDict(joined, [len(leaf)])
    return joined  # type: ignore[no-any-return]  # a tensor
