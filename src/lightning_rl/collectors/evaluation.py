"""Play one episode per seed, and report a policy's performance with its uncertainty."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_rl.collectors.first_episodes import ActionFunction, FirstEpisodes
from lightning_rl.envs import VectorEnv
from lightning_rl.envs.vector_env import Observation
from lightning_rl.policies import Policy
from lightning_rl.policies.weights import check_weights_are_numbers
from lightning_rl.rollout.masks import MASK, allowed_random_action, refuse_empty_masks
from lightning_rl.system import ranks
from lightning_rl.system.phases import PhaseTimer, no_phases

Episode = dict[str, Any]
"""Result of an episode.

`seed`; `return` (undiscounted sum of raw rewards); `length` (env steps); `terminated`; `cut` (by
the step limit, not by the env); `success` (bool, None if not reported); `intervened` (env steps
with an intervention, None if not reported); `metrics` {name: value at the last step}.
"""

Watcher = Callable[[Tensor, Tensor, Tensor], None]
"""Observer of the episodes, called after the reset and after each step; it must not change them.

Arguments: the env steps [N] int64 and the returns [N] float64 so far, and the mask of running
episodes [N] bool.
"""


class EpisodeSeeds(IterableDataset[list[int]]):
    """Seeds of the evaluation episodes, in batches of at most `num_envs`.

    All ranks have the same number of batches; some may be empty, because Lightning runs no
    evaluation hooks without batches.
    """

    def __init__(self, first_seed: int, num_episodes: int, num_envs: int) -> None:
        share = -(-num_episodes // ranks.world_size())  # rounded up; the last rank may have fewer
        first = ranks.rank() * share
        seeds = list(range(first_seed, first_seed + num_episodes))[first : first + share]
        self.batches = [seeds[i : i + num_envs] for i in range(0, share, num_envs)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


@torch.no_grad()
def run_episodes(
    policy: Policy,
    env: VectorEnv,
    seeds: Sequence[int],
    *,
    deterministic: bool = True,
    max_steps: int | None = None,
    watchers: Sequence[Watcher] = (),
    calls: PhaseTimer = no_phases,
) -> list[Episode]:
    """Play one episode per seed, in parallel; return the episodes in the order of the seeds.

    Each env plays only the episode of its seed: counting the first finished episodes would favour
    short ones. Each episode samples actions by its own generator, so that episodes do not depend on
    each other. Global random streams do not change.

    Args:
        policy: the policy to evaluate.
        env: env with at least one row per seed.
        seeds: at most N seeds.
        deterministic: act with the mode of the distribution; false samples.
        max_steps: env steps after which an episode is cut. Default: 100,000.
        watchers: observers of the episodes.
        calls: times the calls into the env; see `EnvWatch`.
    """
    policy.eval()
    choose = action_function(policy, env.num_envs, None if deterministic else seeds)
    playing = FirstEpisodes(env, choose, seeds, max_steps, calls)
    returns = torch.zeros(env.num_envs, dtype=torch.float64)  # float32 sums would drift
    lengths = torch.zeros(env.num_envs, dtype=torch.int64)
    intervened = torch.zeros_like(lengths) if env.reports_interventions else None
    episodes: dict[int, Episode] = {}
    for watch in watchers:
        watch(lengths, returns, playing.running)
    for info in playing:
        returns += torch.where(playing.counted, playing.reward.cpu(), 0.0)
        executed = info.get("executed")  # if an action is a chunk
        # Finished rows count on: their length has been read.
        lengths += 1 if executed is None else executed.sum(-1).cpu()
        if intervened is not None:
            flags = playing.interventions(info)["intervened"]
            intervened += playing.counted & flags.cpu()
        done = playing.counted & ~playing.running
        for i in done.nonzero().flatten().tolist():
            episodes[i] = {
                "seed": int(seeds[i]),
                "return": float(returns[i]),
                "length": int(lengths[i]),
                "terminated": bool(playing.terminated[i]),
                "cut": not (playing.terminated[i] or playing.truncated[i]),
                "intervened": None if intervened is None else int(intervened[i]),
                **_final_reports(info, i),
            }
        for watch in watchers:
            watch(lengths, returns, playing.running)
    return [episodes[i] for i in range(len(seeds))]


def action_function(
    policy: Policy,
    num_envs: int,
    seeds: Sequence[int] | None,
    is_outdated: Callable[[], bool] = lambda: False,
) -> ActionFunction:
    """Return a function that acts in an episode, with a generator per row, or by the mode.

    A policy whose state is a plan makes a new one before an action for which `is_outdated` is true.
    """
    actor = EpisodeActor(policy, num_envs, generators_of(policy, seeds or ()))

    def choose(observation: Observation, running: Tensor) -> Tensor:
        if policy.state_is_plan and is_outdated():  # a memory stays
            actor.begin(torch.ones_like(running))
        return actor.choose(observation, running, deterministic=seeds is None)

    return choose


def generators_of(policy: Policy, seeds: Sequence[int]) -> list[torch.Generator]:
    """Return a generator per seed, on the policy's device."""
    return [torch.Generator(policy.version.device).manual_seed(int(seed)) for seed in seeds]


