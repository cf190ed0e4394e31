"""Run the trials of a sweep on the nodes of a Ray cluster, none of which outlives it."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from lightning_rl.collectors.ray_cluster import (
    Connection,
    Member,
    check_answers,
    refuse_without_ray,
    versions,
)
from lightning_rl.sweeps.trial_node import Order, Outcome, TrialActor
from lightning_rl.sweeps.trials import RunningTrial, usable_cores
from lightning_rl.system.errors import require

LOCAL = "local"
"""The address by which Ray is started on this machine."""

MARK = ".seen-by-all-"
"""How the names of files begin that nodes look for."""

ROOM_SECONDS = 5.0
"""Between two looks at how many trials the nodes have room for."""

SEEN_SECONDS = 90.0
"""How long a file that a node has written may take to be seen here; NFS says 60 s."""

KILL_SECONDS = 5.0
"""How long a node may take to kill a trial with all that it has begun, before Ray kills it."""

STORE_BYTES = 2**27
"""Of Ray's object store on this machine, which holds messages of some lines."""

SWEEP = Member("sweep", "by rl-cli sweep --resume last")
"""What the process that runs a sweep is in a cluster."""


class RayTrials:
    """Nodes of a Ray cluster, on which trials wait for room; see `Place`.

    Args:
        address: of a running cluster, `host:port`, or `local` to start one on this machine.
        jobs: trials at a time; None for as many as the nodes have room for, also those that join
            or end on the way.
        cores: CPUs that Ray keeps for each of them; 0 for none.
        gpus: GPUs likewise, or a share of one.

    Raises:
        ConfigurationError: where Ray is not installed, or nobody answers at the address.
    """

    def __init__(self, address: str, jobs: int | None, cores: int, gpus: float) -> None:
        refuse_without_ray("sweep.address")
        head = None if address == LOCAL else address
        if head is not None:
            check_answers(head)
        self._head, self._jobs, self._cores, self._gpus = head, jobs, cores, gpus
        self._connection = Connection(head, SWEEP)
        self._mark: Path | None = None
        self._left = threading.Event()

    @property
    def jobs(self) -> int:
        """How many trials may run, or wait for room, at present."""
        return self._jobs or max(1, self._room)

    @property
    def words(self) -> str:
        """What it is, as a sentence goes on."""
        if self._head is None:
            return ", by Ray on this machine"
        nodes = f"{self._nodes} node{'s' if self._nodes > 1 else ''}"
        return f", on {nodes} of the Ray cluster at {self._head}"

    def __enter__(self) -> Self:
        self._connection.join({"num_cpus": usable_cores(), "object_store_memory": STORE_BYTES})
        try:
            self._look()
            self._refuse_small_nodes()
        except BaseException:
            self._connection.leave()
            raise
        threading.Thread(target=self._keep_looking, name="room for trials", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)
        self._connection.leave()

    def _look(self) -> None:
        """See how many trials the nodes have room for, whoever uses it at present."""
        nodes = [node["Resources"] for node in self._connection.ray.nodes() if node["Alive"]]
        self._nodes = len(nodes)
        self._room = sum(self._room_of(node) for node in nodes)
        self._largest = max(int(node.get("CPU", 0)) for node in nodes)
        self._most_gpus = max(node.get("GPU", 0) for node in nodes)

    def _room_of(self, node: dict[str, float]) -> int:
        cpus = int(node.get("CPU", 0) / max(1, self._cores))
        return min(cpus, int(node.get("GPU", 0) / self._gpus)) if self._gpus else cpus

    def _keep_looking(self) -> None:
        # In a thread of its own: without a head, Ray would have the sweep wait for the answer.
        while not self._left.wait(ROOM_SECONDS):
            with suppress(Exception):  # Ray has left the cluster, or the head has
                self._look()

    def _refuse_small_nodes(self) -> None:
        gpus = f" and {self._gpus:g} GPUs (sweep.gpus_per_trial)" if self._gpus else ""
        largest = f" and {self._most_gpus:g} GPUs" if self._gpus else ""
        require(
            self._room > 0 or self._jobs is not None,
            f"No node has the {self._cores} cores (sweep.cores_per_trial){gpus} of a trial: the "
            f"largest has {self._largest} cores{largest}. Give a trial less, or set sweep.jobs to "
            "have trials wait for other nodes.",
        )

    def begin(self, arguments: Sequence[str], log: Path) -> RunningTrial:
        """Have a trial wait for room, and begin."""
        if self._mark is None:
            self._mark = _new_mark(log.parent)
        order = Order(
            list(arguments),
            str(log.with_suffix("")) + "_2",
            str(log),
            str(self._mark),
            os.getcwd(),
            self._cores,
            versions(),
        )
        actor = self._connection.ray.remote(
            num_cpus=self._cores,
            num_gpus=self._gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"signals": 1},
        )(TrialActor)
        return RayTrial(self._connection.ray, actor.remote(), order)

    def check(self) -> None:
        """Refuse to go on without the head of the cluster."""
        self._connection.refuse_lost_head()


