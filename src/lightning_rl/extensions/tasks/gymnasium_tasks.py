"""Make the tasks with NumPy in Gymnasium: a single env, or a batch by `gymnasium.make_vec`."""

from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from lightning_rl import ConfigurationError, VectorEnv
from lightning_rl.extend.errors import require
from lightning_rl.extend.rollout import map_tree
from lightning_rl.extensions.tasks.base import Task
from lightning_rl.extensions.tasks.cart_pole import CartPole
from lightning_rl.extensions.tasks.point_mass import PointMass
from lightning_rl.extensions.tasks.push_cube import PushCube

TASKS: dict[str, type[CartPole] | type[PointMass] | type[PushCube]] = {
    "CartPole": CartPole,
    "PointMass": PointMass,
    "PushCube": PushCube,
}
"""Registered tasks, as `lightning_rl/<name>-v0`."""

RenderMode = Literal["rgb_array"] | None
"""Gymnasium's render modes that are supported."""


class GymnasiumTask(gymnasium.Env[Any, np.ndarray]):
    """One env of a task, or of any batched env with one env.

    `reset(seed=s)` begins the first episode of a `Task` with seed s; the env's `np_random` draws
    the seeds of later episodes.

    Args:
        task: a name in `TASKS`, or the batched env.
        render_mode: `rgb_array` or None.
        settings: arguments of the task's constructor.

    Raises:
        ConfigurationError: for a curriculum or startup events, which last longer than an episode.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012

    def __init__(
        self, task: str | VectorEnv, render_mode: RenderMode = None, **settings: Any
    ) -> None:
        self.task = _make(task, 1, settings) if isinstance(task, str) else task
        events = getattr(self.task, "events", None)
        kept = [*self.task.persistent_state, *(events.startup_names if events else ())]
        require(
            not kept,
            f"GymnasiumTask begins each episode with a new seed, and {', '.join(kept)} with it: "
            "use the task itself, by data.env, or without curriculum and startup events.",
        )
        reports = {"reports_interventions": self.task.reports_interventions}
        self.metadata = {**self.metadata, "render_fps": self.task.render_fps, **reports}
        self.render_mode = _checked(render_mode)
        self.observation_space = self.task.single_observation_space
        self.action_space = self.task.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        start = int(self.np_random.integers(2**31)) if seed is None else seed
        # A new seed: the task's own next episode has begun in the last step, and was discarded.
        observation, _ = self.task.reset(seed=[start])
        return map_tree(_first, observation), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        # At the end of an episode the task has begun the next one, which is discarded.
        actions = torch.as_tensor(np.asarray(action))[None]
        observation, reward, terminated, truncated, info = self.task.step(actions)
        done = bool(terminated | truncated)
        final = info.pop("final_obs", None)
        return (
            map_tree(_first, final if done and final is not None else observation),
            float(reward),
            bool(terminated),
            bool(truncated),
            map_tree(_first, info),
        )

    def render(self) -> np.ndarray | None:
        if self.render_mode != "rgb_array":
            return None
        assert isinstance(self.task, Task)
        # The final state, because the task has begun the next episode.
        picture: np.ndarray = _array(self.task.draw(self.task.final_state, *self.task.render_size))
        return picture[0]  # type: ignore[no-any-return]  # an item of an array is untyped


class GymnasiumVectorTask(gymnasium.vector.VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """A batched task as Gymnasium's `VectorEnv`, with same-step autoreset.

    Args:
        task: a name in `TASKS`.
        num_envs: N.
        render_mode: `rgb_array` or None.
        settings: arguments of the task's constructor.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": ["rgb_array"],
        "render_fps": 25,
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(
        self, task: str, num_envs: int = 1, render_mode: RenderMode = None, **settings: Any
    ) -> None:
        self.task = _make(task, num_envs, settings)
        self.metadata = {**self.metadata, "render_fps": self.task.render_fps}
        self.num_envs = num_envs
        self.render_mode = _checked(render_mode)
        self.single_observation_space = self.task.single_observation_space
        self.single_action_space = self.task.single_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._seeded = False

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        # Only a first reset without a seed needs one: later resets continue the streams.
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(2**31))
        self._seeded = True
        observation, _ = self.task.reset(seed)
        return _array(observation), {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.task.step(torch.as_tensor(actions))
        done = _array(terminated | truncated)
        final, info = _array(info.pop("final_obs")), map_tree(_array, info)
        # As in Gymnasium: reports of ended episodes stand in `final_info`.
        infos = _masked(info, ~done)
        if done.any():
            infos["final_obs"], infos["_final_obs"] = final, done
            infos["final_info"], infos["_final_info"] = _masked(info, done), done
        # Gymnasium's vector envs return float64.
        rewards = _array(reward).astype(np.float64)
        return _array(observation), rewards, _array(terminated), _array(truncated), infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        if self.render_mode != "rgb_array":
            return None
        return tuple(self.task.render(range(self.num_envs)))


def _make(task: str, num_envs: int, settings: dict[str, Any]) -> Task:
    return TASKS[task](num_envs, **settings)


def _checked(render_mode: RenderMode) -> RenderMode:
    if render_mode not in (None, "rgb_array"):
        raise ConfigurationError(f"render_mode must be rgb_array or None, got {render_mode!r}.")
    return render_mode


def _array(value: Any) -> np.ndarray:
    assert isinstance(value, Tensor)
    return value.cpu().numpy()


def _masked(info: dict[str, Any], mask: np.ndarray) -> dict[str, Any]:
    masked: dict[str, Any] = {}
    for key, value in info.items():
        masked[key] = _masked(value, mask) if isinstance(value, dict) else value
        masked[f"_{key}"] = mask
    return masked


def _first(values: Tensor) -> Any:
    """Return the value of the first env: a number, or an array."""
    return values.cpu().numpy()[0] if values.dim() > 1 else values.flatten()[0].item()
