"""Step an env: the one loop of training, evaluation and recording, and how it fills rollouts."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers import Segment, allocate_segments
from lightning_rl.collectors.statistics import EnvReports
from lightning_rl.compiled.choice import StepsChoice
from lightning_rl.compiled.steps import compile_steps
from lightning_rl.envs import RestoreError, VectorEnv
from lightning_rl.envs.step_results import check_like, refuse_missing_end
from lightning_rl.envs.vector_env import Observation, RolloutStepper
from lightning_rl.policies import Policy
from lightning_rl.policies.base import RolloutActor, UniformActor
from lightning_rl.policies.teacher import MixedActor, Teacher
from lightning_rl.rollout.contract import (
    LOOK_EVERY,
    MASK,
    clear_final_observations,
    copy_tree,
    env_steps_in,
    first_steps,
    refuse_empty_masks,
    time_major,
)
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.phases import PhaseTimer, no_phases

Chooser = Callable[[Observation, Tensor], Tensor]
"""Gives the actions [N, *A] for an observation [N, ...] and the rows [N] bool that still run."""


class Acts(Protocol):
    """Chooses the actions: a `RolloutActor` on the storage of a rollout, or `FirstEpisodes`."""

    def act(self, t: int) -> None:
        """Choose the actions of step t."""


class Steps(Protocol):
    """Steps an env: a `RolloutStepper` on the storage of a rollout, or `FirstEpisodes`."""

    def step(self, t: int) -> dict[str, Any]:
        """Step by the actions of step t, keep what follows from them, and return the info."""


def step_through(
    actor: Acts,
    stepper: Steps,
    num_steps: int,
    *,
    before: Callable[[int], None] | None = None,
    phase: PhaseTimer = no_phases,
    calls: PhaseTimer = no_phases,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step an env, and hand out after each step its number, from 0, and its info.

    Who looks on stands in the body of the loop over it, and may break it off. No gradients are
    wanted: switch them off around that loop, not here, as a generator runs in its caller's mode.

    Args:
        actor: chooses the actions.
        stepper: steps the env by them.
        num_steps: at most.
        before: called before each step with its number; what it raises ends the loop.
        phase: times the phases `inference` and `env`.
        calls: times the calls into the env; see `EnvWatch`.
    """
    call = calls("step")
    for t in range(num_steps):
        if before is not None:
            before(t)
        with phase("inference"):
            actor.act(t)
        with phase("env"), call:
            info = stepper.step(t)
        yield t, info


