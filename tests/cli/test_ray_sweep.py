"""Sweeps by Ray: stand-ins for its nodes and its package, and real clusters of two nodes where it is installed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_rl import ConfigurationError
from lightning_rl.cli.app import run
from lightning_rl.collectors import ray_cluster
from lightning_rl.sweeps import ray_trials, trial_node
from lightning_rl.sweeps import sweep as sweep_file
from lightning_rl.sweeps.ray_trials import RayTrial, RayTrials
from lightning_rl.sweeps.trial_node import Order, Outcome, TrialActor
from lightning_rl.sweeps.trials import RunningTrial, TrialProcess
from tests.cli.test_sweep import (
    SMALL,
    alive,
    cut_off,
    in_a_directory_of_its_own,  # noqa: F401  # for all tests here
    soon,
    state,
)
from tests.commands import Command, rl_cli
from tests.faults.test_ray import (
    free_port,
    home,  # noqa: F401  # a fixture
    needs_ray,
    node,
    processes_of,
)

OVER_RAY = [*SMALL, "--sweep.address", "node0:6379"]


# --- the loop, with a stand-in for where trials run ---


class Elsewhere:
    """In place of `RayTrials`: what `begin` returns is made by a test."""

    words = ", elsewhere"

    def __init__(self, jobs, make):
        self.jobs, self.make = jobs, make

    def begin(self, arguments, log):
        return self.make(arguments, log)

    def check(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class OnANode(RunningTrial):
    """A trial that waits for a moment, runs as a local process, and may be lost with its checkpoint there."""

    def __init__(self, arguments, log, dies):
        self.process = TrialProcess(run, arguments, None, log)
        self.log, self.dies, self.looks = log, dies, 0

    def ended(self):
        self.looks += 1
        if self.looks < 3:
            return False
        self.where = ", on node0"
        if self.dies and list(self.log.parent.glob(f"{self.log.stem}_2*/checkpoints/last.ckpt")):
            self.process.kill()
            self.process.wait(60)
            self.lost = "The actor died."
            return True
        ended = self.process.ended()
        self.exit_code = self.process.exit_code
        return ended

    def terminate(self):
        self.process.terminate()

    def kill(self):
        self.process.kill()

    def last_line(self):
        return self.process.last_line()


def elsewhere(monkeypatch, make, jobs=1):
    monkeypatch.setattr(sweep_file, "RayTrials", lambda *_: Elsewhere(jobs, make))


def test_a_trial_whose_node_dies_goes_on_from_its_checkpoint(monkeypatch, capfd):
    begun = []

    def make(arguments, log):
        begun.append(arguments)
        return OnANode(arguments, log, dies=len(begun) == 1)

    elsewhere(monkeypatch, make)
    run(["sweep", *OVER_RAY, "--data.total_env_steps", "1920"])
    said = capfd.readouterr().out
    assert "1 trials, 1 at a time, elsewhere" in said
    assert "trial 1/1 begins: seed 1, on node0\n" in said
    assert "trial 1/1 was lost, on node0, and goes back to the queue: The actor died.\n" in said
    assert "trial 1/1 goes on: seed 1, on node0\n" in said
    directory, (trial,) = state()
    assert (trial["outcome"], trial["env_steps"]) == ("finished", 1920)
    manifest = json.loads((directory / trial["run"] / "run.json").read_text())
    assert manifest["env_steps_at_start"] > 0
    assert [arguments[1] for arguments in begun] == ["--config", "--ckpt_path"]


class Stub(RunningTrial):
    """A trial that ends as a test has it, at the first look."""

    def __init__(self, lost=None, refusal=None):
        self._lost, self.refusal = lost, refusal

    def ended(self):
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        self.where, self.lost = ", on node1", self._lost
        return True

    def terminate(self):
        pass

    def kill(self):
        pass

    def last_line(self):
        return ""


def test_a_trial_that_is_lost_again_and_again_has_failed(monkeypatch, capfd):
    elsewhere(monkeypatch, lambda *_: Stub(lost="The actor died."))
    with pytest.raises(SystemExit) as stop:
        run(["sweep", *OVER_RAY])
    assert stop.value.code == 1
    assert capfd.readouterr().out.count("goes back to the queue") == sweep_file.LOSSES - 1
    assert state()[1][0]["outcome"] == "failed: lost 3 times in a row: The actor died."


def test_a_node_that_cannot_run_trials_ends_the_sweep_and_not_one_trial_after_the_other(
    monkeypatch, capfd
):
    elsewhere(monkeypatch, lambda *_: Stub(refusal="The node node1 does not see outputs"), jobs=3)
    with pytest.raises(SystemExit) as stop:
        run(["sweep", *OVER_RAY, "--sweep.seeds", "9"])
    assert stop.value.code == 1
    out, err = capfd.readouterr()
    assert err == "rl-cli: error: The node node1 does not see outputs\n"
    directory, trials = state()
    assert out.endswith(f"Resume: rl-cli sweep --resume {directory}\n")
    assert not any(trial["outcome"].startswith("failed") for trial in trials)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep.address", "node0"], "address of a Ray cluster is host:port, as in node0:6379"),
        (["--sweep.address", "127.0.0.1:9"], "cannot be joined: nobody answers there. Start its"),
        (["--sweep.gpus_per_trial", "1"], "sweep.gpus_per_trial is 1, and GPUs are dealt out by"),
        (
            ["--sweep.address", "local", "--trainer.accelerator", "gpu"],
            "trainer.accelerator is gpu, and Ray shows a trial only the GPUs that it keeps",
        ),
        (
            ["--sweep.address", "local", "--sweep.cores_per_trial", "999"],
            "sweep.jobs 1 of 999 cores each (sweep.cores_per_trial) are 999, and this process",
        ),
    ],
)
def test_what_ray_cannot_run_is_refused_before_there_is_a_directory(
    arguments, message, monkeypatch, capfd
):
    monkeypatch.setattr(ray_trials, "refuse_without_ray", lambda what: None)
    with pytest.raises(SystemExit) as stop:
        run(["sweep", *SMALL, *arguments])
    assert stop.value.code == 1
    assert message in capfd.readouterr().err
    assert not Path("outputs").exists()


def test_without_ray_the_extra_is_named(monkeypatch, capfd):
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run(["sweep", *SMALL, "--sweep.address", "local"])
    expected = "sweep.address needs a package that is not installed: pip install 'lightning-rl[ray]"
    assert expected in capfd.readouterr().err


# --- what is asked of Ray, with a stand-in for its package ---


class FakeError(Exception):
    pass


class TaskError(FakeError):
    def __init__(self, cause):
        self.cause = cause


class FakeRay:
    """Of the package, what a trial uses; answers are given by tests."""

    exceptions = SimpleNamespace(RayTaskError=TaskError, RayError=FakeError)

    def __init__(self, nodes=()):
        self.killed = []
        self.nodes = lambda: [{"Alive": up, "Resources": room} for up, room in nodes]

    def wait(self, requests, timeout):
        return [one for one in requests if one.done()], []

    def get(self, request):
        return request.result()

    def kill(self, actor):
        self.killed.append(actor)


class FakeActor:
    def __init__(self):
        self.sent, self.answers = [], {"begin": Future(), "end": Future()}
        self.begin = SimpleNamespace(remote=lambda order: self.answers["begin"])
        self.end = SimpleNamespace(remote=lambda: self.answers["end"])
        send = SimpleNamespace(remote=self.sent.append)
        self.send = SimpleNamespace(options=lambda **_: send)


def on_fake_ray():
    ray, actor = FakeRay(), FakeActor()
    return ray, actor, RayTrial(ray, actor, None)


def test_a_trial_has_ended_once_what_it_wrote_is_seen_here():
    ray, actor, trial = on_fake_ray()
    assert not trial.ended()
    assert trial.where is None
    actor.answers["begin"].set_result("node3")
    assert not trial.ended()
    assert trial.where == ", on node3"
    trial.terminate()
    assert actor.sent == [signal.SIGTERM]
    actor.answers["end"].set_result(Outcome(0, "bye", {"metrics.csv": 4}))
    assert not trial.ended()  # the file system of this machine does not know it yet
    assert ray.killed == [actor]  # but its room is for the next one
    Path("metrics.csv").write_text("ab")
    assert not trial.ended()
    Path("metrics.csv").write_text("abcd")
    assert trial.ended()
    assert (trial.exit_code, trial.last_line(), trial.lost) == (0, "bye", None)


@pytest.mark.parametrize("when", ["begin", "end"])
def test_an_actor_that_is_gone_is_killed_before_another_one_begins(when):
    ray, actor, trial = on_fake_ray()
    if when == "end":
        actor.answers["begin"].set_result("node3")
        assert not trial.ended()
    actor.answers[when].set_exception(FakeError("The actor died.\nThe rest."))
    assert trial.ended()
    assert (trial.lost, trial.exit_code) == ("The actor died.", None)
    assert ray.killed == [actor]


def test_a_trial_that_waits_is_taken_back_and_what_a_node_refuses_is_raised():
    ray, actor, trial = on_fake_ray()
    trial.terminate()
    assert (ray.killed, actor.sent) == ([actor], [])
    actor.answers["begin"].set_exception(TaskError(ConfigurationError("The node is blind.")))
    with pytest.raises(ConfigurationError, match="The node is blind"):
        trial.ended()


def trials_on(nodes, jobs=None, cores=1, gpus=0.0):
    place = RayTrials("local", jobs, cores, gpus)
    place._connection.ray = FakeRay(nodes)
    place._look()
    return place


def test_there_are_as_many_trials_at_a_time_as_the_nodes_have_room_for(monkeypatch):
    monkeypatch.setattr(ray_trials, "refuse_without_ray", lambda what: None)
    nodes = [(True, {"CPU": 8.0, "GPU": 1.0}), (True, {"CPU": 3.0}), (False, {"CPU": 64.0})]
    assert trials_on(nodes).jobs == 11
    assert trials_on(nodes, cores=2).jobs == 5
    assert trials_on(nodes, gpus=0.25).jobs == 4
    assert trials_on(nodes, jobs=2).jobs == 2
    assert trials_on([(True, {})]).jobs == 1  # which waits for a node
    trials_on(nodes, cores=8)._refuse_small_nodes()
    trials_on(nodes, jobs=1, cores=9)._refuse_small_nodes()
    message = r"No node has the 9 cores \(.*\) and 2 GPUs \(.*\) of a trial: the largest has 8 "
    with pytest.raises(ConfigurationError, match=message):
        trials_on(nodes, cores=9, gpus=2)._refuse_small_nodes()


# --- what a node does ---


def order(*arguments, **changes):
    Path("sweep", "trial_000_seed1_2").mkdir(parents=True)
    Path("sweep", "mark").touch()
    made = Order(
        arguments,
        runs="sweep/trial_000_seed1_2",
        log="sweep/log",
        mark="sweep/mark",
        cwd=os.getcwd(),
        threads=3,
        versions=ray_cluster.versions(),
    )
    return made._replace(**changes)


def be(script):
    """What a node starts in place of `rl-cli`, with the same two arguments before the others."""
    return ("-S", "-c", f"import os, signal, sys, time\n{script}")


def test_a_node_runs_a_trial_and_says_what_came_of_it(monkeypatch):
    script = """
