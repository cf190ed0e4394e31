"""Break the package on purpose, one defect at a time, and see whether its tests notice.

    python scripts/mutations.py                          # all of them, about a quarter of an hour
    python scripts/mutations.py --only gae staleness     # those whose text has one of these words
    python scripts/mutations.py --jobs 2 --write         # also into scripts/results/mutations.md;
                                                         # with --only, the rows of those alone
    python scripts/mutations.py --jobs 2 --notice        # two tests that notice each, and which
                                                         # tests nothing needs: see noticing.py
    python scripts/mutations.py --drawn 40 --seed 0 --only functional/ rollout/
                                                         # drawn at random, below folders: drawn.py

Each defect is one that code like this has had somewhere: an episode that goes on over its end, a
generator that is not saved, a rank that trains by itself. It is made in a copy of the tree, and the
test files named beside it run there until one fails: first the test that caught it when the results
were last written. Who shortens, merges or removes tests runs this before and after: what was caught
must still be.

`tests/test_architecture.py` keeps the list true: every text stands exactly once in its file, every
test file is there, and every package of the source has a defect.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import noticing

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/lightning_rl"
RESULTS = ROOT / "scripts" / "results" / "mutations.md"

COPIED = ("src", "tests", "configs", "docs", "scripts", "README.md", "CHANGELOG.md")
COPIED += ("pyproject.toml", "constraints.txt")

LOADED_ONCE = ("pytest", "torch", "lightning.pytorch.cli", "tensordict", "gymnasium.vector")
LOADED_ONCE += ("torch.utils.tensorboard", "torch._dynamo", "torchmetrics")
"""Libraries that each run of the tests would take seconds to import; it is forked after them."""

PATIENCE = 120
"""Seconds that one test may take; a defect may well have one wait for ever."""


class Mutation(NamedTuple):
    """One defect.

    Attributes:
        file: below src/lightning_rl.
        defect: what is wrong then.
        before: text that stands once in the file.
        after: what takes its place.
        tests: files below tests/, those of the package that are about it.
    """

    file: str
    defect: str
    before: str
    after: str
    tests: str

    @property
    def package(self) -> str:
        """The folder, or the name of a module at the top."""
        folder = Path(self.file).parent.as_posix()
        return folder if folder != "." else Path(self.file).stem


MUTATIONS = (
    # --- sweeps and reports ---
    Mutation(
        "extensions/mujoco/threads.py",
        "fields of a world that were written once are never written again",
        "        for i in differs.nonzero()[0].tolist():",
        "        for i in differs.nonzero()[0].tolist()[:1]:",
        "equivalence/test_mujoco_env.py",
    ),
    Mutation(
        "extensions/mujoco/threads.py",
        "masses change, and what MuJoCo computes from them stays",
        "        if any(name in RECOMPUTED for name in fields):",
        "        if not fields:",
        "equivalence/test_mujoco_env.py",
    ),
    Mutation(
        "extensions/mujoco/quantities.py",
        "a heavier body is as quick to turn",
        'nominal["body_inertia"] * factor[..., None]',
        'nominal["body_inertia"].expand(len(value), -1, -1)',
        "reports/test_coupled_physics.py",
    ),
    Mutation(
        "rollout/names.py",
        "joints are read in the order of the dataset",
        "return [list(recorded).index(name) for name in names]",
        "return list(range(len(names)))",
        "reports/test_names.py",
    ),
    Mutation(
        "extensions/mujoco/env.py",
        "a world that diverged goes on from numbers that are none",
        "torch.where(invalid[:, None], state[name], value)",
        "torch.where(invalid[:, None], value, value)",
        "equivalence/test_mujoco_env.py",
    ),
    Mutation(
        "extensions/mujoco/env.py",
        "a position does not count from the keyframe",
        "                offset[columns] = self._rest[columns]",
        "                offset[columns] = 0.0",
        "equivalence/test_mujoco_env.py",
    ),
    Mutation(
        "extensions/mujoco/quadruped.py",
        "commands are in the frame of the world",
        "        cos, sin = yaw.cos(), yaw.sin()",
        "        cos, sin = torch.ones_like(yaw), torch.zeros_like(yaw)",
        "equivalence/test_mujoco_env.py",
    ),
    Mutation(
        "extensions/mujoco/rotations.py",
        "quaternions are multiplied in the other order",
        "w1 * u2 + w2 * u1 + torch.linalg.cross(u1, u2)",
        "w1 * u2 + w2 * u1 - torch.linalg.cross(u1, u2)",
        "equivalence/test_mujoco_env.py",
    ),
    Mutation(
        "extensions/reports/statistics.py",
        "a bootstrap draws the first run again and again",
        "generator.integers(len(values), size=(resamples, len(values)))",
        "generator.integers(1, size=(resamples, len(values)))",
        "numerics/test_report_statistics.py",
    ),
    Mutation(
        "extensions/reports/statistics.py",
        "a third of the scores is cut off at either end",
        "cut = count // 4",
        "cut = count // 3",
        "numerics/test_report_statistics.py",
    ),
    Mutation(
        "extensions/reports/comparison.py",
        "a run that has not got there counts with its last value",
        "np.where(is_reached, np.interp(steps, run_steps, y), np.nan)",
        "np.where(steps >= run_steps[0], np.interp(steps, run_steps, y), np.nan)",
        "cli/test_report.py",
    ),
    Mutation(
        "extensions/reports/comparison.py",
        "a figure has only the runs of the first env",
        "for env, runs in envs.items()]\n    compared[0]",
        "for env, runs in list(envs.items())[:1]]\n    compared[0]",
        "cli/test_report.py",
    ),
    Mutation(
        "extensions/reports/runs.py",
        "curves of another metric are drawn as those of the requested one",
        "    require(y_metric == metric, f",
        "    require(True, f",
        "cli/test_report.py",
    ),
    Mutation(
        "extensions/checks/check_env.py",
        "the check does not compare an env that is played again with the first time",
        'np.array_equal(first, second, equal_nan=first.dtype.kind == "f")',
        "first.shape == second.shape",
        "faults/test_env_check.py",
    ),
    Mutation(
        "extensions/sweeps/sweep.py",
        "a resumed sweep begins trials anew that were cut off",
        "        if run is None:\n            arguments",
        "        if trial.name:\n            arguments",
        "cli/test_sweep.py",
    ),
    Mutation(
        "extensions/sweeps/trials.py",
        "trials go on when their sweep is killed",
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)",
        "ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)",
        "cli/test_sweep.py",
    ),
    Mutation(
        "extensions/sweeps/journal.py",
        "trials of a process that was killed stay running",
        "in (TrialState.FAIL, TrialState.RUNNING):",
        "in (TrialState.FAIL,):",
        "cli/test_sweep.py",
    ),
    Mutation(
        "extensions/sweeps/search.py",
        "a resumed search chooses the same points once more",
        "np.random.SeedSequence([settings.seed, point])",
        "np.random.SeedSequence([settings.seed, 0])",
        "cli/test_sweep.py",
    ),
    # --- own code, signals, names, statistics, files ---
    Mutation(
        "checkpoints/own.py",
        "own runs: code that has changed since is trusted",
        "return all(_entry(name) == entry for name, entry in dict(code or {}).items())",
        "return True",
        "security/test_own_runs.py",
    ),
    Mutation(
        "checkpoints/own.py",
        "own runs: a key that others may read counts",
        "status.st_uid == owner and not status.st_mode & 0o077",
        "status.st_uid == owner",
        "security/test_own_runs.py",
    ),
    Mutation(
        "checkpoints/own.py",
        "own runs: modules that a named one imports may change",
        "if not _is_installed(source) and (",
        "if not source and (",
        "security/test_own_runs.py",
    ),
    Mutation(
        "checkpoints/registry.py",
        "trust: a checkpoint names the address of a cluster",
        '    "address": _NOTHING,',
        '    "address": _SENTENCE,',
        "core/faults/test_trust.py security/test_texts.py",
    ),
    Mutation(
        "checkpoints/registry.py",
        "earlier names: one that changed twice is unknown",
        "return present_path(new + path.removeprefix(old))",
        "return new + path.removeprefix(old)",
        "reports/test_renamed.py",
    ),
    Mutation(
        "system/signals.py",
        "forked children keep the handlers of their parent",
        "    while _replaced:",
        "    while False:",
        "core/faults/test_faults.py core/reports/test_env_processes.py",
    ),
    Mutation(
        "system/signals.py",
        "a SIGHUP that nohup ignores ends the run",
        "if number != signal.SIGHUP or replaced is not signal.SIG_IGN:",
        "if True:",
        "core/faults/test_faults.py cli/test_sweep.py",
    ),
    Mutation(
        "system/extensions.py",
        "a package that an extension needs looks like a missing extension",
        'if not f"{error.name}".startswith(EXTENSIONS):',
        "if error.name is None:",
        "core/cli/test_alone.py cli/test_first_check.py",
    ),
    Mutation(
        "algorithms/own_numbers.py",
        "own numbers: a checkpoint's replace those that this run sets",
        "is_set = current != first and not same(current, first)",
        "is_set = False",
        "core/reports/test_own_numbers.py",
    ),
    Mutation(
        "extensions/vla/statistics.py",
        "statistics: joints are scaled in the order of the dataset",
        "chosen_statistics[kind] = tensor[..., indices]",
        "chosen_statistics[kind] = tensor",
        "reports/test_names.py reports/test_statistics_of_policies.py",
    ),
    Mutation(
        "extensions/vla/statistics.py",
        "statistics: a part of a dataset's name fits",
        'if f".{key}." in f".{name}."]',
        "if key in name]",
        "reports/test_statistics_of_policies.py numerics/test_vla_observation.py",
    ),
    Mutation(
        "policies/description.py",
        "statistics: others than the checkpoint's are ignored silently",
        "        if sources and (moved or not",
        "        if not sources and (moved or not",
        "reports/test_statistics_of_policies.py",
    ),
    Mutation(
        "buffers/replay_files.py",
        "replay files: those that were deleted by hand are believed to be there",
        "        if not filenames.issuperset(part.name for part in self.parts):",
        "        if not folder.is_dir():",
        "core/faults/test_replay_files.py",
    ),
    Mutation(
        "buffers/replay_files.py",
        "replay files: those of a checkpoint that cannot be read are removed",
        "files.keys() - (files if listed_names is None else listed_names)",
        "files.keys() - (listed_names or set())",
        "core/faults/test_replay_files.py",
    ),
    Mutation(
        "algorithms/checks.py",
        "a policy acts in an env whose joints have another order",
        "saved.get(part, names) == names,",
        "len(saved.get(part, names)) == len(names),",
        "reports/test_names.py",
    ),
    Mutation(
        "algorithms/checks.py",
        "a run resumes from weights alone",
        'saved["kind"] != WEIGHTS or trainer is None',
        'saved["kind"] is not None or trainer is None',
        "core/faults/test_checkpoints.py",
    ),
    Mutation(
        "extensions/datasets/joining.py",
        "joined videos: times count from the begin of the old file",
        "[time + begin / fps for time, begin",
        "[time + 0 * begin for time, begin",
        "numerics/test_datasets.py cli/test_record.py faults/test_recording.py",
    ),
    Mutation(
        "extensions/datasets/ends.py",
        "ends of datasets: without a truncation, only a success is terminal",
        "terminated = not truncated",
        "terminated = bool(success)",
        "reports/test_ends_of_datasets.py",
    ),
    Mutation(
        "optim/update_sequence.py",
        "update sequence: the fields that a loss adds reach the next loss",
        "            update(minibatch.copy())",
        "            update(minibatch)",
        "core/reports/test_update_sequences.py",
    ),
    Mutation(
        "extensions/robots/process.py",
        "robots: Ctrl+C reaches the robot's process",
        "start_new_session=True,  # Ctrl+C",
        "start_new_session=False,  # Ctrl+C",
        "numerics/test_robots.py",
    ),
    Mutation(
        "rollout/structured_actions.py",
        "structured actions: flat ones keep the env's numbering",
        "np.ravel(as_policy_counts(np.asarray(value), first_choice(space)))",
        "np.ravel(np.asarray(value))",
        "numerics/test_structured_actions.py reports/test_numbering_of_actions.py",
    ),
    Mutation(
        "algorithms/off_policy_correction.py",
        "staleness: the distance in versions is not stored",
        'add_transition_field(rollout, "lag", lag)',
        'add_transition_field(rollout, "lag", torch.ones_like(lag))',
        "core/numerics/test_staleness.py",
    ),
    Mutation(
        "envs/refusals.py",
        "integers beyond the dtype of their space wrap around",
        "fits = bool(((values >= low) & (values <= high)).all())",
        "fits = True",
        "reports/test_env_returns.py reports/test_env_spaces.py",
    ),
    # --- off-policy in the background ---
    Mutation(
        "algorithms/off_policy.py",
        "who acts in the background keeps its weights for a whole iteration of updates",
        "if i > 0 and i % self.publish_every_updates == 0:",
        "if i < 0:",
        "core/numerics/test_staleness.py equivalence/test_off_policy.py",
    ),
    Mutation(
        "algorithms/off_policy.py",
        "a resumed run makes up for all earlier env steps at its new pace of updates",
        "first_step, first_update = self._counted_from or (self.learning_starts, 0)",
        "first_step, first_update = self.learning_starts, 0",
        "equivalence/test_off_policy.py",
    ),
    Mutation(
        "collectors/asynchronous.py",
        "weights that are published within a version are not taken up",
        "if self._weights.number == self._acting_number:",
        "if self._weights.version == self._acting.version:",
        "core/numerics/test_staleness.py",
    ),
    Mutation(
        "collectors/asynchronous.py",
        "the thread is ahead by a rollout more than it may be",
        "return self._begun <= updates + (self.max_staleness if updates else 0)",
        "return self._begun <= updates + 1 + (self.max_staleness if updates else 0)",
        "core/numerics/test_staleness.py",
    ),
    # --- acting outside of training ---
    Mutation(
        "deploy/acting.py",
        "what a policy of chosen actions gives counts from 0, and not as the env does",
        "return as_env_counts(action, first_choice(space)).astype(space.dtype)",
        "return action.astype(space.dtype)",
        "core/equivalence/test_load_policy.py",
    ),
    Mutation(
        "deploy/acting.py",
        "what acts alone is not clipped to the bounds of the env",
        "return action.astype(space.dtype).clip(space.low, space.high)",
        "return action.astype(space.dtype)",
        "core/equivalence/test_load_policy.py",
    ),
    Mutation(
        "collectors/evaluation.py",
        "an episode begins with what was remembered of the one before it",
        "self._state[key] = state.masked_fill(mask, 0)",
        "pass",
        "core/equivalence/test_load_policy.py",
    ),
    Mutation(
        "deploy/loading.py",
        "a policy that was trained in bfloat16 acts in float32",
        'policy.set_precision(str(trainer.get("precision")) if isinstance(trainer, dict) else "")',
        "pass",
        "core/equivalence/test_load_policy.py",
    ),
    Mutation(
        "extensions/export/graph.py",
        "an exported policy is not clipped to the bounds of the env",
        "executed_tensors(self.policy.action_space, result[ACTION])",
        "result[ACTION]",
        "equivalence/test_export.py",
    ),
    Mutation(
        "extensions/export/graph.py",
        "an exported program holds the critic",
        "            setattr(module, child, None)",
        "            pass",
        "equivalence/test_export.py",
    ),
    Mutation(
        "extensions/export/parity.py",
        "an export that acts otherwise passes",
        '"passed": largest <= tolerance',
        '"passed": True',
        "equivalence/test_export.py",
    ),
    # --- recurrent policies ---
    Mutation(
        "algorithms/sequence_sampler.py",
        "a state is reset one step after an episode has begun",
        "starts[:, 1:] = done[:, :-1]",
        "starts[:, 2:] = done[:, :-2]",
        "numerics/test_recurrence.py",
    ),
    Mutation(
        "algorithms/rollout_evaluation.py",
        "a cut episode is valued with the state after the reset",
        'finals["state"] = next_state(policy, TensorDict(last, [len(rows)]))',
        'finals["state"] = rollout["state"][rows, steps + 1]',
        "numerics/test_recurrence.py",
    ),
    Mutation(
        "algorithms/sequence_sampler.py",
        "padding counts in the losses",
        "self._counted &= mask",
        "mask",
        "numerics/test_recurrence.py",
    ),
    Mutation(
        "algorithms/sequence_sampler.py",
        "what two sequences have in common counts twice",
        "counted = steps[:, self._burn_in :] >= begins",
        "counted = steps[:, self._burn_in :] >= 0",
        "numerics/test_recurrence.py",
    ),
    Mutation(
        "policies/networks/memory.py",
        "the burn-in goes on where the rollout has not begun",
        "state = torch.where(is_real[:, None], next_state, state)",
        "state = next_state",
        "numerics/test_recurrence.py",
    ),
    Mutation(
        "algorithms/on_policy.py",
        "a stale rollout keeps the states of the weights that collected it",
        'batch["state"] = states_of(self.policy, batch)',
        'batch["state"] = batch["state"]',
        "numerics/test_recurrence.py",
    ),
    Mutation(
        "rollout/sequences.py",
        "micro-batches of sequences count from the first of the minibatch",
        "counted[begin:end] - first * sequences.length",
        "counted[begin:end]",
        "numerics/test_recurrence.py",
    ),
    # --- a gripper, and demonstrations beside experience ---
    Mutation(
        "functional/q_learning.py",
        "the target network itself says which command is the best",
        "best = next_q.argmax(-1, keepdim=True)",
        "best = next_target_q.argmax(-1, keepdim=True)",
        "numerics/test_gripper.py core/numerics/test_sac.py",
    ),
    Mutation(
        "extensions/algorithms/gripper_sac.py",
        "the gripper's penalty is dropped",
        "self.normalized_reward(reward + penalty)",
        "self.normalized_reward(reward)",
        "core/numerics/test_sac.py numerics/test_gripper.py",
    ),
    Mutation(
        "extensions/algorithms/gripper.py",
        "open and close are exchanged",
        "return arm, torch.linspace(low, high, 3)",
        "return arm, torch.linspace(high, low, 3)",
        "numerics/test_gripper.py",
    ),
    Mutation(
        "buffers/replay_sequences.py",
        "sequences: the state goes on over an episode's end",
        "        starts = ring.columns[DONE][previous] & (unrolled_slots > first[:, None])\n",
        "        starts = ring.columns[DONE][previous] & False\n",
        "numerics/test_replay_sequences.py",
    ),
    Mutation(
        "buffers/replay_sequences.py",
        "sequences: the burn-in goes through a rollout that was dropped",
        "        continues = ring.columns[CONTINUES][rows] & (burn_in_slots > 0)",
        "        continues = burn_in_slots > 0",
        "numerics/test_replay_sequences.py",
    ),
    Mutation(
        "buffers/transition_ring.py",
        "sequences: a rollout that was dropped is no break",
        "        if not joins.all():\n            self.last_break = first\n",
        "",
        "numerics/test_replay_sequences.py",
    ),
    Mutation(
        "policies/networks/memory.py",
        "sequences: what followed is read with the state before the last step",
        "            states.append(state)\n        last =",
        "            states.append(state)\n        states.insert(0, states[0])\n        last =",
        "numerics/test_replay_sequences.py",
    ),
    Mutation(
        "policies/q_actor_critic.py",
        "off-policy: the actor's loss moves the memory that the critics share",
        "        with torch.no_grad():\n            shared = self.actor_features(td)\n",
        "        shared = self.actor_features(td)\n",
        "numerics/test_replay_sequences.py",
    ),
    Mutation(
        "extensions/remote/remote.py",
        "remote: what an update publishes under way ends the update",
        "        self._training &= version == self.version\n",
        "        self._training = False\n",
        "equivalence/test_ray.py",
    ),
    Mutation(
        "extensions/remote/ray.py",
        "remote: weights that were overtaken on their way act after all",
        "            if number > self._number:\n",
        "            if number != self._number:\n",
        "equivalence/test_ray.py",
    ),
    Mutation(
        "extensions/remote/remote.py",
        "remote: an env that no node can make is tried again and again",
        " and not hung and not self.counts.taken:\n",
        " and self.closed:\n",
        "faults/test_remote_collectors.py",
    ),
    Mutation(
        "checkpoints/trust.py",
        "the file of a robot's model is taken for an algorithm",
        '        return "env_model"\n',
        '        return "model"\n',
        "core/faults/test_trust.py",
    ),
    Mutation(
        "checkpoints/trust.py",
        "a checkpoint says which cluster to join",
        '    return place.pop("address", None)',
        '    return place.get("address", None)',
        "core/faults/test_trust.py",
    ),
    Mutation(
        "buffers/transition_ring.py",
        "a penalty is not stored",
        '    ("penalty",): ((), torch.float32),\n    ("padding",)',
        '    ("padding",)',
        "numerics/test_gripper.py",
    ),
    Mutation(
        "extensions/algorithms/hindsight.py",
        "hindsight: a goal comes from the next episode",
        "        last, earliest = ends[place] % ENV_STRIDE, (ends[place - 1] + 1) % ENV_STRIDE\n",
        "        last, earliest = slots * 0 + self.ring.end, (ends[place - 1] + 1) % ENV_STRIDE\n",
        "numerics/test_hindsight.py",
    ),
    Mutation(
        "extensions/algorithms/hindsight.py",
        "hindsight: a goal comes from before the sample",
        '{"future": slots, "final"',
        '{"future": earliest, "final"',
        "numerics/test_hindsight.py",
    ),
    Mutation(
        "buffers/replay_buffer.py",
        "hindsight: an n-step sum goes on after the new goal",
        "            continues = ~terminated & (ring.columns[FINAL].index_select(0, last) < 0)\n",
        "            continues = ring.columns[FINAL].index_select(0, last) < 0\n",
        "numerics/test_hindsight.py",
    ),
    Mutation(
        "extensions/algorithms/hindsight.py",
        "hindsight: the end by the old goal ends it with the new one",
        " & ~self._judge(achieved, desired)[1])\n",
        ")\n",
        "numerics/test_hindsight.py",
    ),
    Mutation(
        "extensions/algorithms/hindsight.py",
        "hindsight: the next observation keeps the old goal",
        '        for key in ("observation", "next_observation"):\n',
        '        for key in ("observation",):\n',
        "numerics/test_hindsight.py",
    ),
    Mutation(
        "envs/gymnasium/goals.py",
        "hindsight: one answer for one goal counts for all goals",
        "    if together.shape == (len(achieved),):\n        return together\n",
        "    return np.broadcast_to(together, len(achieved))\n",
        "numerics/test_hindsight.py",
    ),
    Mutation(
        "envs/infos.py",
        "a kept entry of an info is that of the last env for all",
        "            columns[name][rows] = array\n",
        "            columns[name][:] = array\n",
        "numerics/test_hindsight.py",
    ),
    Mutation(
        "extensions/tasks/gym_hil.py",
        "gym-hil's sign is not turned",
        "2.0 - command]",
        "command]",
        "numerics/test_gripper.py",
    ),
    Mutation(
        "extensions/datasets/mixed_replay.py",
        "a share of 0 still takes one sample",
        "math.floor(batch_size * self.online_ratio + 0.5)",
        "max(1, math.floor(batch_size * self.online_ratio))",
        "numerics/test_mixed_replay.py",
    ),
    Mutation(
        "extensions/datasets/mixed_replay.py",
        "the last step of an intervention goes on to the next one",
        "follows = first == 0 and open_env == env and",
        "follows = open_env is None or",
        "numerics/test_mixed_replay.py",
    ),
    Mutation(
        "extensions/datasets/mixed_replay.py",
        "demonstrations are read again when a run is resumed",
        '        if state["begun"]:\n            self._source = None\n',
        "",
        "numerics/test_mixed_replay.py",
    ),
    Mutation(
        "algorithms/off_policy.py",
        "target networks do not begin with what was taken over",
        "            target.load_state_dict(source.state_dict())",
        "            pass",
        "numerics/test_gripper.py",
    ),
    # --- a reward classifier, a teacher, a simulator of tensors ---
    Mutation(
        "algorithms/ppo.py",
        "a critic is judged by steps in which nothing happened",
        "(x if policy_mask is None else x[policy_mask] for x in (value[:, :-1], target))",
        "(value[:, :-1], target)",
        "numerics/test_tensor_simulator.py",
    ),
    Mutation(
        "extensions/datasets/frames.py",
        "what is held out is learnt from too",
        "training += order[count:]",
        "training += order",
        "numerics/test_reward_classifier.py",
    ),
    Mutation(
        "extensions/datasets/frames.py",
        "the last frame alone shows success, whatever is asked for",
        "label[-self._positive_frames :] = 1",
        "label[-1:] = 1",
        "numerics/test_reward_classifier.py",
    ),
    Mutation(
        "extensions/datasets/frames.py",
        "the rarer class weighs less",
        '"weight": weight[label]}',
        '"weight": torch.ones(len(label))}',
        "numerics/test_reward_classifier.py",
    ),
    Mutation(
        "extensions/algorithms/reward_classifier.py",
        "false positives are counted among all frames",
        "torch.stack([_mean(flags[~success]), _mean(~flags[success])])",
        "torch.stack([_mean(flags & ~success), _mean(~flags[success])])",
        "numerics/test_reward_classifier.py",
    ),
    Mutation(
        "extensions/algorithms/reward_classifier.py",
        "the frames of one episode count for the next one",
        "        self._in_a_row = 0\n        return",
        "        return",
        "numerics/test_reward_classifier.py",
    ),
    Mutation(
        "checkpoints/building.py",
        "to load a policy moves torch's random stream",
        "with torch.random.fork_rng(devices=[]), weights_follow():\n",
        "with weights_follow():\n",
        "numerics/test_reward_classifier.py",
    ),
    Mutation(
        "extensions/algorithms/behavior_cloning.py",
        "a student learns what it has done itself",
        "            rollout = self.labelled(rollout, teacher)\n",
        "            pass\n",
        "numerics/test_teacher.py",
    ),
    Mutation(
        "extensions/algorithms/teacher.py",
        "the teacher acts where the student should",
        "mask = uniform < self._share",
        "mask = uniform >= self._share",
        "numerics/test_teacher.py",
    ),
    Mutation(
        "extensions/algorithms/teacher.py",
        "the teacher acts in as many steps to the end",
        "1.0 - env_steps / self.env_steps",
        "1.0",
        "numerics/test_teacher.py",
    ),
    Mutation(
        "extensions/algorithms/behavior_cloning.py",
        "a replay keeps what was executed instead of the labels",
        '["executed_action"] + ',
        "[] + ",
        "numerics/test_teacher.py",
    ),
    Mutation(
        "extensions/algorithms/behavior_cloning.py",
        "what a teacher remembers is not saved",
        "({} if teacher is None else teacher.memory)",
        "{}",
        "numerics/test_teacher.py",
    ),
    Mutation(
        "extensions/algorithms/teacher.py",
        "a teacher remembers the episode before",
        '_kept(next_memory, ~slot.get("done"))',
        "next_memory",
        "numerics/test_teacher.py",
    ),
    Mutation(
        "extensions/algorithms/teacher.py",
        "the first of several teachers teaches all",
        "torch.stack(each)[choice, rows]",
        "each[0]",
        "numerics/test_teacher.py",
    ),
    Mutation(
        "extensions/simulators/tensor_simulator.py",
        "the last observation is that which the simulator has written over",
        "previous = map_tree(torch.clone, previous)",
        "pass",
        "numerics/test_tensor_simulator.py",
    ),
    Mutation(
        "extensions/simulators/tensor_simulator.py",
        "success is that of the episode after",
        "report = _from_before_the_reset(info, final, done)",
        "report = info",
        "numerics/test_tensor_simulator.py",
    ),
    Mutation(
        "algorithms/on_policy.py",
        "steps in which nothing happened are learnt from",
        'for key in ("intervened", "padding") if',
        'for key in ("intervened",) if',
        "numerics/test_tensor_simulator.py",
    ),
    # --- functional ---
    Mutation(
        "functional/advantages.py",
        "a truncated step bootstraps from the observation after the reset",
        "torch.where(done, torch.where(terminated, 0.0, final_value), value[:, 1:])",
        "torch.where(terminated, 0.0, value[:, 1:])",
        "core/numerics/test_advantages.py",
    ),
    Mutation(
        "functional/advantages.py",
        "the trace of GAE goes on over the end of a truncated episode",
        "reversed_scan(delta, _decay(done, gamma * gae_lambda, like=delta))",
        "reversed_scan(delta, _decay(terminated, gamma * gae_lambda, like=delta))",
        "core/numerics/test_advantages.py",
    ),
    Mutation(
        "functional/losses.py",
        "the surrogate is clipped on the wrong side",
        "return -torch.minimum(rho * advantage, clipped * advantage).mean()",
        "return -torch.maximum(rho * advantage, clipped * advantage).mean()",
        "core/numerics/test_losses.py",
    ),
    Mutation(
        "functional/off_policy.py",
        "weights above the cap are cut to it, not left out",
        "return torch.where(weight > weight_cap, 0.0, weight)",
        "return weight.clamp(max=weight_cap)",
        "core/numerics/test_losses.py",
    ),
    Mutation(
        "functional/groups.py",
        "the step that ends an episode is not one of it",
        "ended_before = done[:, :-1].long().cumsum(1) > 0",
        "ended_before = done[:, 1:].long().cumsum(1) > 0",
        "core/numerics/test_groups.py",
    ),
    # --- distributed ---
    Mutation(
        "system/ranks.py",
        "advantages are normalised by the biased deviation with several ranks",
        "variance = (squares - total * mean) / (count - 1).clamp(min=1)",
        "variance = (squares - total * mean) / count",
        "equivalence/test_ddp.py",
    ),
    Mutation(
        "system/ranks.py",
        "the deviation between ranks is left out of merged moments",
        "(squares + counts * (means - merged).square()).sum(0)",
        "squares.sum(0)",
        "equivalence/test_ddp.py",
    ),
    # --- optim ---
    Mutation(
        "optim/update.py",
        "gradients are not added up over ranks",
        "total = ranks.sum_over_ranks(sums)",
        "total = sums",
        "equivalence/test_ddp.py",
    ),
    Mutation(
        "optim/gradients.py",
        "a rank weighs the same however many samples it has",
        "return flat * count",
        "return flat",
        "core/numerics/test_gradients.py equivalence/test_ddp.py",
    ),
    Mutation(
        "optim/update.py",
        "the gradients of micro-batches are summed, not averaged",
        "self._differentiate(loss if share == 1 else loss * share)",
        "self._differentiate(loss)",
        "core/numerics/test_gradients.py",
    ),
    Mutation(
        "optim/update.py",
        "a run goes on for one skipped step more than allowed",
        "self.exhausted |= self.in_a_row >= self.limit",
        "self.exhausted |= self.in_a_row > self.limit",
        "core/numerics/test_ppo.py",
    ),
    Mutation(
        "optim/update.py",
        "the adaptive rate rises where the KL is too large",
        "_set_rate(optimizer, max(lowest, rate / self.FACTOR))",
        "_set_rate(optimizer, max(lowest, rate * self.FACTOR))",
        "core/numerics/test_ppo.py",
    ),
    # --- compiled ---
    Mutation(
        "compiled/adam.py",
        "the bias of Adam's averages is corrected for one step too many",
        "count = step + 1\n",
        "count = step + 2\n",
        "numerics/test_constants.py core/numerics/test_gradients.py",
    ),
    Mutation(
        "compiled/adam.py",
        "Adam's averages are corrected alike for parameters of unequal numbers of steps",
        "        if equal_steps:\n",
        "        if True:\n",
        "core/numerics/test_gradients.py",
    ),
    Mutation(
        "compiled/graphs.py",
        "a compiled loss goes on with settings that have changed",
        "            elif not same(old, new):\n                yield path\n",
        "",
        "numerics/test_constants.py",
    ),
    Mutation(
        "compiled/steps.py",
        "a compiled step keeps the policy's state over an episode's end",
        'output["next_state"].masked_fill(done, 0)',
        'output["next_state"]',
        "equivalence/test_compiled_steps.py",
    ),
    Mutation(
        "compiled/steps.py",
        "what a step changes of the env beside its state is not noticed",
        "        if changed is not None:\n",
        "        if False:\n",
        "equivalence/test_compiled_steps.py",
    ),
    Mutation(
        "compiled/steps.py",
        "looking whether steps can be compiled changes what a policy remembers",
        "            attributes.restore()\n",
        "            pass\n",
        "equivalence/test_compiled_steps.py",
    ),
    Mutation(
        "compiled/steps.py",
        "steps are taken ahead although somebody looks at each",
        "MOST_BYTES // max(size, 1))) if defer_reads else 1",
        "MOST_BYTES // max(size, 1)))",
        "equivalence/test_compiled_steps.py",
    ),
    Mutation(
        "compiled/cuda_graphs.py",
        "a replayed graph reads the minibatch that it was captured with",
        "            place.copy_(value)\n        self._replay()",
        "            place.copy_(place)\n        self._replay()",
        "core/numerics/test_cuda_graphs.py",
    ),
    Mutation(
        "compiled/choice.py",
        "a resumed run chooses anew whether to compile",
        'self.compiled, self.why = saved["compiled"], "as in the checkpoint"',
        'self.compiled, self.why = (count or 0) >= self.pays_from, "as in the checkpoint"',
        "equivalence/test_compile_auto.py",
    ),
    # --- policies ---
    Mutation(
        "policies/normalization.py",
        "running variance forgets that the means of batches differ",
        " + shift.square() * weight * (1 - weight)",
        "",
        "numerics/test_normalization.py",
    ),
    Mutation(
        "policies/normalization.py",
        "the running return of the reward's scale goes on over the end of an episode",
        "carry = torch.where(done[:, -1], 0.0, returns[:, -1])",
        "carry = returns[:, -1]",
        "numerics/test_normalization.py",
    ),
    Mutation(
        "policies/distributions/gaussians.py",
        "squashed actions are stored with the log-prob of the unsquashed ones",
        "log_prob = self._log_prob(output, u) - self._log_volume(u)",
        "log_prob = self._log_prob(output, u)",
        "core/numerics/test_distributions.py",
    ),
    Mutation(
        "policies/distributions/base.py",
        "a choice that a short row does not have can be drawn",
        "NEVER = -1e30",
        "NEVER = 0.0",
        "core/numerics/test_distributions.py",
    ),
    Mutation(
        "policies/perceptron_policy.py",
        "an action is drawn that its mask forbids",
        "if not self.masks_actions:\n            return output",
        "if not (self.masks_actions and self.training):\n            return output",
        "numerics/test_masks.py",
    ),
    Mutation(
        "policies/distributions/correlated.py",
        "correlated noise grows along an episode",
        "correlation * last + (1.0 - correlation.square()).sqrt() * noise",
        "correlation * last + noise",
        "core/numerics/test_noise.py",
    ),
    Mutation(
        "policies/distributions/correlated.py",
        "the first noise of an episode is smaller than the others",
        "correlation = self.noise_correlation * exists",
        "correlation = self.noise_correlation * torch.ones_like(exists)",
        "core/numerics/test_noise.py",
    ),
    Mutation(
        "policies/distributions/joint.py",
        "an action of several parts has the log-prob of its first one",
        "return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)",
        "return log_probs[0], torch.stack(entropies).sum(0)",
        "numerics/test_structured_actions.py",
    ),
    Mutation(
        "policies/acting.py",
        "NumPy acts with the log of the deviation",
        "noise *= distribution.clamped_log_std().detach().exp()",
        "noise *= distribution.clamped_log_std().detach()",
        "core/numerics/test_acting.py",
    ),
    Mutation(
        "policies/wrapper.py",
        "a wrapped policy's normaliser stays as it was",
        '= delegated(Policy.update_normalization, "inner")',
        "= Policy.update_normalization",
        "core/numerics/test_policy_wrapper.py",
    ),
    # --- policies/lerobot ---
    Mutation(
        "extensions/vla/lerobot/processors.py",
        "a normaliser divides by the standard deviation alone in one direction, and not in both",
        "return value * self.second + self.first",
        "return value * (self.second + 0.001) + self.first",
        "numerics/test_lerobot_policies.py",
    ),
    Mutation(
        "extensions/vla/lerobot/smolvla.py",
        "actions see later actions",
        "(order <= order[:, None])",
        "(order < 10**6 + order[:, None])",
        "numerics/test_lerobot_policies.py",
    ),
    Mutation(
        "extensions/vla/lerobot/diffusion.py",
        "clean actions are not clipped",
        "self.clean_factor * clean.clamp(-self.limit, self.limit)",
        "self.clean_factor * clean",
        "numerics/test_lerobot_policies.py",
    ),
    Mutation(
        "extensions/vla/lerobot/directory.py",
        "an additional weight is read over",
        "fitting(state, weights, str(directory.path))",
        "fitting(state, {k: weights.get(k, state[k]) for k in state}, str(directory.path))",
        "numerics/test_lerobot_policies.py",
    ),
    # --- policies/vla ---
    Mutation(
        "extensions/vla/heads.py",
        "the last bin is not the upper bound",
        "(2.0 / (self.num_bins - 1)) - 1.0",
        "(2.0 / self.num_bins) - 1.0",
        "numerics/test_vla.py",
    ),
    Mutation(
        "extensions/vla/policy.py",
        "the value's gradient flows into the backbone, whatever detach_value says",
        "self.value_head(summary.detach() if self.detach_value else summary)",
        "self.value_head(summary)",
        "numerics/test_vla.py",
    ),
    Mutation(
        "extensions/vla/flow.py",
        "the last step of a chain is never stochastic",
        "step = (noise[:, -1] * self.steps).long().clamp(max=self.steps - 1)",
        "step = (noise[:, -1] * (self.steps - 1)).long()",
        "numerics/test_flows.py",
    ),
    Mutation(
        "extensions/vla/flow.py",
        "padded numbers of a flow count in the log-prob and in the loss",
        "unpadded: Tensor = numbers[..., : self.action_size].flatten(1)",
        "unpadded: Tensor = numbers.flatten(1)[:, : self.num_slots]",
        "numerics/test_flows.py",
    ),
    Mutation(
        "functional/flows.py",
        "the drift of a stochastic step is that of the ODE",
        "    drift = t - step_size - sigma_squared * step_size / (2.0 * t)",
        "    drift = t - step_size",
        "numerics/test_flows.py",
    ),
    Mutation(
        "extensions/algorithms/steering.py",
        "the log-prob of the noise leaves out the actions that were not executed",
        'inputs = td.exclude("executed")',
        "inputs = td.copy()",
        "numerics/test_flows.py",
    ),
    Mutation(
        "extensions/algorithms/frozen.py",
        "the base policy is trained with the noise",
        "base.eval().requires_grad_(False)",
        "base.eval()",
        "numerics/test_flows.py",
    ),
    Mutation(
        "extensions/algorithms/residual.py",
        "a correction goes beyond its scale",
        "base + self.scale * correction",
        "base + correction",
        "numerics/test_residual.py",
    ),
    Mutation(
        "extensions/algorithms/residual.py",
        "a correction begins at random",
        "        nn.init.zeros_(last.bias)",
        "        nn.init.normal_(last.bias)",
        "numerics/test_residual.py",
    ),
    Mutation(
        "extensions/algorithms/noise_sac.py",
        "critics of noise follow the action that was executed",
        "action = policy.decoded(minibatch, noise)",
        'action = policy.unit(minibatch["action"])',
        "numerics/test_flows.py",
    ),
    Mutation(
        "extensions/vla/resnet.py",
        "windows with a stride of 2 are padded as in torch",
        "(width % 2, 1, height % 2, 1)",
        "(1, 1, 1, 1)",
        "numerics/test_resnet.py",
    ),
    Mutation(
        "extensions/wrappers/encoded.py",
        "each camera has a network of its own",
        "shared[0] if shared else encoder(sources[name])",
        "encoder(sources[name])",
        "numerics/test_resnet.py",
    ),
    Mutation(
        "extensions/vla/transformers_backbone.py",
        "pixels are not scaled as the model was trained",
        "planes = (planes - self.pixel_mean) / self.pixel_std",
        "planes = planes / self.pixel_std - self.pixel_mean",
        "numerics/test_vla_loading.py",
    ),
    Mutation(
        "extensions/vla/weight_files.py",
        "weights that the model does not have pass unseen",
        "pairs = (state, weights), (weights, state)",
        "pairs = (state, weights), ({}, state)",
        "numerics/test_custom_vla.py",
    ),
    # --- envs ---
    Mutation(
        "envs/torch/torch_env.py",
        "time runs out one step too late",
        "truncated = elapsed >= self.max_episode_steps",
        "truncated = elapsed > self.max_episode_steps",
        "numerics/test_tasks.py core/numerics/test_envs.py",
    ),
    Mutation(
        "envs/chunks.py",
        "the rest of a chunk is executed after the time has run out",
        "active = active & ~(step_terminated | step_truncated)",
        "active = active & ~step_terminated",
        "numerics/test_chunks.py",
    ),
    Mutation(
        "envs/chunk_wrapper.py",
        "a single env is stepped on after the time has run out",
        "            if terminated or truncated:\n                break",
        "            if terminated:\n                break",
        "numerics/test_chunks.py",
    ),
    Mutation(
        "envs/infos.py",
        "an env that says nothing of success has succeeded",
        "torch.from_numpy(np.nan_to_num(success) != 0)",
        "torch.from_numpy(success != 0)",
        "numerics/test_infos.py",
    ),
    Mutation(
        "envs/infos.py",
        "an env's default, False, overwrites that somebody around it took over",
        "INTERVENED: bool(inside) or replaced}",
        "INTERVENED: bool(inside)}",
        "numerics/test_taking_over.py",
    ),
    Mutation(
        "extensions/teleoperation/intervention.py",
        "a resumed run asks the source again for what was done before",
        'return InterventionDecision(self._restoring["actions"].get(self._steps))',
        "return self.source.poll(self._observation)",
        "numerics/test_taking_over.py",
    ),
    Mutation(
        "extensions/teleoperation/devices.py",
        "reading the keys empties the queue of the env's window",
        "pygame.event.get((pygame.KEYDOWN, pygame.KEYUP))",
        "[e for e in pygame.event.get() if e.type in (pygame.KEYDOWN, pygame.KEYUP)]",
        "numerics/test_devices.py",
    ),
    Mutation(
        "extensions/datasets/record.py",
        "a frame holds the observation after the step",
        "                self._acted_on,",
        "                map_tree(lambda leaf: leaf[0], self.observation),",
        "cli/test_record.py",
    ),
    Mutation(
        "algorithms/ppo.py",
        "what somebody earned is credited to the policy's step before",
        "truncated = truncated | taken_over",
        "truncated = truncated | (taken_over & False)",
        "numerics/test_taking_over.py",
    ),
    Mutation(
        "envs/watch.py",
        "quick calls add up until the last of them counts as hung",
        "if not runs or state != call.state or is_debugged(call.thread):",
        "if not runs or is_debugged(call.thread):",
        "core/faults/test_hangs.py",
    ),
    Mutation(
        "extensions/vla/vla_observation.py",
        "depth in millimetres is taken for centimetres",
        "return metres / np.float32(1000.0)",
        "return metres / np.float32(100.0)",
        "numerics/test_vla_observation.py",
    ),
    Mutation(
        "extensions/wrappers/penalty.py",
        "a gripper between its thresholds forgets whether it was open",
        "self._side = side or old_side",
        "self._side = side",
        "numerics/test_gripper.py",
    ),
    # --- robots ---
    Mutation(
        "extensions/robots/bus.py",
        "an arm is not slowed down",
        "return position + min(max(min(max(target, low), high) - position, -max_move), max_move)",
        "return min(max(target, low), high)",
        "numerics/test_robots.py",
    ),
    Mutation(
        "extensions/robots/bus.py",
        "a learner that is silent is waited for",
        "        elif time.monotonic() > self._alive_until:\n            raise LearnerGone",
        "        elif time.monotonic() > self._alive_until:\n            return",
        "numerics/test_robots.py",
    ),
    Mutation(
        "extensions/robots/bus.py",
        "an arm that is to hold goes on to where it was sent",
        "observation = self._robot.get_observation()\n                self._robot.send_action",
        "observation = self._sent\n                self._robot.send_action",
        "numerics/test_robots.py",
    ),
    Mutation(
        "extensions/datasets/ahead.py",
        "a new chunk begins at its first action, however old its observation is",
        "chunk, chunk_start, pending = pending.result(), request_step, None",
        "chunk, chunk_start, pending = pending.result(), step, None",
        "numerics/test_robots.py",
    ),
    Mutation(
        "envs/gymnasium/replay.py",
        "a resumed run repeats the motions of a robot",
        'if self.env.metadata.get("is_real"):',
        'if self.env.metadata.get("is_real") is None:',
        "numerics/test_robots.py",
    ),
    # --- envs/gymnasium ---
    Mutation(
        "envs/gymnasium/inline.py",
        "the final observation is the array that the env writes its next one into",
        "self._note_end(infos, i, copy.deepcopy(observation))",
        "self._note_end(infos, i, observation)",
        "core/numerics/test_envs.py core/numerics/test_stepping.py",
    ),
    Mutation(
        "envs/gymnasium/inline.py",
        "from the second episode on the time limit is one step longer",
        "self._ends[i] = now + self._limits[i]",
        "self._ends[i] = now + self._limits[i] + 1",
        "core/numerics/test_envs.py",
    ),
    Mutation(
        "envs/gymnasium/adapter.py",
        "an episode is replayed with the last action of the one before",
        "log.starts[done] = log.first_kept + len(log.actions)",
        "log.starts[done] = log.first_kept + len(log.actions) - 1",
        "core/numerics/test_envs.py",
    ),
    Mutation(
        "envs/gymnasium/workers.py",
        "what an env in a process says of the end of its episode is lost",
        '            env_info = env_info["final_info"]\n',
        "",
        "numerics/test_infos.py",
    ),
    # --- envs/managers ---
    Mutation(
        "extensions/managers/term.py",
        "a parameter that the term does not have is passed over",
        "                name in names or inspect.Parameter.VAR_KEYWORD in kinds,",
        "                True,",
        "equivalence/test_terms.py",
    ),
    Mutation(
        "extensions/managers/events.py",
        "an interval event fires in every env when it is due in one",
        "countdown <= 0",
        "(countdown <= 0).any().expand_as(countdown)",
        "numerics/test_managers.py",
    ),
    Mutation(
        "extensions/managers/view.py",
        "all terms draw the same numbers",
        "hash32(self._key ^ self.stream)",
        "hash32(self._key ^ 1)",
        "numerics/test_managers.py",
    ),
    Mutation(
        "extensions/managers/managed_env.py",
        "a new level counts from the middle of an episode",
        "torch.where(done, next_level, level)",
        "next_level",
        "numerics/test_managers.py",
    ),
    Mutation(
        "extensions/managers/wrapper.py",
        "terms compare with the first observation of the next episode",
        'return _where(done, info["final_obs"], observation)',
        "return observation",
        "numerics/test_managers.py",
    ),
    Mutation(
        "checkpoints/trust.py",
        "a checkpoint may name any term by its path",
        "elif not allowed.fits(text):",
        'elif key != "term" and not allowed.fits(text):',
        "equivalence/test_terms.py",
    ),
    # --- envs/tasks ---
    Mutation(
        "extensions/managers/outcome.py",
        "reward terms are not weighted",
        "            value = value * weight\n",
        "",
        "numerics/test_tasks.py",
    ),
    Mutation(
        "extensions/tasks/point_mass.py",
        "the path is as long as its last step",
        '"path_length": state["path_length"] + norm(position - old_position)',
        '"path_length": norm(position - old_position)',
        "numerics/test_tasks.py",
    ),
    Mutation(
        "extensions/tasks/push_cube.py",
        "a cube may leave the table along y",
        "off[:, 0] | off[:, 1]",
        "off[:, 0]",
        "numerics/test_tasks.py",
    ),
    # --- buffers ---
    Mutation(
        "buffers/circular_buffer.py",
        "the newest rollout is read first",
        "            window = self._unread.popleft()\n            self._held",
        "            window = self._unread.pop()\n            self._held",
        "core/numerics/test_circular_buffer.py",
    ),
    Mutation(
        "collectors/asynchronous.py",
        "the ring has no room for the staleness that is allowed",
        "segments_for(acting, max_staleness + 2)",
        "segments_for(acting, max_staleness + 1)",
        "core/numerics/test_memory.py",
    ),
    Mutation(
        "collectors/asynchronous.py",
        "the thread takes all cores, and denormals as they come",
        "        begin()",
        "        pass",
        "numerics/test_process.py",
    ),
    # --- collectors ---
    Mutation(
        "collectors/loop.py",
        "the groups of every rollout begin in the same states",
        "sequence = np.random.SeedSequence([self._seed, self.rollouts])",
        "sequence = np.random.SeedSequence([self._seed])",
        "core/numerics/test_grpo.py core/numerics/test_collection.py",
    ),
    Mutation(
        "collectors/loop.py",
        "the generator that draws actions is not restored",
        '        self._generator.set_state(state["generator"].cpu())\n',
        "",
        "core/equivalence/test_resume.py",
    ),
    Mutation(
        "collectors/first_episodes.py",
        "an evaluation plays on in rows whose episode has ended",
        "self.running = self.counted & ~done",
        "self.running = ~done",
        "numerics/test_evaluation.py",
    ),
    Mutation(
        "collectors/asynchronous.py",
        "the thread begins a rollout one update too early",
        "return self._begun <= updates + (self.max_staleness if updates else 0)",
        "return self._begun <= updates + (self.max_staleness + 1 if updates else 0)",
        "core/numerics/test_staleness.py equivalence/test_async.py",
    ),
    Mutation(
        "collectors/weights.py",
        "the thread is told of new weights, and acts with the old ones",
        "            copy_all(self._tensors, newest)\n            self.version",
        "            self.version",
        "equivalence/test_async.py",
    ),
    Mutation(
        "extensions/fsdp/update.py",
        "ranks with shards weigh alike, whatever they have",
        "weighted = [(part, len(part) / total) for part, _ in local_parts]",
        "weighted = [(part, share / len(counts)) for part, share in local_parts]",
        "equivalence/test_fsdp.py",
    ),
    Mutation(
        "extensions/fsdp/update.py",
        "gradients of all micro-batches but the last are lost with shards",
        "synchronize_gradients(self._left == 0)",
        "synchronize_gradients(True) if self._left else self._clear()",
        "equivalence/test_fsdp.py",
    ),
    Mutation(
        "algorithms/reference.py",
        "the reference of a sharded policy is the policy itself",
        "            value.copy_(reference)\n            reference.copy_(current)",
        "            reference.copy_(current)",
        "equivalence/test_fsdp.py",
    ),
    Mutation(
        "extensions/fsdp/strategy.py",
        "a sharded run goes on without the optimizer's state",
        "    @property\n    def lightning_restore_optimizer(self) -> bool:\n        return True",
        "    @property\n    def lightning_restore_optimizer(self) -> bool:\n        return False",
        "equivalence/test_fsdp.py",
    ),
    Mutation(
        "collectors/statistics.py",
        "the step that ends an episode is counted to the next one, too",
        "sums[n], lengths[n], begins[n] = 0.0, 0, t + 1",
        "sums[n], lengths[n], begins[n] = 0.0, 0, t",
        "core/numerics/test_collection.py",
    ),
    Mutation(
        "collectors/base.py",
        "episodes that GRPO does not train on are counted",
        "counted = first_episode_mask(done) if first_only else None",
        "counted = None",
        "core/numerics/test_grpo.py core/numerics/test_collection.py",
    ),
    # --- offline ---
    Mutation(
        "extensions/datasets/demonstrations.py",
        "what follows the end of a demonstration is learnt from",
        'rollout["padding"][:, :-1] = ~first_episode_mask(rollout["done"][:, :-1])',
        'rollout["padding"][:, :-1] = False',
        "numerics/test_normalization.py numerics/test_vla.py",
    ),
    Mutation(
        "extensions/datasets/writer.py",
        "an episode that is said to be finished is not in the table",
        "        self._write_row(recording, finals, success, list(videos))\n",
        "",
        "faults/test_recording.py numerics/test_datasets.py",
    ),
    Mutation(
        "extensions/datasets/directory.py",
        "joined folders take the others' place before they are whole",
        "    target = path / UNFINISHED\n",
        "    target = path / FINISHED\n",
        "faults/test_recording.py",
    ),
    Mutation(
        "extensions/recap/value_fit.py",
        "an episode is judged by a value that has seen its return",
        '(minibatch["fold"] != part).float()',
        'torch.ones_like(minibatch["fold"], dtype=torch.float32)',
        "numerics/test_recap.py",
    ),
    Mutation(
        "extensions/datasets/label.py",
        "more steps are good than episodes succeed",
        "return MOST_POSITIVE if success_rate is None else min(MOST_POSITIVE, success_rate)",
        "return MOST_POSITIVE",
        "numerics/test_labels.py",
    ),
    Mutation(
        "extensions/recap/conditioned.py",
        "a clone is taught with guidance",
        "return self.inner.clone_loss(_with_condition(td, td[CONDITION]))",
        "return self.inner.clone_loss(self._guided(td, td[CONDITION]))",
        "numerics/test_recap.py",
    ),
    Mutation(
        "extensions/datasets/demonstrations.py",
        "good steps are told to be bad",
        'torch.where(is_good, CODES["good"], CODES["bad"])',
        'torch.where(is_good, CODES["bad"], CODES["good"])',
        "numerics/test_labels.py",
    ),
    Mutation(
        "extensions/recap/command.py",
        "episodes that were recorded before a kill are recorded twice",
        "                    if place >= written_count:\n",
        "                    if True:\n",
        "numerics/test_recap.py",
    ),
    Mutation(
        "extensions/datasets/record_command.py",
        "after an intervention the rest of an outdated chunk executes",
        "        return recorder.intervened\n",
        "        return False\n",
        "cli/test_record.py",
    ),
    Mutation(
        "extensions/datasets/record_command.py",
        "Ctrl+C is raised in the middle of a step",
        "        if is_second or not self._deferred:\n",
        "        if True:\n",
        "cli/test_record.py",
    ),
    Mutation(
        "extensions/datasets/label.py",
        "a good value of a game of luck is doubted",
        'if self.signal is None else (1.0, "")',
        "",
        "numerics/test_labels.py",
    ),
    Mutation(
        "extensions/datasets/playing.py",
        "an env that reports no success has failed",
        "success=succeeded if reports_success else None",
        "success=succeeded",
        "numerics/test_recap.py",
    ),
    Mutation(
        "extensions/recap/value_fit.py",
        "each rank evaluates all episodes",
        "numbers = range(ranks.rank(), len(frames), ranks.world_size())",
        "numbers = range(len(frames))",
        "equivalence/test_ddp.py",
    ),
    Mutation(
        "extensions/datasets/episode_files.py",
        "a recording that was cut off has no end",
        'self._pending["next.truncated"][-1] = np.array(True)',
        "pass",
        "numerics/test_datasets.py",
    ),
    Mutation(
        "extensions/datasets/episode.py",
        "the last step of an episode goes on from an observation that nobody saw",
        "if self.final_known or bool(self.terminated[-1:].any()):",
        "if True:",
        "numerics/test_datasets.py",
    ),
    # --- algorithms ---
    Mutation(
        "algorithms/ppo.py",
        "the critic's warm-up lasts one iteration longer",
        "self.warms_up = int(self.policy.version) < self.critic_warmup_iterations",
        "self.warms_up = int(self.policy.version) <= self.critic_warmup_iterations",
        "core/numerics/test_ppo.py",
    ),
    Mutation(
        "algorithms/grpo.py",
        "the policy is pushed away from its reference",
        'loss = loss + self.kl_coef * scalars["reference_kl"]',
        'loss = loss - self.kl_coef * scalars["reference_kl"]',
        "core/numerics/test_grpo.py",
    ),
    Mutation(
        "algorithms/off_policy.py",
        "the target networks stay as they began",
        "self._sequence_of(objectives, self.update_targets, self._moved)",
        "self.learner.sequence(objectives, lambda: None, self._moved)",
        "core/numerics/test_sac.py",
    ),
    Mutation(
        "algorithms/learner.py",
        "the learning rate stays as it began",
        "optimizer, env_steps, horizon)",
        "optimizer, 0, horizon)",
        "core/numerics/test_ppo.py",
    ),
    Mutation(
        "algorithms/learner.py",
        "the run goes on after many skipped steps",
        "            if objective.statistics.exhausted:\n",
        "            if False:\n",
        "core/numerics/test_ppo.py",
    ),
    Mutation(
        "algorithms/base.py",
        "a rollout that is one update too old is trained on",
        "if staleness > allowed:",
        "if staleness > allowed + 1:",
        "core/numerics/test_staleness.py core/numerics/test_collection.py",
    ),
    Mutation(
        "algorithms/base.py",
        "the observation normaliser takes each rollout in twice",
        "                self.policy.update_normalization(steps)\n",
        "                self.policy.update_normalization(steps)\n" * 2,
        "numerics/test_normalization.py numerics/test_networks.py",
    ),
    Mutation(
        "algorithms/base.py",
        "the generator that shuffles is not restored",
        "        self.generator.set_state(shuffle.cpu())\n",
        "",
        "core/equivalence/test_resume.py",
    ),
    Mutation(
        "algorithms/rollout_evaluation.py",
        "the value at a time limit is that of the observation before it",
        'finals = {"observation": final_observations(rollout, rows, steps)}',
        'finals = {"observation": rollout["observation"][rows, steps]}',
        "numerics/test_ends.py core/numerics/test_collection.py",
    ),
    Mutation(
        "algorithms/action_parts.py",
        "actions of a chunk that were not executed count in the ratio",
        "torch.where(executed_parts(minibatch, log_prob), log_prob, 0.0).sum(-1)",
        "log_prob.sum(-1)",
        "numerics/test_chunks.py numerics/test_vla.py",
    ),
    # --- callbacks ---
    Mutation(
        "training/callbacks/checkpoints.py",
        "one checkpoint more than wanted is kept",
        "files[: -self.keep]",
        "files[: -self.keep - 1]",
        "core/faults/test_checkpoints.py",
    ),
    Mutation(
        "training/callbacks/checkpoints.py",
        "a resumed run begins again with the policy it was warm-started with",
        "        if module.env_steps > 0:\n            return\n",
        "",
        "core/faults/test_checkpoints.py faults/test_warm_start.py",
    ),
    Mutation(
        "training/callbacks/budget.py",
        "a run takes one iteration more than its budget",
        "env_steps >= data_of",
        "env_steps > data_of",
        "core/faults/test_faults.py core/numerics/test_ppo.py",
    ),
    Mutation(
        "training/callbacks/graceful_stop.py",
        "a signal in the middle of an epoch ends the run without a checkpoint",
        "        trainer.save_checkpoint(self.path)\n        trainer.limit_val_batches = 0",
        "        trainer.limit_val_batches = 0",
        "core/faults/test_faults.py",
    ),
    Mutation(
        "training/callbacks/graceful_stop.py",
        "a signal that comes while the ranks agree is lost",
        "        return ranks.max_over_ranks(self._received or 0) or None",
        "        self._received = ranks.max_over_ranks(self._received or 0) or None\n"
        "        return self._received",
        "core/faults/test_faults.py",
    ),
    Mutation(
        "training/callbacks/metrics.py",
        "the best value that is logged is always the largest",
        'self._better = max if best_mode == "max" else min',
        "self._better = max",
        "cli/test_logs.py core/faults/test_checkpoints.py",
    ),
    Mutation(
        "training/callbacks/loggers.py",
        "the row of the checkpoint itself is dropped on resumption",
        'if last is None or int(row["env_steps"]) <= last:',
        'if last is None or int(row["env_steps"]) < last:',
        "cli/test_logs.py",
    ),
    Mutation(
        "extensions/videos/film.py",
        "a film that is thinned out has its later frames too close",
        "            self.stride *= 2\n",
        "",
        "cli/test_videos.py",
    ),
    # --- cli ---
    Mutation(
        "cli/parsing.py",
        "true takes away the settings of what it turns on",
        "        return TurnedOn(previous)",
        "        return value",
        "core/reports/test_command_line_values.py",
    ),
    Mutation(
        "cli/app.py",
        "a directory that is typed does not hold the resumed run",
        "        if typed is not None and expanded(typed).resolve() != directory.resolve():",
        "        if False:",
        "cli/test_commands.py",
    ),
    Mutation(
        "cli/app.py",
        "a run from an earlier checkpoint replaces the later ones",
        "    return env_steps < last_steps",
        "    return False",
        "cli/test_commands.py",
    ),
    Mutation(
        "algorithms/base.py",
        "a resumed optimizer keeps the settings of the checkpoint",
        "            optimizer.register_load_state_dict_pre_hook(with_own_settings)",
        "            pass",
        "core/reports/test_forged_states.py",
    ),
    Mutation(
        "system/runs.py",
        "a run replaces the checkpoints of another",
        "        is_same_run or not names,",
        "        True,",
        "cli/test_commands.py",
    ),
    Mutation(
        "cli/first_check.py",
        "an error ends with exit code 0",
        "sys.exit(2 if isinstance(error, UsageError) else 1)",
        "sys.exit(2 if isinstance(error, UsageError) else 0)",
        "cli/test_commands.py",
    ),
    Mutation(
        "cli/app.py",
        "a run that a signal has stopped ends with exit code 0",
        "sys.exit(128 + trainer.stop_signal)",
        "sys.exit(0)",
        "cli/test_commands.py",
    ),
    Mutation(
        "cli/parsing.py",
        "of two values of an option the first one counts",
        "        if option == flag:\n            value = next_option\n",
        "        if option == flag:\n            return next_option\n",
        "core/faults/test_trust.py",
    ),
    Mutation(
        "checkpoints/trust.py",
        "a checkpoint may name any class of the package anywhere",
        "if str(name) not in allowed.names:",
        "if not str(name).startswith(PACKAGES):",
        "core/faults/test_trust.py",
    ),
    Mutation(
        "system/plain_yaml.py",
        "a key that stands twice in a config passes, and the last one counts",
        "if name in lines and key.tag",
        "if name in seen and key.tag",
        "core/faults/test_yaml.py",
    ),
    # --- the modules at the top ---
    Mutation(
        "rollout/contract.py",
        "the observation after the end of an episode is that of the next one",
        "next_observation[rows, steps] = final",
        "pass",
        "core/numerics/test_rollout.py",
    ),
    Mutation(
        "rollout/contract.py",
        "the first reward of a chunk is discounted",
        "weights = gamma ** torch.arange(step_reward.shape[-1], device=step_reward.device)",
        "weights = gamma ** (torch.arange(step_reward.shape[-1], device=step_reward.device) + 1)",
        "numerics/test_chunks.py",
    ),
    Mutation(
        "training/data.py",
        "two ranks draw from the same random streams",
        "if ranks.rank() > 0:",
        "if ranks.rank() > 1:",
        "equivalence/test_ddp.py",
    ),
    Mutation(
        "training/data.py",
        "test plays the episodes of validate",
        "            self.eval_seed + self.num_eval_episodes, self.num_eval_episodes,",
        "            self.eval_seed, self.num_eval_episodes,",
        "numerics/test_evaluation.py cli/test_commands.py",
    ),
    Mutation(
        "collectors/evaluation.py",
        "an episode of which no success is said is left out of the rate",
        'successes = [bool(episode["success"]) for episode in episodes] if reports_success else []',
        'successes = [e["success"] for e in episodes if e["success"] is not None]',
        "numerics/test_evaluation.py",
    ),
    Mutation(
        "training/trainer.py",
        "a refused run leaves its directory",
        "                    remove_refused(self.run_dir)\n",
        "                    pass\n",
        "cli/test_commands.py",
    ),
    Mutation(
        "checkpoints/format.py",
        "a damaged checkpoint is not noticed",
        'if verify or "/data/" not in name:',
        "if False:",
        "core/faults/test_checkpoints.py faults/test_loading.py",
    ),
    Mutation(
        "algorithms/base.py",
        "an algorithm that was loaded is in training mode, with dropout",
        "return module.to(map_location).eval()",
        "return module.to(map_location)",
        "faults/test_loading.py",
    ),
    Mutation(
        "system/files.py",
        "a file is written over, not replaced: a kill leaves half of it",
        "os.replace(temporary, target)",
        "shutil.copyfile(temporary, target)",
        "core/faults/test_files.py",
    ),
    Mutation(
        "system/files.py",
        "two processes may train in one directory",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "core/faults/test_faults.py",
    ),
    Mutation(
        "checkpoints/trust.py",
        "a checkpoint can allow the code that it names",
        "if (name in GRANTS and child)",
        "if False",
        "faults/test_permission.py",
    ),
    Mutation(
        "system/process.py",
        "a process that had to be ended says that all went well",
        "    os._exit(1)",
        "    os._exit(0)",
        "core/faults/test_hangs.py",
    ),
    Mutation(
        "system/construction.py",
        "a checkpoint of a run in Python keeps no arguments given by position",
        "for name, value in list(bound.arguments.items())[1:]:",
        "for name, value in list(kwargs.items()):",
        "faults/test_loading.py",
    ),
    # --- the traps of off-policy learning (docs/algorithms/sac.md) ---
    Mutation(
        "buffers/transition_ring.py",
        "off-policy: what follows a step that ended an episode is the next one's first observation",
        "        if len(from_aside):  #",
        "        if False:  #",
        "core/numerics/test_replay.py learning/test_off_policy.py",
    ),
    Mutation(
        "buffers/replay_buffer.py",
        "off-policy: n-step sums go on over an episode's end",
        "            continues = ~terminated & (ring.columns[FINAL].index_select(0, last) < 0)\n",
        "            continues = torch.ones_like(last, dtype=torch.bool)\n",
        "core/numerics/test_replay.py",
    ),
    Mutation(
        "buffers/replay_buffer.py",
        "off-policy: n-step sums go on over the write cursor",
        "            continues &= distances + step * self.num_envs < stored_rows\n",
        "",
        "core/numerics/test_replay.py",
    ),
    Mutation(
        "buffers/replay_buffer.py",
        "off-policy: what follows n steps has the discount of n, however few were summed",
        "            discount = torch.where(continues, discount * factor, discount)\n",
        "            discount = discount * factor\n",
        "core/numerics/test_replay.py",
    ),
    Mutation(
        "buffers/replay_buffer.py",
        "off-policy: minibatches go on being drawn while a rollout overwrites them",
        "            if self.ring.end != end:\n",
        "            if False:\n",
        "core/numerics/test_replay.py",
    ),
    Mutation(
        "buffers/replay_buffer.py",
        "off-policy: a resumed replay draws from the beginning of its stream again",
        '{"generator": self._generator.get_state()}',
        '{"generator": torch.Generator().get_state()}',
        "core/faults/test_replay_files.py equivalence/test_off_policy.py",
    ),
    Mutation(
        "training/collected_states.py",
        "off-policy: a resumed run begins with an empty replay",
        "            replay.load_state_dict(states[rank], self._loaded_from)\n",
        "            pass\n",
        "core/faults/test_replay_files.py equivalence/test_off_policy.py",
    ),
    Mutation(
        "algorithms/sac.py",
        "off-policy: the target pays for entropy where it should not",
        "alpha = self.log_alpha.exp() if self.entropy_in_target else 0.0\n",
        "alpha = self.log_alpha.exp()\n",
        "core/numerics/test_sac.py",
    ),
    Mutation(
        "algorithms/sac.py",
        "off-policy: the actor is paid twice for its entropy",
        "        alpha = self.log_alpha.detach().exp()\n        q = ",
        "        alpha = self.log_alpha.detach().exp() * 2\n        q = ",
        "core/numerics/test_sac.py",
    ),
    Mutation(
        "algorithms/off_policy.py",
        "off-policy: targets are the critics themselves",
        "next_outputs = self.target_critic.outputs(",
        "next_outputs = critic.outputs(",
        "core/numerics/test_sac.py",
    ),
    Mutation(
        "algorithms/sac.py",
        "encoders: targets are read by the encoder itself",
        "encoders = self.target_encoder, self.target_memory\n",
        "encoders = None, self.target_memory\n",
        "numerics/test_encoders.py",
    ),
    Mutation(
        "functional/q_learning.py",
        "critics: what lies beyond the atoms loses its mass",
        "(values.t() - atoms[0]) / width).clamp(0, last)",
        "(values.t() - atoms[0]) / width).clamp(0, last - 1)",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "algorithms/sac.py",
        "critics: entropy does not lower the target",
        "(next_q - alpha * log_prob)",
        "next_q",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "algorithms/off_policy.py",
        "critics: targets without target networks have gradients",
        "return outputs, next_outputs.detach()",
        "return outputs, next_outputs",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "policies/networks/q_networks.py",
        "critics: batch statistics are of what was done alone",
        "torch.var_mean(widened(x), dim=1,",
        "torch.var_mean(widened(x)[:, : x.shape[1] // 2], dim=1,",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "policies/networks/q_networks.py",
        "critics: running statistics count from the first minibatch on",
        "late = self.seen > RENORMALIZED_AFTER",
        "late = self.seen > 0",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "policies/networks/q_networks.py",
        "critics: batch renormalisation has no bounds",
        "shift.clamp(-LARGEST_SHIFT, LARGEST_SHIFT), 0.0)",
        "shift, 0.0)",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "compiled/graphs.py",
        "critics: tracing a graph moves running statistics",
        "            buffer.copy_(value)\n",
        "            pass\n",
        "equivalence/test_off_policy.py",
    ),
    Mutation(
        "algorithms/discrete_sac.py",
        "discrete actions: the temperature counts what is forbidden",
        "self.policy.num_allowed(minibatch).to(log_probs.dtype)",
        "torch.full_like(log_probs[:, 0], float(self.policy.distribution.num_choices))",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "extensions/algorithms/differentiable.py",
        "APG: the discount goes on into the next episode",
        "discount = torch.where(terminated | truncated, 1.0, discount * gamma)",
        "discount = discount * gamma",
        "numerics/test_apg.py",
    ),
    Mutation(
        "extensions/algorithms/differentiable.py",
        "SHAC: a truncated episode has no value",
        "cut = (truncated | (t + 1 == len(steps))) & ~terminated",
        "cut = torch.full_like(truncated, t + 1 == len(steps)) & ~terminated",
        "numerics/test_apg.py",
    ),
    Mutation(
        "extensions/algorithms/apg.py",
        "APG: the env stays where the update left it",
        "        env.load_state_dict(now)\n",
        "        env.load_state_dict(self._start)\n",
        "numerics/test_apg.py",
    ),
    Mutation(
        "extensions/algorithms/shac.py",
        "SHAC: the critic's own values are its targets",
        "write_values(self.policy, rollout, self.target_value, self.target_value)",
        "write_values(self.policy, rollout)",
        "numerics/test_apg.py",
    ),
    Mutation(
        "extensions/algorithms/gradients.py",
        "a check takes any gradient for right",
        "if median < TOLERANCE:",
        "if median < 1e9:",
        "numerics/test_apg.py",
    ),
    Mutation(
        "extensions/algorithms/iql.py",
        "IQL: a terminated episode goes on",
        'self.gamma * minibatch["continuing"] * value',
        "self.gamma * value",
        "numerics/test_iql.py",
    ),
    Mutation(
        "extensions/algorithms/iql.py",
        "IQL, AWAC: gae_lambda changes no weights",
        "if self.gae_lambda is None:\n                advantage",
        "if True:\n                advantage",
        "numerics/test_iql.py",
    ),
    Mutation(
        "extensions/vla/encoder.py",
        "the features of a backbone keep their scale",
        "return layer_norm(joined, joined.shape[-1:])",
        "return joined",
        "numerics/test_recap.py",
    ),
    Mutation(
        "extensions/algorithms/iql.py",
        "IQL: values come from the critics, not from the targets",
        "(minibatch, action, self.target_critic).amin(0)",
        "(minibatch, action).amin(0)",
        "numerics/test_iql.py",
    ),
    Mutation(
        "extensions/algorithms/iql.py",
        "AWAC: the next actions have the noise of these",
        'minibatch["next_noise"]',
        'minibatch["noise"]',
        "numerics/test_iql.py",
    ),
    Mutation(
        "extensions/algorithms/iql.py",
        "IQL, AWAC: several processes each train on all data",
        'stage != "fit" or processes == 1',
        "True",
        "numerics/test_iql.py",
    ),
    Mutation(
        "training/data.py",
        "offline: all training envs are made",
        "1 if self.offline else self.num_envs",
        "self.num_envs",
        "numerics/test_iql.py",
    ),
    Mutation(
        "extensions/datasets/lerobot_reader.py",
        "offline: recorded bounds of actions are not read",
        "self._measured_bounds() if self._bounds is None else self._bounds",
        "self._measured_bounds()",
        "numerics/test_iql.py",
    ),
    Mutation(
        "extensions/tasks/swing_up.py",
        "swing-up: the force drives the hinge, too",
        "torch.cat((push, torch.zeros_like(push)), 1)",
        "torch.cat((push, push), 1)",
        "numerics/test_swing_up.py",
    ),
    Mutation(
        "extensions/tasks/swing_up.py",
        "swing-up: a pole that has turned around does not stand",
        "(angle - turns * math.tau).abs()",
        "angle.abs()",
        "numerics/test_swing_up.py",
    ),
    Mutation(
        "functional/q_learning.py",
        "IQL: the expectile of the other side",
        "torch.where(difference < 0, 1.0 - expectile, expectile)",
        "torch.where(difference > 0, 1.0 - expectile, expectile)",
        "numerics/test_iql.py",
    ),
    Mutation(
        "algorithms/dqn.py",
        "DQN: the target chooses among forbidden actions",
        "policy.masked_values(next_td, chosen_by)",
        "chosen_by",
        "core/numerics/test_dqn.py",
    ),
    Mutation(
        "algorithms/dqn.py",
        "DQN: the target network moves after every update",
        "% self.target_update_interval == 0",
        "% 1 == 0",
        "core/numerics/test_dqn.py",
    ),
    Mutation(
        "algorithms/dqn.py",
        "DQN: the exploration stays",
        "done * (self.exploration_final",
        "0 * (self.exploration_final",
        "core/numerics/test_dqn.py",
    ),
    Mutation(
        "policies/distributions/exploring.py",
        "DQN: with epsilon 1 the mode is the first action",
        'fields["action"] = output.argmax(-1)',
        "pass",
        "core/numerics/test_dqn.py",
    ),
    Mutation(
        "rollout/masks.py",
        "discrete actions: the first ones are drawn whatever is allowed",
        "keys.masked_fill(mask == 0, -torch.inf)",
        "keys",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "policies/normalization.py",
        "critics: the largest return is forgotten",
        "torch.where(usable, largest, self.largest)",
        "torch.where(usable, self.largest, self.largest)",
        "core/numerics/test_critics.py",
    ),
    Mutation(
        "policies/networks/encoders.py",
        "encoders: pictures are not divided by 255",
        '        self._unit = 1.0 / 255.0 if observation_space.dtype == "uint8" else 1.0\n',
        "        self._unit = 1.0\n",
        "numerics/test_encoders.py",
    ),
    Mutation(
        "policies/networks/perceptron.py",
        "encoders: the mask of actions is an input",
        "NO_INPUT = (MASK,)\n",
        'NO_INPUT = ("",)\n',
        "numerics/test_encoders.py",
    ),
    Mutation(
        "algorithms/off_policy.py",
        "off-policy: updates are counted per rollout, not per env step",
        "        return max(0, updates - self.updates_done)\n",
        "        return math.ceil(fresh * self.updates_per_env_step)\n",
        "learning/test_off_policy.py equivalence/test_off_policy.py",
    ),
    Mutation(
        "policies/distributions/unit_actions.py",
        "off-policy: the log-prob of tanh overflows near the bounds",
        "    return 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))\n",
        "    return (1.0 - u.tanh().square()).log()\n",
        "core/numerics/test_distributions.py core/numerics/test_sac.py",
    ),
    Mutation(
        "collectors/uniform_actor.py",
        "off-policy: random first actions are stored with another log-prob than theirs",
        "            self._log_prob = -float(self._range.log().sum())\n",
        "            self._log_prob = 0.0\n",
        "learning/test_off_policy.py core/numerics/test_acting.py",
    ),
)


class Outcome(NamedTuple):
    """What became of a defect.

    Attributes:
        test: that failed, and its message; None where all passed.
        seconds: of CPU time, of the tests and what they have started.
    """

    mutation: Mutation
    test: tuple[str, str] | None
    seconds: float


def main() -> None:
    """Try the defects, print a line for each, and say how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words of the file or the defect")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--notice", action="store_true", help="two tests that notice each")
    parser.add_argument("--drawn", type=int, default=0, help="this many at random, with --notice")
    parser.add_argument("--seed", type=int, default=0, help="of --drawn (default: 0)")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if any(w in f"{m.file} {m.defect}" for w in arguments.only)]
    if arguments.drawn:
        chosen = drawn_at_random(arguments.only, arguments.drawn, arguments.seed)
    for name in LOADED_ONCE:
        importlib.import_module(name)
    if arguments.notice or arguments.drawn:
        enough = 1 if arguments.drawn else 2
        rows = notice(chosen, arguments.jobs, enough)
        if arguments.write and not arguments.drawn:
            noticing.write_rooms({m.defect: m.package for m in chosen}, rows)
        return
    outcomes = []
    for outcome in tried(chosen, arguments.jobs):
        outcomes.append(outcome)
        mutation, test, seconds = outcome
        found = f"caught by {test[0]}\n         {test[1]}" if test else "SURVIVED"
        print(f"{seconds:5.0f} s  {mutation.file}: {mutation.defect}: {found}", flush=True)
    survived = sum(outcome.test is None for outcome in outcomes)
    print(f"{len(outcomes) - survived} of {len(outcomes)} caught")
    if arguments.write:
        now = {o.mutation.defect: o.test[0] if o.test else "" for o in outcomes}
        RESULTS.write_text(table(caught_before() | now))
    sys.exit(1 if survived else 0)


