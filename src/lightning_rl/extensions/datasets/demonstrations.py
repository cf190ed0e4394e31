"""Collect rollouts of demonstrations: from a dataset, or from the env's expert."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import (
    ActionChunk,
    Collector,
    CollectorContext,
    ConfigurationError,
    TorchEnv,
    VectorEnv,
)
from lightning_rl.extend.errors import check_range, closest, require
from lightning_rl.extend.rollout import allocate_rollout, map_tree
from lightning_rl.extensions.datasets.ahead import single, without_keys
from lightning_rl.extensions.datasets.ends import Ends
from lightning_rl.extensions.datasets.episode import CODES, CONDITION, Episode, Episodes, Outside
from lightning_rl.extensions.datasets.playing import play_side_by_side
from lightning_rl.extensions.datasets.reader import Reader, read_episodes
from lightning_rl.extensions.vla.instructions import InstructionTokenizer
from lightning_rl.functional import first_episode_mask


class DatasetCollector(Collector):
    """Return demonstrations as rollouts, for `BehaviorCloning`.

    A rollout is as long as its longest episode; `data.buffer_size` does not apply. If the env takes
    chunks of actions, episodes are cut into chunks, and the last action pads the last chunk. If the
    dataset has `advantage` labels, rollouts have the field `advantage` [N, T+1].

    Args:
        context: see `Collector`.
        path: dataset, see `read_episodes`. Default: record the env's own expert.
        episodes: use the first `episodes` episodes. Default: all of the dataset, 100 of an expert.
        keys: rename columns of the dataset, see `read_episodes`.
        fps: steps per second of the env, which must equal the dataset's. Default: the env's own.
        tokenizer: directory of a tokenizer, see `VLAObservation`, which converts the tasks of the
            dataset to `language`. Default: the dataset has `language`.
        condition: extra of the dataset, such as `advantage_positive` of `rl-cli label`: the
            condition of a `ConditionedPolicy` is good if the label is 1, otherwise bad. Default:
            absent. A chunk has the condition of its first step.
        episodes_per_rollout: number of episodes that each rollout reads and keeps in memory; each
            pass over the dataset shuffles them. Default: read all episodes once.
        ends: how episodes ended if the dataset does not record it, see `read_episodes`.
        actions_outside: treatment of actions outside of the env's bounds, see `read_episodes`.
        reader: your class that reads the dataset, see `read_episodes`.

    Attributes:
        count: number of episodes of all rollouts.
        has_all_rewards: whether all rewards of the last rollout's episodes are known.

    Raises:
        ConfigurationError: without a dataset or an expert, if the dataset does not fit the env, if
            a step has no condition, or if the policy does not read the condition.
    """

    acted_by_policy = False

    def __init__(
        self,
        context: CollectorContext,
        path: str | None = None,
        *,
        episodes: int | None = None,
        keys: dict[str, str] | None = None,
        fps: float | None = None,
        tokenizer: str | None = None,
        condition: str | None = None,
        episodes_per_rollout: int | None = None,
        ends: Ends | None = None,
        actions_outside: Outside = "clip",
        reader: Reader | None = None,
    ) -> None:
        super().__init__(context)
        env = context.env
        check_range("episodes", episodes, minimum=1)
        check_range("episodes_per_rollout", episodes_per_rollout, minimum=1)
        self._rollouts = 0
        self._dataset: Episodes | None = None
        self._condition = condition
        require(
            condition is None or CONDITION in self.policy.extra_fields,
            f"condition is {condition!r}, and {type(self.policy).__name__} ignores conditions: set "
            "model.policy: {class_path: ConditionedPolicy, init_args: {policy: ...}}.",
        )
        self._tokenizer, space = _tokenizer_for(tokenizer, self._space)
        if path is None:
            for name, setting in (("condition", condition), ("tokenizer", tokenizer)):
                require(
                    setting is None,
                    f"{name} is {setting!r}, but the env's own expert has no labels and no tasks "
                    "in words: give the path of a dataset that has them (rl-cli label).",
                )
            inner = env.env if isinstance(env, ActionChunk) else env
            played = list(expert_episodes(inner, episodes or 100, context.seed, context.calls))
            self._rows = self.count = len(played)
            self._rollout = self._allocate(self._rows, [len(episode) for episode in played])
            self._fill(played)
            return
        settings: Any = {"ends": ends, "actions_outside": actions_outside, "reader": reader}
        self._dataset = read_episodes(
            path,
            keys,
            observation_space=space,
            action_space=single(env.single_action_space, env.chunk_size),
            fps=fps or env.known_fps,
            **settings,
        )
        self.count = episodes or len(self._dataset)
        if self.count > len(self._dataset):
            raise ConfigurationError(
                f"{path} holds {len(self._dataset)} demonstrations, but {episodes} are requested: "
                "record more, or lower episodes."
            )
        self._rows = min(self.count, episodes_per_rollout or self.count)
        self._rollout = self._allocate(self._rows, self._dataset.lengths[: self.count])
        if self._rows == self.count:
            self._fill(self._dataset.each(range(self.count)))

    def collect(self) -> TensorDict:
        if self._dataset is not None and self._rows < self.count:
            self._fill(self._dataset.each(self._drawn(self._rollouts)))
        # Without `episodes_per_rollout` the rollout was filled at the start and never changes.
        self._rollouts += 1
        self._rollout["policy_version"].fill_(self.policy.version)
        # A copy of the TensorDict, not of its tensors: the learner adds fields to it.
        return self._rollout.copy()

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"rollouts": self._rollouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rollouts = state.get("rollouts", 0)

    @property
    def _space(self) -> gymnasium.Space[Any]:
        # A key that no network of the policy reads may be missing in the dataset.
        return without_keys(self.env.single_observation_space, self.policy.ignore_keys)

    def _allocate(self, rows: int, lengths: list[int]) -> TensorDict:
        require(
            not self.env.info_fields,
            f"data.extra_fields keeps {', '.join(self.env.info_fields)} of each step of the env, "
            "but demonstrations have no infos: remove data.extra_fields.",
        )
        rollout = allocate_rollout(
            self._space,
            self.env.single_action_space,
            rows,
            -(-max(lengths) // self.env.steps_per_action),
            extra_fields=self.policy.extra_fields | self.env.extra_fields,
        )
        rollout["padding"] = torch.zeros_like(rollout["done"])
        if self._dataset is not None and "advantage" in self._dataset[0].extra:
            rollout["advantage"] = torch.zeros_like(rollout["reward"])
        return rollout.to(self.policy.version.device)

    def _fill(self, episodes: Iterable[Episode]) -> None:
        rollout = self._rollout
        # Rows are shorter than the rollout, and the previous episodes' steps would stay behind
        # them.
        map_tree(Tensor.zero_, rollout.exclude("final_observation"))
        rollout["final_observation"].clear()
        chunk = self.env.chunk_size or 1
        labels, self.has_all_rewards = [], True
        for row, episode in enumerate(episodes):
            self.has_all_rewards &= bool(episode.reward.isfinite().all())
            execute = self.env.steps_per_action
            self._with_instructions(episode).write_into(rollout, row, chunk, execute)
            if "advantage" in rollout.keys():
                # A chunk has the label of its first step.
                advantage = episode.extra["advantage"][::execute]
                rollout["advantage"][row, : len(advantage)] = advantage.to(rollout["advantage"])
            if self._condition is not None:
                labels.append(self._labels(episode)[::execute] > 0.5)
        rollout["padding"].fill_(True)  # includes the bootstrap slot
        rollout["padding"][:, :-1] = ~first_episode_mask(rollout["done"][:, :-1])
        action: Tensor = rollout["action"]
        # The fields that the policy would have stored for these actions, such as tokens.
        for key, value in self.policy.fields_of(action.flatten(0, 1)).items():
            rollout[key] = value.unflatten(0, rollout.batch_size)
        for row, is_good in enumerate(labels):
            codes = torch.where(is_good, CODES["good"], CODES["bad"])
            rollout[CONDITION][row, : len(codes)] = codes.to(rollout[CONDITION])

    def _drawn(self, number: int) -> list[int]:
        numbers = []
        # A pass over the dataset is a permutation that its seed and number decide, so a resumed run
        # draws the same episodes without stored state.
        for place in range(number * self._rows, (number + 1) * self._rows):
            turn, at = divmod(place, self.count)
            generator = torch.Generator().manual_seed(self.context.seed + turn)
            numbers.append(int(torch.randperm(self.count, generator=generator)[at]))
        return numbers

    def _with_instructions(self, episode: Episode) -> Episode:
        if self._tokenizer is None:
            return episode
        words = [*(episode.tasks or [episode.task] * len(episode))]
        coded = {text: torch.from_numpy(self._tokenizer(text)) for text in {*words}}
        # The final observation has the instruction of the last step.
        language = torch.stack([coded[text] for text in [*words, words[-1]]])
        return replace(episode, observation={**episode.observation, "language": language})

    def _labels(self, episode: Episode) -> Tensor:
        assert self._dataset is not None
        assert self._condition is not None
        labels = episode.extra.get(self._condition)
        require(
            labels is not None and labels.ndim == 1 and bool(labels.float().isfinite().all()),
            f"The dataset at {self._dataset.path} has no condition "
            f"'{self._condition}'{closest(self._condition, episode.extra)}; it has "
            f"{', '.join(sorted(episode.extra)) or 'no labels'}. Label it: rl-cli label "
            f"{self._dataset.path}",
        )
        assert labels is not None
        return labels


def prepare_for_critics(rollout: TensorDict, collector: DatasetCollector, learner: str) -> None:
    """Turn truncated last steps without a final observation into padding, as replays leave out.

    For algorithms that bootstrap from a `rollout` [N, T+1]; cloning needs no next observation.

    Raises:
        ConfigurationError: for unknown rewards, or none but 0; names `learner`.
    """
    require(
        collector.has_all_rewards and bool(rollout["reward"].any()),
        f"{'All' if collector.has_all_rewards else 'Some'} rewards of the dataset are 0 or "
        f"unknown, but {learner} learns from rewards: label them (rl-cli label), name their column "
        "(data.collector.keys), or use BehaviorCloning.",
    )
    unknown = rollout["truncated"] & ~rollout["terminated"] & (rollout["final_index"] == 0)
    # A terminated step needs no final observation.
    for key in ("padding", "terminated"):
        rollout[key] = rollout[key] | unknown


def _tokenizer_for(
    path: str | None, space: gymnasium.Space[Any]
) -> tuple[InstructionTokenizer | None, gymnasium.Space[Any]]:
    if path is None:
        return None, space
    spaces = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {}
    require(
        "language" in spaces,
        f"tokenizer is set, but the observation has no language: {space}. Wrap the env in "
        "VLAObservation, or remove tokenizer.",
    )
    length = int(spaces["language"].shape[0])  # type: ignore[index]  # a Box
    return InstructionTokenizer(path, length), without_keys(space, ["language"])


@torch.no_grad()
def expert_episodes(
    env: VectorEnv,
    episodes: int,
    seed: int,
    calls: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Episode]:
    """Play episodes of single actions by the env's own expert, N in parallel.

    Args:
        env: task with `expert(state)`; it is reset.
        episodes: number of episodes.
        seed: seed of the first episode; episode i has seed + i.
        calls: times the calls into the env; see `EnvWatch`.

    Raises:
        ConfigurationError: if the env has no expert.
    """
    if not (isinstance(env, TorchEnv) and hasattr(env, "expert")):
        raise ConfigurationError(
            f"{type(env).__name__} has no expert to record: give a dataset of demonstrations as "
            "path, or use a task with an expert, such as PushBlocks."
        )
    expert, task = cast(Callable[[TensorDict], Tensor], env.expert), env
    assert env.max_episode_steps is not None
    for first in range(seed, seed + episodes, env.num_envs):
        seeds = range(first, min(first + env.num_envs, seed + episodes))
        yield from play_side_by_side(
            env, lambda *_: expert(task.state), seeds, env.max_episode_steps, calls
        )
