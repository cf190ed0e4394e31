"""An arm with a gripper that somebody helps now and then, small enough for a test."""

from functools import partial

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from lightning_rl import GymnasiumEnv, MixedReplay, ReplayBuffer
from lightning_rl.envs import PenaltyTerms

OBSERVATION = Box(-9.0, 9.0, (4,), np.float32)
ACTION = Box(np.array([-1.0, -1.0, 0.0], np.float32), np.array([1.0, 1.0, 2.0], np.float32))
HELP = np.array([0.5, -0.5, 1.0], np.float32)
"""What is done instead: a move, and no command to the gripper."""


class Arm(gymnasium.Env):
    """It pays to close the gripper at the goal; a script takes over at each third step, if it is to.

    Its info says `discrete_penalty` where a closed gripper is opened, or an open one closed.
    """

    observation_space, action_space = OBSERVATION, ACTION

    def __init__(self, helped=True):
        self.helped = helped
        self.metadata = {"render_modes": [], **({"reports_interventions": True} if helped else {})}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-1, 1, 2)
        self.closed, self.age = False, 0
        return self.seen(), {}

    def seen(self):
        return np.array([*self.at, 2.0 * self.closed - 1.0, self.age / 10], np.float32)

    def step(self, action):
        self.age += 1
        taken = self.helped and self.age % 3 == 0
        action = HELP if taken else action
        command = np.rint(action[2])
        changed = command == (2.0 if self.closed else 0.0)
        self.closed = self.closed != changed
        self.at = np.clip(self.at + 0.2 * action[:2], -1, 1)
        success = bool(self.closed and np.abs(self.at).max() < 0.3)
        info = {"success": success, "discrete_penalty": -0.5 * changed}
        if taken:
            info |= {"executed_action": action, "intervened": True}
        return self.seen(), float(success), success, False, info


gymnasium.register("tests/Arm-v0", Arm, max_episode_steps=12)


def helped_arm(num_envs):
    wrappers = [partial(PenaltyTerms, terms={"discrete_penalty": 1.0})]
    return GymnasiumEnv(num_envs, "tests/Arm-v0", wrappers=wrappers)


def mixed(*args, **kwargs):
    """Fewer than are collected, and fewer than somebody intervenes in."""
    parts = {
        "online": partial(ReplayBuffer, capacity=60),
        "offline": partial(ReplayBuffer, capacity=16),
    }
    return MixedReplay(*args, **parts, **kwargs)
