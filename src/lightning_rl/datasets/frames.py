"""Show recorded frames of success and failure, to train a classifier of success."""

from typing import Any, Literal

import torch
from gymnasium.spaces import Discrete
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.datasets.reader import read_episodes
from lightning_rl.envs import TorchEnv
from lightning_rl.envs.vector_env import Observation
from lightning_rl.policies.spaces import space_of
from lightning_rl.rollout.contract import FieldSpec, map_tree
from lightning_rl.system.errors import check_range, require

FRAMES_PER_EPISODE = 100
"""Frames per episode of the env; its return is the percentage of correct answers."""

Negatives = Literal["all", "failures"]
"""Negative frames: all other frames, or only frames of failed episodes."""


class LabelledFrames(TorchEnv):
    """Env that shows random frames of recorded episodes; the action is the answer: 1 for success.

    `RewardClassifier` trains in it. A step scores the answer for the current frame (reward 1 if
    correct) and shows the next one. Whole episodes are held out for evaluation: consecutive frames
    are nearly equal, so held-out frames of training episodes would only test memory.

    The frames stay in memory in the dataset's dtype, pictures as uint8, once per process.

    Args:
        num_envs: number of frames per step.
        path: path of a dataset, see `read_episodes`. Episodes without a success label are skipped.
        keys: rename columns of the dataset, see `read_episodes`. If it names parts of the
            observation, only these are shown: `{observation.images.front: observation.front}`.
        positive_frames: number of frames at the end of a successful episode that show success; the
            true final observation is one of them if the dataset has it.
        negatives: frames without success: `all` others, or only frames of failed episodes.
        held_out: share of the episodes to hold out, of successes and failures each, at least one.
        split_seed: draws the held-out episodes.
        device: device of the frames.

    Attributes:
        extra_fields: `label` [N] int64 of the frame, and `weight` [N] float32, which gives both
            classes the same total weight, with mean 1.

    Raises:
        ConfigurationError: for a number out of range, a missing dataset, and too few successful or
            failed episodes.
    """

    start_size = 1

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
        check_range("positive_frames", positive_frames, least=1)
        check_range("held_out", held_out, above=0, below=1)
        self._episodes = read_episodes(path, keys)
        self._positive_frames, self._negatives = positive_frames, negatives
        self._learnt, self.held_out = self._split(held_out, split_seed)
        space = space_of(self._episodes[self._learnt[0]].observation)
        super().__init__(num_envs, space, Discrete(2), FRAMES_PER_EPISODE, device)
        self._shown: tuple[Observation, Tensor, Tensor] | None = None

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        return super().extra_fields | {"label": ((), torch.int64), "weight": ((), torch.float32)}

    def frames_of(self, episodes: list[int]) -> tuple[Observation, Tensor]:
        """Return observations [F, ...] on the CPU and labels [F] int64 of episodes.

        Each episode needs a known success; `episodes` are numbers in the dataset.
        """
        seen, labels = [], []
        for number in episodes:
            episode = self._episodes[number]
            count = len(episode) + episode.final_known
            label = torch.zeros(count, dtype=torch.int64)
            if episode.success:
                label[-self._positive_frames :] = 1
            kept = (label == 1) | (not episode.success or self._negatives == "all")
            seen.append(map_tree(lambda x, n=count, k=kept: x[:n][k], episode.observation))
            labels.append(label[kept])
        label = torch.cat(labels)
        observation = map_tree(lambda *parts: torch.cat(parts), *seen)
        if isinstance(observation, dict):
            observation = TensorDict(observation, [len(label)])
        return observation, label

    def initial_state(self, uniform: Tensor) -> TensorDict:
        return TensorDict({"frame": self._drawn(uniform)}, [len(uniform)])

    def observe(self, state: TensorDict) -> Observation:
        observation, *_ = self._frames()
        return map_tree(lambda leaf: leaf.index_select(0, state["frame"]), observation)  # type: ignore[no-any-return]  # a tensor or a tree

    def transition(
        self, state: TensorDict, action: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        _, labels, weights = self._frames()
        label = labels[state["frame"]]
        right = action == label
        moved = TensorDict({"frame": self._drawn(self.uniform(1))}, state.batch_size)
        info = {"label": label, "weight": weights[state["frame"]]}
        return moved, right.float(), torch.zeros_like(right), info

    def _drawn(self, uniform: Tensor) -> Tensor:
        """Map random numbers [M, 1] in [0, 1) to frames [M]."""
        count = len(self._frames()[1])
        return (uniform[:, 0] * count).long().clamp_(max=count - 1)

    def _frames(self) -> tuple[Observation, Tensor, Tensor]:
        """Return the training frames: observations [F, ...], labels and weights [F]."""
        # Read on first use: the env of an evaluation never needs them.
        if self._shown is None:
            observation, label = self.frames_of(self._learnt)
            weight = len(label) / (2 * label.bincount(minlength=2)).float()
            parts = (observation, label, weight[label])
            self._shown = tuple(part.to(self.device) for part in parts)  # type: ignore[assignment]  # three of them
        assert self._shown is not None
        return self._shown

    def _split(self, share: float, seed: int) -> tuple[list[int], list[int]]:
        successes = self._episodes.successes()
        kinds = {
            "successful": [i for i, success in enumerate(successes) if success],
            "failed": [i for i, success in enumerate(successes) if success is False],
        }
        path, unknown = self._episodes.path, sum(success is None for success in successes)
        drawn = torch.Generator().manual_seed(seed)
        learnt, held_out = [], []
        for kind, numbers in kinds.items():
            if kind == "failed" and not numbers and self._negatives == "all":
                self._check_beginnings(kinds["successful"])
                continue
            require(
                len(numbers) >= 2,
                f"The dataset at {path} has {len(numbers)} {kind} episodes, {len(successes)} in "
                f"all, of which {unknown} have no success label: a reward classifier needs at "
                "least two, because it holds one out. Record more; if a column has the label, name "
                f"it: keys: {{<column>: success}}"
                + ("." if kind == "successful" else "; or learn from all frames: negatives: all."),
            )
            order = [numbers[i] for i in torch.randperm(len(numbers), generator=drawn)]
            count = min(max(1, round(share * len(order))), len(order) - 1)
            held_out += order[:count]
            learnt += order[count:]
        return sorted(learnt), sorted(held_out)

    def _check_beginnings(self, successes: list[int]) -> None:
        """Refuse successful episodes without negative frames if there are no failed episodes."""
        shortest = min(self._episodes.lengths[number] for number in successes)
        require(
            shortest > self._positive_frames,
            f"The dataset at {self._episodes.path} has no failed episode, and all {shortest} "
            "frames of its shortest episode would show success with positive_frames: "
            f"{self._positive_frames}. Lower positive_frames, or record failures.",
        )