os.makedirs("sweep/trial_000_seed1_2/logs")
open("sweep/trial_000_seed1_2/logs/metrics.csv", "w").write("12345")
open(sys.argv[2], "w").write(" ".join([*sys.argv[3:], os.environ["OMP_NUM_THREADS"]]) + "\\n\\n")
sys.exit(3 if "RAY_JOB_ID" not in os.environ else 4)
"""
    monkeypatch.setattr(trial_node, "PROGRAM", be(script))
    monkeypatch.setenv("RAY_JOB_ID", "ffffffff")
    actor = TrialActor()
    assert actor.begin(order("fit", "--config"))
    outcome = actor.end()
    assert outcome == (3, "fit --config 3", {"sweep/trial_000_seed1_2/logs/metrics.csv": 5})


def test_a_trial_on_a_node_gets_signals_and_leaves_no_process(monkeypatch):
    script = """
os.setsid()
if os.fork() == 0:
    time.sleep(100)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
open("ready", "w").write(str(os.getpid()))
time.sleep(100)
"""
    monkeypatch.setattr(trial_node, "PROGRAM", be(script))
    actor = TrialActor()
    actor.begin(order())
    pid = int(soon(lambda: Path("ready").exists() and Path("ready").read_text()))
    left = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(left) == 1
    actor.send(signal.SIGTERM)
    assert actor.end().code == 7
    soon(lambda: not alive(left), timeout=10)


def test_what_a_node_lacks_is_named(monkeypatch):
    good = order()
    for changes, message in (
        ({"versions": {"torch": "1.0"}}, r"The node .* has torch .* instead of 1\.0: install the"),
        ({"cwd": "/nowhere"}, "has no directory /nowhere, in which the sweep was begun"),
        ({"mark": "sweep/other"}, r"The node \S+ does not see \S*sweep, where trials write: set"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            TrialActor().begin(good._replace(**changes))


ACTOR = """
import os, sys, time
from pathlib import Path
from lightning_rl.sweeps import trial_node
trial_node.PROGRAM = ("-c", '''
import os, sys, time
from pathlib import Path
from lightning_rl.sweeps.trials import be_trial
def begin(arguments):
    Path("ready").write_text(str(os.getpid()))
    time.sleep(100)
be_trial(begin, [], None, Path(sys.argv[2]), int(sys.argv[1]))
''')
order = trial_node.Order([], "sweep/t", "sweep/log", "sweep/mark", os.getcwd(), 0, {})
trial_node.TrialActor().begin(order)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_a_trial_ends_with_the_process_that_ray_has_begun():
    order()
    actor = subprocess.Popen([sys.executable, "-c", ACTOR])
    try:
        pid = soon(lambda: Path("ready").exists() and Path("ready").read_text())
        time.sleep(0.2)  # in which a thread that had begun it and ended would have ended it
        assert alive([pid])
    finally:
        actor.kill()
        actor.wait()
    soon(lambda: not alive([pid]), timeout=10)


