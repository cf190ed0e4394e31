"""Check a whole run before it starts: its env, its collector, its update."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lightning_rl import (
    ActionChunk,
    Algorithm,
    ConfigurationError,
    GymnasiumEnv,
    OnPolicyAlgorithm,
    RLDataModule,
    RLTrainer,
)
from lightning_rl.extend.envs import bounds_of
from lightning_rl.extend.errors import check_range
from lightning_rl.extend.files import expanded, write_atomically
from lightning_rl.extensions.checks.check_env import EnvCheck, Finding, Level, Scaling
from lightning_rl.extensions.checks.play import Play
from lightning_rl.extensions.videos.video import VideoRecorder

SHARE_OF_THE_ENV = 0.7
"""Share of the check's time for the env; the policy gets the rest."""

MOST_STEPS = 500
"""Maximum steps of the untrained policy in each env."""

SLOW_STEP = 5e-3
"""Seconds for the actions of all envs, above which a collector thread pays."""

WORKER_SECONDS, WORKERS_SECONDS = 4e-5, 1.5e-4
"""Overhead of a step in worker processes, in seconds: per worker, and for all workers."""


def check(
    trainer: RLTrainer,
    model: LightningModule,
    datamodule: LightningDataModule,
    ckpt_path: str | Path | None = None,
    seconds: float = 5.0,
    json_file: str | Path | None = None,
) -> list[Finding]:
    """Check a run without starting it; see `RLTrainer.check` for the arguments.

    Raises:
        ConfigurationError: for all that `fit` rejects before its first rollout.
    """
    check_range("seconds", seconds, above=0)
    run_check = RunCheck(seconds)
    callbacks = cast(list[Callback], cast(Any, trainer).callbacks)
    callbacks.append(run_check)
    try:
        # Not RLTrainer.fit, which locks the run directory and refuses one that holds a run.
        Trainer.fit(trainer, model, datamodule=datamodule, ckpt_path=ckpt_path)
    except CheckComplete:
        pass
    finally:
        callbacks.remove(run_check)
    if json_file is not None:
        text = json.dumps([finding.as_dict() for finding in run_check.findings], indent=2)
        write_atomically(expanded(json_file), lambda file: file.write(text.encode()))
    return run_check.findings


class CheckComplete(Exception):  # noqa: N818  # no error: it ends a run that is only checked
    """The check is complete: end the run before training."""


