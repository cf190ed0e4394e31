"""Write metrics to TensorBoard and to a CSV file, over env steps."""

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

# TensorBoard is imported where it is used: that takes a tenth of a second, and not every process
# writes to it.

OF_SETTINGS = ".settings"
"""How the name of the event file ends that holds nothing but the settings of a run."""


class EnvStepLogger(Logger):
    """A logger with env steps as the x-axis, also of callbacks that count iterations.

    A resumed run drops what an interrupted one wrote after the checkpoint.
    """

    module: Algorithm | None = None

    def env_steps(self, step: int | None) -> int:
        """Return the env steps of the moment; before a run begins, what was passed as a step."""
        return (step or 0) if self.module is None else self.module.env_steps

    @abstractmethod
    def purge_after(self, env_steps: int) -> None:
        """Forget what was logged after a number of env steps."""


class EnvStepTensorBoard(TensorBoardLogger, EnvStepLogger):
    """TensorBoard's event files.

    A thread of TensorBoard's writes them. What the system refuses it comes out of a later call, as
    `WriteError`.
    """

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer, opened when first asked for."""
        if not has_writer(self):
            from lightning_rl.system.tensorboard_private import leave_errors_to_the_caller

            leave_errors_to_the_caller()
        with writing(self.log_dir):
            return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Write scalars at the env steps of the moment, as one event.

        SummaryWriter makes an event of each scalar, and each wakes the thread that writes them.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(x)) for name, x in metrics.items()]
        self._write(Summary(value=values), step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write settings, a dict that may be nested: `hparams.yaml`, a row of HPARAMS, and a text.

        They stand in an event file of their own, which a resumed run replaces: of a run's rows
        TensorBoard shows the first that it reads. No `Experiment` is written: TensorBoard would
        take the columns of all runs from that of one of them; without any it takes them all.
        """
        from torch.utils.tensorboard import FileWriter
        from torch.utils.tensorboard.summary import hparams, text

        directory = Path(self.log_dir)
        content = dump_yaml(params).encode()
        write_atomically(directory / self.NAME_HPARAMS_FILE, lambda file: file.write(content))
        replaced = list(directory.glob(f"events.out.tfevents.*{OF_SETTINGS}"))
        plain = dict(_flat(params))
        _, session, _ = hparams(plain, {})
        lines = "\n".join(f"    {name}: {value}" for name, value in plain.items())
        # TensorBoard reads files by name, one after the other: the curves go on in a later one.
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
        """Show an animated GIF among the images."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
        with writing(self.log_dir):
            self.experiment.file_writer.add_summary(
                Summary(value=[Summary.Value(tag=tag, image=image)]), env_steps
            )

    def purge_after(self, env_steps: int) -> None:
        """Have TensorBoard forget what was logged after a number of env steps.

        Lightning has opened a writer before the checkpoint was read; another one takes its place.
        """
        self._close()
        purge_from(self, env_steps + 1)

    def _close(self) -> None:
        """Close the event file. What is written next begins another one."""
        self.finalize("success")
        forget_writer(self)

    @rank_zero_only
    def save(self) -> None:
        """Flush. Lightning's own also writes `hparams.yaml`, before there is anything to say."""
        if has_writer(self):
            with writing(self.log_dir):
                self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the files; what has failed already is not said again."""
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
    """A table, one row for each number of env steps; cells are empty where a row has no value.

    A row is written at once, and again, longer, when more is said of the same env steps, as by the
    evaluation at the end of an epoch. A metric that was not there before is a new column, for which
    the file is written anew: a handful of times in a run. (Lightning's own does so with each row.)

    Args:
        path: of the file. What is in it is kept, up to the checkpoint that a run resumes from.
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

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Leave them to `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Append a row, or add to the last one where it is of the same env steps."""
        row = {"env_steps": self.env_steps(step), **metrics}
        new = [name for name in row if name not in self._columns]
        if self._file is None or new:
            self._open(new=new)
        assert self._file is not None
        check_still_there(self.path.parent)
        if self._last_row and int(self._last_row["env_steps"]) == row["env_steps"]:
            row = self._last_row | row
            # Written over, not cut off first: a kill in between must not lose it.
            self._file.seek(self._last_row_at)
        self._last_row, self._last_row_at = row, self._file.tell()
        with writing(self.path):
            self._file.write(self._line(row))
            self._file.truncate()  # flushes, then cuts what a longer row has left

    @rank_zero_only
    def purge_after(self, env_steps: int) -> None:
        """Drop the rows after a number of env steps."""
        self._open(last=env_steps)

    def finalize(self, status: str) -> None:
        """Close the file. A later row opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            # It writes what a flush could not; that has said why.
            with suppress(OSError):
                file.close()

    def _open(self, new: Iterable[str] = (), last: int | None = None) -> None:
        """Write the file anew, with more columns or fewer rows, and open it to add to it."""
        self.finalize("")
        there = [name for row in islice(_rows(self.path), 1) for name in row]
        self._columns = list(dict.fromkeys([*there, *self._columns, *new]))
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
    """Read a table, less a last line that a kill has cut short."""
    if path.exists():
        with path.open(newline="") as file:
            yield from csv.DictReader(line for line in file if line.endswith("\n"))


def _flat(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield the leaves of nested dicts under dotted names."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value if isinstance(value, int | float | str) else str(value)
