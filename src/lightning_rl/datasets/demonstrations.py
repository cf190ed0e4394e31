"""Record what an expert does, and hand recordings out as rollouts to learn from."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.collectors import Collector, CollectorContext
from lightning_rl.collectors.loop import FirstEpisodes
from lightning_rl.datasets.ends import Ends
from lightning_rl.datasets.episodes import Episode, Episodes, Outside, read_episodes
from lightning_rl.envs import ActionChunk, TorchEnv, VectorEnv
from lightning_rl.envs.vector_env import RESULTS, Observation
from lightning_rl.envs.wrappers.chunk_wrapper import single
from lightning_rl.envs.wrappers.condition import unconditioned, with_condition
from lightning_rl.functional import first_episode_mask
from lightning_rl.rollout.contract import (
    allocate_rollout,
    clear_final_observations,
    copy_tree,
    final_storage,
    map_tree,
)
from lightning_rl.system.errors import ConfigurationError, check_range, closest, require
from lightning_rl.system.phases import PhaseTimer, no_phases

FIELDS = ("observation", "action", "reward", "terminated", "truncated", "success")
"""What is kept of the steps of an expert."""


class Demonstrations(Collector):
    """Hand out demonstrations with every rollout, for `BehaviorCloning`.

    The episodes are as long as the longest of them, whatever `data.buffer_size` says. Where the env
    takes chunks of actions, those of a dataset are cut into chunks, one behind the other; the last
    action stands for what is behind the end of an episode, and does not count.

    Args:
        context: see `Collector`.
        path: of a dataset, see `read_episodes`; where not given, the env's own expert is recorded.
        episodes: how many are learnt from, the first ones; those of the dataset, or 100, where not
            given.
        keys: what a column of the dataset is here, see `read_episodes`.
        fps: steps per second of the env, which have to be those of the dataset; where not given,
            what the env says itself.
        condition: an extra of the dataset, such as `advantage_positive` of `rl-cli label`, that is
            learnt beside each observation: as the number that `Conditioned`, the last wrapper of
            the env, adds to it.
        episodes_per_rollout: read so many for each rollout, in an order that is drawn anew for each
            pass, and keep no others in memory; all of them, once, where not given.
        ends: how episodes ended where the dataset does not say it, see `read_episodes`.
        actions_outside: what becomes of actions outside of the env's bounds, see `read_episodes`.

    Raises:
        ConfigurationError: where there is no dataset and no expert, or the dataset is of another
            env, or does not have the condition for all steps.
    """

    acted_by_policy = False

    def __init__(
        self,
        context: CollectorContext,
        path: str | None = None,
        episodes: int | None = None,
        keys: dict[str, str] | None = None,
        fps: float | None = None,
        condition: str | None = None,
        episodes_per_rollout: int | None = None,
        ends: Ends | None = None,
        actions_outside: Outside = "clip",
    ) -> None:
        super().__init__(context)
        env = context.env
        check_range("episodes", episodes, least=1)
        check_range("episodes_per_rollout", episodes_per_rollout, least=1)
        self._rollouts = 0
        self._dataset: Episodes | None = None
        self._condition = condition
        if path is None:
            require(
                condition is None,
                f"condition is {condition!r}, and the env's own expert has no labels: give the "
                "path of a dataset that has them (rl-cli label).",
            )
            self._rollout = self._of_expert(
                record(env, episodes or 100, context.seed, context.calls)
            )
            return
        self._dataset = read_episodes(
            path,
            keys,
            observation_space=env.single_observation_space
            if condition is None
            else unconditioned(env.single_observation_space),
            action_space=single(env.single_action_space, getattr(env, "chunk_size", None)),
            fps=fps or _fps_of(env),
            ends=ends,
            actions_outside=actions_outside,
        )
        self._count = episodes or len(self._dataset)
        if self._count > len(self._dataset):
            raise ConfigurationError(
                f"{path} holds {len(self._dataset)} demonstrations, {episodes} are asked for: "
                "record more, or lower episodes."
            )
        self._rows = min(self._count, episodes_per_rollout or self._count)
        longest = max(self._dataset.lengths[: self._count])
        self._rollout = self._allocate(self._rows, -(-longest // env.steps_per_action))
        if self._rows == self._count:
            self._read(range(self._count))

    def collect(self) -> TensorDict:
        """Return a rollout of demonstrations [M, T+1], filled up with padding."""
        if self._dataset is not None and self._rows < self._count:
            self._read(self._drawn(self._rollouts))
        self._rollouts += 1
        self._rollout["policy_version"].fill_(self.policy.version)
        return self._rollout.copy()

    def metrics(self) -> dict[str, float]:
        """Return nothing: nothing was played."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rollouts": self._rollouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rollouts = state.get("rollouts", 0)

    def _allocate(self, episodes: int, steps: int) -> TensorDict:
        rollout = allocate_rollout(
            self.env.single_observation_space,
            self.env.single_action_space,
            episodes,
            steps,
            extra_fields=self.policy.extra_fields | self.env.extra_fields,
        )
        rollout["padding"] = torch.zeros_like(rollout["done"])
        return rollout.to(self.policy.version.device)

    def _of_expert(self, data: dict[str, Any]) -> TensorDict:
        """Return the rollout of what `record` has returned."""
        count, slots = data["action"].shape[:2]
        rollout = self._allocate(count, slots - 1)
        for key in (*FIELDS, *self.env.extra_fields):
            copy_tree(rollout.get(key), data[key])
        return self._completed(rollout)

    def _completed(self, rollout: TensorDict) -> TensorDict:
        """Write into a rollout what follows from the rest of it."""
        torch.logical_or(rollout["terminated"], rollout["truncated"], out=rollout["done"])
        rollout["padding"].fill_(True)  # the last slot too, which is no step
        rollout["padding"][:, :-1] = ~first_episode_mask(rollout["done"][:, :-1])
        action: Tensor = rollout["action"]
        for key, value in self.policy.fields_of(action.flatten(0, 1)).items():
            rollout[key] = value.unflatten(0, rollout.batch_size)
        return rollout

    def _drawn(self, number: int) -> list[int]:
        """Return the episodes of a rollout, by its number: each pass has an order of its own."""
        chosen = []
        for place in range(number * self._rows, (number + 1) * self._rows):
            turn, at = divmod(place, self._count)
            generator = torch.Generator().manual_seed(self.context.seed + turn)
            chosen.append(int(torch.randperm(self._count, generator=generator)[at]))
        return chosen

    def _read(self, chosen: list[int] | range) -> None:
        """Fill the rollout with some episodes of the dataset."""
        assert self._dataset is not None
        map_tree(Tensor.zero_, self._rollout.exclude("final_observation"))
        clear_final_observations(self._rollout)
        for row, episode in enumerate(self._dataset.each(chosen)):
            self._write(row, episode)
        self._completed(self._rollout)

    def _write(self, row: int, episode: Episode) -> None:
        """Write an episode into a row, cut into chunks where actions are."""
        length, execute = len(episode), self.env.steps_per_action
        starts = torch.arange(0, length, execute)
        steps, rollout = len(starts), self._rollout
        observation = self._conditioned(episode)
        seen = map_tree(lambda leaf: leaf[starts], observation)
        copy_tree(map_tree(lambda leaf: leaf[row, :steps], rollout.get("observation")), seen)
        chunk = getattr(self.env, "chunk_size", 1)
        at = starts[:, None] + torch.arange(chunk)
        executed = (at < length) & (torch.arange(chunk) < execute)
        at.clamp_(max=length - 1)
        reward = episode.reward if episode.reward.isfinite().any() else torch.zeros(length)
        fields = {
            "action": episode.action[at],
            "step_reward": reward[at] * executed,
            "executed": executed,
            "executed_action": episode.action[at],
            "intervened": (episode.intervened[at] & executed).any(1),
        }
        if "executed" not in self.env.extra_fields:  # actions are no chunks
            fields |= {name: fields[name].squeeze(1) for name in ("action", "executed_action")}
        fields["reward"] = fields["step_reward"].sum(1)
        for name, values in fields.items():
            if name in rollout.keys():
                rollout[name][row, :steps] = values.to(rollout[name])
        last = (row, steps - 1)
        for name in ("terminated", "truncated"):
            rollout[name][last] = bool(getattr(episode, name)[-1])
        rollout["success"][last] = bool(episode.success)
        if episode.final_known:
            storage = final_storage(rollout)
            new = storage.add(1)
            final = map_tree(lambda leaf: leaf[-1:], observation)
            copy_tree(map_tree(lambda leaf: leaf[new], storage.rows), final)
            rollout["final_index"][last] = new.start

    def _conditioned(self, episode: Episode) -> Any:
        """Return the observations [L+1, ...] of an episode, with the condition of each."""
        if self._condition is None:
            return episode.observation
        assert self._dataset is not None
        labels = episode.extra.get(self._condition)
        require(
            labels is not None and labels.ndim == 1 and bool(labels.float().isfinite().all()),
            f"The dataset at {self._dataset.path} does not say of each step its condition "
            f"'{self._condition}'{closest(self._condition, episode.extra)}; it has "
            f"{', '.join(sorted(episode.extra)) or 'no labels'}. Label it: rl-cli label "
            f"{self._dataset.path}",
        )
        assert labels is not None
        asked_for = labels.new_ones(1)  # what is acted with, where the episode went on
        return with_condition(episode.observation, torch.cat((labels, asked_for)))


