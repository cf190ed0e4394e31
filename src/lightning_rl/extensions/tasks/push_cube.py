"""Push a cube over a table to a goal."""

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extensions.managers.actions import DeltaPosition
from lightning_rl.extensions.managers.term import Metric, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.tasks.base import Task, norm
from lightning_rl.extensions.tasks.drawing import BLUE, GREEN, INK, ORANGE, PAPER, Canvas

PUSHER_RADIUS, HALF_EDGE, FRICTION = 0.02, 0.05, 0.8
"""m, m, and the coefficient between pusher and cube."""

MAX_MOVE, SUBSTEPS = 0.03, 4
"""m: maximum move of the pusher per step along each axis; number of substeps."""

PERIOD = 0.1
"""Seconds per step."""

TABLE, SUCCESS, BEHIND = 1.0, 0.1, 0.08
"""m: half of the table's edge; distance of a success; pushing point behind the cube's centre."""

CLEAR = 0.12
"""m: distance between the expert and the cube's path."""

START = ((-0.52, -0.48), (-0.02, 0.02), (-0.8, -0.42), (-0.6, -0.2), (-0.3, 0.3), (-0.3, 0.3))
"""Ranges of x and y of pusher, cube and goal, in m.

No start is solved (cube and goal are at least 0.12 m apart along x) or has contact (pusher and cube
are at least 0.11 m apart along y).
"""


def reach_progress(env: EnvView) -> Tensor:
    """Return the decrease of the pusher's distance to the pushing point, [N] m."""
    return env.measurements["reach_before"] - env.measurements["reach"]


def goal_progress(env: EnvView) -> Tensor:
    """Return the decrease of the cube's distance to the goal, [N] m."""
    return env.measurements["distance_before"] - env.measurements["distance"]


def smoothness(env: EnvView) -> Tensor:
    """Return the length of the change of the action, [N]."""
    return norm(env.state["action"] - env.previous_state["action"])


def reach_kernel(env: EnvView) -> Tensor:
    """Return 1 - tanh(8 d), d in m from the pushing point, [N]."""
    return 1.0 - (env.measurements["reach"] * 8.0).tanh()


def goal_kernel(env: EnvView, width: float) -> Tensor:
    """Return exp(-d^2 / (2 width^2)), d in m from cube to goal, [N]."""
    distance = env.measurements["distance"]
    kernel: Tensor = (distance * distance * (-0.5 / width**2)).exp()
    return kernel


def at_goal(env: EnvView, radius: float) -> Tensor:
    """Return whether the cube is within `radius` m of the goal, [N] bool."""
    return env.measurements["distance"] < radius


def off_table(env: EnvView) -> Tensor:
    """Return whether the cube's centre is beyond the table's edge, [N] bool."""
    off: Tensor = env.state["cube"].abs() > TABLE
    return off[:, 0] | off[:, 1]


