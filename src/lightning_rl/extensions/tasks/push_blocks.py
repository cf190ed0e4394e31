"""Push one of two blocks, seen in a picture, to the side that an instruction names."""

from collections.abc import Sequence

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extend.errors import require
from lightning_rl.extensions.managers.actions import DeltaPosition
from lightning_rl.extensions.managers.term import Metric, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.tasks.base import Task
from lightning_rl.extensions.tasks.drawing import BLUE, INK, PAPER, RED, Canvas
from lightning_rl.kwargs import PushBlocksKwargs, Unpack

BLOCK, PUSHER, TABLE = 0.14, 0.05, 1.0
"""m: half edges of the blocks, of the pusher and of the table."""

MAX_MOVE, DISTANCE = 0.1, 0.25
"""m: maximum move of the pusher per step along each axis; required move of a block."""

BLOCK_X, BLOCK_Y, PUSHER_X, PUSHER_Y = 0.5, (0.3, 0.6), 0.9, 0.05
"""Initial positions, in m.

Blocks at most BLOCK_X left or right of the middle, one above and one below; the pusher in the
corridor between them.
"""

BEHIND, ALIGNED = 0.26, 0.04
"""m, for the expert: pushing point behind the block's centre; tolerance from its middle."""

WORDS = ("", "push", "the", "red", "blue", "block", "to", "left", "right")
"""Words of the instructions; a word's index is its token, and 0 is padding."""

INSTRUCTIONS = tuple(
    f"push the {colour} block to the {side}"
    for colour in ("red", "blue")
    for side in ("left", "right")
)
"""All instructions."""


def progress(env: EnvView) -> Tensor:
    """Return by how many m the named block was moved to the named side, [N]."""
    return env.measurements["moved"] - moved_distance(env.previous_state)


def moved_far(env: EnvView, distance: float) -> Tensor:
    """Return whether the named block was moved by `distance` m to the named side, [N] bool."""
    return env.measurements["moved"] >= distance


def mistaken(env: EnvView, distance: float) -> Tensor:
    """Return whether a block was moved wrongly by `distance` m, [N] bool."""
    return (sideways(env.state).abs() >= distance).any(1) & ~moved_far(env, distance)


def mistake(env: EnvView, distance: float) -> Tensor:
    """Return 1 after a mistake, [N]; see `mistaken`."""
    return mistaken(env, distance).float()


def out_of_time(env: EnvView) -> Tensor:
    """Return whether the time is over, which is a failure, [N] bool."""
    return env.last_step


