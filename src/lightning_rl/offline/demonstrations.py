"""Record what an expert does, and hand it out as rollouts to learn from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.collectors import Collector
from lightning_rl.collectors.loop import FirstEpisodes
from lightning_rl.envs import ActionChunk, TorchEnv, VectorEnv
from lightning_rl.envs.vector_env import RESULTS, Observation
from lightning_rl.errors import ConfigurationError, check_range
from lightning_rl.files import write_atomically
from lightning_rl.functional import first_episode_mask
from lightning_rl.policies import Policy
from lightning_rl.rollout import allocate_rollout, copy_tree, map_tree

FIELDS = ("observation", "action", "reward", "terminated", "truncated", "success")
"""What is kept of a demonstration's steps."""


class Demonstrations(Collector):
    """Hand out the same demonstrations with every rollout, for `BehaviorCloning`.

    See `Collector` for the first four arguments, and `settings`; the episodes are as long as the
    longest of them, whatever `data.buffer_size` says.

    Args:
        path: a file that `scripts/record_demonstrations.py` wrote; where not given, the env's own
            expert is recorded.
        episodes: how many are learnt from; those of the file, or 100, where not given.

    Raises:
        ConfigurationError: where there is no such file or no expert, or the demonstrations are of
            another env.
    """

    acted_by_policy = False

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        num_steps: int,
        seed: int,
        path: str | None = None,
        episodes: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(env, policy, num_steps, seed, **settings)
        check_range("episodes", episodes, least=1)
        data = record(env, episodes or 100, seed) if path is None else load(path)
        found = len(data["action"])
        if episodes is not None and found < episodes:
            raise ConfigurationError(
                f"{path} holds {found} demonstrations, {episodes} are asked for: record more, or "
                "lower episodes."
            )
        self._rollout = self._as_rollout(data, episodes or found)

    def collect(self) -> TensorDict:
        self._rollout["policy_version"].fill_(self.policy.version)
        return self._rollout.copy()

    def metrics(self) -> dict[str, float]:
        """Return nothing: nothing was played."""
        return {}

    def _as_rollout(self, data: dict[str, Any], count: int) -> TensorDict:
        space, policy = self.env.single_observation_space, self.policy
        rollout = allocate_rollout(
            space,
            self.env.single_action_space,
            count,
            data["action"].shape[1] - 1,
            extra_fields=policy.extra_fields | self.env.extra_fields,
        )
        for key in (*FIELDS, *self.env.extra_fields):
            try:
                copy_tree(rollout.get(key), _first(data[key], count))
            except (KeyError, RuntimeError) as error:
                raise ConfigurationError(
                    f"The demonstrations do not fit {type(self.env).__name__}: field '{key}' is "
                    f"missing or has another shape ({str(error).splitlines()[0]}). Record them "
                    "with the env, and the chunk_size, of this run."
                ) from error
        torch.logical_or(rollout["terminated"], rollout["truncated"], out=rollout["done"])
        counts = first_episode_mask(rollout["done"][:, :-1])
        rollout["padding"] = torch.ones_like(rollout["done"])
        rollout["padding"][:, :-1] = ~counts
        action: Tensor = rollout["action"]
        for key, value in policy.fields_of(action.flatten(0, 1).to(policy.version.device)).items():
            rollout[key] = value.unflatten(0, rollout.batch_size).cpu()
        return rollout.to(policy.version.device)


@torch.no_grad()
def record(env: VectorEnv, episodes: int, seed: int) -> dict[str, Any]:
    """Play one episode per seed by the env's own expert; return its fields, [M, T+1, ...].

    Args:
        env: an `ActionChunk` of a `TorchEnv` that has `expert(state)`; it is reset.
        episodes: M.
        seed: of the first episode, the next ones follow.

    Raises:
        ConfigurationError: where the env has no expert.
    """
    task = cast(TorchEnv, env.env) if isinstance(env, ActionChunk) else None
    expert = getattr(task, "expert", None)
    if task is None or expert is None:
        raise ConfigurationError(
            f"{type(task or env).__name__} has no expert to record: give the file of recorded "
            "demonstrations as path, or wrap a task with an expert, such as PushBlocks, in "
            "ActionChunk."
        )
    assert isinstance(env, ActionChunk)
    played = [
        _play(env, task, expert, list(range(first, first + env.num_envs)))
        for first in range(seed, seed + episodes, env.num_envs)
    ]
    longest = max(len(part["action"]) for part in played)
    joined = map_tree(lambda *x: torch.cat(x), *[_pad(part, longest) for part in played])
    chosen: dict[str, Any] = _first(joined, episodes)
    return chosen


def plan(
    task: TorchEnv, expert: Callable[[TensorDict], Tensor], state: TensorDict, length: int
) -> Tensor:
    """Return the next `length` actions of an expert from states [N]: [N, length, *A].

    Whoever acts in chunks has to look ahead: the expert is asked again after each imagined step.
    """
    actions = []
    for _ in range(length):
        actions.append(expert(state))
        state, *_ = task.transition(state, actions[-1])
    return torch.stack(actions, 1)


def save(path: str | Path, data: dict[str, Any]) -> None:
    """Write demonstrations to a file that `load` reads."""
    write_atomically(path, lambda file: torch.save(data, file))


def load(path: str | Path) -> dict[str, Any]:
    """Read demonstrations; nothing in the file is executed.

    Raises:
        ConfigurationError: where the file is not there, or is none.
    """
    if not Path(path).is_file():
        raise ConfigurationError(
            f"No demonstrations at {path}: record them with scripts/record_demonstrations.py, or "
            "leave path out to record the env's own expert."
        )
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or a malicious file fails in many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"{path} is no file of demonstrations: {reason}") from error
    if not isinstance(data, dict) or not isinstance(data.get("action"), Tensor):
        raise ConfigurationError(f"{path} is no file of demonstrations: it has no actions.")
    return data


def _play(
    env: ActionChunk,
    task: TorchEnv,
    expert: Callable[[TensorDict], Tensor],
    seeds: list[int],
) -> dict[str, Any]:
    """Play one episode per row, time-major: {field: [T+1, N, ...]}."""
    seen: list[Any] = []

    def choose(observation: Observation, running: Tensor) -> Tensor:
        seen.append(map_tree(torch.clone, observation))
        return plan(task, expert, task.state, env.chunk_size)

    slots: list[dict[str, Any]] = []
    playing = FirstEpisodes(env, choose, seeds, task.max_episode_steps)
    for info in playing:
        slot = {"observation": seen.pop()}
        slot |= {key: getattr(playing, key) for key in ("action", *RESULTS)}
        slot |= {key: info[key] for key in ("success", *env.extra_fields)}
        slots.append(_only(slot, playing.counted.to(env.device)))
    slots.append(_only(slots[-1], torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)))
    steps: dict[str, Any] = map_tree(lambda *column: torch.stack(column), *slots)
    return steps


def _only(tree: Any, rows: Tensor) -> Any:
    """Zero the rows [N] that do not count."""
    return map_tree(lambda x: x * rows.view(-1, *[1] * (x.dim() - 1)).to(x.dtype), tree)


def _pad(tree: Any, length: int) -> Any:
    """Fill up [T, ...] with zeros, and put the envs first: [N, length, ...]."""

    def pad(x: Tensor) -> Tensor:
        padding = x.new_zeros((length - len(x), *x.shape[1:]))
        return torch.cat((x, padding)).transpose(0, 1)

    return map_tree(pad, tree)


def _first(tree: Any, count: int) -> Any:
    return map_tree(lambda x: x[:count].clone(), tree)
