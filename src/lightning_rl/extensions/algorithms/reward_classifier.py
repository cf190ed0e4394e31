"""Train a success classifier on recorded frames, and use it as the reward of an env."""

from typing import Any, cast

import gymnasium
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Policy
from lightning_rl.extend import ranks
from lightning_rl.extend.collectors import logged_values, summarize
from lightning_rl.extend.envs import Observation
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import autocast, check_weights_are_numbers
from lightning_rl.extensions.algorithms.frozen import fits
from lightning_rl.extensions.algorithms.recorded_frames import FrameAlgorithm
from lightning_rl.extensions.datasets.frames import SuccessFramesEnv
from lightning_rl.kwargs import RewardClassifierKwargs, Unpack

FRAMES_AT_ONCE = 256
"""Frames per forward pass of an evaluation."""


class RewardClassifier(FrameAlgorithm):
    """Train a classifier of success on the labelled frames of a recorded dataset.

    It needs `data.env: SuccessFramesEnv`, and a policy for its observations. The policy's action is
    the predicted label. Both classes have the same weight, even if success is rare.

    An evaluation classifies all frames of the held-out episodes (`data.num_eval_episodes` has no
    effect). The return of an episode is its percentage of correct labels; the episode is a success
    if all labels are correct.

    Source: Luo et al. 2024, "Precise and Dexterous Robotic Manipulation via Human-in-the-Loop
    Reinforcement Learning", section III-B. Differs from it: the encoder is trained unless it is
    frozen, and the error rates are measured on whole held-out episodes.

    Args:
        policy: the classifier; its action space is the env's Discrete(2).
        n_epochs: passes over the frames of a rollout.
        threshold: least probability of success; `RewardClassifierWrapper` uses it as its default.
        kwargs: see `Algorithm`.

    Attributes:
        error_rates: [2] float32, the false positive rate and the false negative rate of the last
            evaluation; NaN before the first. Saved in checkpoints.
    """

    env_class = SuccessFramesEnv
    error_rates: Tensor

    def __init__(
        self,
        policy: Policy,
        *,
        n_epochs: int = 1,
        threshold: float = 0.5,
        **kwargs: Unpack[RewardClassifierKwargs],
    ) -> None:
        super().__init__(policy, n_epochs=n_epochs, **kwargs)
        check_range("threshold", threshold, above=0, below=1)
        self.threshold = threshold
        self.register_buffer("error_rates", torch.full((2,), torch.nan))
        self._judged: list[tuple[int, Tensor, Tensor]] = []

    @property
    def frames(self) -> SuccessFramesEnv:
        """The evaluation env, with the held-out episodes."""
        return cast(SuccessFramesEnv, self.frames_env)

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        log_prob = self.policy.evaluate_actions(minibatch)["sample_log_prob"]
        # The action is the label: a probability above one half is a correct prediction.
        correct = (log_prob.exp() > 0.5).float()
        weight = minibatch["weight"]
        loss = -(weight * log_prob).mean()
        return loss, {"balanced_accuracy": (weight * correct).mean()}

    @torch.no_grad()
    def probability(self, observation: Observation) -> Tensor:
        """Return the probability of success for observations [B, ...]: [B] float32."""
        device = self.policy.version.device
        count = len(observation)
        td = TensorDict({"observation": observation.to(device)}, [count])
        # The action 1 means success.
        td["action"] = torch.ones(count, dtype=torch.int64, device=device)
        with autocast(device, self.policy.autocast_dtype):
            log_prob: Tensor = self.policy.evaluate_actions(td)["sample_log_prob"]
        return log_prob.exp()

    # --- evaluation ---

    def validation_step(self, seeds: list[int], batch_idx: int) -> None:
        # Evaluate this rank's share of the held-out episodes with the first batch of seeds.
        if batch_idx > 0:
            return
        check_weights_are_numbers(self.policy)
        self.policy.put_in_eval_mode()
        self._judged = []
        for number in self.frames.held_out[ranks.rank() :: ranks.world_size()]:
            observation, label = self.frames.frames_of([number])
            parts = [self.probability(part).cpu() for part in observation.split(FRAMES_AT_ONCE)]
            self._judged.append((number, torch.cat(parts), label))

    def on_validation_epoch_end(self) -> None:
        gathered = ranks.gather_over_ranks(self._judged)
        self._judged = []
        evaluated = [episode for entries in gathered for episode in entries]
        probability = torch.cat([p for _, p, _ in evaluated])
        label = torch.cat([labels for _, _, labels in evaluated])
        flags, success = probability >= self.threshold, label == 1
        self.error_rates.copy_(torch.stack([_mean(flags[~success]), _mean(~flags[success])]))
        false_positive, false_negative = self.error_rates.tolist()
        self.evaluation = summarize([_as_episode(*row, self.threshold) for row in evaluated]) | {
            "metrics": {
                "balanced_accuracy": 1 - (false_positive + false_negative) / 2,
                "false_negative_rate": false_negative,
                "false_positive_rate": false_positive,
                "frames_with_success": float(success.sum()),
                "frames_without_success": float((~success).sum()),
                "threshold": self.threshold,
            },
            "deterministic": True,
            "env_steps": self.env_steps,
        }
        self.log_dict(logged_values(self.evaluation), logger=False)
        if self.trainer.state.fn == "fit":  # otherwise a table follows
            rank_zero_info(
                f"Held out: {len(evaluated)} episodes. At threshold {self.threshold:g} "
                f"{false_positive:.1%} of {int((~success).sum())} frames without success are false "
                f"positives, and {false_negative:.1%} of {int(success.sum())} frames with success "
                "are missed."
            )


