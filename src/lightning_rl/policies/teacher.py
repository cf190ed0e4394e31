"""Label a student's observations with a teacher's actions, and act with the teacher at first."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.policies.base import Policy, RolloutActor
from lightning_rl.policies.spaces import fits, part_for
from lightning_rl.rollout.contract import copy_tree, map_tree, time_major
from lightning_rl.system.errors import check_range, require


class Teacher:
    """A trained, fixed policy whose actions a student imitates.

    The teacher reads the keys of its own observation space, which the student may ignore.

    Args:
        policy: the teacher; acts by the mode of its distribution.
        student: learns from the teacher.
        env_steps: of all processes; the teacher's share of actions falls linearly to 0 in them.

    Raises:
        ConfigurationError: if the teacher's spaces do not fit, or the teacher has a memory.
    """

    def __init__(self, policy: Policy, student: Policy, env_steps: int = 0) -> None:
        check_range("teacher_env_steps", env_steps, least=0)
        self.policy = policy.eval().requires_grad_(False)
        self.env_steps = env_steps
        name, wanted = type(policy).__name__, policy.observation_space
        require(
            not policy.is_recurrent,
            f"The teacher is a {name} with a memory, whose state would not match the student's "
            "episodes. Use a teacher without a memory.",
        )
        require(
            fits(wanted, student.observation_space),
            f"The teacher reads observations {wanted}, but data.env has "
            f"{student.observation_space}. The env must provide all observations of the teacher; "
            "select the student's with actor_keys.",
        )
        require(
            policy.action_space == student.action_space,
            f"The teacher acts in {policy.action_space}, but the student in "
            f"{student.action_space}: use a teacher of an env with the same actions.",
        )

    @torch.no_grad()
    def actions(self, observation: Any) -> Any:
        """Return the teacher's actions [B, *A], the mode within their bounds.

        Args:
            observation: [B, ...], on any device; the actions are returned on it.
        """
        read = part_for(self.policy.observation_space, observation)
        td = TensorDict({"observation": read}, [len(read)]).to(self.policy.version.device)
        action = self.policy.get_action(td, deterministic=True).get("action")
        low, high = (getattr(self.policy.action_space, name, None) for name in ("low", "high"))
        if isinstance(action, Tensor) and low is not None:  # the env would clip the action
            action = action.clamp(*(torch.as_tensor(one).to(action) for one in (low, high)))
        return map_tree(lambda leaf: leaf.to(observation.device), action)

    def share(self, env_steps: int) -> float:
        """Return the share of steps in which the teacher acts, after `env_steps` of the run."""
        return 0.0 if env_steps >= self.env_steps else 1.0 - env_steps / self.env_steps


class MixedActor(RolloutActor):
    """Acts with the teacher in a random share of steps and envs, otherwise with the student.

    Source: Ross, Gordon and Bagnell 2011 (DAgger), algorithm 3.1.

    Args:
        student: acts in the other steps; its random draws do not depend on the teacher.
        teacher: provides an action at each step.
        share: in [0, 1].
        rollout: batch shape [N, T+1], written in place.
    """

    def __init__(
        self, student: RolloutActor, teacher: Teacher, share: float, rollout: TensorDict
    ) -> None:
        self._student, self._teacher, self._share = student, teacher, share
        self._storage = time_major(rollout.select("observation", "action"))
        self._generator: torch.Generator | None = None

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._student.begin(generator, start)
        self._generator = generator

    def act(self, t: int) -> None:
        self._student.act(t)
        slot = self._storage[t]
        place = slot.get("action")
        teacher_action = self._teacher.actions(slot.get("observation"))
        drawn = torch.rand(len(slot), generator=self._generator, device=slot.device)
        taken = drawn < self._share

        def mix(own: Tensor, other: Tensor) -> Tensor:
            return torch.where(taken.view(-1, *[1] * (own.dim() - 1)), other.to(own), own)

        copy_tree(place, map_tree(mix, place, teacher_action))

    def finish(self, start: int, stop: int) -> None:
        self._student.finish(start, stop)
