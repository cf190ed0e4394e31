"""Correct the actions of a frozen policy, within a bound."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import (
    ActorCritic,
    ConfigurationError,
    Encoder,
    PerceptronEncoder,
    Policy,
    SquashedActorCritic,
)
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import RNG, PerceptronPolicy, PolicyFactory, noise_for
from lightning_rl.extensions.algorithms.frozen import frozen_policy
from lightning_rl.kwargs import (
    GaussianResidualActorCriticKwargs,
    ResidualActorCriticKwargs,
    Unpack,
)

BASE_ACTION = "base_action"
"""Key of the base policy's action [A], in units of its bounds, among the networks' inputs."""

OBSERVATION = "observation"
"""Key of an observation that is no Dict among the networks' inputs."""


class Correction(PerceptronPolicy):
    """The part that both corrections of a frozen policy share: networks that also read its action.

    Attributes:
        base: the frozen policy.
        scale: largest correction along each dimension, in units of the action bounds.
    """

    base: Policy
    scale: float
    unit: Any  # from the env's actions to units of their bounds

    def set_base(
        self, frozen: Policy, observation_space: gymnasium.Space[Any], scale: float
    ) -> None:
        """Correct `frozen` by at most `scale`, at first by 0.

        Raises:
            ConfigurationError: for a memory.
        """
        name = type(self).__name__
        for policy, role in ((frozen, "base policy"), (self, "correction")):
            require(
                not policy.is_recurrent,
                f"{name} supports no memory, but its {role}, a {type(policy).__name__}, has one: "
                "use a policy without a memory.",
            )
        # The constructor set the space of the networks' inputs.
        self.observation_space = observation_space
        self.base, self.scale = frozen, scale
        self.micro_batch_size = frozen.micro_batch_size
        # A last layer of zeros makes the mean correction 0.
        last = cast(nn.Linear, self.actor[-1])
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    @property
    def acting_space(self) -> gymnasium.Space[Any]:
        space, base = super().acting_space, self.base.acting_space
        if not isinstance(space, gymnasium.spaces.Dict):
            return space
        return gymnasium.spaces.Dict({**cast(gymnasium.spaces.Dict, base).spaces, **space.spaces})

    @torch.no_grad()
    def base_action(self, td: TensorDict) -> Tensor:
        """Return the base's actions, in [-1, 1] [B, A], for the observations [B] in `td`."""
        observed = part_for(self.base.acting_space, td.get("observation"))
        acted = TensorDict({"observation": observed}, td.batch_size)
        action: Tensor = self.base.get_action(acted, deterministic=True)["action"]
        # The base may act beyond the bounds, where the env would clip.
        unit: Tensor = self.unit(action).clamp(-1.0, 1.0)
        return unit

    def read(self, td: TensorDict, *reading: Any) -> Tensor:
        return super().read(_inputs(td, self.base_action(td)), *reading)

    def update_normalization(self, rollout: TensorDict) -> None:
        # The statistics do not read the base's action: save a pass of the base.
        unread = rollout["reward"].new_zeros(*rollout.batch_size, self.distribution.size)
        super().update_normalization(_inputs(rollout, unread))


