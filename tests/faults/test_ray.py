"""Real Ray, few starts of it: collectors that are killed are replaced, and a learner that is killed leaves no process."""

import ast
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from lightning.pytorch import Callback

import lightning_rl
from lightning_rl import ConfigurationError, SyncCollector
from lightning_rl.cli import app
from lightning_rl.collectors import ray as by_ray
from tests.commands import Command
from tests.equivalence.test_ray import assert_same_training, remote
from tests.helpers import last, load, scalars, train
from tests.markdown import blocks

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
QUIET = (
    "--model.compile",
    "false",
    "--trainer.enable_progress_bar",
    "false",
    "--data.num_eval_episodes",
    "1",
)


def processes_of(parent):
    """The processes that descend from one, with their command lines."""
    found, waiting = {}, [parent]
    children = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            name = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append((int(entry.name), name))
    while waiting:
        for pid, name in children.get(waiting.pop(), []):
            found[pid] = name
            waiting.append(pid)
    return found


def is_running(pid):
    """Whether a process is there and has not ended: whoever it was left to may not have noticed that yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def collectors_of(learner):
    return [pid for pid, name in processes_of(learner).items() if name.startswith("ray::RayActor")]


def wait_for(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def rows(directory):
    """How often metrics were written."""
    return sum(
        len(file.read_text().splitlines()) - 1
        for file in directory.glob("outputs/*/logs/metrics.csv")
    )


def last_of(directory):
    """The checkpoint of the run that goes on there."""
    (checkpoint,) = directory.glob("outputs/*/checkpoints/last.ckpt")
    return checkpoint


@needs_ray
def test_a_killed_collector_is_replaced_and_a_killed_learner_leaves_no_process(
    tmp_path, monkeypatch
):
    """One start of Ray, and three of a collector."""
    monkeypatch.chdir(tmp_path)
    options = ("--data.collector", "RayCollector", "--data.collector.num_collectors", "2")
    budget = ("--data.total_env_steps", "10_000_000", "--data.collector.back_off_s", "0.1")
    saved = ("--data.iterations_per_epoch", "5")
    run = Command("fit", "--config", "ppo.yaml", *options, *budget, *saved, *QUIET)
    wait_for(lambda: rows(tmp_path) >= 2 and len(collectors_of(run.pid)) == 2)
    first = collectors_of(run.pid)
    assert "token" not in run.stderr + run.stdout, "Ray's own advice"
    os.kill(first[0], signal.SIGKILL)
    before = rows(tmp_path)
    wait_for(lambda: rows(tmp_path) >= before + 10)  # the other one goes on meanwhile
    wait_for(lambda: len(collectors_of(run.pid)) == 2 and first[0] not in collectors_of(run.pid))
    # Ray's two agents notice it after a minute; they hold no env.
    left = [pid for pid, name in processes_of(run.pid).items() if "Agent" not in name]
    os.kill(run.pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, left)), seconds=30)
    assert by_ray.ENDED in run.stderr
    assert "A worker died" not in run.stdout, "Ray's own words for what our warning says"
    steps = load(last_of(tmp_path))["lightning_rl"]["env_steps"]
    more = ("--data.total_env_steps", steps + 4096)
    run = Command("fit", "--ckpt_path", "last", *more, "--trainer.enable_progress_bar", "false")
    assert run.wait(200).returncode == 0, run.stderr
    assert load(last_of(tmp_path))["lightning_rl"]["env_steps"] == steps + 4096


@needs_ray
@pytest.mark.slow
def test_by_real_processes_one_collector_without_lag_is_the_foreground_bit_for_bit(tmp_path):
    for kind, collector in {"sync": SyncCollector, "ray": remote()}.items():
        train(tmp_path / kind, data={"collector": collector})
    assert_same_training(tmp_path / "sync", tmp_path / "ray")


class Killer(Callback):
    """Kills one of the collectors' processes after every few iterations, and notes what is trained on."""

    def __init__(self, kills):
        self.kills, self.killed, self.seen = kills, set(), []

    def on_train_batch_start(self, trainer, module, rollout, *args):
        lag = int(module.policy.version) - rollout["policy_version"][:, :-1]
        self.seen.append((int(lag.min()), int(lag.max()), rollout["observation"].sum().item()))

    def on_train_batch_end(self, trainer, *args):
        alive = [pid for pid in collectors_of(os.getpid()) if pid not in self.killed]
        if trainer.global_step % 4 == 0 and len(self.killed) < self.kills and alive:
            os.kill(alive[0], signal.SIGKILL)
            self.killed.add(alive[0])


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_killed_collectors_cost_rollouts_and_nothing_else(tmp_path):
    """Each iteration trains on a rollout of its own, none too old, and the run ends at its budget."""
    killer, iterations = Killer(20), 200
    data = {
        "collector": remote(2, 2, min_healthy=0, back_off_s=0.1),
        "total_env_steps": 64 * iterations,
        "iterations_per_epoch": 20,
    }
    with pytest.warns(UserWarning, match=r"Collector \d failed, and is replaced in"):
        train(tmp_path, data=data, trainer={"callbacks": [killer], "limit_val_batches": 0})
    assert len(killer.killed) == 20
    assert len(killer.seen) == iterations
    assert all(0 <= least <= most <= 2 for least, most, _ in killer.seen)
    assert len({content for *_, content in killer.seen}) == iterations, "trained on twice"
    assert load(last(tmp_path))["lightning_rl"]["env_steps"] == 64 * iterations
    counts = {tag: points[-1][1] for tag, points in scalars(tmp_path).items()}
    assert counts["ray/restarts"] == 20
    assert counts["ray/lost_rollouts"] <= 20


