"""Fly a damped point to a goal, around obstacles."""

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extensions.managers.actions import Force
from lightning_rl.extensions.managers.term import Metric, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.tasks.base import Task, norm
from lightning_rl.extensions.tasks.drawing import BLUE, GREEN, GREY, INK, PAPER, RED, Canvas

TIMESTEP, DAMPING, MAX_FORCE, MASS = 1 / 60, 5.0, 5.0, 1.0
"""s per step, N s/m, N along each axis, kg: at most 1 m/s along each axis."""

STIFFNESS = 25.0
"""N/m of the position drive; nearly critically damped."""

SPEED_GAIN = 60.0
"""N s/m of the velocity drive; reaches its target in one step if the force suffices."""

SUCCESS, NEAR = 0.03, 0.05
"""m: distance of a success; width of the reward around the goal."""

START_RANGE, GOAL_RANGE, OBSTACLE_RANGE = 0.6, 0.7, 0.8
"""m from the middle along each axis for start, goal and obstacles; the world ends at 1 m."""

GOAL_APART, OBSTACLE_APART, RADII, CLEARANCE = 0.2, 0.25, (0.08, 0.15), 0.05
"""Distances in m between start, goal and obstacles.

Minimum distance from start to goal, and from an obstacle's centre to the goal; range of obstacle
radii; minimum distance from an obstacle's edge to the start.
"""

CELLS = 16
"""Obstacles are drawn from a grid with this many cells along each axis."""


def near_goal(env: EnvView, width: float) -> Tensor:
    """Return exp(-d^2 / (2 width^2)), d in m from the goal, [N]."""
    distance = env.measurements["distance"]
    return (distance * distance * (-0.5 / width**2)).exp()


def collision(env: EnvView) -> Tensor:
    """Return the sum over the obstacles of the squared depth in m, [N]."""
    return _sum_of_squares(env.measurements["depth"])


def speed(env: EnvView) -> Tensor:
    """Return the squared speed in m^2/s^2, [N]."""
    return _sum_of_squares(env.state["velocity"])


def smoothness(env: EnvView) -> Tensor:
    """Return the squared length of the change of the action, [N]."""
    return _sum_of_squares(env.state["action"] - env.previous_state["action"])


def at_goal(env: EnvView, radius: float) -> Tensor:
    """Return whether the point is within `radius` m of the goal, [N] bool."""
    return env.measurements["distance"] < radius


class PointMass(Task):
    """Fly a point to a goal; flying into one of two round obstacles only costs reward.

    Observation [14], in m and m/s: position, velocity, vector to the goal, last action, vectors to
    the obstacles' centres, their radii. Action [2].

    Reward terms:
        distance: m from the goal. Weight -1.
        near_goal: exp(-d^2 / (2 * 0.05^2)), d in m from the goal. Off; usually 0.5, with which
            hovering near the goal pays more than success.
        collision: sum over the obstacles of the squared depth in m. Weight -2.
        speed: squared, in m^2/s^2. Weight -0.01.
        smoothness: squared length of the change of action. Weight -0.001.
        success: 1 at the goal. Weight 5.

    A success is within 0.03 m of the goal, and `terminated`. Metrics: `final_distance` (m),
    `path_length` (m), `collision_count` (steps inside an obstacle, summed over obstacles).

    Default action: `Force(5, clip=1)`; the force is at most 5 N along each axis for all action
    terms. An episode has 100 steps of 1/60 s. Arguments: see `Task`.
    """

    differentiable = True
    observation_size, start_size = 14, 12
    default_action, default_episode_steps = Force(MAX_FORCE, clip=1.0), 100
    render_fps = 60
    default_rewards = {  # noqa: RUF012
        "distance": Reward("measurement", {"name": "distance"}, weight=-1.0),
        "near_goal": Reward(near_goal, {"width": NEAR}, weight=0.0),
        "collision": Reward(collision, weight=-2.0),
        "speed": Reward(speed, weight=-0.01),
        "smoothness": Reward(smoothness, weight=-0.001),
        "success": Reward("is_success", weight=5.0),
    }
    default_terminations = {  # noqa: RUF012
        "success": Termination(at_goal, {"radius": SUCCESS}, ends="success")
    }
    default_metrics = {  # noqa: RUF012
        "final_distance": Metric("measurement", {"name": "distance"}),
        "path_length": Metric("entry", {"name": "path_length"}),
        "collision_count": Metric("entry", {"name": "collision_count"}),
    }
    action_kinds = ("position", "velocity", "force")

    def initial_state(self, uniform: Tensor) -> TensorDict:
        # Each part has its own columns of the random numbers.
        start = (uniform[:, 0:2] * 2.0 - 1.0) * START_RANGE
        goal = _apart((uniform[:, 2:4] * 2.0 - 1.0) * GOAL_RANGE, start)
        radii = RADII[0] + uniform[:, 4:6] * (RADII[1] - RADII[0])
        free_cells = _free_cells(start, goal)
        obstacles = torch.stack([_in_a_cell(free_cells, uniform[:, i : i + 3]) for i in (6, 9)], 1)
        # Cloned below, because entries of a state must not share memory.
        none = torch.zeros_like(radii)
        return TensorDict(
            {
                "position": start.clone(),
                "velocity": none,
                "action": none.clone(),
                "goal": goal,
                "obstacles": obstacles,
                "radii": radii,
                "start": start,
                "path_length": torch.zeros_like(start[:, 0]),
                "collision_count": torch.zeros_like(start[:, 0]),
            },
            [len(uniform)],
        )

    def observe(self, state: TensorDict) -> Tensor:
        position = state["position"]
        obstacles = (state["obstacles"] - position[:, None]).flatten(1)
        robot = (position, state["velocity"], state["goal"] - position, state["action"])
        return torch.cat((*robot, obstacles, state["radii"]), 1)

    def simulate(self, env: EnvView) -> TensorDict:
        state, action = env.state, self.action.clipped_action(env.action)
        old_position = state["position"]
        target = self.action.target(action, old_position, env)
        force = self._force(old_position, state["velocity"], target)
        # Semi-implicit Euler: the position moves by the new velocity.
        velocity = state["velocity"] * (1.0 - DAMPING * TIMESTEP) + force * (TIMESTEP / MASS)
        # The world's edge stops the position, not the velocity.
        position = (old_position + velocity * TIMESTEP).clamp(-1.0, 1.0)
        env.measurements["distance"] = norm(position - state["goal"])
        depth = env.measurements["depth"] = _depth(position, state["obstacles"], state["radii"])
        inside = (depth > 0).float()
        changes = {
            "position": position,
            "velocity": velocity,
            "action": action,
            "path_length": state["path_length"] + norm(position - old_position),
            "collision_count": state["collision_count"] + inside[:, 0] + inside[:, 1],
        }
        constants = {key: state[key] for key in ("goal", "obstacles", "radii", "start")}
        return TensorDict(changes | constants, env.rows_shape)

    def draw(self, state: TensorDict, height: int, width: int) -> Tensor:
        canvas = Canvas(
            len(state), height, width, extent=(2.1, 2.1), background=INK, device=self.device
        )
        canvas.box(torch.zeros(1, 2, device=self.device), (1.0, 1.0), PAPER)
        for i in (0, 1):
            canvas.disc(state["obstacles"][:, i], state["radii"][:, i], RED, opacity=0.85)
        canvas.disc(state["start"], 0.03, GREY, ring=0.012)
        radius = self.terminations.parameter("success", "radius", SUCCESS)
        canvas.disc(state["goal"], radius, GREEN)
        canvas.disc(state["goal"], 2 * radius, GREEN, ring=0.012)
        tip = state["position"] + state["velocity"] * 0.15
        canvas.segment(state["position"], tip, 0.008, BLUE, opacity=0.7)
        canvas.disc(state["position"], 0.03, BLUE)
        return canvas.pixels()

    def _force(self, position: Tensor, velocity: Tensor, target: Tensor) -> Tensor:
        if self.action.kind == "position":
            target = (target - position) * STIFFNESS - velocity * DAMPING
        elif self.action.kind == "velocity":
            # The second term compensates the damping.
            target = (target - velocity) * SPEED_GAIN + velocity * DAMPING
        return target.clamp(-MAX_FORCE, MAX_FORCE)


