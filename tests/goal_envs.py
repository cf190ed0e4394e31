"""Goal envs small enough for a test: one as in Gymnasium-Robotics, and one of tensors."""

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict

from lightning_rl import TorchEnv

PLACE = Box(-1.0, 1.0, (2,), np.float32)


class Point(gymnasium.Env):
    """A point moves towards a goal, which ends the episode; so does leaving the square, wherever the goal is.

    Its info has the entries `moved`, a number, and `force` [3].
    """

    observation_space = Dict(observation=PLACE, achieved_goal=PLACE, desired_goal=PLACE)
    action_space = PLACE

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.goal = self.np_random.uniform(-0.9, 0.9, (2, 2))
        return self.seen(), {}

    def seen(self):
        at, goal = self.at.astype(np.float32), self.goal.astype(np.float32)
        return {"observation": at, "achieved_goal": at, "desired_goal": goal}

    def step(self, action):
        self.at = self.at + 0.4 * action
        lost = bool(np.abs(self.at).max() > 1)
        self.at = self.at.clip(-1, 1)
        info = {"moved": np.float32(np.abs(action).sum()), "force": [lost, 2.0, action[0]]}
        ended = self.compute_terminated(self.at, self.goal, info) or lost
        return self.seen(), self.compute_reward(self.at, self.goal, info), ended, False, info

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -(np.linalg.norm(achieved_goal - desired_goal, axis=-1) > 0.3).astype(np.float32)

    def compute_terminated(self, achieved_goal, desired_goal, info):
        """Of one goal alone: for several, it would return one answer."""
        return bool(np.linalg.norm(achieved_goal - desired_goal) <= 0.3)


gymnasium.register("tests/Point-v0", Point, max_episode_steps=6)


MOVES = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


class GoalProbe(TorchEnv):
    """Move a point by at most 0.1 in each direction, or by one of four moves, to within 0.1 of a goal, in 50 steps."""

    start_size = 4

    def __init__(self, num_envs, discrete=False):
        actions = Discrete(4) if discrete else PLACE
        super().__init__(num_envs, Point.observation_space, actions, 50)
        self.discrete = discrete

    @property
    def goals(self):
        return self.judge

    def judge(self, achieved, desired):
        reached = (achieved - desired).square().sum(-1) < 0.1**2
        return reached.float() - 1.0, reached

    def initial_state(self, uniform):
        start, goal = (2.0 * uniform - 1.0).split(2, -1)
        return TensorDict({"place": start, "goal": goal}, [len(uniform)])

    def observe(self, state):
        place, goal = state["place"], state["goal"]
        seen = {"observation": place, "achieved_goal": place, "desired_goal": goal}
        return TensorDict(seen, state.batch_size)

    def transition(self, state, action):
        move = MOVES[action] if self.discrete else action.clamp(-1.0, 1.0)
        place = (state["place"] + 0.1 * move).clamp(-1.0, 1.0)
        reward, ended = self.judge(place, state["goal"])
        moved = TensorDict({"place": place, "goal": state["goal"]}, state.batch_size)
        return moved, reward, ended, {"success": ended}
