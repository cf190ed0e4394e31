"""Step an env with a policy, rollout after rollout, into segments of storage."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers import Segment
from lightning_rl.collectors.statistics import EnvReports
from lightning_rl.envs import RestoreError, VectorEnv
from lightning_rl.envs.step_results import check_like, refuse_missing_end
from lightning_rl.envs.vector_env import Observation, RolloutStepper
from lightning_rl.errors import ConfigurationError
from lightning_rl.phases import PhaseTimer, no_phases
from lightning_rl.policies import Policy
from lightning_rl.policies.base import RolloutActor
from lightning_rl.rollout import copy_tree, time_major

LOOK_EVERY = 16
"""Steps between two looks, on a device other than the CPU, at whether all rows have finished.

A look waits for the device.
"""


@dataclass(frozen=True)
class EpisodePlan:
    """How an algorithm wants the episodes of a rollout to begin and to end.

    Attributes:
        group_size: G rows that follow each other begin in the same state.
        reset_every_rollout: begin every rollout with new episodes.
        first_episode_only: what follows the first episode of a row does not count; the rollout ends
            as soon as every row has had one.
    """

    group_size: int = 1
    reset_every_rollout: bool = False
    first_episode_only: bool = False


class Lane(NamedTuple):
    """What writes into one segment, made once."""

    storage: TensorDict
    success: tuple[Tensor, ...]
    actor: RolloutActor
    stepper: RolloutStepper


class RolloutLoop:
    """Steps one env with one policy; which storage that goes into, its owner says.

    The env is reset by the first rollout, and where the plan says so by each one; otherwise
    rollouts go on where the last one stopped.

    Args:
        env: stepped by this loop alone.
        policy: acts; read, never written.
        segments: the storage that rollouts may go into.
        seed: of the env and of the sampling of actions.

    Attributes:
        plan: how episodes begin and end.
        renew: called before each step; takes up newer weights, and tells whether it did. It may
            raise, to end the loop.
        reports_success: whether the env has said of an episode that it succeeded or not.
        rollouts: how many have begun, those before a resumption included.
    """

    def __init__(
        self, env: VectorEnv, policy: Policy, segments: Sequence[Segment], seed: int
    ) -> None:
        self.env = env
        self.policy = policy
        self.seed = seed
        self.generator = torch.Generator(policy.version.device).manual_seed(seed)
        self.plan = EpisodePlan()
        self.phase: PhaseTimer = no_phases
        self.renew: Callable[[Callable[[], None]], bool] | None = None
        self.reports_success = False
        self._reports = EnvReports()
        self._with_final: list[int] = []
        self._lanes = [
            Lane(
                time_major(segment.rollout),
                time_major(segment.rollout)["success"].unbind(0),
                policy.rollout_actor(segment.rollout),
                env.rollout_stepper(segment.rollout),
            )
            for segment in segments
        ]
        self._finished = torch.zeros(env.num_envs, dtype=torch.bool, device=policy.version.device)
        self.rollouts = 0
        self._next: Observation | None = None

    @property
    def ways(self) -> dict[str, str]:
        """By what it acts and steps: the names of their classes."""
        lane = self._lanes[0]
        return {"acting": type(lane.actor).__name__, "stepping": type(lane.stepper).__name__}

    @torch.no_grad()
    def run(self, segment: Segment) -> tuple[int, dict[str, Any]]:
        """Fill a segment.

        Returns:
            how many steps were taken, fewer than T where the plan says so; and what a rollout does
            not hold, see `Collector.account_for`.
        """
        begins_anew = self._next is None or self.plan.reset_every_rollout
        observation = self._reset() if begins_anew else self._next
        if begins_anew:
            first = segment.steps[0].get("observation")
            check_like(type(self.env).__name__, observation, first, "observation")
        copy_tree(segment.steps[0].get("observation"), observation)
        self.rollouts += 1
        self._finished.zero_()
        storage, success, actor, stepper = lane = self._lanes[segment.index]
        storage["success"].zero_()
        self._with_final.clear()
        since = steps = 0
        with self.phase("inference"):
            actor.begin(self.generator)
        slots = len(storage) - 1
        may_end_early = self.plan.first_episode_only
        while steps < slots and not (may_end_early and self._all_have_finished(storage, steps)):
            if self.renew is not None and self.renew(lambda: self._close(lane, since, steps)):  # noqa: B023  # called at once
                actor.begin(self.generator, steps)
                since = steps
            with self.phase("inference"):
                actor.act(steps)
            with self.phase("env"):
                info = stepper.step(steps)
            if info:
                self._record(success, steps, info)
            steps += 1
        self._close(lane, since, steps)
        self._check_ends(storage, steps)
        torch.logical_or(storage["terminated"], storage["truncated"], out=storage["done"])
        self._next = segment.steps[steps].get("observation")
        return steps, {"begins_anew": begins_anew, "reports": self._reports.close_rollout()}

    def _close(self, lane: Lane, start: int, stop: int) -> None:
        """Write what the weights of slots `start` to `stop` - 1 have to say of them."""
        if start == stop:
            return
        with self.phase("inference"):
            lane.actor.finish(start, stop)
        lane.storage["policy_version"][start:stop].fill_(self.policy.version)

    def _record(self, success: Sequence[Tensor], t: int, info: dict[str, Any]) -> None:
        """Write what only some envs say, or only at some steps."""
        if "final_obs" in info:
            self._with_final.append(t)
        if "success" in info:
            success[t].copy_(info["success"])
            self.reports_success = True
        self._reports.add(info)

    def _check_ends(self, storage: TensorDict, steps: int) -> None:
        """Refuse a rollout in which time cut an episode and the env hid what it had come to.

        Once per rollout, and without a look at a device where every step had a final observation.

        Raises:
            ConfigurationError: naming the env, the key, and what to return.
        """
        if len(self._with_final) < steps:
            cut = storage["truncated"][:steps] & ~storage["terminated"][:steps]
            cut[self._with_final] = False
            refuse_missing_end(type(self.env).__name__, cut.cpu())

    def _all_have_finished(self, storage: TensorDict, steps: int) -> bool:
        """Tell whether each row has finished an episode, so that no further step is wanted."""
        if steps == 0:
            return False
        self._finished |= storage["terminated"][steps - 1] | storage["truncated"][steps - 1]
        look = self._finished.device.type == "cpu" or steps % LOOK_EVERY == 0
        return look and bool(self._finished.all())

    def _reset(self) -> Observation:
        """Begin new episodes, with the same state for all members of a group.

        Raises:
            ConfigurationError: where members of a group do not begin alike.
        """
        size = self.plan.group_size
        if self.rollouts == 0 and size == 1:
            return self.env.reset(seed=self.seed)[0]
        drawn = np.random.SeedSequence([self.seed, self.rollouts])
        seeds = drawn.generate_state(self.env.num_envs // size).repeat(size)
        observation, _ = self.env.reset(seed=seeds.tolist())
        if not _alike(observation, size):
            raise ConfigurationError(
                f"The {size} members of a group began their episodes in different states, though "
                f"their envs were given the same seed. {type(self.env).__name__} must draw its "
                "starts from the seed of `reset` alone."
            )
        return observation

    def state_dict(self) -> dict[str, Any]:
        """Return what the next rollout depends on, as plain numbers and tensors."""
        goes_on = self._next is not None and not self.plan.reset_every_rollout
        return {
            "env": self.env.state_dict() if goes_on else None,
            "generator": self.generator.get_state(),
            "rollouts": self.rollouts,
            "reports_success": self.reports_success,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state.

        Warns where the env cannot be restored: the next rollout then begins new episodes.
        """
        self.generator.set_state(state["generator"].cpu())
        self.rollouts = state["rollouts"]
        self.reports_success = state["reports_success"]
        if self.plan.reset_every_rollout or self.rollouts == 0:
            return  # new episodes begin in any case
        try:
            if state["env"] is None:
                raise RestoreError("its state could not be saved")
            self._next = self.env.load_state_dict(state["env"])
        except RestoreError as error:
            warnings.warn(
                f"The env could not be restored to where the checkpoint left it ({error}): its "
                "episodes restart, and the resumed run will differ from an uninterrupted one.",
                stacklevel=2,
            )


def _alike(observation: Any, size: int) -> bool:
    """Tell whether the rows of each group are equal, bit for bit."""
    if isinstance(observation, Tensor):
        groups = observation.unflatten(0, (-1, size))
        return bool((groups == groups[:, :1]).all())
    return all(_alike(child, size) for child in observation.values())
