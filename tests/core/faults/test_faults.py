"""Each fault of a run does what the documentation says, and leaves nothing behind."""

import errno
import json
import multiprocessing
import os
import platform
import shutil
import signal
import tempfile
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.data import DataLoader

from lightning_rl import RLTrainer
from lightning_rl.cli.app import run
from lightning_rl.envs import ActionChunk, GymnasiumEnv
from lightning_rl.envs.gymnasium.workers import WorkerDied
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError, WriteError
from lightning_rl.system.runs import new_run_dir
from lightning_rl.system.signals import interrupted_by_signals
from lightning_rl.training.callbacks.budget import EnvStepBudget
from lightning_rl.training.callbacks.loggers import EnvStepCSV
from lightning_rl.training.quiet import _is_news
from tests.callbacks import at_iteration, callback, signal_at
from tests.commands import ROOT, Command, children_of, is_running, rl_cli, serving, wait_until
from tests.envs import ScriptedEnv, ScriptedVector, zeros
from tests.helpers import assert_same_run, error_of, last, load, make_data, make_ppo, train
from tests.messages import assert_names, refused
from tests.probes import ValueProbe

SHAPES = {
    "reset shape": ("'Faulty-v0'", "observation", "[2]", "[3]"),
    "broadcastable shape": ("'Faulty-v0'", "observation", "[1]", "[3]"),
    "reward shape": ("'Faulty-v0'", "reward", "[2]"),
}


SMALL = [
    *("--data.num_envs", "2", "--data.buffer_size", "16", "--model.batch_size", "32"),
    *("--data.iterations_per_epoch", "2", "--data.num_eval_episodes", "1"),
]
COMMAND = ["fit", "--config", "ppo.yaml", *SMALL, "--data.total_env_steps", "320"]


