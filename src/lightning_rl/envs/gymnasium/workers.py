"""Step Gymnasium envs in their own processes, and report why a process failed."""

import faulthandler
import multiprocessing.connection
import os
import pickle
import queue
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium.vector.async_vector_env
import numpy as np
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from lightning_rl.envs.gymnasium.replay import seed_globals
from lightning_rl.envs.infos import InfoReader
from lightning_rl.envs.watch import HangReporter

OF_GYMNASIUM = ("_state", "_check_spaces", "_add_info", "_raise_if_errors")
"""Private members of `AsyncVectorEnv`, next to `_async_worker`. Tested with gymnasium 1.4."""

EXIT_SECONDS = 1.0
"""Time for processes to exit before they are killed or counted as alive."""

REPORT_SECONDS = 10.0
"""Maximum time to wait for the exception of a failed env."""

STACK_SECONDS = 2.0
"""Maximum time for processes to write their stacks."""

STACK_FILE = "lightning_rl_stack"
"""Name of the memory file with a process's stack; visible in `/proc`."""

SHOW_STACK = getattr(signal, "SIGURG", None)
"""Signal by which a process writes its stack, in C, even if Python code is blocked."""


class WorkerDied(RuntimeError):  # noqa: N818  # what happened, as in `BrokenPipe`
    """The process of an env ended unexpectedly."""


