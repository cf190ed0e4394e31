"""Kill runs while they save, and look at what is left: `python scripts/kill_test.py --check`.

A small run that saves `last.ckpt` after every iteration is killed (SIGKILL) at a random time, once
per trial. Then `last.ckpt` must be readable, and the run that resumes from it must end exactly as
one that nobody disturbed: weights, optimizer, counters, random streams, envs, bit for bit, with no
unfinished file left. Every run is a fork of this process: none waits for imports.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import seed_everything

from lightning_rl import PPO, ActorCritic, GymnasiumEnv, RLDataModule, RLTrainer
from lightning_rl.checkpoint_format import read_checkpoint

RESULT = Path(__file__).parent / "results" / "kill_test.md"
COMPARED = (
    "state_dict",
    "optimizer_states",
    "lightning_rl",
    "RLDataModule",
    "global_step",
    "loops",
)


def train(run_dir: Path, iterations: int, ckpt_path: Path | None) -> None:
    """Train, saving every iteration; the checkpoint is large enough for kills to hit a save."""
    seed_everything(1)
    data = RLDataModule(
        partial(GymnasiumEnv, id="CartPole-v1"),
        num_envs=2,
        buffer_size=8,
        total_env_steps=16 * iterations,
        iterations_per_epoch=1,
        num_eval_episodes=1,
    )
    policy = ActorCritic(
        data.observation_space, data.action_space, (128, 128), normalize_observation=True
    )
    model = PPO(policy, n_epochs=1, batch_size=16, normalize_reward=True)
    trainer = RLTrainer(
        run_dir=str(run_dir),
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
        limit_val_batches=0,
        checkpoint_every_n_iterations=5,
        keep_checkpoints=2,
    )
    trainer.fit(model, data, ckpt_path=None if ckpt_path is None else str(ckpt_path))


def forked(run_dir: Path, iterations: int, ckpt_path: Path | None = None) -> int:
    """Begin to train in a fork of this process, silently, and return its number."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        train(run_dir, iterations, ckpt_path)
        status = 0
    finally:
        os._exit(status)


def finished(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def alive(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def same(a: object, b: object) -> bool:
    """Compare two trees of tensors and plain values, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Trials:
    """What became of the kills."""

    def __init__(self, root: Path, iterations: int, seed: int) -> None:
        self.root, self.iterations, self.draw = root, iterations, random.Random(seed)
        self.kills = self.during_save = self.unreadable = self.different = self.leftovers = 0
        self.iterations_at_kill: list[int] = []
        began = time.perf_counter()
        assert finished(forked(root / "whole", iterations)) == 0
        self.duration = time.perf_counter() - began
        self.whole = read_checkpoint(last(root / "whole"))

    def kill_once(self) -> None:
        run_dir = self.root / f"run{self.kills}"
        process = forked(run_dir, self.iterations)
        while not last(run_dir).exists():
            time.sleep(0.001)
        time.sleep(self.draw.uniform(0, 0.6 * self.duration))
        if self.kills % 4:  # three of four in the middle of a save, or just behind it
            while not list(run_dir.glob("checkpoints/.tmp-*")) and alive(process):
                pass
            time.sleep(self.draw.uniform(0, 0.004))
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        if finished(process) != -signal.SIGKILL:
            return  # it had ended already: no kill, no trial
        self.kills += 1
        self.during_save += bool(list(run_dir.rglob(".tmp-*")))
        try:
            saved = read_checkpoint(last(run_dir))
        except Exception as error:
            print(error)
            self.unreadable += 1
            return
        self.iterations_at_kill.append(saved["global_step"])
        resumed = finished(forked(run_dir, self.iterations, last(run_dir)))
        ended = read_checkpoint(last(run_dir))
        equal = all(same(ended[key], self.whole[key]) for key in COMPARED)
        self.different += resumed != 0 or not equal
        self.leftovers += bool(list(run_dir.rglob(".tmp-*")))
        for path in sorted(run_dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def report(self) -> str:
        reached = sorted(self.iterations_at_kill)
        span = f"{reached[0]} to {reached[-1]}" if reached else "none"
        return (
            "# Kills while saving\n\n"
            "`python scripts/kill_test.py --check`: SIGKILL at a random time to a run that saves "
            "after every iteration; then resume.\n\n"
            "| what | runs |\n|---|---|\n"
            f"| killed | {self.kills} |\n"
            f"| of these with an unfinished file, so in the middle of a save | {self.during_save} "
            "|\n"
            f"| unreadable `last.ckpt` | {self.unreadable} |\n"
            f"| resumed run differs from the undisturbed one in any bit | {self.different} |\n"
            f"| unfinished files left after the resumed run | {self.leftovers} |\n\n"
            f"Iterations in `last.ckpt` at the kill: {span} of {self.iterations}.\n"
        )


def last(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "last.ckpt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=40, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the kills")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    parser.add_argument("--check", action="store_true", help="fail where anything was lost")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        trials = Trials(Path(root), options.iterations, options.seed)
        while trials.kills < options.kills:
            trials.kill_once()
    print(trials.report())
    if options.write:
        RESULT.write_text(trials.report())
    if options.check and (trials.unreadable or trials.different or trials.leftovers):
        sys.exit(1)


if __name__ == "__main__":
    main()
