"""Say what a policy is: the module that acts, values and re-evaluates, by TensorDict.

And how it acts through a rollout: one action per env step, the rest of the fields in one pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from lightning_rl.policies.distributions.base import NEVER, gumbel_
from lightning_rl.policies.precision import autocast
from lightning_rl.rollout.contract import MASK, FieldSpec, step_views, time_major
from lightning_rl.rollout.structured_actions import flat_actions
from lightning_rl.system.construction import Constructed
from lightning_rl.system.errors import ConfigurationError, closest, require
from lightning_rl.system.torch_private import version_of

NOISE = "action_noise"
"""The key under which `forward` finds noise that was drawn before."""


class Policy(nn.Module, ABC, Constructed):
    """A policy over batched observations.

    Subclass it and pass `class_path: my_module.MyPolicy` in the config.

    The first two arguments of a subclass's constructor are `observation_space` and `action_space`,
    of one env; the command line fills them in. A policy acts and is evaluated in eval mode, so that
    a dropout layer cannot make the log-prob of the update differ from that of the rollout. It holds
    no recurrent or chunk state: such state is data.

    Args:
        observation_space, action_space: of one env.
        reads: keys of a Dict observation that the policy can read; None for any key.
        ignore_keys: keys of a Dict observation that the policy does not read.

    Raises:
        ConfigurationError: for a key of the observation that is neither read nor ignored, and for
            an ignored key that the observation does not have.

    Attributes:
        observation_space, action_space: of one env; of actions of several parts the flat form,
            see `StructuredActions`.
        version: int64 buffer, the number of updates behind these weights. Written by the learner
            alone; it travels with the weights into checkpoints and copies.
        has_critic: whether `value` means anything; an algorithm that needs it refuses others.
        evaluates_sequences: whether it has a memory, and `evaluate_actions` runs over the
            `sequences` that a minibatch then holds (`lightning_rl.rollout.sequences`), so that it
            learns what to remember.
        joint_ratio: where `sample_log_prob` is that of the parts of an action, [N, L], whether the
            update takes the ratio of the whole action instead of one per part.
        counts_executed: whether `evaluate_actions` leaves the actions of a chunk that were not
            executed out of a log-prob [B] of the whole chunk, where `executed` [B, K] is in its
            TensorDict. Log-probs in parts need not: the losses leave parts out.
        masks_actions: whether it chooses only what the observation's `action_mask` allows; what it
            learns from is held to that.
        autocast_dtype: in which its network computes when it acts, under `trainer.precision:
            bf16-mixed`; None for that of its weights. Log-probs, entropies and values are float32
            in any case.
        micro_batch_size: samples that go through the network at once when it is trained or
            evaluated; the gradients of a minibatch add up. None for as many as are fast.
        critic_modules: names of the modules that `value` alone depends on. `trainer.init_from` may
            leave these out, or begin them anew; all others are what the policy does.
        training_settings: names of attributes that say how the policy is trained, not what it does:
            they may differ from those of a checkpoint, and nothing is said of it.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    version: Tensor
    has_critic: bool = True
    evaluates_sequences: bool = False
    joint_ratio: bool = False
    counts_executed: bool = False
    masks_actions: bool = False
    autocast_dtype: torch.dtype | None = None
    micro_batch_size: int | None = None
    critic_modules: tuple[str, ...] = ("critic", "value_head")
    training_settings: tuple[str, ...] = ()

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
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        """What `forward` stores beside `action` and `sample_log_prob`.

        `evaluate_actions` needs it to recompute the log-prob.

        A `state` among them is that of a recurrent policy before the step: `forward` finds it in
        its TensorDict, zero where an episode begins, leaves it as it is, and returns beside it
        `next_state`, of the same shape and dtype, which the next step finds.
        """
        return {}

    @property
    def remembers(self) -> bool:
        """Whether log-probs and values depend on its `state`, as in a recurrent policy.

        A state that is correlated noise alone says only what is drawn next.
        """
        noise = getattr(getattr(self, "distribution", None), "state_size", 0)
        state, _ = self.extra_fields.get("state", ((noise,), None))
        return state != (noise,)

    @property
    def acting_space(self) -> gymnasium.Space[Any]:
        """What acting reads of `observation_space`: no key ignored, or the critic's alone."""
        if not isinstance(self.observation_space, gymnasium.spaces.Dict):
            return self.observation_space
        known = self.observation_space.spaces
        keys = getattr(self, "actor_keys", None)
        read = known.keys() - self.ignore_keys if keys is None else {*keys}
        read |= {MASK} if self.masks_actions else set()
        return gymnasium.spaces.Dict({key: space for key, space in known.items() if key in read})

    @abstractmethod
    def forward(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        """Act.

        Write `action` [N, *A] and `sample_log_prob` [N] (and `extra_fields`) into `td`, and return
        it. A log-prob in parts, [N, L], is one that `extra_fields` gives its shape.

        Args:
            td: batch shape [N], with `observation`. What is returned counts, in it or in another;
                of the fields' dtypes and shapes, or the run ends and says which.
            deterministic: take the mode of the distribution instead of a sample.
            generator: draws the sample, on the device of the observation; None takes torch's global
                one.
        """

    def draw_noise(self, batch: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        """Draw the noise [*batch, Z] that `forward` acts with.

        What steps an env by a graph draws here, and hands it to `forward` as `action_noise` of its
        TensorDict (`noise_for`). A policy that draws in `forward` has none, Z = 0, and its steps
        are not compiled.

        Args:
            batch: N, or T and N for a whole rollout.
            generator: None draws by torch's global one.
        """
        return torch.empty(*batch, 0, device=self.version.device)

    @abstractmethod
    def get_value(self, td: TensorDict) -> TensorDict:
        """Write `value` [B] of `observation` into `td`, and return it.

        Args:
            td: [B], with `observation`, and `state` where the policy has one.
        """

    @abstractmethod
    def evaluate_actions(self, td: TensorDict) -> TensorDict:
        """Re-evaluate stored actions, with gradients.

        Returns a new TensorDict [B] with `sample_log_prob`, `entropy` and `value`.

        Args:
            td: batch shape [B], with `observation`, `action` and `extra_fields`. The minibatches of
                a policy that `evaluates_sequences` have `sequences` in place of `state`.
        """

    @torch.no_grad()
    def get_action(
        self, td: TensorDict, deterministic: bool = False, generator: torch.Generator | None = None
    ) -> TensorDict:
        """Act without gradients.

        Args:
            td: [N], as in `forward`.
            deterministic: take the mode of the distribution instead of a sample.
            generator: draws the sample, as in `forward`.
        """
        return self(td, deterministic=deterministic, generator=generator)  # type: ignore[no-any-return]  # nn.Module

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return what is trained, in groups as an optimizer takes them.

        A group may have `lr_scale`: what the learning rate is multiplied by for it.
        """
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def acting_state(self) -> dict[str, Tensor]:
        """Return what acting depends on, by name: parameters and buffers, less the critics'.

        It is all that a collector with a copy of the policy gets of a new version.
        """
        named = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: value for name, value in named.items() if not self.belongs_to_critic(name)}

    def belongs_to_critic(self, name: str) -> bool:
        """Tell whether a parameter or a buffer is one that `value` alone depends on."""
        return any(name == one or name.startswith(f"{one}.") for one in self.critic_modules)

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        """Return `extra_fields` as they would be had the policy chosen the actions [B, *A].

        For learning from demonstrations.

        Raises:
            ConfigurationError: where it has some and does not override this.
        """
        if set(self.extra_fields) <= {"sample_log_prob"}:
            return {}
        raise ConfigurationError(
            f"{type(self).__name__} cannot learn from demonstrations: it stores "
            f"{', '.join(self.extra_fields)} with an action, and has no fields_of(action) that "
            "derives them from one."
        )

    def compute_in(self, precision: str) -> None:
        """Take up a `trainer.precision` for acting, in policies inside this one as well."""
        for module in self.modules():
            if isinstance(module, Policy):
                module.autocast_dtype = torch.bfloat16 if precision == "bf16-mixed" else None

    def put_in_eval_mode(self) -> None:
        """Do what `eval` does, which sets every module anew whatever mode it is in."""
        if any(module.training for module in self.modules()):
            self.eval()

    def rollout_actor(self, rollout: TensorDict) -> "RolloutActor":
        """Return what acts with this policy on the storage of a rollout [N, T+1].

        Called once by the collector. A policy with a faster way than a call per step gives it.
        """
        return StepwiseActor(self, rollout)

    def update_normalization(self, rollout: TensorDict) -> None:
        """Move the running statistics of the inputs, if there are any.

        By a rollout [N, T+1] that has been trained on.

        Called once per update, after it: the statistics under which a rollout was collected hold
        until it is used up, and the first ratio of an update stays 1.
        """


def _refuse_unread(
    name: str,
    space: gymnasium.Space[Any],
    reads: Sequence[str] | None,
    ignored: Sequence[str],
) -> None:
    """Refuse a key of an observation that a policy neither reads nor ignores by name.

    Raises:
        ConfigurationError: naming the key.
    """
    known = sorted(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else []
    for key in ignored:
        require(
            key in known,
            f"ignore_keys names '{key}', and the observation has "
            f"{'the keys ' + ', '.join(known) if known else 'no keys'}{closest(key, known)}.",
        )
    unread = [key for key in known if reads is not None and key not in (*reads, *ignored)]
    require(
        not unread,
        f"The observation has {', '.join(unread)}, which {name} does not read; it reads "
        f"{', '.join(reads or ())}. Leave it out of the observation, or say that it is to be "
        f"ignored: ignore_keys: [{', '.join(unread)}]. (A VLA's backbone names in its attribute "
        "reads what it reads.)",
    )


def noise_for(
    policy: Any, td: TensorDict, deterministic: bool, generator: torch.Generator | None
) -> Tensor | None:
    """Return the noise [N, Z] of a call of `forward`; None for the mode of the distribution.

    A generator draws it. Without one, noise that was drawn before is taken from `td` (`NOISE`);
    where there is none, torch's global generator draws.

    Args:
        policy: has `draw_noise`.
        td: [N], as `forward` got it.
        deterministic: whether the mode is wanted.
        generator: as `forward` got it.
    """
    if deterministic:
        return None
    noise: Tensor | None = td.get(NOISE, None) if generator is None else None
    return policy.draw_noise(td.batch_size, generator) if noise is None else noise


def first_state(policy: Policy, num_envs: int) -> dict[str, Tensor]:
    """Return the `state` [N, ...] with which episodes begin; nothing where a policy has none."""
    if "state" not in policy.extra_fields:
        return {}
    shape, dtype = policy.extra_fields["state"]
    return {"state": torch.zeros(num_envs, *shape, dtype=dtype, device=policy.version.device)}


def check_weights_are_numbers(policy: Policy, origin: str = "") -> None:
    """Refuse a policy whose weights or running statistics are NaN, or whose weights are infinite.

    It would act all the same: a clipped NaN is a bound of the action space, or the first choice.

    Args:
        policy: is about to act, or to be written.
        origin: the checkpoint, for the message.

    Raises:
        ConfigurationError: naming the tensors.
    """
    broken = [name for name, p in policy.named_parameters() if not _all(p.isfinite())]
    # A buffer may be infinite on purpose, such as a mask.
    broken += [name for name, buffer in policy.named_buffers() if not _all(~buffer.isnan())]
    if broken:
        some = f"{', '.join(broken[:4])}{', ...' if len(broken) > 4 else ''}"
        raise ConfigurationError(
            f"The weights of {type(policy).__name__}{f' of {origin}' if origin else ''} are not "
            f"all finite numbers: {some} ({len(broken)} tensors). Its actions mean nothing: "
            "training has diverged, or the file is damaged. Use an earlier checkpoint."
        )


def _all(flags: Tensor) -> bool:
    return bool(flags.all())


class RolloutActor(ABC):
    """Acts on the storage of a rollout, slot by slot.

    A policy chooses the kind (`Policy.rollout_actor`), by what is fastest for it.
    """

    @abstractmethod
    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        """Take up the policy's weights as they are now, for slot `start` and those that follow.

        Their noise is drawn from `generator`, here or as they come.
        """

    @abstractmethod
    def act(self, t: int) -> None:
        """Write the action of slot `t`, from its observation."""

    @abstractmethod
    def finish(self, start: int, stop: int) -> None:
        """Write what the policy stores beside the actions, where `act` has not.

        For slots `start` to `stop` - 1, which were acted on with the present weights.
        """


class StepwiseActor(RolloutActor):
    """Calls the policy at each step: works for every policy, on every device.

    It carries the policy's `state` from slot to slot, where there is one. What counts is what
    `Policy.forward` returns, however it came about: written into the TensorDict that it was given,
    set or put in another. It is copied to where the rollout wants it.

    Args:
        policy: acts.
        rollout: batch shape [N, T+1], written in place.
    """

    def __init__(self, policy: Policy, rollout: TensorDict) -> None:
        self._policy = policy
        fields = ("action", "sample_log_prob", *policy.extra_fields)
        # Each once, as extra_fields may give the log-prob a shape; a state is read, not written.
        self._fields = tuple(key for key in dict.fromkeys(fields) if key != "state")
        steps = step_views(rollout)
        self._steps = [step.select("observation", *fields) for step in steps]
        self._slots = [[step.get(key) for key in self._fields] for step in steps]
        state = ("state", "terminated", "truncated") if "state" in fields else ()
        self._states = [[step.get(key) for key in state] for step in steps]
        self._generator: torch.Generator | None = None
        self._precision = autocast(policy.version.device, policy.autocast_dtype)

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._policy.eval()
        self._generator = generator

    def act(self, t: int) -> None:
        """Call the policy, and copy what it returns.

        Raises:
            ConfigurationError: where the policy does not return a field, or one of another shape or
                dtype.
        """
        if t > 0:
            self._forget_ended(t)
        slots = self._slots[t]
        before = [version_of(slot) for slot in slots]
        with self._precision:
            # A copy of the container: what is set in it must not be found there at the next call.
            result = self._policy(self._steps[t].copy(), generator=self._generator)
        if not isinstance(result, TensorDictBase):
            raise ConfigurationError(
                f"{self._name}.forward returned {type(result).__name__}, not a TensorDict with "
                f"{', '.join(self._fields)}: return the one that it was given."
            )
        for key, slot, version in zip(self._fields, slots, before, strict=True):
            value = result.get(key, None)
            if value is slot:
                if version_of(slot) == version:  # where it lay before, and nobody has written it
                    self._refuse(key, None, slot)
            elif value is None or value.shape != slot.shape or value.dtype != slot.dtype:
                self._refuse(key, value, slot)
            else:
                slot.copy_(value)
        if self._states[t]:
            slot, value = self._states[t + 1][0], result.get("next_state", None)
            if value is None or value.shape != slot.shape or value.dtype != slot.dtype:
                self._refuse("next_state", value, slot)
            slot.copy_(value)

    def finish(self, start: int, stop: int) -> None:
        """Write what `act` has not: of all fields, the last state alone may be left."""
        self._forget_ended(stop)

    def _forget_ended(self, t: int) -> None:
        """Zero the state of slot t where the step before it ended an episode."""
        if self._states[t]:
            _, terminated, truncated = self._states[t - 1]
            state = self._states[t][0]
            ended = terminated | truncated
            state.masked_fill_(ended.view(-1, *[1] * (state.dim() - 1)), 0)

    @property
    def _name(self) -> str:
        return type(self._policy).__name__

    def _refuse(self, key: str, value: Any, slot: Tensor) -> NoReturn:
        """Say what of a policy's output is not as announced."""
        wanted = f"{slot.dtype} of shape {list(slot.shape)}"
        if value is None:
            told = f"{self._name}.forward returned no '{key}'; it must be {wanted}"
        else:
            told = (
                f"{self._name}.forward returned '{key}' as {value.dtype} of shape "
                f"{list(value.shape)}; it must be {wanted}"
            )
        origin = {
            "action": "as the action space says",
            "sample_log_prob": "one number per env, unless extra_fields says otherwise",
            "next_state": "as extra_fields says of 'state'",
        }.get(key, "as extra_fields says")
        raise ConfigurationError(f"{told}, {origin}: td.set('{key}', ...), and return td.")


class UniformActor(RolloutActor):
    """Draws actions uniformly from the action space, whatever was observed.

    Where observations have an `action_mask`, from what it allows. Their log-probs are those of this
    draw, not the policy's. A policy with a memory reads each observation, and its state is stored.

    Args:
        policy: whose action space it is.
        rollout: batch shape [N, T+1], written in place.

    Raises:
        ConfigurationError: where the space has no bounds.
    """

    def __init__(self, policy: Policy, rollout: TensorDict) -> None:
        self._policy = policy
        self._storage = time_major(rollout)
        space = policy.action_space
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
            self._log_prob = -float(self._range.log().sum())
        else:
            sizes = [space.n] if isinstance(space, gymnasium.spaces.Discrete) else space.nvec  # type: ignore[attr-defined]  # the only others that a rollout holds
            self._sizes = [int(size) for size in sizes]
            counts = torch.as_tensor(np.asarray(sizes), dtype=torch.float32, device=device)
            self._range = counts if space.shape else counts.squeeze()
            self._low = torch.zeros_like(self._range)
            self._log_prob = -float(counts.log().sum())

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._policy.eval()
        actions = self._storage["action"][start:-1]
        if self._policy.masks_actions:  # of what is observed as it comes
            shape = len(self._storage) - 1, self._storage.batch_size[1], sum(self._sizes)
            self._noise = torch.empty(shape, device=actions.device)
            gumbel_(self._noise[start:], generator)
            return
        drawn = torch.rand(actions.shape, generator=generator, device=actions.device)
        drawn = self._low + drawn * self._range
        actions.copy_(drawn if actions.is_floating_point() else drawn.floor())

    def act(self, t: int) -> None:
        """Choose among what is allowed; where nothing is forbidden the actions are there."""
        if not self._policy.masks_actions:
            return
        slot = self._storage[t]
        keys = self._noise[t].masked_fill(slot["observation"][MASK] == 0, NEVER)
        chosen = torch.stack([part.argmax(-1) for part in keys.split(self._sizes, -1)], -1)
        slot["action"].copy_(chosen.view_as(slot["action"]))

    def finish(self, start: int, stop: int) -> None:
        """Write the log-probs of the draw, and what the policy stores of an action."""
        steps = self._storage[start:stop]
        steps["sample_log_prob"].fill_(self._log_prob)
        if self._policy.masks_actions:
            allowed = (steps["observation"][MASK] != 0).split(self._sizes, -1)
            counts = torch.stack([part.sum(-1) for part in allowed], -1).clamp(min=1)
            steps["sample_log_prob"].copy_(-counts.log().sum(-1))
        for key, value in self._policy.fields_of(steps["action"]).items():
            if key != "state":
                steps[key].copy_(value)
        if self._policy.remembers:
            self._remember(start, stop)

    def _remember(self, start: int, stop: int) -> None:
        """Write the states behind slots `start` to `stop` - 1, zero where an episode ended."""
        policy, states = self._policy, self._storage["state"]
        ended = self._storage["terminated"] | self._storage["truncated"]
        steps = self._storage.select("observation", "state").unbind(0)
        with autocast(policy.version.device, policy.autocast_dtype):
            for t in range(start, stop):
                following = policy.get_action(steps[t].copy(), deterministic=True)["next_state"]
                over = ended[t].view(-1, *[1] * (following.dim() - 1))
                states[t + 1].copy_(following.masked_fill(over, 0))