def alive():
    """Return the threads of this process and its children, but for the one that forks commands."""
    return (children_of("self") - serving()) | set(threading.enumerate())


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch, own_directory):
    """No process, no thread, no temporary file, here or where the system keeps them."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = alive()
    yield
    wait_until(lambda: alive() <= before, 30)
    assert not list(tmp_path.rglob(".tmp-*"))
    assert not list((tmp_path / "tmp").iterdir())


NOTHING = np.zeros(3, np.float32)


def late(value, before):
    """Return a function of an env: another value from its 21st step on."""
    return lambda env: value if env.steps > 20 else before


def at_the_second_end(env):
    """Observe one number in the step in which the time limit ends the second episode or a later one."""
    return NOTHING[: 1 if env.steps > 20 and env.age == 10 else 3]


ANSWERS = {
    "nan observation": {"observe": late(np.float32([0, np.nan, 0]), NOTHING)},
    "nan reward": {"reward": late(float("nan"), 0.0)},
    "reset shape": {"observe": lambda env: NOTHING[: 3 if env.age else 2]},
    "broadcastable shape": {"observe": lambda env: NOTHING[: 1 if env.age else 3]},
    "reward shape": {"reward": np.zeros(2)},
    "late broadcastable shape": {"observe": late(NOTHING[:1], NOTHING)},
    "broadcastable end": {"observe": at_the_second_end},
    "late fractions": {
        "observation_space": gymnasium.spaces.Box(0, 255, (3,), np.uint8),
        "observe": late(NOTHING + np.float32(0.5), NOTHING.astype(np.uint8)),
    },
}


def make_faulty(how):
    """Make an env that goes wrong in a given way; in a worker, perhaps while it is made."""
    if how == "killed when made" and multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    script = {"observation_space": gymnasium.spaces.Box(-1, 1, (3,), np.float32), "observe": zeros}
    return ScriptedEnv(**script | ANSWERS.get(how, {}))


def faulty_vector(num_envs, how, max_episode_steps):
    """Make a batched env whose observation is that of one env for all from some step on."""

    def change(env, results):
        return (results[0][: 1 if env.steps > 20 else num_envs], *results[1:])

    return ScriptedVector(num_envs, partial(make_faulty, "fine"), change=change)


gymnasium.register("Faulty-v0", make_faulty, vector_entry_point=faulty_vector, max_episode_steps=10)
NUMBERS = {
    "nan observation": ("observation", "nan", "env 0", "step 5", "entry [1]"),
    "nan reward": ("reward", "nan", "env 0", "step 4"),
}


def faulty(how, vectorization="sync"):
    make = partial(GymnasiumEnv, id="Faulty-v0", env_kwargs={"how": how})
    return partial(make, vectorization=vectorization)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("how", SHAPES)
def test_a_gymnasium_env_of_wrong_shapes_is_named(how, vectorization, tmp_path):
    with refused(names=SHAPES[how]):
        train(tmp_path / "run", env=faulty(how, vectorization))


LATE = {
    "late broadcastable shape": ("[1]", "[3]"),
    "broadcastable end": ("[1]", "[3]"),
    "late fractions": ("float32", "uint8"),
}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("how", LATE)
def test_what_would_be_broadcast_is_named_at_whichever_step(how, vectorization, tmp_path):
    with refused(names=("Faulty-v0", "observation", *LATE[how])):
        train(tmp_path / "run", env=faulty(how, vectorization))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_what_would_be_broadcast_at_the_end_of_a_chunk_is_named(vectorization, tmp_path):
    inner = faulty("late broadcastable shape", vectorization)
    env = partial(ActionChunk, env=inner, chunk_size=2)
    with refused(names=("observation.observation", "[1]", "[3]")):
        train(tmp_path / "run", env=env)


def test_a_batched_env_that_returns_one_row_for_all_is_named(tmp_path):
    """It begins in the middle of a rollout, of which only the first step was looked at."""
    with refused(names=("GymnasiumEnv", "observation", "[1, 3]", "[4, 3]")):
        train(tmp_path / "run", env=faulty("late", "vector_entry_point"))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("how", NUMBERS)
def test_a_gymnasium_env_that_returns_no_number_is_named(how, vectorization, tmp_path):
    """Whatever the number of minibatches, and before any statistics are spoilt."""
    with refused(FloatingPointError, names=NUMBERS[how]):
        train(
            tmp_path / "run",
            env=faulty(how, vectorization),
            model={"n_epochs": 1, "batch_size": 64, "normalize_reward": True},
            policy={"normalize_observation": True},
            data={"iterations_per_epoch": 1},
        )
    content = load(last(tmp_path / "run"))  # of the iteration before
    assert content["global_step"] == 1
    assert all(
        value.isfinite().all() for value in content["state_dict"].values() if torch.is_tensor(value)
    )


class FaultyTorchEnv(ValueProbe):
    def __init__(self, num_envs, how):
        super().__init__(num_envs, delay=3)
        self.how, self.steps = how, 0

    def observe(self, state):
        observation = super().observe(state)
        if self.how == "observation shape":
            return observation[:, :1].expand(-1, 2)
        if self.how == "nan observation" and self.steps > 20:
            return observation * torch.nan
        if self.how == "late observation" and self.steps == 23:  # no end, which would fail before
            return observation[:1]
        return observation

    def transition(self, state, action):
        moved, reward, terminated, info = super().transition(state, action)
        self.steps += 1
        if self.how == "late reward" and self.steps > 20:
            reward = reward[:1]
        if self.how == "nan reward" and self.steps > 20:
            reward = reward * torch.nan
        return moved, reward, terminated, info


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("observation shape", ConfigurationError, ("FaultyTorchEnv", "observation")),
        ("late reward", ConfigurationError, ("reward", "[1]", "[4]")),
        ("late observation", ConfigurationError, ("observation", "[1, 1]", "[4, 1]")),
        ("nan observation", FloatingPointError, ("nan", "env 0")),
        ("nan reward", FloatingPointError, ("reward", "nan", "env 0", "step 4")),
    ],
)
def test_a_torch_env_that_returns_what_it_should_not_is_named(how, error, message, tmp_path):
    with refused(error, names=message):
        train(tmp_path / "run", env=lambda n: FaultyTorchEnv(n, how))


def test_a_reward_that_would_be_broadcast_within_a_chunk_is_named(tmp_path):
    env = partial(ActionChunk, env=lambda n: FaultyTorchEnv(n, "late reward"), chunk_size=2)
    with refused(names=("reward", "[1]", "[4]")):
        train(tmp_path / "run", env=env)


def test_a_worker_killed_while_envs_are_made_is_named():
    with refused(WorkerDied, names=("of 3 envs", "-9")):
        faulty("killed when made", "async")(3)


def failure(capsys, *arguments):
    return error_of(capsys, *COMMAND, *arguments, alone=True)


def test_a_disk_that_fills_up_ends_the_run_and_leaves_what_was_saved(capsys, monkeypatch):
    """After two checkpoints."""
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if sum("checkpoints/.tmp" in call for call in calls) > 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("lightning_rl.system.files.os.fsync", full)
        error = failure(capsys)
    assert_names(error, "No space left on device", "MiB", "--output_dir")
    assert "outputs/ppo_" in error
    run(["fit", "--ckpt_path", "last"])
    (run_dir,) = Path("outputs").iterdir()
    assert load(last(run_dir))["lightning_rl"]["env_steps"] == 320


def test_a_disk_that_fills_up_under_tensorboard_is_one_message(capsys, monkeypatch):
    """Its thread writes, and meets it first; the run makes 20 events."""
    write, count = RecordWriter.write, []

    def full(writer, data):
        count.append(data)
        if len(count) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    error = failure(capsys)
    (run_dir,) = Path("outputs").iterdir()
    assert_names(error, f"{run_dir}/logs", "No space left on device", "--output_dir")
    assert_names(error, f"rl-cli fit --ckpt_path {run_dir}/checkpoints/last.ckpt")
    outcome = json.loads((run_dir / "run.json").read_text())["outcome"]
    assert outcome.startswith("failed: WriteError: Cannot write")
    monkeypatch.setattr(RecordWriter, "write", write)
    run(["fit", "--ckpt_path", f"{run_dir}/checkpoints/last.ckpt"])
    assert load(last(run_dir))["lightning_rl"]["env_steps"] == 320


def test_a_disk_that_is_full_from_the_start_is_one_message(capsys, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lightning_rl.system.files.os.fsync", full)
    error = failure(capsys)
    assert error.startswith("rl-cli: error: ")
    assert "outputs/ppo_" in error
    assert_names(error, "No space left on device", "--output_dir")
    assert not list(Path("outputs").rglob("events*"))


def test_a_table_that_cannot_be_written_is_one_message(tmp_path):
    table = EnvStepCSV(tmp_path / "metrics.csv")
    table.log_metrics({"a": 1.0})
    table.finalize("")
    table._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115  # the table closes it
    with refused(WriteError, names=("metrics.csv", os.strerror(errno.ENOSPC), "--output_dir")):
        table.log_metrics({"a": 1.0})
    table.finalize("failed")


@pytest.mark.parametrize("loggers", ["true", "false"])
def test_a_run_directory_that_is_deleted_is_said_to_be(loggers, capsys, monkeypatch):
    reached = EnvStepBudget._reached

    def delete(self, trainer, module):
        if trainer.global_step == 5:
            shutil.rmtree(trainer.run_dir)
            deleted.append(trainer.run_dir)
        return reached(self, trainer, module)

    deleted = []
    monkeypatch.setattr(EnvStepBudget, "_reached", delete)
    error = failure(capsys, "--trainer.logger", loggers)
    assert_names(error, "rl-cli: error:", deleted[0])
    assert not deleted[0].exists()


@pytest.mark.parametrize("part", ["replaced", ".lock"])
def test_a_run_directory_that_is_deleted_in_part_or_replaced_is_one_error(tmp_path, part):
    run_dir = tmp_path / "run"

    def spoil(trainer):
        if part == "replaced":  # by a copy
            run_dir.rename(tmp_path / "moved")
            shutil.copytree(tmp_path / "moved", run_dir)
        else:
            (run_dir / part).unlink()

    with refused(WriteError, names=(run_dir, "last.ckpt", "rl-cli fit --ckpt_path")):
        train(run_dir, trainer={"callbacks": [at_iteration(4, spoil)]})


@pytest.mark.parametrize("name", ["fit", "validate", "test"])
def test_a_trainer_without_its_data_module_says_what_it_needs(name, tmp_path):
    data = make_data()
    module, trainer = make_ppo(data), RLTrainer(run_dir=str(tmp_path))
    for other in (None, DataLoader([1]), LightningDataModule()):
        got = "none" if other is None else type(other).__name__
        with refused(names=("RLDataModule", got, f"trainer.{name}(model, data)")):
            getattr(trainer, name)(module, other)


def test_a_result_that_cannot_be_written_is_printed(tmp_path, capsys):
    module, data, trainer = train(tmp_path)
    (tmp_path / "evaluation.json").mkdir()
    capsys.readouterr()
    with refused(WriteError, names=("evaluation.json", "--trainer.run_dir")):
        trainer.validate(module, data)
    assert_names(capsys.readouterr().out, "average return", "384 env steps")


def test_an_output_directory_that_cannot_be_written_says_so(capsys, monkeypatch):
    Path("file").touch()
    error = failure(capsys, "--output_dir", "file")
    assert "Cannot write file/ppo_" in error
    assert_names(error, os.strerror(errno.ENOTDIR), "--output_dir")

    def read_only(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("lightning_rl.system.files.os.replace", read_only)
    assert_names(failure(capsys), os.strerror(errno.EROFS), "--output_dir")


def test_runs_that_start_at_once_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rl.system.runs.time.strftime", lambda form: "20260101_000000")
    context = multiprocessing.get_context("fork")
    barrier, chosen = context.Barrier(4), context.Queue()

    def choose():
        names = []
        for _ in range(20):
            barrier.wait()
            names.append(str(new_run_dir(tmp_path, "same")))
        barrier.wait()  # from Python 3.13 on, a forked child removes its empty directories when it ends
        chosen.put(names)

    processes = [context.Process(target=choose) for _ in range(4)]
    for process in processes:
        process.start()
    names = [name for _ in processes for name in chosen.get(timeout=30)]
    for process in processes:
        process.join()
    chosen.close()
    chosen.join_thread()
    assert len(set(names)) == 80


def interrupt(*numbers):
    """Make a callback that sends this process signals while it trains."""

    def send_all(trainer):
        for number in numbers:
            os.kill(os.getpid(), number)

    return at_iteration(4, send_all, "on_train_batch_start")


def test_ctrl_c_twice_ends_the_run_at_once_without_saving(tmp_path):
    env = partial(GymnasiumEnv, id="CartPole-v1", vectorization="async")
    twice = {"callbacks": [interrupt(signal.SIGINT, signal.SIGINT)]}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        train(tmp_path / "run", env=env, trainer=twice)
    assert load(last(tmp_path / "run"))["global_step"] == 3  # the end of the epoch before
    assert signal.getsignal(signal.SIGINT) == before
    train(tmp_path / "whole", env=env)
    train(tmp_path / "run", env=env, ckpt_path=last(tmp_path / "run"))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_second_sigterm_ends_the_run_at_once_without_saving(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rl.training.callbacks.graceful_stop.SAME_SIGNAL_SECONDS", 0.0)
    twice = {"callbacks": [interrupt(signal.SIGTERM, signal.SIGTERM)]}
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        train(tmp_path / "run", trainer=twice)
    assert load(last(tmp_path / "run"))["global_step"] == 3  # the end of the epoch before


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1, signal.SIGTERM)],
    ids=["sent twice at once", "after a warning"],
)
def test_a_sigterm_that_asks_for_nothing_new_lets_the_run_save(numbers, tmp_path):
    _, _, trainer = train(tmp_path / "run", trainer={"callbacks": [interrupt(*numbers)]})
    assert trainer.stop_signal == signal.SIGTERM
    assert load(last(tmp_path / "run"))["global_step"] == 5


def test_a_signal_before_training_is_told_to_who_ends_the_process():
    """`fit` is a block within the command's, which has the exit code."""
    with interrupted_by_signals() as of_command:
        with pytest.raises(KeyboardInterrupt), interrupted_by_signals() as of_fit:
            signal.raise_signal(signal.SIGTERM)
        assert of_command == of_fit == [signal.SIGTERM]