class FirstEpisodes:
    """Play the first episode of some rows of an env, side by side and without storage.

    What a row does afterwards is played on, and does not count. Iterate to play: each step hands
    out its info.

    Args:
        env: is reset.
        choose: gives the actions; the observation that it gets holds until the next step.
        seeds: of the M episodes, M at most N; row i plays the i-th, the rows beyond do not count.
        max_steps: env steps after which an episode is cut.
        calls: times the calls into the env; see `EnvWatch`.

    Attributes:
        running: [N] bool, on the CPU: the episodes that have not ended.
        counted: [N] bool, on the CPU: the rows whose last step counts, those that ended by it
            included.
        observation: [N, ...], what the next actions are chosen for.
        action: [N, *A], the last one.
        reward, terminated, truncated: [N], of the last step.
    """

    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor

    def __init__(
        self,
        env: VectorEnv,
        choose: Chooser,
        seeds: Sequence[int],
        max_steps: int,
        calls: PhaseTimer = no_phases,
    ) -> None:
        self._env, self._choose, self._calls = env, choose, calls
        self._max_steps = -(-max_steps // env.steps_per_action)
        idle = [seeds[0]] * (env.num_envs - len(seeds))
        with calls("reset"):
            self.observation, _ = env.reset(seed=[*seeds, *idle])
        self.running = self.counted = torch.arange(env.num_envs) < len(seeds)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for t, info in step_through(self, self, self._max_steps, calls=self._calls):
            done = self.terminated.cpu() | self.truncated.cpu()
            self.counted = self.running
            self.running = self.counted & ~done & (t + 1 < self._max_steps)
            yield info
            if not self.running.any():
                break

    def act(self, t: int) -> None:
        """Choose the actions for the present observation."""
        self.action = self._choose(self.observation, self.running)

    def step(self, t: int) -> dict[str, Any]:
        """Step by the chosen actions."""
        self.observation, self.reward, self.terminated, self.truncated, info = self._env.step(
            self.action
        )
        return info


CARRIED = ("observation", "state")
"""What of a rollout's bootstrap slot the next one begins with; `state` where the policy has one."""


@dataclass(frozen=True)
class EpisodePlan:
    """How an algorithm wants the episodes of a rollout to begin and to end.

    Attributes:
        group_size: G rows that follow each other begin in the same state.
        reset_every_rollout: begin every rollout with new episodes.
        first_episode_only: what follows the first episode of a row does not count; the rollout ends
            as soon as every row has had one.
        random_env_steps: env steps of all processes whose actions are drawn uniformly from the
            action space, before the policy acts; whole rollouts of them.
        teacher: acts in a share of the steps, which each rollout has one of.
    """

    group_size: int = 1
    reset_every_rollout: bool = False
    first_episode_only: bool = False
    random_env_steps: int = 0
    teacher: Teacher | None = None


@dataclass(frozen=True)
class CollectorContext:
    """What a collector works with. The data module makes it.

    Attributes:
        env: N envs, stepped by this collector alone; the data module closes it.
        policy: acts; the collector reads its weights and never writes them.
        num_steps: T, steps per env in a rollout.
        seed: of the env and of the sampling of actions.
        plan: how the algorithm wants episodes to begin and end; by default they begin where the
            last ones end, and end where the env says so.
        phase: times the phases `env` and `inference`, for a profiler.
        calls: times the calls into the env, `with calls("step"): ...`, so that an env that hangs is
            noticed; see `EnvWatch`.
        make_env: makes another env like `env`, for collectors in other processes.
        compilation: whether the steps of a batched torch env are compiled; None for no.
        env_steps_before: env steps of all processes before this collector was made.
    """

    env: VectorEnv
    policy: Policy
    num_steps: int
    seed: int
    plan: EpisodePlan = EpisodePlan()
    phase: PhaseTimer = no_phases
    calls: PhaseTimer = no_phases
    make_env: Callable[[], VectorEnv] | None = None
    compilation: StepsChoice | None = None
    env_steps_before: int = 0


class SegmentWriter(NamedTuple):
    """What writes into one segment, made once."""

    storage: TensorDict
    success: tuple[Tensor, ...]
    actor: RolloutActor
    stepper: RolloutStepper


def segments_for(context: CollectorContext, count: int = 1) -> tuple[Segment, ...]:
    """Allocate segments of T steps for what env and policy write, on the policy's device."""
    env, policy = context.env, context.policy
    return allocate_segments(
        count,
        env.single_observation_space,
        env.single_action_space,
        env.num_envs,
        context.num_steps,
        extra_fields=policy.extra_fields | env.extra_fields,
        device=policy.version.device,
    )


class RolloutLoop:
    """Steps one env with one policy; which storage that goes into, its owner says.

    The env is reset by the first rollout, and where the plan says so by each one; otherwise
    rollouts go on where the last one stopped.

    Args:
        context: the env and the policy that acts, and how; see `CollectorContext`.
        segments: the storage that rollouts may go into.
        take_up_weights: called before each step; where there are newer weights, it calls what it is
            given, for all that the present ones have still to say, takes them up, and returns true.
            It may raise, to end the loop.
        num_loops: how many loops of the run step envs, this one included; one in each process of
            the run where not given.

    Attributes:
        reports_success: whether the env has said of an episode that it succeeded or not.
        rollouts: how many have begun, those before a resumption included.
        env_steps: env steps of the run before the present rollout, over all loops; it goes on when
            a run is resumed, also with rollouts of another size.

    Raises:
        ConfigurationError: for a policy with a memory in an env that resets a step late.
    """

    def __init__(
        self,
        context: CollectorContext,
        segments: Sequence[Segment],
        *,
        take_up_weights: Callable[[Callable[[], None]], bool] | None = None,
        num_loops: int | None = None,
    ) -> None:
        env, policy = context.env, context.policy
        require(
            not policy.remembers or "padding" not in env.extra_fields,
            f"{type(env).__name__} resets what has finished a step late, and in that step the "
            f"memory of {type(policy).__name__} would take over the last observation of one "
            "episode into the next: have the simulator reset within the step.",
        )
        self._env = env
        self._policy = policy
        self._seed = context.seed
        self._generator = torch.Generator(policy.version.device).manual_seed(context.seed)
        self._plan = context.plan
        self._phase, self._calls = context.phase, context.calls
        self._take_up_weights = take_up_weights
        self._num_loops = ranks.world_size() if num_loops is None else num_loops
        self.reports_success = False
        self._reports = EnvReports()
        self._writers = [
            SegmentWriter(
                time_major(segment.rollout),
                time_major(segment.rollout)["success"].unbind(0),
                policy.rollout_actor(segment.rollout),
                env.rollout_stepper(segment.rollout),
            )
            for segment in segments
        ]
        self._plain = self._writers
        if context.compilation is not None:
            ahead = take_up_weights is None and not context.plan.first_episode_only
            rollouts = [segment.rollout for segment in segments]
            plain = [(writer.actor, writer.stepper) for writer in self._plain]
            pairs = compile_steps(env, policy, rollouts, plain, context.compilation, ahead)
            self._writers = [
                writer._replace(actor=actor, stepper=stepper)
                for writer, (actor, stepper) in zip(self._plain, pairs, strict=True)
            ]
        self._carried = [key for key in CARRIED if key in segments[0].rollout.keys()]
        self._finished = torch.zeros(env.num_envs, dtype=torch.bool, device=policy.version.device)
        self.rollouts = 0
        self.env_steps = context.env_steps_before
        self._next: dict[str, Any] = {}  # what the next rollout begins with, where it goes on

    @property
    def ways(self) -> dict[str, str]:
        """By what it acts and steps: the names of their classes."""
        writer = self._writers[0]
        return {"acting": type(writer.actor).__name__, "stepping": type(writer.stepper).__name__}

    @torch.no_grad()
    def run(self, segment: Segment) -> tuple[int, dict[str, Any]]:
        """Fill a segment.

        Returns:
            how many steps were taken, fewer than T where the plan says so; and what a rollout does
            not hold, see `Collector.account_for`.
        """
        begins_anew = self._begin(segment)
        storage, success, actor, stepper = writer = self._writer_of(segment)
        since = steps = 0
        masks = self._masks_of(storage)

        def before(t: int) -> None:
            nonlocal since
            if masks is not None and masks.device.type == "cpu":
                self._look_at_masks(masks[t : t + 1], t)
            if self._take_up_weights is None:
                return
            if self._take_up_weights(lambda: self._close(writer, since, t)):
                actor.begin(self._generator, t)
                since = t

        with self._phase("inference"):
            actor.begin(self._generator)
        played = step_through(
            actor,
            stepper,
            len(storage) - 1,
            before=before if self._take_up_weights or masks is not None else None,
            phase=self._phase,
            calls=self._calls,
        )
        may_end_early = self._plan.first_episode_only
        for t, info in played:
            steps = t + 1
            if info:
                self._record(success, t, info)
            if may_end_early and self._all_have_finished(storage, steps):
                break
        self._close(writer, since, steps)
        reports = stepper.finish()
        if reports is not None:
            self._reports.add_sums(reports.names, reports.sums, reports.counts)
            self.reports_success |= reports.reports_success
        self._check_ends(storage, steps)
        if masks is not None and masks.device.type != "cpu":  # once, as it waits for the device
            self._look_at_masks(masks[:steps])
        torch.logical_or(storage["terminated"], storage["truncated"], out=storage["done"])
        self._next = {key: segment.steps[steps].get(key) for key in self._carried}
        self.env_steps += env_steps_in(first_steps(segment.rollout, steps)) * self._num_loops
        return steps, {"begins_anew": begins_anew, "reports": self._reports.close_rollout()}

    def _writer_of(self, segment: Segment) -> SegmentWriter:
        """Return what writes into a segment, after so many env steps of this run."""
        writer = self._writers[segment.index]
        before, teacher = self.env_steps, self._plan.teacher
        plain = self._plain[segment.index]  # what is compiled acts and steps at once
        if before < self._plan.random_env_steps:
            return plain._replace(actor=UniformActor(self._policy, segment.rollout))
        if teacher is not None and (share := teacher.share(before)) > 0:
            mixed = MixedActor(plain.actor, teacher, share, segment.rollout)
            return plain._replace(actor=mixed)
        return writer

    def _begin(self, segment: Segment) -> bool:
        """Write what the first slot begins with; tell whether the env was reset for it."""
        begins_anew = not self._next or self._plan.reset_every_rollout
        first = segment.steps[0]
        if begins_anew:
            self._next = {"observation": self._reset()}
            place = first.get("observation")
            check_like(type(self._env).__name__, self._next["observation"], place, "observation")
        for key in self._carried:
            if key in self._next:
                copy_tree(first.get(key), self._next[key])
            else:  # the state of a policy, which begins with the episodes
                first.get(key).zero_()
        self.rollouts += 1
        self._finished.zero_()
        self._writers[segment.index].storage["success"].zero_()
        clear_final_observations(segment.rollout)
        return begins_anew

    def _close(self, writer: SegmentWriter, start: int, stop: int) -> None:
        """Write what the weights of slots `start` to `stop` - 1 have to say of them."""
        if start == stop:
            return
        with self._phase("inference"):
            writer.actor.finish(start, stop)
        writer.storage["policy_version"][start:stop].fill_(self._policy.version)

    def _record(self, success: Sequence[Tensor], t: int, info: dict[str, Any]) -> None:
        """Write what only some envs say, or only at some steps."""
        if "success" in info:
            success[t].copy_(info["success"])
            self.reports_success = True
        self._reports.add(info)

    def _check_ends(self, storage: TensorDict, steps: int) -> None:
        """Refuse a rollout in which time cut an episode and the env hid what it had come to.

        Once per rollout, as it waits for a device.

        Raises:
            ConfigurationError: naming the env, the key, and what to return.
        """
        cut = storage["truncated"][:steps] & ~storage["terminated"][:steps]
        missing = cut & (storage["final_index"][:steps] == 0)
        if missing.any():
            refuse_missing_end(type(self._env).__name__, missing.cpu())

    def _masks_of(self, storage: TensorDict) -> Tensor | None:
        """Return the masks [T+1, N, C] of what is allowed, where the policy goes by them."""
        return storage["observation"][MASK] if self._policy.masks_actions else None

    def _look_at_masks(self, masks: Tensor, step: int = 0) -> None:
        name = type(self._env).__name__
        refuse_empty_masks(name, masks, self._env.single_action_space, step)

    def _all_have_finished(self, storage: TensorDict, steps: int) -> bool:
        """Tell whether each row has finished an episode, so that no further step is wanted."""
        if steps == 0:
            return False
        self._finished |= storage["terminated"][steps - 1] | storage["truncated"][steps - 1]
        look = self._finished.device.type == "cpu" or steps % LOOK_EVERY == 0
        return look and bool(self._finished.all())

    def _reset(self) -> Observation:
        """Begin new episodes, with the same state for all members of a group.

        Raises:
            ConfigurationError: where members of a group do not begin alike.
        """
        size = self._plan.group_size
        if self.rollouts == 0 and size == 1:
            with self._calls("reset"):
                return self._env.reset(seed=self._seed)[0]
        drawn = np.random.SeedSequence([self._seed, self.rollouts])
        seeds = drawn.generate_state(self._env.num_envs // size).repeat(size)
        with self._calls("reset"):
            observation, _ = self._env.reset(seed=seeds.tolist())
        if not _alike(observation, size):
            raise ConfigurationError(
                f"The {size} members of a group began their episodes in different states, though "
                f"their envs were given the same seed. {type(self._env).__name__} must draw its "
                "starts from the seed of `reset` alone."
            )
        return observation

    def state_dict(self) -> dict[str, Any]:
        """Return what the next rollout depends on, as plain numbers and tensors."""
        following = {} if self._plan.reset_every_rollout else self._next
        policy_state = {key: following[key].clone() for key in ("state",) if key in following}
        with self._calls("state_dict"):
            env_state = self._env.state_dict() if following else None
        return {
            "env": env_state,
            "generator": self._generator.get_state(),
            "rollouts": self.rollouts,
            "env_steps": self.env_steps,
            "reports_success": self.reports_success,
            "policy": policy_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state.

        Warns where the env cannot be restored: the next rollout then begins new episodes.
        """
        self._generator.set_state(state["generator"].cpu())
        self.rollouts = state["rollouts"]
        self.env_steps = state.get("env_steps", self.env_steps)
        self.reports_success = state["reports_success"]
        if self._plan.reset_every_rollout or self.rollouts == 0:
            return  # new episodes begin in any case
        try:
            if state["env"] is None:
                raise RestoreError("its state could not be saved")
            with self._calls("load_state_dict"):
                observation = self._env.load_state_dict(state["env"])
            self._next = {"observation": observation, **state.get("policy", {})}
        except RestoreError as error:
            warnings.warn(
                f"The env could not be restored to where the checkpoint left it ({error}): its "
                "episodes restart, and the resumed run will differ from an uninterrupted one.",
                stacklevel=2,
            )


def _alike(observation: Any, size: int) -> bool:
    """Tell whether the rows of each group are equal, bit for bit."""
    if isinstance(observation, Tensor):
        groups = observation.unflatten(0, (-1, size))
        return bool((groups == groups[:, :1]).all())
    return all(_alike(child, size) for child in observation.values())
