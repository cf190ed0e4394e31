"""Envs with the right action in closed form.

Source: Andy Jones 2021, "Debugging RL, Without the Agonizing Pain" (probe environments).
"""

import math

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import TorchEnv
from lightning_rl.extend.envs import Observation, Transition


class TwoDoors(TorchEnv):
    """Walk through one of two doors by eight numbers; only the first door pays.

    The doors are +c and -c, with c_i = 0.7 cos(1.5 o + 0.4 i) for an observed o. An episode is
    eight actions [1]; its reward, at the end, is 1 if their mean distance from c is below 0.15. The
    expert walks through each door half of the time. With chunks of 8 (`ActionChunk`), a clone of
    both doors earns about 0.4, a Gaussian clone, whose mean lies between the doors, earns nothing,
    and the best policy earns 1.

    Observation: `proprio` [2], o in [-1, 1] and the step, divided by 8.
    """

    length, start_size = 8, 10

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        box = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        space = gymnasium.spaces.Dict({"proprio": box})
        action = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        super().__init__(num_envs, space, action, self.length, device)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        place = uniform[:, :1] * 2.0 - 1.0
        # Standard normal by Box and Muller, from pairs of numbers.
        radius = (-2.0 * (1.0 - uniform[:, 2:6]).log()).sqrt()
        angle = 2.0 * math.pi * uniform[:, 6:10]
        values = {
            "place": place,
            "door": torch.where(uniform[:, 1:2] < 0.5, -1.0, 1.0),
            "deviation": 0.05 * torch.cat((radius * angle.cos(), radius * angle.sin()), 1),
            "distance": torch.zeros_like(place),
            "step": torch.zeros_like(place),
        }
        return TensorDict(values, [len(uniform)], device=self.device)

    def observe(self, state: TensorDict) -> Observation:
        proprio = torch.cat((state["place"], state["step"] / self.length), 1)
        return TensorDict({"proprio": proprio}, state.batch_size)

    def transition(self, state: TensorDict, action: Tensor) -> Transition:
        distance = state["distance"] + (action - self.door(state)).abs() / self.length
        # A copy, because `transition` must not write into its state.
        next_state = state.copy().update({"distance": distance, "step": state["step"] + 1})
        terminated = (next_state["step"] >= self.length).squeeze(1)
        success = terminated & (distance.squeeze(1) < 0.15)
        return next_state, success.float(), terminated, {"success": success}

    def door(self, state: TensorDict) -> Tensor:
        """Return c_i [M, 1] of the next step i of a state [M]."""
        door: Tensor = 0.7 * torch.cos(1.5 * state["place"] + 0.4 * state["step"])
        return door

    def expert(self, state: TensorDict) -> Tensor:
        """Return the expert's action [M, 1] for a state [M]."""
        # A final state is one step beyond the last deviation.
        noise = state["deviation"].gather(1, state["step"].long().clamp(max=self.length - 1))
        action: Tensor = state["door"] * self.door(state) + noise
        return action


class FiveDoors(TorchEnv):
    """Walk through five doors within ten tries; a try is one action of eight numbers.

    The right door of a try is +c, and -c is locked, with c_i = 0.7 cos(1.5 o + 0.4 i) for an
    observed o, which changes at each try. A try succeeds if its mean distance from c is below 0.15.
    An episode succeeds at the fifth door; the tenth try truncates it. The expert walks to each door
    half of the time. A clone succeeds in about 0.1 of the episodes.

    Observation: `proprio` [3], o in [-1, 1], the number of doors divided by 5, and of tries by 10.
    """

    doors, tries, length, start_size = 5, 10, 8, 10

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        box = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
        space = gymnasium.spaces.Dict({"proprio": box})
        action = gymnasium.spaces.Box(-1.0, 1.0, (self.length,), np.float32)
        super().__init__(num_envs, space, action, self.tries, device)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        zeros = torch.zeros_like(uniform[:, :1])
        return TensorDict({"drawn": uniform, "passed": zeros, "tried": zeros}, [len(uniform)])

    def observe(self, state: TensorDict) -> Observation:
        place = state["drawn"][:, :1] * 2.0 - 1.0
        numbers = (place, state["passed"] / self.doors, state["tried"] / self.tries)
        return TensorDict({"proprio": torch.cat(numbers, 1)}, state.batch_size)

    def transition(self, state: TensorDict, action: Tensor) -> Transition:
        correct = (action - self.door(state)).abs().mean(1, keepdim=True) < 0.15
        passed, tried = state["passed"] + correct, state["tried"] + 1
        # Each try has a new observation.
        entries = {"drawn": self.uniform(self.start_size), "passed": passed, "tried": tried}
        success = (passed >= self.doors).squeeze(1)
        info = {"success": success, "metrics": {"right": correct.squeeze(1).float()}}
        return TensorDict(entries, state.batch_size), success.float(), success, info

    def door(self, state: TensorDict) -> Tensor:
        """Return the right door c [M, 8] of a state [M]."""
        place = state["drawn"][:, :1] * 2.0 - 1.0
        number = torch.arange(self.length, device=place.device)
        return 0.7 * torch.cos(1.5 * place + 0.4 * number)

    def expert(self, state: TensorDict) -> Tensor:
        """Return the expert's action [M, 8] for a state [M]."""
        uniform = state["drawn"]
        side = torch.where(uniform[:, 1:2] < 0.5, -1.0, 1.0)
        # Standard normal by Box and Muller, from pairs of numbers.
        radius = (-2.0 * (1.0 - uniform[:, 2:6]).log()).sqrt()
        angle = 2.0 * math.pi * uniform[:, 6:10]
        noise = torch.cat((radius * angle.cos(), radius * angle.sin()), 1)
        action: Tensor = side * self.door(state) + 0.05 * noise
        return action