class ResidualActorCritic(Correction, SquashedActorCritic):
    """A bounded correction of the actions of a frozen policy, with Q critics, for SAC.

    In units of the action bounds the action is base + scale * correction, clipped to [-1, 1]. The
    base acts by the mode of its distribution. The correction is a tanh-Gaussian in [-1, 1], whose
    mean is 0 at first: an evaluation before the first update has the success of the base.

    Actor and critics read the observation and the base's action. The critics evaluate the executed
    action, so they also learn from people and demonstrations, whose actions may differ from the
    base's by more than `scale`.

    Source: Johannink et al. 2019, "Residual Reinforcement Learning for Robot Control"; Silver et
    al. 2018, "Residual Policy Learning", for the initial correction of 0.

    Args:
        observation_space, action_space: spaces of one env, which the base policy must fit.
        hidden_sizes: units of the actor's hidden layers.
        checkpoint: checkpoint of the base policy, a file or a run directory; read whenever the
            policy is created.
        base: makes the base policy, instead of a checkpoint.
        scale: largest correction along each dimension, in units of the action bounds, in (0, 2].
        trust_code: import any class that the checkpoint names.
        kwargs: see `SquashedActorCritic`. Encoders read the observation without the base's action,
            and `normalize_observation` does not scale that action. Keys are those of the
            correction and the critics; the base reads its own keys.

    Raises:
        ConfigurationError: for a base policy of other spaces or with a
            memory, and a memory of the correction.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (256, 256),
        *,
        checkpoint: str | None = None,
        base: PolicyFactory | None = None,
        scale: float = 0.2,
        trust_code: bool = False,
        **kwargs: Unpack[ResidualActorCriticKwargs],
    ) -> None:
        check_range("scale", scale, above=0, maximum=2)
        frozen = frozen_policy(observation_space, action_space, checkpoint, base, trust_code)
        # Keys that only the base reads are no unread keys.
        self.keys_read_elsewhere = tuple(getattr(frozen.acting_space, "spaces", ()))
        _read_base_action(kwargs)
        super().__init__(
            _with_base_action(observation_space, action_space),
            action_space,
            hidden_sizes,
            **kwargs,
        )
        self.set_base(frozen, observation_space, scale)

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        features = self.actor_features(td)
        noise = noise_for(self, td, deterministic, generator)
        output = self.action_output(td, features)
        fields = self.distribution.sample(output, noise, td.get("state", None))
        # The log-prob belongs to the correction; the executed action is stored as `action`.
        unit = self.corrected(features, fields["unsquashed_action"].tanh())
        fields["action"] = self.distribution.from_unit(unit)
        for key, value in fields.items():
            td.set(key, value, inplace=True)
        return td

    def draw_unit(
        self, td: TensorDict, noise: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        features = self.actor_features(td) if features is None else features
        correction, log_prob = super().draw_unit(td, noise, features)
        return self.corrected(features, correction), log_prob

    def corrected(self, features: Tensor, correction: Tensor) -> Tensor:
        """Return actions in [-1, 1] [B, A] for the actor's features [B, D] and corrections [B, A].

        The last A features are the base's action.
        """
        base = features[..., -self.distribution.size :]
        return (base + self.scale * correction).clamp(-1.0, 1.0)

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        raise ConfigurationError(
            "ResidualActorCritic has no correction for a given action: clone the base policy "
            "instead; and set random_env_steps: 0, because the first corrections are random anyway."
        )


class GaussianResidualActorCritic(Correction, ActorCritic):
    """A correction of the actions of a frozen policy, with a value function, for PPO.

    In units of the action bounds the action is normally distributed around base + scale *
    tanh(correction), with correction = 0 at first; the env clips it. A given action has a log-prob,
    so that demonstrations can be cloned.

    Source: see `ResidualActorCritic`.

    Args:
        observation_space, action_space: spaces of one env, which the base policy must fit.
        hidden_sizes: units of the actor's hidden layers.
        checkpoint, base, scale, trust_code: see `ResidualActorCritic`.
        log_std_init: initial log standard deviation of the action, in units of the action bounds.
        value_lr_scale: learning rate of the value function, relative to the correction's. A small
            deviation makes each step of the correction larger, and needs a smaller rate.
        kwargs: see `ActorCritic`, and for encoders and keys `ResidualActorCritic`.

    Raises:
        ConfigurationError: see `ResidualActorCritic`, and for actions without bounds.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        checkpoint: str | None = None,
        base: PolicyFactory | None = None,
        scale: float = 0.2,
        log_std_init: float = -2.5,
        value_lr_scale: float = 1.0,
        trust_code: bool = False,
        **kwargs: Unpack[GaussianResidualActorCriticKwargs],
    ) -> None:
        check_range("scale", scale, above=0, maximum=2)
        check_range("value_lr_scale", value_lr_scale, above=0)
        bounds = [getattr(action_space, name, np.inf) for name in ("low", "high")]
        require(
            bool(np.isfinite(bounds).all()),
            "GaussianResidualActorCritic corrects actions in units of their bounds, but the action "
            f"space is {action_space}: bound it.",
        )
        frozen = frozen_policy(observation_space, action_space, checkpoint, base, trust_code)
        # Keys that only the base reads are no unread keys.
        self.keys_read_elsewhere = tuple(getattr(frozen.acting_space, "spaces", ()))
        _read_base_action(kwargs)
        super().__init__(
            _with_base_action(observation_space, action_space),
            action_space,
            hidden_sizes,
            log_std_init=log_std_init,
            squash=False,
            rescale_action=True,
            **kwargs,
        )
        self.set_base(frozen, observation_space, scale)
        # Where log standard deviations are outputs, they begin with this bias.
        nn.init.constant_(
            cast(nn.Linear, self.actor[-1]).bias[cast(int, self.distribution.size) :], log_std_init
        )
        self.value_lr_scale = value_lr_scale

    def parameter_groups(self) -> list[dict[str, Any]]:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        value = [p for name, p in named if self.belongs_to_critic(name)]
        correction = [p for name, p in named if not self.belongs_to_critic(name)]
        return [{"params": correction}, {"params": value, "lr_scale": self.value_lr_scale}]

    def unit(self, action: Tensor) -> Tensor:
        """Return the actions [B, *A] of the env in units of their bounds, [-1, 1], as [B, A]."""
        shape = self.action_space.shape
        flat = action.flatten(-len(shape)) if shape else action[..., None]
        # Bounds of -1 and 1 are units already.
        return self.fields_of(action).get("unit_action", flat)

    def action_output(self, td: TensorDict, features: Tensor) -> Tensor:
        size = cast(int, self.distribution.size)
        correction, *log_std = super().action_output(td, features).split(size, -1)
        # The last features are the base's action.
        mean = features[..., -size:] + self.scale * correction.tanh()
        return torch.cat((mean, *log_std), -1)


