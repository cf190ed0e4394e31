"""Write metrics over env steps, to TensorBoard and to a CSV file."""

import csv
import io
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from lightning_rl.algorithms import Algorithm
from lightning_rl.system.errors import WriteError
from lightning_rl.system.files import check_still_there, write_atomically, writing
from lightning_rl.system.lightning_private import forget_writer, has_writer, purge_from
from lightning_rl.system.plain_yaml import dump_yaml

# Import TensorBoard at its first use: the import takes 0.1 s, and some processes do not need it.

OF_SETTINGS = ".settings"
"""Suffix of the event file that holds only the settings of a run."""


class EnvStepLogger(Logger):
    """A logger with env steps on the x-axis, also for callbacks that count iterations.

    A resumed run removes the entries that the interrupted run logged after the checkpoint.
    """

    module: Algorithm | None = None

    def env_steps(self, step: int | None) -> int:
        """Return the current env steps; before the run, return `step`."""
        return (step or 0) if self.module is None else self.module.env_steps

    @abstractmethod
    def purge_after(self, env_steps: int) -> None:
        """Remove the entries after this number of env steps."""


class EnvStepTensorBoard(TensorBoardLogger, EnvStepLogger):
    """Writes TensorBoard event files; write errors are raised as `WriteError` by a later call."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if not has_writer(self):
            from lightning_rl.system.tensorboard_private import leave_errors_to_the_caller

            leave_errors_to_the_caller()
        with writing(self.log_dir):
            return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write scalars as one event, because SummaryWriter wakes its thread for each scalar."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(x)) for name, x in metrics.items()]
        self._write(Summary(value=values), step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        # The settings have their own event file, which a resumed run replaces, because TensorBoard
        # shows the first row of a run. Write no `Experiment`: with it, TensorBoard would use one
        # run's columns for all runs.
        from torch.utils.tensorboard import FileWriter
        from torch.utils.tensorboard.summary import hparams, text

        directory = Path(self.log_dir)
        content = dump_yaml(params).encode()
        write_atomically(directory / self.NAME_HPARAMS_FILE, lambda file: file.write(content))
        replaced = list(directory.glob(f"events.out.tfevents.*{OF_SETTINGS}"))
        flat_settings = dict(_flat(params))
        _, session, _ = hparams(flat_settings, {})
        lines = "\n".join(f"    {name}: {value}" for name, value in flat_settings.items())
        # TensorBoard reads files in the order of their names: continue the curves in a later file.
        self._close()
        with writing(directory):
            writer = FileWriter(str(directory), filename_suffix=OF_SETTINGS)
            for summary in (session, text("config", lines)):
                writer.add_summary(summary, 0)
            writer.close()
        for old in replaced:
            old.unlink()

    @rank_zero_only
    def log_animation(self, tag: str, gif: bytes, height: int, width: int, env_steps: int) -> None:
        """Add an animated GIF to the images."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        with writing(self.log_dir):
            self.experiment.file_writer.add_summary(
                Summary(value=[Summary.Value(tag=tag, image=image)]), env_steps
            )

    def purge_after(self, env_steps: int) -> None:
        self._close()  # Lightning opened a writer before it read the checkpoint
        purge_from(self, env_steps + 1)

    def _close(self) -> None:
        self.finalize("success")
        forget_writer(self)

    @rank_zero_only
    def save(self) -> None:
        if has_writer(self):
            with writing(self.log_dir):
                self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        try:
            with writing(self.log_dir):
                super().finalize(status)
        except WriteError:
            if status != "failed":
                raise

    def _write(self, summary: Any, step: int | None = None) -> None:
        with writing(self.log_dir):
            self.experiment.file_writer.add_summary(summary, self.env_steps(step))


class EnvStepCSV(EnvStepLogger):
    """A CSV table with one row per number of env steps; missing values are empty cells.

    A row is written immediately, and rewritten if more metrics of the same env steps follow. A new
    metric adds a column, for which the file is rewritten. (Lightning's logger rewrites it for each
    row.)

    Args:
        path: the file; existing rows are kept, up to the checkpoint that a run resumes from.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file: IO[bytes] | None = None
        self._columns: list[str] = []
        self._last_row: dict[str, Any] = {}
        self._last_row_at = 0

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Append a row, or extend the last row if its env steps are equal."""
        row = {"env_steps": self.env_steps(step), **metrics}
        new = [name for name in row if name not in self._columns]
        if self._file is None or new:
            self._open(new=new)
        assert self._file is not None
        check_still_there(self.path.parent)
        if self._last_row and int(self._last_row["env_steps"]) == row["env_steps"]:
            row = self._last_row | row
            # Overwrite without truncating first, so that a kill does not lose the row.
            self._file.seek(self._last_row_at)
        self._last_row, self._last_row_at = row, self._file.tell()
        with writing(self.path):
            self._file.write(self._line(row))
            self._file.truncate()  # flushes, then removes the rest of a longer row

    @rank_zero_only
    def purge_after(self, env_steps: int) -> None:
        self._open(last=env_steps)

    def finalize(self, status: str) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            # `close` writes again after a failed flush, which has raised its error.
            with suppress(OSError):
                file.close()

    def _open(self, new: Iterable[str] = (), last: int | None = None) -> None:
        self.finalize("")
        header = [name for row in islice(_rows(self.path), 1) for name in row]
        self._columns = list(dict.fromkeys([*header, *self._columns, *new]))
        self._last_row = {}

        def copy(file: IO[bytes]) -> None:
            file.write(self._line({name: name for name in self._columns}))
            for row in _rows(self.path):
                if last is None or int(row["env_steps"]) <= last:
                    self._last_row, self._last_row_at = row, file.tell()
                    file.write(self._line(row))

        write_atomically(self.path, copy)
        self._file = self.path.open("r+b")
        self._file.seek(0, io.SEEK_END)

    def _line(self, row: dict[str, Any]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, restval="").writerow(row)
        return text.getvalue().encode()


def _rows(path: Path) -> Iterator[dict[str, str]]:
    if path.exists():
        with path.open(newline="") as file:
            yield from csv.DictReader(line for line in file if line.endswith("\n"))


def _flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value if isinstance(value, int | float | str) else str(value)
