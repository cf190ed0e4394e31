"""Write `run.json`: what ran, where, when, and how it ended."""

import json
import platform
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_rl.system.files import write_atomically
from lightning_rl.training.callbacks.computing import computing_of
from lightning_rl.training.callbacks.settings import evaluation_protocol
from lightning_rl.training.callbacks.typed import algorithm_of, data_of

try:
    import resource
except ImportError:  # Windows has none
    resource = None  # type: ignore[assignment]  # checked below

PACKAGES = ("lightning-rl", "torch", "lightning", "tensordict", "gymnasium", "numpy")
"""Packages whose versions are recorded."""

RUNNING = "running"
"""The `outcome` of a run that has not ended, or was killed."""

REASON = 400
"""Maximum characters of an error in `outcome`; the rest of a long message is a stack trace."""


class RunManifest(Callback):
    """Write `run.json` at the beginning and the end of training.

    `outcome` is `running`, `finished`, `stopped by SIGTERM` (or another signal), `interrupted`
    (Ctrl-C twice), or `failed: <error>`. A resumed run moves its previous parts to `earlier`; a
    part with the outcome `running` was killed. `seconds` cover the run, its evaluations and the
    CPU; `peak_memory` is in bytes. Both exclude env workers. `protocol` has the settings of its
    evaluations.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "run.json"
        self._content: dict[str, Any] = {}
        self._began = self._cpu_began = self._evaluation_began = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        earlier = self._earlier()
        self._content = {
            "outcome": RUNNING,
            "started": _now(),
            "ended": None,
            "seconds": {"total": 0.0, "evaluation": 0.0, "cpu": None},
            "peak_memory": {"process": None, "cuda": None},
            "env_steps_at_start": algorithm_of(pl_module).env_steps,
            "env_steps": algorithm_of(pl_module).env_steps,
            "seed": data_of(trainer).seed,
            "command": sys.argv,
            "git_commit": _git_commit(),
            "device": _device(trainer),
            "computing": {},
            "protocol": earlier[-1].get("protocol") if earlier else None,
            "world_size": trainer.world_size,
            "platform": platform.platform(),
            "versions": {"python": platform.python_version()} | _versions(),
            "earlier": earlier,
        }
        self._write(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_computing(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._write_computing(trainer, pl_module)

    def _write_computing(self, trainer: Trainer, pl_module: LightningModule) -> None:
        computing = computing_of(trainer, algorithm_of(pl_module))
        self._write_changed("computing", computing, trainer)

    def _write_changed(self, name: str, value: Any, trainer: Trainer) -> None:
        if value != self._content[name]:
            self._content[name] = value
            self._write(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            seconds = self._content["seconds"]
            seconds["evaluation"] += time.perf_counter() - self._evaluation_began
            if not trainer.sanity_checking:
                self._write_changed("protocol", evaluation_protocol(trainer, pl_module), trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number = getattr(trainer, "stop_signal", None)
        outcome = "finished" if number is None else f"stopped by {Signals(number).name}"
        self._end(trainer, pl_module, outcome)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if not self._content:
            return
        if isinstance(exception, KeyboardInterrupt):
            self._end(trainer, pl_module, "interrupted")
            return
        reason = textwrap.shorten(f"{type(exception).__name__}: {exception}", REASON)
        with suppress(OSError):  # the run may have failed because of the disk
            self._end(trainer, pl_module, f"failed: {reason}")

    def _end(self, trainer: Trainer, pl_module: LightningModule, outcome: str) -> None:
        if not self.path.parent.is_dir():
            return  # the run directory was deleted meanwhile
        content, self._content = self._content, {}
        content["seconds"]["total"] = time.perf_counter() - self._began
        content["seconds"]["cpu"] = time.process_time() - self._cpu_began
        content["peak_memory"] = _peak_memory(trainer)
        steps = algorithm_of(pl_module).env_steps
        self._content = {**content, "outcome": outcome, "ended": _now(), "env_steps": steps}
        self._write(trainer)
        # A later exception of another callback does not change the outcome.
        self._content = {}

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            content = json.dumps(self._content, indent=2).encode()
            write_atomically(self.path, lambda file: file.write(content))

    def _earlier(self) -> list[dict[str, Any]]:
        try:
            last = json.loads(self.path.read_text())
            return [*last.pop("earlier"), last]
        except (OSError, ValueError, KeyError):
            return []  # no file, or not written by this class


def _peak_memory(trainer: Trainer) -> dict[str, int | None]:
    device = trainer.strategy.root_device
    cuda = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if resource is None:
        return {"process": None, "cuda": cuda}
    # In bytes on macOS, in KiB elsewhere.
    unit = 1 if sys.platform == "darwin" else 1024
    return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "cuda": cuda}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache  # 0.5 ms per package, and constant within a process
def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _git_commit() -> str | None:
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return outcome.stdout.strip()


def _device(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device} ({name})"