def cluster(address, **room):
    return by_ray.RayCluster(
        address, 1, **{"num_cpus": 1.0, "num_gpus": 0.0, "resources": {}} | room
    )


@needs_ray
@pytest.mark.parametrize(
    ("address", "says"),
    [
        (
            "127.0.0.1:9",
            "The Ray cluster at 127.0.0.1:9 cannot be joined: nobody answers there. Start its head",
        ),
        ("nowhere.invalid:6379", "cannot be joined: .* Is the name of its machine right"),
        ("node0", "The address of a Ray cluster is host:port, as in node0:6379, got 'node0'"),
    ],
)
def test_an_address_where_no_cluster_is_is_refused_in_one_message(address, says):
    with pytest.raises(ConfigurationError, match=says):
        cluster(address).connect(None)


def test_a_wrong_token_and_other_versions_are_named_with_their_cure():
    refused = RuntimeError(
        "gcs_client.cc: Unauthenticated: RPC error: InvalidAuthToken: missing or incorrect"
    )
    assert by_ray.why_not_joined("node0:6379", refused).endswith(
        "Its token is another one: copy ~/.ray/auth_token of the machine that runs its head to this one, or set "
        "RAY_AUTH_TOKEN to what stands there."
    )
    other = RuntimeError(
        "Version mismatch: The cluster was started with Ray: 2.50.0, this process uses 2.60.0"
    )
    assert by_ray.why_not_joined("node0:6379", other).endswith(
        "Install the same versions on all machines."
    )


def test_a_node_with_other_versions_or_without_the_env_says_so():
    versions = by_ray._versions()
    with pytest.raises(
        ConfigurationError, match=r"The node .* has torch .* instead of 1\.0: install the learner's"
    ):
        by_ray._unpacked(b"", versions | {"torch": "1.0"})
    packed = b"cmy_robot\nEnv\n."  # the pickle of a class of a module that is not here
    with pytest.raises(
        ConfigurationError, match=r"cannot be imported on the node .*: No module named 'my_robot'"
    ):
        by_ray._unpacked(packed, versions)


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(by_ray.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match=r"RayCollector needs .*: pip install 'lightning-rl\[ray\]'"
    ):
        train(tmp_path, data={"collector": remote()})


def test_importing_the_package_does_not_import_ray():
    """No file does so but within a function."""
    for path in Path(lightning_rl.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "ray" for name in names), path


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_collectors": 0}, "num_collectors must be at least 1, got 0"),
        ({"max_staleness": -1}, "max_staleness must be at least 0"),
        ({"num_collectors": 2, "min_healthy": 3}, r"min_healthy must lie in \[0, 2\], got 3"),
        ({"back_off_s": 0}, "back_off_s must be positive"),
        ({"run": "robot"}, "run is 'robot', .* and no address says which"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says, tmp_path):
    with pytest.raises(ConfigurationError, match=says):
        train(tmp_path, data={"collector": remote(**settings)})


@needs_ray
def test_who_collects_for_others_says_in_one_message_what_is_wrong(tmp_path, monkeypatch, capfd):
    with pytest.raises(SystemExit) as stop:
        app.run(["collect", "--address", "127.0.0.1:9", "--run", "robot"])
    assert stop.value.code == 1
    expected = "rl-cli: error: The Ray cluster at 127.0.0.1:9 cannot be joined: nobody answers there. Start its head"
    assert capfd.readouterr().err.startswith(expected)
    with pytest.raises(SystemExit) as stop:
        app.run(["collect", "--adress", "node0:6379", "--run", "robot"])
    assert stop.value.code == 2
    assert "collect has no option --adress; close matches: address" in capfd.readouterr().err


PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
COMMANDS = [
    command
    for block in blocks(PAGE.name, PAGE.read_text())
    for command in block.commands
    if command.startswith(("ray ", "RAY_AUTH_MODE=token ray ", "rl-cli")) and "ddp" not in command
]


@needs_ray
@pytest.mark.slow
def test_a_cluster_of_two_nodes_runs_the_documented_commands(tmp_path):
    """Both nodes are this machine; the budget is small, and the port a free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder = str(Path(sys.executable).parent)
    env = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    small = (
        "--data.total_env_steps 1024 --data.num_eval_episodes 1 --trainer.enable_progress_bar false"
    )
    sac = "--model.random_env_steps 256"
    joined = None

    def start(command, **more):
        for documented, here in {
            "node0:6379": f"127.0.0.1:{port}",
            "6379": port,
            "num_collectors 8": "num_collectors 2",
        }.items():
            command = command.replace(documented, here)
        if command.startswith("rl-cli fit"):
            command += f" {small} {sac if 'sac.yaml' in command else ''}"
        command = command.replace("rl-cli", f"{sys.executable} -m lightning_rl")
        return subprocess.Popen(
            command,
            shell=True,
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **more,
        )

    try:
        for command in COMMANDS:
            if "--data.collector.address" not in command and not command.startswith(
                ("ray", "RAY", "rl-cli collect")
            ):
                continue  # on one machine
            process = start(command)
            if command.startswith("rl-cli collect"):
                joined = process
                assert "Joined" in process.stdout.readline()
                continue
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, f"{command}: {said}"
        assert len(list(tmp_path.glob("outputs/*/checkpoints/last.ckpt"))) == 2
    finally:
        subprocess.run(
            [f"{folder}/ray", "stop", "--force"], env=env, capture_output=True, check=False
        )
        if joined is not None:
            joined.wait(60)
