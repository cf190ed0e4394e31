"""Collect rollouts in processes of their own, here or on other machines, by Ray."""

import math
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl.buffers import BufferClosed
from lightning_rl.buffers.segments import allocate_segments, check_fits
from lightning_rl.collectors.base import Collector
from lightning_rl.collectors.loop import EpisodePlan, RolloutLoop
from lightning_rl.collectors.ray_cluster import (
    Connection,
    check_versions,
    refuse_without_ray,
    versions,
)
from lightning_rl.collectors.remote import Answer, RemoteCollectors, Rules
from lightning_rl.collectors.statistics import EpisodeStatistics
from lightning_rl.collectors.weights import acting_copy, changing_weights
from lightning_rl.envs import VectorEnv
from lightning_rl.policies import Policy
from lightning_rl.rollout.contract import (
    clear_bootstrap_slot,
    copy_rollout,
    final_storage,
    first_steps,
    map_tree,
    rollout_from,
    time_major,
)
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, check_range, require
from lightning_rl.system.machine import MachineSettings, put_in_force, settings
from lightning_rl.system.process import flush_denormals, flushes_denormals

CLOSE_SECONDS = 5.0
"""How long collectors may take to stop between two env steps and to close their envs."""

VERSIONS_ALIVE = 3
"""Of the weights: being written, the newest, and one that some collector still reads."""