def drawn_at_random(below: Sequence[str], count: int, seed: int) -> list[Mutation]:
    """Return random defects of the files below some folders of the package."""
    from drawn import drawn

    package = ROOT / PACKAGE
    files = sorted(file for name in below for file in (package / name).rglob("*.py"))
    return [
        Mutation(file.relative_to(package).as_posix(), defect, before, after, "")
        for file, defect, before, after in drawn(files, count, seed)
    ]


def notice(mutations: Sequence[Mutation], jobs: int, enough: int) -> dict[str, dict[str, Any]]:
    """Find tests that notice each defect, and print the test functions that nothing needs.

    Returns the stored rows, by defect.

    Args:
        enough: how many tests are looked for.
    """
    reach = noticing.Reach()
    rows = noticing.stored_rows()
    left = [m for m in mutations if m.defect not in rows]

    def tests(mutation: Mutation) -> list[str]:
        needed = {noticing.function(test) for row in rows.values() for test in row["noticed_by"]}
        files = [f"tests/{name}" for name in mutation.tests.split()]
        return reach.tests(f"{PACKAGE}/{mutation.file}", mutation.before, files, needed)

    for mutation, test, seconds in tried(left, jobs, tests, enough):
        row = {"defect": mutation.defect, "file": mutation.file, "after": mutation.after}
        row |= json.loads(test[0]) if test else {}
        rows[mutation.defect] = row
        noticing.keep(row)
        print(
            f"{seconds:5.0f} s  {mutation.file}: {mutation.defect}: {row['noticed_by']}", flush=True
        )
    counts = [min(len(set(rows[m.defect]["noticed_by"])), 2) for m in mutations]
    print(
        f"{len(counts)} defects: {[counts.count(n) for n in (2, 1, 0)]} noticed twice, once, never"
    )
    for name, lines in noticing.superfluous(reach, rows):
        print(f"{lines:5} lines  {name}")
    return rows


