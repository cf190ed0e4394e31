"""Step a simulator that holds all of its envs as tensors, on any device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError, VectorEnv
from lightning_rl.extend.envs import (
    Observation,
    Seed,
    check_vector,
    refuse_missing_end,
    replacement,
)
from lightning_rl.extend.errors import EnvFaultError, closest, require
from lightning_rl.extend.rollout import FieldSpec, map_tree
from lightning_rl.extend.spaces import as_env_action, differs_in_env, flat_actions, space_of
from lightning_rl.extensions.simulators.simulator_events import SimulatorEvents

Resets = Literal["by_itself", "a_step_late", "by_index"]
"""What resets finished envs: the simulator (in the step, or in the next step), or this class."""

AUTORESET = {
    AutoresetMode.SAME_STEP: "by_itself",
    AutoresetMode.NEXT_STEP: "a_step_late",
    AutoresetMode.DISABLED: "by_index",
}
"""Names of the modes in Gymnasium."""

FINAL = ("final_obs", "final_observation")
"""Info keys of true final observations, of Gymnasium and ManiSkill."""


class TensorSimulator(VectorEnv):
    """Adapter of a simulator of N envs with tensors, such as Isaac Lab or ManiSkill.

    The simulator has `num_envs`, `device`, `single_action_space`, `reset(seed=..., options=...)`
    and `step(action)`, with the results of Gymnasium's vector envs as tensors [N, ...] or dicts of
    tensors. `action` is a tensor [N, *A], or for a Dict or Tuple a dict or tuple of tensors;
    choices count from the space's `start`. Observation groups, such as Isaac Lab's `policy` and
    `critic`, become keys of a Dict: a policy with `actor_keys: [policy]` and `critic_keys:
    [critic]` is asymmetric. Reports are read from the info, or from its `final_info` for the step
    before a reset: `success` and `fail` [N] bool; `rewards` and `metrics`, dicts of numbers [N] (or
    one number for all envs) by name; `log`, as in Isaac Lab and rsl_rl, a dict of numbers by chart
    name, whose means over the steps of a rollout are charted (`Episode/<name>` for a name without
    "/"). A failed episode is `terminated`.

    If the simulator resets finished envs one step *late* (Gymnasium's "next-step"), the action of
    that step has no effect. The rollout marks the step as `padding`: algorithms do not train on it,
    and no statistic counts it.

    Env steps per second are `render_fps` of the `metadata` of the simulator or of the env in it,
    otherwise 1 / `step_dt` or 1 / `dt`.

    Events (`data.events`) change the simulator themselves: a function `(env, **params)` that reads
    `env.simulator`, changes the envs in `env.rows` [N] bool, and returns nothing.

    Source: Isaac Lab 2 (`isaaclab.envs.ManagerBasedRLEnv.step`): resets within the step, without
    final observations. ManiSkill 3 (`mani_skill.vector.wrappers.gymnasium`, `ManiSkillVectorEnv`):
    returns `final_observation` and `final_info`; with auto_reset false it takes
    `reset(options={"env_idx": ...})`. Tested with mjlab 1.6 (`scripts/train_mjlab.py`), and with
    stand-ins of the other simulators.

    Args:
        num_envs: N.
        make: makes the simulator for a number of envs: a function, in YAML its import path.
        resets: the simulator resets a finished env within the step (`by_itself`) or in the next
            step (`a_step_late`), or this class resets it (`by_index`), with option `env_idx` [M]
            int64, the indices of the finished envs.
        missing_final: if the simulator gives no final observation of a truncated episode: `refuse`,
            or use the `last_observation` before the step, as rsl_rl does. Its value is similar if
            steps are short.
        seeds: `one`: `reset` takes one seed for all envs, evaluation episodes do not correspond to
            their seeds, and groups of equal starts (GRPO) are refused; `each`: a seed per env.
        report: returns further entries of a step's info, `success`, `fail`, `rewards`, `metrics` or
            `log`, from the simulator and its info; a function, in YAML its path.
        clip_action: clip continuous actions to the bounds of the space before stepping.

    Raises:
        ConfigurationError: `make` returned no such simulator, or another number of envs.
    """

    def __init__(
        self,
        num_envs: int,
        make: Callable[[int], Any],
        resets: Resets = "by_itself",
        missing_final: Literal["refuse", "last_observation"] = "refuse",
        seeds: Literal["one", "each"] = "one",
        report: Callable[[Any, dict[str, Any]], Mapping[str, Any]] | None = None,
        clip_action: bool = True,
    ) -> None:
        self.simulator = make(num_envs)
        self._resets, self._missing_final, self._seeds = resets, missing_final, seeds
        count = int(self._env_attribute("num_envs"))
        require(
            count == num_envs,
            f"make returned a simulator of {count} envs, but {num_envs} were requested. It must "
            "make as many envs as its argument.",
        )
        self.num_envs, self.device = num_envs, torch.device(self._env_attribute("device"))
        space = self._env_attribute("single_action_space")
        self._check_resets()
        self.single_action_space = flat_actions(_box_of(space, self._name))
        self._converts = differs_in_env(self.single_action_space)
        self._clip = _bounds(self.single_action_space, self.device) if clip_action else None
        self._report = report
        self._events: SimulatorEvents | None = None
        self._counter: Any = None  # has the steps of episodes, if first ones have random lengths
        self._last: Any = self._reset(None)
        self._late = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        # Read the keys of an observation: Isaac Lab's direct envs do not announce the group
        # `critic`. The bounds, which floats do not show, are the announced ones.
        owners = (self.simulator, self.simulator.unwrapped)
        spaces = (getattr(owner, "single_observation_space", None) for owner in owners)
        announced = next((space for space in spaces if space is not None), None)
        self.single_observation_space = _bounded(space_of(self._last), announced)
        # The time limit as Isaac Lab and rsl_rl name it, then as Gymnasium does.
        limit = getattr(self.simulator.unwrapped, "max_episode_length", None)
        limit = limit or getattr(getattr(self.simulator, "spec", None), "max_episode_steps", None)
        self.max_episode_steps = None if limit is None else int(limit)
        self.metadata = self._described()
        self.render_fps = float(self.metadata.get("render_fps") or VectorEnv.render_fps)

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        late = {"padding": ((), torch.bool)} if self._resets == "a_step_late" else {}
        return super().extra_fields | late

    def reset(self, seed: Seed = None, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        simulator_seed: Any = seed
        if self._seeds == "one" and isinstance(seed, Sequence):
            # One seed has to do for all envs.
            simulator_seed = int(seed[0])
        elif self._seeds == "each" and seed is not None:
            simulator_seed = self.seeds_of(seed)
        self._last = self._reset(simulator_seed, options)
        if self._counter is not None and seed is not None:
            generator = torch.Generator().manual_seed(self.seeds_of(seed)[0])
            steps = torch.randint(self._first_limit, (self.num_envs,), generator=generator)
            # Assigned, as rsl_rl does: wrappers have a setter.
            self._counter.episode_length_buf = steps.to(self._counter.episode_length_buf)
            # Observations may show the counter, such as the phase of a gait.
            observe = getattr(self.simulator, "current_observation", lambda: None)
            if (observation := observe()) is not None:
                self._last = self._observed(observation)
        if self._events is not None:
            self._events.reset(simulator_seed)
        self._late = torch.zeros_like(self._late)
        return self._last, {}

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        previous = self._last
        if self._missing_final == "last_observation":
            previous = map_tree(torch.clone, previous)  # the simulator may overwrite its tensors
        if self._events is not None:
            self._events.before_step()
        action = action.to(self.device)
        if self._clip is not None:
            action = action.clamp(*self._clip)
        env_action = as_env_action(self.single_action_space, action) if self._converts else action
        raw_obs, reward, terminated, truncated, info = self.simulator.step(env_action)
        if self._report is not None:
            info = {**info, **self._report(self.simulator, info)}
        observation = self._observed(raw_obs)
        reward = self._numbers("reward", reward)
        terminated = self._flags("terminated", terminated)
        truncated = self._flags("truncated", truncated)
        results = self._reported(info, terminated | truncated)
        if "fail" in results:
            # Only this class can end an episode at a failure: a simulator that resets by itself
            # has ended it, and may call it truncated.
            ends = True if self._resets == "by_index" else truncated
            terminated = terminated | (results["fail"] & ends)
        if self._resets == "a_step_late":
            results |= {"final_obs": observation, "padding": self._late}
            # After an end, this step only resets: its reward is that of no action.
            reward = reward.masked_fill(self._late, 0.0)
            terminated, truncated = terminated & ~self._late, truncated & ~self._late
            self._late = terminated | truncated
        elif self._resets == "by_index":
            observation = self._restart(observation, terminated | truncated, results)
        elif (key := next((key for key in FINAL if key in info), None)) is not None:
            results["final_obs"] = self._observed(info[key])
        elif self._missing_final == "last_observation":
            results["final_obs"] = previous
        else:
            # A terminated episode has no bootstrap value, and needs no final observation.
            missing = (truncated & ~terminated).cpu()
            refuse_missing_end(self._name, missing, " Or set missing_final: last_observation.")
        if self._events is not None:
            self._events.after_step(terminated | truncated)
        self._last = observation
        return observation, reward, terminated, truncated, results

    def randomize_first_episodes(self, limit: int) -> None:
        # The name in rsl_rl and Isaac Lab. Wrappers may not pass it on.
        owners = (self.simulator, self.simulator.unwrapped)
        counters = [env for env in owners if hasattr(env, "episode_length_buf")]
        if not counters:
            super().randomize_first_episodes(limit)  # refuses
        self._counter, self._first_limit = counters[0], limit

    def add_events(self, events: Mapping[str, Any]) -> None:
        require(
            self._resets != "a_step_late",
            f"{self._name} resets one step late, so reset events cannot fire in time: remove "
            f"{', '.join(events)}, or make the simulator reset within the step.",
        )
        for name, event in events.items():
            require(
                self.known_fps is not None or getattr(event, "mode", None) != "interval",
                f"{self._name} does not say its step rate, so '{name}' of events cannot wait for "
                "seconds: give it metadata = {'render_fps': env steps per second}, or step_dt.",
            )
        timing = (1.0 / self.render_fps, self.max_episode_steps)
        owner = f"TensorSimulator of {self._name}"
        self._events = SimulatorEvents(
            self.simulator, events, owner, self.num_envs, self.device, *timing
        )

    def _reported(self, info: dict[str, Any], done: Tensor) -> dict[str, Any]:
        final = info.get("final_info")
        final = final if isinstance(final, Mapping | TensorDict) else None
        report = _from_before_the_reset(info, final, done)
        results: dict[str, Any] = {
            key: self._flags(f"info {key}", report[key])
            for key in ("success", "fail")
            if key in report
        }
        if "success" in results and "fail" in results:
            results["success"] = results["success"] & ~results["fail"]
        for kind in ("rewards", "metrics"):
            if isinstance(report.get(kind), Mapping | TensorDict):
                numbers = {
                    name: self._numbers(f"info {kind}.{name}", self._per_env(value))
                    for name, value in report[kind].items()
                }
                # NaN: statistics leave out the steps that only reset.
                results[kind] = {
                    name: number.masked_fill(self._late, torch.nan)
                    for name, number in numbers.items()
                }
        for key in results.keys() & {"success", "fail"}:
            results[key] = results[key] & ~self._late
        for name in self.info_fields.keys() & report.keys():
            results[name] = self._per_env(report[name])
        if isinstance(log := report.get("log"), Mapping):
            results["log"] = dict(self._logged(log))
        return results

    def _logged(self, log: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the means of numbers and tensors by rsl_rl's chart names."""
        for name, value in log.items():
            number = self._per_env(value)
            if not isinstance(number, Tensor) or number.is_complex():
                raise EnvFaultError(
                    f"{self._name} returned info['log']['{name}'] as {value!r:.60} "
                    f"({type(value).__name__}): return a number or a tensor of numbers."
                )
            yield name if "/" in name else f"Episode/{name}", number.float().mean().to(self.device)

    def _per_env(self, value: Any) -> Any:
        """Return one number as a tensor [N], and anything else unchanged."""
        if isinstance(value, int | float | np.number):
            return torch.full((self.num_envs,), float(value), device=self.device)
        single = isinstance(value, Tensor) and value.dim() == 0
        return value.expand(self.num_envs) if single else value

    def _numbers(self, field: str, value: Any) -> Tensor:
        return check_vector(self._name, field, value, self.num_envs).float()

    def _flags(self, field: str, value: Any) -> Tensor:
        return check_vector(self._name, field, value, self.num_envs, "bi").bool()

    def render(self, rows: Sequence[int]) -> np.ndarray:
        pictures = self.simulator.render()
        if getattr(pictures, "ndim", 0) == 3:  # one view of all envs
            return np.stack([torch.as_tensor(pictures).cpu().numpy()] * len(rows))
        if getattr(pictures, "ndim", 0) != 4 or len(pictures) != self.num_envs:
            raise ConfigurationError(
                f"{self._name} cannot draw single envs: its render() does not return "
                f"[{self.num_envs}, H, W, 3], nor one picture [H, W, 3]. Turn videos off, or make "
                "it render rgb_array."
            )
        frames: np.ndarray = torch.as_tensor(pictures)[list(rows)].cpu().numpy()
        return frames

    def close(self) -> None:
        self.simulator.close()

    @property
    def _name(self) -> str:
        return type(self.simulator.unwrapped).__name__

    def _env_attribute(self, name: str) -> Any:
        # Wrappers may not pass attributes on: look at the env itself, too.
        for owner in (self.simulator, getattr(self.simulator, "unwrapped", None)):
            if hasattr(owner, name):
                return getattr(owner, name)
        kind = type(self.simulator).__name__
        raise ConfigurationError(
            f"make returned a {kind}, which has no {name}{closest(name, dir(self.simulator))}. "
            + (
                replacement(self.simulator)
                or "It must return a simulator of N envs, with num_envs, device, "
                "single_action_space, reset and step."
            )
        )

    def _described(self) -> dict[str, Any]:
        """Return the metadata of the simulator and of the envs in it, with the step rate."""
        env = self.simulator.unwrapped
        # An adapter of an env that is itself wrapped, such as Isaac Lab's for rsl_rl.
        within = [getattr(env, name, None) for name in ("unwrapped", "env")]
        owners = [self.simulator, env, *within]
        metadata: dict[str, Any] = {}
        for owner in reversed(owners):
            metadata |= getattr(owner, "metadata", None) or {}
        periods = [getattr(owner, name, None) for name in ("step_dt", "dt") for owner in owners]
        seconds = next((x for x in periods if isinstance(x, int | float | np.number) and x), None)
        if seconds is not None and not metadata.get("render_fps"):
            metadata["render_fps"] = 1.0 / float(seconds)
        return metadata

    def _check_resets(self) -> None:
        mode = (getattr(self.simulator, "metadata", None) or {}).get("autoreset_mode")
        report = None if mode is None else AUTORESET[AutoresetMode(mode)]
        require(
            report in (None, self._resets),
            f"{self._name} has the autoreset mode {mode}, but resets is {self._resets}: set "
            f"resets: {report}.",
        )

    def _reset(self, seed: Any, options: Any = None) -> Observation:
        observation, _ = self.simulator.reset(seed=seed, options=options)
        return self._observed(observation)

    def _restart(
        self, observation: Observation, done: Tensor, results: dict[str, Any]
    ) -> Observation:
        if not done.any():
            return observation
        # A copy, because the reset may write into the same tensors.
        results["final_obs"] = map_tree(torch.clone, observation)
        return self._reset(None, {"env_idx": done.nonzero().flatten()})

    def _observed(self, observation: Any) -> Observation:
        if isinstance(observation, dict | TensorDict):
            parts = {key: self._observed(child) for key, child in observation.items()}
            return TensorDict(parts, [self.num_envs], device=self.device)
        if not isinstance(observation, Tensor):
            raise EnvFaultError(
                f"{self._name} returned an observation of {type(observation).__name__}: return a "
                f"tensor [{self.num_envs}, ...], or a dict of such tensors."
            )
        return observation.float() if observation.is_floating_point() else observation


def _box_of(space: Any, name: str) -> gymnasium.Space[Any]:
    """Convert another library's space with shape, low and high to a Box of Gymnasium."""
    if isinstance(space, gymnasium.Space):
        return space
    missing = [key for key in ("shape", "low", "high") if not hasattr(space, key)]
    require(
        not missing,
        f"{name} has the action space {space!r:.80} without {', '.join(missing)}: it must be a "
        "space of Gymnasium, or have shape, low and high.",
    )
    bounds = [torch.as_tensor(bound).cpu().numpy() for bound in (space.low, space.high)]
    low, high = (np.broadcast_to(bound, space.shape).astype(np.float32) for bound in bounds)
    return gymnasium.spaces.Box(low, high, dtype=np.float32)


def _bounded(space: gymnasium.Space[Any], announced: Any) -> gymnasium.Space[Any]:
    """Return the space with the announced bounds of the Boxes whose shape and dtype agree."""
    if isinstance(space, gymnasium.spaces.Dict):
        parts = announced.spaces if isinstance(announced, gymnasium.spaces.Dict) else {}
        return gymnasium.spaces.Dict(
            {key: _bounded(child, parts.get(key)) for key, child in space.items()}
        )
    agrees = isinstance(announced, gymnasium.spaces.Box) and (
        (announced.shape, announced.dtype) == (space.shape, space.dtype)
    )
    return announced if agrees else space


def _bounds(space: gymnasium.Space[Any], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the bounds of actions [*A], or None if no entry has any: a clamp would do nothing."""
    if not isinstance(space, gymnasium.spaces.Box):
        return None
    low, high = (
        torch.as_tensor(bound, dtype=torch.float32, device=device)
        for bound in (space.low, space.high)
    )
    return (low, high) if bool((low.isfinite() | high.isfinite()).any()) else None


def _from_before_the_reset(report: Any, final: Any, done: Tensor) -> Any:
    """Take the rows of finished envs, `done` [N], from `final`; extra entries replace all rows."""
    if isinstance(report, Mapping | TensorDict) and isinstance(final, Mapping | TensorDict):
        entries = {key: value for key, value in report.items() if key != "final_info"}
        pairs = {key: (entries.get(key), value) for key, value in final.items()}
        return entries | {key: _from_before_the_reset(*pair, done) for key, pair in pairs.items()}
    if isinstance(report, Tensor) and isinstance(final, Tensor) and report.shape == done.shape:
        return torch.where(done, final, report)
    return report if final is None else final