class RayCollector(Collector):
    """Step envs in processes of their own, each with a copy of the policy; Ray runs them.

    Each of M collectors has `num_envs` envs and random streams of its own, and one rollout [N, T+1]
    under way, begun as soon as it will be fresh enough when its turn comes. The learner trains on
    one rollout at a time, in whichever order they come, on each once. Weights are published after
    each update, once for all, and taken up between two env steps; `policy_version` says of every
    step which ones it was taken with.

    While the learner trains, `max_staleness` collectors can be at work, and one more while it
    waits. With one collector and `max_staleness` 0 both take turns, and results equal those of
    `SyncCollector` bit for bit.

    A collector whose process dies, that raises, or that does not finish its rollout in time is
    replaced after a back-off, by one with another stream of seeds; its rollout is lost, and
    counted.

    A checkpoint holds the random streams and envs of all collectors, as they were when the rollouts
    that are under way began: a resumed run collects these again.

    Args:
        env: of the learner; not stepped, but asked for its spaces.
        policy: see `Collector`, as the next two.
        num_steps: likewise.
        seed: likewise.
        num_collectors: M.
        max_staleness: by how many updates the weights behind a step may lag the learner's;
            `num_collectors` where not given, so that none of them waits for the others.
        overflow: `block`: a rollout begins only when it cannot become too old; `overwrite`: all
            collectors collect all the time, and what is too old is dropped, and counted.
        address: of a running Ray cluster, `host:port`; where not given, Ray is started on this
            machine, and ends with the run.
        run: name of machines that have joined the cluster by `rl-cli collect --run NAME`, each of
            which runs one of the collectors; `num_cpus` does not count there.
        num_cpus: CPU cores that Ray keeps for each collector.
        num_gpus: GPUs likewise, or a share of one; its policy then acts there.
        resources: others that a node must have to run a collector, and how much each takes.
        min_healthy: the run ends where fewer collectors than so many have not failed since their
            last rollout; 0 goes on until none has come for `timeout_s`.
        timeout_s: how long a rollout may take, and the learner waits for one, in seconds.
        back_off_s: how long a collector that failed waits to be replaced, in seconds; twice as long
            each time that it fails again, at most a minute.
        settings: see `Collector`.

    Raises:
        ConfigurationError: for a number out of range, where Ray is not installed, and where the run
            has several processes.
    """

    in_background = True

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        num_steps: int,
        seed: int,
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
        **settings: Any,
    ) -> None:
        super().__init__(env, policy, num_steps, seed, **settings)
        check_range("num_collectors", num_collectors, least=1)
        check_range("max_staleness", max_staleness, least=0)
        check_range("min_healthy", min_healthy, least=0, most=num_collectors)
        for name, amount in {"num_cpus": num_cpus, "num_gpus": num_gpus}.items():
            check_range(name, amount, least=0)
        for name, seconds in {"timeout_s": timeout_s, "back_off_s": back_off_s}.items():
            check_range(name, seconds, above=0)
        _refuse_misplaced(address, run)
        if run is not None:
            num_cpus, resources = 0.0, (resources or {}) | {resource_of(run): 1.0}
        assert self.make_env is not None, "the data module gives it"
        self.max_staleness = num_collectors if max_staleness is None else max_staleness
        (self._segment,) = allocate_segments(
            1,
            env.single_observation_space,
            env.single_action_space,
            env.num_envs,
            num_steps,
            extra_fields=policy.extra_fields | env.extra_fields,
            device=policy.version.device,
        )
        # Nothing is collected by it: it knows how a loop begins, and what it acts and steps by.
        here = RolloutLoop(env, policy, [self._segment], seed, plan=self.plan)
        self.ways = here.ways
        self._cluster = RayCluster(
            address, num_collectors, num_cpus=num_cpus, num_gpus=num_gpus, resources=resources or {}
        )
        self.may_drop_rollouts = overflow == "overwrite"
        rules = Rules(self.max_staleness, overflow, min_healthy, timeout_s, back_off_s)
        self._remotes = RemoteCollectors(
            self._cluster, num_collectors, self._seed_of, rules, int(policy.version)
        )
        self._remotes.remotes[0].state = here.state_dict()
        others = [EpisodeStatistics(env.num_envs) for _ in range(num_collectors - 1)]
        self._followers = [self.statistics, *others]
        self._last: int | None = None  # the collector whose rollout was handed out last
        self._dropped_steps = 0
        self._staleness = 0
        self._publish_seconds = 0.0
        self._measured = time.perf_counter(), 0

    def _seed_of(self, index: int, generation: int) -> int:
        """Return the seed of a collector; that of the first one is the run's."""
        if index == generation == 0:
            return self.seed
        drawn = np.random.SeedSequence([self.seed, index, generation]).generate_state(1)
        return int(drawn[0] % 2**31)

    def collect(self) -> TensorDict:
        """Wait for a rollout; the first call starts Ray and the collectors.

        Raises:
            WriterError: from what went wrong, where too few collectors are healthy.
            TimeoutError: where no rollout came within `timeout_s`, with what they are doing.
            ReadInterrupted: after `interrupt`, where no rollout is ready.
            ConfigurationError: where the cluster cannot be reached, or is not like this process.
        """
        if not self._cluster.connected:
            self._start()
        while True:
            taken = self._remotes.take()
            rollout, notes = self._land(taken.value)
            oldest = int(rollout["policy_version"][:, :-1].min())
            self._staleness = int(self.policy.version) - oldest
            if self._staleness <= self.max_staleness:
                break
            self._remotes.skip()
            self._dropped_steps += rollout[:, 1:].numel()
            self._followers[taken.origin].skip_rollout()
            self._last = None
        # What came before in these rows was another collector's.
        self._skipped |= self._last != taken.origin
        self._last = taken.origin
        self.reports_success |= notes["reports_success"]
        follower = self._followers[taken.origin]
        return self.account_for(rollout, notes["begins_anew"], notes["reports"], follower)

    def _land(self, message: dict[str, Any]) -> tuple[TensorDict, dict[str, Any]]:
        """Copy a rollout that has come into the learner's storage; return it, and what is noted."""
        fields = _from_message(message["rollout"])
        finals = fields.pop("final_observation")
        fields = map_tree(lambda leaf: leaf.transpose(0, 1), fields)
        source = rollout_from(fields | {"final_observation": finals})
        check_fits(self._segment, source)
        rollout = first_steps(self._segment.rollout, source.batch_size[1] - 1)
        copy_rollout(rollout, source)
        return rollout, message["notes"]

    def _start(self) -> None:
        setup = Setup(
            self.make_env,
            acting_copy(self.policy, torch.device("cpu")),
            self.num_steps,
            self.plan,
            len(self._remotes.remotes),
            torch.get_num_threads(),
            flushes_denormals(),
            settings(),
        )
        self._cluster.connect(setup)
        self._publish()

    def publish(self) -> None:
        if self._cluster.connected:
            self._publish()

    def _publish(self) -> None:
        start = time.perf_counter()
        self._cluster.put(changing_weights(self.policy))
        self._remotes.publish(int(self.policy.version))
        self._publish_seconds = time.perf_counter() - start

    def interrupt(self) -> None:
        """Have `collect` wait no more; collectors go on until `close`."""
        self._remotes.interrupted = True

    def fail(self, error: Exception) -> None:
        self._remotes.failure = error

    def metrics(self) -> dict[str, float]:
        """Return what there is to log."""
        before, now = self._measured, (time.perf_counter(), self._cluster.received_bytes)
        self._measured = now
        counts = self._remotes.counts
        return super().metrics() | {
            "ray/collectors": float(self._remotes.alive),
            "ray/restarts": float(counts.restarts),
            "ray/lost_rollouts": float(counts.lost),
            "ray/dropped_steps": float(self._dropped_steps),
            "ray/staleness": float(self._staleness),
            "ray/bytes_per_second": (now[1] - before[1]) / (now[0] - before[0]),
            "ray/publish_ms": 1000.0 * self._publish_seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        first, *others = self._remotes.state_dict(self._cluster.fetch)
        return (
            super().state_dict()
            | {
                "loop": first["loop"],  # where one that collects here finds it
                "generation": first["generation"],
                "others": others,
                "followers": [follower.state_dict() for follower in self._followers[1:]],
                "dropped_steps": self._dropped_steps,
                "last": self._last,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        others, known = state.get("others", []), len(self._followers)
        first = {"loop": state["loop"], "generation": state.get("generation", 0)}
        self._remotes.load_state_dict([first, *others])
        self._dropped_steps = state.get("dropped_steps", 0)
        self._last = state.get("last", 0)
        followed = zip(self._followers[1:], state.get("followers", []), strict=False)
        for follower, saved in followed:
            if len(saved["return"]) == self.env.num_envs:
                follower.load_state_dict(saved)
        if len(others) + 1 != known:
            warnings.warn(
                f"The checkpoint is of {len(others) + 1} collectors, and there are {known}: those "
                f"{'beyond are left out' if known <= len(others) else 'it lacks begin anew'}.",
                stacklevel=2,
            )
        if state.get("buffer", {}).get("windows"):
            self.skip_rollout()  # which an AsyncCollector had collected ahead

    def close(self) -> None:
        """Stop all collectors between two env steps, and Ray where this one has started it."""
        self._remotes.closed = True
        if self._cluster.connected:
            self._cluster.stop([one.handle for one in self._remotes.remotes if one.handle])
            self._remotes.end()
            self._cluster.disconnect()


class Setup(NamedTuple):
    """All that a collector is made of; sent to it once."""

    make_env: Callable[[], VectorEnv] | None
    policy: Policy
    num_steps: int
    plan: EpisodePlan
    num_loops: int
    num_threads: int
    flush_denormal: bool
    machine: MachineSettings


class RayCluster:
    """Starts collectors as actors of Ray, and passes messages; see `Cluster`.

    What travels are tensors as arrays, and plain data; but for `Setup`, which is pickled, as is all
    of Ray's own: who can join the cluster can run code on all of it.

    Args:
        address: of a running cluster, `host:port`; None starts one on this machine.
        count: how many collectors it is to have room for, where it is started.
        num_cpus: that each of them takes.
        num_gpus: likewise.
        resources: likewise, by name.

    Attributes:
        connected: whether there is a cluster to talk to.
        received_bytes: of all rollouts.

    Raises:
        ConfigurationError: where Ray is not installed.
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
        """Start or join the cluster, unless this process has joined one.

        Raises:
            ConfigurationError: where that is not possible.
        """
        own = {name: self._count * amount for name, amount in self._resources.items()}
        self._connection.join(
            {"num_cpus": math.ceil(self._count * self._num_cpus), "resources": own}
        )
        ray = self._ray = self._connection.ray
        self.connected = True
        self._actor = ray.remote(
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            resources=self._resources,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"weights": 1},
        )(RayActor)
        self._setup = ray.put(cloudpickle.dumps(setup))
        _hear_torch_out()
        self._weights: Any = None
        self._number = 0  # of the publication

    def put(self, weights: dict[str, Tensor]) -> None:
        """Make these the newest weights: one copy for all collectors of a node.

        The first call takes longer: it has memory made for all versions that there are at a time,
        since to write into new memory takes several times as long as to write into it again.
        """
        message = _to_message(weights)
        if self._weights is None:
            made = [self._ray.put(message) for _ in range(VERSIONS_ALIVE)]
            del made
        self._weights = self._ray.put(message)
        self._number += 1

    def start(self, index: int, seed: int, state: Any) -> tuple[Any, Any]:
        """Have an actor created, where there is room for it, and started."""
        actor = self._actor.remote()
        return actor, (actor.start.remote(self._setup, versions(), seed, state),)

    def collect(self, handle: Any, version: int) -> Any:
        """Ask for a rollout and the state behind it, which stays where it is."""
        # Not as an argument of `collect`: they would be kept until the rollout has come.
        self.publish(handle, version)
        return tuple(handle.collect.options(num_returns=2).remote(self._number))

    def publish(self, handle: Any, version: int) -> None:
        """Hand the newest weights to a collector, by reference."""
        call = handle.publish.options(concurrency_group="weights")
        call.remote(self._weights, self._number)

    def answered(self, requests: Sequence[Any], timeout_s: float) -> list[tuple[Any, Answer]]:
        """Return the requests that are answered, with what has come.

        Raises:
            ConfigurationError: where the head of the cluster has not answered for `HEAD_SECONDS`.
        """
        self._connection.head.refuse_lost()
        if not requests:
            time.sleep(min(timeout_s, 0.1))
            return []
        by_first = {request[0]: request for request in requests}
        first = list(by_first)
        ready, _ = self._ray.wait(first, num_returns=1, timeout=timeout_s)
        if ready and len(first) > 1:
            ready, _ = self._ray.wait(first, num_returns=len(first), timeout=0)
        return [(by_first[one], self._answer(by_first[one])) for one in ready]

    def _answer(self, request: Any) -> Answer:
        try:
            value = self._ray.get(request[0])
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            cause.add_note(f"In the collector's process:\n{error}")
            return Answer(None, cause)
        except self._ray.exceptions.RayError as error:
            why = str(error).partition("\n")[0]
            return Answer(None, LostCollectorError(f"its process is gone. Ray says: {why}"))
        if len(request) == 1:
            return Answer(value)
        self.received_bytes += _nbytes(value["rollout"])
        return Answer((value, request[1]))

    def fetch(self, state: Any) -> Any:
        """Return a state as plain data; None where its node has died."""
        if not self.connected or not isinstance(state, self._ray.ObjectRef):
            return state
        try:
            return self._ray.get(state)
        except self._ray.exceptions.RayError:
            return None

    def kill(self, handle: Any) -> None:
        """End an actor, whatever it is doing."""
        self._ray.kill(handle)

    def stop(self, handles: Sequence[Any]) -> None:
        """Have actors stop between two env steps and close their envs; wait a little for that."""
        for handle in handles:
            handle.stop.options(concurrency_group="weights").remote()
        closing = [handle.close.remote() for handle in handles]
        if closing:
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)

    def disconnect(self) -> None:
        """Leave the cluster, and end it where it was started here."""
        self.connected = False
        self._weights = self._setup = None
        self._connection.leave()


class LostCollectorError(RuntimeError):
    """The process of a collector has died, or its node has."""


class RayActor:
    """The process of a collector.

    Its methods run in one thread, but for `publish` and `stop`, which have one of their own. The
    env is made in the first of them: some renderers want that of their steps.
    """

    _env: VectorEnv | None = None

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._number = 0  # of the newest publication that has arrived
        self._newest: dict[str, Any] | None = None  # its weights, until they are taken up
        self._stopped = False

    def start(self, packed: bytes, versions: dict[str, str], seed: int, state: Any) -> Any:
        """Make the env and the policy's copy; return the state in which collecting begins.

        Raises:
            ConfigurationError: where package versions differ, or a class cannot be imported.
        """
        setup = _unpacked(packed, versions)
        assert setup.make_env is not None
        torch.set_num_threads(setup.num_threads)
        put_in_force(setup.machine)
        self._flush_denormal = setup.flush_denormal
        flush_denormals(setup.flush_denormal)
        device = torch.device("cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu")
        self._policy = setup.policy.to(device)
        self._env = env = _env_made_by(setup.make_env)
        (self._segment,) = allocate_segments(
            1,
            env.single_observation_space,
            env.single_action_space,
            env.num_envs,
            setup.num_steps,
            extra_fields=self._policy.extra_fields | env.extra_fields,
            device=device,
        )
        self._loop = RolloutLoop(
            env,
            self._policy,
            [self._segment],
            seed,
            plan=setup.plan,
            take_up_weights=self._take_up_weights,
            num_loops=setup.num_loops,
        )
        if state is None:
            return self._loop.state_dict()
        self._loop.load_state_dict(state)
        return state

    def collect(self, number: int) -> tuple[Any, Any]:
        """Collect a rollout; return it with what it does not hold, and the state behind it.

        Args:
            number: of the publication to wait for.

        Returns:
            None for both after `stop`.
        """
        flush_denormals(self._flush_denormal)
        with self._arrived:
            self._arrived.wait_for(lambda: self._stopped or self._number >= number)
        try:
            self._take_up_weights(lambda: None)
            steps, notes = self._loop.run(self._segment)
        except BufferClosed:  # nobody asks for what it returns
            return None, None
        clear_bootstrap_slot(self._segment.steps[steps])
        rollout = first_steps(self._segment.rollout, steps)
        # As it lies in memory: what is not contiguous would be copied twice on its way.
        fields: dict[str, Any] = time_major(rollout.exclude("final_observation")).to_dict()
        fields["final_observation"] = final_storage(rollout).in_use()
        notes["reports_success"] = self._loop.reports_success
        return {"rollout": _to_message(fields), "notes": notes}, self._loop.state_dict()

    def publish(self, weights: dict[str, Any], number: int) -> None:
        """Take newer weights in, which are taken up before the next env step.

        Args:
            weights: by name.
            number: of the publication: one that was overtaken on its way is left out.
        """
        with self._arrived:
            if number > self._number:
                self._number, self._newest = number, weights
                self._arrived.notify_all()

    def stop(self) -> None:
        """Have the rollout under way end before the next env step."""
        with self._arrived:
            self._stopped = True
            self._arrived.notify_all()

    def close(self) -> None:
        """Close the env."""
        if self._env is not None:
            self._env.close()

    def _take_up_weights(self, finish: Callable[[], None]) -> bool:
        """Stop, or take up newer weights, between two env steps; see `RolloutLoop`."""
        if self._stopped:
            raise BufferClosed("The learner has ended.")
        if self._newest is None:
            return False
        finish()
        with self._arrived:
            weights, self._newest = self._newest, None  # the store may have its memory back
        state = self._policy.acting_state()
        with torch.no_grad():
            for name, tensor in _from_message(weights).items():
                state[name].copy_(tensor)
        return True


def _hear_torch_out() -> None:
    """Have torch say, once per process and to nobody, that memory like Ray's cannot be written."""
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


def _refuse_misplaced(address: str | None, run: str | None) -> None:
    """Refuse several learners, and a name of machines without their cluster."""
    require(
        ranks.world_size() == 1,
        f"RayCollector feeds one learner, and this run has {ranks.world_size()} processes: "
        "set trainer.devices to 1 and raise num_collectors, or use AsyncCollector.",
    )
    require(
        run is None or address is not None,
        f"run is '{run}', the name of machines that have joined a cluster, and no address says "
        "which: set data.collector.address, as in node0:6379.",
    )


def resource_of(run: str) -> str:
    """Return what a machine has one of that collects for the runs of a name."""
    return f"collect:{run}"


def _unpacked(packed: bytes, wanted: dict[str, str]) -> Setup:
    """Unpack what a collector is made of, in its own process.

    Raises:
        ConfigurationError: where package versions differ, or a class cannot be imported.
    """
    check_versions(wanted)
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
"""What to do on a node that cannot import a class."""


def _env_made_by(make_env: Callable[[], VectorEnv]) -> VectorEnv:
    """Make the env of a collector, in its own process.

    Raises:
        ConfigurationError: where that is not possible, with the name of the node.
    """
    try:
        return make_env()
    except (ConfigurationError, ImportError) as error:
        missing = isinstance(error.__cause__ or error, ImportError)
        raise ConfigurationError(
            f"The env cannot be made on the node {platform.node()}: {error}"
            f"{f'. {INSTALL}' if missing else ''}"
        ) from error


# --- messages: tensors as arrays that Ray passes without a copy, and plain data ---


class _Bits(NamedTuple):
    """A tensor of a dtype that NumPy has not, as the integers of its bits."""

    dtype: str
    array: np.ndarray


def _to_message(tree: Any) -> Any:
    """Return a tree of tensors as one of arrays, which may share their memory."""
    if not isinstance(tree, Tensor):
        return {key: _to_message(child) for key, child in tree.items()}
    tensor = tree.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return _Bits("bfloat16", tensor.view(torch.int16).numpy())
    return tensor.numpy()


def _from_message(tree: Any) -> Any:
    """Return a tree of arrays as one of tensors, to be read alone."""
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