def _fps_of(env: VectorEnv) -> float | None:
    """Return the steps per second of an env; None where nobody has said."""
    inner = env.env if isinstance(env, ActionChunk) else env
    return None if inner.render_fps == VectorEnv.render_fps else inner.render_fps


@torch.no_grad()
def record(
    env: VectorEnv, episodes: int, seed: int, calls: PhaseTimer = no_phases
) -> dict[str, Any]:
    """Play one episode per seed by the env's own expert; return its fields, [M, T+1, ...].

    Args:
        env: an `ActionChunk` of a `TorchEnv` that has `expert(state)`; it is reset.
        episodes: M.
        seed: of the first episode, the next ones follow.
        calls: times the calls into the env; see `EnvWatch`.

    Raises:
        ConfigurationError: where the env has no expert.
    """
    if not isinstance(env, ActionChunk):
        raise ConfigurationError(
            f"{type(env).__name__} has no expert to record: give a dataset of demonstrations as "
            "path, or wrap a task with an expert, such as PushBlocks, in ActionChunk."
        )
    task, expert = cast(TorchEnv, env.env), expert_of(env.env)
    played = [
        _play(env, task, expert, list(range(first, first + env.num_envs)), calls)
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


def expert_of(env: VectorEnv) -> Callable[[TensorDict], Tensor]:
    """Return what chooses the expert's actions [N, *A] in states [N] of an env.

    Raises:
        ConfigurationError: where it has none.
    """
    expert = getattr(env, "expert", None)
    if expert is None or not isinstance(env, TorchEnv):
        raise ConfigurationError(
            f"{type(env).__name__} has no expert to record: give a dataset of demonstrations as "
            "path, or use a task with an expert, such as PushBlocks."
        )
    return cast(Callable[[TensorDict], Tensor], expert)


@torch.no_grad()
def expert_episodes(env: TorchEnv, episodes: int, seed: int) -> Iterator[Episode]:
    """Play episodes by the env's own expert, of single actions.

    Args:
        env: is reset; its N rows play side by side.
        episodes: how many.
        seed: of the first episode, the next ones follow.

    Raises:
        ConfigurationError: where the env has no expert.
    """
    expert = expert_of(env)
    for first in range(seed, seed + episodes, env.num_envs):
        count = min(env.num_envs, seed + episodes - first)
        yield from _side_by_side(env, expert, list(range(first, first + count)))


def _side_by_side(
    env: TorchEnv, expert: Callable[[TensorDict], Tensor], seeds: list[int]
) -> Iterator[Episode]:
    """Play one episode per seed, and yield them in that order."""
    seen: list[Any] = []

    def choose(observation: Observation, running: Tensor) -> Tensor:
        seen.append(map_tree(lambda leaf: leaf.cpu().clone(), observation))
        return expert(env.state)

    assert env.max_episode_steps is not None
    playing = FirstEpisodes(env, choose, seeds, env.max_episode_steps)
    slots: list[dict[str, Any]] = []
    lengths = torch.zeros(env.num_envs, dtype=torch.int64)
    for info in playing:
        slot = {key: getattr(playing, key) for key in ("action", *RESULTS)}
        slot |= {"success": info["success"], "final": info["final_obs"]}
        slots.append(map_tree(lambda leaf: leaf.cpu().clone(), slot))
        lengths += playing.counted
    observations = map_tree(lambda *column: torch.stack(column), *seen)
    steps = map_tree(lambda *column: torch.stack(column), *slots)
    for row, length in enumerate(lengths[: len(seeds)].tolist()):
        begun = map_tree(lambda leaf, row=row, n=length: leaf[:n, row], observations)
        final = map_tree(lambda leaf, row=row, n=length: leaf[n - 1 : n, row], steps["final"])
        one = {key: steps[key][:length, row] for key in ("action", *RESULTS, "success")}
        yield Episode(
            observation=map_tree(lambda *parts: torch.cat(parts), begun, final),
            success=bool(one.pop("success")[-1]),
            intervened=torch.zeros(length, dtype=torch.bool),
            task="",
            **one,
        )


def _play(
    env: ActionChunk,
    task: TorchEnv,
    expert: Callable[[TensorDict], Tensor],
    seeds: list[int],
    calls: PhaseTimer,
) -> dict[str, Any]:
    """Play one episode per row, time-major: {field: [T+1, N, ...]}."""
    seen: list[Any] = []

    def choose(observation: Observation, running: Tensor) -> Tensor:
        seen.append(map_tree(torch.clone, observation))
        return plan(task, expert, task.state, env.chunk_size)

    slots: list[dict[str, Any]] = []
    playing = FirstEpisodes(env, choose, seeds, task.max_episode_steps, calls)
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