class RunCheck(Callback):
    """Check a run in `on_fit_start`, and end it by raising `CheckComplete`.

    It must be the last callback, so that the other callbacks raise their errors first.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.findings: list[Finding] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        algorithm = cast(Algorithm, pl_module)
        data = cast(RLDataModule, cast(Any, trainer).datamodule)
        data.close()  # so that only one set of envs exists
        env_check = EnvCheck(
            data.new_env,
            data.calls.timeout_s,
            seconds=SHARE_OF_THE_ENV * self._seconds,
            seed=data.seed_for("check"),
            scaling=_scaling(algorithm),
        )
        self.findings = env_check.findings
        if data.has_env:
            env_check.run()
        else:
            self.add("env", "ok", "there is none: data.offline trains on the dataset alone")
            with self._finding("collector"):
                self._collect(data)
            data.close()
        # After a failed env check the collector would only report the same fault again.
        if (play := env_check.play) is not None and not env_check.failed:
            with self._finding("collector"):
                acting = self._collect(data)
                if acting is not None:
                    self._check_speed(data, play, acting)
            data.close()
            self._check_groups(algorithm, env_check)
            self._check_lengths(data, algorithm, play)
        self._check_update(data, algorithm)
        with self._finding("gradient"):
            self.findings += [Finding(*cast(Any, finding)) for finding in algorithm.checks(data)]
        if cast(Any, trainer).enable_validation:
            with self._finding("evaluation"):
                self._check_evaluation(trainer, data, env_check)
        topics = list(dict.fromkeys(finding.topic for finding in self.findings))
        # The sort is stable: within a topic the order of the checks remains.
        self.findings.sort(key=lambda finding: topics.index(finding.topic))
        raise CheckComplete

    def add(self, topic: str, level: Level, text: str, cure: str = "") -> None:
        """Append a finding."""
        self.findings.append(Finding(topic, level, text, cure))

    @contextmanager
    def _finding(self, topic: str) -> Iterator[None]:
        try:
            yield
        except ConfigurationError as error:
            self.add(topic, "error", str(error))

    # --- collecting ---

    def _collect(self, data: RLDataModule) -> Play | None:
        # Makes the envs and the collector; nothing is collected yet.
        data.train_dataloader()
        collector = data.collector
        assert collector is not None
        if not collector.code_paths:
            text = f"{type(collector).__name__} steps no env"
            self.add("collector", "ok", text)
            return None
        env, seconds = collector.env, (1 - SHARE_OF_THE_ENV) * self._seconds
        context = collector.context
        # As the run will act: with the env, the policy and the time limits of the collector.
        play = Play(env, context.policy, context.seed, seconds, MOST_STEPS, context.calls)
        if play.clipped_share > 0:
            low, high = bounds_of(env.single_action_space)
            self.add(
                *("action", "warning" if play.clipped_share > 0.5 else "ok"),
                f"{play.clipped_share:.0%} of the untrained policy's actions lie beyond the bounds "
                f"{np.min(low):.4g} to {np.max(high):.4g}, and are clipped",
                "Leave rescale_action on, or lower log_std_init."
                if play.clipped_share > 0.5
                else "",
            )
        return play

    def _check_speed(self, data: RLDataModule, play: Play, acting: Play) -> None:
        assert data.collector is not None
        steps = play.env_steps / play.steps  # env steps per action of all envs
        stepping, choosing = play.seconds["env"], acting.seconds["inference"]
        rate = steps / max(1e-9, stepping + choosing)
        base = data.collector.env
        # An env of chunks hides how its envs are vectorized.
        base = base.env if isinstance(base, ActionChunk) else base
        mode = getattr(base, "vectorization", "")
        slower, share = ("env", stepping) if stepping >= choosing else ("policy", choosing)
        self.add(
            *("speed", "ok"),
            f"the env alone {_rate(steps / max(1e-9, stepping))} ({play.code_paths['stepping']}"
            f"{f', {mode}' if mode else ''}), acting alone {_rate(steps / max(1e-9, choosing))} "
            f"({acting.code_paths['acting']}): the {slower} takes "
            f"{share / (stepping + choosing):.0%} of collecting",
        )
        self.add(
            *("speed", "ok"),
            f"together {_rate(rate)}: collecting {data.total_env_steps:,} env steps takes "
            f"{_duration(data.total_env_steps / rate)}, without updates",
        )
        if isinstance(base, GymnasiumEnv) and mode == "sync" and data.num_envs > 1:
            self._advise_workers(data.num_envs, stepping, choosing)
        if choosing > max(SLOW_STEP, stepping) and not data.collector.in_background:
            self.add(
                *("speed", "note", f"choosing the actions of a step takes {1e3 * choosing:.3g} ms"),
                "data.collector: {class_path: AsyncCollector} collects while the learner trains.",
            )

    def _advise_workers(self, num_envs: int, stepping: float, choosing: float) -> None:
        cores = _cores()
        # Workers beyond the cores wait for their turn.
        rounds = -(-num_envs // cores)
        other = rounds * stepping / num_envs + num_envs * WORKER_SECONDS + WORKERS_SECONDS
        if other + choosing < 0.7 * (stepping + choosing):
            gain = (stepping + choosing) / (other + choosing)
            self.add(
                *("speed", "note"),
                f"{num_envs} envs step one after the other, {1e3 * stepping:.3g} ms in all, on "
                f"{cores} cores",
                f"data.env.vectorization: async might collect {gain:.1f} times as fast.",
            )

    # --- settings ---

    def _check_groups(self, algorithm: Algorithm, env_check: EnvCheck) -> None:
        size = algorithm.episode_settings.group_size
        if size > 1 and not env_check.same_starts:
            self.add(
                *("rollout", "error"),
                f"the {size} members of a group must begin in the same state, but the same seed "
                "gave different starts",
                "Let the env draw its starts from the seed of reset only.",
            )

    def _check_lengths(self, data: RLDataModule, algorithm: Algorithm, play: Play) -> None:
        env_steps = data.env_steps_per_iteration // data.num_envs
        lengths = play.statistics.lengths
        longest = play.max_episode_steps or max(lengths, default=0)
        text = f"{data.num_envs} env{'s' if data.num_envs > 1 else ''} × {env_steps:,} env steps"
        if longest and algorithm.episode_settings.first_episode_only:
            self._check_whole_episodes(text, env_steps, longest)
        elif lengths:
            ends = data.num_envs * env_steps / float(np.mean(lengths))
            number = f"{ends:,.0f}" if ends >= 10 else f"{ends:.2g}"
            text += (
                f"; about {number} episodes end in each rollout, if they are as long as with "
                "random actions"
            )
            seldom = ": most rollouts contain no end of an episode" if ends < 1 else ""
            self.add("rollout", "note" if seldom else "ok", text + seldom)
        else:
            self.add("rollout", "ok", text)
        gamma = algorithm.gamma if isinstance(algorithm, OnPolicyAlgorithm) else None
        if gamma is None or not longest:
            return
        horizon = 1 / (1 - gamma) if gamma < 1 else float("inf")
        text = f"gamma {gamma:g} has a horizon of about {horizon:,.0f} env steps"
        # 20 horizons away, a reward is discounted to e^-20 of its size.
        short = 20 * horizon < longest
        self.add(
            *("rollout", "note" if short else "ok"),
            f"{text}; an episode lasts up to {longest:,}",
            "If important rewards come late, raise model.gamma." if short else "",
        )

    def _check_whole_episodes(self, text: str, env_steps: int, longest: int) -> None:
        if env_steps >= longest:
            self.add("rollout", "ok", f"{text}; an episode takes up to {longest:,}")
        else:
            self.add(
                *("rollout", "warning"),
                f"{text}, and an episode may last {longest:,}: the rollout cuts long episodes, "
                "and compares their returns up to the cut",
                "Raise data.buffer_size, or shorten the episodes.",
            )

    def _check_update(self, data: RLDataModule, algorithm: Algorithm) -> None:
        minibatches = algorithm.minibatches_per_iteration()
        choice = algorithm.choose_compilation()
        total = (
            f"{data.total_iterations:,} iterations of {data.env_steps_per_iteration:,} env steps"
        )
        if minibatches is not None:
            total += f", each of {minibatches:,} minibatches of up to {algorithm.batch_size:,}"
        self.add("update", "ok", total)
        mode = "is compiled" if choice.compiled else "runs uncompiled"
        self.add("update", "ok", f"it {mode}: {choice.why}")
        policy = _inner(algorithm)
        says = {"observations": (policy, "normalizer"), "rewards": (algorithm, "reward_normalizer")}
        parts = [
            f"{name} are {'not ' if getattr(owner, attribute) is None else ''}scaled"
            for name, (owner, attribute) in says.items()
            if hasattr(owner, attribute) and algorithm.policy.has_critic
        ]
        if parts:
            self.add("update", "ok", ", ".join(parts))

    def _check_evaluation(self, trainer: Trainer, data: RLDataModule, env_check: EnvCheck) -> None:
        env, play = data.eval_env, env_check.play
        count = -(-data.total_iterations // data.iterations_per_epoch)
        count //= trainer.check_val_every_n_epoch or 1
        times = f"{count:,} evaluation{'' if count == 1 else 's'}"
        text = f"{times} of {data.num_eval_episodes} episodes, {env.num_envs} at a time"
        longest = env.max_episode_steps
        if longest:
            max_steps = count * data.num_eval_episodes * longest
            text += (
                f": up to {max_steps:,} env steps, in addition to the {data.total_env_steps:,} of "
                "training"
            )
            if max_steps > data.total_env_steps:
                cure = "If that takes too long, lower data.num_eval_episodes, or raise "
                cure += "data.iterations_per_epoch."
                self.add("evaluation", "note", text, cure)
            else:
                self.add("evaluation", "ok", text)
        else:
            self.add("evaluation", "ok", text)
        # Drawing needs a reset of the env, which fails again if the env's check failed.
        if not env_check.failed:
            self._film(trainer, data)
        monitors = [getattr(c, "monitor", None) for c in trainer.checkpoint_callbacks]
        metrics = [metric for metric in monitors if metric is not None]
        # The training env tells nothing of another evaluation env.
        if play is not None and not play.reports_success and data.evaluates_on_the_training_env:
            for metric in metrics:
                if "success" in metric:
                    text = f"trainer.best_metric is {metric}, but the env reports no success"
                    cure = "Put info['success'] into its last step, or use eval/avg_reward."
                    self.add("evaluation", "error", text, cure)

    def _film(self, trainer: Trainer, data: RLDataModule) -> None:
        callbacks = cast(list[Callback], cast(Any, trainer).callbacks)
        records_video = any(isinstance(callback, VideoRecorder) for callback in callbacks)
        try:
            height, width, _ = VideoRecorder.draw_once(data).shape
        except Exception as error:  # a renderer may raise any error
            reason = str(error) if isinstance(error, ConfigurationError) else repr(error)
            text = f"it cannot be filmed: {reason}"
            self.add("evaluation", "warning" if records_video else "note", text)
        else:
            verb = "will" if records_video else "can"
            option = "" if records_video else " (--video true)"
            self.add("evaluation", "ok", f"it {verb} be filmed{option}: {width} × {height}")


def _scaling(algorithm: Algorithm) -> Scaling:
    policy = _inner(algorithm)
    # Without a critic the scale of rewards does not matter: a group compares its rewards.
    on_policy = isinstance(algorithm, OnPolicyAlgorithm) and algorithm.policy.has_critic
    normalizer = getattr(algorithm, "reward_normalizer", None)
    return Scaling(
        observation=getattr(policy, "normalizer", None) is not None,
        reward=not on_policy or normalizer is not None,
    )


def _inner(algorithm: Algorithm) -> Any:
    policy: Any = algorithm.policy
    while getattr(policy, "inner", None) is not None:
        policy = policy.inner
    return policy


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _rate(per_second: float) -> str:
    rounded = float(f"{per_second:.2g}")
    return f"{rounded:,.0f} env steps/s" if rounded >= 10 else f"{rounded:g} env steps/s"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