def test_tasks_that_slurm_starts_for_cores_are_one_message_with_the_cure(
    tmp_path, monkeypatch, caplog
):
    slurm = {"JOB_NAME": "train", "JOB_ID": "7", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with refused(names=("--ntasks=4", "--ntasks-per-node=4", "--cpus-per-task")):
        train(tmp_path / "run")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    train(tmp_path / "run", data={"total_env_steps": 64})
    said = [record for record in caplog.records if "auto-requeueing" in record.getMessage()]
    assert [_is_news(record) for record in said] == [False]


def test_a_block_of_another_thread_may_end_first():
    of_thread = ExitStack()
    worker = threading.Thread(target=of_thread.enter_context, args=[interrupted_by_signals()])
    worker.start()
    worker.join()
    with interrupted_by_signals() as came:
        of_thread.close()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGTERM]


def test_a_signal_that_comes_while_the_ranks_agree_is_not_lost(tmp_path, monkeypatch):
    def exchanged(number):
        asked.append(number)
        if len(asked) == 4:  # what this process gave to the others is on its way
            os.kill(os.getpid(), signal.SIGTERM)
        return number

    asked = []
    stand_in = SimpleNamespace(max_over_ranks=exchanged, world_size=ranks.world_size)
    monkeypatch.setattr("lightning_rl.training.callbacks.graceful_stop.ranks", stand_in)
    _, _, trainer = train(tmp_path / "run")
    assert asked[3:] == [0, signal.SIGTERM]
    assert trainer.stop_signal == signal.SIGTERM
    assert load(last(tmp_path / "run"))["global_step"] == trainer.global_step < 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_one_signal_saves_and_leaves_nothing(number, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under `nohup`
    env = partial(GymnasiumEnv, id="CartPole-v1", vectorization="async")
    _, _, trainer = train(tmp_path / "run", env=env, trainer={"callbacks": [interrupt(number)]})
    signal.signal(signal.SIGHUP, before)
    assert trainer.stop_signal == number
    assert load(last(tmp_path / "run"))["global_step"] == 5


def test_the_same_trainer_goes_on_after_a_signal(tmp_path):
    """It evaluates and saves again, and says that it has finished."""
    evaluations = []
    count = callback(on_validation_end=lambda trainer, _: evaluations.append(trainer.global_step))
    callbacks = [signal_at(4), count]
    module, data, trainer = train(tmp_path / "run", trainer={"callbacks": callbacks})
    assert (trainer.stop_signal, evaluations) == (signal.SIGTERM, [3])
    trainer.fit(module, data, ckpt_path=last(tmp_path / "run"))
    assert (trainer.stop_signal, evaluations) == (None, [3, 6])
    assert load(last(tmp_path / "run"))["global_step"] == 6
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"] == "finished"


def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _, _, trainer = train(tmp_path / "run", trainer={"callbacks": [interrupt(signal.SIGHUP)]})
    assert trainer.stop_signal is None
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN


def test_a_run_is_kept_to_one_process_and_its_kill_leaves_nothing(capsys):
    """While it lives a second one is refused; after a SIGKILL it is not, and no worker is left."""
    endless = ("--data.total_env_steps", "1000000", "--model.compile", "false")
    in_workers = ("--data.env.vectorization", "async")
    process = Command("fit", "--config", "ppo.yaml", *SMALL, *endless, *in_workers)
    wait_until(lambda: list(Path().glob("outputs/*/checkpoints/last.ckpt")), of=process)
    (run_dir,) = Path("outputs").iterdir()
    with pytest.raises(SystemExit) as stop:
        run(["fit", "--ckpt_path", "last", "--data.total_env_steps", "64"])
    assert stop.value.code == 1
    assert_names(
        capsys.readouterr().err.strip(),
        "rl-cli: error:",
        run_dir.absolute(),
        f"process {process.pid}",
        platform.node(),
        "SIGTERM",
        "--exp_name",
    )
    run(["validate", "--ckpt_path", "last"])  # which writes nothing of the run's
    children = process.children()
    process.kill()
    assert len(children) >= 2
    wait_until(lambda: not any(map(is_running, children)), 60)
    assert load(last(run_dir))["global_step"] >= 2
    steps = load(last(run_dir))["lightning_rl"]["env_steps"] + 64
    run(["fit", "--ckpt_path", "last", "--data.total_env_steps", str(steps)])
    assert not (run_dir / ".lock").exists()


def test_kills_while_saving_lose_nothing():
    script = ROOT / "scripts" / "kill_test.py"
    outcome = rl_cli("--kills", "4", "--iterations", "10", "--check", program=script)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "| killed | 4 |" in outcome.stdout
    assert "| unreadable `last.ckpt` | 0 |" in outcome.stdout
