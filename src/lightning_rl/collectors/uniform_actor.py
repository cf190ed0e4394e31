"""Take uniform random actions, before a policy acts."""

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict

from lightning_rl.policies import Policy
from lightning_rl.policies.actors import RolloutActor
from lightning_rl.policies.distributions.base import gumbel_
from lightning_rl.policies.precision import autocast
from lightning_rl.rollout.contract import time_major
from lightning_rl.rollout.masks import MASK, allowed_random_action
from lightning_rl.rollout.structured_actions import choices_of
from lightning_rl.system.errors import ConfigurationError


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
