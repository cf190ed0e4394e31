"""Write a batched env in torch, on any device, by its three functions: start, observe, move."""

from abc import abstractmethod
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.envs.step_results import check_info, check_outcome
from lightning_rl.envs.torch.counter_random import hash32, key_of, uniforms
from lightning_rl.envs.vector_env import Observation, RestoreError, Seed, VectorEnv
from lightning_rl.rollout.contract import map_tree
from lightning_rl.rollout.structured_actions import StructuredActions, flat_actions
from lightning_rl.system.errors import require


class Restarts(Enum):
    """How a step begins the next episode of the envs that have finished."""

    ROWS = "of those envs alone, which are looked up: where looking costs nothing"
    WHERE = "a start for every env, taken where it is needed: where looking would wait for a device"
    LATER = "not at all: whoever steps does it, by `starts_of`"


class TorchEnv(VectorEnv):
    """A batched env whose state is one TensorDict [N].

    Time limits, autoreset, seeds and saving are done here.

    A random number is a function of its env's seed, of the episode and of the step, not the next
    one of a generator: what happens in an env, in all its episodes, depends on its own seed and
    actions alone, whether it runs by itself or among thousands. This holds bit for bit where the
    three functions treat each row by itself, by operations that round every element alike: no
    matrix product, no `atan2`, no fused multiply and add.

    An episode ends where the transition says `terminated`, and is truncated when its time is out.
    For ends of another kind the transition puts one of these beside `success` into its info, each
    [N] bool, read at every step:

    - `fail`: the episode has failed, which ends it. It is `terminated`, without success.
    - `truncated`: the episode is cut, though it could have gone on (a watchdog, a simulation that
      left its range). Its return goes on with the value of where it was cut, as at the time limit.

    Nothing in `step` waits for an accelerator: finished envs are replaced by `torch.where`. On a
    CPU, where looking costs nothing, only the rows that finished are drawn and written.

    Args:
        num_envs: N.
        max_episode_steps: steps after which an episode is truncated.
        device: where the state lives.

    Attributes:
        start_size: K, how many random numbers a start takes.
        seed: [N] int64, the seed of each env; before the first `reset`, env i has the seed i.
        episode: [N] int64, how many episodes of that seed came before this one.
        elapsed: [N] int64, env steps since the episode began.
        final_state: [N], the state that the last step led to, before finished envs were reset; not
            kept by compiled steps.
        stream_key: [2, N] int64, from which, by episode and step, the random numbers of each env
            come.
        restarts: how finished envs begin anew.

    Raises:
        ConfigurationError: for a number of envs or of steps below 1.
    """

    start_size: int
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
        self.max_episode_steps = max_episode_steps
        self.seed = torch.arange(num_envs, device=self.device)
        self.episode = torch.full_like(self.seed, -1)
        self.elapsed = torch.zeros_like(self.seed)
        self.state = self.final_state = TensorDict({}, [num_envs], device=self.device)
        self.stream_key = key_of(self.seed)  # kept: each draw needs it
        self.restarts = Restarts.ROWS if self.device.type == "cpu" else Restarts.WHERE

    @abstractmethod
    def initial_state(self, uniform: Tensor) -> TensorDict:
        """Make M starts, a TensorDict [M], of random numbers.

        Args:
            uniform: [M, K] float32 in [0, 1), K being `start_size`.
        """

    @abstractmethod
    def observe(self, state: TensorDict) -> Observation:
        """Return the observation [M, ...] of a state [M], in tensors that nobody writes into later.

        It draws nothing: what is random, such as sensor noise, is drawn by `transition` and lies in
        the state.
        """

    @abstractmethod
    def transition(
        self, state: TensorDict, action: Any
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Move: return the next state [N], reward [N], terminated [N] bool, and info.

        Do not write into `state`. The info may hold what `VectorEnv.step` says, and `fail` and
        `truncated`, which end an episode; see the class. Random numbers come from `uniform`.

        Args:
            state: [N], what `initial_state` or the last transition returned.
            action: [N, *A], as the policy gave it: not clipped to the space. Of a Dict or Tuple
                space a dict or tuple of such, of a MultiBinary one int64.
        """

    def uniform(self, count: int, stream: int = 0) -> Tensor:
        """Draw `count` numbers in [0, 1) per env, for a transition that is random: [N, count].

        They depend on seed, episode, step and stream: asked again within one step, the same come
        again. A transition that draws for several purposes, such as pushes and sensor noise, takes
        a stream for each. They are reproducible, resume exactly and may be compiled; numbers of
        `torch.rand` are none of that.

        Args:
            count: numbers per env.
            stream: which of the numbers of this step, from 0.
        """
        key = self.stream_key if stream == 0 else hash32(self.stream_key ^ stream)
        return uniforms(key, self.episode, self.elapsed + 1, count)

    def reset(
        self, seed: Seed = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin episodes; without a seed, every env the next one of its own."""
        if seed is None:
            self.episode = self.episode + 1
        else:
            self.seed = self._one_per_env(seed)
            self.episode = torch.zeros_like(self.seed)
            self.stream_key = key_of(self.seed)
        self.elapsed = torch.zeros_like(self.seed)
        self.state = self.final_state = self.starts_of(self.stream_key, self.episode)
        return self.observed(self.state), {}

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        elapsed = self.elapsed + 1
        moved, reward, terminated, truncated, info = self._move(action, elapsed)
        done = terminated | truncated
        self.final_state = moved
        final = info["final_obs"] = self.observed(moved)
        if self.restarts is Restarts.ROWS:
            observation = self._restart_rows(done.nonzero().squeeze(1), moved, final)
        elif self.restarts is Restarts.LATER:
            self.state, observation = moved, final
        else:
            self.episode = self.episode + done
            starts = self.starts_of(self.stream_key, self.episode)
            self.state = TensorDict(_where(done, starts, moved), [self.num_envs])
            observation = self.observed(self.state)
        self.elapsed = elapsed.masked_fill_(done, 0)  # in place: it was made above
        return observation, reward, terminated, truncated, info

    def advance(
        self, action: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step without observing, which is what takes time with pictures.

        Args:
            action: [N, *A].
            active: [N] bool; the other envs stay as they are.
        """
        elapsed = self.elapsed + active
        moved, reward, terminated, truncated, info = self._move(action, elapsed)
        self.state = TensorDict(_where(active, moved, self.state), [self.num_envs])
        self.elapsed = elapsed
        return torch.where(active, reward, 0.0), active & terminated, active & truncated, info

    def reset_finished(self, done: Tensor) -> tuple[Observation, Observation]:
        """Begin new episodes where `done` [N] bool; return the observation after and before it."""
        self.final_state = self.state
        final = self.observed(self.state)
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
            raise RestoreError(f"the state was saved with {saved} envs, there are {self.num_envs}")
        if "seed" not in state:
            raise RestoreError("the state was saved by a version that drew from one generator")
        self.state = TensorDict(state["state"], [self.num_envs], device=self.device).clone()
        self.final_state = self.state
        self.seed, self.episode, self.elapsed = (
            state[key].to(self.device, copy=True) for key in ("seed", "episode", "elapsed")
        )
        self.stream_key = key_of(self.seed)
        return self.observed(self.state)

    def _move(
        self, action: Tensor, elapsed: Tensor
    ) -> tuple[TensorDict, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Take the transition; return next state, reward, terminated, truncated [N], and info.

        Raises:
            ConfigurationError: for a reward, an end or a flag of another shape.

        Args:
            action: [N, *A].
            elapsed: [N], env steps since the episode began, this one included.
        """
        # A copy, into which an env may write.
        action = action.to(self.device, copy=True)
        space = self.single_action_space
        given = space.tensors(action) if isinstance(space, StructuredActions) else action
        moved, reward, terminated, info = self.moved(self.state, given)
        truncated = elapsed >= self.max_episode_steps  # also where it has terminated just now
        # Here, as what follows may broadcast them.
        for field, value in (("reward", reward), ("terminated", terminated)):
            check_outcome(type(self).__name__, field, value, truncated)
        check_info(self, info, self.num_envs)
        if "fail" in info:
            failed = self._flags(info, "fail")
            terminated = terminated | failed
            if "success" in info:
                info["success"] = info["success"] & ~failed
        if "truncated" in info:
            truncated = truncated | self._flags(info, "truncated")
        return moved, reward, terminated, truncated, info

    def _flags(self, info: dict[str, Any], key: str) -> Tensor:
        """Return an entry [N] bool of the info; anything else would be broadcast."""
        flags: Tensor = info[key]
        require(
            flags.dtype == torch.bool and flags.shape == (self.num_envs,),
            f"{type(self).__name__}.transition returned info['{key}'] as {flags.dtype} of shape "
            f"{list(flags.shape)}: return torch.bool of shape [{self.num_envs}], one per env.",
        )
        return flags

    def _one_per_env(self, seed: Any) -> Tensor:
        """Return the seeds [N] that an int or a sequence stands for."""
        if isinstance(seed, int | np.integer):
            return int(seed) + torch.arange(self.num_envs, device=self.device)
        seeds = [int(s) for s in seed]
        require(
            len(seeds) == self.num_envs,
            f"Expected {self.num_envs} seeds, one per env, got {len(seeds)}.",
        )
        return torch.tensor(seeds, dtype=torch.int64, device=self.device)

    def started(self, uniform: Tensor) -> TensorDict:
        """Return starts [M], with what is kept beside the state.

        Args:
            uniform: [M, K], random numbers.
        """
        return self.initial_state(uniform)

    def moved(
        self, state: TensorDict, action: Any
    ) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Return what `transition` does, with what is kept beside the state.

        Args:
            state: [N].
            action: [N, *A], in its structure: see `transition`.
        """
        return self.transition(state, action)

    def observed(self, state: TensorDict) -> Observation:
        """Return the observation [M, ...] of a state [M], with what is kept beside it."""
        return self.observe(state)

    def starts_of(self, key: Tensor, episode: Tensor) -> TensorDict:
        """Return the starts [M] of episodes [M] of M streams, by their `stream_key` [2, M]."""
        return self.started(uniforms(key, episode, 0, self.start_size))

    def _restart_rows(self, rows: Tensor, moved: TensorDict, final: Observation) -> Observation:
        """Begin the next episode of some rows; return the observation of all."""
        self.state = moved
        if not len(rows):
            return final
        self.episode = self.episode.index_add(0, rows, torch.ones_like(rows))
        starts = self.starts_of(self.stream_key[:, rows], self.episode[rows])
        self.state = TensorDict(_with_rows(moved, rows, starts), [self.num_envs])
        observation = _with_rows(final, rows, self.observed(starts))
        if isinstance(observation, dict):
            return TensorDict(observation, [self.num_envs])
        return observation  # type: ignore[no-any-return]  # a tensor, as `final` is


def _with_rows(tree: Any, rows: Tensor, new: Any) -> Any:
    """Copy a tensor [N, ...], or a tree of them to a dict, with some rows replaced."""
    return map_tree(lambda old, chosen: old.index_copy(0, rows, chosen), tree, new)


def _where(mask: Tensor, chosen: Any, otherwise: Any) -> Any:
    """Take whole rows of one tensor [N, ...], or tree of them, or of the other, by mask [N]."""

    def choose(other: Tensor, one: Tensor) -> Tensor:
        return torch.where(mask.view(-1, *[1] * (other.dim() - 1)), one, other)

    return map_tree(choose, otherwise, chosen)
