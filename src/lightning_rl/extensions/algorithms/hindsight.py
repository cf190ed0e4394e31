"""Hindsight replay: draw samples with goals that their episodes achieved."""

from collections.abc import Iterator
from typing import Any, Literal, get_args

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import ConfigurationError, Replay, ReplayBuffer
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.rollout import GoalFunction
from lightning_rl.kwargs import HindsightReplayKwargs, Unpack

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
"""Keys of a goal env's observation."""

Strategy = Literal["future", "final", "episode"]
"""Steps of an episode whose achieved goal becomes the goal of a sample."""

UNFIT = {
    "padding": "steps that only reset an env",
    "state": "the states of a memory, which depend on the goal",
}
"""Fields of rollouts that cannot be relabelled, and what they hold."""

ENV_STRIDE = 2**40
"""Distance between the ends of two envs in the sorted list of ends; above any number of steps."""

CLOSE = 1e-3
"""Tolerance for rewards: the replay stores goals as float32."""

MOST_DIFFERENT = 0.01
"""Share of rewards that may differ: rounding moves a goal across its threshold."""


class HindsightReplay(ReplayBuffer):
    """A ring of the last transitions of a goal env, partly drawn with goals that were achieved.

    A share of the samples gets a new `desired_goal`, which the env achieved after a step of the
    same episode; rewards and terminations are computed again. The ring stores each step once, with
    its own goal. Of a running episode, and of one whose beginning was overwritten, the stored steps
    count.

    The env's `compute_reward` gives the rewards, and `compute_terminated`, if the env has it, the
    ends by a goal; other terminations stay as they were. An n-step return ends where the new goal
    ends the episode.
    Source: Andrychowicz et al. 2017, "Hindsight Experience Replay", algorithm 1 and section 4.5.
    Differs from the paper: samples get their goals when they are drawn, not when they are stored.

    Args:
        observation_space, action_space, num_envs, device, seed, goals: see `Replay`.
        strategy: the step that achieved the new goal: `future`, the sample's step or a later one;
            `final`, the last one; `episode`, any one.
        share: probability that a sample gets a new goal; the paper's k new goals for each own one
            are k / (k + 1).
        kwargs: see `ReplayBuffer`.

    Raises:
        ConfigurationError: if the env is no goal env, or a setting is out of range.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        goals: GoalFunction | None = None,
        strategy: Strategy = "future",
        share: float = 0.8,
        **kwargs: Unpack[HindsightReplayKwargs],
    ) -> None:
        spaces = observation_space, action_space
        super().__init__(*spaces, num_envs, device, seed, goals=goals, **kwargs)
        check_range("data.replay.share", share, minimum=0, maximum=1)
        allowed = get_args(Strategy)  # only the command line checks the type
        require(strategy in allowed, f"data.replay.strategy={strategy!r} is none of {allowed}.")
        self._achieved = ("observation", ACHIEVED)
        self._desired = ("observation", DESIRED)
        specs = [self.ring.observation.get(name) for name in (self._achieved, self._desired)]
        require(
            goals is not None and specs[0] is not None and specs[0] == specs[1],
            "HindsightReplay needs a goal env, as in Gymnasium-Robotics: with the arrays "
            f"{ACHIEVED} and {DESIRED}, of one shape, in its observation, and with "
            "compute_reward, and without ActionChunk. The observation of data.env is "
            f"{observation_space}. Set data.replay: ReplayBuffer, or name a goal env.",
        )
        assert goals is not None
        self._judge = goals
        self._strategy, self._share = strategy, share
        self._sorted_ends, self._sorted_at = torch.empty(0), -1  # env * ENV_STRIDE + slot
        # Largest |r| at goals that end an episode and at others; known after the first rollout.
        self._goal_rewards: tuple[Tensor, Tensor] | None = None

    def extend(self, rollout: TensorDict) -> None:
        for key, content in UNFIT.items():
            require(
                key not in rollout.keys(),
                f"HindsightReplay gives single steps new goals, but the rollouts have {content}: "
                "remove that, or set data.replay: ReplayBuffer.",
            )
        super().extend(rollout)
        if self._goal_rewards is None:
            self._check_rewards(rollout.batch_size[1] - 1)

    def largest_new_return(self, gamma: float) -> Tensor | None:
        # Collected rewards are all 0 before the first success; those of new goals are not.
        if self._goal_rewards is None:
            return None
        ending, repeated = self._goal_rewards
        # A goal that ends no episode is reached at each step after the first, and time limits
        # bootstrap: the return is a geometric series.
        return ending.maximum(repeated / (1 - gamma) if gamma < 1 else repeated)[None]

    def _check_rewards(self, steps: int) -> None:
        """Refuse an env whose rewards differ from those of its `compute_reward`."""
        # Only the first rollout is checked: wrappers do not change later.
        stored = self.ring.end - self.ring.oldest
        first = max(0, stored - steps) * self.num_envs
        rows = self.ring.row(torch.arange(first, stored * self.num_envs, device=self.ring.device))
        achieved, desired = self._after(self._achieved, rows), self._after(self._desired, rows)
        computed, _ = self._judge(achieved, desired)
        reward, ends = self._judge(achieved, achieved)
        self._goal_rewards = (
            reward.abs().where(ends, 0.0).amax(),
            reward.abs().where(~ends, 0).amax(),
        )
        paid = self.ring.columns["reward",].index_select(0, rows)
        differs = ~torch.isclose(computed, paid, rtol=CLOSE, atol=CLOSE)
        if differs.float().mean() > MOST_DIFFERENT:
            index = differs.nonzero()[0, 0]
            raise ConfigurationError(
                f"The env paid {paid[index]:.6g} for a step, but compute_reward returns "
                f"{computed[index]:.6g} for its achieved and desired goal, so rewards of other "
                "goals would be wrong. A wrapper that changes rewards or goals has to define "
                "compute_reward as well."
            )

    # --- minibatches ---

    def sequences(self, *args: Any, **kwargs: Any) -> Iterator[TensorDict]:
        return Replay.sequences(self, *args, **kwargs)  # refuses

    def samples(
        self, distances: Tensor, n_steps: int, gamma: float, chunks: bool = False
    ) -> dict[tuple[str, ...], Tensor]:
        fields = super().samples(distances, n_steps, gamma, chunks)
        draws = torch.rand(2, len(distances), generator=self._generator, device=self.ring.device)
        new = (draws[0] < self._share).nonzero().flatten()
        rows = self.ring.row(distances[new])
        goal = self._after(self._achieved, self._achieving(distances[new], draws[1, new]))
        sums, discount, last = self.sums(rows, distances[new], n_steps, gamma, goal)
        changed = sums | {("discount",): discount}
        if chunks:
            changed |= self.actions(rows, last, n_steps)
        for name, values in changed.items():
            fields[name][new] = values
        if n_steps > 1:  # a sum may end earlier than with the step's own goal
            for name in self.ring.observation:
                fields["next_observation", *name[1:]][new] = self._after(name, last)
        for key in ("observation", "next_observation"):
            fields[key, DESIRED][new] = goal
        return fields

    def _achieving(self, distances: Tensor, uniform: Tensor) -> Tensor:
        """Return the rows [M] of the steps that achieved the new goals.

        Args:
            distances: [M], the samples, as distances from the oldest row.
            uniform: [M], random numbers in [0, 1).
        """
        slots, envs = distances // self.num_envs + self.ring.oldest, distances % self.num_envs
        ends = self._all_ends()
        place = torch.searchsorted(ends, envs * ENV_STRIDE + slots)
        last, earliest = ends[place] % ENV_STRIDE, (ends[place - 1] + 1) % ENV_STRIDE
        first = {"future": slots, "final": last, "episode": earliest}[self._strategy]
        # In float32 the product may round up to the number of steps, which lies beyond the
        # episode.
        further = (uniform * (last - first + 1)).long().minimum(last - first)
        # Slots count on; the rows of the ring begin again.
        return (first + further) * self.num_envs % self.ring.rows + envs

    def _all_ends(self) -> Tensor:
        """Return the last step of each stored fragment, sorted by env and slot.

        For each env, they include the last stored step and the one before the first.
        """
        # Sort once per rollout, not for each minibatch.
        ring = self.ring
        if self._sorted_at != ring.end:
            cells = ring.final_observations.cells(ring.oldest)
            starts = torch.arange(self.num_envs) * ENV_STRIDE
            bounds = starts + ring.oldest - 1, starts + ring.end - 1
            ends = cells % self.num_envs * ENV_STRIDE + cells // self.num_envs
            ends = torch.cat((ends, *bounds)).sort().values
            self._sorted_ends, self._sorted_at = ends.to(ring.device), ring.end
        return self._sorted_ends

    def step_rewards(
        self, rows: Tensor, gamma: float, goal: Any = None
    ) -> tuple[dict[tuple[str, ...], Tensor], Any, Tensor]:
        rewards, discount, terminated = super().step_rewards(rows, gamma)
        if goal is not None:
            achieved, desired = self._after(self._achieved, rows), self._after(self._desired, rows)
            rewards["reward",], ends = self._judge(achieved, goal)
            # An end by the step's own goal is undone; other terminations stay.
            terminated = ends | (terminated & ~self._judge(achieved, desired)[1])
            discount = torch.full_like(rewards["reward",], gamma)
        return rewards, discount, terminated

    def _after(self, name: tuple[str, ...], rows: Tensor) -> Tensor:
        """Return a column's values [M, ...] after the steps in `rows` [M]."""
        return self.ring.after(rows, [name])[name]
