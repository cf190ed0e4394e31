"""Modules at their places of earlier versions: imports of extensions from there keep working."""

from pathlib import Path

from lightning_rl.system.lazy import add_module, names_of

OURS = "lightning_rl"

PACKAGES = {
    "audit": "checks",
    "datasets": "datasets",
    "deploy.export": "export",
    "envs.managers": "managers",
    "envs.mujoco": "mujoco",
    "envs.people": "teleoperation",
    "envs.tasks": "tasks",
    "envs.wrappers": "wrappers",
    "extensions.audit": "checks",
    "extensions.people": "teleoperation",
    "policies.lerobot": "vla.lerobot",
    "policies.vla": "vla",
    "reports": "reports",
    "robots": "robots",
    "sweeps": "sweeps",
}
"""Extensions that were packages of their own, by their earlier places."""

MODULES = {
    "algorithms": {
        "algorithms": "apg behavior_cloning gripper_sac iql noise_sac reward_classifier shac",
        "recap": "value_fit",
    },
    "buffers": {"algorithms": "hindsight"},
    "collectors": {"datasets": "ahead", "remote": "ray"},
    "envs": {"tasks": "probes"},
    "envs.gymnasium": {"simulators": "envpool_env"},
    "envs.people": {"tasks": "gym_hil"},
    "envs.torch": {"simulators": "rsl_rl_env tensor_simulator"},
    "envs.wrappers": {"vla": "vla_observation"},
    "functional": {"mujoco": "rotations"},
    "policies": {
        "algorithms": "frozen gripper residual steering teacher",
        "recap": "conditioned",
        "vla": "statistics",
    },
    "policies.networks": {"vla": "resnet"},
    "training.callbacks": {"videos": "film video"},
    "system": {"fsdp": "strategy"},
}
"""Modules of extensions, by their earlier packages and by extension."""


def add_moved_modules() -> None:
    """Add the modules of earlier versions to `sys.modules`; nothing is imported."""
    extensions = Path(__file__).parents[1] / "extensions"
    for earlier, extension in PACKAGES.items():
        _add(earlier, extension)
        for file in (extensions / extension.replace(".", "/")).glob("[!_]*.py"):
            _add(f"{earlier}.{file.stem}", f"{extension}.{file.stem}")
    for package, names in MODULES.items():
        for extension, modules in names.items():
            for module in modules.split():
                _add(f"{package}.{module}", f"{extension}.{module}")


def _add(earlier: str, extension: str) -> None:
    add_module(f"{OURS}.{earlier}", names_of(f"{OURS}.extensions.{extension}"))
