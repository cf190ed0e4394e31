"""Act on pictures and an instruction, one chunk of actions at a time."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import Policy
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import ABSENT, GUIDANCE, RNG, noise_for
from lightning_rl.extend.rollout import FieldSpec
from lightning_rl.extend.spaces import names_of
from lightning_rl.extensions.vla.adapters import with_fresh_adapter
from lightning_rl.extensions.vla.backbone import Backbone, Features
from lightning_rl.extensions.vla.flow import FlowHead, FlowSettings, SlotExpert
from lightning_rl.extensions.vla.heads import (
    ActionHead,
    GaussianHead,
    HeadFactory,
    Level,
    Statistics,
    TokenHead,
    action_bounds,
)
from lightning_rl.extensions.vla.real_time import (
    RealTime,
    chunk_state,
    continuation,
    given_prefix,
    of_executed,
    outside_inference_mode,
)
from lightning_rl.extensions.vla.statistics import action_bounds_of, read_action_bounds
from lightning_rl.extensions.vla.tiny import TinyVLA
from lightning_rl.kwargs import Unpack, VLAPolicyKwargs


class ChunkPolicy(Policy):
    """A backbone with an action head and a value head; base class of `VLAPolicy`.

    Args:
        observation_space, action_space: spaces of one env.
        backbone: turns observations into features.
        make_head: makes the head for the space of a chunk [K, *A], after `backbone.build`.
        value_hidden_size: units of the value head.
        value_lr_scale: learning rate of the value head, relative to the others.
        detach_value: block the value's gradient to the backbone.
        micro_batch_size: see `Policy`.
        ignore_keys: keys of the observation that the policy does not read.
        real_time: compute a chunk while the old one executes. Its actions are the state of the
            policy: act each `execution_horizon` steps, and reset when an episode begins.

    Raises:
        ConfigurationError: for unsupported spaces or keys.
    """

    training_settings = ("value_lr_scale", "detach_value")

    @abstractmethod  # configs name subclasses
    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        backbone: Backbone,
        make_head: Callable[[gymnasium.spaces.Box], ActionHead],
        *,
        value_hidden_size: int = 64,
        value_lr_scale: float = 1.0,
        detach_value: bool = True,
        micro_batch_size: int | None = None,
        ignore_keys: Sequence[str] = (),
        real_time: RealTime | None = None,
    ) -> None:
        # First, because its message names the wrapper that is missing.
        observation = example(observation_space, backbone.needs_pictures)
        super().__init__(observation_space, action_space, backbone.reads, ignore_keys)
        check_range("value_hidden_size", value_hidden_size, minimum=1)
        check_range("value_lr_scale", value_lr_scale, above=0)
        check_range("micro_batch_size", micro_batch_size, minimum=1)
        space = chunk_space(action_space)
        _check_tokens(self.acting_space, backbone)
        self.backbone = backbone
        # Keys that are ignored must not create parameters.
        self.backbone.build(observation.exclude(*ignore_keys), int(np.prod(space.shape)))
        self.head = make_head(space)
        self.value_head = nn.Sequential(
            nn.Linear(self.backbone.summary_size, value_hidden_size),
            nn.ReLU(),
            nn.Linear(value_hidden_size, 1),
        )
        self.joint_ratio = self.head.joint_ratio
        self.has_entropy = self.head.has_entropy
        self.value_lr_scale, self.detach_value = value_lr_scale, detach_value
        self.micro_batch_size = micro_batch_size
        self.real_time = real_time
        if real_time is not None:
            real_time.check(self.head, action_space)

    @property
    def blocks(self) -> tuple[str, ...]:  # type: ignore[override]  # derived, so read-only
        return tuple(f"backbone.{pattern}" for pattern in self.backbone.blocks)

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        # One log-prob per part of the chunk, instead of one per step.
        parts = ((self.head.num_parts,), torch.float32)
        fields = {"sample_log_prob": parts, **self.head.fields}
        if self.real_time is not None:
            fields["state"] = (self.head.num_slots + 2,), torch.float32
            fields["next_delay"] = (), torch.int64
        return fields

    def adapt_state_dict(
        self, state: dict[str, Tensor], saved: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], str | None]:
        return with_fresh_adapter(state, saved)

    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        # Log-probs need more digits than bfloat16 has, also under autocast.
        if self.real_time is None:
            features = self.features(td)
            with in_float32(features.slots):
                sample = self.head.sample(features, noise_for(self, td, deterministic, generator))
        else:
            with outside_inference_mode():
                features = self.features(td)
                noise = noise_for(self, td, deterministic, generator)
                with in_float32(features.slots):
                    sample = self._sample_in_real_time(self.real_time, features, noise)
        # In place, because `td` may be a view of a slot of the rollout.
        for key, value in sample.items():
            td.set(key, value, inplace=True)
        return td

    def _sample_in_real_time(
        self, settings: RealTime, features: Features, noise: Tensor | None
    ) -> dict[str, Tensor]:
        delays, old = settings.delays, features.old_chunk
        rows = features.summary.shape[0]
        delay = torch.full((rows,), max(delays), device=self.version.device)
        if noise is not None and len(delays) > 1:
            noise, uniform = noise[:, :-1], noise[:, -1]
            delay = settings.draw(uniform)
        sample = self.head.sample(features, noise)
        copied = old.copied.view(rows, -1, *[1] * (sample["action"].dim() - 2))
        sample["action"] = torch.where(
            copied, old.actions.view_as(sample["action"]), sample["action"]
        )
        sample["next_delay"] = delay
        if "sample_log_prob" in sample:
            sample["sample_log_prob"] = self._executed(features, delay, sample["sample_log_prob"])
        sample["next_state"] = chunk_state(sample["action"], settings.execution_horizon, delay)
        return sample

    def _executed(self, features: Features, next_delay: Tensor, numbers: Tensor) -> Tensor:
        assert self.real_time is not None
        horizon, start = self.real_time.execution_horizon, features.old_chunk.copied.sum(1)
        parts = numbers.unflatten(1, (self.head.chunk_size, -1))
        return of_executed(parts, start, horizon + next_delay, horizon).flatten(1)

    def draw_noise(self, batch: Sequence[int], generator: RNG = None) -> Tensor:
        noise = self.head.draw_noise(batch, generator)
        if self.real_time is None or len(self.real_time.delays) == 1:
            return noise
        uniform = torch.empty(*batch, 1, device=noise.device).uniform_(generator=generator)
        return torch.cat((noise, uniform), -1)

    def get_value(self, td: TensorDict) -> TensorDict:
        return td.set("value", self._value(self._features_of_observations(td)))

    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        features = self.features(td)
        fields = {key: td.get(key) for key in self.head.fields}
        with in_float32(features.slots):
            log_prob, entropy = self.head.log_prob_and_entropy(features, fields)
        if self.real_time is not None:
            delay = td["next_delay"]
            log_prob = self._executed(features, delay, log_prob)
            entropy = self._executed(features, delay, entropy)
        result = {"sample_log_prob": log_prob, "entropy": entropy, "value": self._value(features)}
        return TensorDict(result, td.batch_size)

    def draw_clone_noise(self, batch: Sequence[int], generator: RNG = None) -> Tensor:
        return self.head.draw_clone_noise(batch, generator)

    def clone_loss(self, td: TensorDict) -> TensorDict:
        features = self._features_of_observations(td)
        if "prefix_steps" in td.keys():
            assert self.real_time is not None
            prefix = given_prefix(td["action"], td["prefix_steps"], self.head, self.real_time)
            features = features._replace(old_chunk=prefix)
        with in_float32(features.slots):
            noise = td.get("clone_noise", None)
            loss, entropy = self.head.clone_loss(features, td["action"], noise)
        return TensorDict({"clone_loss": loss, "entropy": entropy}, td.batch_size)

    def features(self, td: TensorDict) -> Features:
        """Return the features of the observations [B] in `td`, and the old chunk of its `state`."""
        features = self._features_of_observations(td)
        if self.real_time is None:
            return features
        state = td.get("state", None)
        if state is None:  # no chunk before
            state = self.first_state(td.batch_size[0])["state"]
        old = continuation(state, self.head, self.real_time)
        return features._replace(old_chunk=old)

    def _features_of_observations(self, td: TensorDict) -> Features:
        features = self._features_of(td.get("observation"))
        # Guidance needs a second pass, of the observation without its condition.
        if ABSENT not in td.keys():
            return features
        return features._replace(absent=self._features_of(td.get(ABSENT)), guidance=td[GUIDANCE])

    def _features_of(self, observation: TensorDict) -> Features:
        if self.ignore_keys:
            observation = observation.exclude(*self.ignore_keys)
        features: Features = self.backbone(observation)
        return features._replace(slots=features.slots.float())

    @property
    def noise_size(self) -> int:
        """S, numbers of the initial noise of a flow; 0 for other heads."""
        return self.head.noise_size

    @property
    def summary_size(self) -> int:
        """E, numbers of the features' summary."""
        return self.backbone.summary_size

    def decode(self, features: Features, noise: Tensor) -> Tensor:
        """Return the actions [B, K, *A] of a flow for initial noise [B, S]."""
        with in_float32(noise):
            return cast(FlowHead, self.head).act(features, noise)

    def parameter_groups(self) -> list[dict[str, Any]]:
        value = list(self.value_head.parameters())
        value_ids = {id(p) for p in value}
        # An optimizer must not get frozen parameters.
        policy = [p for p in self.parameters() if p.requires_grad and id(p) not in value_ids]
        if self.value_lr_scale == 1.0:
            return [{"params": [*policy, *value]}]
        return [{"params": policy}, {"params": value, "lr_scale": self.value_lr_scale}]

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        return self.head.fields_of(action)

    def add_statistics(self, state: dict[str, Any], prefix: str) -> str | None:
        """Add the scale of the actions to a state dict of a version that did not save it.

        Return their origin; None for the constructor's.
        """
        if f"{prefix}head.center" in state:
            return None
        statistics, origin = self.missing_statistics(state, prefix)
        # Earlier versions took the scale from the settings.
        center, scale = self.head.center, self.head.scale
        if statistics is not None:
            low, high = action_bounds(chunk_space(self.action_space), statistics)
            center, scale = (high + low) / 2, (high - low) / 2
        state |= {f"{prefix}head.center": center, f"{prefix}head.scale": scale}
        return origin

    def missing_statistics(
        self, state: Mapping[str, Any], prefix: str
    ) -> tuple[Statistics, str | None]:
        """Return the actions for -1 and 1, [A] each, and their origin; None if unchanged."""
        return None, None

    def _value(self, features: Features) -> Tensor:
        summary = features.summary.float()
        with in_float32(summary):
            # The value's gradient must not disturb the features that the actions need.
            value = self.value_head(summary.detach() if self.detach_value else summary)
        return value.squeeze(-1)  # type: ignore[no-any-return]  # nn.Module


