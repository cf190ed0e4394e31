"""A robot in a process of its own: limits, clock, heartbeat, failures, and what trains and records on it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

from lightning_rl import (
    SAC,
    ActionChunk,
    EpisodeWriter,
    GymnasiumEnv,
    Intervention,
    InterventionDecision,
    ReplayBuffer,
    RLTrainer,
    ScriptedIntervention,
    Teleoperator,
    read_episodes,
)
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.cli.app import run
from lightning_rl.extensions.datasets.ahead import ChunksAhead
from lightning_rl.extensions.datasets.record import Recorder, script_action_function
from lightning_rl.extensions.robots import bus
from lightning_rl.extensions.robots.env import RobotEnv
from lightning_rl.extensions.robots.stand_in import JOINTS, StandInArm, StandInLeader
from lightning_rl.system.errors import EnvFaultError
from tests.helpers import last, make_data, make_ppo, scalars, train
from tests.messages import assert_names, refused

ARM = "lightning_rl.extensions.robots.stand_in.StandInArm"
LEADER = "lightning_rl.extensions.robots.stand_in.StandInLeader"
LIMITS = {"shoulder.pos": [-90.0, 90.0], "elbow.pos": [-10.0, 45.0]}
FPS = 200.0
SETTINGS = {"robot": ARM, "limits": LIMITS, "max_speed": 1e6, "fps": FPS}


def journal_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sends(path):
    return [entry["shoulder.pos"] for entry in journal_of(path) if entry["call"] == "send"]


def robot_env(num_envs=1, wrappers=(), **settings):
    kwargs = SETTINGS | settings
    return GymnasiumEnv(num_envs, "lightning_rl/Robot-v0", kwargs, wrappers=list(wrappers))


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves."""
    clock = SimpleNamespace(now=100.0)
    clock.sleep_until = lambda when: vars(clock).update(now=max(clock.now, when))
    monkeypatch.setattr(bus, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def arm_of(clock, robot=None, **settings):
    limits = {name: tuple(pair) for name, pair in LIMITS.items()}
    given = {"limits": limits, "max_speed": both(60.0, 60.0), "fps": 10.0}
    given |= {"on_stop": "hold", "max_dropped": 2, **settings}
    return bus.Arm(robot or StandInArm(), given, clock.sleep_until)


def both(shoulder, elbow=0.0):
    return dict(zip(JOINTS, (shoulder, elbow), strict=True))


def test_no_step_leaves_the_limits_or_is_faster_than_allowed(clock):
    rng = np.random.default_rng(0)
    arm = arm_of(clock)
    before = {name: arm.connect()[0][name] for name in JOINTS}
    for _ in range(300):
        target = {name: float(rng.normal(0, 100)) for name in JOINTS}
        seen, report = arm.step(target)
        for name, (low, high) in LIMITS.items():
            wanted, moved = np.clip(target[name], low, high), seen[name] - before[name]
            assert low <= seen[name] <= high
            assert abs(moved) < 6.0 + 1e-9
            whole = moved == pytest.approx(wanted - before[name])
            assert whole or moved == pytest.approx(6.0 * np.sign(wanted - before[name]))
        before = {name: seen[name] for name in JOINTS}
        assert report["sent"] == before


def test_a_target_that_is_no_number_is_refused(clock):
    arm = arm_of(clock)
    arm.connect()
    with refused(bus.RobotLost, names="elbow.pos"):
        arm.step(both(0.0, np.nan))


def test_the_clock_keeps_its_rate_and_counts_late_ticks(clock):
    arm = arm_of(clock)
    arm.connect()
    began = clock.now
    for k in range(1, 4):
        clock.now += 0.03  # inference
        assert arm.step(both(0.0))[1]["missed"] == 0
        if k == 1:
            began = clock.now - 0.1
        assert clock.now == pytest.approx(began + 0.1 * k)
    clock.now += 0.35
    late = clock.now
    assert arm.step(both(0.0))[1]["missed"] == 3
    assert clock.now == pytest.approx(late + 0.1)  # a whole period
    clock.now += 5.0
    arm.observe()  # a reset is not late
    assert arm.step(both(0.0))[1]["missed"] == 0


def test_failures_are_bridged_and_then_the_arm_is_lost(clock):
    arm = arm_of(clock, StandInArm(fails={2: "drop", 5: "lost"}))
    arm.connect()
    seen = [arm.step(both(float(k))) for k in range(1, 5)]
    assert [one[0]["shoulder.pos"] for one in seen] == [1.0, 1.0, 3.0, 4.0]
    assert [one[1]["dropped"] for one in seen] == [0, 1, 0, 0]
    lost = ("3 calls", "ConnectionError")
    arm.step(both(0.0))  # the motion before the lost read, and that read
    with refused(bus.RobotLost, names=lost):
        arm.step(both(0.0))
    assert_names(arm.stop(), "ConnectionError")


def test_a_stop_is_tried_again_and_holds_where_the_arm_is(clock, tmp_path):
    robot = StandInArm(journal=str(tmp_path / "journal"), fails={2: "drop", 3: "drop"})
    arm = arm_of(clock, robot)
    arm.connect()
    arm.step(both(6.0))
    robot._at = both(2.0)  # blocked on its way
    assert arm.stop() == "The arm holds its position."
    assert sends(tmp_path / "journal") == [6.0, 2.0]


LEARNER = """
import sys, time
from lightning_rl.extensions.robots.process import RobotProcess
settings = {"robot": sys.argv[1], "kwargs": {"journal": sys.argv[2]}, "limits": {"shoulder.pos": (-9, 9), "elbow.pos": (-9, 9)},
    "max_speed": {"shoulder.pos": 1e3, "elbow.pos": 1e3}, "fps": 50.0, "on_stop": sys.argv[3], "heartbeat_s": 0.5, "max_dropped": 3}
robot = RobotProcess(settings, 10.0)
robot.ask("connect")
print(robot._process.pid, flush=True)
while True:
    robot.ask("step", {"shoulder.pos": 1.0, "elbow.pos": 2.0})
"""


@pytest.mark.parametrize("on_stop", ["hold", "relax"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_learner_that_is_killed_or_stopped_leaves_a_safe_arm(tmp_path, on_stop, how):
    journal = tmp_path / "journal"
    learner = subprocess.Popen(
        [sys.executable, "-c", LEARNER, ARM, str(journal), on_stop],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        robot = int(learner.stdout.readline())
        until(lambda: len(sends(journal)) > 3)
        assert os.getsid(robot) == robot, "Ctrl+C in the terminal reaches the learner alone"
        learner.send_signal(how)
        until(lambda: not is_running(robot))
        ended = journal_of(journal)
    finally:
        learner.kill()
    assert ended[-1]["call"] == ("send" if on_stop == "hold" else "disconnect")
    assert ("disconnect" in [entry["call"] for entry in ended]) == (on_stop == "relax")
    said = learner.communicate(timeout=60)[1]
    stopped = "The arm holds its position." if on_stop == "hold" else "The arm is relaxed."
    assert_names(said, stopped, *(["heartbeat_s: 0.5"] if how == signal.SIGSTOP else []))


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_env_has_the_spaces_and_units_of_its_robot(tmp_path):
    settings = {"robot_kwargs": {"picture": 8}, "render_mode": "rgb_array"}
    with closing(RobotEnv(**SETTINGS, **settings)) as env:
        observation, _ = env.reset(seed=0)
        assert env.observation_space.contains(observation)
        assert observation["front"].shape == (8, 8, 3)
        observation, *ends, info = env.step(np.array([30.0, 99.0], np.float32))
        assert observation["state"].tolist() == [30.0, 45.0]
        assert not any(ends)
        assert info["executed_action"].tolist() == [30.0, 45.0]
        assert info["intervened"] is False
        assert set(info["metrics"]) == {"late_ticks", "dropped_frames"}
        assert np.array_equal(env.render(), observation["front"])


def scene(observation):
    """A script of a reset: three moves."""
    return None if observation[0] >= 20.0 else observation + np.array([1.0, 0.0])


class Diagonal:
    """An inverse kinematics of one number: both joints move by it."""

    def __init__(self):
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def joints(self, state, action):
        return {name: at + float(action[0]) for name, at in state.items()}


def test_a_reset_goes_home_and_runs_its_script_and_kinematics_turn_steps_into_joints(tmp_path):
    journal = tmp_path / "journal"
    settings = SETTINGS | {"max_speed": 10.0 * FPS, "robot_kwargs": {"journal": str(journal)}}
    settings |= {"home": {"shoulder.pos": 17.0}, "reset_script": f"{__name__}.scene"}
    with closing(RobotEnv(**settings)) as env:
        env.reset()
        assert sends(journal) == [10.0, 17.0, 18.0, 19.0, 20.0]
    with closing(RobotEnv(**SETTINGS, kinematics=f"{__name__}.Diagonal")) as env:
        env.reset()
        observation, *_, info = env.step(np.array([0.5], np.float32))
        assert observation.tolist() == [0.5, 0.5]
        assert "executed_action" not in info


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"limits": {"shoulder.pos": [-9, 9]}}, "shoulder.pos, elbow.pos"),
        ({"limits": {**LIMITS, "elbow.pos": [9, -9]}}, ("limits", "elbow.pos")),
        ({"max_speed": {"elbow.pos": 3.0}}, ("max_speed", "shoulder.pos, elbow.pos")),
        ({"max_speed": 0.0}, ("max_speed", "shoulder.pos")),
        ({"home": {"wrist.pos": 1.0}}, ("home", "wrist.pos")),
        ({"robot": "no_path"}, "robot"),
        ({"robot": "nowhere.to.be_found"}, "ModuleNotFoundError"),
        ({"on_stop": "drop"}, ("on_stop", "hold or relax")),
        ({"step_size": 1.0, "kinematics": "a.b"}, "give one of them"),
        ({"fps": 0}, "fps"),
    ],
)
def test_settings_that_do_not_fit_are_one_message(changed, message):
    with refused(names=message):
        RobotEnv(**SETTINGS | changed)


