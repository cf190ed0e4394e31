"""Adapt Gymnasium's vector envs to tensors; handles autoreset and clipping."""

import atexit
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import create_empty_array
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.gymnasium.checksums import FOLD_STEPS
from lightning_rl.envs.gymnasium.drawing import kwargs_to_draw, kwargs_to_show
from lightning_rl.envs.gymnasium.episode_log import EpisodeLog
from lightning_rl.envs.gymnasium.first_episode import RandomFirstEpisode
from lightning_rl.envs.gymnasium.goals import goal_function
from lightning_rl.envs.gymnasium.inline import InlineVectorEnv
from lightning_rl.envs.gymnasium.making import EnvWrapper, make_gymnasium, missing_package
from lightning_rl.envs.gymnasium.mujoco_bindings import has_mujoco_profiler, set_mujoco_profiler
from lightning_rl.envs.gymnasium.recorded_info import RecordedInfo
from lightning_rl.envs.infos import (
    EXECUTED_ACTION,
    INTERVENED,
    EnvReport,
    InfoReader,
    read_interventions,
    read_penalty,
)
from lightning_rl.envs.pictures import one_picture
from lightning_rl.envs.refusals import refuse_missing_end, refuse_unclipped_parts
from lightning_rl.envs.step_results import check_like
from lightning_rl.envs.steppers import ArrayStepper, RolloutStepper
from lightning_rl.envs.vector_env import Info, Observation, Options, Seed, VectorEnv
from lightning_rl.rollout.contract import map_tree
from lightning_rl.rollout.goals import GoalFunction, is_goal_space
from lightning_rl.rollout.structured_actions import as_env_counts, as_policy_counts, first_choice
from lightning_rl.system.errors import require
from lightning_rl.system.machine import settings


