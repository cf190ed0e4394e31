"""Step a simulator that holds all of its envs as tensors, on whatever device it has them."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.step_results import TREES
from lightning_rl.envs.vector_env import Observation, Seed, VectorEnv
from lightning_rl.policies.spaces import space_of
from lightning_rl.rollout.contract import FieldSpec, map_tree
from lightning_rl.system.errors import ConfigurationError, EnvFaultError, closest, require

Resets = Literal["by_itself", "a_step_late", "by_index"]
"""Who resets what has finished: the simulator within the step, or in the next one, or we, by
`reset(options=...)`."""

AUTORESET = {
    AutoresetMode.SAME_STEP: "by_itself",
    AutoresetMode.NEXT_STEP: "a_step_late",
    AutoresetMode.DISABLED: "by_index",
}
"""What Gymnasium calls them."""

FINAL = ("final_obs", "final_observation")
"""What true final observations are called: by Gymnasium, and by ManiSkill."""


class TensorSimulator(VectorEnv):
    """A simulator of N envs that takes and gives tensors, such as Isaac Lab or ManiSkill.

    It has `num_envs`, `device`, `single_action_space`, `reset(seed=..., options=...)` and
    `step(action)`, which return what Gymnasium's vector envs do, in tensors [N, ...] or dicts of
    them. Groups of observations, such as Isaac Lab's `policy` and `critic`, are the keys of a Dict:
    `actor_keys: [policy]` and `critic_keys: [critic]` of a policy make it an asymmetric one. What
    an env says of a step may stand in the info or, from before a reset, in its `final_info`:
    `success` and `fail` [N] bool, and `rewards` and `metrics`, dicts of numbers [N] by name. An
    episode that failed has no success, and is `terminated` where it ends or this class ends it.

    Where a simulator resets what has finished one step *late* (Gymnasium's "next-step"), the action
    of that step does nothing, and leads from one episode to another: it is `padding` in a rollout,
    which no algorithm learns from and nothing counts.

    Source: Isaac Lab 2 (`isaaclab.envs.ManagerBasedRLEnv.step`), which resets within the step and
    gives no final observation; ManiSkill 3 (`mani_skill.vector.wrappers.gymnasium`,
    `ManiSkillVectorEnv`), which gives `final_observation` and `final_info` unless its auto_reset is
    false, and then takes `reset(options={"env_idx": ...})`. Tested on stand-ins that do so.

    Args:
        num_envs: N.
        make: makes the simulator of so many envs: a function, in YAML its import path.
        resets: who begins the next episode of an env: the simulator, `by_itself`, within the step
            in which it finished, or `a_step_late`, within the next one; or this class, `by_index`,
            with the indices [M] int64 of those that finished as `env_idx` of the options.
        missing_final: where time has cut an episode and the simulator does not say what it had
            come to: `refuse`, or take the `last_observation` before that step in its place, whose
            value is nearly the same where a step is short. rsl_rl does that.
        seeds: whether `reset` takes `one` seed, of the whole simulator, or one of `each` env. With
            one, episodes of an evaluation are not those of their seeds, and groups of equal starts
            (GRPO) are refused.

    Raises:
        ConfigurationError: where what was made is no such simulator, or has another number of envs.
    """

    def __init__(
        self,
        num_envs: int,
        make: Callable[[int], Any],
        resets: Resets = "by_itself",
        missing_final: Literal["refuse", "last_observation"] = "refuse",
        seeds: Literal["one", "each"] = "one",
    ) -> None:
        self.simulator = make(num_envs)
        self._resets, self._missing_final, self._seeds = resets, missing_final, seeds
        count = int(self._said("num_envs"))
        require(
            count == num_envs,
            f"make returned a simulator of {count} envs, and {num_envs} were asked for. Have it "
            "make as many as its argument says.",
        )
        self.num_envs, self.device = num_envs, torch.device(self._said("device"))
        self._check_resets()
        self.single_action_space = self._said("single_action_space")
        self._last: Any = self._reset(None)
        self._late = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        # By what is there: Isaac Lab's direct envs do not announce the group `critic`.
        self.single_observation_space = space_of(self._last)
        limit = getattr(self.simulator.unwrapped, "max_episode_length", None)
        limit = limit or getattr(getattr(self.simulator, "spec", None), "max_episode_steps", None)
        self.max_episode_steps = None if limit is None else int(limit)
        metadata = getattr(self.simulator, "metadata", None) or {}
        self.render_fps = float(metadata.get("render_fps") or VectorEnv.render_fps)

    @property
    def extra_fields(self) -> dict[str, FieldSpec]:
        late = {"padding": ((), torch.bool)} if self._resets == "a_step_late" else {}
        return super().extra_fields | late

    def reset(
        self, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        seeds: Any = seed
        if self._seeds == "one" and isinstance(seed, Sequence):
            seeds = int(seed[0])
        elif self._seeds == "each" and isinstance(seed, int | np.integer):
            seeds = [int(seed) + i for i in range(self.num_envs)]
        self._last = self._reset(seeds, options)
        self._late = torch.zeros_like(self._late)
        return self._last, {}

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step; see `VectorEnv.step`.

        Raises:
            EnvFaultError: where time has cut an episode of which nobody knows what it had come to,
                and for an outcome that is no tensor [N] of numbers, or of flags.
        """
        before = self._last
        if self._missing_final == "last_observation":
            before = map_tree(torch.clone, before)  # which the simulator may write over
        seen, reward, terminated, truncated, info = self.simulator.step(action.to(self.device))
        observation = self._observed(seen)
        reward = self._numbers("reward", reward)
        terminated = self._flags("terminated", terminated)
        truncated = self._flags("truncated", truncated)
        results = self._reported(info, terminated | truncated)
        if "fail" in results:
            ends = True if self._resets == "by_index" else truncated
            terminated = terminated | (results["fail"] & ends)
        if self._resets == "a_step_late":
            results |= {"final_obs": observation, "padding": self._late}
            reward = reward.masked_fill(self._late, 0.0)
            terminated, truncated = terminated & ~self._late, truncated & ~self._late
            self._late = terminated | truncated
        elif self._resets == "by_index":
            observation = self._restart(observation, terminated | truncated, results)
        elif (key := next((key for key in FINAL if key in info), None)) is not None:
            results["final_obs"] = self._observed(info[key])
        elif self._missing_final == "last_observation":
            results["final_obs"] = before
        else:
            self._refuse_missing(truncated & ~terminated)
        self._last = observation
        return observation, reward, terminated, truncated, results

    def _reported(self, info: dict[str, Any], done: Tensor) -> dict[str, Any]:
        """Return the outcome, terms and metrics of a step, of the time before the resets."""
        final = info.get("final_info")
        final = final if isinstance(final, Mapping | TensorDict) else None
        said = _from_before_the_reset(info, final, done)
        results: dict[str, Any] = {
            key: self._flags(f"info['{key}']", said[key])
            for key in ("success", "fail")
            if key in said
        }
        if "success" in results and "fail" in results:
            results["success"] = results["success"] & ~results["fail"]
        for kind in TREES:
            if isinstance(said.get(kind), Mapping | TensorDict):
                numbers = {
                    name: self._numbers(f"info['{kind}']['{name}']", value)
                    for name, value in said[kind].items()
                }
                results[kind] = {
                    k: x.masked_fill(self._late, torch.nan) for k, x in numbers.items()
                }
        for key in results.keys() & {"success", "fail"}:
            results[key] = results[key] & ~self._late
        return results

    def _numbers(self, field: str, value: Any) -> Tensor:
        """Return one number of each env, [N] float32."""
        numeric = isinstance(value, Tensor) and not value.is_complex()
        self._refuse_unlike(field, value, numeric, "numbers")
        return cast(Tensor, value).float()

    def _flags(self, field: str, value: Any) -> Tensor:
        """Return one flag of each env, [N] bool."""
        is_flag = isinstance(value, Tensor) and not (
            value.is_floating_point() or value.is_complex()
        )
        self._refuse_unlike(field, value, is_flag, "torch.bool")
        return cast(Tensor, value).bool()

    def _refuse_unlike(self, field: str, value: Any, right: bool, wanted: str) -> None:
        if not right or value.shape != (self.num_envs,):
            kind = (
                f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            )
            raise EnvFaultError(
                f"{self._name} returned {field} as {textwrap.shorten(kind, 60)}: return a tensor "
                f"[{self.num_envs}] of {wanted}, one per env."
            )

    def render(self, rows: Sequence[int]) -> np.ndarray:
        pictures = self.simulator.render()
        if getattr(pictures, "ndim", 0) != 4 or len(pictures) != self.num_envs:
            raise ConfigurationError(
                f"{self._name} does not draw its envs one by one: its render() does not return "
                f"[{self.num_envs}, H, W, 3]. Make no videos of it, or have it render rgb_array."
            )
        drawn: np.ndarray = torch.as_tensor(pictures)[list(rows)].cpu().numpy()
        return drawn

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()

    @property
    def _name(self) -> str:
        return type(self.simulator.unwrapped).__name__

    def _said(self, name: str) -> Any:
        """Return an attribute of the simulator, which may stand in wrappers of Gymnasium."""
        for owner in (self.simulator, getattr(self.simulator, "unwrapped", None)):
            if hasattr(owner, name):
                return getattr(owner, name)
        kind = type(self.simulator).__name__
        raise ConfigurationError(
            f"make returned a {kind}, which has no {name}{closest(name, dir(self.simulator))}: it "
            "must return a simulator of N envs, with num_envs, device, single_action_space, reset "
            "and step."
        )

    def _check_resets(self) -> None:
        """Refuse to take a simulator for one that resets at another time, where it says."""
        mode = (getattr(self.simulator, "metadata", None) or {}).get("autoreset_mode")
        said = None if mode is None else AUTORESET[AutoresetMode(mode)]
        require(
            said in (None, self._resets),
            f"{self._name} has the autoreset mode {mode}, and resets is {self._resets}: set "
            f"resets: {said}.",
        )

    def _reset(self, seed: Any, options: dict[str, Any] | None = None) -> Observation:
        observation, _ = self.simulator.reset(seed=seed, options=options)
        return self._observed(observation)

    def _restart(
        self, observation: Observation, done: Tensor, results: dict[str, Any]
    ) -> Observation:
        """Begin the next episode where one is done [N]; return what is observed then."""
        if not done.any():
            return observation
        results["final_obs"] = map_tree(torch.clone, observation)
        return self._reset(None, {"env_idx": done.nonzero().flatten()})

    def _observed(self, observation: Any) -> Observation:
        """Return an observation as a tensor [N, ...] or a tree of them."""
        if isinstance(observation, dict | TensorDict):
            parts = {key: self._observed(child) for key, child in observation.items()}
            return TensorDict(parts, [self.num_envs], device=self.device)
        leaf: Tensor = observation
        return leaf.float() if leaf.is_floating_point() else leaf

    def _refuse_missing(self, cut: Tensor) -> None:
        """Refuse that time has cut episodes [N] of which there is no true final observation."""
        if cut.any():
            raise EnvFaultError(
                f"{self._name} truncated the episode of env {int(cut.nonzero()[0])} without "
                f"{' or '.join(FINAL)} in its info, and what it returned is of the next episode. A "
                "return that time cut short goes on with the value of the observation at which it "
                "was cut. Have the simulator give it, or take the one before that step: "
                "missing_final: last_observation."
            )


def _from_before_the_reset(said: Any, final: Any, done: Tensor) -> Any:
    """Return an info with the rows of finished envs taken from `final`.

    Args:
        said: tensors [N] by name, and dicts of such.
        final: the same of the finished episodes; None for none. An entry that only it has is taken
            for all rows.
        done: [N] bool, which envs finished.
    """
    if isinstance(said, Mapping | TensorDict) and isinstance(final, Mapping | TensorDict):
        ours = {key: value for key, value in said.items() if key != "final_info"}
        pairs = {key: (ours.get(key), value) for key, value in final.items()}
        return ours | {key: _from_before_the_reset(*both, done) for key, both in pairs.items()}
    if isinstance(said, Tensor) and isinstance(final, Tensor) and said.shape == done.shape:
        return torch.where(done, final, said)
    return said if final is None else final