class RealTimeActor:
    """Chooses the chunks of an episode by a policy with `real_time`, after any number of env steps.

    Args:
        policy: the policy.
        seed: seed of drawn actions; None acts by the mode.
    """

    def __init__(self, policy: ChunkPolicy, seed: int | None) -> None:
        self._policy, self._state = policy, policy.first_state(1)["state"]
        device = policy.version.device
        self._generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def __call__(self, observation: Any, running: Tensor) -> Tensor:
        """Return the chunk [1, K, *A] for an observation [1, ...]; `running` [1] is ignored."""
        td = TensorDict({"observation": observation, "state": self._state}, [1])
        td = td.to(self._policy.version.device)
        result = self._policy(td, deterministic=self._generator is None, generator=self._generator)
        self._state = result["next_state"]
        action: Tensor = result["action"]
        return action

    def continue_after(self, age: int, delay: int | None = None) -> None:
        """Let the next chunk continue the last one, which began `age` env steps ago; 0: not at all.

        `delay` is the measured delay in env steps; None keeps that of the settings.
        """
        self._state[:, -2] = age
        if delay is not None:
            self._state[:, -1] = delay


class VLAPolicy(ChunkPolicy):
    """A backbone with an action head and a value head.

    Observations are a Dict with `rgb` and optional `depth`, `language` (tokens), `proprio` and
    `condition` (see `Backbone.forward`). Actions are chunks [K, *A] with finite bounds (see
    `ActionChunk`). For models with their own way of acting use `CustomVLA` or a `Policy`.

    Args:
        observation_space, action_space: spaces of one env.
        backbone: default: `TinyVLA`.
        head: `token`, n bins per number of the chunk; `gaussian`; or `flow`, see `FlowHead`.
        own_head: your subclass of `ActionHead`, instead of `head`.
        log_prob_level: granularity of the ratio: `token` (number), `action`, or `chunk`, whose
            ratio leaves the clip range soonest.
        num_bins: n of the token head.
        temperature: of tokens, or factor of the Gaussian deviation, in acting and training.
        log_std_init: initial log standard deviation of the Gaussian head, in units of the action
            bounds.
        flow: settings of the flow head. Default: `FlowSettings()`.
        action_statistics: JSON file or directory with the actions for -1 and 1, see
            `action_bounds_of`; read when a policy is new, then part of its weights. Default:
            bounds of the action space.
        statistics_key: dataset in a file with several, such as `bridge_orig`.
        kwargs: see `ChunkPolicy`.

    Raises:
        ConfigurationError: for unsupported spaces or keys.
    """

    takes_guidance = True

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        backbone: Backbone | None = None,
        *,
        head: Literal["token", "gaussian", "flow"] = "token",
        own_head: HeadFactory | None = None,
        log_prob_level: Level = "token",
        num_bins: int = 21,
        temperature: float = 1.0,
        log_std_init: float = -1.0,
        flow: FlowSettings | None = None,
        action_statistics: str | None = None,
        statistics_key: str | None = None,
        **kwargs: Unpack[VLAPolicyKwargs],
    ) -> None:
        check_range("num_bins", num_bins, minimum=2)
        check_range("temperature", temperature, above=0)
        _check_head(head, own_head, flow, temperature)
        body = TinyVLA() if backbone is None else backbone
        require(
            action_statistics is not None or statistics_key is None,
            f"statistics_key={statistics_key} needs action_statistics, or remove it.",
        )

        def make_head(space: gymnasium.spaces.Box) -> ActionHead:
            statistics = None
            if action_statistics is not None:
                size = math.prod(space.shape[1:])
                # By name, because the file may list the numbers of an action in another order.
                order = names_of(space)
                statistics = action_bounds_of(action_statistics, statistics_key, size, order)
            if own_head is not None:
                return own_head(space, log_prob_level, statistics, body.slot_size)
            if head == "token":
                layer = body.token_head(num_bins)
                to_logits = nn.Linear(body.slot_size, num_bins) if layer is None else layer
                bins = to_logits, num_bins, temperature
                return TokenHead(space, log_prob_level, *bins, statistics)
            if head == "gaussian":
                deviation = log_std_init, temperature
                return GaussianHead(space, log_prob_level, body.slot_size, *deviation, statistics)
            settings = FlowSettings() if flow is None else flow
            expert = body.velocity_expert(space)
            if expert is None:
                real_time = kwargs.get("real_time")
                conditioned = real_time is not None and real_time.method == "conditioned"
                expert = SlotExpert(space, body.slot_size, settings.hidden_sizes, conditioned)
            return FlowHead(space, log_prob_level, expert, body.summary_size, settings, statistics)

        super().__init__(observation_space, action_space, body, make_head, **kwargs)
        self.action_statistics, self.statistics_key = action_statistics, statistics_key

    def missing_statistics(
        self, state: Mapping[str, Any], prefix: str
    ) -> tuple[Statistics, str | None]:
        file = self.action_statistics
        if file is None:
            return None, None
        size, order = self.head.action_size, names_of(self.action_space)
        return read_action_bounds(file, self.statistics_key, size, order), file