def _apart(goal: Tensor, start: Tensor) -> Tensor:
    """Move goals [M, 2] near the start by `GOAL_RANGE` along x, towards the other side."""
    near = norm(goal - start) < GOAL_APART
    x = goal[:, 0]
    elsewhere = torch.where(x < 0.0, x + GOAL_RANGE, x - GOAL_RANGE)
    return torch.stack((torch.where(near, elsewhere, x), goal[:, 1]), 1)


def _centres(device: torch.device) -> Tensor:
    index = torch.arange(CELLS, device=device)
    return (index * 2 + 1 - CELLS) * (OBSTACLE_RANGE / CELLS)


def _free_cells(start: Tensor, goal: Tensor) -> Tensor:
    """Return the cells in which an obstacle covers neither start nor goal, [M, CELLS^2] bool."""
    half_diagonal = OBSTACLE_RANGE / CELLS * 2**0.5
    centres = _centres(start.device)

    def beyond(point: Tensor, radius: float) -> Tensor:
        # Squares along x and y, [M, CELLS] each: their sums are the squared distances of all cells.
        x, y = ((centres - point[:, i, None]).square() for i in (0, 1))
        # The whole cell must lie beyond the radius, not only its middle.
        reach = radius + half_diagonal
        return x[:, :, None] + y[:, None, :] > reach * reach

    return (beyond(start, RADII[1] + CLEARANCE) & beyond(goal, OBSTACLE_APART)).flatten(1)


def _in_a_cell(free_cells: Tensor, uniform: Tensor) -> Tensor:
    """Draw a point [M, 2] of the free cells from uniform numbers [M, 3]."""
    # The k-th free cell is the first one whose rank is k.
    rank = free_cells.cumsum(1)
    count = rank[:, -1]
    target = torch.minimum((uniform[:, 0] * count).long() + 1, count)  # the product may round up
    cell = torch.searchsorted(rank, target[:, None]).squeeze(1)
    centres = _centres(free_cells.device)
    centre = torch.stack((centres[cell // CELLS], centres[cell % CELLS]), 1)
    return centre + (uniform[:, 1:3] - 0.5) * (2 * OBSTACLE_RANGE / CELLS)


def _depth(position: Tensor, obstacles: Tensor, radii: Tensor) -> Tensor:
    offset = position[:, None] - obstacles
    square = offset * offset
    return (radii - (square[..., 0] + square[..., 1]).sqrt()).clamp_min(0.0)


def _sum_of_squares(vector: Tensor) -> Tensor:
    square = vector * vector
    return square[:, 0] + square[:, 1]
