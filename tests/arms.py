"""An arm with a gripper that somebody helps now and then, small enough for a test."""

from functools import partial

import gymnasium
import numpy as np
from gymnasium.spaces import Box

from lightning_rl import GymnasiumEnv, MixedReplay, ReplayBuffer
from lightning_rl.extensions.wrappers.penalty import PenaltyTerms
from tests.envs import ScriptedEnv

OBSERVATION = Box(-9.0, 9.0, (4,), np.float32)
ACTION = Box(np.array([-1.0, -1.0, 0.0], np.float32), np.array([1.0, 1.0, 2.0], np.float32))
HELP = np.array([0.5, -0.5, 1.0], np.float32)
"""What is done instead: a move, and no command to the gripper."""


def arm(helped=True, space=OBSERVATION, view=lambda seen: seen):
    """It pays to close the gripper at the goal; a script takes over at each third step, if it is to.

    Its info says `discrete_penalty` where a closed gripper is opened, or an open one closed.
    """

    def begin(env):
        env.place, env.closed = env.np_random.uniform(-1, 1, 2), False

    def act(env):
        env.helps = helped and env.age % 3 == 0
        env.action = HELP if env.helps else env.action
        command = np.rint(env.action[2])
        env.changed = command == (2.0 if env.closed else 0.0)
        env.closed = env.closed != env.changed
        env.place = np.clip(env.place + 0.2 * env.action[:2], -1, 1)
        env.success = bool(env.closed and np.abs(env.place).max() < 0.3)

    def describe(env):
        intervention = {"executed_action": env.action, "intervened": True} if env.helps else {}
        return {"success": env.success, "discrete_penalty": -0.5 * env.changed} | intervention

    def observe(env):
        return view(np.array([*env.place, 2.0 * env.closed - 1.0, env.age / 10], np.float32))

    return ScriptedEnv(
        space,
        ACTION,
        begin=begin,
        act=act,
        observe=observe,
        reward=lambda env: float(env.success),
        terminated=lambda env: env.success,
        info=describe,
        metadata={"reports_interventions": True} if helped else {},
    )


gymnasium.register("tests/Arm-v0", arm, max_episode_steps=12)


def helped_arm(num_envs, weight=1.0, **settings):
    wrappers = [partial(PenaltyTerms, terms={"discrete_penalty": weight})]
    return GymnasiumEnv(num_envs, "tests/Arm-v0", wrappers=wrappers, **settings)


def mixed(*args, **kwargs):
    """Fewer than are collected, and fewer than somebody intervenes in."""
    parts = {
        "online": partial(ReplayBuffer, capacity=60),
        "offline": partial(ReplayBuffer, capacity=16),
    }
    return MixedReplay(*args, **parts, **kwargs)
