"""The loop that steps an env for training, evaluation and recording, and fills rollouts."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers import Segment
from lightning_rl.collectors.context import CollectorContext
from lightning_rl.collectors.statistics import EnvReports
from lightning_rl.collectors.uniform_actor import UniformActor
from lightning_rl.compiled.steps import compile_steps
from lightning_rl.envs import RestoreError
from lightning_rl.envs.refusals import refuse_missing_end
from lightning_rl.envs.step_results import check_like
from lightning_rl.envs.steppers import RolloutStepper
from lightning_rl.envs.vector_env import Observation
from lightning_rl.policies.actors import RolloutActor
from lightning_rl.rollout.contract import (
    LOOK_EVERY,
    clear_final_observations,
    copy_tree,
    env_steps_in,
    first_steps,
    time_major,
)
from lightning_rl.rollout.masks import MASK, refuse_empty_masks
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.phases import PhaseTimer, no_phases
from lightning_rl.system.streams import restore_generator


class Actor(Protocol):
    """Chooses the actions: a `RolloutActor` on a rollout's storage, or `FirstEpisodes`."""

    def act(self, t: int) -> None:
        """Choose the actions of step t."""


class Stepper(Protocol):
    """Steps an env: a `RolloutStepper` on a rollout's storage, or `FirstEpisodes`."""

    def step(self, t: int) -> dict[str, Any]:
        """Step the env with the actions of step t, store the results, and return the info."""


