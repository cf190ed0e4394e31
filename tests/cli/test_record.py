"""`rl-cli record`: what is recorded is what was done, and it is safe at once."""

import io
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box, Discrete, Tuple

import lightning_rl as rl
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.cli.app import run
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.extensions.datasets import record_command as record
from lightning_rl.extensions.datasets.ahead import ChunksAhead
from lightning_rl.extensions.datasets.record import Recorder, script_action_function
from tests.commands import Command
from tests.envs import ScriptedEnv
from tests.helpers import error_of, last, make_data, make_ppo, train
from tests.messages import assert_names, refused
from tests.numerics.test_taking_over import GYM_HIL, LENGTH, MARK, SHOWN, Schedule, by_itself
from tests.persons import ScriptedSource
from tests.policies import ScriptedPolicy

pytest.importorskip("pyarrow", reason="the extra data is not installed")
pytest.importorskip("av", reason="the extra data is not installed")

STRAIGHT = [0.25, -0.5]


def straight(observation):
    return STRAIGHT


def played(recorder, writer, episodes, script=straight, **settings):
    """Record episodes in which a script acts."""
    choose = script_action_function(script, recorder.env.single_action_space)
    return recorder.record_episodes(writer, episodes, lambda _: choose, **settings)


def recorded(tmp_path, env, episodes, source=None, extra=(), **settings):
    recorder, space = Recorder(env, source, False, extra), env.single_action_space
    writer = rl.EpisodeWriter(tmp_path / "data", env.single_observation_space, space, 10, "show")
    results = list(played(recorder, writer, episodes, **settings))
    writer.finalise()
    env.close()
    return results, rl.read_episodes(tmp_path / "data")


def check(episode):
    """A frame holds what was acted on, what was executed, and what came of it; LeRobot mixed up two steps."""
    steps = len(episode)
    assert torch.equal(episode.observation[:, 0], torch.arange(steps + 1.0)), "the final one too"
    assert torch.equal(episode.observation[1:, 1:], episode.action)
    ends = episode.terminated | episode.truncated
    assert ends.nonzero().flatten().tolist() == [steps - 1]


def test_a_frame_holds_what_was_acted_on_and_what_came_of_it(tmp_path):
    results, episodes = recorded(tmp_path, rl.GymnasiumEnv(1, "Shows-v0"), 3)
    assert [result.steps for result in results] == episodes.lengths == [LENGTH] * 3
    for episode in episodes:
        check(episode)
        assert (episode.action == torch.tensor(STRAIGHT)).all()
        assert torch.equal(episode.reward, episode.action[:, 0])
        assert episode.truncated[-1], "LeRobot: a time-out became terminal on loading"
        assert not episode.terminated[-1]
        assert not episode.intervened.any()
        assert episode.success is None
        assert episode.task == "show"


def test_of_an_intervention_it_holds_what_was_executed_and_how_the_episode_ended(tmp_path):
    results, episodes = recorded(tmp_path, rl.GymnasiumEnv(1, "Shows-v0"), 4, Schedule())
    assert [episode.success for episode in episodes] == [False, True, False, True]
    assert [result.intervened for result in results] == [0, 4, 2, 0]
    for episode, stretches in zip(episodes, Schedule.schedules, strict=True):
        check(episode)
        taken = [t for begin, count in stretches.items() for t in range(begin, begin + count)]
        assert episode.intervened.nonzero().flatten().tolist() == taken
        assert (episode.action[episode.intervened] == torch.tensor([MARK, 0.0])).all()
        assert (episode.action[~episode.intervened] == torch.tensor(STRAIGHT)).all()
        assert episode.terminated[-1]


PAIR = Tuple((Discrete(3, start=-1), Box(-1.0, 1.0, (2,))))
gymnasium.register("Pair-v0", lambda: ScriptedEnv(action_space=PAIR, length=7))


@pytest.mark.parametrize("id", ["tests/StructuredActionEnv-v0", "Pair-v0"])
def test_an_action_of_several_parts_is_recorded_flat(id, tmp_path):
    env = rl.GymnasiumEnv(1, id)
    env.single_action_space.seed(0)
    scripted = env.single_action_space.sample()
    _, (episode,) = recorded(tmp_path, env, 1, script=lambda observation: scripted)
    torch.testing.assert_close(episode.action, torch.from_numpy(np.stack([scripted] * 7)))
    assert not episode.intervened.any()


def again(source, observation):
    """Have the first and the third episode recorded again, after three steps."""
    over = observation[0] == 2 and source.episode in (0, 2)
    return [MARK, (source.episode + 1) / 8], "rerecord" if over else None