@pytest.mark.parametrize(
    ("fails", "settings", "message"),
    [
        ({9: "lost"}, {"max_dropped": 2}, "3 calls"),
        ({9: "drop"}, {"max_dropped": 0}, "1 calls"),
        ({9: 60.0}, {"timeout_s": 0.5}, "0.5 s"),
    ],
)
def test_a_robot_that_fails_is_one_message_and_the_dataset_is_whole(
    tmp_path, fails, settings, message
):
    pytest.importorskip("pyarrow")
    env = robot_env(robot_kwargs={"fails": fails}, max_episode_steps=3, **settings)
    recorder = Recorder(env)
    spaces = env.single_observation_space, env.single_action_space
    writer = EpisodeWriter(tmp_path / "data", *spaces, FPS, "")
    choose = script_action_function(lambda observation: observation + 1.0, spaces[1])
    with refused(EnvFaultError, names=message):
        list(recorder.record_episodes(writer, 5, lambda _: choose, seed=0))
    env.close()
    writer.finalise()
    episodes = list(read_episodes(tmp_path / "data"))
    # Each reset and each step reads once, the first reset and each connection once more.
    assert [len(one.reward) for one in episodes] == [3]


def test_a_chunk_that_comes_too_late_is_waited_for_and_outdated_actions_are_skipped():
    """Without a clock: the inference ends when the test lets it."""
    may, ahead, seen = threading.Semaphore(1), ChunksAhead(4, execute=2), []

    def choose(observation, running):
        may.acquire()
        seen.append(float(observation))
        return observation[:, None] + torch.arange(4.0)

    act, running = ahead.episode(choose), torch.ones(1, dtype=torch.bool)
    now = torch.zeros(1)  # one array, as an env's
    actions = [
        act(now.fill_(step), running) for step in range(3)
    ]  # at step 2 the next one is asked for
    actions.append(act(now.fill_(3), running))
    threading.Timer(0.2, may.release, (9,)).start()
    actions += [act(now.fill_(step), running) for step in range(4, 6)]
    assert [float(action) for action in actions] == [0, 1, 2, 3, 4, 5]
    assert seen[:2] == [0.0, 2.0]
    assert ahead.skipped[0] == 2
    assert ahead.waited == 1
    ahead.close()