def _check_head(
    head: str, own_head: HeadFactory | None, flow: FlowSettings | None, temperature: float
) -> None:
    require(
        head == "flow" or flow is None,
        f"flow is for head: flow, but head is {head}: set head: flow, or remove flow.",
    )
    require(
        head != "flow" or temperature == 1,
        f"temperature={temperature:g} is for tokens and Gaussians, but head is flow: set "
        "flow.noise_level, or remove temperature.",
    )
    require(
        own_head is None or head == "token",
        f"head is {head}, but own_head replaces it: remove one of the two.",
    )


def _check_tokens(space: gymnasium.Space[Any], backbone: Backbone) -> None:
    language = cast(gymnasium.spaces.Dict, space).spaces.get("language")
    if backbone.vocabulary is None or not isinstance(language, gymnasium.spaces.Box):
        return
    # A Box without an upper bound says nothing about the tokens.
    highest = int(language.high.max())
    require(
        highest < backbone.vocabulary or highest == np.iinfo(cast(Any, language.dtype)).max,
        f"The instructions of the env have tokens up to {highest}, but {type(backbone).__name__} "
        f"has only tokens below {backbone.vocabulary}: tokenise instructions by the model's own "
        "tokenizer, or give the model a larger vocabulary (TinyVLA: vocabulary).",
    )


