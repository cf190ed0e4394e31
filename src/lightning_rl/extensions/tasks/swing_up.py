"""Swing a pole up from below by a force on its cart, and keep it upright."""

import math

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.extensions.managers.actions import Force
from lightning_rl.extensions.managers.term import Metric, Reward, Termination
from lightning_rl.extensions.managers.view import EnvView
from lightning_rl.extensions.tasks.cart_pole import CartPole, stands, state_of

MAX_FORCE = 10.0
"""N on the cart."""

START = (0.3, 1.0)
"""Maximum initial position, and maximum initial angle from hanging, at rest: m and rad."""

STILL = {"angle": 0.1, "speed": 0.5}
"""Maximum angle (rad) and angular velocity (rad/s) of a pole that stands."""


def height(env: EnvView) -> Tensor:
    """Return the height of the pole's end above the cart over the pole's length, [N]."""
    angle: Tensor = env.state["position"][:, 1]
    return angle.cos()


def squared(env: EnvView, name: str, part: int) -> Tensor:
    """Return the square of part 0 (the cart's) or 1 (the pole's) of an entry of the state, [N]."""
    value: Tensor = env.state[name][:, part]
    return value.square()


class CartPoleSwingUp(CartPole):
    """Swing the pole of `CartPole` up by a force on the cart, and keep it upright.

    The pole hangs within 1 rad at the start, its hinge has no drive, and no fall ends the episode.

    Observation [5]: position (m) and velocity (m/s) of the cart; sine and cosine of the pole's
    angle; its angular velocity (rad/s). Action [1]: the force. Angles are 0 at upright.

    Reward terms:
        height: cosine of the angle. Weight 1.
        cart_position: squared, in m^2. Weight -0.5.
        pole_velocity: squared, in rad^2/s^2. Weight -0.02.
        force: squared action. Weight -0.02.

    Success requires, at the last step of the time limit, |angle| < 0.1 rad and |angular velocity| <
    0.5 rad/s. Metric `distance_to_goal`: |angle|, at most pi.

    See `Task` for the arguments. Default action: `Force(10, clip=1)`. An episode has 200 steps of
            0.04 s.
    """

    observation_size, action_size = 5, 1
    default_action, default_episode_steps = Force(MAX_FORCE, clip=1.0), 200
    action_kinds = ("force",)
    render_size = (256, 256)
    shown = (0.0, 0.0), (2.5, 2.5)
    default_rewards = {  # noqa: RUF012
        "height": Reward(height, weight=1.0),
        "cart_position": Reward(squared, {"name": "position", "part": 0}, weight=-0.5),
        "pole_velocity": Reward(squared, {"name": "velocity", "part": 1}, weight=-0.02),
        "force": Reward("action_size", weight=-0.02),
    }
    default_terminations = {"success": Termination(stands, STILL, ends="nothing")}  # noqa: RUF012
    default_metrics = {"distance_to_goal": Metric("measurement", {"name": "angle"})}  # noqa: RUF012

    def make_constants(self) -> None:
        self._start = torch.tensor(START, device=self.device)
        self._hanging = torch.tensor([0.0, math.pi], device=self.device)

    def initial_state(self, uniform: Tensor) -> TensorDict:
        position = self._hanging + (uniform * 2.0 - 1.0) * self._start
        return state_of(position, torch.zeros_like(position), torch.zeros_like(position))

    def observe(self, state: TensorDict) -> Tensor:
        x, angle = state["position"].unbind(1)
        speed, spin = state["velocity"].unbind(1)
        # Unlike the angle, sine and cosine do not jump after a full turn.
        return torch.stack((x, speed, angle.sin(), angle.cos(), spin), 1)

    def simulate(self, env: EnvView) -> TensorDict:
        position = env.state["position"]
        push = self.action.target(self.action.clipped_action(env.action), position[:, :1], env)
        # The hinge has no drive: its torque is 0.
        target = torch.cat((push, torch.zeros_like(push)), 1)
        return self._integrate(position, env.state["velocity"], target)

    def measure(self, env: EnvView) -> dict[str, Tensor]:
        angle, speed = env.state["position"][:, 1], env.state["velocity"][:, 1]
        # The integrated angle counts full turns.
        turns = (angle / math.tau).round()
        return {"angle": (angle - turns * math.tau).abs(), "speed": speed.abs()}