@pytest.mark.parametrize("execute", [0, 5])
def test_a_chunk_executes_some_of_its_actions(execute):
    with refused(names=("execute", "[1, 4]", execute)):
        ChunksAhead(4, execute)


def env_option(**settings):
    init_args = {"id": "lightning_rl/Robot-v0", "env_kwargs": SETTINGS | settings}
    return f"--data.env={json.dumps({'class_path': 'GymnasiumEnv', 'init_args': init_args})}"


def led_env(**leader):
    env = gymnasium.make("lightning_rl/Robot-v0", **SETTINGS, step_size=2.0)
    return Intervention(env, Teleoperator(LEADER, leader))


def test_a_leader_arm_acts_or_takes_over(tmp_path):
    pytest.importorskip("pyarrow")
    env = robot_env(max_episode_steps=4)
    spaces = env.single_observation_space, env.single_action_space
    writer = EpisodeWriter(tmp_path / "data", *spaces, FPS, "")
    recorder = Recorder(env, Teleoperator(LEADER, {"at": 7.0}), in_charge=True)
    still = script_action_function(lambda observation: observation, spaces[1])
    played = list(recorder.record_episodes(writer, 1, lambda _: still))
    env.close()
    writer.finalise()
    (episode,) = read_episodes(tmp_path / "data")
    assert played[0].intervened == 4
    assert (np.asarray(episode.action) == 7.0).all()

    for events in (True, False):
        with closing(led_env(at=3.0, events=events)) as env:
            env.reset()
            if events:
                *_, info = env.step(np.zeros(2, np.float32))
                assert info["executed_action"].tolist() == [1.0, 1.0]
                assert info["intervened"]
            else:
                with refused(names=("get_teleop_events", "--script")):
                    env.step(np.zeros(2, np.float32))
    # An event before the first step is dropped: it belongs to no episode.
    with closing(led_env(events=True, ends={1: "success", 3: "rerecord_episode"})) as env:
        env.reset()
        ends = [env.step(np.zeros(2, np.float32))[2:4] for _ in range(2)]
        assert ends == [(False, False), (False, True)]
    with refused(names=("RobotEnv", "PendulumEnv", "Gamepad")):
        Teleoperator(LEADER).open(gymnasium.make("Pendulum-v1"))