def test_what_is_to_be_recorded_again_is_in_no_dataset_and_does_not_count(tmp_path):
    results, episodes = recorded(tmp_path, rl.GymnasiumEnv(1, "Shows-v0"), 2, ScriptedSource(again))
    assert [result.is_saved for result in results] == [False, True, False, True]
    assert [float(episode.action[0, 1]) for episode in episodes] == [2 / 8, 4 / 8]
    for episode in episodes:
        check(episode)


def in_words_of_gym_hil():
    """An env whose first episode is to be recorded again; it says success and a penalty, and once no number."""

    def said(env):
        over = env.age == LENGTH
        ends = {"rerecord_episode": env.steps == LENGTH, "next.success": True} if over else {}
        return {"discrete_penalty": -0.25 * env.age} | ends

    return by_itself(said)


gymnasium.register("InWordsOfGymHil-v0", in_words_of_gym_hil)


def test_gym_hil_is_understood_and_extras_are_kept_by_name(tmp_path):
    env = rl.GymnasiumEnv(1, "InWordsOfGymHil-v0", **GYM_HIL)
    results, episodes = recorded(tmp_path, env, 1, extra=["discrete_penalty"])
    assert [result.is_saved for result in results] == [False, True]
    assert episodes[0].success is True
    penalty = episodes[0].extra["discrete_penalty"]
    assert penalty.tolist() == [-0.25 * t for t in range(1, LENGTH + 1)]


def test_an_extra_that_is_no_number_is_refused(tmp_path):
    with refused(names=("frame", "extra")):
        recorded(tmp_path, rl.GymnasiumEnv(1, "ByItself-v0"), 1, extra=["teleop_action"])


def test_time_cuts_an_episode_and_keeps_its_final_observation(tmp_path):
    _, episodes = recorded(tmp_path, rl.GymnasiumEnv(1, "Shows-v0"), 2, max_steps=4)
    assert episodes.lengths == [4, 4]
    for episode in episodes:
        check(episode)
        assert episode.truncated[-1]


SHOWS = ["--data.env", "GymnasiumEnv", "--data.env.id", "tests.numerics.test_taking_over:Shows-v0"]
STRAIGHTLY = ["--script", "tests.cli.test_record.straight"]
RECORD = ["record", "--path", "data"]
pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    train(path, env="Pendulum-v1", data={"total_env_steps": 64, "iterations_per_epoch": 1})
    return path


def test_a_checkpoint_records_what_it_is_evaluated_by(trained, capsys):
    Path("run.yaml").write_text(str({"data": {"env": an_object("GymnasiumEnv", id="Pendulum-v1")}}))
    given = ["--ckpt_path", str(last(trained)), "--config", "run.yaml", "--seed", "7"]
    run(["record", "--path", "mode", *given, "--episodes", "1"])
    data = make_data("Pendulum-v1", num_envs=1)
    module = make_ppo(data, batch_size=16)
    module.load_state_dict(torch.load(last(trained), weights_only=True)["state_dict"])
    (expected,) = run_episodes(module.policy, data.new_env(), [7])
    data.close()
    (episode,) = rl.read_episodes("mode")
    assert float(episode.reward.double().sum()) == pytest.approx(expected["return"], rel=1e-5)
    assert len(episode) == expected["length"] == 200
    run(["record", "--path", "drawn", *given, "--episodes", "1", "--deterministic", "false"])
    (drawn,) = rl.read_episodes("drawn")
    assert not torch.equal(drawn.action, episode.action)
    assert capsys.readouterr().out.count("Dataset: ") == 2


def an_object(name, **settings):
    return {"class_path": name, "init_args": settings}


def test_a_checkpoint_may_name_a_keyboard_and_no_script_of_others():
    def check_source(source):
        wrapper = an_object("lightning_rl.Intervention", source=source)
        env = an_object("lightning_rl.GymnasiumEnv", id="Pendulum-v1", wrappers=[wrapper])
        return checked_config(yaml.safe_dump({"data": {"env": env}}), Path("a.ckpt"))

    assert check_source({"class_path": "lightning_rl.Keyboard"}).config
    with refused(names="os.system"):
        check_source(an_object("lightning_rl.ScriptedIntervention", policy="os.system"))


def plan(policy, td, generator):
    """Action k of a chunk says the age at which it was planned, and k, both in sixteenths."""
    age = td["observation"][:, :1]
    return torch.stack((age.expand(-1, 4), torch.arange(4.0).expand(len(age), -1)), -1) / 16


