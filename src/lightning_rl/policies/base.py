"""The policy interface, and actors that fill a rollout with a policy's actions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from lightning_rl.policies.distributions.base import gumbel_
from lightning_rl.policies.precision import autocast
from lightning_rl.rollout.contract import FieldSpec, step_views, time_major
from lightning_rl.rollout.masks import MASK, allowed_random_action
from lightning_rl.rollout.structured_actions import choices_of, flat_actions
from lightning_rl.system.construction import Configurable
from lightning_rl.system.errors import ConfigurationError, closest, require
from lightning_rl.system.sharded import PolicySharding, local
from lightning_rl.system.torch_private import version_of

RNG = torch.Generator | None
"""Generator of random draws; None for torch's default generator."""

NOISE = "action_noise"
"""Key of noise that the caller drew before it called `forward`."""

ABSENT, GUIDANCE = "absent_observation", "guidance"
"""Keys of guidance: the observation [B, ...] without condition, and the factor [B], see `guide`."""


class Policy(nn.Module, ABC, Configurable):
    """Base class of all policies.

    Subclass it and pass `class_path: my_module.MyPolicy` in the config. The first two arguments of
    the constructor are the spaces of one env; the command line passes them. Policies act and
    evaluate in eval mode, so that dropout cannot change the log-probs between rollout and update.
    The recurrent state is an entry of the TensorDict, never of the module.

    Args:
        observation_space, action_space: spaces of one env.
        reads: keys of a Dict observation that the policy can read. Default: all keys.
        ignore_keys: keys of a Dict observation that the policy does not read.

    Raises:
        ConfigurationError: for a key neither read nor ignored, or an unknown ignored key.

    Attributes:
        observation_space, action_space: spaces of one env; several parts as flat
            `StructuredActions`.
        version: int64 buffer, number of updates of these weights; only the learner writes it.
        has_critic: whether `value` is meaningful. Algorithms with a critic require it.
        critic_is_optional: whether an algorithm that trains no critic accepts a policy with one.
        has_entropy: whether `entropy` is meaningful. Algorithms refuse an entropy bonus without it.
        evaluates_sequences: whether `evaluate_actions` runs a memory over the `sequences` of a
            minibatch (`lightning_rl.rollout.sequences`), with gradients through time.
        joint_ratio: for log-probs per part, [N, L]: use one ratio for the whole action.
        takes_guidance: whether `forward` and `evaluate_actions` read `ABSENT` and `GUIDANCE`.
        counts_executed: whether `evaluate_actions` masks the log-prob [B] of a chunk by `executed`
            [B, K]. Losses mask log-probs per part.
        masks_actions: whether `action_mask` of the observation limits the choice of actions.
        autocast_dtype: dtype of the network while acting with `trainer.precision: bf16-mixed`; None
            for the dtype of the weights. Log-probs, entropies and values are float32.
        micro_batch_size: samples per pass in training and evaluation, with accumulated gradients;
            None chooses a fast size.
        critic_modules: modules that only `value` uses. `trainer.init_from` may skip them.
        training_settings: attributes that only affect training, and may differ from a checkpoint.
        blocks: patterns of the names of the modules that `trainer.strategy: fsdp` shards, such as
            `backbone.layers.*`; the outermost matches count.
        sharding: the shards over processes, if a strategy has sharded it; else None.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    version: Tensor
    has_critic: bool = True
    critic_is_optional: bool = False
    has_entropy: bool = True
    evaluates_sequences: bool = False
    joint_ratio: bool = False
    takes_guidance: bool = False
    counts_executed: bool = False
    masks_actions: bool = False
    autocast_dtype: torch.dtype | None = None
    micro_batch_size: int | None = None
    critic_modules: tuple[str, ...] = ("critic", "value_head")
    training_settings: tuple[str, ...] = ()
    blocks: Sequence[str] = ()
    sharding: PolicySharding | None = None

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        reads: Sequence[str] | None = None,
        ignore_keys: Sequence[str] = (),
    ) -> None:
        super().__init__()
        _refuse_unread(type(self).__name__, observation_space, reads, ignore_keys)
        self.ignore_keys = tuple(ignore_keys)
        self.observation_space = observation_space
        self.action_space = flat_actions(action_space)
        # A buffer: it travels with the weights, to collectors and checkpoints.
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        """Fields that `forward` stores in addition to `action` and `sample_log_prob`.

        `evaluate_actions` recomputes the log-prob from them. A field `state` is the recurrent state
        before the step, zero at the start of an episode. `forward` does not change it, and writes
        `next_state` of the same shape and dtype.
        """
        return {}

    @property
    def is_recurrent(self) -> bool:
        """Whether log-probs and values depend on `state`, as in a recurrent policy."""
        # Exclude the state of correlated noise, which only affects the next draw.
        noise = getattr(getattr(self, "distribution", None), "state_size", 0)
        state, _ = self.extra_fields.get("state", ((noise,), None))
        return state != (noise,)

    @property
    def acting_space(self) -> gymnasium.Space[Any]:
        """The keys of `observation_space` that acting reads; the critic may read more."""
        if not isinstance(self.observation_space, gymnasium.spaces.Dict):
            return self.observation_space
        spaces = self.observation_space.spaces
        keys = getattr(self, "actor_keys", None)
        read = spaces.keys() - self.ignore_keys if keys is None else {*keys}
        read |= {MASK} if self.masks_actions else set()
        return gymnasium.spaces.Dict({key: space for key, space in spaces.items() if key in read})

    @abstractmethod
    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        """Act: write `action` [N, *A] and `sample_log_prob` [N] into `td`, and return it.

        Also write `extra_fields`, which may give `sample_log_prob` the shape [N, L] (per part).

        Args:
            td: batch shape [N], with `observation`. The rollout copies from the returned
                TensorDict; a wrong shape or dtype raises an error.
            deterministic: take the mode of the distribution instead of a sample.
            generator: on the device of the observation. Default: torch's global generator.
        """

    def draw_noise(self, batch: Sequence[int], generator: RNG = None) -> Tensor:
        """Draw noise [*batch, Z] for `forward`; a compiled env step passes it as `action_noise`.

        Policies that draw inside `forward` keep Z = 0 and are not compiled.

        Args:
            batch: N, or T and N for a whole rollout.
            generator: default: torch's global one.
        """
        return torch.empty(*batch, 0, device=self.version.device)

    @abstractmethod
    def get_value(self, td: TensorDict) -> TensorDict:
        """Write `value` [B] for the `observation` (and `state`) of td [B] into td; return td."""

    @abstractmethod
    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        """Re-evaluate stored actions, with gradients.

        Return a new TensorDict [B] with `sample_log_prob`, `entropy` and `value`.

        Args:
            td: [B], with `observation`, `action` and `extra_fields`. If the policy
                `evaluates_sequences`, `sequences` replaces `state`.
        """

    def draw_clone_noise(self, batch: Sequence[int], generator: RNG = None) -> Tensor:
        """Draw noise [*batch, Z] for `clone_loss`; Z = 0 by default."""
        return torch.empty(*batch, 0, device=self.version.device)

    def clone_loss(self, td: TensorDict) -> TensorDict:
        """Return `clone_loss` and `entropy`, [B] or [B, L], of imitating actions, with gradients.

        By default the loss is the negative log-prob.

        Args:
            td: [B], with `observation`, `action`, the fields that `evaluate_actions` reads, and, if
                Z > 0, `clone_noise` [B, Z] from `draw_clone_noise`.
        """
        result = self.evaluate_actions(td)
        fields = {"clone_loss": -result["sample_log_prob"], "entropy": result["entropy"]}
        return TensorDict(fields, td.batch_size)

    @torch.no_grad()
    def get_action(
        self, td: TensorDict, deterministic: bool = False, generator: RNG = None
    ) -> TensorDict:
        """Call `forward` without gradients, for `td` [N]."""
        return self(td, deterministic=deterministic, generator=generator)  # type: ignore[no-any-return]  # nn.Module

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trainable parameters as optimizer groups; `lr_scale` multiplies the rate."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def acting_state(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that acting needs, by name: all but the critics'."""
        named = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: value for name, value in named.items() if not self.belongs_to_critic(name)}

    def adapt_state_dict(
        self, state: dict[str, Tensor], saved: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], str | None]:
        """Adapt saved weights to this policy, before `trainer.init_from` compares and loads them.

        Args:
            state: state dict [...] of this policy; its names may have a prefix.
            saved: state dict [...] of the checkpoint, with the same prefix.

        Returns:
            The adapted weights [...], and a message for the user, if any.
        """
        return saved, None

    def belongs_to_critic(self, name: str) -> bool:
        """Return whether only `value` uses the parameter or buffer `name`."""
        return any(name == path or name.startswith(f"{path}.") for path in self.critic_modules)

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        """Return the `extra_fields` for given actions [B, *A], to learn from demonstrations.

        Raises:
            ConfigurationError: if the policy has such fields and does not override this method.
        """
        if set(self.extra_fields) <= {"sample_log_prob"}:
            return {}
        raise ConfigurationError(
            f"{type(self).__name__} cannot learn from demonstrations: it stores "
            f"{', '.join(self.extra_fields)} with an action, but has no fields_of(action) that "
            "computes them."
        )

    @property
    def replay_action_space(self) -> gymnasium.Space[Any]:
        """Space of the actions in the replay, which critics evaluate; see `rollout_for_replay`."""
        return self.action_space

    def rollout_for_replay(self, rollout: TensorDict) -> TensorDict:
        """Return a rollout [N, T+1] with the critics' actions; unchanged by default."""
        return rollout

    def set_precision(self, precision: str) -> None:
        """Apply `trainer.precision` to acting, also in policies inside this one."""
        for module in self.modules():
            # `modules` includes this policy.
            if isinstance(module, Policy):
                module.autocast_dtype = torch.bfloat16 if precision == "bf16-mixed" else None

    def put_in_eval_mode(self) -> None:
        """Call `eval` if any module is in training mode: `eval` alone visits every module."""
        # `eval` alone visits every module each time.
        if any(module.training for module in self.modules()):
            self.eval()

    def rollout_actor(self, rollout: TensorDict) -> "RolloutActor":
        """Return the actor that fills the storage of a rollout [N, T+1] with this policy's actions.

        Override it to act faster than with one `forward` per step.
        """
        return StepwiseActor(self, rollout)

    def update_normalization(self, rollout: TensorDict) -> None:
        """Update the running statistics of the inputs, if any, from a rollout [N, T+1].

        Called once after each update, so that the first ratio of an update is 1.
        """


