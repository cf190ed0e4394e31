"""Find the checkpoints of earlier runs; without torch, so that a wrong path is reported soon."""

import re
from pathlib import Path

from lightning_rl.system.errors import ConfigurationError, closest
from lightning_rl.system.files import expanded

CHECKPOINTS = "checkpoints"
ALIASES = ("last", "best")
"""Values of `--ckpt_path` that are not paths."""


def run_dir_of(checkpoint: str | Path) -> Path | None:
    """Return the run directory of a checkpoint, or None."""
    parent = Path(checkpoint).absolute().parent
    return (
        parent.parent
        if parent.name == CHECKPOINTS and (parent.parent / "config.yaml").is_file()
        else None
    )


def find_checkpoint(spec: str, output_dir: str | Path, exp_name: str | None = None) -> Path:
    """Resolve the value of `--ckpt_path` to the path of a file.

    `spec` is a checkpoint, a run directory (its last checkpoint), or `last` or `best` of the newest
    run named `exp_name` (default: any run) in `output_dir`.
    """
    if spec not in ALIASES:
        path = expanded(spec)
        # A run directory stands for its last checkpoint.
        path = path / CHECKPOINTS / "last.ckpt" if path.is_dir() else path
        if not path.is_file():
            near = [p.name for p in path.parent.glob("*.ckpt")] if path.parent.is_dir() else []
            offer = f"; there is {', '.join(sorted(near))}" if near else ""
            raise ConfigurationError(
                f"No checkpoint at {path}{offer}{closest(spec, ALIASES)}. Give a .ckpt file, a run "
                "directory, last or best."
            )
        return path
    paths = [
        p
        for p in expanded(output_dir).glob(f"*/{CHECKPOINTS}/{spec}.ckpt")
        # Only names that `new_run_dir` gives.
        if _is_run(p.parent.parent.name, exp_name)
    ]
    if not paths:
        owner = f"of '{exp_name}' " if exp_name else ""
        raise ConfigurationError(
            f"No run {owner}with a checkpoint {spec}.ckpt in '{output_dir}'. Train one first, or "
            "set --output_dir, "
            "--exp_name or the path of a checkpoint."
        )
    return max(paths, key=lambda p: p.stat().st_mtime)


def _is_run(directory: str, exp_name: str | None) -> bool:
    name = re.escape(exp_name) if exp_name else ".+"
    return re.fullmatch(rf"{name}_\d{{8}}_\d{{6}}(_\d+)?", directory) is not None
