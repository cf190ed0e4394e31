"""The closing block of a run: what was found, and the next commands."""

from pathlib import Path
from typing import Any

from lightning_rl.checkpoints.format import CONFIG_KEY, read_checkpoint
from lightning_rl.checkpoints.own import is_own, names_code
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.files import shown
from lightning_rl.training.callbacks.checkpoints import BestCheckpoint
from lightning_rl.training.callbacks.progress import return_text, why_early


def closing_lines(trainer: Any) -> list[str]:
    """Return the results of a run that has ended, the paths of its files, and the next commands."""
    run_dir, trust = shown(trainer.run_dir), _trust_needed(trainer.run_dir)
    resume = f"rl-cli fit --ckpt_path {run_dir / 'checkpoints' / 'last.ckpt'}{trust}"
    if trainer.stop_signal is not None:
        done = f"Stopped by a signal, after {trainer.lightning_module.env_steps:,} env steps."
        return [f"{done} Resume: {resume}"]
    reason, more = why_early(trainer) or ("", " --data.total_env_steps ...")
    lines = [*([reason] if reason else []), f"Run directory: {run_dir}"]
    best = run_dir / "checkpoints" / "best.ckpt"
    # A ModelCheckpoint of the user's comes first, with another metric and other files.
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, BestCheckpoint) and callback.best_model_score is not None:
            score = return_text(float(callback.best_model_score))
            lines.append(f"Best:      {callback.monitor} {score}, in {best}")
    if best.is_file():
        evaluate = f"rl-cli validate --ckpt_path {best}{trust}"
        lines.append(f"Evaluate:  {evaluate}   (--video true films it)")
    if (run_dir / "checkpoints" / "last.ckpt").is_file():
        lines.append(f"Train on:  {resume}{more}")
    logs = run_dir / "logs"
    if any(logs.glob("events.out.tfevents.*")):
        lines.append(f"Curves:    tensorboard --logdir {run_dir.parent}   (all runs there)")
    if (logs / "metrics.csv").is_file():
        lines.append(f"Numbers:   {logs / 'metrics.csv'}")
    videos = run_dir / "videos"
    if videos.is_dir():
        lines.append(f"Videos:    {videos} ({len(list(videos.glob('*.mp4')))} files)")
    return lines


def _trust_needed(run_dir: Path) -> str:
    try:
        content = read_checkpoint(run_dir / "checkpoints" / "last.ckpt", verify=False)
    except ConfigurationError:
        return ""  # `fast_dev_run` and `enable_checkpointing: false` write none
    # The commands of the closing block must work as they are printed.
    asks = names_code(str(content.get(CONFIG_KEY))) and not is_own(content)
    return " --trust_code true" if asks else ""
