"""Tables of what extensions add to the core: nothing is imported before it is used.

The core names extensions here only, by import path. So a reader of the core need not open them.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from lightning_rl.system.errors import require

EXTENSIONS = "lightning_rl.extensions"
"""The package of extensions."""


class Subcommand(NamedTuple):
    """A subcommand of `rl-cli` that an extension defines.

    Attributes:
        path: import path of a function of (options, command line); see `cli.subcommands`.
        usage: its line in `rl-cli --help`.
        extra: pip's name of the extra that it needs, if any.
    """

    path: str
    usage: str
    extra: str = ""


SUBCOMMANDS = {
    "export": Subcommand(
        "lightning_rl.extensions.export.command.export",
        "for other machines:  rl-cli export --ckpt_path best --format onnx",
    ),
    "sweep": Subcommand(
        "lightning_rl.extensions.sweeps.sweep.sweep",
        "several seeds and settings:  rl-cli sweep --config ppo.yaml --sweep.seeds 5",
        extra="sweep",
    ),
    "report": Subcommand(
        "lightning_rl.extensions.reports.command.report",
        "compare runs:        rl-cli report outputs --output report.html",
    ),
    "judge": Subcommand(
        "lightning_rl.extensions.judging.command.judge",
        "success on tasks:    rl-cli judge best --tasks '{task_id: [0, 1]}' --episodes 50",
    ),
    "compare": Subcommand(
        "lightning_rl.extensions.judging.command.compare",
        "do two policies differ:  rl-cli compare A B --episodes 50",
    ),
    "record": Subcommand(
        "lightning_rl.extensions.datasets.record_command.record",
        "record episodes:     rl-cli record --path demos --config ppo.yaml --source Keyboard",
    ),
    "label": Subcommand(
        "lightning_rl.extensions.recap.label_command.label",
        "label them:          rl-cli label demos --success 0 3 7 --failure all",
    ),
    "recap": Subcommand(
        "lightning_rl.extensions.recap.command.recap",
        "in rounds:  rl-cli recap --config recap_doors.yaml --run_dir doors",
    ),
    "transfer": Subcommand(
        "lightning_rl.extensions.transfer.command.transfer",
        "why it falls here:   rl-cli transfer policy.onnx --layout g1.yaml --env LeggedRobot",
    ),
    "collect": Subcommand(
        "lightning_rl.extensions.remote.command.collect",
        "for a learner elsewhere:  rl-cli collect --address node0:6379 --run robot",
    ),
}
"""Subcommands of extensions, in the order of `rl-cli --help`."""

TASKS = {
    name: f"lightning_rl.extensions.tasks.{name}"
    for name in ("CartPole", "CartPoleSwingUp", "PointMass", "PushBlocks", "PushCube")
}
"""Tasks that `data.env` may name in short."""

HOOKS = {
    "check": "lightning_rl.extensions.checks.checking.check",  # RLTrainer.check
    "fsdp": "lightning_rl.extensions.fsdp.strategy.FSDP2Strategy",  # trainer.strategy
    "offline_env": "lightning_rl.extensions.datasets.offline.spaces_of_collector",  # data.offline
    "read_exported": "lightning_rl.extensions.export.weights.read_exported",  # load_policy
    "exported_policy": "lightning_rl.extensions.export.exported.ExportedPolicy",  # load_policy
    "step_together": "lightning_rl.extensions.mujoco.locomotion.step_together",  # GymnasiumEnv
    "film": "lightning_rl.extensions.videos.video.VideoRecorder",  # trainer.video
    "report_findings": "lightning_rl.extensions.checks.findings.report_findings",  # rl-cli check
}
"""Functions of extensions that the core calls, by name."""


def import_present(module: str) -> ModuleType | None:
    """Import a module; return None if it, or an extension that it needs, was left out."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if not f"{error.name}".startswith(EXTENSIONS):
            raise  # a package that the module needs
        return None


def function_at(path: str) -> Callable[..., Any]:
    """Import the function of an extension.

    Raises:
        ConfigurationError: if the extension is not part of this installation.
    """
    name, _, function = path.rpartition(".")
    module = import_present(name)
    require(module is not None, f"{name} is an extension of lightning_rl that was left out.")
    return getattr(module, function)  # type: ignore[no-any-return]  # any function
