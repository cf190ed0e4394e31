"""Balance a pole on a cart that a position drive moves along a rail."""

import math
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extensions.managers.actions import ActionTerm, DeltaPosition, Kind
from lightning_rl.extensions.managers.term import Metric, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.tasks.base import Task
from lightning_rl.extensions.tasks.drawing import BLUE, GREEN, GREY, INK, ORANGE, Canvas, tip

TIMESTEP, SUBSTEPS = 0.01, 4
"""Seconds per substep; substeps per control step."""

CART_MASS, POLE_MASS, HALF_LENGTH, GRAVITY = 1.0, 0.1, 0.5, 9.81
"""kg, kg, m, m/s^2; the pole is a uniform rod."""

STIFFNESS, DAMPING, EFFORT_LIMIT = (10.0, 0.01), (1.0, 0.001), (100.0, 0.1)
"""Drives of slider and hinge: N/m and N m/rad, N s/m and N m s/rad, N and N m."""

RAIL, FALLEN = 1.0, math.pi / 2
"""Joint limits on both sides: m and rad."""

START = (0.05, 0.03)
"""Maximum initial position and angle, at rest: m and rad."""


def upright(env: EnvView) -> Tensor:
    """Return 1 - |angle| / pi, [N]."""
    return 1.0 - env.measurements["angle"] / math.pi


def fallen(env: EnvView) -> Tensor:
    """Return whether the pole is below the horizontal, [N] bool."""
    return env.measurements["angle"] > FALLEN


def stands(env: EnvView, angle: float, speed: float) -> Tensor:
    """Return whether the pole stands still at the end of the time limit, [N] bool.

    `angle` (rad) and `speed` (rad/s) are the largest allowed values.
    """
    return env.last_step & (env.measurements["angle"] < angle) & (env.measurements["speed"] < speed)


