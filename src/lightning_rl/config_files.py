"""Find the configs that travel with the package."""

from pathlib import Path

from lightning_rl.errors import ConfigurationError, closest


def find_config(name: str) -> Path:
    """Return the file that a name means: one that exists, or a shipped one.

    Raises:
        ConfigurationError: where there is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_configs()
    if name in shipped:
        return shipped[name]
    raise ConfigurationError(
        f"No config '{name}': there is no such file, and the shipped ones are "
        f"{', '.join(shipped)}{closest(name, shipped)}."
    )


def shipped_configs() -> dict[str, Path]:
    """Return the shipped configs by name.

    They lie inside the installed package, or beside `src` in a checkout.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "configs", here.parents[1] / "configs"):
        if folder.is_dir():
            return {path.name: path for path in sorted(folder.glob("*.yaml"))}
    return {}