class GymnasiumEnv(VectorEnv):
    """Any registered Gymnasium env, N times.

    An env or wrapper with interventions of a person or a script sets
    `metadata["reports_interventions"] = True` and reports `executed_action` and `intervened` in the
    info of a step: see `VectorEnv.step`. A wrapper that reports a penalty (`PenaltyTerms`) sets
    `metadata["reports_penalty"] = True`.

    Args:
        num_envs: N.
        id: the registered id; `module:Name-v0` imports the module first.
        env_kwargs: passed to the env's constructor; `${NAME}` is replaced by the environment
            variable, but not in the files of the run.
        vectorization: `sync` steps the envs one after the other, `async` steps each env in its own
            process, `vector_entry_point` uses the env's own batched version (it must reset finished
            envs in the same step).
        wrappers: applied to each env in order, `gymnasium.Env -> gymnasium.Env`; in YAML a list of
            class paths.
        clip_action: clip continuous actions to the bounds of the space before stepping.
        executed_action_key: info key of the executed action; `teleop_action` in gym-hil. Another
            key also declares interventions.
        intervened_key: info key of the intervention flag; `is_intervention` in gym-hil.

    Attributes:
        mujoco_profiler: whether MuJoCo's profiler is on, set at the first reset; None for other
            envs.

    Raises:
        ConfigurationError: for an unknown id, a missing package, an env that resets finished envs
            in the next step, or parts of actions with `clip_action` false.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        num_envs: int,
        id: str,
        env_kwargs: dict[str, Any] | None = None,
        vectorization: Literal["sync", "async", "vector_entry_point"] = "sync",
        wrappers: Sequence[EnvWrapper] | None = None,
        clip_action: bool = True,
        executed_action_key: str = EXECUTED_ACTION,
        intervened_key: str = INTERVENED,
    ) -> None:
        require(num_envs >= 1, f"num_envs must be at least 1, got {num_envs}.")
        require(
            bool(id), "The env id is empty; give a registered Gymnasium id such as CartPole-v1."
        )
        self.id, self.env_kwargs = id, env_kwargs or {}
        self.num_envs = num_envs
        self.vectorization = vectorization
        self._clips = clip_action
        self._replayable = vectorization != "vector_entry_point"
        self._without_interventions = False
        self._names = {executed_action_key: EXECUTED_ACTION, intervened_key: INTERVENED}
        # Only keys that differ are renamed.
        self._names = {theirs: ours for theirs, ours in self._names.items() if theirs != ours}
        self._make = partial(
            make_gymnasium, id, num_envs, vectorization=vectorization, names=self._names
        )
        self._wrappers = list(wrappers or [])  # a copy: `wrap_single_envs` extends it
        self._env = self._make(self.env_kwargs, wrappers=self._wrappers)
        atexit.register(_close, weakref.ref(self))  # a strong reference would keep the env alive
        self._take_spaces()
        self._observation: Any = None
        self.mujoco_profiler: bool | None = None
        self.metadata = dict(self._env.metadata)
        self.render_fps = float(self.metadata.get("render_fps") or self.render_fps)
        self._log = EpisodeLog(f"env '{id}'", num_envs)
        self.max_episode_steps = self._time_limit()

    @property
    def first_env(self) -> gymnasium.Env | None:
        """The first env with its wrappers; None unless `sync`."""
        return self._env.envs[0] if isinstance(self._env, InlineVectorEnv) else None

    @property
    def goals(self) -> GoalFunction | None:
        if not is_goal_space(self.single_observation_space):
            return None
        # Envs in other processes cannot be asked between their steps: make another one.
        args: dict[str, Any] = {"wrappers": self._wrappers, "names": self._names}
        env = self.first_env or make_gymnasium(self.id, 1, self.env_kwargs, "sync", **args).envs[0]
        return goal_function(env)

    def record_info(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().record_info(shapes)
        # Inside the process of each env.
        self.wrap_single_envs(partial(RecordedInfo, shapes=shapes))

    def randomize_first_episodes(self, limit: int) -> None:
        if not self._replayable:
            super().randomize_first_episodes(limit)  # refuses
        # Innermost, next to Gymnasium's TimeLimit: other wrappers see the truncation.
        self._wrappers.insert(0, partial(RandomFirstEpisode, limit=limit))
        self._recreate()

    def reset(self, seed: Seed = None, options: Options = None) -> tuple[Observation, Info]:
        seeds = seed if seed is None else _plain_seed(seed)
        self._profile_mujoco()
        self._observation, info = self._env.reset(seed=seeds, options=options)
        self._log.begin(self._observation)  # each reset begins new episodes
        return wrap_arrays(self._observation), info

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        observation, *results, info = self.step_arrays(action.cpu().numpy())
        reward, terminated, truncated = (torch.from_numpy(array) for array in results)
        return wrap_arrays(observation), reward, terminated, truncated, info

    def rollout_stepper(self, rollout: TensorDict) -> RolloutStepper:
        # Only without an override of `step`, and without interventions, which need no speed.
        quick = type(self) is GymnasiumEnv and not self.extra_fields
        if quick and _is_plain(rollout):
            return ArrayStepper(self, rollout)
        return super().rollout_stepper(rollout)

    def step_arrays(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step by actions [N, *A] as in `step`, with arrays; `info` still holds tensors."""
        # Copy the actions for the replay, because the rollout storage is overwritten.
        if self._clip is not None:
            actions = actions.clip(*self._clip)
            if actions.dtype is not self._action_dtype:
                actions = actions.astype(self._action_dtype)
        elif self._first_action is not None:
            actions = as_env_counts(actions, self._first_action).astype(self._action_dtype)
        else:
            actions = actions.astype(self._action_dtype)
        self._observation, reward, terminated, truncated, info = self._env.step(actions)
        if self._replayable:
            done = terminated | truncated if "final_obs" in info else None  # most steps end none
            self._log_results(reward, info.get("report"), done)
            self._log_actions(actions, done)
        if info or self.reports_interventions or self.reports_penalty:
            info = self._tensor_info(info, actions, terminated, truncated)
        return self._observation, reward, terminated, truncated, info

    def state_dict(self) -> dict[str, Any] | None:
        if not self._replayable or self._log.is_cut:
            return None
        starts = self._env.get_attr("episode_start")
        if any(start is None for start in starts):  # an unknown generator, or a real robot
            return None
        state = self._log.state_dict(starts, self._observation)
        if self.reports_interventions:
            state["interventions"] = list(self._env.call("intervention_states"))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        self._profile_mujoco()
        self._observation = self._log.replay(self._env, state, self.single_observation_space)
        if isinstance(self._env, InlineVectorEnv):  # it counts the time limits itself
            self._env.set_elapsed(self._log.lengths())
        return wrap_arrays(self._observation)

    @property
    def progress(self) -> int:
        return self._log.turns

    def make_renderable(self) -> None:
        if self.env_kwargs.get("render_mode") != "rgb_array":
            self.env_kwargs = kwargs_to_draw(self.id, self._env.metadata, self.env_kwargs)
            self._recreate()

    def show(self) -> None:
        self.env_kwargs = kwargs_to_show(self.id, self.metadata, self.env_kwargs)
        self._recreate()

    def wrap_single_envs(self, wrapper: EnvWrapper) -> None:
        """Add one wrapper around each env; restarts all envs and updates the spaces.

        Raises:
            ConfigurationError: a batched version has no single envs to wrap.
        """
        self._wrappers.append(wrapper)
        self._recreate()
        self._take_spaces()

    def render(self, rows: Sequence[int]) -> np.ndarray:
        try:
            if self._replayable:
                self._env.set_attr("picture_wanted", [i in rows for i in range(self.num_envs)])
                pictures = self._env.call("picture")
            else:
                pictures = self._env.render()
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            raise missing_package(self.id, error) from error
        row_pictures = [None if pictures is None else pictures[i] for i in rows]
        is_drawn = self.env_kwargs.get("render_mode") == "rgb_array"
        require(
            is_drawn or all(picture is not None for picture in row_pictures),
            f"Env '{self.id}' returns no pictures: call make_renderable() before its reset.",
        )
        return np.stack([one_picture(f"Env '{self.id}'", picture) for picture in row_pictures])

    def swap_pictures(self, every: Sequence[int]) -> Sequence[Sequence[tuple[int, Any]]]:
        """Return the pictures of each env's `ChunkWrapper`, and set when it takes others."""
        pictures: Sequence[Any] = self._env.call("pictures")
        self._env.set_attr("picture_every", every)
        return pictures

    def close(self) -> None:
        self._env.close()

    def _profile_mujoco(self) -> None:
        """Set MuJoCo's profiler at a reset: the trainer's settings come after `__init__`."""
        enabled = settings().mujoco_profiler
        if self._replayable:
            answers = self._env.call("profile_mujoco", enabled)
            self.mujoco_profiler = next((answer for answer in answers if answer is not None), None)
        else:
            set_mujoco_profiler(enabled)
            self.mujoco_profiler = has_mujoco_profiler(self._env)

    def stop_interventions(self) -> None:
        self._without_interventions = True
        if self._replayable:
            self._env.call("stop_interventions")

    def _recreate(self) -> None:
        # Before the old env is closed: if this fails, the old one stays usable.
        new_env = self._make(self.env_kwargs, wrappers=self._wrappers)
        self._env.close()
        self._env = new_env
        if self._without_interventions:  # the new env does not know
            self.stop_interventions()

    def _take_spaces(self) -> None:
        self.single_observation_space = self._env.single_observation_space
        self.single_action_space = self._env.single_action_space
        refuse_unclipped_parts(f"Env '{self.id}'", self.single_action_space, self._clips)
        self._action_dtype = self.single_action_space.dtype
        self._clip: tuple[np.ndarray, np.ndarray] | None = None
        if self._clips and isinstance(self.single_action_space, gymnasium.spaces.Box):
            bounds = (self.single_action_space.low, self.single_action_space.high)
            # Bounds for the whole batch, because NumPy takes twice as long with broadcasting.
            low, high = (np.stack([bound] * self.num_envs) for bound in bounds)
            self._clip = (low, high)
        announced = self._env.metadata.get("reports_interventions", False)
        self.reports_interventions = bool(announced or self._names)
        self.reports_penalty = bool(self._env.metadata.get("reports_penalty", False))
        self._reader = InfoReader(
            f"Env '{self.id}'",
            self.num_envs,
            interventions=self.reports_interventions,
            penalty=self.reports_penalty,
        )
        # Policies count choices from 0, an env may start at another number.
        start = first_choice(self.single_action_space)
        self._first_action = start if start.any() else None
        self._finals: Any = None

    def _time_limit(self) -> int | None:
        if self._replayable:
            limit: int | None = self._env.call("time_limit")[0]
            return limit
        return getattr(self._env.spec, "max_episode_steps", None)

    def _log_results(self, reward: np.ndarray, report: EnvReport | None, done: Any) -> None:
        checksums = self._log.checksums
        if self._observation is not checksums.observation:  # another array than at the last step
            checksums.look_at(self._observation)
        view_bytes = [view.tobytes() for view in checksums.views]
        checksums.steps.append((view_bytes, reward.tobytes(), report, done))
        if len(checksums.steps) == FOLD_STEPS:  # sums of single steps would take longer
            checksums.fold()

    def _log_actions(self, actions: np.ndarray, done: np.ndarray | None) -> None:
        log = self._log
        log.actions.append(actions)
        if done is not None:
            log.starts[done] = log.first_kept + len(log.actions)
        # Only sometimes, because deleting from the front of a list moves all other entries.
        if len(log.actions) % 1024 == 0:
            log.trim()

    def _tensor_info(
        self,
        info: dict[str, Any],
        actions: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if "final_obs" in info:
            final = info["final_obs"]
            if not self._replayable:
                # A batched env resets its envs itself, and may omit final observations.
                self._check_ends(info, truncated & ~terminated)
            if isinstance(final, np.ndarray) and final.dtype == object:
                final = self._final_rows(final)
            result["final_obs"] = wrap_arrays(final)
        if self._replayable:
            report = info.get("report", {})
        else:
            report = self._reader.read_arrays(info, terminated | truncated, self._names)
        if self.reports_interventions:
            arrays = read_interventions(f"Env '{self.id}'", report, actions)
            if self._first_action is not None:
                executed = arrays["executed_action"]
                arrays["executed_action"] = as_policy_counts(executed, self._first_action)
            result |= {key: torch.from_numpy(array) for key, array in arrays.items()}
        if self.reports_penalty:
            result["penalty"] = torch.from_numpy(read_penalty(report, self.num_envs))
        return result | InfoReader.to_tensors(report) if report else result

    def _final_rows(self, rows: np.ndarray) -> Any:
        """Copy rows that are not None into arrays [N, ...], which the next step overwrites."""
        if self._finals is None:
            space = self.single_observation_space
            self._finals = create_empty_array(space, self.num_envs, np.zeros)

        def put(i: int, array: np.ndarray, row: Any) -> None:
            if np.shape(row) != array.shape[1:]:  # it might broadcast
                place = array[i : i + 1]
                check_like(f"Env '{self.id}'", np.asarray(row)[None], place, "final_obs")
            array[i] = row

        for i, row in enumerate(rows):
            if row is not None:
                map_tree(partial(put, i), self._finals, row)
        return self._finals

    def _check_ends(self, info: dict[str, Any], cut: np.ndarray) -> None:
        final = info["final_obs"]
        has_final = np.asarray(info.get("_final_obs", True), dtype=bool)
        if isinstance(final, np.ndarray) and final.dtype == object:
            has_final = has_final & np.array([row is not None for row in final])
        refuse_missing_end(f"Env '{self.id}'", cut & ~has_final)


def wrap_arrays(observation: Any) -> Observation:
    """Wrap arrays, or dicts of arrays, as tensors [N, ...] that share their memory."""
    if isinstance(observation, dict):
        values = {key: wrap_arrays(value) for key, value in observation.items()}
        return TensorDict(values, [len(next(iter(values.values())))])
    return torch.from_numpy(observation)


def _close(reference: "weakref.ref[GymnasiumEnv]") -> None:
    """Close an env at exit, because its workers ignore signals."""
    env = reference()
    if env is not None:
        with suppress(Exception):  # `RLDataModule.close` has reported it
            env.close()


def _is_plain(rollout: TensorDict) -> bool:
    observation = rollout["observation"]
    return isinstance(observation, Tensor) and observation.device.type == "cpu"


def _plain_seed(seed: int | Sequence[int]) -> int | list[int]:
    return [int(s) for s in seed] if isinstance(seed, Sequence) else int(seed)