CHUNKS = an_object(
    "ActionChunk", env=an_object("GymnasiumEnv", id=SHOWS[-1]), chunk_size=4, execute=3
)
PLANNED = {
    "as in the env": ((), [[(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2), (6, 0)]]),
    "fewer": (("--execute", "2"), [[(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1), (6, 0)]]),
    "after an intervention": (
        ("--source", "tests.numerics.test_taking_over.Schedule", "--real_time", "false"),
        [
            [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2), (6, 0)],
            [(0, 0), MARK, (2, 0), MARK, MARK, MARK, (6, 0)],
            [MARK, MARK, (2, 0), (2, 1), (2, 2), (5, 0), (5, 1)],
        ],
    ),
}


@pytest.fixture
def of_chunks(monkeypatch):
    """Options of a checkpoint whose policy acts by chunks, and of the env of its run."""
    spaces = SHOWN, Box(-1, 1, (4, 2))
    trained = SimpleNamespace(policy=ScriptedPolicy(*spaces, plan))
    monkeypatch.setattr(record, "load_trained", lambda *_, **__: trained)
    Path("run.yaml").write_text(str({"data": {"env": CHUNKS}}))
    return [*RECORD, "--config", "run.yaml", "--ckpt_path", "a.ckpt"]


@pytest.mark.parametrize("name", PLANNED)
def test_a_policy_of_chunks_plans_again_when_it_should(name, of_chunks):
    options, expected = PLANNED[name]
    run([*of_chunks, *options, "--episodes", str(len(expected))])
    for episode, planned in zip(rl.read_episodes("data"), expected, strict=True):
        found = [MARK if x == MARK else (16 * x, 16 * y) for x, y in episode.action.tolist()]
        assert found == planned


def test_while_chunks_are_computed_ahead_an_intervention_asks_for_the_next(of_chunks):
    ahead, asked, outdated = ChunksAhead(4, 4), [], [False]

    def choose(observation, running):
        asked.append(int(observation))
        return observation[:, None] + torch.arange(4.0)

    act = ahead.episode(choose, lambda: outdated[0])
    for step in range(4):
        outdated[0] = step == 1
        act(torch.tensor([float(step)]), torch.ones(1, dtype=torch.bool))
        ahead._thread.submit(int).result()  # the inference before it has ended
    assert asked == [0, 1]
    ahead.close()


def test_the_success_of_an_episode_is_asked_for(of_chunks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("perhaps\ny\nr\nN\n"))
    run([*of_chunks, "--episodes", "3", "--ask", "true"])
    assert [one.success for one in rl.read_episodes("data")] == [True, False, None]
    out = capsys.readouterr().out
    assert out.count("Success? y, n, r to record it again, or Enter if unknown: ") == 5
    assert_names(out, "7 steps")


@pytest.mark.parametrize("max_steps", [None, 4])
def test_what_is_asked_for_is_answered_before_the_env_resets(max_steps):
    """The first observation of the next episode was older than the answer."""
    env, ages = rl.GymnasiumEnv(1, "Shows-v0"), []
    recorder = Recorder(env, ask=lambda: ages.append(env.first_env.unwrapped.age))
    results = list(played(recorder, Mock(), 2, max_steps=max_steps))
    assert ages == [result.steps for result in results] == [max_steps or LENGTH] * 2
    env.close()


def test_a_policy_of_chunks_executes_no_more_than_a_chunk(of_chunks, capsys):
    assert_names(error_of(capsys, *of_chunks, "--execute", "5"), "execute", "[1, 4]", "5")


REFUSED = {
    "nobody acts": (
        SHOWS,
        "No source of actions: set --source (Keyboard, Gamepad, SpaceMouse), --script my_module.my_function, or "
        "--ckpt_path of a policy.",
    ),
    "no env": (
        STRAIGHTLY,
        "record needs an env: --config FILE of a training config, --ckpt_path, or --data.env GymnasiumEnv --data.env.id "
        "CartPole-v1.",
    ),
    "no person": (
        [*SHOWS, "--source", "Keyboard"],
        "The Keyboard reads the keys of a window, but there is no display: set DISPLAY or WAYLAND_DISPLAY (ssh -X, "
        "or a desktop), or use a Gamepad, a function, or a queue.Queue.",
    ),
    "another action": (
        [*SHOWS, "--script", "tests.cli.test_record.neutral_action_of_another"],
        "The script gave the action [1, 2, 3], which is not in Box(-1.0, 1.0, (2,), float32).",
    ),
}  # fmt: skip