def _refuse_unread(
    name: str,
    space: gymnasium.Space[Any],
    reads: Sequence[str] | None,
    ignored: Sequence[str],
) -> None:
    keys = sorted(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else []
    for key in ignored:
        require(
            key in keys,
            f"ignore_keys names '{key}', but the observation has "
            f"{'the keys ' + ', '.join(keys) if keys else 'no keys'}{closest(key, keys)}.",
        )
    unread = [key for key in keys if reads is not None and key not in (*reads, *ignored)]
    require(
        not unread,
        f"The observation has {', '.join(unread)}, which {name} does not read; it reads "
        f"{', '.join(reads or ())}. Remove them from the observation, or ignore them: ignore_keys: "
        f"[{', '.join(unread)}]. (A VLA's backbone lists its keys in the attribute reads.)",
    )


def noise_for(
    policy: Any, td: TensorDict, deterministic: bool, generator: torch.Generator | None
) -> Tensor | None:
    """Return the noise [N, Z] for `policy.forward` on `td` [N]; None for the mode."""
    if deterministic:
        return None
    # A generator asks for a draw of its own, instead of noise drawn before.
    noise: Tensor | None = td.get(NOISE, None) if generator is None else None
    return policy.draw_noise(td.batch_size, generator) if noise is None else noise


def first_state(policy: Policy, num_envs: int) -> dict[str, Tensor]:
    """Return the initial `state` [N, ...] of episodes, empty for a policy without a state."""
    if "state" not in policy.extra_fields:
        return {}
    shape, dtype = policy.extra_fields["state"]
    return {"state": torch.zeros(num_envs, *shape, dtype=dtype, device=policy.version.device)}


def check_weights_are_numbers(policy: Policy, origin: str = "") -> None:
    """Refuse a policy with NaN in weights or running statistics, or with infinite weights.

    Raises:
        ConfigurationError: with the names of the tensors.
    """
    # A policy with NaN still acts: a NaN becomes a bound of the action space, or the first choice.
    parameters = policy.named_parameters()
    broken = [name for name, p in parameters if not _all(local(p).isfinite())]
    # A buffer may be infinite on purpose, such as a mask.
    broken += [name for name, buffer in policy.named_buffers() if not _all(~buffer.isnan())]
    if broken:
        names = f"{', '.join(broken[:4])}{', ...' if len(broken) > 4 else ''}"
        raise ConfigurationError(
            f"The weights of {type(policy).__name__}{f' of {origin}' if origin else ''} are not "
            f"all finite numbers: {names} ({len(broken)} tensors). Training has diverged, or the "
            "file is damaged. Use an earlier checkpoint."
        )


def _all(flags: Tensor) -> bool:
    return bool(flags.all())


class RolloutActor(ABC):
    """Fills the storage of a rollout with actions, slot by slot."""

    @abstractmethod
    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        """Load the current weights for slots from `start` on; here or later, draw noise."""

    @abstractmethod
    def act(self, t: int) -> None:
        """Write the action of slot `t`, chosen from its observation."""

    @abstractmethod
    def finish(self, start: int, stop: int) -> None:
        """Write the other fields of slots `start` to `stop` - 1, if `act` did not."""


class StepwiseActor(RolloutActor):
    """Calls the policy at each step: works for every policy, on every device.

    Args:
        policy: chooses the actions.
        rollout: batch shape [N, T+1], written in place.
    """

    def __init__(self, policy: Policy, rollout: TensorDict) -> None:
        self._policy = policy
        fields = ("action", "sample_log_prob", *policy.extra_fields)
        # No duplicates: extra_fields may contain the log-prob. `state` is read, not written.
        self._fields = tuple(key for key in dict.fromkeys(fields) if key != "state")
        steps = step_views(rollout)
        # Views of the storage, made once: to index a TensorDict at each step is slow.
        self._steps = [step.select("observation", *fields) for step in steps]
        self._slots = [[step.get(key) for key in self._fields] for step in steps]
        state = ("state", "terminated", "truncated") if "state" in fields else ()
        self._states = [[step.get(key) for key in state] for step in steps]
        self._generator: RNG = None
        self._precision = autocast(policy.version.device, policy.autocast_dtype)

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._policy.eval()
        self._generator = generator

    def act(self, t: int) -> None:
        """Call the policy, and copy its output.

        Raises:
            ConfigurationError: if a returned field is missing or has another shape or dtype.
        """
        if t > 0:
            # The policy wrote this state after the last step, which may have ended the episode.
            self._forget_ended(t)
        slots = self._slots[t]
        versions = [version_of(slot) for slot in slots]
        with self._precision:
            # Copy the container: the next call must not find entries that the policy sets.
            result = self._policy(self._steps[t].copy(), generator=self._generator)
        if not isinstance(result, TensorDictBase):
            raise ConfigurationError(
                f"{self._name}.forward returned {type(result).__name__}, not a TensorDict with "
                f"{', '.join(self._fields)}: return the given TensorDict."
            )
        for key, slot, version in zip(self._fields, slots, versions, strict=True):
            value = result.get(key, None)
            if value is slot:
                if version_of(slot) == version:  # the policy has not written it
                    self._refuse(key, None, slot)
            elif value is None or value.shape != slot.shape or value.dtype != slot.dtype:
                self._refuse(key, value, slot)
            else:
                # `copy_` would broadcast a wrong shape silently: the checks above come first.
                slot.copy_(value)
        if self._states[t]:
            slot, value = self._states[t + 1][0], result.get("next_state", None)
            if value is None or value.shape != slot.shape or value.dtype != slot.dtype:
                self._refuse("next_state", value, slot)
            slot.copy_(value)

    def finish(self, start: int, stop: int) -> None:
        # Slot `stop` begins the next rollout.
        self._forget_ended(stop)

    def _forget_ended(self, t: int) -> None:
        if self._states[t]:
            _, terminated, truncated = self._states[t - 1]
            state = self._states[t][0]
            done = terminated | truncated
            # [N, 1, ...]: `masked_fill_` broadcasts from the right.
            state.masked_fill_(done.view(-1, *[1] * (state.dim() - 1)), 0)

    @property
    def _name(self) -> str:
        return type(self._policy).__name__

    def _refuse(self, key: str, value: Any, slot: Tensor) -> NoReturn:
        spec = f"{slot.dtype} of shape {list(slot.shape)}"
        if value is None:
            message = f"{self._name}.forward returned no '{key}'; it must be {spec}"
        else:
            message = (
                f"{self._name}.forward returned '{key}' as {value.dtype} of shape "
                f"{list(value.shape)}; it must be {spec}"
            )
        origin = {
            "action": "as the action space declares",
            "sample_log_prob": "one number per env, unless extra_fields declares another shape",
            "next_state": "as extra_fields declares for 'state'",
        }.get(key, "as extra_fields says")
        rounded = isinstance(value, Tensor) and value.dtype == torch.bfloat16
        cure = " Convert it by .float(): bf16-mixed computes in bfloat16." if rounded else ""
        raise ConfigurationError(f"{message}, {origin}: td.set('{key}', ...), and return td.{cure}")


class UniformActor(RolloutActor):
    """Draws actions uniformly from the action space, or from the actions that `action_mask` allows.

    The log-probs belong to the uniform draw. A recurrent policy still updates its state.

    Args:
        policy: provides the action space.
        rollout: batch shape [N, T+1], written in place.

    Raises:
        ConfigurationError: if the action space has no bounds.
    """

    def __init__(self, policy: Policy, rollout: TensorDict) -> None:
        self._policy = policy
        self._storage = time_major(rollout)
        space = policy.action_space
        self._sizes = choices_of(space)
        device = self._storage["action"].device
        if isinstance(space, gymnasium.spaces.Box):
            bounded = bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
            if not bounded or not np.issubdtype(space.dtype, np.floating):
                raise ConfigurationError(
                    f"random_env_steps: there is no uniform draw from the action space {space}. "
                    "Bound it, or set random_env_steps: 0."
                )
            self._low = torch.as_tensor(space.low, dtype=torch.float32, device=device)
            self._range = torch.as_tensor(space.high, dtype=torch.float32, device=device)
            self._range = self._range - self._low
            # The density of the uniform draw: 1 / volume of the box.
            self._log_prob = -float(self._range.log().sum())
        else:
            counts = torch.tensor(self._sizes, dtype=torch.float32, device=device)
            self._range = counts.view(space.shape or ())
            self._low = torch.zeros_like(self._range)
            self._log_prob = -float(counts.log().sum())

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._policy.eval()
        actions = self._storage["action"][start:-1]
        if self._policy.masks_actions:  # each mask is known only after the last step
            shape = len(self._storage) - 1, self._storage.batch_size[1], sum(self._sizes)
            self._noise = torch.empty(shape, device=actions.device)
            gumbel_(self._noise[start:], generator)
            # Float actions: several parts, of which some may be numbers that need uniform draws.
            if not actions.is_floating_point():
                return
        samples = torch.rand(actions.shape, generator=generator, device=actions.device)
        samples = self._low + samples * self._range
        # `rand` is below 1: the floor stays below the number of choices.
        actions.copy_(samples if actions.is_floating_point() else samples.floor())

    def act(self, t: int) -> None:
        # Without a mask, `begin` has written the actions.
        if not self._policy.masks_actions:
            return
        slot = self._storage[t]
        action, mask = slot["action"], slot["observation"][MASK]
        space = self._policy.action_space
        action.copy_(allowed_random_action(space, action, mask, self._noise[t]))

    def finish(self, start: int, stop: int) -> None:
        steps = self._storage[start:stop]
        steps["sample_log_prob"].fill_(self._log_prob)
        if self._policy.masks_actions:
            allowed = (steps["observation"][MASK] != 0).split(self._sizes, -1)
            # At least 1, because a row that allows no action would give log(0).
            counts = torch.stack([part.sum(-1) for part in allowed], -1).clamp(min=1)
            steps["sample_log_prob"].copy_(-counts.log().sum(-1))
        for key, value in self._policy.fields_of(steps["action"]).items():
            # `_remember` computes the states.
            if key != "state":
                steps[key].copy_(value)
        if self._policy.is_recurrent:
            self._remember(start, stop)

    def _remember(self, start: int, stop: int) -> None:
        """Write the states after slots `start` to `stop` - 1, zero after the end of an episode."""
        policy, states = self._policy, self._storage["state"]
        done = self._storage["terminated"] | self._storage["truncated"]
        steps = self._storage.select("observation", "state").unbind(0)
        with autocast(policy.version.device, policy.autocast_dtype):
            # Step by step, because each state depends on the one before.
            for t in range(start, stop):
                next_state = policy.get_action(steps[t].copy(), deterministic=True)["next_state"]
                is_end = done[t].view(-1, *[1] * (next_state.dim() - 1))
                states[t + 1].copy_(next_state.masked_fill(is_end, 0))
