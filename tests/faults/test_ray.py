"""Real Ray, few starts of it: collectors that are killed are replaced, and a learner that is killed leaves no process."""

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_rl import GymnasiumEnv, SyncCollector
from lightning_rl.cli import app
from lightning_rl.extensions.remote import ray as by_ray
from lightning_rl.extensions.remote import ray_cluster
from tests.callbacks import callback
from tests.commands import Command, children_of, free_port, is_running, rl_cli, wait_until
from tests.equivalence.test_ray import assert_same_training, remote
from tests.helpers import last, load, scalars, train
from tests.markdown import blocks
from tests.messages import assert_names, refused

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
ENDED = ray_cluster.ENDED
QUIET = (
    *("--model.compile", "false", "--trainer.enable_progress_bar", "false"),
    *("--data.num_eval_episodes", "1"),
)


@pytest.fixture(autouse=True)
def no_variable_of_an_earlier_start(monkeypatch):
    monkeypatch.delenv(ray_cluster.CLUSTERS, raising=False)


def processes_of(parent):
    """Return the processes that descend from one, with their command lines."""
    processes = {}
    for pid in children_of(parent):
        with suppress(OSError):  # it has ended since
            processes[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            processes |= processes_of(pid)
    return processes


def collectors_of(learner):
    return [pid for pid, name in processes_of(learner).items() if name.startswith("ray::RayActor")]


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
@pytest.mark.timeout(900)  # it starts processes that import torch, several times
def test_a_closed_terminal_saves_a_run_with_ray_and_leaves_no_process(tmp_path, monkeypatch):
    """Its signal goes to Ray's processes, too, without which Ray ends the learner."""
    monkeypatch.chdir(tmp_path)
    options = ("--data.collector", "RayCollector", "--data.total_env_steps", "10_000_000")
    run = Command("fit", "--config", "ppo.yaml", *options, *QUIET)
    wait_until(lambda: rows(tmp_path) >= 2, seconds=800, of=run)
    children = processes_of(run.pid)
    os.killpg(run.pid, signal.SIGHUP)
    assert run.wait(60).returncode == 128 + signal.SIGHUP, run.stderr
    wait_until(lambda: not any(map(is_running, children)), seconds=30)
    assert load(last_of(tmp_path))["lightning_rl"]["env_steps"] > 0


@needs_ray
@pytest.mark.slow
def test_ray_for_this_machine_alone_listens_on_loopback_and_its_token_is_private(tmp_path):
    code = (
        "import os, subprocess; from lightning_rl.extensions.remote.ray_cluster import Connection\n"
        "connection = Connection(None); connection.join({'num_cpus': 1})\n"
        "for path in (os.path.expanduser('~/.ray/auth_token'), os.environ['RAY_TMPDIR']):\n"
        "    print(oct(os.stat(path).st_mode)[-3:])\n"
        "assert os.listdir(os.environ['RAY_TMPDIR']) == ['ray']\n"
        "print(subprocess.run(['ss', '-ltnpH'], capture_output=True, text=True).stdout)\n"
        "connection.leave()"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    *modes, sockets = printed.split("\n", 2)
    assert modes == ["600", "700"]
    ports = [
        line.split()[3]
        for line in sockets.splitlines()
        if re.search(r"raylet|gcs_server|ray::", line)
    ]
    assert len(ports) >= 3
    assert all("127.0.0.1" in port for port in ports), ports


def test_ray_on_loopback_joins_no_cluster(monkeypatch):
    monkeypatch.setenv(ray_cluster.CLUSTERS, "0")
    monkeypatch.setattr(ray_cluster, "check_answers", lambda address: None)
    with refused(names=("node0:6379", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")):
        ray_cluster.Connection("node0:6379")._join({})


@needs_ray
@pytest.mark.slow
def test_by_real_processes_one_collector_without_lag_is_the_foreground_bit_for_bit(tmp_path):
    for kind, collector in {"sync": SyncCollector, "ray": remote()}.items():
        train(tmp_path / kind, data={"collector": collector})
    assert_same_training(tmp_path / "sync", tmp_path / "ray")


def killer(kills):
    """Kill one of the collectors' processes after every few iterations, and note what is trained on."""

    def look(trainer, module, rollout, *args):
        lag = int(module.policy.version) - rollout["policy_version"][:, :-1]
        kept.seen.append((int(lag.min()), int(lag.max()), rollout["observation"].sum().item()))

    def kill(trainer, *args):
        alive = [pid for pid in collectors_of(os.getpid()) if pid not in kept.killed]
        if trainer.global_step % 4 == 0 and len(kept.killed) < kills and alive:
            os.kill(alive[0], signal.SIGKILL)
            kept.killed.add(alive[0])

    kept = callback(on_train_batch_start=look, on_train_batch_end=kill)
    kept.seen, kept.killed = [], set()
    return kept


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_killed_collectors_cost_rollouts_and_nothing_else(tmp_path):
    """Each iteration trains on a rollout of its own, none too old, and the run ends at its budget."""
    kills, iterations = killer(20), 200
    data = {
        "collector": remote(2, 2, min_healthy=0, back_off_s=0.1),
        "total_env_steps": 64 * iterations,
        "iterations_per_epoch": 20,
    }
    with refused(UserWarning, names=("Collector", "replaced")):
        train(tmp_path, data=data, trainer={"callbacks": [kills], "limit_val_batches": 0})
    assert len(kills.killed) == 20
    assert len(kills.seen) == iterations
    assert all(0 <= least <= most <= 2 for least, most, _ in kills.seen)
    assert len({content for *_, content in kills.seen}) == iterations, "trained on twice"
    assert load(last(tmp_path))["lightning_rl"]["env_steps"] == 64 * iterations
    counts = {tag: points[-1][1] for tag, points in scalars(tmp_path).items()}
    assert counts["ray/restarts"] == 20
    assert counts["ray/lost_rollouts"] <= 20


@needs_ray
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:9", ("127.0.0.1:9", "answer", "head")),
        ("nowhere.invalid:6379", ("nowhere.invalid:6379", "machine")),
        ("node0", ("host:port", "node0:6379", "'node0'")),
    ],
)
def test_an_address_where_no_cluster_is_is_refused_in_one_message(address, says):
    cluster = by_ray.RayCluster(address, 1, num_cpus=1.0, num_gpus=0.0, resources={})
    with refused(names=says):
        cluster.connect(None)


def test_a_wrong_token_and_other_versions_are_named_with_their_cure():
    refused = RuntimeError(
        "gcs_client.cc: Unauthenticated: RPC error: InvalidAuthToken: missing or incorrect"
    )
    assert_names(ray_cluster.why_not_joined("node0:6379", refused), "tokens", "~/.ray/auth_token")
    other = RuntimeError(
        "Version mismatch: The cluster was started with Ray: 2.50.0, this process uses 2.60.0"
    )
    assert_names(ray_cluster.why_not_joined("node0:6379", other), "versions")


def test_a_node_with_other_versions_or_without_the_env_says_so():
    versions = ray_cluster.versions()
    with refused(names=("torch", "1.0", "node")):
        by_ray._unpacked(b"", versions | {"torch": "1.0"})
    packed = b"crobot_of_the_learner\nEnv\n."  # the pickle of a class of a module that is not here
    with refused(names=("node", "'robot_of_the_learner'", "PYTHONPATH")):
        by_ray._unpacked(packed, versions)


def test_an_env_that_a_node_cannot_make_says_which_node_and_what_to_do():
    with refused(names=("node", "'robot_of_the_learner:Arm-v0'", "PYTHONPATH")):
        by_ray._env_made_by(partial(GymnasiumEnv, id="robot_of_the_learner:Arm-v0", num_envs=1))
    with refused(names=("node", "'CartPole-v99'")) as caught:
        by_ray._env_made_by(partial(GymnasiumEnv, id="CartPole-v99", num_envs=1))
    assert by_ray.INSTALL not in str(caught.value)


def test_a_head_is_lost_where_it_has_not_answered_for_a_while(monkeypatch):
    clock = iter([100.0, 200.0, 200.5, 210.0, 215.0])
    monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: next(clock))
    connection = ray_cluster.Connection(None)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        connection._head = f"127.0.0.1:{server.getsockname()[1]}"
        connection._checked_at, connection._silent_since = 0.0, 0.0  # it had been silent
        connection.check_head()
    for _ in range(3):  # an update lasts from 100 to 200 s: the silence counts from its end
        connection.check_head()
    with refused(names=("Ray", "15 s", "--ckpt_path last")):
        connection.check_head()


def test_who_ends_without_a_word_has_a_witness_and_who_closes_it_has_none(capfd):
    for ended_by in (lambda one: one._process.stdin.close(), ray_cluster.KillReporter.close):
        witness = ray_cluster.KillReporter()
        ended_by(witness)
        witness._process.wait(30)
    assert capfd.readouterr().err == ENDED


def test_a_token_is_hidden_from_others(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    ray_cluster.hide_token()  # there is none
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray" / "made"))
    ray_cluster.make_token()
    made = tmp_path / "ray" / "made"
    content = made.read_text()
    ray_cluster.make_token()  # there is one, which is kept
    assert made.stat().st_mode & 0o777 == 0o600
    assert made.read_text() == content
    assert len(content) == 64
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    ray_cluster.hide_token()
    assert token.stat().st_mode & 0o777 == 0o600


def test_what_is_printed_while_a_cluster_is_joined_is_kept(capfd):
    with ray_cluster._stderr_kept() as printed:
        os.write(2, b"InvalidAuthToken: missing or incorrect")
        kept = printed()
    os.write(2, b"after")
    assert kept == "InvalidAuthToken: missing or incorrect"
    assert capfd.readouterr().err == "after"
    why = ray_cluster.why_not_joined("node0:6379", RuntimeError("Failed to connect"), kept)
    assert_names(why, "RAY_AUTH_TOKEN")


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: None)
    with refused(names=("RayCollector", "pip install -e '.[ray]'")):
        train(tmp_path, data={"collector": remote()})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_collectors": 0}, ("num_collectors", "at least 1", "got 0")),
        ({"num_collectors": 2, "min_healthy": 3}, ("min_healthy", "[0, 2]", "3")),
        ({"run": "robot"}, ("run", "'robot'", "data.collector.address")),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says, tmp_path):
    with refused(names=says):
        train(tmp_path, data={"collector": remote(**settings)})


