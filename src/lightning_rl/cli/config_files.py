"""Find the configs that travel with the package."""

from pathlib import Path

from lightning_rl.cli.parsing import UsageError
from lightning_rl.system.errors import closest
from lightning_rl.system.files import expanded


def find_config(name: str) -> Path:
    """Return the file that a name means: one that exists, or a shipped one.

    Raises:
        UsageError: where there is neither.
    """
    path = expanded(name)
    if path.is_file():
        return path
    shipped = shipped_configs() | shipped_parts()
    if name in shipped:
        return shipped[name]
    raise UsageError(
        f"No config '{name}': there is no such file, and the shipped ones are "
        f"{', '.join(shipped)}{closest(name, shipped)}."
    )


def shipped_parts() -> dict[str, Path]:
    """Return what is shipped to be added to a config, by name, such as `trainer/ddp.yaml`."""
    return _named("trainer/*.yaml")


def shipped_configs() -> dict[str, Path]:
    """Return the shipped configs by name, each of which is a run: `ppo.yaml`, `tuned/...`."""
    return _named("*.yaml") | _named("tuned/*.yaml")


def _named(pattern: str) -> dict[str, Path]:
    folder = _folder()
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.glob(pattern))}


def _folder() -> Path:
    """Return where they lie: inside the installed package, or beside `src` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parents[1] / "configs"
