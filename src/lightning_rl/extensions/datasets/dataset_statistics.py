"""Begin a run with a dataset's statistics of observations."""

from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Algorithm, Policy
from lightning_rl.extend.errors import require
from lightning_rl.extend.policies import RunningMoments
from lightning_rl.extend.rollout import allocate_rollout
from lightning_rl.extensions.datasets.episode import CODES, CONDITION
from lightning_rl.extensions.datasets.lerobot_format import Leaf, leaves_of
from lightning_rl.extensions.vla.statistics import Statistics, choose, numbers, read_statistics


class DatasetStatistics(Callback):
    """Begin a run with the statistics of a LeRobot dataset; the run's observations update them.

    This sets all running means and variances of the policy's inputs: of `normalize_observation`,
    and of encoders with `normalize`. A resumed run keeps its own statistics, and reads no file.

    Args:
        path: path of the dataset, or of its `meta/stats.json`.
        keys: the dataset's column for a key of the observation, such as `{arm: observation.state}`.
            Default: LeRobot's names, as `rl-cli record` writes them.

    Raises:
        ConfigurationError: if there are no statistics, or they do not fit the observation.
    """

    def __init__(self, path: str, keys: dict[str, str] | None = None) -> None:
        self._path = path
        self._keys = keys or {}
        self._statistics: Statistics = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.ckpt_path is None:
            self._statistics = read_statistics(self._path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(Algorithm, pl_module)
        if trainer.ckpt_path is not None:
            return
        moments = [layer for layer in module.policy.modules() if isinstance(layer, RunningMoments)]
        require(
            bool(moments),
            "DatasetStatistics: the policy keeps no statistics of its inputs. Set "
            "model.policy.normalize_observation: true, or normalize: true of its encoder.",
        )
        counts = [int(moment.count) for moment in moments]
        module.policy.update_normalization(self._rollout(module.policy))
        for moment, count in zip(moments, counts, strict=True):
            if int(moment.count) > count:  # not of a frozen base
                require(
                    count == 0,
                    "DatasetStatistics: the policy already has statistics, from "
                    "trainer.init_from: remove this callback or init_from.",
                )
                moment.count.fill_(self._frames)

    @property
    def _frames(self) -> int:
        counts = [part["count"] for part in self._statistics.values() if "count" in part]
        # A column may count less than others; the largest count is the dataset's.
        return max(2, *(int(numbers(count, "count").max()) for count in counts)) if counts else 2

    def _rollout(self, policy: Policy) -> TensorDict:
        """Return a rollout [1, 2 + 1] of the dataset's mean and variance.

        Two observations, mean + std and mean - std, have exactly this mean and variance; the third
        is the bootstrap slot, which does not count.
        """
        space, device = policy.observation_space, policy.version.device
        fields: dict[str, Any] = {"extra_fields": policy.extra_fields, "device": device}
        rollout = allocate_rollout(space, policy.action_space, 1, 2, **fields)
        for leaf in leaves_of(space):
            if leaf.path[:1] not in {(key,) for key in policy.ignore_keys}:
                mean, std = (self._of(leaf, name) for name in ("mean", "std"))
                values = torch.stack((mean + std, mean - std, mean))[None]
                # Not copied: a picture's statistics are no whole numbers.
                rollout["observation", *leaf.path] = values.to(device)
        if CONDITION in rollout.keys():  # both conditions, which the dataset's labels decide later
            rollout[CONDITION][0, :2] = torch.tensor([CODES["good"], CODES["bad"]])
        return rollout

    def _of(self, leaf: Leaf, name: str) -> Tensor:
        column = self._keys.get(".".join(leaf.path), leaf.key)
        source = f"DatasetStatistics: {self._path}"
        cure = "Name the column by keys."
        values = choose(self._statistics, column, None, source, cure, leaf.names)
        require(
            name in values,
            f"DatasetStatistics: {self._path} has no {name} of '{column}'; it has "
            f"{', '.join(values)}.",
        )
        statistic = numbers(values[name], f"{self._path}: {column}.{name}")
        if leaf.picture:  # [C, 1, 1] in [0, 1]
            pixels = statistic.flatten()
            pixels = pixels[:, None, None] if leaf.channels_first else pixels
            return (pixels * 255.0).expand(leaf.shape)
        require(
            statistic.numel() == max(1, torch.Size(leaf.shape).numel()),
            f"DatasetStatistics: '{column}' of {self._path} has {statistic.numel()} numbers, but "
            f"the observation's shape is {list(leaf.shape)}.",
        )
        return statistic.reshape(leaf.shape)