@pytest.mark.parametrize("answer", [False, lambda: False])
def test_an_arm_and_a_leader_that_are_not_calibrated_are_refused(answer, clock):
    """A leader whose motors did not match its calibration moved the arm, in silence."""
    arm, leader = StandInArm(), StandInLeader()
    arm.is_calibrated = leader.is_calibrated = answer
    for device in (arm_of(clock, arm), bus.Leader(leader)):
        with refused(bus.RobotLost, names="lerobot-calibrate"):
            device.connect()


PAD = """
from lightning_rl.extensions.robots.stand_in import StandInLeader

class Pad(StandInLeader):
    action_features = {"dtype": "float32", "shape": (2,), "names": {"delta_x": 0, "gripper": 1}}
"""


def test_a_gamepad_of_lerobot_is_refused_by_the_names_of_its_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pad.py").write_text(PAD)
    with closing(gymnasium.make("lightning_rl/Robot-v0", **SETTINGS)) as env:
        source = Teleoperator("pad.Pad")
        with refused(names=(*JOINTS, "delta_x", "gripper", "Gamepad", "Keyboard", "step_size")):
            source.open(env)
        source.close()
    # Its `connect` has no `calibrate`.
    bus.Leader(SimpleNamespace(connect=lambda: None, is_calibrated=lambda: True)).connect()


def helps(observation):
    """A person who brings the arm to 30 degrees, and says so."""
    if observation[0] < 30.0:
        return InterventionDecision([1.0, 0.0])
    return InterventionDecision([0.0, 0.0], "success")


