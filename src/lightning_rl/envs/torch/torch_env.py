"""Write a batched torch env, on any device, by three functions: start, observe, move."""

from abc import abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.infos import check_info
from lightning_rl.envs.refusals import KINDS
from lightning_rl.envs.step_results import check_vector
from lightning_rl.envs.torch.counter_random import key_of, uniforms
from lightning_rl.envs.vector_env import Info, Observation, Options, RestoreError, Seed, VectorEnv
from lightning_rl.rollout.contract import leaves_by_path, map_tree
from lightning_rl.rollout.structured_actions import as_env_action, differs_in_env, flat_actions
from lightning_rl.system.errors import EnvFaultError, require


class ResetMode(Enum):
    """How `step` begins the next episode of finished envs."""

    ROWS = "reset only the finished envs; their indices may require a wait for a device"
    WHERE = (
        "compute a start for every env, and select the finished envs, without a wait for a device"
    )
    LATER = "do not reset: the caller resets with `draw_starts`"


FIRST_LENGTH = 0x4C454E47
"""Stream of the random lengths of first episodes."""

Transition = tuple[TensorDict, Tensor, Tensor, Info]
"""Next state [N], reward [N], terminated [N] bool, and info."""


class TorchEnv(VectorEnv):
    """A batched env whose state is one TensorDict [N].

    This class handles time limits, autoreset, seeds and saving.

    Random numbers are a function of the env's seed, the episode and the step, so episodes of an env
    do not depend on other envs. This holds bit for bit if the three functions treat rows
    independently, by operations that round every element equally: no matrix product, no `atan2`, no
    fused multiply-add.

    An episode ends when the transition returns `terminated`, and is truncated at the time limit.
    Two optional [N] bool entries of the transition's info also end episodes:

    - `fail`: the episode failed. It is `terminated`, without success.
    - `truncated`: the episode is cut although it could have continued (a watchdog, a simulation out
      of its range). Its return is bootstrapped, as at the time limit.

    Args:
        num_envs: N.
        observation_space: space of one observation.
        action_space: space of one action.
        max_episode_steps: time limit, in steps.
        device: device of the state.

    Attributes:
        start_size: K, random numbers per start.
        in_torch: whether a step consists of torch operations alone, so that it can be compiled.
        differentiable: whether rewards and observations have gradients with respect to actions and
            states, for `APG` and `SHAC`. A clamp has no gradient beyond its bounds, and events such
            as a success have none at all.
        seed: [N] int64, the seed of each env; initially env i has the seed i.
        episode: [N] int64, the number of earlier episodes of this seed.
        elapsed: [N] int64, env steps since the episode began.
        final_state: [N], the state before the resets of the last step, except of compiled steps.
        stream_key: [2, N] int64, the key of each env's random numbers.
        reset_mode: how finished envs begin the next episode.

    Raises:
        ConfigurationError: `num_envs` or `max_episode_steps` is below 1.
    """

    start_size: int
    in_torch: ClassVar[bool] = True
    differentiable: ClassVar[bool] = False
    max_episode_steps: int

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        max_episode_steps: int,
        device: torch.device | str = "cpu",
    ) -> None:
        require(num_envs >= 1, f"num_envs must be at least 1, got {num_envs}.")
        require(
            max_episode_steps >= 1,
            f"max_episode_steps must be at least 1, got {max_episode_steps}.",
        )
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.single_observation_space = observation_space
        self.single_action_space = flat_actions(action_space)
        self._converts = differs_in_env(self.single_action_space)
        self.max_episode_steps = max_episode_steps
        self.seed = torch.arange(num_envs, device=self.device)
        self.episode = torch.full_like(self.seed, -1)
        self.elapsed = torch.zeros_like(self.seed)
        self.state = self.final_state = TensorDict({}, [num_envs], device=self.device)
        self.stream_key = key_of(self.seed)  # cached, because each draw needs it
        # Starts of all envs cost less on a GPU than the wait for the indices of the finished ones.
        self.reset_mode = ResetMode.ROWS if self.device.type == "cpu" else ResetMode.WHERE
        self._first_limit = 0  # above 0 if first episodes begin at a random step

    @abstractmethod
    def initial_state(self, uniform: Tensor) -> TensorDict:
        """Create M initial states [M] from random numbers `uniform` [M, K] float32 in [0, 1)."""

    @abstractmethod
    def observe(self, state: TensorDict) -> Observation:
        """Return the observation [M, ...] of a state [M]; the tensors must not change later.

        `observe` draws no random numbers: `transition` draws sensor noise and stores it in the
        state.
        """

    @abstractmethod
    def transition(self, state: TensorDict, action: Any) -> Transition:
        """Return the next state [N], reward [N], terminated [N] bool, and info.

        Do not write into `state`. Info entries: see `VectorEnv.step`; `fail` and `truncated`: see
        the class. Random numbers come from `uniform`.

        Args:
            state: [N], the result of `initial_state` or of the last transition.
            action: [N, *A] from the policy, not clipped to the space; choices from the space's
                `start`. Dict or Tuple spaces: a dict or tuple of tensors; MultiBinary: int64.
        """

    def uniform(self, count: int, stream: int = 0) -> Tensor:
        """Draw `count` numbers in [0, 1) per env for a random transition: [N, count].

        The numbers depend on seed, episode, step and stream: a second call within one step returns
        the same numbers. Use one stream per purpose, such as pushes and sensor noise. Unlike
        `torch.rand`, the numbers are reproducible, resume exactly and may be compiled.
        """
        streams = [stream] if stream else []
        return uniforms(self.stream_key, self.episode, self.elapsed + 1, count, streams)

    def reset(self, seed: Seed = None, options: Options = None) -> tuple[Observation, Info]:
        persistent = None
        if seed is None:
            self.episode = self.episode + 1
            # At the very first reset there is no state yet.
            names = [key for key in self.persistent_state if key in self.state.keys()]
            persistent = {key: self.state[key] for key in names}
        else:
            self.seed = torch.tensor(self.seeds_of(seed), device=self.device)
            self.episode = torch.zeros_like(self.seed)
            self.stream_key = key_of(self.seed)
        self.elapsed = torch.zeros_like(self.seed)
        if seed is not None and self._first_limit:
            steps = (self.uniform(1, FIRST_LENGTH)[:, 0] * self._first_limit).long()
            # The product with a number below 1 may round up to the limit.
            self.elapsed = steps.clamp_max(self._first_limit - 1)
        self.state = self.final_state = self.draw_starts(self.stream_key, self.episode, persistent)
        return self.observation_of(self.state), {}

    def randomize_first_episodes(self, limit: int) -> None:
        self._first_limit = limit

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        elapsed = self.elapsed + 1
        moved, reward, terminated, truncated, info = self._move(action, elapsed)
        done = terminated | truncated
        self.final_state = moved  # before finished envs are replaced
        final = info["final_obs"] = self.observation_of(moved)
        # `torch.where` replaces finished envs without waiting for an accelerator.
        if self.reset_mode is ResetMode.ROWS:
            observation = self._restart_rows(done.nonzero().squeeze(1), moved, final)
        elif self.reset_mode is ResetMode.LATER:
            self.state, observation = moved, final
        else:
            self.episode = self.episode + done
            persistent = {key: moved[key] for key in self.persistent_state}
            starts = self.draw_starts(self.stream_key, self.episode, persistent)
            self._check_alike(starts, moved)
            self.state = TensorDict(_where(done, starts, moved), [self.num_envs])
            observation = self.observation_of(self.state)
        self.elapsed = elapsed.masked_fill_(done, 0)  # in place: `elapsed` is a new tensor
        return observation, reward, terminated, truncated, info

    def advance(self, action: Tensor, active: Tensor) -> tuple[Tensor, Tensor, Tensor, Info]:
        """Step the envs in `active` [N] bool by actions [N, *A], without observations."""
        elapsed = self.elapsed + active
        moved, reward, terminated, truncated, info = self._move(action, elapsed)
        self._check_alike(self.state, moved)
        self.state = TensorDict(_where(active, moved, self.state), [self.num_envs])
        self.elapsed = elapsed
        return torch.where(active, reward, 0.0), active & terminated, active & truncated, info

    def reset_finished(self, done: Tensor) -> tuple[Observation, Observation]:
        """Reset the envs in `done` [N] bool; return the observations after and before the reset."""
        self.final_state = self.state
        final = self.observation_of(self.state)
        observation = self._restart_rows(done.nonzero().squeeze(1), self.state, final)
        self.elapsed = self.elapsed.masked_fill(done, 0)
        return observation, final

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": {key: value.clone() for key, value in self.state.items()},
            **{key: getattr(self, key).clone() for key in ("seed", "episode", "elapsed")},
        }

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        if len(state["elapsed"]) != self.num_envs:
            saved = len(state["elapsed"])
            raise RestoreError(
                f"the state was saved with {saved} envs, but there are {self.num_envs}"
            )
        if "seed" not in state:
            raise RestoreError("the state was saved by an older version with one generator")
        self.state = TensorDict(state["state"], [self.num_envs], device=self.device).clone()
        self.final_state = self.state
        self.seed, self.episode, self.elapsed = (
            state[key].to(self.device, copy=True) for key in ("seed", "episode", "elapsed")
        )
        self.stream_key = key_of(self.seed)
        return self.observation_of(self.state)

    def _move(
        self, action: Tensor, elapsed: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, Tensor, Info]:
        """Execute the transition; return state, reward, terminated, truncated [N], and info."""
        # Copy, because an env may write into its action.
        action = action.to(self.device, copy=True)
        env_action = as_env_action(self.single_action_space, action) if self._converts else action
        moved, reward, terminated, info = self.full_transition(self.state, env_action)
        truncated = elapsed >= self.max_episode_steps  # also if this step terminates the episode
        # Check now: later operations might broadcast a wrong shape.
        name = type(self).__name__
        check_vector(name, "reward", reward, self.num_envs, KINDS)
        check_vector(name, "terminated", terminated, self.num_envs, "b")
        check_info(self, info, self.num_envs)
        if "fail" in info:
            failed = check_vector(name, "info fail", info["fail"], self.num_envs, "b")
            terminated = terminated | failed  # not in place: the tensor is the env's
            if "success" in info:
                info["success"] = info["success"] & ~failed
        if "truncated" in info:
            cut = check_vector(name, "info truncated", info["truncated"], self.num_envs, "b")
            truncated = truncated | cut
        return moved, reward, terminated, truncated, info

    def full_initial_state(self, uniform: Tensor) -> TensorDict:
        """Return initial states [M] from random numbers [M, K]. Subclasses may add tensors."""
        return self.initial_state(uniform)

    def full_transition(self, state: TensorDict, action: Any) -> Transition:
        """Call `transition` with state [N] and action [N, *A]. Subclasses may add tensors."""
        return self.transition(state, action)

    def observation_of(self, state: TensorDict) -> Observation:
        """Return the observation [M, ...] of a state [M]. Subclasses may use their own tensors."""
        return self.observe(state)

    def draw_starts(
        self, key: Tensor, episode: Tensor, persistent: Mapping[str, Tensor] | None = None
    ) -> TensorDict:
        """Return the initial states [M] of episodes [M] of M streams with `stream_key` [2, M].

        `persistent` has the entries [M, ...] of `persistent_state` at the end of the last episodes.
        """
        return self.full_initial_state(uniforms(key, episode, 0, self.start_size))

    def _check_alike(self, starts: TensorDict, moved: TensorDict) -> None:
        """Refuse moved states [N] whose entries differ in dtype or shape from starts [M]."""
        first = leaves_by_path(starts)
        for path, leaf in leaves_by_path(moved).items():
            start = first.get(path)
            if start is None or (start.dtype, start.shape[1:]) != (leaf.dtype, leaf.shape[1:]):
                begins = "nothing" if start is None else f"{start.dtype} {list(start.shape[1:])}"
                raise EnvFaultError(
                    f"{type(self).__name__}: the entry '{'.'.join(path)}' of an env's state is "
                    f"{begins} at the start of an episode, but {leaf.dtype} {list(leaf.shape[1:])} "
                    "after a step: return the same from initial_state and transition, or from "
                    "`start` and the call of a term with a memory."
                )

    def _restart_rows(self, rows: Tensor, moved: TensorDict, final: Observation) -> Observation:
        self.state = moved
        if not len(rows):
            return final
        self.episode = self.episode.index_add(0, rows, torch.ones_like(rows))
        persistent = {key: moved[key][rows] for key in self.persistent_state}
        starts = self.draw_starts(self.stream_key[:, rows], self.episode[rows], persistent)
        self._check_alike(starts, moved)
        self.state = TensorDict(_with_rows(moved, rows, starts), [self.num_envs])
        observation = _with_rows(
            final, rows, self.observation_of(starts)
        )  # observes new starts only
        if isinstance(observation, dict):
            return TensorDict(observation, [self.num_envs])
        return observation  # type: ignore[no-any-return]  # a tensor, as `final` is


def _with_rows(tree: Any, rows: Tensor, new: Any) -> Any:
    return map_tree(lambda old, values: old.index_copy(0, rows, values), tree, new)


def _where(mask: Tensor, tree: Any, otherwise: Any) -> Any:
    def choose(old: Tensor, new: Tensor) -> Tensor:
        # [N, 1, ...], to broadcast.
        return torch.where(mask.view(-1, *[1] * (old.dim() - 1)), new, old)

    return map_tree(choose, otherwise, tree)
