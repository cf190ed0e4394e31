"""Step Gymnasium envs in their own processes, and report why a process failed."""

import faulthandler
import multiprocessing.connection
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, async_vector_env
from gymnasium.vector.async_vector_env import AsyncState, _async_worker

from lightning_rl.envs.gymnasium.replay import seed_globals
from lightning_rl.envs.hanging import waiting_for
from lightning_rl.envs.infos import InfoReader
from lightning_rl.system.process import exit_of_env
from lightning_rl.system.signals import STOPS, handle_signals

OF_GYMNASIUM = ("_state", "_check_spaces", "_add_info", "_raise_if_errors")
"""Private members of `AsyncVectorEnv`, next to `_async_worker`. Tested with gymnasium 1.4."""

EXIT_SECONDS = 1.0
"""Time for processes to exit before they are killed or counted as alive."""

REPORT_SECONDS = 10.0
"""Maximum time to wait for the exception of a failed env."""

STACK_SECONDS = 1.0
"""Maximum time for a process to write its stack."""

SHOW_STACK = signal.SIGURG
"""Signal by which a process writes its stack, in C, even if Python code is blocked."""

IDLE = f'in recv\n  File "{async_vector_env.__file__}"'
"""Part of the stack of a process that waits for a command."""

LEARNER_SECONDS = 1.0
"""Period in which a process looks whether the learner lives."""


class WorkerDied(RuntimeError):  # noqa: N818  # what happened, as in `BrokenPipe`
    """The process of an env ended unexpectedly."""


class WorkerVectorEnv(AsyncVectorEnv):
    """Gymnasium's `AsyncVectorEnv` with clear errors and without leftover processes.

    An env's exception carries the traceback of its process as a note. If a process dies,
    `WorkerDied` names the env and the exit code. `close` also returns if an env hangs or died. Only
    the info entries that the package reads are collected, in `report` (see `envs.step_results`).
    The processes that an env starts end with its process, which ends with the learner.
    """

    _raised: BaseException | None = None

    def __init__(
        self, env_fns: Iterable[Callable[[], Any]], name: str = "The env", **kwargs: Any
    ) -> None:
        descriptor, path = tempfile.mkstemp()
        self._stacks = os.fdopen(descriptor)
        try:  # daemons may start no processes
            super().__init__(list(env_fns), worker=partial(_work, path), daemon=False, **kwargs)
        finally:
            os.unlink(path)  # the processes have opened it
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
        self.kill()
        for process, pipe in zip(self.processes, self.parent_pipes, strict=True):
            process.join()
            pipe.close()
        self._stacks.close()

    def stacks(self) -> str:
        return "".join(
            f"In the process of env {i}:\n{stack}"
            for i, process in enumerate(self.processes)
            if (stack := self._stack_of(process)) and IDLE not in stack
        )

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            with suppress(ProcessLookupError, PermissionError):  # no process is left
                os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it was started

    def _stack_of(self, process: Any) -> str:
        begin, deadline = self._stacks.seek(0, os.SEEK_END), time.monotonic() + STACK_SECONDS
        text = ""
        with suppress(ProcessLookupError):
            os.kill(process.pid, SHOW_STACK)
        while async_vector_env.__file__ not in text and time.monotonic() < deadline:
            time.sleep(0.01)
            self._stacks.seek(begin)
            text = self._stacks.read()
        return text

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
        if self._state is not AsyncState.WAITING_STEP:  # a reset
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
            with waiting_for(self):  # so that `EnvWatch` can kill the processes
                return function(*args, **kwargs)
        except (EOFError, OSError) as error:
            message = None if error is self._raised or self.closed else self._who_died()
            if message is None:
                raise
            raise WorkerDied(message) from error

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
        self._state = AsyncState.DEFAULT  # so that `close` may wait for the other envs
        if not reports:
            raise WorkerDied(f"{failed} of {self.num_envs} envs failed without reporting an error.")
        # The first env, for equal messages in equal runs.
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
    stacks: str,
    index: int,
    make_env: Callable[[], Any],
    pipe: Any,
    parent_pipe: Any,
    shared_memory: Any,
    errors: Any,
    *settings: Any,
) -> None:
    """Run Gymnasium's worker in a process group, and report every exception of the env."""
    os.setpgid(0, 0)  # `kill` ends the group, with what the env has started
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # Only the learner stops workers, not a signal to all processes of a job.
    handle_signals(STOPS, lambda *_: None)
    # A process that the env forks would keep the pipe open after the end of this one.
    os.register_at_fork(after_in_child=pipe.close)
    seed_globals(int(np.random.randint(2**31)), index)  # a fork copies its parent's generators
    torch.set_num_threads(1)  # a fork waits for ever for the learner's threads, which it lacks
    faulthandler.register(SHOW_STACK, open(stacks, "a"), all_threads=False)  # noqa: SIM115
    reports = _Reports(errors)

    def fail(error: BaseException) -> None:
        if isinstance(error, SystemExit):
            error = exit_of_env(f"Env {index}", error)
        reports.put((index, type(error), error, traceback.format_exc()))
        with suppress(EOFError, OSError):
            pipe.send((None, False))
            pipe.recv()  # the learner's next command

    try:
        env = make_env()
    except (Exception, SystemExit) as error:
        parent_pipe.close()
        fail(error)
        return
    try:
        _async_worker(index, lambda: env, pipe, parent_pipe, shared_memory, reports, *settings)  # type: ignore[arg-type]  # of the queue, `put` is all it uses
    except SystemExit as error:
        fail(error)
    except BrokenPipeError:  # the learner is gone
        os.killpg(0, signal.SIGKILL)


def _end_with_parent(parent: int) -> None:
    """End this process, and those that its env has started, when the learner is gone."""
    while os.getppid() == parent:
        time.sleep(LEARNER_SECONDS)
    os.killpg(0, signal.SIGKILL)