class CartPole(Task):
    """Keep a pole upright by targets for the drives of the cart's slider and the pole's hinge.

    Observation [6]: both positions, scaled to [0, 1] by the joint limits; both velocities (m/s,
    rad/s); both efforts of the drives (N, N m). Action [2]: slider and hinge (nearly passive).
    Angles are 0 at upright, positive towards +x.

    Reward: `upright` 1 - |angle| / pi; `pole_velocity` |angular velocity| (rad/s), weight -0.005. A
    pole below the horizontal is `terminated`. Success requires, at the last step of the time limit,
    |angle| < 0.02 rad and |angular velocity| < 0.05 rad/s. Metric `distance_to_goal`: |angle|.

    The rail's ends stop the cart without bounce; the stop does not affect the pole.

    See `Task` for the arguments. Default action: `DeltaPosition(0.1)`, unbounded; with `Velocity`
            the drives have no stiffness, and their damping pulls towards the target. An episode has
            500 steps of 0.04 s.
    """

    differentiable = True
    observation_size, start_size = 6, 2
    default_action: ClassVar[ActionTerm] = DeltaPosition(0.1)
    default_episode_steps = 500
    render_fps = 25
    render_size = (256, 384)
    shown = (0.0, 0.35), (2.5, 1.6)  # the middle of a picture, and its width and height, in m
    default_rewards = {  # noqa: RUF012
        "upright": Reward(upright, weight=1.0),
        "pole_velocity": Reward("measurement", {"name": "speed"}, weight=-0.005),
    }
    default_terminations = {  # noqa: RUF012
        "fallen": Termination(fallen),
        "success": Termination(stands, {"angle": 0.02, "speed": 0.05}, ends="nothing"),
    }
    default_metrics = {"distance_to_goal": Metric("measurement", {"name": "angle"})}  # noqa: RUF012
    action_kinds: ClassVar[tuple[Kind, ...]] = ("position", "velocity", "force")

    def make_constants(self) -> None:
        self._limits = torch.tensor([RAIL, FALLEN], device=self.device)
        self._start = torch.tensor(START, device=self.device)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        position = (uniform * 2.0 - 1.0) * self._start
        return state_of(position, torch.zeros_like(position), torch.zeros_like(position))

    def observe(self, state: TensorDict) -> Tensor:
        # Positions become 0 to 1 between the joint limits; velocities and efforts keep their units.
        position = state["position"] / self._limits * 0.5 + 0.5
        return torch.cat((position, state["velocity"], state["effort"]), 1)

    def simulate(self, env: EnvView) -> TensorDict:
        state = env.state
        target = self.action.target(self.action.clipped_action(env.action), state["position"], env)
        return self._integrate(state["position"], state["velocity"], target)

    def measure(self, env: EnvView) -> dict[str, Tensor]:
        angle, speed = env.state["position"][:, 1].abs(), env.state["velocity"][:, 1].abs()
        return {"angle": angle, "speed": speed}

    def draw(self, state: TensorDict, height: int, width: int) -> Tensor:
        canvas = Canvas(len(state), height, width, *self.shown, device=self.device)
        x, angle = state["position"].unbind(1)
        fixed = torch.zeros(1, 2, device=self.device)
        along, up = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=self.device)
        canvas.segment(fixed - along * RAIL, fixed + along * RAIL, 0.015, GREY)
        for side in (-1, 1):
            canvas.box(fixed + along * (side * (RAIL + 0.14)), (0.02, 0.09), INK)
        cart = x[:, None] * along
        # The green line shows the upright pole.
        canvas.segment(cart, cart + up * (2 * HALF_LENGTH), 0.008, GREEN, opacity=0.6)
        canvas.box(cart, (0.12, 0.07), BLUE)
        canvas.segment(cart, tip(cart, angle, 2 * HALF_LENGTH), 0.025, ORANGE)
        canvas.disc(cart, 0.035, INK)
        return canvas.pixels()

    def _integrate(self, position: Tensor, velocity: Tensor, target: Tensor) -> TensorDict:
        """Integrate the substeps of one control step by the semi-implicit Euler method."""
        (x, angle), (v, spin), targets = position.unbind(1), velocity.unbind(1), target.unbind(1)
        for _ in range(SUBSTEPS):
            push = self._effort(0, x, v, targets[0])
            torque = self._effort(1, angle, spin, targets[1])
            a, turn = accelerate(angle, spin, push, torque)
            # First the velocities, then the positions by the new velocities.
            v, spin = v + a * TIMESTEP, spin + turn * TIMESTEP
            x, angle = x + v * TIMESTEP, angle + spin * TIMESTEP
            # An end of the rail takes all of the cart's speed.
            v = v.masked_fill(x.abs() > RAIL, 0.0)
            x = x.clamp(-RAIL, RAIL)
        return state_of(*(torch.stack(pair, 1) for pair in ((x, angle), (v, spin), (push, torque))))

    def _effort(self, joint: int, position: Tensor, velocity: Tensor, target: Tensor) -> Tensor:
        kind, limit = self.action.kind, EFFORT_LIMIT[joint]
        if kind == "position":
            effort = (target - position) * STIFFNESS[joint] - velocity * DAMPING[joint]
        elif kind == "velocity":
            effort = (target - velocity) * DAMPING[joint]
        else:
            effort = target
        return effort.clamp(-limit, limit)


def accelerate(angle: Tensor, spin: Tensor, push: Tensor, torque: Tensor) -> tuple[Tensor, Tensor]:
    """Return the accelerations of cart (m/s^2) and pole (rad/s^2), each [N].

    With masses M and m, half-length l, angle q, force F on the cart and torque t on the pole:

        (M + m) x'' + m l cos(q) q''       = F + m l sin(q) q'^2
        m l cos(q) x'' + (4/3) m l^2 q''   = t + m g l sin(q)

    Source: Florian 2007, "Correct equations for the dynamics of the cart-pole system". Differs from
    the paper: no friction, and a torque at the hinge.

    Args:
        angle: [N] rad from upright.
        spin: [N] rad/s.
        push: [N] N, on the cart.
        torque: [N] N m, on the pole.
    """
    moment = POLE_MASS * HALF_LENGTH
    inertia = moment * HALF_LENGTH * 4 / 3
    sin, coupling = angle.sin(), angle.cos() * moment
    # The right sides of both equations, which Cramer's rule solves.
    track_force = push + spin * spin * sin * moment
    hinge_torque = torque + sin * (moment * GRAVITY)
    determinant = (CART_MASS + POLE_MASS) * inertia - coupling * coupling
    return (
        (track_force * inertia - hinge_torque * coupling) / determinant,
        (hinge_torque * (CART_MASS + POLE_MASS) - track_force * coupling) / determinant,
    )


def state_of(position: Tensor, velocity: Tensor, effort: Tensor) -> TensorDict:
    """Return the state [N] of a position [N, 2], a velocity [N, 2] and an effort [N, 2]."""
    values = {"position": position, "velocity": velocity, "effort": effort}
    return TensorDict(values, [len(position)])