class PushBlocks(Task):
    """Push the red or the blue block to the left or to the right, as the instruction says.

    Pusher and blocks are squares that do not rotate. A block that overlaps the pusher or a pushed
    block moves along the axis of least overlap.

    Observation: `rgb` uint8 [size, size, 3], without the instruction; `proprio` [2], the pusher's
    position in m; `language` int64 [7], the tokens of the instruction (see `WORDS`). Action [2].

    Reward terms:
        success: 1 if the named block was moved by 0.25 m to the named side. Weight 1.
        progress: m that the named block was moved to that side. Off; usually 1.

    Success is `terminated`. Failures are `terminated`, too: any other block displacement of 0.25 m
    along x, and the last step of the time limit (time is part of the task). Metrics: `moved`,
    displacement of the named block to the named side in m; `mistake`, 1 after a wrong displacement.

    Args:
        num_envs: N.
        size: height and width of a picture, in pixels.
        instructions: places in `INSTRUCTIONS` of those that are drawn; null for all.
        kwargs: see `Task`, without `pictures`. Default action: `DeltaPosition(0.1, clip=1)`; for
            all action terms the pusher moves at most 0.1 m per step along each axis and stays on
            the table. The time limit is 48 steps.

    Raises:
        ConfigurationError: for another instruction.
    """

    observation_size, start_size = 2, 8
    default_action, default_episode_steps = DeltaPosition(MAX_MOVE, clip=1.0), 48
    render_fps = 10
    default_rewards = {  # noqa: RUF012
        "success": Reward("is_success", weight=1.0),
        "progress": Reward(progress, weight=0.0),
    }
    default_terminations = {  # noqa: RUF012
        "success": Termination(moved_far, {"distance": DISTANCE}, ends="success"),
        "mistake": Termination(mistaken, {"distance": DISTANCE}),
        "time": Termination(out_of_time),
    }
    default_metrics = {  # noqa: RUF012
        "moved": Metric("measurement", {"name": "moved"}),
        "mistake": Metric(mistake, {"distance": DISTANCE}),
    }
    action_kinds = ("position",)

    def __init__(
        self,
        num_envs: int,
        *,
        size: int = 64,
        instructions: Sequence[int] | None = None,
        **kwargs: Unpack[PushBlocksKwargs],
    ) -> None:
        # Before `super().__init__`, which calls `make_constants`.
        self.size = size
        every = range(len(INSTRUCTIONS))
        self.instructions = tuple(every if instructions is None else instructions)
        require(
            bool(self.instructions) and set(self.instructions) <= set(every),
            f"PushBlocks has no instructions={list(self.instructions)}: name at least one of "
            + ", ".join(f"{place} ({text})" for place, text in enumerate(INSTRUCTIONS))
            + ".",
        )
        super().__init__(num_envs, pictures=None, **kwargs)
        if self.observations:
            return  # the space is theirs
        self.single_observation_space = gymnasium.spaces.Dict(
            {
                "language": gymnasium.spaces.Box(
                    0, len(WORDS) - 1, (self._instructions.shape[1],), np.int64
                ),
                "proprio": gymnasium.spaces.Box(-TABLE, TABLE, (2,), np.float32),
                "rgb": gymnasium.spaces.Box(0, 255, (size, size, 3), np.uint8),
            }
        )

    def make_constants(self) -> None:
        self._instructions = torch.tensor([tokens(text) for text in INSTRUCTIONS]).to(self.device)
        self._drawn = torch.tensor(self.instructions).to(self.device)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        signed = uniform * 2.0 - 1.0
        low, high = BLOCK_Y
        # One block lies above the corridor, the other one below.
        red_above = (uniform[:, 0] < 0.5).to(torch.float32) * 2.0 - 1.0
        heights = low + uniform[:, 1:3] * (high - low)
        red = torch.stack((signed[:, 3] * BLOCK_X, heights[:, 0] * red_above), 1)
        blue = torch.stack((signed[:, 4] * BLOCK_X, heights[:, 1] * -red_above), 1)
        pusher = torch.stack((signed[:, 5] * PUSHER_X, signed[:, 6] * PUSHER_Y), 1)
        task = self._drawn[(uniform[:, 7] * len(self._drawn)).to(torch.int64)]
        return _state(pusher, red, blue, task, _places(red, blue))

    def with_derived_entries(self, state: TensorDict) -> TensorDict:
        # A block that an event has moved was not pushed.
        state["begin"] = _places(state["red"], state["blue"])
        return super().with_derived_entries(state)

    def observe(self, state: TensorDict) -> TensorDict:
        fields = {
            "language": self._instructions[state["task"]],
            "proprio": state["pusher"],
            "rgb": self.draw(state, self.size, self.size),
        }
        return TensorDict(fields, [len(state)])

    def simulate(self, env: EnvView) -> TensorDict:
        state, old_pusher = env.state, env.state["pusher"]
        move = (
            self.action.target(self.action.clipped_action(env.action), old_pusher, env) - old_pusher
        )
        edge = TABLE - PUSHER
        pusher = (old_pusher + move.clamp(-MAX_MOVE, MAX_MOVE)).clamp(-edge, edge)
        red, blue = push_blocks(pusher, state["red"], state["blue"])
        return _state(pusher, red, blue, state["task"], state["begin"])

    def measure(self, env: EnvView) -> dict[str, Tensor]:
        return {"moved": moved_distance(env.state)}

    def draw(self, state: TensorDict, height: int, width: int) -> Tensor:
        canvas = Canvas(len(state), height, width, background=PAPER, device=self.device)
        canvas.box(state["red"], (BLOCK, BLOCK), RED)
        canvas.box(state["blue"], (BLOCK, BLOCK), BLUE)
        # Last, so that no block hides it.
        canvas.box(state["pusher"], (PUSHER, PUSHER), INK)
        return canvas.pixels()

    def expert(self, state: TensorDict) -> Tensor:
        """Return an expert's action [M, 2] in [-1, 1] for a state [M].

        The path: along the corridor behind the named block, up or down to its height, then forward.
        """
        pusher, block = state["pusher"], _named(state)
        side = _side(state)
        offset = block - pusher
        # distance along the push direction to the pushing point
        gap = (offset[:, 0] - side * BEHIND) * side
        is_behind = gap > -0.02
        aligned = (offset[:, 1].abs() < ALIGNED) & (offset[:, 0] * side > BLOCK)
        to_place = offset[:, 0] - side * BEHIND
        in_corridor = pusher[:, 1].abs() < BLOCK_Y[0] - BLOCK - PUSHER
        # Do not move along x next to the block: the pusher would push it from the side.
        x = torch.where(is_behind | in_corridor, to_place, 0.0) / MAX_MOVE
        x = torch.where(aligned, side, x)
        y = torch.where(aligned | is_behind, offset[:, 1], -pusher[:, 1]) / MAX_MOVE
        return torch.stack((x, y), 1).clamp(-1.0, 1.0)