def neutral_action_of_another(observation):
    return [1, 2, 3]


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_recorded_is_one_message(options, message, capsys, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert f"rl-cli: error: {message}\n" in f"{error_of(capsys, *RECORD, *options)}\n"


def test_a_function_is_refused_as_an_env_before_it_is_called(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    function = '{"class_path": "os.system", "init_args": {"command": "touch called"}}'
    task = ("record", "--path", "data", "--episodes", "1", "--data.env", function)
    assert_names(error_of(capsys, *task), "os.system")
    assert not Path("called").exists()


def test_the_policy_of_another_env_is_refused(trained, capsys):
    error = error_of(capsys, *RECORD, "--ckpt_path", last(trained), *SHOWS)
    assert_names(error, "observation space", "Box")


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit) as stop:
        run(["record", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for name in ("path", "source", "script", "ckpt_path", "fps", "pictures", "extra"):
        assert f"--{name}" in out


@pytest.mark.parametrize("after", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_at_any_moment_what_was_finished_is_there(after, tmp_path):
    """Each episode whose line is printed is safe, and the next one goes on behind it."""
    process = Command(*RECORD, *SHOWS, *STRAIGHTLY, "--episodes", "100000")
    try:
        process.wait_for(f"episode {after} of")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    told = process.stdout.count("\n")
    episodes = rl.read_episodes("data")
    assert told <= len(episodes) <= told + 1
    for episode in episodes:
        check(episode)
    run([*RECORD, *SHOWS, *STRAIGHTLY, "--episodes", "1"])
    assert len(rl.read_episodes("data")) == len(episodes) + 1


def test_interrupted_it_leaves_a_whole_dataset(tmp_path):
    """LeRobot #2651: half-written frames."""
    process = Command(*RECORD, *SHOWS, *STRAIGHTLY, "--episodes", "100000")
    process.wait_for("episode 3 of")
    os.kill(process.pid, signal.SIGINT)
    process.wait()
    assert process.returncode == 130
    assert "Dataset: data" in process.stdout
    assert "Traceback" not in process.stderr
    episodes = rl.read_episodes("data")
    assert len(episodes) >= 3
    assert not (tmp_path / "data" / ".recording").exists()


def interrupt_in_step(observation):
    """Press Ctrl+C in the fourth step, and note whether that step goes on."""
    steps = Path("steps").read_text() if Path("steps").exists() else ""
    Path("steps").write_text(steps + "a")
    if len(steps) == 3:
        os.kill(os.getpid(), signal.SIGINT)
        Path("steps").write_text(steps + "b")


def hang(observation):
    """Press Ctrl+C twice in a step that does not end."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


def interrupted(script, *options):
    """Record until the script has pressed Ctrl+C."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stop:
        run([*RECORD, *(options or SHOWS), "--script", f"tests.cli.test_record.{script}"])
    assert stop.value.code == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_waits_for_the_end_of_the_step(capfd):
    """Raised in the middle of one, it ended with `cannot release un-acquired lock`."""
    interrupted("interrupt_in_step")
    assert Path("steps").read_text() == "aaab"
    assert_names(capfd.readouterr().err, "step")


def test_ctrl_c_twice_ends_a_step_that_hangs():
    interrupted("hang")


def test_ctrl_c_ends_the_wait_for_an_answer(monkeypatch):
    def answer():
        os.kill(os.getpid(), signal.SIGINT)
        return "y\n"

    monkeypatch.setattr("sys.stdin", SimpleNamespace(readline=answer))
    env = ["--data.env", "GymnasiumEnv", "--data.env.id", "CartPole-v1"]
    interrupted("always_left", *env, "--ask", "true", "--episodes", "1")
    assert not Path("data/meta/info.json").exists()


def always_left(observation):
    return 0


@pytest.mark.parametrize(
    "at",
    [
        "extensions.datasets.record_command.make_env",
        "extensions.datasets.writer.lock_dataset",
        "extensions.datasets.writer.EpisodeWriter._write_info",
    ],
)
def test_interrupted_before_it_has_recorded_it_leaves_what_the_next_run_takes(
    at, tmp_path, monkeypatch
):
    def press(*_, **__):
        for _ in range(2):  # the second one is raised wherever it comes
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(f"lightning_rl.{at}", press)
    interrupted("straight")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    run([*RECORD, *SHOWS, *STRAIGHTLY, "--episodes", "1"])
    assert len(rl.read_episodes("data")) == 1


def test_what_the_writer_refuses_ends_the_recording():
    env, writer = rl.GymnasiumEnv(1, "Shows-v0"), Mock()
    writer.add.side_effect = [None, None, rl.ConfigurationError("the disk is full")]
    with pytest.raises(rl.ConfigurationError, match="the disk is full"):
        list(played(Recorder(env), writer, 2))
    writer.end_episode.assert_not_called()
    env.close()


def test_several_envs_and_others_are_refused():
    for env in (rl.GymnasiumEnv(2, "Shows-v0"), rl.PushCube(2), rl.ActionChunk(1, rl.PushCube)):
        with refused(names="GymnasiumEnv"):
            Recorder(env)
        env.close()