def _new_mark(directory: Path) -> Path:
    """Make a file of a name that no node has looked for, and could remember not to be there."""
    for left in directory.glob(f"{MARK}*"):  # by a sweep that was killed
        left.unlink(missing_ok=True)
    mark = directory / f"{MARK}{uuid.uuid4().hex}"
    mark.touch()
    return mark


class RayTrial(RunningTrial):
    """A trial on a node, or waiting for one.

    Args:
        ray: the package.
        actor: that begins it.
        order: what it is told.
    """

    def __init__(self, ray: Any, actor: Any, order: Order) -> None:
        self._ray, self._actor = ray, actor
        self._began = actor.begin.remote(order)
        self._end: Any = None
        self._outcome: Outcome | None = None
        self._seen_by = 0.0

    def ended(self) -> bool:
        """Return whether it has ended, and what it has written can be seen.

        Raises:
            ConfigurationError: where its node cannot run it.
        """
        if self.exit_code is not None or self.lost is not None:
            return True
        if self.where is None:
            node = self._answer(self._began)
            if node is not None:
                self.where = f", on {node}"
                self._end = self._actor.end.remote()
        elif self._outcome is None:
            self._outcome = self._answer(self._end)
            if self._outcome is not None:
                self._ray.kill(self._actor)  # what it had is for the next one
                self._seen_by = time.monotonic() + SEEN_SECONDS
        if self._outcome is not None and self._is_seen(self._outcome):
            self.exit_code = self._outcome.code
        return self.exit_code is not None or self.lost is not None

    def _answer(self, request: Any) -> Any:
        """Return what an actor has answered; None while it has not, or where it is gone."""
        ready, _ = self._ray.wait([request], timeout=0)
        if not ready:
            return None
        try:
            return self._ray.get(request)
        except self._ray.exceptions.RayTaskError as error:
            self.lost = str(error.cause)
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            # It may have been cut off from here alone, and must not go on beside another one.
            self._ray.kill(self._actor)
            self.lost = str(error).partition("\n")[0]
            return None

    def _is_seen(self, outcome: Outcome) -> bool:
        if time.monotonic() > self._seen_by:
            return True
        try:
            return all(os.stat(path).st_size == size for path, size in outcome.sizes.items())
        except OSError:
            return False

    def terminate(self) -> None:
        if self.where is None:
            self._ray.kill(self._actor)  # it waits, and has nothing to save
        else:
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        self._actor.send.options(concurrency_group="signals").remote(number)

    def kill(self) -> None:
        if self._end is not None and not self.ended():
            self._send(signal.SIGKILL)
            self._ray.wait([self._end], timeout=KILL_SECONDS)
        self._ray.kill(self._actor)

    def last_line(self) -> str:
        return "(said nothing)" if self._outcome is None else self._outcome.last_line
