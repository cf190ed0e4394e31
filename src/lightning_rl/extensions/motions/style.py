"""PPO with a reward for moving in the style of recorded motions: adversarial motion priors."""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import PPO, Policy
from lightning_rl.extend import ranks
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.errors import check_range, closest, require
from lightning_rl.extend.policies import RunningMoments, mlp
from lightning_rl.extend.rollout import add_transition_field, next_states
from lightning_rl.kwargs import StylePPOKwargs, Unpack

LIMIT = 5.0
"""Bound of a normalized number, in standard deviations."""

EPS = 1e-8
"""Added to variances."""


class Discriminator(nn.Module):
    """Tell steps of a motion from steps of the policy, and reward steps that look like a motion's.

    A step is a pair of consecutive descriptions of the robot's state. Its score is pulled to 1 for
    the motion's and to -1 for the policy's, with a penalty on its gradient at the motion's; the
    reward is max(0, 1 - (score - 1)^2 / 4).

    Source: Peng et al. 2021, "AMP: Adversarial Motion Priors for Stylized Physics-Based Character
    Control", equations 6 to 8. Differs: steps come from the last rollout, not from a replay.

    Args:
        observation_space: a Dict of one env.
        style_key: key of the robot's state, a Box [D].
        motion_key: key of a step of the motion, a Box [2 D]; the env draws one at each step.
        hidden_sizes: units of the hidden layers.
        activation: see `ActorCritic`.
        gradient_penalty: weight of the mean squared gradient; halved, as in the paper.
        learning_rate: of the discriminator.
        batch_size: steps per minibatch and process; a rollout is one pass.

    Raises:
        ConfigurationError: the keys are unknown or do not fit, or a number is out of range.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        *,
        style_key: str = "style",
        motion_key: str = "motion",
        hidden_sizes: Sequence[int] = (256, 128),
        activation: str = "relu",
        gradient_penalty: float = 10.0,
        learning_rate: float = 1e-4,
        batch_size: int = 1024,
    ) -> None:
        super().__init__()
        check_range("gradient_penalty", gradient_penalty, minimum=0)
        check_range("learning_rate", learning_rate, above=0)
        check_range("batch_size", batch_size, minimum=1)
        spaces = getattr(observation_space, "spaces", {})
        for key in (style_key, motion_key):
            require(
                key in spaces,
                f"The observation has no key {key}, but {', '.join(spaces) or 'none'}"
                f"{closest(key, spaces)}: add an observation group, such as `style: true` of "
                "MotionRobot, or set style_key and motion_key.",
            )
        (size,), (double,) = spaces[style_key].shape, spaces[motion_key].shape
        require(
            double == 2 * size,
            f"{motion_key} must have twice the {size} numbers of {style_key}, got {double}.",
        )
        self.style_key, self.motion_key = style_key, motion_key
        self.gradient_penalty, self.learning_rate = gradient_penalty, learning_rate
        self.batch_size = batch_size
        self.network = mlp(double, hidden_sizes, 1, activation=activation)
        self.moments = RunningMoments(double)

    @torch.no_grad()
    def reward(self, rollout: TensorDict) -> tuple[Tensor, TensorDict]:
        """Return the style rewards [N, T] in [0, 1] of a rollout [N, T+1], and its steps [M].

        The steps are `policy` and `motion`, [M, 2 D], normalized by moments of the motion's.

        Raises:
            EnvFaultError: the env does not return the state in which an episode ended.
        """
        observation = rollout["observation"]
        motion = observation[self.motion_key][:, :-1]
        state, following = observation[self.style_key][:, :-1], next_states(rollout)
        policy = torch.cat((state, following[self.style_key]), -1)
        # A padding step leads from the end of an episode to the next one.
        real = ~rollout["padding"][:, :-1] if "padding" in rollout.keys() else slice(None)
        self.moments.update(motion[real].flatten(0, -2))
        policy, motion = self.normalized(policy), self.normalized(motion)
        score = self.network(policy).squeeze(-1)
        reward = (1.0 - 0.25 * (score - 1.0).square()).clamp(min=0.0)
        steps = {"policy": policy[real].flatten(0, -2), "motion": motion[real].flatten(0, -2)}
        return reward, TensorDict(steps, [len(steps["policy"])])

    def normalized(self, step: Tensor) -> Tensor:
        """Return steps [..., 2 D] in standard deviations of the motion's."""
        scaled = (step - self.moments.mean) * (self.moments.var + EPS).rsqrt()
        return scaled.clamp(-LIMIT, LIMIT)

    def minibatches(self, steps: TensorDict) -> Iterator[TensorDict]:
        """Yield one pass over steps [M] in minibatches [B], as many on all ranks."""
        # Ranks may differ in padding; a rank with fewer steps may have empty minibatches.
        count = max(ranks.gather_over_ranks(-(-len(steps) // self.batch_size)))
        for first in range(count):
            # Every count-th step, so that each minibatch has steps of all times.
            yield steps[first::count]

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [] of normalized steps [B], and scalars to log."""
        motion = minibatch["motion"].detach().requires_grad_()
        with torch.enable_grad():
            score = self.network(motion)
            (slope,) = torch.autograd.grad(score.sum(), motion, create_graph=True)
        policy_score = self.network(minibatch["policy"])
        penalty = slope.square().sum(-1).mean()
        error = (score - 1.0).square().mean() + (policy_score + 1.0).square().mean()
        scalars = {
            "motion_score": score.mean().detach(),
            "policy_score": policy_score.mean().detach(),
            "gradient_penalty": penalty.detach(),
        }
        return error + 0.5 * self.gradient_penalty * penalty, scalars


class StylePPO(PPO):
    """PPO whose reward is the task's and the style's; see `Discriminator`.

    Source: Peng et al. 2021, "AMP: Adversarial Motion Priors for Stylized Physics-Based Character
    Control", equation 1.

    Args:
        policy: an actor with a critic; `ignore_keys: [style, motion]` hides these keys from it.
        discriminator: settings of `Discriminator`. Default: its own.
        task_weight: factor of the env's reward.
        style_weight: factor of the style reward.
        kwargs: see `PPO`.

    Raises:
        ConfigurationError: see `Discriminator`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        discriminator: dict[str, Any] | None = None,
        task_weight: float = 0.5,
        style_weight: float = 0.5,
        **kwargs: Unpack[StylePPOKwargs],
    ) -> None:
        check_range("task_weight", task_weight, minimum=0)
        check_range("style_weight", style_weight, above=0)
        super().__init__(policy, **kwargs)
        self.discriminator = Discriminator(policy.observation_space, **(discriminator or {}))
        self.task_weight, self.style_weight = task_weight, style_weight

    def configure_objectives(self) -> list[Objective]:
        """Return PPO's losses and the discriminator's."""
        discriminator = self.discriminator
        objective = self.objective(
            discriminator.loss,
            discriminator.network,
            name="style",
            learning_rate=discriminator.learning_rate,
        )
        return [*super().configure_objectives(), objective]

    def on_train_batch_start(self, batch: TensorDict, batch_idx: int) -> None:
        """Mix the style reward into a fresh rollout `batch` [N, T+1], and train on its steps.

        Raises:
            ConfigurationError: the env takes chunks of actions.
        """
        require(
            "executed" not in batch.keys(),
            f"{type(self).__name__} rewards single actions, but this env takes chunks of actions.",
        )
        style, steps = self.discriminator.reward(batch)
        task = batch["reward"][:, :-1]
        mixed = self.task_weight * task + self.style_weight * style
        add_transition_field(batch, "reward", mixed)
        self.statistics.set("rewards/task", task.mean())
        self.statistics.set("rewards/style", style.mean())
        super().on_train_batch_start(batch, batch_idx)
        for minibatch in self.discriminator.minibatches(steps):
            self.updates["style"](minibatch)
