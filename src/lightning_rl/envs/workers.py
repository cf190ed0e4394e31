"""Step Gymnasium envs in processes of their own, and say what became of one that failed."""

import multiprocessing.connection
import time
from collections.abc import Callable, Iterable
from typing import Any

from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from lightning_rl.envs.infos import gather, says_something

EXIT_SECONDS = 1.0
"""How long processes may take to end before they are killed, or to have ended before they count."""


class WorkerDied(RuntimeError):  # noqa: N818  # what happened, as in `BrokenPipe`
    """The process of an env ended without being asked to."""


class WorkerVectorEnv(AsyncVectorEnv):
    """Gymnasium's `AsyncVectorEnv`, whose failures tell their cause and leave no process behind.

    An exception in an env carries the traceback from its process as a note; the death of a process
    raises `WorkerDied`, which names the env and the exit code; and `close` returns also where an
    env hangs, or has died. Of the infos of a step only what is read is gathered, as `said` (see
    `envs.infos`), of a finished env from the end of its episode.
    """

    _raised: BaseException | None = None

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode in every env."""
        return self._guard(super().reset, **kwargs)

    def step(self, actions: Any) -> Any:
        """Step every env."""
        return self._guard(super().step, actions)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env."""
        results: tuple[Any, ...] = self._guard(super().call, name, *args, **kwargs)
        return results

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the processes; those that are in the middle of something are killed."""
        for pipe in self.parent_pipes:
            try:
                pipe.send(("close", None))
            except OSError:
                continue  # closed already, or its process has died
        # An env that is stepping or hangs cannot read this.
        patience = EXIT_SECONDS if self._state is AsyncState.DEFAULT else 0.0
        deadline = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()  # not terminate: workers leave SIGTERM to the learner
        for process, pipe in zip(self.processes, self.parent_pipes, strict=True):
            process.join()
            pipe.close()

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        """Add what an env said of a step; all that it said where it is a reset."""
        if self._state is not AsyncState.WAITING_STEP:
            infos: dict[str, Any] = super()._add_info(vector_infos, env_info, env_num)
            return infos
        if "final_obs" in env_info:
            end = {"final_obs": env_info["final_obs"]}
            vector_infos = super()._add_info(vector_infos, end, env_num)
            env_info = env_info["final_info"]
        if says_something(env_info):
            gather(vector_infos.setdefault("said", {}), env_info, env_num, self.num_envs)
        return vector_infos

    def _guard(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that talks to the processes; explain the death of one."""
        try:
            return function(*args, **kwargs)
        except (EOFError, OSError) as error:
            ended = None if error is self._raised or self.closed else self._who_died()
            if ended is None:
                raise
            raise WorkerDied(ended) from error

    def _who_died(self) -> str | None:
        """Say which processes have ended, and how; None where all are alive."""
        # The pipes of a process close a little before it has ended.
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
            "code is a signal: -9 is what a machine out of memory sends."
        )

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Raise the exception of an env, with the traceback from its process as a note."""
        failed = list(successes).count(False)
        if not failed:
            return
        index, kind, value, trace = min(
            (self.error_queue.get() for _ in range(failed)), key=lambda report: report[0]
        )
        self._state = AsyncState.DEFAULT
        try:
            self._raised = kind(value)
        except TypeError:  # its constructor wants something else
            self._raised = RuntimeError(f"{kind.__name__}: {value}")
        self._raised.add_note(f"In the process of env {index}:\n{trace.rstrip()}")
        raise self._raised
