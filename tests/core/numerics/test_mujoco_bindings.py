"""MuJoCo's profiler is off unless it is asked for, its warnings are Python's, and nothing else about it has changed."""

import warnings

import gymnasium
import numpy as np
import pytest

from lightning_rl import GymnasiumEnv
from lightning_rl.envs.gymnasium.mujoco_bindings import (
    convert_mujoco_warnings,
    has_mujoco_profiler,
    set_mujoco_profiler,
)
from tests.messages import assert_names, refused

mujoco = pytest.importorskip("mujoco")


@pytest.fixture(autouse=True)
def _clock_of_the_bindings():
    """MuJoCo's callbacks are the process's."""
    mujoco.set_mjcb_time(None)
    yield
    mujoco.set_mjcb_time(None)
    set_mujoco_profiler(enabled=False)


def rollout(env, steps=20):
    rows = [env.reset(seed=3)[0]]
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, 6)).astype(np.float32)
    for action in actions:
        observation, reward, *_ = env.step(action)
        rows.append(np.append(observation, reward))
    return np.concatenate(rows), env.unwrapped.data.timer[0].duration


def test_physics_is_the_same_bit_for_bit_without_it_and_it_comes_back():
    env = gymnasium.make("HalfCheetah-v5")
    with_profiler, seconds = rollout(env)
    assert seconds > 0
    assert has_mujoco_profiler(env)
    set_mujoco_profiler(enabled=False)
    assert not has_mujoco_profiler(env), f"mujoco {mujoco.__version__} has moved its clock"
    without, after = rollout(env)
    assert after == 0 or after == seconds, "the timer stands still"
    assert np.array_equal(with_profiler, without)
    set_mujoco_profiler(enabled=True)
    assert has_mujoco_profiler(env)
    assert rollout(env)[1] > after


def test_a_clock_of_the_users_goes_on():
    calls = []
    mujoco.set_mjcb_time(lambda: calls.append(0) or 1.0)
    set_mujoco_profiler(enabled=False)
    rollout(gymnasium.make("HalfCheetah-v5"), steps=1)
    assert calls


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_what_mujoco_says_of_a_model_is_a_warning_of_python_and_no_file(
    vectorization, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    mujoco.set_mju_user_warning(None)
    with pytest.warns(DeprecationWarning, match="MuJoCo: compiler attribute 'settotalmass'"):
        env = GymnasiumEnv(2, "HalfCheetah-v5", vectorization=vectorization)
    env.close()
    assert list(tmp_path.iterdir()) == []
    assert "settotalmass" not in "".join(capfd.readouterr())


def test_a_simulation_that_is_unstable_warns_and_one_where_warnings_are_errors_goes_on(capsys):
    mujoco.set_mju_user_warning(None)
    convert_mujoco_warnings()
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><joint type='slide'/><geom size='1'/></body></worldbody></mujoco>"
    )

    def blow_up():
        data = mujoco.MjData(model)
        data.qvel[0] = np.inf
        mujoco.mj_step(model, data)

    with refused(RuntimeWarning, names=("MuJoCo", "Nan, Inf", "QVEL")):
        blow_up()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blow_up()
    assert_names(capsys.readouterr().err, "Nan, Inf", "QVEL")
