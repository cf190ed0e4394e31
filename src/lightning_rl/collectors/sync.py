"""Collect rollouts in the learner's own thread, with the learner's own weights."""

import warnings
from typing import Any

from tensordict import TensorDict

from lightning_rl.buffers import allocate_segments
from lightning_rl.collectors.base import Collector
from lightning_rl.collectors.loop import RolloutLoop
from lightning_rl.envs import VectorEnv
from lightning_rl.policies import Policy


class SyncCollector(Collector):
    """Step the env T times with the current policy; policy lag is 0.

    See `Collector` for the arguments.

    The rollout lives in one preallocated storage on the policy's device, written through views that
    are made once.
    """

    def __init__(self, env: VectorEnv, policy: Policy, num_steps: int, seed: int) -> None:
        super().__init__(env, policy, num_steps, seed)
        (self._segment,) = allocate_segments(
            1,
            env.single_observation_space,
            env.single_action_space,
            env.num_envs,
            num_steps,
            extra_fields=policy.extra_fields | env.extra_fields,
            device=policy.version.device,
        )
        self._loop = RolloutLoop(env, policy, [self._segment], seed)

    def collect(self) -> TensorDict:
        """See `Collector.collect`; fewer than T steps where the plan ends the rollout early."""
        self._loop.plan, self._loop.phase = self.plan, self.phase
        steps, notes = self._loop.run(self._segment)
        self._segment.clear_padding(steps)
        self.reports_success = self._loop.reports_success
        # The container is new each time: what an algorithm adds or replaces stays its own.
        return self.account_for(self._segment.rollout[:, : steps + 1], **notes)

    def state_dict(self) -> dict[str, Any]:
        """See `Collector.state_dict`."""
        return super().state_dict() | {"loop": self._loop.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Collector.load_state_dict`."""
        super().load_state_dict(state)
        if unread := state.get("buffer", {}).get("windows"):
            warnings.warn(
                f"{len(unread)} rollouts of the checkpoint, which an AsyncCollector had collected "
                "ahead, are dropped: they are of older weights.",
                stacklevel=2,
            )
            self.skip_rollout()
        self._loop.plan = self.plan
        self._loop.load_state_dict(state["loop"])