def push_blocks(pusher: Tensor, red: Tensor, blue: Tensor) -> tuple[Tensor, Tensor]:
    """Move the blocks that overlap; return the centres of red and blue, both [N, 2], in m.

    Args:
        pusher: [N, 2], its centre after its move.
        red: [N, 2], its centre before.
        blue: [N, 2], its centre before.
    """
    red_pushed = _give_way(red, pusher, BLOCK + PUSHER)
    blue_pushed = _give_way(blue, pusher, BLOCK + PUSHER)
    # A block that the pusher has moved pushes the other one in turn.
    is_red = (red_pushed != red).any(1, keepdim=True)
    blue_after = torch.where(is_red, _give_way(blue_pushed, red_pushed, 2 * BLOCK), blue_pushed)
    red_after = torch.where(is_red, red_pushed, _give_way(red_pushed, blue_pushed, 2 * BLOCK))
    edge = TABLE - BLOCK
    return red_after.clamp(-edge, edge), blue_after.clamp(-edge, edge)


def moved_distance(state: TensorDict) -> Tensor:
    """Return the displacement [M] of the named block to the named side, in m, of a state [M]."""
    red, blue = sideways(state).unbind(1)
    distance: Tensor = torch.where(state["task"] < 2, red, blue) * _side(state)
    return distance


def sideways(state: TensorDict) -> Tensor:
    """Return the displacements [M, 2] to the right of the red and the blue block, in m."""
    moved: Tensor = _places(state["red"], state["blue"]) - state["begin"]
    return moved


def _places(red: Tensor, blue: Tensor) -> Tensor:
    return torch.stack((red[:, 0], blue[:, 0]), 1)


def tokens(text: str) -> list[int]:
    """Return the tokens of an instruction of `WORDS`."""
    return [WORDS.index(word) for word in text.split()]


def text_of(language: Tensor) -> str:
    """Return the instruction of tokens [S]."""
    return " ".join(WORDS[token] for token in language.tolist() if token)


def _give_way(block: Tensor, intruder: Tensor, reach: float) -> Tensor:
    offset = block - intruder
    overlap = (reach - offset.abs()).clamp_min(0.0)
    touching = (overlap[:, 0] > 0) & (overlap[:, 1] > 0)
    # The axis with less overlap is the shortest way out.
    along_x = overlap[:, 0] < overlap[:, 1]
    axis = torch.stack((along_x, ~along_x), 1) & touching[:, None]
    direction = (offset >= 0).to(torch.float32) * 2.0 - 1.0
    return block + torch.where(axis, overlap * direction, 0.0)


def _named(state: TensorDict) -> Tensor:
    return torch.where((state["task"] < 2)[:, None], state["red"], state["blue"])


def _side(state: TensorDict) -> Tensor:
    # Left and right alternate in `INSTRUCTIONS`.
    is_right: Tensor = state["task"] % 2
    return is_right.to(torch.float32) * 2.0 - 1.0


def _state(pusher: Tensor, red: Tensor, blue: Tensor, task: Tensor, begin: Tensor) -> TensorDict:
    values = {"pusher": pusher, "red": red, "blue": blue, "task": task, "begin": begin}
    return TensorDict(values, [len(pusher)])