def tried(
    mutations: Sequence[Mutation],
    jobs: int,
    tests: Callable[[Mutation], list[str]] | None = None,
    enough: int = 1,
) -> Iterator[Outcome]:
    """Yield the outcomes as they come, some defects at a time, each in a process of its own.

    Args:
        tests: returns the tests that a defect meets, until `enough` notice it.
    """
    waiting = list(mutations)
    running: dict[int, tuple[Mutation, tempfile.TemporaryDirectory[str]]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutation = waiting.pop(0)
            folder = tempfile.TemporaryDirectory(prefix="mutation-")
            watch = noticing.Watch(tests(mutation), enough) if tests else None
            running[_started(mutation, Path(folder.name), watch)] = mutation, folder
        pid, _, usage = os.wait4(-1, 0)
        mutation, folder = running.pop(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have left behind
        test, _, message = (Path(folder.name) / "failed").read_text().partition("\n")
        folder.cleanup()
        yield Outcome(mutation, (test, message) if test else None, usage.ru_utime + usage.ru_stime)


def _started(mutation: Mutation, folder: Path, watch: noticing.Watch | None) -> int:
    """Fork a process that runs the tests on a copy of the tree; return its number."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        _test(mutation, folder, watch)
    finally:
        os._exit(0)


def _test(mutation: Mutation, folder: Path, watch: noticing.Watch | None) -> None:
    """Write the first test that fails to `failed`, or nothing; with `watch`, a row of JSON."""
    import pytest

    tree, failed = folder / "tree", folder / "failed"
    os.setpgid(0, 0)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ignored = shutil.ignore_patterns("__pycache__", "outputs")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tree / name, **({"ignore": ignored} if copy is shutil.copytree else {}))
    target = tree / PACKAGE / mutation.file
    target.write_text(applied(mutation, target.read_text()))
    os.chdir(tree)
    sys.path[:0] = [str(tree / "src"), str(tree)]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    failed.write_text("(it ended the process that ran the tests)")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(PATIENCE)]
    files = [f"tests/{name}" for name in mutation.tests.split()]
    if watch is not None:
        failed.write_text('{"noticed_by": ["(it ended the process)"], "not_run": []}')
        watch.run(options)
        failed.write_text(json.dumps(watch.row()))
        return
    options.append("-x")
    first = FirstFailure()
    known = caught_before().get(mutation.defect)
    status = pytest.main([*options, known], plugins=[first]) if known else 0
    if not first.test:
        status = pytest.main([*options, *files], plugins=[first])
    otherwise = "" if status == 0 else f"(pytest ended with {status!s})"
    failed.write_text(f"{first.test}\n{first.message}" if first.test else otherwise)


def caught_before() -> dict[str, str]:
    """Return the tests in the results that are there, by defect; empty where nothing caught it."""
    text = RESULTS.read_text() if RESULTS.is_file() else ""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| (?:`([^`]+)`|\*\*nothing\*\*) \|$", text, re.M)
    return {defect: f"tests/{test}" if test else "" for defect, test in rows}


class FirstFailure:
    """A plugin of pytest: remembers which test failed, and why."""

    test = message = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Look at a test, or at what sets it up."""
        if report.failed and not self.test:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(report.longrepr if crash is None else crash.message)
            self.test, self.message = report.nodeid, reason.strip().splitlines()[0]

    pytest_collectreport = pytest_runtest_logreport


def applied(mutation: Mutation, content: str) -> str:
    """Return a file with the defect in it.

    Raises:
        ValueError: where the text does not stand exactly once in the file.
    """
    count = content.count(mutation.before)
    if count != 1:
        raise ValueError(f"{mutation.file} has {count} times, not once: {mutation.before}")
    return content.replace(mutation.before, mutation.after)


def table(caught_by: Mapping[str, str]) -> str:
    """Return as Markdown which test caught each defect, in the order of the defects.

    Args:
        caught_by: the name of the test by the defect, empty where none did.
    """
    tried = [m for m in MUTATIONS if m.defect in caught_by]
    lines = [
        "# Which defects the tests notice",
        "",
        f"{sum(bool(caught_by[m.defect]) for m in tried)} of {len(tried)}, by",
        "`python scripts/mutations.py --write`. Each test file beside a defect ran until its first",
        "failure; with `--only`, the other rows are those of before.",
        "",
        "| package | defect | caught by |",
        "|---|---|---|",
    ]
    for m in tried:
        test = caught_by[m.defect].removeprefix("tests/")
        lines.append(f"| {m.package} | {m.defect} | {f'`{test}`' if test else '**nothing**'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
