"""Kill runs while they save, and check the files: `python scripts/kill_test.py --check`.

A small run that saves `last.ckpt` after every iteration is killed (SIGKILL) at a random time, once
per trial. Then `last.ckpt` must be readable, and a run resumed from it must end like an undisturbed
one, bit for bit: weights, optimizer, counters, random streams, envs. No unfinished file may remain.
`--algorithm sac` saves a replay with each checkpoint, which must be restored, too. Every run is a
fork of this process, so that none waits for imports.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from lightning_rl import (
    PPO,
    SAC,
    ActorCritic,
    GymnasiumEnv,
    ReplayBuffer,
    RLDataModule,
    RLTrainer,
    SquashedActorCritic,
)
from lightning_rl.buffers.replay_files import REPLAY_FOLDER
from lightning_rl.checkpoints.format import read_checkpoint
from scripting import QUIET, table

COMPARED = ("state_dict", "optimizer_states", "lightning_rl", "global_step", "loops")
"""Parts of a checkpoint that must be equal, next to the state of the data module."""

CAPACITY = 300
"""Size of SAC's replay: it is full before a run of 40 iterations ends."""


def train(algorithm: str, run_dir: Path, iterations: int, ckpt_path: Path | None) -> None:
    """Train, saving every iteration; the checkpoint is large enough for kills to hit a save."""
    seed_everything(1)
    off_policy = algorithm == "sac"
    data = RLDataModule(
        partial(GymnasiumEnv, id="Pendulum-v1" if off_policy else "CartPole-v1"),
        num_envs=2,
        buffer_size=8,
        total_env_steps=16 * iterations,
        iterations_per_epoch=1,
        num_eval_episodes=1,
        replay=partial(ReplayBuffer, capacity=CAPACITY) if off_policy else None,
    )
    spaces = data.observation_space, data.action_space
    network: dict[str, Any] = {"hidden_sizes": (128, 128), "normalize_observation": True}
    model: SAC | PPO
    if off_policy:
        settings = {"random_env_steps": 48, "updates_per_env_step": 0.25}
        model = SAC(SquashedActorCritic(*spaces, **network), batch_size=16, **settings)
    else:
        actor = ActorCritic(*spaces, **network)
        model = PPO(actor, n_epochs=1, batch_size=16, normalize_reward=True)
    trainer = RLTrainer(
        run_dir=str(run_dir),
        accelerator="cpu",
        checkpoint_every_n_iterations=5,
        keep_checkpoints=2,
        **QUIET | {"enable_checkpointing": True},
    )
    trainer.fit(model, data, ckpt_path=None if ckpt_path is None else str(ckpt_path))


def forked(algorithm: str, run_dir: Path, iterations: int, ckpt_path: Path | None = None) -> int:
    """Train in a fork of this process, silently; return the fork's id."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        train(algorithm, run_dir, iterations, ckpt_path)
        status = 0
    finally:
        os._exit(status)


def finished(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def same(a: object, b: object) -> bool:
    """Compare two trees of tensors and plain values, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def ended(run_dir: Path) -> dict[str, object]:
    """Return the last checkpoint of a run, and the next draws of its replay."""
    checkpoint = read_checkpoint(last(run_dir))
    kept: dict[str, object] = {key: checkpoint[key] for key in COMPARED}
    states = checkpoint["RLDataModule"].get("replays", [])
    kept["RLDataModule"] = {k: v for k, v in checkpoint["RLDataModule"].items() if k != "replays"}
    env = GymnasiumEnv(id="Pendulum-v1", num_envs=1)
    spaces = env.single_observation_space, env.single_action_space
    for state in states:  # the division into files depends on the time of the save
        replay = ReplayBuffer(*spaces, 2, capacity=CAPACITY)
        replay.load_state_dict(state, last(run_dir).parent / REPLAY_FOLDER)
        kept["drawn"] = [dict(batch.items()) for batch in replay.batches(50, 64)]
    return kept


class Trials:
    """The results of the kills."""

    def __init__(self, algorithm: str, root: Path, iterations: int) -> None:
        self.algorithm, self.root, self.iterations = algorithm, root, iterations
        self.draw = random.Random(0)
        self.kills = self.during_save = self.unreadable = self.different = self.leftovers = 0
        self.iterations_at_kill: list[int] = []
        began = time.perf_counter()
        assert finished(forked(algorithm, root / "whole", iterations)) == 0
        self.duration = time.perf_counter() - began
        self.whole = ended(root / "whole")

    def kill_once(self) -> None:
        run_dir = self.root / f"run{self.kills}"
        process = forked(self.algorithm, run_dir, self.iterations)
        while not last(run_dir).exists():
            time.sleep(0.001)
        time.sleep(self.draw.uniform(0, 0.6 * self.duration))
        if self.kills % 4:  # three of four during a save, or right after it
            running = partial(os.waitid, os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            while not list(run_dir.glob("checkpoints/.tmp-*")) and running() is None:
                pass
            time.sleep(self.draw.uniform(0, 0.004))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        if finished(process) != -signal.SIGKILL:
            shutil.rmtree(run_dir)
            return  # it had ended before the kill: no trial
        self.kills += 1
        self.during_save += bool(list(run_dir.rglob(".tmp-*")))
        try:
            saved = read_checkpoint(last(run_dir))
        except Exception as error:
            print(error)
            self.unreadable += 1
            return
        self.iterations_at_kill.append(saved["global_step"])
        resumed = finished(forked(self.algorithm, run_dir, self.iterations, last(run_dir)))
        self.different += resumed != 0 or not same(ended(run_dir), self.whole)
        self.leftovers += bool(list(run_dir.rglob(".tmp-*")))
        shutil.rmtree(run_dir)

    def report(self) -> str:
        reached = sorted(self.iterations_at_kill)
        span = f"{reached[0]} to {reached[-1]}" if reached else "none"
        command = f"python scripts/kill_test.py --algorithm {self.algorithm} --check"
        rows = {
            "killed": self.kills,
            "of these with an unfinished file, so in the middle of a save": self.during_save,
            "unreadable `last.ckpt`": self.unreadable,
            "resumed run differs from the undisturbed one in any bit": self.different,
            "unfinished files left after the resumed run": self.leftovers,
        }
        lines = [
            f"# Kills while saving: {self.algorithm.upper()}",
            "",
            f"`{command}`: SIGKILL at a random time to a run that saves after every iteration; "
            "then resume.",
            "",
            *table(("what", "runs"), rows.items()),
            "",
            f"Iterations in `last.ckpt` at the kill: {span} of {self.iterations}.",
        ]
        return "\n".join(lines) + "\n"


def last(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "last.ckpt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=("ppo", "sac"), default="ppo")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=40, help="of each run")
    parser.add_argument("--check", action="store_true", help="fail where anything was lost")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        trials = Trials(options.algorithm, Path(root), options.iterations)
        while trials.kills < options.kills:
            trials.kill_once()
    print(trials.report())
    if options.check and (trials.unreadable or trials.different or trials.leftovers):
        sys.exit(1)


if __name__ == "__main__":
    main()
