"""Adapt gym-hil's cube task: the env with our conventions, an expert, and a scripted helper.

`GymnasiumEnv` makes `gym_hil/PandaPickCube-v0` of gym-hil 0.1.14 (extra `robots`, in its own
environment: it needs mujoco below 3.9).
"""

from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.utils import seeding

from lightning_rl.extend.errors import check_range, require
from lightning_rl.extensions.algorithms.gripper import CLOSE, OPEN, STAY
from lightning_rl.extensions.teleoperation.intervention import (
    InterventionDecision,
    InterventionSource,
)

HOME = np.array((0.0, 0.195, 0.0, -2.43, 0.0, 2.62, 0.785))
"""Initial joint angles of the arm, in rad."""

CENTER, REACH = np.array((0.4, 0.0, 0.1)), np.array((0.2, 0.3, 0.2))
"""Origin and unit of observed positions, in m."""

NEAR = 0.03
"""Unit of the vector from fingers to cube, in m; clipped at three units."""

CLOSED_COMMAND = 255.0
"""Value of a closed gripper in gym-hil."""

ALONE = 18
"""Numbers of an observation that do not depend on the cube."""

MOVE = 0.025
"""Maximum move of the arm per action along each axis, in m."""


class PickCube(gymnasium.Wrapper):
    """gym-hil's arm with a gripper that must lift a cube, with flat observations.

    Observation [24]: joint angles relative to the start, rad [7]; joint velocities, rad/s [7]; last
    gripper command, from -1 (open) to 1 (closed); positions of fingers and cube relative to
    `CENTER` in units of `REACH` [3] each; the vector from fingers to cube in units of `NEAR`, from
    -3 to 3 [3], which makes the last centimetre visible.

    Action [4]: the move along x, y and z in units of `MOVE`, and the gripper command, rounded to 0
    close, 1 stay or 2 open. (In gym-hil, 2 closes and 0 opens.)

    The info has `success` at each step, and gym-hil's `discrete_penalty` at steps that open or
    close the gripper. The seed of `reset` determines the cube's position, unlike in gym-hil.

    With `image_obs: true` of gym-hil the observation is a Dict: the pictures `front` and `wrist`,
    uint8 [H, W, 3], and `state` [18], the numbers above without the cube.

    Args:
        env: `gym_hil/PandaPickCube-v0`, with `random_block_position: true` and
            `reset_delay_seconds: 0`.
        shadows: render shadows and reflections; without them a step with pictures takes an eighth
            of the time on a CPU.
        size: height and width of the pictures in pixels, a divisor of gym-hil's 128, whose blocks
            of pixels are averaged. Default: 128.

    Attributes:
        state: the observation without pictures [24], for `ScriptedHelp`.

    Raises:
        ConfigurationError: for another size, and for a size without pictures.
    """

    state: np.ndarray

    def __init__(self, env: gymnasium.Env, shadows: bool = True, size: int | None = None) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (24,), np.float32)
        gym_hil_spaces = cast(gymnasium.spaces.Dict, env.observation_space).spaces
        require(
            size is None or "pixels" in gym_hil_spaces,
            f"size={size} is the size of pictures, and this env has none: set image_obs: true in "
            "its env_kwargs, or remove size.",
        )
        if "pixels" in gym_hil_spaces:
            pictures = cast(gymnasium.spaces.Dict, gym_hil_spaces["pixels"]).spaces
            full_size = next(iter(pictures.values())).shape[0]  # type: ignore[index]  # a Box
            self.size = full_size if size is None else size
            require(
                self.size > 0 and full_size % self.size == 0,
                f"size must be a divisor of {full_size}, the height and width of gym-hil's "
                f"pictures, got {size}.",
            )
            spaces: dict[str, gymnasium.Space[Any]] = {
                name: gymnasium.spaces.Box(0, 255, (self.size, self.size, 3), np.uint8)
                for name in pictures
            }
            spaces["state"] = gymnasium.spaces.Box(-np.inf, np.inf, (ALONE,), np.float32)
            self.observation_space = gymnasium.spaces.Dict(spaces)
        if not shadows:
            model = cast(Any, self.unwrapped).model
            model.light_castshadow[:], model.mat_reflectance[:] = 0, 0.0
        low, high = np.array([-1.0, -1.0, -1.0, 0.0]), np.array([1.0, 1.0, 1.0, 2.0])
        self.action_space = gymnasium.spaces.Box(low.astype("f4"), high.astype("f4"))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        inner = self.unwrapped
        if seed is not None:
            inner.np_random, _ = seeding.np_random(seed)
        # gym-hil draws the cube's position from NumPy's global generator: restore it afterwards.
        cube_seed = int(inner.np_random.integers(2**32))
        global_state = np.random.get_state()
        try:
            np.random.seed(cube_seed)
            observation, info = self.env.reset(options=options)
        finally:
            np.random.set_state(global_state)
        return self._observed(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        command = np.rint(action[3])
        # In gym-hil, 0 opens and 2 closes.
        turned = np.array([*action[:3], 2.0 - command], np.float32)
        observation, reward, terminated, truncated, info = self.env.step(turned)
        extended = {**info, "success": bool(info["succeed"])}
        return self._observed(observation), reward, terminated, truncated, extended

    def _observed(self, observation: dict[str, Any]) -> Any:
        if "pixels" not in observation:
            self.state = flat_observation(observation)
            return self.state
        # With pictures, gym-hil does not observe the cube, but the expert needs it.
        cube = cast(Any, self.unwrapped).data.sensor("block_pos").data.astype(np.float32)
        self.state = flat_observation({**observation, "environment_state": cube})
        pictures = observation["pixels"].items()
        small = {name: smaller(picture, self.size) for name, picture in pictures}
        return {**small, "state": self.state[:ALONE]}


def smaller(picture: np.ndarray, size: int) -> np.ndarray:
    """Average the blocks of pixels of a picture, uint8 [H, H, 3] to [size, size, 3]."""
    block = len(picture) // size
    if block == 1:
        return picture
    blocks = picture.reshape(size, block, size, block, 3)
    return blocks.mean((1, 3)).round().astype(np.uint8)  # type: ignore[no-any-return]  # numpy


def flat_observation(observation: dict[str, np.ndarray]) -> np.ndarray:
    """Convert gym-hil's observation to the observation [24] of `PickCube`."""
    agent, cube = observation["agent_pos"], observation["environment_state"]
    fingers = agent[15:18]
    parts = (
        agent[:7] - HOME,
        agent[7:14],
        agent[14:15] * (2.0 / CLOSED_COMMAND) - 1.0,
        (fingers - CENTER) / REACH,
        (cube - CENTER) / REACH,
        ((cube - fingers) / NEAR).clip(-3.0, 3.0),
    )
    return np.concatenate(parts).astype(np.float32)


class PickCubeExpert:
    """Expert that picks up the cube: move above it, down, close, wait for the grip, lift.

    Args:
        noise: standard deviation of the noise on its moves, in units of an action.
        seed: seed of the noise.
    """

    def __init__(self, noise: float = 0.1, seed: int = 0) -> None:
        check_range("noise", noise, minimum=0)
        self.noise = noise
        self.generator = np.random.default_rng(seed)
        self.closed_for = 0

    def reset(self) -> None:
        """Begin an episode, or a period of help."""
        self.closed_for = 0

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        """Return the action [4] for an observation [24]."""
        is_closed = bool(observation[14] > 0.5)
        fingers = observation[15:18] * REACH + CENTER
        to_cube = observation[18:21] * REACH + CENTER - fingers
        lateral, above = float(np.linalg.norm(to_cube[:2])), float(-to_cube[2])
        self.closed_for = self.closed_for + 1 if is_closed else 0
        command, move = STAY, np.zeros(3)
        if is_closed and np.linalg.norm(to_cube) > 0.04:  # the gripper is empty
            command, move = OPEN, np.array([0.0, 0.0, 1.0])
        elif is_closed:
            move[2] = 1.0 if self.closed_for > 1 else 0.0
        elif lateral > 0.015 and above < 0.045:  # too low to move above the cube
            move[2] = 1.0
        elif lateral > 0.015:
            move[:2] = to_cube[:2] / MOVE
        elif above > 0.008:
            move = to_cube / MOVE
        else:
            command = CLOSE
        move = move + self.noise * self.generator.standard_normal(3)
        return np.array([*move.clip(-1.0, 1.0), command], np.float32)


class ScriptedHelp(InterventionSource):
    """A stand-in for a person: an expert that takes over less and less often.

    At env step t of the run it takes over with probability `rate` (1 - t / `last_step`), for 10 to
    20 steps; and at step 40 of an episode with probability 1 - t / `last_step`, for 15 to 25 steps.

    Args:
        last_step: env steps of the run after which the helper stops.
        rate: initial probability per step.
        noise: noise of the expert, see `PickCubeExpert`. The env's seed determines all random
            numbers.
    """

    def __init__(self, last_step: int = 5_000, rate: float = 0.03, noise: float = 0.1) -> None:
        check_range("last_step", last_step, minimum=1)
        check_range("rate", rate, minimum=0, maximum=1)
        self.last_step, self.rate = last_step, rate
        self.expert = PickCubeExpert(noise)
        self.env: gymnasium.Env | None = None
        self.steps = 0  # env steps of the run
        self.left = 0  # remaining steps of help
        self.episode_steps = 0

    def open(self, env: gymnasium.Env) -> None:
        self.env = env

    def reset(self, seed: int | None) -> None:
        self.left = self.episode_steps = 0
        if seed is not None:
            self.expert.generator = np.random.default_rng(seed)

    def poll(self, observation: Any) -> InterventionDecision:
        draw = self.expert.generator
        # The chance of help falls to 0 at `last_step`.
        chance = max(0.0, 1.0 - self.steps / self.last_step)
        self.steps += 1
        self.episode_steps += 1
        if self.left == 0:
            if draw.random() < self.rate * chance:
                self.left = int(draw.integers(10, 21))
            elif self.episode_steps == 40 and draw.random() < chance:
                self.left = int(draw.integers(15, 26))
            self.expert.reset()
        if self.left == 0 or self.steps > self.last_step:
            return InterventionDecision()
        self.left -= 1
        if self.env is not None and isinstance(observation, dict):  # the expert sees the cube
            observation = self.env.get_wrapper_attr("state")
        return InterventionDecision(self.expert(observation))

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "left": self.left,
            "episode_steps": self.episode_steps,
            "closed_for": self.expert.closed_for,
            "generator": dict(self.expert.generator.bit_generator.state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.left = state["steps"], state["left"]
        self.episode_steps = state["episode_steps"]
        self.expert.closed_for = state["closed_for"]
        self.expert.generator.bit_generator.state = state["generator"]