def chunk_space(space: gymnasium.Space[Any]) -> gymnasium.spaces.Box:
    """Return an action space if it contains chunks of numbers.

    Raises:
        ConfigurationError: otherwise.
    """
    fits = isinstance(space, gymnasium.spaces.Box) and len(space.shape) >= 2
    require(
        fits and np.issubdtype(space.dtype, np.floating),
        f"A VLA acts by chunks of numbers; the action space is {space}. Wrap the env: "
        "{class_path: ActionChunk, init_args: {env: ..., chunk_size: 4}}, also for chunks of 1.",
    )
    assert isinstance(space, gymnasium.spaces.Box)
    return space


def example(space: gymnasium.Space[Any], needs_pictures: bool = True) -> TensorDict:
    """Return an observation [1] of zeros, if a VLA can read the space.

    Raises:
        ConfigurationError: otherwise.
    """
    required = "a Dict with rgb, uint8 [H, W, 3] or [cameras, H, W, 3]"
    rgb = space.spaces.get("rgb") if isinstance(space, gymnasium.spaces.Dict) else None
    is_picture = rgb is not None and rgb.dtype == np.uint8 and len(rgb.shape or ()) in (3, 4)
    require(
        isinstance(space, gymnasium.spaces.Dict)
        and (is_picture or (rgb is None and not needs_pictures)),
        f"A VLA observes {required}, and optionally depth, language and proprio, but the space is "
        f"{space}. Give the env the wrapper VLAObservation (data.env.wrappers), or another policy.",
    )
    assert isinstance(space, gymnasium.spaces.Dict)
    # An empty array gives the torch dtype of a NumPy dtype.
    zeros = {
        key: torch.zeros(
            (1, *(child.shape or ())), dtype=torch.from_numpy(np.empty(0, child.dtype)).dtype
        )
        for key, child in space.items()
    }
    return TensorDict(zeros, [1])


def in_float32(tensor: Tensor) -> torch.autocast:
    """Return a context without autocast on the device of a tensor [...]."""
    return torch.autocast(tensor.device.type, enabled=False)