class _BesideBaseAction(Encoder):
    """The features of the observation, followed by the base's action.

    Args:
        observation_space: a Dict with `BASE_ACTION`.
        make: makes the encoder of the observation.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        make: Callable[[gymnasium.Space[Any]], Encoder],
    ) -> None:
        super().__init__(observation_space)
        spaces = dict(cast(gymnasium.spaces.Dict, observation_space).spaces)
        action = spaces.pop(BASE_ACTION)
        self._alone = list(spaces) == [OBSERVATION]
        self.inner = make(spaces[OBSERVATION] if self._alone else gymnasium.spaces.Dict(spaces))
        self.size = self.inner.size + int(np.prod(action.shape or ()))

    def forward(self, observation: Tensor | TensorDict) -> Tensor:
        features = self.inner(self._seen(observation))
        return torch.cat((features, cast(TensorDict, observation)[BASE_ACTION]), -1)

    def update_normalization(self, observation: Tensor | TensorDict) -> None:
        self.inner.update_normalization(self._seen(observation))

    def _seen(self, observation: Tensor | TensorDict) -> Tensor | TensorDict:
        tree = cast(TensorDict, observation)
        return tree.get(OBSERVATION) if self._alone else tree.exclude(BASE_ACTION)


def _read_base_action(settings: Any) -> None:
    """Let the encoders and keys among the settings of a policy have the base's action, too."""
    # With an encoder normalize_observation stays, and is refused.
    normalize = not settings.get("encoder") and settings.pop("normalize_observation", False)
    settings["encoder"] = settings.get("encoder") or partial(PerceptronEncoder, normalize=normalize)
    for name in ("encoder", "critic_encoder"):
        if settings.get(name):
            settings[name] = partial(_BesideBaseAction, make=settings[name])
    for name in ("actor_keys", "critic_keys"):
        if settings.get(name):
            settings[name] = [*settings[name], BASE_ACTION]


def _with_base_action(
    observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
) -> gymnasium.spaces.Dict:
    """Return the space of the networks' inputs."""
    spaces = {OBSERVATION: observation_space}
    if isinstance(observation_space, gymnasium.spaces.Dict):
        spaces = dict(observation_space.spaces)
    require(
        BASE_ACTION not in spaces,
        f"ResidualActorCritic adds '{BASE_ACTION}' to the observation, which has that key already: "
        "rename it.",
    )
    size = int(np.prod(action_space.shape or ()))
    return gymnasium.spaces.Dict(
        {**spaces, BASE_ACTION: gymnasium.spaces.Box(-1.0, 1.0, (size,), np.float32)}
    )


def _inputs(td: TensorDict, base_action: Tensor) -> TensorDict:
    """Return the networks' inputs for `td` [*batch]: its observation with the base's action."""
    observation = td.get("observation")
    alone = isinstance(observation, Tensor)
    keys = {OBSERVATION: observation} if alone else dict(observation.items())
    inputs = TensorDict({**keys, BASE_ACTION: base_action}, td.batch_size)
    return TensorDict({"observation": inputs}, td.batch_size)


def part_for(space: spaces.Space[Any], observation: Any) -> Any:
    """Return the entries of observations [*batch, ...] that are in a space."""
    if not isinstance(space, spaces.Dict):
        return observation
    parts = {key: part_for(child, observation[key]) for key, child in space.items()}
    return TensorDict(parts, observation.batch_size)