def test_sac_trains_on_it_with_help_and_a_resumed_run_does_not_repeat_motions(tmp_path):
    journal = tmp_path / "journal"

    def env(num_envs):
        wrappers = [lambda one: Intervention(one, ScriptedIntervention(helps))]
        more = {"robot_kwargs": {"journal": str(journal)}, "step_size": 5.0}
        more |= {"home": {"shoulder.pos": 0.0}}  # so that each episode has seven steps
        return robot_env(num_envs, wrappers, max_episode_steps=100, **more)

    data = {"num_envs": 1, "buffer_size": 8, "total_env_steps": 48, "replay": ReplayBuffer}
    kwargs = {"env": env, "model": {"algorithm": SAC}, "trainer": {"limit_val_batches": 0}}
    module, _, _ = train(tmp_path / "run", data=data, **kwargs)
    known = scalars(tmp_path / "run")
    assert module.env_steps == 48
    assert {"metrics/late_ticks", "metrics/dropped_frames"} <= set(known)
    before = len(sends(journal))
    with refused(UserWarning, names=("env", "state")):
        module, _, _ = train(
            tmp_path / "run",
            data=data | {"total_env_steps": 56},
            ckpt_path=last(tmp_path / "run"),
            **kwargs,
        )
    # Eight steps, the way home after the seventh, and the stop.
    assert len(sends(journal)) == before + 8 + 1 + 1


def test_a_checkpoint_names_no_robot_without_trust(tmp_path):
    text = f"data: {{env: {{class_path: GymnasiumEnv, init_args: {{id: lightning_rl/Robot-v0, env_kwargs: {{robot: {ARM}}}}}}}}}"
    with refused(names=(ARM, "data.env", "robot", "--trust_code true")):
        checked_config(
            text.replace("GymnasiumEnv", "lightning_rl.GymnasiumEnv"), tmp_path / "x.ckpt"
        )


@pytest.mark.parametrize("given", ["env", "eval_env"])
def test_chunks_that_would_stop_an_arm_are_refused(given, tmp_path):
    journal = tmp_path / "journal"

    def chunked(num_envs):
        kwargs = {"robot_kwargs": {"journal": str(journal)}, "max_episode_steps": 6}
        return ActionChunk(num_envs, lambda n: robot_env(n, **kwargs), 3)

    def act():
        if given == "env":
            data = {"num_envs": 1, "buffer_size": 32}
            train(tmp_path, env=chunked, data=data, trainer={"limit_val_batches": 0})
        else:
            data = make_data(chunked, num_envs=1, num_eval_episodes=1)
            RLTrainer(run_dir=str(tmp_path), accelerator="cpu").validate(make_ppo(data), data)

    with refused(names=("ActionChunk", "data.env", "rl-cli record --ckpt_path")):
        act()
    assert not sends(journal)


@pytest.mark.parametrize(
    ("num_envs", "trainer", "message"),
    [(1, {}, "limit_val_batches: 0"), (2, {"limit_val_batches": 0}, "data.num_envs: 1")],
)
def test_two_envs_that_would_move_one_arm_are_refused(num_envs, trainer, message, tmp_path):
    data = {"num_envs": num_envs, "buffer_size": 8, "total_env_steps": 48}
    with refused(names=message):
        train(
            tmp_path / "run",
            env=lambda n: robot_env(
                n, max_episode_steps=6, robot_kwargs={"journal": str(tmp_path / "j")}
            ),
            data=data,
            model={"batch_size": 4},
            trainer=trainer,
        )
    assert not (tmp_path / "j").exists(), "no arm was connected"


def test_a_policy_is_played_on_it_without_a_screen(tmp_path, monkeypatch):
    """People look at the arm: `rl-cli play` opens no window, and acts without the person's help."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    journal = tmp_path / "journal"
    env = env_option(robot_kwargs={"journal": str(journal)}, max_episode_steps=6)
    small = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"]
    small += ["--data.buffer_size", "8", "--trainer.run_dir", "run"]
    small += ["--data.num_envs", "1", "--data.num_eval_episodes", "2"]
    run(["fit", "--config", "sac.yaml", env, *small])
    trained = len(sends(journal))
    run(["play", "--ckpt_path", str(last("run")), "--trust_code", "true"])
    assert len(sends(journal)) >= trained + 2 * 6