class EpisodeActor:
    """Chooses a policy's actions step by step, and keeps its state between steps.

    Args:
        policy: the policy.
        num_envs: N.
        generators: one per row, to sample actions.

    Raises:
        ConfigurationError: if weights are not finite.
    """

    def __init__(
        self, policy: Policy, num_envs: int, generators: Sequence[torch.Generator]
    ) -> None:
        check_weights_are_numbers(policy)
        self.num_envs = num_envs
        self._policy, self._generators = policy, generators
        self._state = policy.first_state(num_envs)
        self._step = itertools.count()

    def choose(self, observation: Observation, running: Tensor, *, deterministic: bool) -> Tensor:
        """Return actions [N, *A] for observations [N, ...]; only `running` rows [N] bool matter."""
        t, policy = next(self._step), self._policy
        if policy.masks_actions:  # check running episodes only
            mask = cast(TensorDict, observation)[MASK]
            allowed = mask.masked_fill(~running.to(mask.device)[:, None], 1)
            refuse_empty_masks("The env", allowed[None], policy.action_space, t)
        td = TensorDict({"observation": observation, **self._state}, [self.num_envs])
        td = td.to(policy.version.device)  # the env may be on another device
        if deterministic:
            result = policy(td, deterministic=True)
        else:
            result = self._draw(td, running.nonzero().flatten())
        if self._state:
            self._state["state"] = result["next_state"]
        action: Tensor = result["action"]
        return action

    def begin(self, rows: Tensor) -> None:
        """Reset the state to zero in `rows` [N] bool."""
        for key, state in self._state.items():
            mask = rows.to(state.device).view(-1, *[1] * (state.dim() - 1))
            self._state[key] = state.masked_fill(mask, 0)

    def _draw(self, td: TensorDict, rows: Tensor) -> dict[str, Tensor]:
        # Row by row, because each episode draws from its own generator.
        results = [
            self._policy(td[i : i + 1], generator=self._generators[i]) for i in rows.tolist()
        ]
        outputs: dict[str, Tensor] = {}
        for key in ("action", "next_state") if self._state else ("action",):
            samples = torch.cat([result[key] for result in results])
            # Finished rows copy the first running row: their actions do not matter.
            like_first = samples[:1].expand(len(td), *samples.shape[1:])
            if key == "action" and self._policy.masks_actions:  # but each has its own mask
                mask = td["observation"][MASK]
                like_first = allowed_random_action(self._policy.action_space, like_first, mask)
            outputs[key] = like_first.index_copy(0, rows.to(samples.device), samples)
        return outputs


def _final_reports(info: dict[str, Any], i: int) -> dict[str, Any]:
    success = info.get("success")
    metrics = {**info.get("metrics", {}), **info.get("final_metrics", {})}
    numbers = {name: float(x[i]) for name, x in metrics.items() if x.dim() == 1}
    return {
        "success": None if success is None else bool(success[i]),
        "metrics": {name: x for name, x in numbers.items() if not math.isnan(x)},
    }


def summarize(episodes: Sequence[Episode], reports_success: bool = False) -> dict[str, Any]:
    """Return the content of `evaluation.json`: averages, 95 % intervals, and every episode."""
    returns = np.array([episode["return"] for episode in episodes])
    reports_success |= any(episode["success"] is not None for episode in episodes)
    successes = [bool(episode["success"]) for episode in episodes] if reports_success else []
    names = sorted({name for episode in episodes for name in episode["metrics"]})
    intervened = [e["intervened"] for e in episodes if e["intervened"] is not None]
    return {
        "episodes": len(episodes),
        "avg_reward": float(returns.mean()),
        "std_reward": float(returns.std()),
        "ci95": bootstrap_interval(returns),
        "avg_length": float(np.mean([episode["length"] for episode in episodes])),
        "success_rate": float(np.mean(successes)) if successes else None,
        "success_ci95": wilson_interval(sum(successes), len(successes)) if successes else None,
        "terminations": sum(episode["terminated"] for episode in episodes),
        "truncations": sum(not episode["terminated"] for episode in episodes),
        "cut": sum(episode["cut"] for episode in episodes),
        "intervened_steps": sum(intervened) if intervened else None,
        "metrics": {
            name: float(np.mean([e["metrics"][name] for e in episodes if name in e["metrics"]]))
            for name in names
        },
        "returns": returns.tolist(),
        "lengths": [episode["length"] for episode in episodes],
        "seeds": [episode["seed"] for episode in episodes],
    }


def logged_values(evaluation: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary that are logged, as `eval/...`."""
    single = ("avg_reward", "std_reward", "avg_length", "success_rate", "intervened_steps")
    values = {f"eval/{name}": evaluation[name] for name in (*single, "terminations", "truncations")}
    for name in ("ci95", "success_ci95"):
        low, high = evaluation[name] or (None, None)
        values |= {f"eval/{name}_low": low, f"eval/{name}_high": high}
    values |= {f"eval/metrics/{name}": value for name, value in evaluation["metrics"].items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def bootstrap_interval(values: np.ndarray, *, resamples: int = 10_000) -> list[float]:
    """Return [low, high], a 95 % percentile-bootstrap interval of the mean of [M] (Efron 1979)."""
    # A fixed seed: the same episodes give the same interval.
    index = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[index].mean(axis=1), [2.5, 97.5])
    return [float(low), float(high)]


def wilson_interval(successes: int, trials: int) -> list[float]:
    """Return [low, high], the 95 % score interval of a success rate (Wilson 1927)."""
    z = 1.959964  # the 97.5 % point of the normal distribution
    rate, share = successes / trials, z * z / trials
    centre = (rate + share / 2) / (1 + share)
    half = z * math.sqrt(rate * (1 - rate) / trials + share / (4 * trials)) / (1 + share)
    return [max(0.0, centre - half), min(1.0, centre + half)]
