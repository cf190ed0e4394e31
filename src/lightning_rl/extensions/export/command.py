"""Run `rl-cli export`: write a checkpoint's policy for machines without this package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_rl import ConfigurationError, Policy
from lightning_rl.extend.checkpoints import load_trained
from lightning_rl.extend.cli import NEEDED, CommandLine, Option, parse_options
from lightning_rl.extend.errors import require
from lightning_rl.extend.files import expanded, shown, tell
from lightning_rl.extensions.export.formats import (
    SUFFIXES,
    Exported,
    Format,
    export_policy,
    lerobot_policy,
)
from lightning_rl.extensions.export.graph import is_in_graphs, ports_of, why_not_traced
from lightning_rl.extensions.export.metadata import directory_of, metadata_of
from lightning_rl.extensions.export.parity import Dtype
from lightning_rl.extensions.export.weights import construction_of

OPTIONS = {
    "ckpt_path": Option(str, NEEDED, "a checkpoint, a run directory, or last or best"),
    "format": Option(
        Format,
        "onnx",
        "onnx for onnxruntime, torch for torch.export, safetensors for load_policy, or lerobot",
    ),
    "path": Option(str, None, "path of the file. Default: in export/ of the run's directory"),
    "dtype": Option(Dtype, "float32", "type of the weights in ONNX; float16 for half the size"),
    **Option.of_checkpoint("ckpt_path"),
}
DESCRIPTION = "Write the policy of a checkpoint to a file for deployment."

CURE = "Add --trust_code true if you trust its source."
"""Cure if a checkpoint names third-party code."""


def export(options: Sequence[str], command_line: CommandLine) -> None:
    """Export a policy, and print the paths of the files."""
    settings = parse_options("export", DESCRIPTION, OPTIONS, options)
    require(
        settings.format == "onnx" or settings.dtype == "float32",
        f"--dtype {settings.dtype} is for --format onnx, not for {settings.format}: remove it.",
    )
    trained = load_trained(
        settings.ckpt_path,
        trust_code=settings.trust_code,
        output_dir=settings.output_dir,
        cure=CURE,
    )
    run, kind = trained.run, settings.format
    path = _path_of(trained.policy, run.path, settings)
    if kind == "lerobot":  # checked before an env is built
        lerobot_policy(trained.policy)
    elif kind != "safetensors":
        reason = why_not_traced(trained.policy)
        require(reason is None, str(reason))
    ports = ports_of(trained.policy)
    # An env may need a machine or a package that is not here; then only its metadata is missing.
    env, why_none = None, ""
    try:
        env = trained.env()
    except ConfigurationError as error:
        why_none = str(error)
    try:
        metadata = metadata_of(trained.policy, ports, run.path, run.content, run.settings, env)
    finally:
        if env is not None:
            env.close()
    if kind in ("onnx", "torch") and trained.policy.autocast_dtype is not None:
        tell("The run acted in bfloat16, but the exported graph computes in float32.")
    if env is None:
        tell(
            "The export has no env metadata (control period, joints), because the env is not "
            f"available: {why_none}"
        )
    construction = construction_of(run.kept_state, run.settings)
    done = export_policy(
        trained.policy,
        ports,
        kind,
        path,
        metadata,
        construction,
        # The export is read with the trust that the user gave to its checkpoint.
        lambda file: load_trained(file, trust_code=run.trusted).policy,
        settings.dtype,
    )
    tell("\n".join(_summary(done)))


def _path_of(policy: Policy, checkpoint: Path, settings: Any) -> Path:
    kind = settings.format
    in_graphs = kind == "onnx" and is_in_graphs(policy)
    suffix = ".graphs" if in_graphs else SUFFIXES[kind]
    if settings.path is None:
        return shown(directory_of(checkpoint) / "export" / f"{checkpoint.stem}{suffix}")
    path = expanded(settings.path)
    require(
        path.suffix == suffix or in_graphs or kind == "lerobot",  # a directory may have any name
        f"--path {settings.path} does not end with {suffix}, as a file of --format {kind} does.",
    )
    return path


def _summary(done: Exported) -> list[str]:
    report = done.report
    assert report is not None
    # Choices have no distance, but a share that is equal.
    parts = [
        f"{name}: largest difference {part['largest_difference']:.2g}"
        if "largest_difference" in part
        else f"{name}: {part['equal']:.1%} equal choices"
        for name, part in report["actions"].items()
    ]
    times = [f"{n} {part['milliseconds']:.1f} ms" for n, part in report.get("graphs", {}).items()]
    graphs = [f"Graphs:  {', '.join(times)} per chunk; load_policy opens the directory"]
    return [
        f"Policy:  {done.files[0]}",
        *(f"Also:    {file}" for file in done.files[1:]),
        f"Parity:  {report['observations']:,} observations, {', '.join(parts)}",
        *(graphs if times else []),
    ]
