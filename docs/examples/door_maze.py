"""A maze that random moves do not solve: fetch keys, open doors, reach the goal."""

from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import TorchEnv

MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))
"""Rows and columns of the actions: right, down, left, up."""


class DoorMaze(TorchEnv):
    """Walk through a row of square rooms with a locked door between each two.

    The key of a door lies in the lower left corner of its room; the door is at the upper end of the
    right wall, and opens once its key was fetched. The start is the upper left corner of the first
    room, the goal the lower left corner of the last.

    Observation [size + rooms * size + rooms]: row and column as one-hot vectors, then one number
    per room that is 1 if its key was fetched. Actions: right, down, left, up. Reward 1 at the goal,
    which ends the episode, else 0.

    Args:
        num_envs: mazes, all alike.
        rooms: rooms in a row.
        size: cells along each edge of a room.
        max_episode_steps: steps of an episode.
        device: of the state.
    """

    start_size = 1

    def __init__(
        self,
        num_envs: int,
        rooms: int = 2,
        size: int = 6,
        max_episode_steps: int = 100,
        device: str = "cpu",
    ) -> None:
        self.rooms, self.size = rooms, size
        observations = gymnasium.spaces.Box(0, 1, (size + size * rooms + rooms,))
        super().__init__(
            num_envs, observations, gymnasium.spaces.Discrete(4), max_episode_steps, device
        )
        self._moves = torch.tensor(MOVES, device=device)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        rows = len(uniform)
        place = torch.zeros(rows, 2, dtype=torch.int64, device=uniform.device)
        keys = torch.zeros(rows, self.rooms, dtype=torch.bool, device=uniform.device)
        return TensorDict({"place": place, "keys": keys}, [rows])

    def observe(self, state: TensorDict) -> Tensor:
        row, column = state["place"].unbind(1)
        one_hot = torch.nn.functional.one_hot
        parts = (one_hot(row, self.size), one_hot(column, self.size * self.rooms), state["keys"])
        return torch.cat(parts, 1).float()

    def transition(
        self, state: TensorDict, action: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        size, keys = self.size, state["keys"]
        row, column = (state["place"] + self._moves[action]).unbind(1)
        row, column = row.clamp(0, size - 1), column.clamp(0, size * self.rooms - 1)
        room, next_room = state["place"][:, 1] // size, column // size
        # A wall stands between rooms; its door, in the first row, needs the key of the left room.
        left = torch.minimum(room, next_room)
        has_key = keys.gather(1, left[:, None]).squeeze(1)
        blocked = (room != next_room) & ~((row == 0) & has_key)
        column = torch.where(blocked, state["place"][:, 1], column)
        in_corner = (row == size - 1) & (column % size == 0)
        here = column[:, None] // size == torch.arange(self.rooms, device=keys.device)
        keys = keys | (in_corner[:, None] & here)
        goal = keys[:, -1]
        place = torch.stack((row, column), 1)
        following = TensorDict({"place": place, "keys": keys}, state.batch_size)
        return following, goal.float(), goal, {"success": goal}
