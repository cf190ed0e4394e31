"""Collect rollouts in Ray processes, on this or other machines."""

import copy
import math
import os
import platform
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Collector, CollectorContext, ConfigurationError, Policy, VectorEnv
from lightning_rl.extend import ranks
from lightning_rl.extend.collectors import (
    Computing,
    EpisodeSettings,
    RolloutLoop,
)
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extensions.remote.ray_cluster import (
    Connection,
    check_versions,
    refuse_without_ray,
    versions,
)
from lightning_rl.extensions.remote.remote import (
    Answer,
    Cluster,
    CollectorClosed,
    RemoteCollectors,
    RemoteSettings,
)

CLOSE_SECONDS = 5.0
"""Seconds that collectors get to stop between two env steps and to close their envs."""

VERSIONS_ALIVE = 3
"""Versions of the weights in memory: written now, newest, and read now."""


class RayCollector(Collector):
    """Step envs in Ray processes, each with a copy of the policy.

    Each of M collectors has `num_envs` envs and its own random streams, and collects one rollout
    [N, T+1] at a time. A rollout begins as soon as it cannot become too old. The learner trains
    once on each rollout, in order of arrival, and publishes weights after each update; collectors
    load them between two env steps. `policy_version` names the weights of each step.

    While the learner trains, `max_staleness` collectors can work, and one more while the learner
    waits. With one collector and `max_staleness` 0, both alternate, and results equal
    `SyncCollector`'s bit for bit.

    A collector is replaced after a back-off, with new seeds, if its process dies, if it raises, or
    if a rollout takes too long; its rollout is lost and counted. A checkpoint holds the start
    states of all current rollouts: a resumed run collects these rollouts again.

    Args:
        context: see `Collector`; its env only provides the spaces and is not stepped.
        num_collectors: M.
        max_staleness: largest lag, in updates, of a step's weights behind the learner's. Default:
            `num_collectors`, so that no collector waits for another.
        overflow: `block` begins a rollout only if it cannot become too old; `overwrite` never
            waits, and drops and counts rollouts that are too old.
        address: address of a running Ray cluster, `host:port`. Default: start Ray on this machine
            for this run.
        run: name of the machines that joined the cluster with `rl-cli collect --run NAME`; each
            runs one collector, and `num_cpus` does not apply.
        num_cpus: CPU cores that Ray reserves per collector.
        num_gpus: GPUs that Ray reserves per collector for the acting policy, possibly a fraction.
        resources: other Ray resources that each collector takes on its node, by name.
        min_healthy: end the run if fewer collectors have not failed since their last rollout; 0
            continues until no rollout has arrived for `timeout_s`.
        timeout_s: maximum seconds for a rollout, and for the learner's wait for one. The start of
            processes, also of replaced ones, has ten minutes more in each wait.
        back_off_s: seconds before a failed collector is replaced; doubled after each further
            failure, up to a minute.

    Raises:
        ConfigurationError: if a number is out of range, Ray is not installed, or the run has
            several processes.
    """

    in_background = True

    def __init__(
        self,
        context: CollectorContext,
        *,
        num_collectors: int = 1,
        max_staleness: int | None = None,
        overflow: Literal["block", "overwrite"] = "block",
        address: str | None = None,
        run: str | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: dict[str, float] | None = None,
        min_healthy: int = 1,
        timeout_s: float = 600.0,
        back_off_s: float = 1.0,
    ) -> None:
        super().__init__(context)
        check_range("num_collectors", num_collectors, minimum=1)
        check_range("max_staleness", max_staleness, minimum=0)
        check_range("min_healthy", min_healthy, minimum=0, maximum=num_collectors)
        for name, amount in {"num_cpus": num_cpus, "num_gpus": num_gpus}.items():
            check_range(name, amount, minimum=0)
        for name, seconds in {"timeout_s": timeout_s, "back_off_s": back_off_s}.items():
            check_range(name, seconds, above=0)
        _refuse_misplaced(address, run)
        if run is not None:
            # `rl-cli collect` adds machines without CPUs: only this resource places collectors.
            num_cpus, resources = 0.0, (resources or {}) | {resource_of(run): 1.0}
        assert context.make_env is not None, "set by the data module"
        self.max_staleness = num_collectors if max_staleness is None else max_staleness
        (self._segment,) = context.segments()
        # This loop only provides the initial state and the class names.
        local_loop = RolloutLoop(replace(context, compilation=None), [self._segment])
        self.code_paths = local_loop.code_paths
        self._cluster = RayCluster(
            address, num_collectors, num_cpus=num_cpus, num_gpus=num_gpus, resources=resources or {}
        )
        self.may_drop_rollouts = overflow == "overwrite"
        rules = RemoteSettings(self.max_staleness, overflow, min_healthy, timeout_s, back_off_s)
        self._remotes = RemoteCollectors(
            self._cluster, num_collectors, self._seed_of, rules, int(self.policy.version)
        )
        self._remotes.remotes[0].state = local_loop.state_dict()
        other_statistics = [copy.deepcopy(self.statistics) for _ in range(num_collectors - 1)]
        self._statistics_of = [self.statistics, *other_statistics]
        self._last: int | None = None  # collector of the last returned rollout
        self._dropped_steps = 0
        self._staleness = 0
        self._publish_seconds = 0.0
        self._measured = time.perf_counter(), 0

    def _seed_of(self, index: int, generation: int) -> int:
        # The seed of `SyncCollector`: with one collector, both collect the same rollouts.
        if index == generation == 0:
            return self.context.seed
        words = np.random.SeedSequence([self.context.seed, index, generation]).generate_state(1)
        return int(words[0] % 2**31)

    def collect(self) -> TensorDict:
        if not self._cluster.connected:
            self._start()
        while True:
            received = self._remotes.take()
            # Received arrays are read-only memory of Ray.
            rollout = self._segment.receive(_from_message(received.value["rollout"]))
            notes = received.value["notes"]
            # Without the bootstrap slot, in which no action is taken.
            oldest = int(rollout["policy_version"][:, :-1].min())
            self._staleness = int(self.policy.version) - oldest
            if self._staleness <= self.max_staleness:
                break
            self._remotes.skip()
            self._dropped_steps += rollout[:, 1:].numel()
            self._statistics_of[received.origin].skip_rollout()
            self._last = None
        # The previous rollout in these rows may come from another collector.
        self._skipped |= self._last != received.origin
        self._last = received.origin
        self.reports_success |= notes["reports_success"]
        statistics = self._statistics_of[received.origin]
        return self.count_rollout(rollout, notes["envs_were_reset"], notes["reports"], statistics)

    def _start(self) -> None:
        setup = Setup(
            self.context.make_env,
            # The collectors move it to their own devices.
            self.context.acting_copy(torch.device("cpu")),
            self.num_steps,
            self.context.episode_settings,
            self.context.env_steps_before,
            len(self._remotes.remotes),
            Computing.here(),
        )
        self._cluster.connect(setup)
        self._publish()

    def publish(self) -> None:
        if self._cluster.connected:
            self._publish()

    def _publish(self) -> None:
        start = time.perf_counter()
        self._cluster.put(self.context.changing_weights())
        self._remotes.publish(int(self.policy.version))
        self._publish_seconds = time.perf_counter() - start

    def interrupt(self) -> None:
        self._remotes.interrupted = True

    def metrics(self) -> dict[str, float]:
        previous, now = self._measured, (time.perf_counter(), self._cluster.received_bytes)
        self._measured = now
        counts = self._remotes.counts
        return super().metrics() | {
            "ray/collectors": float(self._remotes.alive),
            "ray/restarts": float(counts.restarts),
            "ray/lost_rollouts": float(counts.lost),
            "ray/dropped_steps": float(self._dropped_steps),
            "ray/staleness": float(self._staleness),
            "ray/bytes_per_second": (now[1] - previous[1]) / (now[0] - previous[0]),
            "ray/publish_ms": 1000.0 * self._publish_seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        first, *other_states = self._remotes.state_dict(self._cluster.fetch)
        return (
            super().state_dict()
            | {
                "loop": first["loop"],  # other collectors look for it here
                "generation": first["generation"],
                "others": other_states,
                "statistics_of": [
                    statistics.state_dict() for statistics in self._statistics_of[1:]
                ],
                "dropped_steps": self._dropped_steps,
                "last": self._last,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        other_states, count = state.get("others", []), len(self._statistics_of)
        first = {"loop": state["loop"], "generation": state.get("generation", 0)}
        self._remotes.load_state_dict([first, *other_states])
        self._dropped_steps = state.get("dropped_steps", 0)
        self._last = state.get("last", 0)
        pairs = zip(self._statistics_of[1:], state.get("statistics_of", []), strict=False)
        for statistics, saved_statistics in pairs:
            if len(saved_statistics["return"]) == self.env.num_envs:
                statistics.load_state_dict(saved_statistics)
        if len(other_states) + 1 != count:
            surplus = count <= len(other_states)
            effect = "additional states are not used" if surplus else "others start fresh"
            warnings.warn(
                f"The checkpoint has {len(other_states) + 1} collectors, this run {count}: the "
                f"{effect}.",
                stacklevel=2,
            )
        # From a run with `AsyncCollector`: its unread rollouts are lost, as if they were skipped.
        if state.get("buffer", {}).get("windows"):
            self.skip_rollout()

    def close(self) -> None:
        self._remotes.closed = True
        if self._cluster.connected:
            # Ask before killing: a killed process cannot close its env.
            self._cluster.stop([remote.handle for remote in self._remotes.remotes if remote.handle])
            self._remotes.end()
            self._cluster.disconnect()


class Setup(NamedTuple):
    """Everything a collector process needs; sent once."""

    make_env: Callable[[], VectorEnv] | None
    policy: Policy
    num_steps: int
    episode_settings: EpisodeSettings
    env_steps_before: int
    num_loops: int
    computing: Computing


class RayCluster(Cluster):
    """Starts collectors as Ray actors and exchanges messages with them; see `Cluster`.

    Messages contain tensors as arrays, and plain data. Only `Setup` and Ray's own messages are
    pickled: every member of the cluster can run code on all of it.

    Args:
        address: address of a running cluster, `host:port`; None starts one on this machine.
        count: number of collectors that a new cluster has room for.
        num_cpus: CPU cores per collector.
        num_gpus: GPUs per collector.
        resources: other resources per collector, by name.

    Attributes:
        connected: whether this process is connected to a cluster.
        received_bytes: total size of the received rollouts.

    Raises:
        ConfigurationError: if Ray is not installed.
    """

    def __init__(
        self,
        address: str | None,
        count: int,
        *,
        num_cpus: float,
        num_gpus: float,
        resources: dict[str, float],
    ) -> None:
        refuse_without_ray("RayCollector")
        self._count = count
        self._num_cpus, self._num_gpus, self._resources = num_cpus, num_gpus, resources
        self.connected = False
        self.received_bytes = 0
        self._connection = Connection(address)

    def connect(self, setup: Setup) -> None:
        """Start or join the cluster, unless this process is connected; see `Connection.join`."""
        resources = {name: self._count * amount for name, amount in self._resources.items()}
        self._connection.join(
            {"num_cpus": math.ceil(self._count * self._num_cpus), "resources": resources}
        )
        ray = self._ray = self._connection.ray
        self.connected = True
        self._actor = ray.remote(
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            resources=self._resources,
            # `RemoteCollectors` replaces collectors, with other seeds: Ray must not restart them.
            max_restarts=0,
            max_task_retries=0,
            # A thread for the weights, because `collect` occupies the main one during a rollout.
            concurrency_groups={"weights": 1},
        )(RayActor)
        self._setup = ray.put(cloudpickle.dumps(setup))
        _trigger_read_only_warning()
        self._weights: Any = None
        self._number = 0  # number of the publication

    def put(self, weights: dict[str, Tensor]) -> None:
        """Store the newest weights, one copy for all collectors of a node."""
        message = _to_message(weights)
        if self._weights is None:
            # Allocate memory for all versions that are alive together: a write into new memory
            # takes several times as long as a write into used memory.
            blocks = [self._ray.put(message) for _ in range(VERSIONS_ALIVE)]
            del blocks
        self._weights = self._ray.put(message)
        self._number += 1

    def start(self, index: int, seed: int, state: Any) -> tuple[Any, Any]:
        actor = self._actor.remote()
        return actor, (actor.start.remote(self._setup, versions(), seed, state),)

    def collect(self, handle: Any, version: int) -> Any:
        # The state after the rollout stays on the actor's node.
        # Do not pass weights to `collect`: they would stay in memory until the rollout arrives.
        self.publish(handle, version)
        return tuple(handle.collect.options(num_returns=2).remote(self._number))

    def publish(self, handle: Any, version: int) -> None:
        call = handle.publish.options(concurrency_group="weights")
        call.remote(self._weights, self._number)

    def wait_for_answers(
        self, requests: Sequence[Any], timeout_s: float
    ) -> list[tuple[Any, Answer]]:
        self._connection.check_head()
        if not requests:
            time.sleep(min(timeout_s, 0.1))
            return []
        by_first = {request[0]: request for request in requests}
        first = list(by_first)
        finished, _ = self._ray.wait(first, num_returns=1, timeout=timeout_s)
        # After the first answer, return all others that are there, without waiting.
        if finished and len(first) > 1:
            finished, _ = self._ray.wait(first, num_returns=len(first), timeout=0)
        return [(by_first[ref], self._answer(by_first[ref])) for ref in finished]

    def _answer(self, request: Any) -> Answer:
        try:
            value = self._ray.get(request[0])
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            cause.add_note(f"In the collector's process:\n{error}")
            return Answer(None, cause)
        except self._ray.exceptions.RayError as error:
            # Twice the lines: the only line of a short message is then also its last.
            cause, *_, last = COLOUR.sub("", str(error)).strip().splitlines() * 2
            if "creation task" in cause:  # a traceback follows; its last line is the cause
                cause = f"{cause}: {last}"
            return Answer(None, LostCollectorError(f"its process is gone. Ray says: {cause}"))
        if len(request) == 1:
            return Answer(value)
        self.received_bytes += _nbytes(value["rollout"])
        return Answer((value, request[1]))

    def fetch(self, state: Any) -> Any:
        """Return a state as plain data; None if its node died."""
        if not self.connected or not isinstance(state, self._ray.ObjectRef):
            return state
        try:
            return self._ray.get(state)
        except self._ray.exceptions.RayError:
            return None

    def kill(self, handle: Any) -> None:
        self._ray.kill(handle)

    def stop(self, handles: Sequence[Any]) -> None:
        """Let actors stop between two env steps and close their envs, within `CLOSE_SECONDS`."""
        for handle in handles:
            handle.stop.options(concurrency_group="weights").remote()
        closing = [handle.close.remote() for handle in handles]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)

    def disconnect(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        self.connected = False
        self._weights = self._setup = None
        self._connection.leave()


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Ray's codes for a terminal."""


class LostCollectorError(RuntimeError):
    """The process or the node of a collector died."""


class RayActor:
    """The process of a collector.

    `publish` and `stop` run in a second thread, all other methods in one thread, because some
    renderers require that one thread creates and steps the env.
    """

    _env: VectorEnv | None = None

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._number = 0  # number of the newest received publication
        self._newest: dict[str, Any] | None = None  # its weights, until they are loaded
        self._stopped = False

    def start(self, packed: bytes, versions: dict[str, str], seed: int, state: Any) -> Any:
        """Create the env and the copy of the policy; return the initial state.

        Raises:
            ConfigurationError: if package versions differ, or a class cannot be imported.
        """
        setup = _unpacked(packed, versions)
        assert setup.make_env is not None
        self._computing = setup.computing
        self._computing.apply()
        # Ray leaves this variable empty for an actor that has reserved no GPU.
        device = torch.device("cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")
        self._policy = setup.policy.to(device)
        self._env = env = _env_made_by(setup.make_env)
        context = CollectorContext(
            *(env, self._policy, setup.num_steps, seed),
            episode_settings=setup.episode_settings,
            env_steps_before=setup.env_steps_before,
        )
        (self._segment,) = context.segments()
        self._loop = RolloutLoop(
            context, [self._segment], load_weights=self._load_weights, num_loops=setup.num_loops
        )
        if state is None:
            return self._loop.state_dict()
        self._loop.load_state_dict(state)
        return state

    def collect(self, number: int) -> tuple[Any, Any]:
        """Wait for a publication; return a rollout and the state after it, None after `stop`."""
        self._computing.apply()
        with self._arrived:
            self._arrived.wait_for(lambda: self._stopped or self._number >= number)
        try:
            self._load_weights(lambda: None)
            steps, notes = self._loop.run(self._segment)
        except CollectorClosed:  # the learner ignores the result
            return None, None
        notes["reports_success"] = self._loop.reports_success
        return {
            "rollout": _to_message(self._segment.sent(steps)),
            "notes": notes,
        }, self._loop.state_dict()

    def publish(self, weights: dict[str, Any], number: int) -> None:
        """Receive weights by name, unless newer weights have arrived."""
        with self._arrived:
            if number > self._number:
                self._number, self._newest = number, weights
                self._arrived.notify_all()

    def stop(self) -> None:
        """End the current rollout before the next env step."""
        with self._arrived:
            self._stopped = True
            self._arrived.notify_all()

    def close(self) -> None:
        """Close the env."""
        if self._env is not None:
            self._env.close()

    def _load_weights(self, finish: Callable[[], None]) -> bool:
        if self._stopped:
            raise CollectorClosed("The learner has ended.")
        if self._newest is None:
            return False
        # Before the exchange: the finished steps still need the old weights.
        finish()
        with self._arrived:
            weights, self._newest = self._newest, None  # frees the memory in Ray's object store
        state = self._policy.acting_state()
        with torch.no_grad():
            for name, tensor in _from_message(weights).items():
                state[name].copy_(tensor)
        return True


def _trigger_read_only_warning() -> None:
    """Trigger and hide torch's warning about read-only memory, such as Ray's."""
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


def _refuse_misplaced(address: str | None, run: str | None) -> None:
    require(
        ranks.world_size() == 1,
        f"RayCollector feeds one learner, but this run has {ranks.world_size()} processes: set "
        "trainer.devices to 1 and raise num_collectors, or use AsyncCollector.",
    )
    require(
        run is None or address is not None,
        f"run is '{run}', the name of machines in a Ray cluster, but the cluster's address is "
        "missing: set data.collector.address, as in node0:6379.",
    )


def resource_of(run: str) -> str:
    """Return the Ray resource of machines that collect for runs of this name."""
    return f"collect:{run}"


def _unpacked(packed: bytes, learner_versions: dict[str, str]) -> Setup:
    check_versions(learner_versions)
    try:
        setup: Setup = cloudpickle.loads(packed)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The env or the policy cannot be imported on the node {platform.node()}: {error}. "
            f"{INSTALL}"
        ) from error
    return setup


INSTALL = (
    "Install its package there, or start Ray there with PYTHONPATH naming the folder of its module."
)
"""Cure for a node that cannot import a class."""


def _env_made_by(make_env: Callable[[], VectorEnv]) -> VectorEnv:
    try:
        return make_env()
    except (ConfigurationError, ImportError) as error:
        missing = isinstance(error.__cause__ or error, ImportError)
        raise ConfigurationError(
            f"The env cannot be made on the node {platform.node()}: {error}"
            f"{f'. {INSTALL}' if missing else ''}"
        ) from error


# --- messages: tensors as arrays, which Ray passes without a copy, and plain data ---


class _Bits(NamedTuple):
    dtype: str
    array: np.ndarray


def _to_message(tree: Any) -> Any:
    if not isinstance(tree, Tensor):
        return {key: _to_message(child) for key, child in tree.items()}
    tensor = tree.detach().cpu()
    # NumPy has no bfloat16: send its bits.
    if tensor.dtype == torch.bfloat16:
        return _Bits("bfloat16", tensor.view(torch.int16).numpy())
    return tensor.numpy()


def _from_message(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _from_message(child) for key, child in tree.items()}
    if isinstance(tree, _Bits):
        bits: Tensor = _from_message(tree.array)
        return bits.view(getattr(torch, tree.dtype))
    return torch.from_numpy(tree)


def _nbytes(tree: Any) -> int:
    if isinstance(tree, dict):
        return sum(_nbytes(child) for child in tree.values())
    return int((tree.array if isinstance(tree, _Bits) else tree).nbytes)
