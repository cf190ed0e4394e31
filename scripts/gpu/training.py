"""Train small policies on the device, watch what they take of its memory, and compare them."""

import gc
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from findings import Findings
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import GRPO, PPO, ActorCritic, ActorOnly, Algorithm, PushCube, RLDataModule
from lightning_rl import RLTrainer as Runner
from lightning_rl.cli.app import run as run_command
from lightning_rl.training.callbacks.memory import memory_parts
from scripting import QUIET

SETTINGS: dict[type[Algorithm], dict[str, Any]] = {
    PPO: {"learning_rate": 1e-3, "n_epochs": 3, "normalize_reward": True},
    GRPO: {"learning_rate": 1e-3, "n_epochs": 3, "group_size": 8},
}


class Watch(Callback):
    """Keep what a run took of the device's memory, and how its last evaluation went.

    Bytes are those that are allocated beyond what was before the run. On a CPU they are the
    resident memory of the process, which says little of a small run.

    Args:
        findings: get a row of the table of memory when the run ends.
        name: of the run.

    Attributes:
        module, trainer: of the run.
        start: state of the policy before the first update.
        allocated: bytes after each iteration.
        seconds: from the first iteration to the last, evaluations included.
    """

    def __init__(self, findings: Findings, name: str) -> None:
        self.name = name
        self._findings = findings
        self._device = findings.device
        self._cuda = findings.device == "cuda"
        self.allocated: list[int] = []
        self.estimate: dict[str, int] = {}
        self.module: Any = None
        self.trainer: Any = None
        self.start: dict[str, Tensor] = {}
        self.seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the memory before the weights are moved to the device."""
        gc.collect()
        self.module, self.trainer = pl_module, trainer
        self._before = self._bytes()
        if self._cuda:
            torch.cuda.init()  # else there are no statistics to reset
            torch.cuda.reset_peak_memory_stats()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = state_of(self.module.policy)
        self._began = time.perf_counter()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: TensorDict, batch_idx: int
    ) -> None:
        if not self.estimate:
            self._check_devices(pl_module, batch)
            self.estimate = memory_parts(trainer, pl_module, batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.allocated.append(self._bytes() - self._before)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._began
        row = {
            "run": self.name,
            "estimate": sum(self.estimate.values()),
            "parts": self.estimate,
            "peak": self.peak(),
            "growth": self.growth(),
            "iterations": len(self.allocated),
        }
        self._findings.memory.append(row)
        self._findings.save()

    def peak(self) -> int | None:
        """Return the most bytes so far; None on a CPU, which does not say."""
        return torch.cuda.max_memory_allocated() - self._before if self._cuda else None

    def growth(self) -> int | None:
        """Return by how many bytes the second half of a run exceeds the first.

        The first two iterations compile, capture and warm up, and do not count.
        """
        counted = self.allocated[2:]
        if len(counted) < 4:
            return None
        half = len(counted) // 2
        return max(counted[half:]) - max(counted[:half])

    def _check_devices(self, module: Any, batch: TensorDict) -> None:
        """Refuse a run that only seems to be one on the device."""
        places = {
            "policy": module.policy.version.device.type,
            "rollout": batch["reward"].device.type,
            "env": self.trainer.datamodule.collector.env.device.type,
        }
        elsewhere = {what: where for what, where in places.items() if where != self._device}
        if elsewhere:
            raise RuntimeError(f"Not all of the run {self.name} is on {self._device}: {elsewhere}")

    def _bytes(self) -> int:
        if self._cuda:
            return torch.cuda.memory_allocated()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def train(
    findings: Findings,
    name: str,
    *,
    algorithm: type[Algorithm] = PPO,
    env: Callable[..., Any] = PushCube,
    policy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    iterations: int | None = None,
    ckpt_path: Path | None = None,
    seed: int = 1,
) -> Watch:
    """Train on the device in a directory of its own, and return what was seen.

    Where a check is small, with a sixteenth of the envs and for three iterations.
    """
    seed_everything(seed, verbose=False)
    small = findings.small
    num_envs, steps = (16, 16) if small else (256, 32)
    sizes: dict[str, Any] = {"num_envs": num_envs, "buffer_size": steps} | (data or {})
    count = iterations or (3 if small else 6)
    total = count * sizes["num_envs"] * sizes["buffer_size"]
    budget = {"total_env_steps": total, "iterations_per_epoch": count}
    module_data = RLDataModule(partial(env, device=findings.device), **budget | sizes)
    kind = ActorOnly if issubclass(algorithm, GRPO) else ActorCritic
    spaces = module_data.observation_space, module_data.action_space
    network = {"hidden_sizes": (64, 64), "normalize_observation": True} | (policy or {})
    base = next(settings for cls, settings in SETTINGS.items() if issubclass(algorithm, cls))
    settings = base | {"batch_size": num_envs * steps // 4, "compile": False} | (model or {})
    module = algorithm(kind(*spaces, **network), **settings)
    watch = Watch(findings, name)
    run_dir = str(findings.directory / name.replace(" ", "_"))
    device = {"devices": 1, "accelerator": accelerator(findings.device)}
    runner = Runner(run_dir=run_dir, callbacks=[watch], **QUIET | device | (trainer or {}))
    runner.fit(module, module_data, ckpt_path=ckpt_path)
    return watch


def command(findings: Findings, name: str, *arguments: str) -> Watch:
    """Run `rl-cli` in this process, so that its memory can be watched, and return what was seen."""
    watch = Watch(findings, name)
    # It stands where the package's own estimate would: the command line takes no callback objects.
    with mock.patch("lightning_rl.training.trainer.MemoryEstimate", return_value=watch):
        run_command([*arguments, "--trainer.accelerator", accelerator(findings.device)])
    return watch


def accelerator(device: str) -> str:
    return "gpu" if device == "cuda" else "cpu"


def state_of(module: Any) -> dict[str, Tensor]:
    """Return a copy of the weights, statistics and counters of a module, on the CPU."""
    return {k: v.detach().cpu().clone() for k, v in module.state_dict().items() if is_tensor(v)}


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between two states; infinite where they cannot be compared."""
    if one.keys() != other.keys():
        return math.inf
    largest = 0.0
    for key, value in one.items():
        gap = (value.double() - other[key].double()).abs().max().item() if value.numel() else 0.0
        largest = max(largest, math.inf if math.isnan(gap) else gap)
    return largest