def _mean(flags: Tensor) -> Tensor:
    return flags.float().mean()


def _as_episode(number: int, probability: Tensor, label: Tensor, threshold: float) -> Any:
    correct = (probability >= threshold) == (label == 1)
    return {
        "seed": number,
        "return": 100 * float(_mean(correct)),
        "length": len(label),
        "terminated": True,
        "cut": False,
        "intervened": None,
        "success": bool(correct.all()),
        "metrics": {},
    }


class RewardClassifierWrapper(gymnasium.Wrapper):
    """An env whose reward and termination come from a `RewardClassifier` of its observations.

    The reward is `success_reward` if the classifier detects success, else 0. The env's own reward
    is dropped; its own terminations stay. The info contains `success` at each step, and the
    probability in `metrics`. Use the wrappers with which the dataset was recorded; the classifier
    contains the scaling of observations.

    Args:
        env: an env with the observations of the dataset; it may have more keys.
        checkpoint: the classifier's checkpoint: a file, or a run directory (its last checkpoint).
        threshold: least probability of success. Default: the classifier's threshold.
        success_reward: reward of a step that leads to success.
        ends_episode: whether success terminates the episode.
        consecutive_frames: number of consecutive frames that must show success.
        trust_code: import any class that the checkpoint names.

    Raises:
        ConfigurationError: for a number out of range, for a checkpoint that cannot be read or holds
            no classifier, and for an env with other observations.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        checkpoint: str,
        threshold: float | None = None,
        success_reward: float = 1.0,
        ends_episode: bool = True,
        consecutive_frames: int = 1,
        trust_code: bool = False,
    ) -> None:
        super().__init__(env)
        check_range("threshold", threshold, above=0, below=1)
        check_range("consecutive_frames", consecutive_frames, minimum=1)
        self._classifier = RewardClassifier.load_from_checkpoint(checkpoint, trust_code=trust_code)
        self._space = self._classifier.policy.observation_space
        require(  # without bounds: a dataset does not have them
            fits(self._space, env.observation_space),
            f"The reward classifier of {checkpoint} was trained on observations {self._space}, "
            f"but the env's observations are {env.observation_space}: give the env the wrappers "
            "that the dataset was recorded with, or train a classifier on recordings of this env.",
        )
        self.threshold = self._classifier.threshold if threshold is None else threshold
        self.success_reward = success_reward
        self.ends_episode = ends_episode
        self.consecutive_frames = consecutive_frames
        self._in_a_row = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._in_a_row = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = self.env.step(action)
        # This waits for the device at each step, because the env needs the number.
        probability = float(self._classifier.probability(_batch_of_one(observation, self._space)))
        # A frame without success starts the count again.
        self._in_a_row = self._in_a_row + 1 if probability >= self.threshold else 0
        success = self._in_a_row >= self.consecutive_frames
        metrics = {**info.get("metrics", {}), "success_probability": probability}
        return (
            observation,
            self.success_reward if success else 0.0,
            bool(terminated or (success and self.ends_episode)),
            truncated,
            {**info, "success": success, "metrics": metrics},
        )


def _batch_of_one(observation: Any, space: gymnasium.Space[Any]) -> Observation:
    if isinstance(space, gymnasium.spaces.Dict):
        children = {key: _batch_of_one(observation[key], child) for key, child in space.items()}
        return TensorDict(children, [1])
    return torch.from_numpy(np.asarray(observation, space.dtype)[None])
