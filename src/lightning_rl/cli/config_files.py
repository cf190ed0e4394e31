"""Find the shipped configs."""

from pathlib import Path

from lightning_rl.cli.parsing import UsageError
from lightning_rl.system.errors import closest
from lightning_rl.system.files import expanded


def find_config(name: str) -> Path:
    """Return the file with this path, or the shipped config with this name."""
    path = expanded(name)
    # A user's file before a shipped one of the same name.
    if path.is_file():
        return path
    shipped = shipped_configs() | shipped_parts()
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        raise UsageError(
            f"--config {name} is a directory: name a file in it, or write --ckpt_path {name} if it "
            "is a run."
        )
    raise UsageError(
        f"No config '{name}': there is no such file, and the shipped ones are "
        f"{', '.join(shipped)}{closest(name, shipped)}."
    )


def shipped_parts() -> dict[str, Path]:
    """Return the shipped additions to a config by name, such as `trainer/ddp.yaml`."""
    return _named("trainer/*.yaml")


def shipped_configs() -> dict[str, Path]:
    """Return the shipped configs of whole runs by name: `ppo.yaml`, `tuned/...`."""
    return _named("*.yaml") | _named("tuned/*.yaml")


def _named(pattern: str) -> dict[str, Path]:
    folder = _folder()
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.glob(pattern))}


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    # An installed package holds the configs; in a checkout they lie next to `src`.
    inside = package / "configs"
    return inside if inside.is_dir() else package.parents[1] / "configs"
