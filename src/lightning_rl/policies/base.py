"""The policy interface."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.policies.actors import RolloutActor, StepwiseActor
from lightning_rl.rollout.contract import FieldSpec
from lightning_rl.rollout.masks import MASK
from lightning_rl.rollout.structured_actions import flat_actions
from lightning_rl.system.construction import Configurable
from lightning_rl.system.errors import ConfigurationError, closest, require
from lightning_rl.system.sharded import PolicySharding

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
        state_is_plan: whether `state` is a plan of actions, which an intervention ends.
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
        moved: names of frozen parameters that the algorithm moves, such as a slow copy that acts.
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
    state_is_plan: bool = False
    takes_guidance: bool = False
    counts_executed: bool = False
    masks_actions: bool = False
    autocast_dtype: torch.dtype | None = None
    micro_batch_size: int | None = None
    critic_modules: tuple[str, ...] = ("critic", "value_head")
    training_settings: tuple[str, ...] = ()
    blocks: Sequence[str] = ()
    moved: frozenset[str] = frozenset()
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

    def first_state(self, num_envs: int) -> dict[str, Tensor]:
        """Return the initial `state` [N, ...] of episodes, empty for a policy without a state."""
        if "state" not in self.extra_fields:
            return {}
        shape, dtype = self.extra_fields["state"]
        return {"state": torch.zeros(num_envs, *shape, dtype=dtype, device=self.version.device)}

    def acting_state(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that acting needs, by name: all but the critics'."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: value for name, value in tensors.items() if not self.belongs_to_critic(name)}

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
        # "bf16" is Lightning's short name: a checkpoint holds the setting as it was written.
        dtype = torch.bfloat16 if precision in ("bf16", "bf16-mixed") else None
        for module in self.modules():
            # `modules` includes this policy.
            if isinstance(module, Policy):
                module.autocast_dtype = dtype

    def put_in_eval_mode(self) -> None:
        """Call `eval` if any module is in training mode: `eval` alone visits every module."""
        # `eval` alone visits every module each time.
        if any(module.training for module in self.modules()):
            self.eval()

    def rollout_actor(self, rollout: TensorDict) -> RolloutActor:
        """Return the actor that fills the storage of a rollout [N, T+1] with this policy's actions.

        Override it to act faster than with one `forward` per step.
        """
        return StepwiseActor(self, rollout)

    def update_normalization(self, rollout: TensorDict) -> None:
        """Update the running statistics of the inputs, if any, from a rollout [N, T+1].

        Called once after each update (a dataset: before the first), so that first ratios are 1.
        """


def _refuse_unread(
    name: str, space: gymnasium.Space[Any], reads: Sequence[str] | None, ignored: Sequence[str]
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