@needs_ray
def test_who_collects_for_others_says_in_one_message_what_is_wrong(tmp_path, monkeypatch, capfd):
    with pytest.raises(SystemExit) as stop:
        app.run(["collect", "--address", "127.0.0.1:9", "--run", "robot"])
    assert stop.value.code == 1
    error = capfd.readouterr().err
    assert_names(error, "rl-cli: error", "127.0.0.1:9", "no answer", "ray start --head")
    with pytest.raises(SystemExit) as stop:
        app.run(["collect", "--adress", "node0:6379", "--run", "robot"])
    assert stop.value.code == 2
    assert_names(capfd.readouterr().err, "collect", "--adress", "close matches: address")


@contextmanager
def node(home, *options, program=("-m", "ray.scripts.scripts"), **variables):
    """A node of a cluster on this machine, with the token of a home, and until the block ends."""
    env = os.environ | {"HOME": str(home), "RAY_AUTH_MODE": "token"} | variables
    command = [sys.executable, *program, "start", *options, "--block", "--disable-usage-stats"]
    process = subprocess.Popen(
        command, cwd=home, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        for line in process.stdout:
            if "Ray runtime started." in line:
                break
        else:
            raise AssertionError(f"{command} has ended")
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture
def home(tmp_path):
    """A home with a token."""
    token = tmp_path / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("1" * 64)
    return tmp_path / "home"


OTHER_RAY = """
import sys, ray
ray.__version__ = "2.50.0"
from ray.scripts.scripts import main
sys.exit(main())
"""


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_keeps_a_learner_from_its_collectors_is_one_message_and_exit_code_1(
    tmp_path, home, monkeypatch
):
    """By real clusters: one of this Ray, with a node of another torch, and one of another Ray."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_robot.py").write_text(
        "import gymnasium, os\n"
        # The nodes are this machine, and are told not to find it.
        "if 'LEARNER' not in os.environ:\n"
        "    raise ModuleNotFoundError(\"No module named 'my_robot'\", name='my_robot')\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "class Arm(PendulumEnv): pass\n"
        "gymnasium.register('Arm-v0', Arm, max_episode_steps=10)\n"
    )
    old = home / "old" / "torch-1.0.dist-info"  # what importlib.metadata finds first
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    ports = free_port(), free_port()
    addresses = [f"127.0.0.1:{port}" for port in ports]

    def assert_refused(says, *arguments, **env):
        ended = rl_cli(*arguments, env={"HOME": str(home)} | env, timeout=200)
        assert ended.returncode == 1, ended.stderr
        (line,) = [line for line in ended.stderr.splitlines() if "Seed set" not in line]
        assert_names(line, *says)

    def fit(address, *more):
        collector = ("--data.collector", "RayCollector", "--data.collector.address", address)
        return ("fit", "--config", "sac.yaml", *collector, *more, *QUIET)

    def collect(address):
        return ("collect", "--address", address, "--run", "robot")

    with node(home, "--head", f"--port={ports[0]}", "--num-cpus=1"):
        another = (addresses[0], "tokens", "~/.ray/auth_token")
        assert_refused(another, *fit(addresses[0]), RAY_AUTH_TOKEN="2" * 64)
        assert_refused(another, *collect(addresses[0]), RAY_AUTH_TOKEN="2" * 64)
        (tmp_path / "nobody").mkdir()
        none = (addresses[0], "no token", "~/.ray/auth_token")
        for command in fit(addresses[0]), collect(addresses[0]):
            assert_refused(none, *command, HOME=str(tmp_path / "nobody"))
        arm = ("--data.env.id", "my_robot:Arm-v0")
        assert_refused(
            ("env", "node", "'my_robot'", "PYTHONPATH"), *fit(addresses[0], *arm), LEARNER="1"
        )
        resources = f"--resources={json.dumps({by_ray.resource_of('old'): 1})}"
        places = os.pathsep.join([str(old.parent), os.environ.get("PYTHONPATH", "")])
        with node(home, f"--address={addresses[0]}", resources, PYTHONPATH=places):
            assert_refused(("node", "torch 1.0"), *fit(addresses[0], "--data.collector.run", "old"))
    with node(home, "--head", f"--port={ports[1]}", program=("-c", OTHER_RAY)):
        versions = (addresses[1], "Version mismatch")
        assert_refused(versions, *fit(addresses[1]))
        assert_refused(versions, *collect(addresses[1]))


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "says"),
    [
        (
            "gcs/gcs_server",
            "rl-cli: error: The head of the Ray cluster at .* has not answered for 15 s: it has ended, or the "
            "connection is lost. Restart the head, and resume from the last checkpoint: rl-cli fit --ckpt_path "
            "last.",
        ),
        ("raylet/raylet", re.escape(ENDED.strip())),
    ],
)
def test_a_head_that_is_killed_ends_the_run_with_one_message(
    process, says, tmp_path, home, monkeypatch
):
    """Its service, which the learner misses after a while; or the node that the learner is on, with which Ray ends it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    port = free_port()
    options = ("--data.collector", "RayCollector", "--data.collector.address", f"127.0.0.1:{port}")
    budget = ("--data.total_env_steps", "10_000_000", "--data.iterations_per_epoch", "5")
    with node(home, "--head", f"--port={port}") as head:
        run = Command("fit", "--config", "ppo.yaml", *options, *budget, *QUIET)
        wait_until(lambda: list(tmp_path.glob("outputs/*/checkpoints/last.ckpt")), of=run)
        (pid,) = (pid for pid, name in processes_of(head.pid).items() if process in name)
        head.send_signal(signal.SIGSTOP)  # it would end all others with that one
        os.kill(pid, signal.SIGKILL)
        try:
            assert run.wait(200).returncode == 1
        finally:
            head.send_signal(signal.SIGCONT)
    (line,) = [line for line in run.stderr.splitlines() if "Seed set" not in line]
    assert re.fullmatch(says, line), line
    assert load(last_of(tmp_path))["lightning_rl"]["env_steps"] > 0


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_of_two_nodes_runs_the_documented_commands(tmp_path):
    """Both nodes are this machine; budgets are small. A learner is killed on the way, and another one goes on."""
    port, folder = str(free_port()), str(Path(sys.executable).parent)
    env = os.environ | {
        "HOME": str(tmp_path),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    written = {"node0:6379": f"127.0.0.1:{port}", "6379": port, "collectors 8": "collectors 2"}
    few = "--data.num_eval_episodes 1 --trainer.enable_progress_bar false"
    killed = f"--data.iterations_per_epoch 8 --model.random_env_steps 256 {few}"
    joined = None

    def start(command, more=""):
        for documented, here in written.items():
            command = command.replace(documented, here)
        command = command.replace("rl-cli", f"exec {sys.executable} -m lightning_rl")
        return subprocess.Popen(
            f"{command} {more}",
            shell=True,
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(command, more=""):
        process = start(command, more)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{command}: {said}"

    def steps_of(kind):
        (checkpoint,) = tmp_path.glob(f"outputs/{kind}_*/checkpoints/last.ckpt")
        return load(checkpoint)["lightning_rl"]["env_steps"]

    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    token, head, other, fit, collect, fit_there, fit_on = (
        command
        for block in blocks(page.name, page.read_text())
        for command in block.commands
        if "node0:6379" in command or "ray start" in command or "ray get-auth-token" in command
    )
    try:
        for command in token, head, other:
            run(command)
        run(fit, f"--data.total_env_steps 2048 {few}")
        assert steps_of("ppo") == 2048
        joined = start(collect)
        assert "Joined" in joined.stdout.readline()
        learner = start(fit_there, killed)
        wait_until(lambda: list(tmp_path.glob("outputs/sac_*/checkpoints/last.ckpt")))
        before = collectors_of(joined.pid)
        assert len(before) == 1, "the env is stepped on the machine that has joined"
        learner.kill()
        wait_until(lambda: not any(map(is_running, before)), seconds=30)
        steps = steps_of("sac")
        run(fit_on, f"--data.total_env_steps {steps + 256}")
        assert steps_of("sac") == steps + 256
        assert joined.poll() is None, "it waits for the next one"
    finally:
        subprocess.run(
            [f"{folder}/ray", "stop", "--force"], env=env, capture_output=True, check=False
        )
        if joined is not None:
            said, _ = joined.communicate(timeout=90)
    assert joined.returncode == 1
    assert_names(said, "cluster", "head")


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_robot_on_another_node_is_learnt_by_two_learners_one_after_the_other(
    tmp_path, home, monkeypatch
):
    """SAC; the env is stepped on the node of `rl-cli collect`, and the first learner is killed on the way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(home))
    address = f"127.0.0.1:{free_port()}"
    there = ("--data.collector.address", address)
    robot = ("--data.collector", "RayCollector", *there, "--data.collector.run", "robot")
    saved = ("--data.iterations_per_epoch", "62", "--trainer.enable_progress_bar", "false")

    def steps():
        last = list(tmp_path.glob("outputs/*/checkpoints/last.ckpt"))
        return load(last[0])["lightning_rl"]["env_steps"] if last else 0

    def returns():
        (file,) = tmp_path.glob("outputs/*/logs/metrics.csv")
        rows = csv.DictReader(file.open())
        return [float(row["eval/avg_reward"]) for row in rows if row.get("eval/avg_reward")]

    with node(home, "--head", f"--port={address.rpartition(':')[2]}"):
        machine = Command("collect", "--address", address, "--run", "robot")
        machine.wait_for("Joined")
        first = Command("fit", "--config", "sac.yaml", *robot, *saved)
        wait_until(lambda: steps() >= 3000, seconds=600, of=first)
        first.kill()
        second = Command("fit", "--ckpt_path", "last", *there, *saved[2:])
        assert second.wait(1200).returncode == 0, second.stderr
        machine_ends = machine.poll()
    assert machine_ends is None, machine.stderr
    assert steps() == 20_000
    print(returns())
    assert returns()[-1] > -250, returns()
    assert machine.wait(90).returncode == 1