class WorkerVectorEnv(AsyncVectorEnv, HangReporter):
    """Gymnasium's `AsyncVectorEnv` with clear errors and without leftover processes.

    An env's exception carries the traceback of its process as a note. If a process dies,
    `WorkerDied` names the env and the exit code. `close` also returns if an env hangs or died. Only
    the info entries that the package reads are collected, in `report` (see `envs.step_results`).
    """

    _raised: BaseException | None = None

    def __init__(
        self, env_fns: Iterable[Callable[[], Any]], name: str = "The env", **kwargs: Any
    ) -> None:
        super().__init__(list(env_fns), worker=_work, **kwargs)
        self._reader = InfoReader.of(name, self.num_envs, self.metadata)

    def reset(self, **kwargs: Any) -> Any:
        return self._guard(super().reset, **kwargs)

    def step(self, actions: Any) -> Any:
        return self._guard(super().step, actions)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        results: tuple[Any, ...] = self._guard(super().call, name, *args, **kwargs)
        return results

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        for pipe in self.parent_pipes:
            try:
                pipe.send(("close", None))
            except OSError:
                continue  # already closed, or the process died
        # A busy or hanging env cannot read this.
        patience = EXIT_SECONDS if self._state is AsyncState.DEFAULT else 0.0
        deadline = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()  # workers ignore SIGTERM
        for process, pipe in zip(self.processes, self.parent_pipes, strict=True):
            process.join()
            pipe.close()

    def hanging_envs(self, frames: Sequence[FrameType]) -> dict[int, traceback.StackSummary]:
        processes = getattr(self, "processes", [])  # missing while Gymnasium makes a dummy env
        if len(processes) < self.num_envs:
            return {}
        stacks = _stacks([process.pid for process in processes if process.pid is not None])
        return {i: stack for i, stack in enumerate(stacks) if stack is not None}

    def give_up(self) -> bool:
        for process in self.processes:
            process.kill()
        return True

    def _check_spaces(self) -> None:
        # The first call to the processes, which raises errors of construction.
        try:
            self._guard(super()._check_spaces)
        except BaseException:
            self.close()
            raise

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        if self._state is not AsyncState.WAITING_STEP:
            infos: dict[str, Any] = super()._add_info(vector_infos, env_info, env_num)
            return infos
        if "final_obs" in env_info:
            end = {"final_obs": env_info["final_obs"]}
            vector_infos = super()._add_info(vector_infos, end, env_num)
            env_info = env_info["final_info"]
        if self._reader.has_reports(env_info):
            self._reader.gather(vector_infos.setdefault("report", {}), env_info, env_num)
        return vector_infos

    def _guard(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (EOFError, OSError) as error:
            ended = None if error is self._raised or self.closed else self._who_died()
            if ended is None:
                raise
            raise WorkerDied(ended) from error

    def _who_died(self) -> str | None:
        # The pipes of a process close shortly before its end.
        sentinels = [process.sentinel for process in self.processes]
        ending = multiprocessing.connection.wait(sentinels, EXIT_SECONDS)
        for process in self.processes:
            process.join(EXIT_SECONDS if process.sentinel in ending else 0)
        dead = {i: p.exitcode for i, p in enumerate(self.processes) if not p.is_alive()}
        if not dead:
            return None
        ends = ", ".join(f"env {i} with exit code {code}" for i, code in dead.items())
        return (
            f"The processes of {len(dead)} of {self.num_envs} envs have ended: {ends}. A negative "
            "code is a signal: -9 usually means that the memory was full."
        )

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        failed = list(successes).count(False)
        if not failed:
            return
        reports = []
        with suppress(queue.Empty):  # a process may be killed before it sends its report
            for _ in range(failed):
                reports.append(self.error_queue.get(timeout=REPORT_SECONDS))
        self._state = AsyncState.DEFAULT
        if not reports:
            raise WorkerDied(f"{failed} of {self.num_envs} envs failed without reporting an error.")
        index, kind, value, trace = min(reports, key=lambda report: report[0])
        try:
            self._raised = kind(value)
        except Exception:  # its constructor needs other arguments
            self._raised = RuntimeError(f"{kind.__name__}: {value}")
        self._raised.add_note(f"In the process of env {index}:\n{trace.rstrip()}")
        raise self._raised


class _Reports:
    """Sends exceptions of an env to the learner; replaces exceptions that do not pickle.

    A queue pickles in its own thread and drops failures: the learner would wait forever.
    """

    def __init__(self, errors: Any) -> None:
        self._errors = errors

    def put(self, report: tuple[int, type[BaseException], BaseException, str]) -> None:
        index, kind, value, trace = report
        try:
            pickle.loads(pickle.dumps((kind, value)))
        except Exception:  # a custom `__reduce__` or constructor may raise anything
            lines = traceback.format_exception_only(kind, value)
            self._errors.put((index, RuntimeError, "".join(lines).strip(), trace))
        else:
            self._errors.put(report)


def _work(
    index: int,
    make_env: Callable[[], Any],
    pipe: Any,
    parent_pipe: Any,
    shared_memory: Any,
    errors: Any,
    *settings: Any,
) -> None:
    """Run Gymnasium's worker, but report every exception, also those of construction."""
    seed_globals(int(np.random.randint(2**31)), index)  # a fork copies its parent's generators
    reports = _Reports(errors)
    if hasattr(os, "memfd_create") and SHOW_STACK is not None:
        faulthandler.register(SHOW_STACK, os.memfd_create(STACK_FILE), all_threads=False)

    def make() -> Any:
        try:
            return make_env()
        except Exception as error:
            reports.put((index, type(error), error, traceback.format_exc()))
            parent_pipe.close()
            with suppress(EOFError, OSError):
                pipe.recv()  # the learner's first command
                pipe.send((None, False))
            sys.exit(1)

    _async_worker(index, make, pipe, parent_pipe, shared_memory, reports, *settings)  # type: ignore[arg-type]  # of the queue, `put` is all it uses


_OURS = (__file__, gymnasium.vector.async_vector_env.__file__)


def _stacks(pids: Sequence[int]) -> list[traceback.StackSummary | None]:
    """Return the stacks of processes within their envs; None for those that wait for a command."""
    files = [_stack_file(pid) for pid in pids]
    for pid, file in zip(pids, files, strict=True):
        if file is not None and SHOW_STACK is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, SHOW_STACK)
    deadline = time.monotonic() + STACK_SECONDS
    written = list(map(_read, files))
    while not all(map(_is_whole, written)) and time.monotonic() < deadline:
        time.sleep(0.02)
        written = list(map(_read, files))
    return list(map(_stack, written))


def _stack_file(pid: int) -> Path | None:
    with suppress(OSError):  # the process ended, or the system has no /proc
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if STACK_FILE in os.readlink(path):
                    return path
    return None


def _read(file: Path | None) -> str:
    with suppress(OSError):
        return "" if file is None else file.read_text(errors="replace")
    return ""


def _frames(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r'^ +File "(.+)", line (\d+) in (.+)\n', text, re.MULTILINE)


def _is_whole(text: str) -> bool:
    # `faulthandler` ends a stack of more than a hundred calls with three dots.
    return text.endswith("  ...\n") or any(file in _OURS for file, *_ in _frames(text))


def _stack(text: str) -> traceback.StackSummary | None:
    found = _frames(text)
    inner = []
    for file, line, name in found:
        if file in _OURS:
            break
        inner.append(traceback.FrameSummary(file, int(line), name))
    if found and all(frame.filename == multiprocessing.connection.__file__ for frame in inner):
        return None
    return traceback.StackSummary.from_list(inner[::-1])
