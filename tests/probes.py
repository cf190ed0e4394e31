"""Envs whose best policy is known: what has to be remembered, what is allowed, actions of parts."""

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from tensordict import TensorDict

from lightning_rl import TorchEnv
from tests.envs import NUMBER, UNIT


class Probe(TorchEnv):
    """A probe that shows -1 or +1, drawn at the start of an episode."""

    start_size = 1

    def __init__(self, num_envs: int, action_space, max_episode_steps: int, device):
        super().__init__(num_envs, NUMBER, action_space, max_episode_steps, device)

    def initial_state(self, uniform):
        sign = torch.where(uniform < 0.5, -1.0, 1.0)
        fields = {"sign": sign, "step": torch.zeros_like(sign)}
        return TensorDict(fields, [len(sign)], device=self.device)

    def observe(self, state):
        return state["sign"]

    def _advance(self, state):
        fields = {"sign": state["sign"], "step": state["step"] + 1}
        return TensorDict(fields, state.batch_size, device=self.device)


class TimeLimitProbe(Probe):
    """Pay 1 per step, and truncate episodes after `max_episode_steps`: V = 1 / (1 - gamma)."""

    def __init__(self, num_envs: int, max_episode_steps: int = 5, device="cpu"):
        super().__init__(num_envs, Discrete(2), max_episode_steps, device)

    def observe(self, state):
        return torch.zeros_like(state["sign"])  # constant: the elapsed time is hidden

    def transition(self, state, action):
        reward = torch.ones(self.num_envs, device=self.device)
        return self._advance(state), reward, torch.zeros_like(reward, dtype=torch.bool), {}


class ValueProbe(Probe):
    """Show -1 or +1, and pay it after `delay` steps, at the end.

    At the start V(s) = gamma^(delay - 1) * s.
    """

    def __init__(self, num_envs: int, delay: int = 1, device="cpu"):
        super().__init__(num_envs, Discrete(2), delay + 1, device)
        self.delay = delay

    def transition(self, state, action):
        moved = self._advance(state)
        terminated = moved["step"].squeeze(-1) >= self.delay
        return moved, torch.where(terminated, state["sign"].squeeze(-1), 0.0), terminated, {}


class ActionProbe(Probe):
    """End after one step, and pay 1 for the right action.

    Discrete: action 1 if the observation is +1, else 0. Continuous: 1 - (a - observation / 2)^2.
    """

    def __init__(self, num_envs: int, continuous: bool = False, device="cpu"):
        super().__init__(num_envs, UNIT if continuous else Discrete(2), 2, device)
        self.continuous = continuous

    def transition(self, state, action):
        sign = state["sign"].squeeze(-1)
        if self.continuous:
            reward = 1.0 - (action.reshape(-1) - 0.5 * sign).square()
        else:
            reward = (action == (sign > 0)).float()
        terminated = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return self._advance(state), reward, terminated, {"success": reward > 0.9}


class RecallProbe(Probe):
    """Show -1 or +1 in the first step alone, and pay 1 where the last action is what it asked for.

    The action counts `delay` steps later, when a second number is 1; that is action 1 after +1,
    else 0. A policy without a memory earns 0.5, one that remembers 1.
    """

    def __init__(self, num_envs: int, delay: int = 20, device="cpu"):
        super().__init__(num_envs, Discrete(2), delay + 2, device)
        self.single_observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.delay = delay

    def observe(self, state):
        step = state["step"]
        shown = torch.where(step == 0, state["sign"], 0.0)
        return torch.cat([shown, (step == self.delay).float()], 1)

    def transition(self, state, action):
        asked = state["step"].squeeze(-1) == self.delay
        right = (action == (state["sign"].squeeze(-1) > 0)) & asked
        return self._advance(state), right.float(), asked, {"success": right}


class MaskProbe(Probe):
    """A corridor of 8 cells in which 18 of 20 actions do nothing, and other ones in each cell.

    In cell c action 7 c mod 20 goes on and action (7 c + 10) mod 20 goes back (not from the first
    one), for a reward of 1/8 and -1/8: who has left the last cell has got 1. That ends an episode,
    as 32 steps do. The observation is `cell` [8], 1 where one is, and `action_mask` [20].

    Args:
        masked: whether the observation has the mask; what the actions do is the same.
    """

    cells, actions = 8, 20

    def __init__(self, num_envs: int, masked: bool = True, device="cpu"):
        super().__init__(num_envs, Discrete(self.actions), 32, device)
        spaces = {"cell": Box(0, 1, (self.cells,), np.float32)}
        if masked:
            spaces["action_mask"] = MultiBinary(self.actions)
        self.single_observation_space = Dict(spaces)
        self.masked = masked

    def initial_state(self, uniform):
        cell = torch.zeros(len(uniform), dtype=torch.int64, device=self.device)
        return TensorDict({"cell": cell}, [len(cell)], device=self.device)

    def observe(self, state):
        cell = state["cell"].clamp(max=self.cells - 1)
        # Not `one_hot`, which looks at the values, and no graph can.
        fields = {"cell": (cell[:, None] == torch.arange(self.cells, device=cell.device)).float()}
        if self.masked:
            allowed = torch.zeros(len(cell), self.actions, dtype=torch.int8, device=self.device)
            both = torch.stack((7 * cell, 7 * cell + 10), -1) % self.actions
            fields["action_mask"] = allowed.scatter_(-1, both, 1)
        return TensorDict(fields, [len(cell)], device=self.device)

    def transition(self, state, action):
        cell = state["cell"]
        forward = action == 7 * cell % self.actions
        back = (action == (7 * cell + 10) % self.actions) & (cell > 0)
        moved = cell + forward.long() - back.long()
        fields = TensorDict({"cell": moved}, [self.num_envs], device=self.device)
        return fields, (moved - cell).float() / self.cells, moved >= self.cells, {}


class StructureProbe(Probe):
    """End after one step, and pay 1 where all parts of an action are right.

    With an observation s of -1 or +1, an action has an `arm` [2] and a `gripper` of three commands:
    it pays 1 - |arm - s / 2|^2 for gripper 2 where s = +1, for 0 where s = -1, else nothing.
    """

    def __init__(self, num_envs: int, device="cpu"):
        parts = {"arm": Box(-1.0, 1.0, (2,)), "gripper": Discrete(3)}
        super().__init__(num_envs, Dict(parts), 2, device)

    def transition(self, state, action):
        sign = state["sign"].squeeze(-1)
        near = 1.0 - (action["arm"] - 0.5 * sign[:, None]).square().sum(-1)
        reward = torch.where(action["gripper"] == 1 + sign.long(), near, 0.0)
        terminated = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return self._advance(state), reward, terminated, {"success": reward > 0.9}
