"""Name the directory of a run, and find the checkpoints of earlier ones."""

import re
import time
from pathlib import Path

from lightning_rl.errors import ConfigurationError, closest, require

CHECKPOINTS = "checkpoints"
ALIASES = ("last", "best")
"""What `--ckpt_path` may say instead of a path."""


def new_run_dir(output_dir: str | Path, exp_name: str) -> Path:
    """Return a path `output_dir/exp_name_YYYYmmdd_HHMMSS[_n]` that does not exist yet.

    Raises:
        ConfigurationError: for a name that would lead elsewhere.
    """
    require(
        Path(exp_name).name == exp_name,
        f"exp_name must be a plain name, got '{exp_name}'; set --output_dir to write elsewhere.",
    )
    base = Path(output_dir) / f"{exp_name}_{time.strftime('%Y%m%d_%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}_{number}")
    return path


def run_dir_of(checkpoint: str | Path) -> Path | None:
    """Return the run directory that a checkpoint lies in, or None if it lies elsewhere."""
    parent = Path(checkpoint).absolute().parent
    return (
        parent.parent
        if parent.name == CHECKPOINTS and (parent.parent / "config.yaml").is_file()
        else None
    )


def find_checkpoint(spec: str, output_dir: str | Path, exp_name: str | None = None) -> Path:
    """Turn what `--ckpt_path` says into the path of a file.

    Args:
        spec: a checkpoint, a run directory (then its last checkpoint), or `last` or `best` of the
            newest run.
        output_dir: where runs are looked for.
        exp_name: consider only the runs of this name; None for all.

    Raises:
        ConfigurationError: where there is no such file, saying what there is.
    """
    if spec not in ALIASES:
        path = Path(spec)
        path = path / CHECKPOINTS / "last.ckpt" if path.is_dir() else path
        if not path.is_file():
            near = [p.name for p in path.parent.glob("*.ckpt")] if path.parent.is_dir() else []
            there = f"; there is {', '.join(sorted(near))}" if near else ""
            raise ConfigurationError(
                f"No checkpoint at {path}{there}{closest(spec, ALIASES)}. Give a .ckpt file, a run "
                "directory, last or best."
            )
        return path
    found = [
        p
        for p in Path(output_dir).glob(f"*/{CHECKPOINTS}/{spec}.ckpt")
        if _is_run(p.parent.parent.name, exp_name)
    ]
    if not found:
        whose = f"of '{exp_name}' " if exp_name else ""
        raise ConfigurationError(
            f"No run {whose}with a checkpoint {spec}.ckpt in '{output_dir}'. Train one first, or "
            "set --output_dir, "
            "--exp_name or the path of a checkpoint."
        )
    return max(found, key=lambda p: p.stat().st_mtime)


def _is_run(directory: str, exp_name: str | None) -> bool:
    name = re.escape(exp_name) if exp_name else ".+"
    return re.fullmatch(rf"{name}_\d{{8}}_\d{{6}}(_\d+)?", directory) is not None