class PushCube(Task):
    """Push a cube to a goal with a round pusher, seen from above.

    The motion is quasi-static: the pusher moves an overlapping cube along the contact normal, and
    friction drags it along the tangent by at most `FRICTION` times that distance. The cube does not
    rotate. A substep is shorter than the pusher's radius, so nothing passes through.

    Observation [12], in m: positions of pusher, cube and goal; vectors from pusher to cube, and
    from cube to goal; the last action. Action [2].

    Reward terms:
        reach_progress: m by which the pusher approached the pushing point. Weight 1.
        goal_progress: m by which the cube approached the goal. Weight 10.
        smoothness: length of the change of action. Weight -0.01.
        step: 1. Weight -0.01.
        success: 1 at the goal. Weight 10.
        reach_kernel: 1 - tanh(8 * m from the pushing point). Off; usually 0.03.
        goal_kernel: exp(-d^2 / (2 * 0.12^2)), d in m from cube to goal. Off; usually 0.8.

    The kernels are flat at the start of an episode, and keeping the cube near the goal pays more
    than the bonus for success; progress terms avoid both.

    A cube within 0.1 m of the goal is a success, a cube beyond the table's edge a failure: both are
    `terminated`. Metric `distance_to_goal`: m from cube to goal.

    See `Task` for the arguments. Default action: `DeltaPosition(0.03, clip=1)`; for all action
            terms the pusher moves at most 0.03 m per step along each axis and stays on the table.
            An episode has 100 steps.
    """

    observation_size, start_size = 12, 6
    default_action, default_episode_steps = DeltaPosition(0.03, clip=1.0), 100
    render_fps = 10
    default_rewards = {  # noqa: RUF012
        "reach_progress": Reward(reach_progress, weight=1.0),
        "goal_progress": Reward(goal_progress, weight=10.0),
        "smoothness": Reward(smoothness, weight=-0.01),
        "step": Reward("constant", weight=-0.01),
        "success": Reward("is_success", weight=10.0),
        "reach_kernel": Reward(reach_kernel, weight=0.0),
        "goal_kernel": Reward(goal_kernel, {"width": 0.12}, weight=0.0),
    }
    default_terminations = {  # noqa: RUF012
        "success": Termination(at_goal, {"radius": SUCCESS}, ends="success"),
        "off_table": Termination(off_table),
    }
    default_metrics = {"distance_to_goal": Metric("measurement", {"name": "distance"})}  # noqa: RUF012
    action_kinds = ("position", "velocity")

    def make_constants(self) -> None:
        self._low, self._high = torch.tensor(START, device=self.device).unbind(1)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        positions = self._low + uniform * (self._high - self._low)
        pusher, cube, goal = positions.split(2, 1)
        return _state(pusher, cube, goal, torch.zeros_like(goal))

    def observe(self, state: TensorDict) -> Tensor:
        pusher, cube, goal = state["pusher"], state["cube"], state["goal"]
        return torch.cat((pusher, cube, goal, cube - pusher, goal - cube, state["action"]), 1)

    def simulate(self, env: EnvView) -> TensorDict:
        state, action = env.state, self.action.clipped_action(env.action)
        old_pusher = state["pusher"]
        target = self.action.target(action, old_pusher, env)
        move = target * PERIOD if self.action.kind == "velocity" else target - old_pusher
        # An event may have replaced the friction, with one number per env.
        friction = state.get("friction", FRICTION)
        move = move.clamp(-MAX_MOVE, MAX_MOVE)
        pusher, cube = push(old_pusher, state["cube"], move, friction)
        goal = state["goal"]
        # Both distances before the push, for the rewards of progress.
        distance_before, reach_before = _distances(old_pusher, state["cube"], goal)
        distance, reach = _distances(pusher, cube, goal)
        env.measurements |= {
            "distance": distance,
            "reach": reach,
            "distance_before": distance_before,
            "reach_before": reach_before,
        }
        return _state(pusher, cube, goal, action)

    def parameters(self) -> dict[str, Tensor]:
        return {"friction": torch.tensor(FRICTION, device=self.device)}

    def expert(self, state: TensorDict) -> Tensor:
        """Return an expert's action [M, 2] in [-1, 1] for a state [M].

        The path: around the cube to the pushing point, then along the line to the goal.
        """
        pusher, cube, goal = state["pusher"], state["cube"], state["goal"]
        forward = (goal - cube) / norm(goal - cube).clamp_min(1e-9)[:, None]
        offset = pusher - cube
        along = (offset * forward).sum(1, keepdim=True)
        # Split the pusher's offset into parts along and across the way to the goal.
        lateral = offset - along * forward
        distance = norm(lateral)[:, None]
        # Behind the cube and on its way: push, and correct the lateral offset meanwhile.
        pushes = (along < 0) & (distance < 0.015)
        # If the pusher is in front of the cube and close to its path: first move aside, then back.
        outwards = torch.where(distance > 1e-6, lateral / distance.clamp_min(1e-6), forward.flip(1))
        passing = (along > -BEHIND) & (distance < CLEAR)
        place = cube - 1.4 * BEHIND * forward
        back = cube + 1.2 * CLEAR * outwards - 1.6 * BEHIND * forward
        waypoint = torch.where(along > -BEHIND, back, place)
        move = torch.where(pushes, MAX_MOVE * forward - lateral, waypoint - pusher)
        move = torch.where(passing & ~pushes, MAX_MOVE * (outwards - 0.3 * forward), move)
        return (move / MAX_MOVE).clamp(-1.0, 1.0)

    def draw(self, state: TensorDict, height: int, width: int) -> Tensor:
        canvas = Canvas(
            len(state), height, width, extent=(2.1, 2.1), background=INK, device=self.device
        )
        canvas.box(torch.zeros(1, 2, device=self.device), (TABLE, TABLE), PAPER)
        radius = self.terminations.parameter("success", "radius", SUCCESS)
        canvas.disc(state["goal"], radius, GREEN, opacity=0.35)
        canvas.disc(state["goal"], radius, GREEN, ring=0.015)
        canvas.disc(state["pusher"], 2.5 * PUSHER_RADIUS, BLUE, opacity=0.35)
        canvas.box(state["cube"], (HALF_EDGE, HALF_EDGE), ORANGE)
        canvas.disc(state["cube"], 0.015, INK)
        canvas.disc(state["pusher"], PUSHER_RADIUS, BLUE)
        return canvas.pixels()


def push(
    pusher: Tensor, cube: Tensor, move: Tensor, friction: Tensor | float = FRICTION
) -> tuple[Tensor, Tensor]:
    """Move the pusher and an overlapping cube; return both centres [N, 2], in m.

    Args:
        pusher: [N, 2], its centre.
        cube: [N, 2], its centre.
        move: [N, 2], at most 0.03 along each axis.
        friction: coefficient between pusher and cube, [N] or for all.
    """
    part = move / SUBSTEPS
    for _ in range(SUBSTEPS):
        advanced = (pusher + part).clamp(-TABLE, TABLE)
        step, pusher = advanced - pusher, advanced
        offset = pusher - cube
        # From the nearest point of the cube to the pusher's centre.
        gap = offset - offset.clamp(-HALF_EDGE, HALF_EDGE)
        distance = norm(gap).clamp_min(1e-9)
        normal = gap / distance[:, None]
        overlap = (PUSHER_RADIUS - distance).clamp_min(0.0)
        tangent = torch.stack((-normal[:, 1], normal[:, 0]), 1)
        along = step * tangent
        limit = overlap * friction
        # Friction moves the cube with the pusher, at most by a share of the overlap.
        drag = torch.minimum(torch.maximum(along[:, 0] + along[:, 1], -limit), limit)
        cube = cube - normal * overlap[:, None] + tangent * drag[:, None]
    return pusher, cube


def _distances(pusher: Tensor, cube: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    back = cube - goal
    distance = norm(back)
    # The pushing point lies behind the cube, as seen from the goal.
    pushing = cube + back * (BEHIND / distance.clamp_min(1e-9))[:, None]
    return distance, norm(pushing - pusher)


def _state(pusher: Tensor, cube: Tensor, goal: Tensor, action: Tensor) -> TensorDict:
    values = {"pusher": pusher, "cube": cube, "goal": goal, "action": action}
    return TensorDict(values, [len(pusher)])
