"""Fit the value of recorded steps, by cross-fitting: the baseline of their advantages."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.extend import ranks
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.checkpoints import STATE_KEY
from lightning_rl.extend.collectors import logged_values, summarize
from lightning_rl.extend.errors import require
from lightning_rl.extend.policies import PerceptronPolicy, autocast, check_weights_are_numbers
from lightning_rl.extensions.algorithms.recorded_frames import FrameAlgorithm
from lightning_rl.extensions.datasets.frames import ReturnFramesEnv
from lightning_rl.kwargs import Unpack, ValueFitKwargs

STEPS_AT_ONCE = 256
"""Steps per forward pass of an evaluation."""


class ValueFit(FrameAlgorithm):
    """Fit a distribution over bins to the returns of recorded steps, by cross-entropy.

    It needs `data.env: ReturnFramesEnv`, and an `ActorOnly` with any encoder for the observations;
    its action is the bin of the return, and the value is the mean of the distribution over bins.

    A network can memorise the returns that it was trained on, so that every advantage is near 0.
    So each of the `folds` parts of the dataset has a copy of the policy that trains on the other
    parts; `values` and evaluations use the copy that has not seen the episode.

    An evaluation reports the error between value and return over all steps. `error_over_spread`
    divides the error by the standard deviation of the returns, and is 1 for a constant value. The
    return of an episode is minus its root mean squared error.

    Source: Physical Intelligence 2025, "pi*0.6: a VLA That Learns From Experience".
    Differs from the paper: cross-fitting.

    Args:
        policy: reads an observation and chooses a bin; its action space is the env's.
        n_epochs: passes over the frames of a rollout.
        folds: number of parts, equal to the env's `folds`.
        kwargs: see `Algorithm`.

    Attributes:
        support: [bins] float64, centers of the bins. Saved in checkpoints.
        frame_settings: settings of the env with the returns. Saved in checkpoints.
        longest: steps of the longest episode of each task. Saved in checkpoints.

    Raises:
        ConfigurationError: for a policy that is no `PerceptronPolicy`,
            or has a memory.
    """

    env_class = ReturnFramesEnv
    FIELDS = ("observation", "action", "fold")
    support: Tensor

    def __init__(
        self,
        policy: PerceptronPolicy,
        *,
        n_epochs: int = 1,
        folds: int = 4,
        **kwargs: Unpack[ValueFitKwargs],
    ) -> None:
        super().__init__(policy, n_epochs=n_epochs, **kwargs)
        require(
            isinstance(policy, PerceptronPolicy) and not policy.evaluates_sequences,
            "ValueFit needs an ActorOnly without a memory, but the policy is a "
            f"{type(policy).__name__}: set model.policy: {{class_path: ActorOnly}}, with an "
            "encoder for pictures (for a VLA's backbone BackboneEncoder).",
        )
        self.others = nn.ModuleList(copy.deepcopy(policy) for _ in range(folds - 1))
        bins = policy.distribution.num_outputs
        # NaN until `setup` knows the env, so that a value used too early is no number.
        self.register_buffer("support", torch.full((bins,), torch.nan, dtype=torch.float64))
        self.frame_settings: dict[str, Any] = {}
        self.longest: dict[str, int] = {}
        self._errors: list[tuple[int, Tensor, Tensor]] = []

    @property
    def members(self) -> list[PerceptronPolicy]:
        """The copies of the policy, by the part that each has not seen."""
        return [self.policy, *self.others]

    def configure_objectives(self) -> list[Objective]:
        return [self.objective(self.loss, *self.members)]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        frames: ReturnFramesEnv = self.frames_env
        require(
            frames.folds == len(self.members),
            f"data.env.folds is {frames.folds}, and model.folds is {len(self.members)}: set both "
            "to the same number.",
        )
        self.support.copy_(frames.support)
        self.frame_settings, self.longest = frames.settings, frames.longest

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        # `super` handles the algorithm's own policy, the first member.
        for member in self.members[1:]:
            member.put_in_eval_mode()
        super().training_step(rollout, batch_idx)
        for member in self.members[1:]:  # the first is the algorithm's own policy
            member.update_normalization(rollout)

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross-entropy of the bins of samples [B], and scalars to log."""
        losses = []
        for part, member in enumerate(self.members):
            is_training = (minibatch["fold"] != part).float()
            losses.append(-is_training * member.evaluate_actions(minibatch)["sample_log_prob"])
        # Each sample trains all copies but one.
        loss = torch.stack(losses).sum(0).mean() / (len(losses) - 1)
        return loss, {"cross_entropy": loss}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[STATE_KEY] |= {"frames": self.frame_settings, "longest": self.longest}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.frame_settings = dict(checkpoint[STATE_KEY].get("frames", {}))
        self.longest = dict(checkpoint[STATE_KEY].get("longest", {}))

    # --- values ---

    def values(self, path: str | Path) -> list[Tensor]:
        """Return the values [L] of each episode of a dataset, for `label_dataset`.

        Raises:
            ConfigurationError: if the observations of the dataset do not fit the policy, or its
                returns of success are in other units.
        """
        frames = ReturnFramesEnv(1, str(path), **self.frame_settings)
        policy_space, frames_space = self.policy.observation_space, frames.single_observation_space
        require(
            policy_space == frames_space,
            f"The value was fitted to observations {policy_space}, but the observations of {path} "
            f"are {frames_space}: fit it to this dataset.",
        )
        for task, longest in frames.longest.items():
            fitted = self.longest.get(task, longest)
            require(
                fitted == longest or frames.settings["reward"] == "env",
                f"The longest episode{f' of {task}' if task else ''} had {fitted} steps where the "
                f"value was fitted, and has {longest} in {path}. It is the unit of the returns: "
                "fit the value to this dataset again.",
            )
        return [value for _, value in self._values(frames, range(len(frames)))]

    @torch.no_grad()
    def _values(self, frames: ReturnFramesEnv, numbers: Any) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the values [L] float64 of episodes."""
        device = self.policy.version.device
        for number in numbers:
            # The member that did not train on this episode.
            member = self.members[frames.fold_of(number)]
            parts = []
            for part in frames.steps_of(number).split(STEPS_AT_ONCE):
                td = TensorDict({"observation": part.to(device)}, [len(part)])
                with autocast(device, self.policy.autocast_dtype):
                    logits = member.action_output(td, member.actor_features(td))
                # In float64: a sum over the bins in bfloat16 would be coarse.
                parts.append((logits.double().softmax(-1) @ self.support).cpu())
            yield number, torch.cat(parts)

    # --- evaluation ---

    def validation_step(self, seeds: list[int], batch_idx: int) -> None:
        # The first batch of seeds evaluates this rank's share of the episodes.
        if batch_idx > 0:
            return
        frames: ReturnFramesEnv = self.frames_env
        for member in self.members:
            check_weights_are_numbers(member)
            member.put_in_eval_mode()
        numbers = range(ranks.rank(), len(frames), ranks.world_size())
        values = self._values(frames, numbers)
        self._errors = [(number, value, frames.returns[number]) for number, value in values]

    def on_validation_epoch_end(self) -> None:
        gathered = ranks.gather_over_ranks(self._errors)
        self._errors = []
        # Each rank has other episodes; the order of their numbers makes the sums equal on all
        # ranks.
        rows = sorted((row for part in gathered for row in part), key=lambda row: row[0])
        values, returns = (torch.cat(column) for column in list(zip(*rows, strict=True))[1:])
        error = float((values - returns).square().mean().sqrt())
        spread = float(returns.std(correction=0))
        metrics = {"error": error, "spread": spread}
        metrics["error_over_spread"] = error / spread if spread > 0 else 0.0
        self.evaluation = summarize([_as_episode(*row) for row in rows]) | {
            "metrics": metrics,
            "deterministic": True,
            "env_steps": self.env_steps,
        }
        self.log_dict(logged_values(self.evaluation), logger=False)
        if self.trainer.state.fn == "fit":  # otherwise a table follows
            rank_zero_info(
                f"The value of {len(rows)} episodes, each by a network that has not seen it: error "
                f"{error:.3g}, spread of the returns {spread:.3g}, error / spread "
                f"{metrics['error_over_spread']:.2f}."
            )


def _as_episode(number: int, value: Tensor, returns: Tensor) -> Any:
    """Return the errors of an episode [L] as `evaluation.Episode`."""
    return {
        "seed": number,
        "return": -float((value - returns).square().mean().sqrt()),
        "length": len(value),
        "terminated": True,
        "cut": False,
        "intervened": None,
        "success": None,
        "metrics": {},
    }
