"""Play many episodes of single actions in parallel by a trained policy, in chunks or not."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Policy, VectorEnv
from lightning_rl.extend.collectors import FirstEpisodes, action_function
from lightning_rl.extend.envs import Observation, refuse_missing_end
from lightning_rl.extend.errors import require
from lightning_rl.extend.policies import NOISE, autocast, check_weights_are_numbers
from lightning_rl.extend.rollout import map_tree
from lightning_rl.extensions.datasets.ahead import ActionFunction, single, without_keys
from lightning_rl.extensions.datasets.episode import Episode


class ChunkActor:
    """Chooses single actions [N, *A] of N parallel episodes that begin together.

    Each row draws with its own generator, so that episodes do not depend on each other.

    Args:
        policy: acts by single actions, or by chunks.
        num_envs: N.
        seeds: seed of each row; None acts with the mode.
        chunk_size: K, actions in a chunk; None without chunks.
        execute: number of executed actions per chunk. Default: all.
        is_outdated: called before each action; true: compute a new chunk, because another action
            than the policy's was executed.
        chooser: chooses the policy's actions. Default: a new one.

    Raises:
        ConfigurationError: if the policy has `real_time` with another `execution_horizon`.
    """

    def __init__(
        self,
        policy: Policy,
        num_envs: int,
        seeds: Sequence[int] | None,
        chunk_size: int | None = None,
        execute: int | None = None,
        is_outdated: Callable[[], bool] = lambda: False,
        chooser: ActionFunction | None = None,
    ) -> None:
        check_weights_are_numbers(policy)
        policy.put_in_eval_mode()
        self._policy, self._chunk_size = policy, chunk_size
        self._execute, self._is_outdated = execute or chunk_size or 1, is_outdated
        horizon = getattr(getattr(policy, "real_time", None), "execution_horizon", self._execute)
        require(
            self._execute == horizon,
            f"execute is {self._execute}, but real_time.execution_horizon of the policy is "
            f"{horizon}: set execute: {horizon}.",
        )
        # The fallback draws for each row in turn and keeps the state of the policy.
        self._one_by_one = chooser or action_function(policy, num_envs, seeds, is_outdated)
        device = policy.version.device
        self._generators = [torch.Generator(device).manual_seed(int(seed)) for seed in seeds or ()]
        # One pass for all rows needs noise drawn before the pass, and no state.
        self._together = seeds is not None and not policy.masks_actions
        self._together &= "state" not in policy.extra_fields and policy.draw_noise([1]).numel() > 0
        box = single(policy.action_space, chunk_size)
        self._bounds = (box.low, box.high) if isinstance(box, gymnasium.spaces.Box) else None
        self._step = 0
        self._planned = torch.zeros(0)

    @torch.no_grad()
    def __call__(self, observation: Observation, running: Tensor) -> Tensor:
        """Return actions [N, *A] for observations [N, ...]; only `running` rows [N] matter."""
        # The number of the action within the chunk; 0: compute the next chunk.
        place = 0 if self._is_outdated() else self._step % self._execute
        self._step = place + 1
        if place == 0:
            with autocast(self._policy.version.device, self._policy.autocast_dtype):
                self._planned = self._plan(observation, running)
        action = self._planned if self._chunk_size is None else self._planned[:, place]
        if self._bounds is None:
            return action
        # Clip as deployed policies do: a recording holds actions within the bounds.
        return action.clamp(*(torch.as_tensor(bound).to(action) for bound in self._bounds))

    def _plan(self, observation: Observation, running: Tensor) -> Tensor:
        if not self._together:
            return self._one_by_one(observation, running)
        td = TensorDict({"observation": observation}, [len(running)]).to(
            self._policy.version.device
        )
        noise = [self._policy.draw_noise([1], generator) for generator in self._generators]
        idle = len(running) - len(noise)  # rows without an episode act like the last row
        td[NOISE] = torch.cat([*noise, *noise[-1:] * idle])
        action: Tensor = self._policy(td)["action"]
        return action


def play_policy(
    env: VectorEnv,
    policy: Policy,
    seeds: Sequence[int],
    max_steps: int | None,
    *,
    deterministic: bool = False,
    chunk_size: int | None = None,
    execute: int | None = None,
) -> Iterator[Episode]:
    """Play one episode per seed, at most N, and yield them in the order of `seeds`.

    Args:
        env: env of single actions; it is reset.
        policy: for this env, or for chunks of its actions.
        seeds: seed of each episode, for its start and its drawn actions.
        max_steps: env steps after which an episode is cut.
        deterministic: act with the mode.
        chunk_size: see `ChunkActor`.
        execute: see `ChunkActor`.

    Raises:
        ConfigurationError: if the policy is for another env.
    """
    check_fits(policy, env, chunk_size, "The policy", "play it in the env that it was trained in.")
    action_seeds = None if deterministic else seeds
    actor = ChunkActor(policy, env.num_envs, action_seeds, chunk_size, execute)
    return play_side_by_side(env, actor, seeds, max_steps)


def check_fits(
    policy: Policy, env: VectorEnv, chunk_size: int | None, name: str, cure: str
) -> None:
    """Refuse an env whose observations or actions differ from the policy's.

    Keys that acting does not read, such as the critic's, may be missing or different. The message
    begins with `name` and ends with `cure`.

    Raises:
        ConfigurationError: naming the space of both.
    """
    read, observed = policy.acting_space, env.single_observation_space
    if isinstance(read, gymnasium.spaces.Dict) and isinstance(observed, gymnasium.spaces.Dict):
        unread = policy.observation_space.spaces.keys() - read.spaces.keys()  # type: ignore[attr-defined]  # a Dict
        observed = without_keys(observed, unread)
    spaces = {
        "observation": (read, observed),
        "action": (single(policy.action_space, chunk_size), env.single_action_space),
    }
    for kind, (policy_space, env_space) in spaces.items():
        require(
            policy_space == env_space,
            f"{name} has the {kind} space {policy_space}, but the env has {env_space}: {cure}",
        )


@torch.no_grad()
def play_side_by_side(
    env: VectorEnv,
    choose: ActionFunction,
    seeds: Sequence[int],
    max_steps: int | None,
    calls: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Episode]:
    """Play one episode per seed in parallel, and yield them in the order of `seeds`.

    Their success is None if the env reports no success in any of them.
    """
    observations_by_step: list[Any] = []
    reports_success = False

    def choose_and_keep(observation: Observation, running: Tensor) -> Tensor:
        observations_by_step.append(map_tree(lambda leaf: leaf.cpu().clone(), observation))
        return choose(observation, running)

    # Observations are kept where the policy sees them, before the env overwrites them.
    playing = FirstEpisodes(env, choose_and_keep, seeds, max_steps, calls)
    slots: list[dict[str, Any]] = []
    finals: dict[int, Any] = {}  # by row
    lengths = torch.zeros(env.num_envs, dtype=torch.int64)
    for info in playing:
        slot = {key: getattr(playing, key) for key in ("reward", "terminated", "truncated")}
        executed = playing.interventions(info)
        slot |= {"action": executed["executed_action"], "intervened": executed["intervened"]}
        reports_success |= "success" in info
        # An env may report success only in episodes that succeed.
        slot["success"] = info.get("success", torch.zeros_like(playing.terminated))
        slots.append(map_tree(lambda leaf: leaf.cpu().clone(), slot))
        # Rows whose episode has ended step on until all have, and do not count.
        lengths += playing.counted
        done = (playing.terminated | playing.truncated).cpu()
        for row in (playing.counted & ~playing.running).nonzero().flatten().tolist():
            if "final_obs" not in info:
                refuse_missing_end(type(env).__name__, done)
            # Other rows of final_obs have no meaning; an episode that was cut has not ended.
            last = info["final_obs"] if done[row] else playing.observation
            finals[row] = map_tree(lambda leaf, i=row: leaf[i : i + 1].cpu().clone(), last)
    # [T, N, ...] on the CPU.
    observations = map_tree(lambda *column: torch.stack(column), *observations_by_step)
    steps = map_tree(lambda *column: torch.stack(column), *slots)
    for row, length in enumerate(lengths[: len(seeds)].tolist()):
        observation = map_tree(lambda leaf, row=row, n=length: leaf[:n, row], observations)
        fields = {key: values[:length, row] for key, values in steps.items()}
        succeeded = bool(fields.pop("success")[-1])
        yield Episode(
            observation=map_tree(lambda *parts: torch.cat(parts), observation, finals[row]),
            success=succeeded if reports_success else None,
            task="",
            **fields,
        )