def run_steps(
    actor: Actor,
    stepper: Stepper,
    num_steps: int,
    *,
    before: Callable[[int], None] | None = None,
    phase: PhaseTimer = no_phases,
    calls: PhaseTimer = no_phases,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step an env at most `num_steps` times, and yield the number (from 0) and info of each step.

    Disable gradients around the iteration, because a generator runs in its caller's gradient mode.
    `before` is called before each step with its number, and may raise to end the loop. `phase`
    times the phases `inference` and `env`, `calls` the calls into the env (see `EnvWatch`).
    """
    call = calls("step")  # the same context for all steps
    for t in range(num_steps):
        if before is not None:
            before(t)
        with phase("inference"):
            actor.act(t)
        with phase("env"), call:
            info = stepper.step(t)
        yield t, info


CARRIED = ("observation", "state")
"""Fields of the bootstrap slot with which the next rollout begins; `state` only for a memory."""


class SegmentWriter(NamedTuple):
    """The objects that write into one segment."""

    storage: TensorDict
    success: tuple[Tensor, ...]
    actor: RolloutActor
    stepper: RolloutStepper


class RolloutLoop:
    """Steps one env with one policy, and writes rollouts into the given segments.

    The first rollout resets the env; later rollouts continue the previous one, unless the plan
    requires a reset.

    Args:
        context: the env, the policy and their settings.
        segments: storage of the rollouts.
        load_weights: called before each step with a function. If there are newer weights, it calls
            this function to finish the steps of the current weights, loads the newer ones, and
            returns True. An exception ends the loop.
        num_loops: number of loops of the run, this one included. Default: one per process.

    Attributes:
        reports_success: whether the env has reported the success of an episode.
        start: state of the env at the start of the last rollout, with `keep_start`.
        rollouts: number of rollouts begun, including those before a resume.
        env_steps: env steps of the run before the current rollout, over all loops.

    Raises:
        ConfigurationError: if the policy has a memory and the env resets one step late.
    """

    def __init__(
        self,
        context: CollectorContext,
        segments: Sequence[Segment],
        *,
        load_weights: Callable[[Callable[[], None]], bool] | None = None,
        num_loops: int | None = None,
    ) -> None:
        env, policy = context.env, context.policy
        require(
            not policy.is_recurrent or "padding" not in env.extra_fields,
            f"{type(env).__name__} resets finished envs one step late; in that step the memory of "
            f"{type(policy).__name__} would carry the last observation of an episode into the "
            "next. Configure the simulator to reset within the step.",
        )
        require(
            not env.persistent_state or not context.episode_settings.reset_every_rollout,
            f"{type(env).__name__} has a curriculum ({', '.join(env.persistent_state)}), but every "
            "rollout would restart it, because the algorithm resets the envs with seeds: set "
            "reset_every_rollout: false, or remove the curriculum.",
        )
        self._env = env
        self._policy = policy
        self._seed = context.seed
        self._generator = torch.Generator(policy.version.device).manual_seed(context.seed)
        self._plan = context.episode_settings
        self._phase, self._calls = context.phase, context.calls
        self._load_weights = load_weights
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
        self._eager = self._writers
        if context.compilation is not None:
            # New weights may come between two steps, and an early end looks at each step: either
            # needs the results immediately.
            defer_reads = load_weights is None and not context.episode_settings.first_episode_only
            rollouts = [segment.rollout for segment in segments]
            eager = [(writer.actor, writer.stepper) for writer in self._eager]
            # Here in the constructor, before a thread runs the loop.
            pairs = compile_steps(env, policy, rollouts, eager, context.compilation, defer_reads)
            self._writers = [
                writer._replace(actor=actor, stepper=stepper)
                for writer, (actor, stepper) in zip(self._eager, pairs, strict=True)
            ]
        self._carried = [key for key in CARRIED if key in segments[0].rollout.keys()]
        self._finished = torch.zeros(env.num_envs, dtype=torch.bool, device=policy.version.device)
        self.start: dict[str, Any] = {}
        self.rollouts = 0
        self.env_steps = context.env_steps_before
        self._next: dict[str, Any] = {}  # first slot of the next rollout, if it continues

    @property
    def code_paths(self) -> dict[str, str]:
        """Class names of the actor and the stepper."""
        writer = self._writers[0]
        return {"acting": type(writer.actor).__name__, "stepping": type(writer.stepper).__name__}

    @torch.no_grad()
    def run(self, segment: Segment) -> tuple[int, dict[str, Any]]:
        """Fill a segment; return the number of steps, and arguments for `count_rollout`."""
        envs_were_reset = self._begin(segment)
        if self._plan.keep_start:
            self.start = self._env.state_dict() or {}
        storage, success, actor, stepper = writer = self._writer_of(segment)
        since = steps = 0  # `since`: first step with the current weights
        masks = self._masks_of(storage)

        def prepare(t: int) -> None:
            nonlocal since
            if masks is not None and masks.device.type == "cpu":  # elsewhere once per rollout
                self._check_masks(masks[t : t + 1], t)
            if self._load_weights is None:
                return
            # Steps before t belong to the old weights: `_close` writes their version first.
            if self._load_weights(lambda: self._close(writer, since, t)):
                actor.begin(self._generator, t)  # computes what it caches of the weights
                since = t

        with self._phase("inference"):
            actor.begin(self._generator)
        step_results = run_steps(
            actor,
            stepper,
            len(storage) - 1,
            before=prepare if self._load_weights or masks is not None else None,
            phase=self._phase,
            calls=self._calls,
        )
        may_end_early = self._plan.first_episode_only
        for t, info in step_results:
            steps = t + 1
            if info:
                self._store_reports(success, t, info)
            if may_end_early and self._all_have_finished(storage, steps):
                break
        self._close(writer, since, steps)
        # Before `_check_ends`: on a device, `finish` writes the buffered final observations.
        reports = stepper.finish()
        if reports is not None:
            self._reports.add_sums(reports.names, reports.sums, reports.counts)
            self.reports_success |= reports.reports_success
        self._check_ends(storage, steps)
        if masks is not None and masks.device.type != "cpu":  # once, because it synchronizes
            self._check_masks(masks[:steps])
        torch.logical_or(storage["terminated"], storage["truncated"], out=storage["done"])
        # Views of the bootstrap slot. The next rollout may overwrite this segment, so `_begin`
        # copies them to slot 0 before its first step.
        self._next = {key: segment.steps[steps].get(key) for key in self._carried}
        # Loops do not ask each other: all are assumed to step as often as this one.
        self.env_steps += env_steps_in(first_steps(segment.rollout, steps)) * self._num_loops
        return steps, {"envs_were_reset": envs_were_reset, "reports": self._reports.close_rollout()}

    def _writer_of(self, segment: Segment) -> SegmentWriter:
        writer = self._writers[segment.index]
        eager = self._eager[segment.index]  # a compiled actor acts and steps in one call
        if self.env_steps < self._plan.random_env_steps:
            return eager._replace(actor=UniformActor(self._policy, segment.rollout))
        mixer = self._plan.mixer
        mixed = mixer(eager.actor, self.env_steps, segment.rollout) if mixer else None
        if mixed is not None:  # the teacher acts in some steps
            return eager._replace(actor=mixed)
        return writer

    def _begin(self, segment: Segment) -> bool:
        envs_were_reset = not self._next or self._plan.reset_every_rollout
        first = segment.steps[0]
        if envs_were_reset:
            self._next = {"observation": self._reset()}
            place = first.get("observation")  # a wrong shape might broadcast there
            check_like(type(self._env).__name__, self._next["observation"], place, "observation")
        for key in self._carried:
            if key in self._next:
                copy_tree(first.get(key), self._next[key])
            else:  # the policy's state, zero at the beginning of episodes
                first.get(key).zero_()
        self.rollouts += 1
        self._finished.zero_()
        self._writers[segment.index].storage["success"].zero_()  # steps without a report write none
        clear_final_observations(segment.rollout)  # of the segment's last use
        return envs_were_reset

    def _close(self, writer: SegmentWriter, start: int, stop: int) -> None:
        if start == stop:  # new weights before the first step
            return
        with self._phase("inference"):
            writer.actor.finish(start, stop)
        writer.storage["policy_version"][start:stop].fill_(self._policy.version)

    def _store_reports(self, success: Sequence[Tensor], t: int, info: dict[str, Any]) -> None:
        if "success" in info:
            success[t].copy_(info["success"])
            self.reports_success = True
        self._reports.add(info)

    def _check_ends(self, storage: TensorDict, steps: int) -> None:
        """Reject a truncated episode without final observation; once per rollout: it syncs."""
        cut = storage["truncated"][:steps] & ~storage["terminated"][:steps]
        missing = cut & (storage["final_index"][:steps] == 0)
        if missing.any():
            refuse_missing_end(type(self._env).__name__, missing.cpu())

    def _masks_of(self, storage: TensorDict) -> Tensor | None:
        return storage["observation"][MASK] if self._policy.masks_actions else None

    def _check_masks(self, masks: Tensor, step: int = 0) -> None:
        name = type(self._env).__name__
        refuse_empty_masks(name, masks, self._env.single_action_space, step)

    def _all_have_finished(self, storage: TensorDict, steps: int) -> bool:
        if steps == 0:
            return False
        self._finished |= storage["terminated"][steps - 1] | storage["truncated"][steps - 1]
        # Each look at a device waits for it: a few steps too many are cheaper.
        look = self._finished.device.type == "cpu" or steps % LOOK_EVERY == 0
        return look and bool(self._finished.all())

    def _reset(self) -> Observation:
        size = self._plan.group_size
        if self.rollouts == 0 and size == 1:  # the env seeds its rows itself, by seed + i
            with self._calls("reset"):
                return self._env.reset(seed=self._seed)[0]
        # From the number of the rollout, so that a resumed run draws the same seeds.
        sequence = np.random.SeedSequence([self._seed, self.rollouts])
        seeds = sequence.generate_state(self._env.num_envs // size).repeat(size)
        with self._calls("reset"):
            observation, _ = self._env.reset(seed=seeds.tolist())
        # Group-relative advantages compare the members, so all begin in the same state.
        if not _rows_equal(observation, size):
            raise ConfigurationError(
                f"The {size} members of a group began their episodes in different states, though "
                f"their envs were given the same seed. {type(self._env).__name__} must draw its "
                "starts from the seed of `reset` alone."
            )
        return observation

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next rollout depends on, as plain numbers and tensors."""
        next_slot = {} if self._plan.reset_every_rollout else self._next
        policy_state = {key: next_slot[key].clone() for key in ("state",) if key in next_slot}
        with self._calls("state_dict"):
            # Without a next slot, new episodes begin.
            env_state = self._env.state_dict() if next_slot else None
        return {
            "env": env_state,
            "generator": self._generator.get_state(),
            "rollouts": self.rollouts,
            "env_steps": self.env_steps,
            "reports_success": self.reports_success,
            "policy": policy_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state; if the env cannot be restored, warn and begin new episodes."""
        restore_generator(self._generator, state["generator"], "noise of actions")
        self.rollouts = int(state["rollouts"])
        self.env_steps = int(state.get("env_steps", self.env_steps))  # older checkpoints lack it
        self.reports_success = bool(state["reports_success"])
        if self._plan.reset_every_rollout or self.rollouts == 0:
            return  # new episodes begin in any case
        try:
            if state["env"] is None:
                raise RestoreError("its state could not be saved")
            with self._calls("load_state_dict"):
                observation = self._env.load_state_dict(state["env"])
            self._next = {"observation": observation, **state.get("policy", {})}
        except RestoreError as error:
            anew = ", ".join(["episodes", *self._env.persistent_state])
            warnings.warn(
                f"The env could not be restored to its state in the checkpoint ({error}): its "
                f"{anew} begin anew, and the resumed run will differ from an uninterrupted one.",
                stacklevel=2,
            )


def _rows_equal(observation: Any, size: int) -> bool:
    if isinstance(observation, Tensor):
        groups = observation.unflatten(0, (-1, size))
        return bool((groups == groups[:, :1]).all())
    return all(_rows_equal(child, size) for child in observation.values())