# --- real clusters ---


def trials_of(*pids):
    """The processes of trials below others."""
    return [
        pid
        for parent in pids
        for pid, name in processes_of(parent).items()
        if trial_node.PROGRAM[1] in name
    ]


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trials_outlive_their_node_and_not_their_sweep(home, monkeypatch):  # noqa: F811
    """On two nodes of one core: one is killed, then the sweep, which is then resumed."""
    monkeypatch.setenv("HOME", str(home))
    address = f"127.0.0.1:{free_port()}"
    cluster = ("--sweep.address", address, "--sweep.cores_per_trial", "1")
    budget = ("--data.total_env_steps", "40_000", "--model.compile", "false")
    with node(home, "--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=1") as head:
        with node(home, f"--address={address}", "--num-cpus=1") as other:
            sweep = Command("sweep", *SMALL, *cluster, *budget, "--sweep.seeds", "4")
            soon(lambda: sweep.poll() is not None or len(cut_off(0)) == 2, timeout=200)
            assert "4 trials, 2 at a time, on 2 nodes of the Ray cluster at" in sweep.stdout
            (there,) = trials_of(other.pid)
            (raylet,) = (
                p for p, name in processes_of(other.pid).items() if "raylet/raylet" in name
            )
            other.send_signal(signal.SIGSTOP)  # it would end in good order
            os.kill(raylet, signal.SIGKILL)
            soon(lambda: not alive([there]), timeout=60)
            other.send_signal(signal.SIGCONT)
        sweep.wait_for(" goes back to the queue: ", timeout=120)
        sweep.wait_for(" goes on: ", timeout=300)
        soon(lambda: cut_off(2) or sweep.poll() is not None, timeout=200)
        here = trials_of(head.pid)
        sweep.kill()
        assert len(here) == 1
        soon(lambda: not alive(here), timeout=30)
        again = rl_cli("sweep", "--resume", "last", timeout=600)
        assert again.returncode == 0, again.stderr
    assert re.search(r"4 trials, [23] of them done, 1 at a time, on 1 node of", again.stdout)
    assert " goes on: " in again.stdout
    directory, trials = state()
    assert [(t["outcome"], t["env_steps"]) for t in trials] == [("finished", 40_000)] * 4
    assert len(list(directory.glob("trial_*_2*"))) == 4, "each went on where it was"
    assert not list(directory.glob(f"{ray_trials.MARK}*"))


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_does_not_see_the_directory_ends_the_sweep(home, monkeypatch, tmp_path):  # noqa: F811
    """The node has a mount of its own over `outputs`, as another machine has."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("only root may mount")
    monkeypatch.setenv("HOME", str(home))
    Path("outputs").mkdir()
    address = f"127.0.0.1:{free_port()}"
    mount = f'mount -t tmpfs none {tmp_path}/outputs && exec {sys.executable} -m ray.scripts.scripts "$@"'
    wrapped = (
        "-c",
        f"import os, sys; os.execvp('unshare', ['unshare', '-m', 'sh', '-c', {mount!r}, 'sh', *sys.argv[1:]])",
    )
    with (
        node(home, "--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=0"),
        node(home, f"--address={address}", "--num-cpus=1", program=wrapped),
    ):
        sweep = rl_cli("sweep", *SMALL, "--sweep.address", address, "--sweep.seeds", "2")
    assert sweep.returncode == 1
    (line,) = [line for line in sweep.stderr.splitlines() if "Seed set" not in line]
    assert "does not see" in line
    assert "set --output_dir to a directory that all nodes see at the same path." in line
    assert "Resume: rl-cli sweep --resume outputs/" in sweep.stdout


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_by_a_ray_of_its_own_a_sweep_gives_the_scores_of_local_processes():
    scores = {}
    for where in ([], ["--sweep.address", "local"]):
        options = ["--sweep.seeds", "2", "--data.total_env_steps", "640", "--sweep.jobs", "2"]
        output = ["--output_dir", f"outputs{len(where)}"]
        sweep = rl_cli("sweep", *SMALL, *options, *where, *output, timeout=200)
        assert sweep.returncode == 0, sweep.stderr
        assert sweep.stderr == ""
        (path,) = Path(output[1]).glob("*_sweep_*/sweep.json")
        scores[output[1]] = [t["score"] for t in json.loads(path.read_text())["trials"]]
    assert scores["outputs0"] == scores["outputs2"]
