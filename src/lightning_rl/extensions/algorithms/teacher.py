"""Label a student's observations with teachers' actions, and at first act with these actions."""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Policy
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.policies import RolloutActor
from lightning_rl.extend.rollout import map_tree
from lightning_rl.extensions.algorithms.frozen import fits
from lightning_rl.extensions.algorithms.residual import part_for


class Teacher:
    """Trained, fixed policies whose actions a student imitates.

    Each policy reads the keys of its own observation space, which the student may ignore.

    Args:
        policies: one policy, or G policies for G groups of situations; they act by the mode of
            their distributions.
        student: learns from the teacher.
        env_steps: env steps, over all processes, in which the teacher's share of actions falls
            linearly to 0.
        key: with several policies, the key of the observation [B, G] whose largest number names the
            policy of a row.

    Attributes:
        memory: states [N, ...] of policies with a memory, by number, before the next rollout.
        micro_batch_size: smallest micro-batch size of the policies.

    Raises:
        ConfigurationError: if the spaces of a policy or the key do not fit, or a policy with a
            memory would act.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        student: Policy,
        env_steps: int = 0,
        key: str | None = None,
    ) -> None:
        check_range("teacher_env_steps", env_steps, minimum=0)
        # In eval mode, because dropout would change the labels.
        self.policies = [policy.eval().requires_grad_(False) for policy in policies]
        self.env_steps = env_steps
        self.key = key
        self.memory: dict[str, Tensor] = {}
        for policy in policies:
            _check_teacher(policy, student, env_steps)
        space = student.observation_space
        spaces = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {}
        shape = spaces[key].shape if key in spaces else None
        require(
            (key is None and len(policies) == 1) or shape == (len(policies),),
            f"There are {len(policies)} teachers, but teacher_key is {key}. With several "
            "teachers, teacher_key names a key of the observation with one number per teacher; "
            f"the largest number chooses the teacher. data.env has {space}.",
        )
        sizes = [policy.micro_batch_size for policy in policies if policy.micro_batch_size]
        self.micro_batch_size = min(sizes, default=None)

    @property
    def has_memory(self) -> bool:
        """Whether actions depend on earlier steps."""
        return any(policy.is_recurrent for policy in self.policies)

    def actions(self, observation: Any) -> Any:
        """Return the teacher's actions [B, *A], the mode, for an `observation` on any device."""
        return self._act(observation, {})[0]

    def actions_along(self, rollout: TensorDict) -> Iterator[Any]:
        """Yield the actions [N, *A] of each slot of a rollout [N, T+1].

        Memories continue from the last rollout, and restart with each episode.
        """
        *slots, bootstrap_slot = rollout.select("observation", "done").unbind(1)
        # Envs whose episode went on after the last rollout keep their memory.
        self.memory = _kept(self.memory, rollout.get("continues")[:, 0])
        for slot in slots:
            actions, next_memory = self._act(slot.get("observation"), self.memory)
            self.memory = _kept(next_memory, ~slot.get("done"))
            yield actions
        # The memory stays: this slot is also the first one of the next rollout.
        yield self._act(bootstrap_slot.get("observation"), self.memory)[0]

    @torch.no_grad()
    def _act(self, observation: Any, memory: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
        actions, next_memory = [], {}
        for number, policy in enumerate(self.policies):
            read, name = part_for(policy.acting_space, observation), f"teacher{number}"
            td = TensorDict({"observation": read}, [len(read)]).to(policy.version.device)
            if policy.is_recurrent:
                first = policy.first_state(len(read))["state"]
                td["state"] = memory.get(name, first).to(first)
            td = policy.get_action(td, deterministic=True)
            if policy.is_recurrent:
                next_memory[name] = td.get("next_state")
            action = td.get("action")
            low, high = (getattr(policy.action_space, bound, None) for bound in ("low", "high"))
            if isinstance(action, Tensor) and low is not None:  # the env would clip the action
                action = action.clamp(*(torch.as_tensor(limit).to(action) for limit in (low, high)))
            actions.append(map_tree(lambda leaf: leaf.to(observation.device), action))
        if self.key is None:
            return actions[0], next_memory
        # All teachers act on all rows: to select the rows of each would wait for the device.
        choice = observation.get(self.key).argmax(-1)
        rows = torch.arange(len(choice), device=choice.device)
        return map_tree(lambda *each: torch.stack(each)[choice, rows], *actions), next_memory

    def share(self, env_steps: int) -> float:
        """Return the share of steps in which the teacher acts, after `env_steps` of the run."""
        return 0.0 if env_steps >= self.env_steps else 1.0 - env_steps / self.env_steps

    def mixed(
        self, student: RolloutActor, env_steps: int, rollout: TensorDict
    ) -> RolloutActor | None:
        """Return an actor of a `rollout` [N, T+1] in which the teacher acts in a share of steps."""
        share = self.share(env_steps)
        return MixedActor(student, self, share, rollout) if share > 0 else None


def _kept(memory: dict[str, Tensor], continues: Tensor) -> dict[str, Tensor]:
    return {
        name: state.masked_fill(~continues.to(state.device).view(-1, *[1] * (state.dim() - 1)), 0)
        for name, state in memory.items()
    }


def _check_teacher(policy: Policy, student: Policy, env_steps: int) -> None:
    teacher_space = policy.acting_space
    require(
        env_steps == 0 or not policy.is_recurrent,
        f"teacher_env_steps is {env_steps}, but the teacher is a {type(policy).__name__} with a "
        "memory, which labels whole rollouts and does not act. Set teacher_env_steps: 0.",
    )
    require(
        fits(teacher_space, student.observation_space),
        f"The teacher reads observations {teacher_space}, but data.env has "
        f"{student.observation_space}. The env must provide all observations of the teacher; "
        "select the student's with actor_keys.",
    )
    require(
        policy.action_space == student.action_space,
        f"The teacher acts in {policy.action_space}, but the student in {student.action_space}: "
        "use a teacher of an env with the same actions.",
    )


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
        self._storage = rollout.select("observation", "action").transpose(0, 1)
        self._generator: torch.Generator | None = None

    def begin(self, generator: torch.Generator, start: int = 0) -> None:
        self._student.begin(generator, start)
        self._generator = generator

    def act(self, t: int) -> None:
        # The student acts in all rows, so that its draws do not depend on the share.
        self._student.act(t)
        slot = self._storage[t]
        place = slot.get("action")
        teacher_action = self._teacher.actions(slot.get("observation"))
        uniform = torch.rand(len(slot), generator=self._generator, device=slot.device)
        mask = uniform < self._share

        def mix(action: Tensor, other: Tensor) -> Tensor:
            return torch.where(mask.view(-1, *[1] * (action.dim() - 1)), other.to(action), action)

        # In place: the rollout stores the executed action.
        map_tree(Tensor.copy_, place, map_tree(mix, place, teacher_action))

    def finish(self, start: int, stop: int) -> None:
        self._student.finish(start, stop)
