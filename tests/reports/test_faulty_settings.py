"""Settings and envs that ended in tracebacks, or kept a run from ending."""

import errno
import os
import signal
import threading

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from lightning_rl import RLTrainer
from lightning_rl.cli.app import run
from lightning_rl.envs import GymnasiumEnv
from lightning_rl.envs.gymnasium import making
from lightning_rl.envs.watch import EnvWatch
from lightning_rl.extensions.datasets.record_command import _Interrupt
from tests.messages import assert_names, refused
from tests.variants import before

PPO = (
    *("fit", "--model", "PPO", "--model.policy", "ActorCritic", "--data.env", "CartPole"),
    *("--data.num_envs", "2", "--trainer.logger", "false"),
)
SAC = (
    *("fit", "--model", "SAC", "--model.policy", "SquashedActorCritic"),
    *("--data.env", "PointMass", "--trainer.logger", "false"),
)
MESSAGES = {
    "seed_everything must lie in [0, 4294967295], got -1.": (*PPO, "--seed_everything", "-1"),
    "seed_everything must lie in [0, 4294967295], got 9": (
        *PPO,
        "--seed_everything",
        "99999999999",
    ),
    "data.seed must be at least 0, got -1.": (*PPO, "--data.seed", "-1"),
    "data.eval_seed must be at least 0, got -1.": (*PPO, "--data.eval_seed", "-1"),
    "data.buffer_size must be a whole number, got null; leave it out for 128.": (
        *(*PPO, "--data", "{buffer_size: null}"),
    ),
    "model.gamma must be a number, got null; leave it out for 0.99.": (
        *(*PPO, "--model.gamma", "null"),
    ),
    "model.policy.hidden_sizes must be a list, got null; leave it out for (64, 64).": (
        *(*PPO, "--model.policy.hidden_sizes", "null"),
    ),
    "trainer.video must be a VideoSettings or true or false, got null; leave it out for False.": (
        *PPO,
        "--trainer",
        "{video: null}",
    ),
    "updates_per_env_step must lie in (0, 10000], got 1000000000.0.": (
        *(*SAC, "--model.updates_per_env_step", "1e9"),
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_setting_of_no_sense_is_one_message(message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run(MESSAGES[message])
    assert f"rl-cli: error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("reload_dataloaders_every_n_epochs", "0"),
        ("min_epochs", "data.total_env_steps"),
        ("overfit_batches", "data.total_env_steps"),
        ("min_steps", "data.total_env_steps"),
    ],
)
def test_what_would_break_a_run_in_its_middle_is_refused_at_its_start(name, cure):
    with refused(names=(f"trainer.{name}", "7", cure)):
        RLTrainer(**{name: 7})


def test_there_is_nothing_to_predict(capsys):
    with refused(names=("trainer.predict", "trainer.validate", "lightning_rl.load_policy")):
        RLTrainer(logger=False).predict()
    with pytest.raises(SystemExit):
        run(["predict", "--ckpt_path", "last"])
    assert_names(capsys.readouterr().err, "rl-cli: error:", "'predict'", "validate")


def test_null_stays_where_it_is_allowed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run([*PPO, "--model.target_kl", "null", "--data.seed", "null", "--data.eval_seed", "-1"])
    assert "eval_seed" in capsys.readouterr().err


class ClosesNever(CartPoleEnv):
    """Its close hangs until the test ends."""

    ended = threading.Event()

    def close(self):
        self.ended.wait(60)


def test_a_close_that_hangs_ends_in_a_message():
    name = "ClosesNever-v0"
    gymnasium.register(name, ClosesNever, max_episode_steps=20)
    told = []
    calls = EnvWatch("the training", 0.4, lambda error: told.append(error) or True)
    try:
        env = calls.make(lambda num_envs: GymnasiumEnv(num_envs, id=name, vectorization="sync"), 1)
        threading.Timer(2.0, ClosesNever.ended.set).start()
        with calls("close"):
            env.close()
        assert_names(str(told[0]), "close", "0.4")
    finally:
        ClosesNever.ended.set()
        calls.close()
        del gymnasium.registry[name]


def go_away(env, **kwargs):
    os.chdir("/")


def test_an_env_may_change_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gymnasium.register("GoesAway-v0", before(CartPoleEnv, reset=go_away), max_episode_steps=20)
    small = ("--data.buffer_size", "8", "--data.total_env_steps", "16", "--model.batch_size", "8")
    more = ("--data.num_eval_episodes", "1", "--trainer.accelerator", "cpu")
    try:
        run([*PPO, "--data.env", "GymnasiumEnv", "--data.env.id", "GoesAway-v0", *small, *more])
    finally:
        del gymnasium.registry["GoesAway-v0"]
    assert os.getcwd() == "/"
    (run_dir,) = (tmp_path / "outputs").iterdir()
    assert (run_dir / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_is_one_message(number, monkeypatch):
    def fail(*arguments, **named):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(making, "WorkerVectorEnv", fail)
    with refused(names=("16", "CartPole-v1", "ulimit -n", "data.num_envs", "vectorization: sync")):
        GymnasiumEnv(16, id="CartPole-v1", vectorization="async")


def test_a_second_interrupt_does_not_break_what_is_being_finished(capfd):
    interrupt = _Interrupt()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupt.hold()
        signal.raise_signal(signal.SIGINT)
    finally:
        interrupt.close()
    assert_names(capfd.readouterr().err, "dataset")
