"""Datasets: what is written is read again, bit for bit but for what a video loses."""

import json
import os
import shutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple

from lightning_rl import (
    ActionChunk,
    ActorCritic,
    ActorOnly,
    DatasetCollector,
    GymnasiumEnv,
    ReplayBuffer,
    VectorEnvWrapper,
)
from lightning_rl.extensions.datasets.minari import write_minari
from lightning_rl.extensions.datasets.playing import play_policy
from lightning_rl.extensions.datasets.reader import read_episodes
from lightning_rl.extensions.datasets.replays import read_replay, write_replay
from lightning_rl.extensions.datasets.ring_fragments import fragments
from lightning_rl.extensions.datasets.writer import EpisodeWriter
from lightning_rl.rollout.contract import next_observations
from lightning_rl.rollout.structured_actions import flat_actions
from tests.core.numerics.test_replay import ACTION as OF_STREAMS
from tests.core.numerics.test_replay import NESTED, VECTOR, Stream
from tests.envs import UNIT, ScriptedEnv, draw
from tests.helpers import assert_same, make_collector
from tests.messages import assert_names, refused
from tests.variants import concrete

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra data")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("av", reason="needs the extra data")

PIXELS = {
    "front": Box(0, 255, (64, 48, 3), np.uint8),
    "wrist": Box(0, 255, (3, 32, 32), np.uint8),
}
OBSERVATION = Dict(
    agent_pos=Box(-1, 1, (3,), np.float64),
    goal=Discrete(5),
    grid=Box(-1, 1, (2, 4), np.float32),
    pixels=Dict(PIXELS),
    touch=MultiBinary(2),
)
ACTION = Box(-9, 9, (2,), np.float32)
FPS = 12.5


def observation(generator, episode, t):
    """A smooth picture, as a codec is made for, and numbers that use all their bits."""
    y, x = np.mgrid[:64, :48]
    front = np.stack([x * 2 + t * 3, y * 2 + episode * 20, np.full_like(x, t * 10)], -1)
    y, x = np.mgrid[:32, :32]
    wrist = np.stack([x * 3, y * 4, np.full_like(x, episode * 30)])
    return {
        "agent_pos": generator.normal(size=3),
        "pixels": {"front": (front % 256).astype(np.uint8), "wrist": wrist.astype(np.uint8)},
        "goal": episode % 5,
        "grid": generator.normal(size=(2, 4)).astype(np.float32),
        "touch": generator.integers(0, 2, 2, dtype=np.int8),
    }


class Recorded:
    """Episodes that are written, and kept to be compared."""

    def __init__(self):
        self.episodes, self.generator = [], np.random.default_rng(0)

    def record(self, writer, *lengths, success=None):
        for length in lengths:
            number = len(self.episodes)
            seen = [observation(self.generator, number, t) for t in range(length + 1)]
            actions = self.generator.normal(size=(length, 2)).astype(np.float32)
            for t in range(length):
                ends = t == length - 1 and number % 2 == 0
                writer.add(seen[t], actions[t], 0.1 * t, ends, False, t % 2 == 1, {"penalty": -t})
            writer.end_episode(seen[-1], success)
            self.episodes.append((seen, actions, success))

    def check(self, path, loss, **settings):
        episodes = read_episodes(path, **settings)
        assert len(episodes) == len(self.episodes)
        assert episodes.lengths == [len(actions) for _, actions, _ in self.episodes]
        for number, (episode, (seen, actions, success)) in enumerate(
            zip(episodes, self.episodes, strict=True)
        ):
            length = len(actions)
            for key in ("agent_pos", "goal", "grid", "touch"):
                expected = np.stack([one[key] for one in seen])
                assert episode.observation[key].numpy().dtype == expected.dtype
                np.testing.assert_array_equal(episode.observation[key].numpy(), expected)
            for key in ("front", "wrist"):
                expected = np.stack([one["pixels"][key] for one in seen]).astype(int)
                error = np.abs(episode.observation["pixels"][key].numpy() - expected)
                assert error.mean(axis=(1, 2, 3)).max() <= loss
            np.testing.assert_array_equal(episode.action.numpy(), actions)
            assert torch.equal(episode.reward, torch.tensor([0.1 * t for t in range(length)]))
            ends = [t == length - 1 for t in range(length)]
            terminal = number % 2 == 0
            assert episode.terminated.tolist() == [end and terminal for end in ends]
            assert episode.truncated.tolist() == [end and not terminal for end in ends]
            assert episode.intervened.tolist() == [t % 2 == 1 for t in range(length)]
            assert torch.equal(episode.extra["penalty"], -torch.arange(length).float())
            assert (episode.success, episode.task) == (success, "push")
            assert episode.final_known


@pytest.mark.parametrize(("pictures", "loss"), [("png", 0), ("video", 4)])
def test_what_is_recorded_is_read_finalised_or_not_and_gone_on_with(pictures, loss, tmp_path):
    path, recorded = tmp_path / "data", Recorded()
    spaces = {"observation_space": OBSERVATION, "action_space": ACTION}
    writer = EpisodeWriter(path, **spaces, fps=FPS, task="push", pictures=pictures)
    recorded.record(writer, 5, 1, 7, success=True)
    recorded.check(path, loss)
    writer.finalise()
    recorded.check(path, loss)
    recorded.record(writer, 4)
    writer = EpisodeWriter(path, **spaces, fps=FPS, task="push", pictures=pictures)
    recorded.record(writer, 2, success=False)
    recorded.check(path, loss, **spaces, fps=FPS)
    writer.finalise()
    recorded.check(path, loss, **spaces, fps=FPS)
    kinds = {file.relative_to(path).parts[0] for file in path.rglob("*") if file.is_file()}
    assert kinds == {"data", "meta", *(["videos"] if pictures == "video" else [])}
    assert len(list(path.rglob("*.parquet"))) == 3, "data, episodes, tasks"


@pytest.mark.parametrize(
    "space", [Box(0, 255, (25, 25, 3), np.uint8), Box(0, 9, (40, 40, 3), np.uint8)]
)
def test_a_grid_of_symbols_comes_back_as_it_was(space, tmp_path, monkeypatch):
    """MiniGrid's codes were filmed, and read as others; what an earlier version filmed goes on."""

    def recorded(path):
        writer, seen = EpisodeWriter(path, space, ACTION, FPS), space.sample()
        writer.add(seen, np.zeros(2), 0.0, True, False)
        writer.end_episode(seen)
        writer.finalise()
        *_, episode = read_episodes(path, observation_space=space)
        return np.array_equal(episode.observation.numpy(), np.stack((seen, seen)))

    for _ in range(2):
        assert recorded(tmp_path / "new")
    with monkeypatch.context() as earlier:
        earlier.setattr(
            "lightning_rl.extensions.datasets.lerobot_format._is_picture",
            lambda space: len(space.shape) == 3,
        )
        assert not recorded(tmp_path / "old")
    assert not recorded(tmp_path / "old")


def test_an_action_that_never_changes_lies_between_its_bounds(tmp_path, caplog):
    """Without an env the least and the greatest bound it: equal ones were refused as no bounds."""
    free = Box(-np.inf, np.inf, (2,), np.float32)
    writer = EpisodeWriter(tmp_path / "data", VECTOR, free, FPS)
    for t in range(4):
        writer.add(np.zeros(VECTOR.shape), np.array([t, 7.0]), 0.0, t == 3, False)
    writer.end_episode(np.zeros(VECTOR.shape))
    writer.finalise()
    action = read_episodes(tmp_path / "data").spaces()[1]
    assert (action.low.tolist(), action.high.tolist()) == ([0.0, 6.5], [3.0, 7.5])
    assert_names(caplog.text, "[1]", "0.5")


def test_statistics_are_those_of_all_frames(tmp_path):
    path, recorded = tmp_path / "data", Recorded()
    writer = EpisodeWriter(path, OBSERVATION, ACTION, FPS, "push", "png")
    recorded.record(writer, 6, 30)
    writer.finalise()
    found = json.loads((path / "meta/stats.json").read_text())
    seen = [one for observations, _, _ in recorded.episodes for one in observations[:-1]]
    state = np.stack([one["agent_pos"] for one in seen])
    columns = {"min": state.min(0), "max": state.max(0), "mean": state.mean(0), "std": state.std(0)}
    for name, expected in columns.items():
        np.testing.assert_allclose(found["observation.state"][name], expected, rtol=1e-9)
    assert found["observation.state"]["count"] == [36]
    front = np.stack([one["pixels"]["front"] for one in seen]) / 255
    for name in columns:
        expected = getattr(front, name)(axis=(0, 1, 2)).reshape(3, 1, 1)
        np.testing.assert_allclose(found["observation.images.front"][name], expected, rtol=1e-9)
    for name, share in {"q01": 0.01, "q50": 0.5, "q90": 0.9}.items():
        exact = np.quantile(state, share, axis=0)
        np.testing.assert_allclose(found["observation.state"][name], exact, rtol=1e-6)
    assert {"next.reward", "action", "index"} <= set(found)


def test_a_discarded_episode_leaves_nothing(tmp_path):
    path, recorded = tmp_path / "data", Recorded()
    writer = EpisodeWriter(path, OBSERVATION, ACTION, FPS, "push")
    recorded.record(writer, 3)

    def add(terminated=False):
        shown = observation(recorded.generator, 1, 0)
        writer.add(shown, np.zeros(2), 5.0, terminated, False, False, {"penalty": 0})

    add()
    writer.discard_episode()
    recorded.record(writer, 2)
    recorded.check(path, 4)
    add(terminated=True)
    with refused(RuntimeError, names="end_episode(final_observation)"):
        add()
    writer.finalise()
    recorded.check(path, 4)
    with refused(RuntimeError, names="end_episode"):
        writer.end_episode(observation(recorded.generator, 1, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"observation_space": Box(-1, 1, (4,))},
            (
                "observation.state",
                "float64",
                "[3]",
                "float32",
                "[4]",
                "keys: {<column>: observation}",
            ),
        ),
        ({"fps": 30}, ("12.5 frames per second", "30 steps per second")),
        (
            {"keys": {"observation.stat": "observation"}},
            ("keys", "'observation.stat'", "close matches: observation.state"),
        ),
    ],
)
def test_a_dataset_of_another_env_is_refused_with_the_cure(settings, message, tmp_path):
    writer = EpisodeWriter(tmp_path / "data", OBSERVATION, ACTION, FPS, "push", "png")
    Recorded().record(writer, 1)
    with refused(names=message):
        read_episodes(tmp_path / "data", **settings)


def remove(pattern):
    def act(path):
        for file in path.rglob(pattern):
            file.unlink()

    return act


def cut_videos(path):
    for file in path.rglob("*.mp4"):
        file.write_bytes(file.read_bytes()[:600])


def old(path):
    info = json.loads((path / "meta/info.json").read_text())
    (path / "meta/info.json").write_text(json.dumps(info | {"codebase_version": "v2.1"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_videos, (".mp4", "keys")),
        (remove("*.mp4"), (".mp4", "No such file")),
        (remove("episodes/*/*.parquet"), ("data", "episode")),
        (old, ("v2.1", "v3.0", "lerobot")),
    ],
    ids=["broken video", "no video", "no episodes", "old format"],
)
def test_a_damaged_dataset_ends_in_one_message(damage, message, tmp_path):
    writer = EpisodeWriter(tmp_path / "data", OBSERVATION, ACTION, FPS, "push")
    Recorded().record(writer, 5)
    writer.finalise()
    damage(tmp_path / "data")
    with refused(names=message):
        read_episodes(tmp_path / "data")[0]


def test_a_writer_refuses_what_would_not_be_one_dataset(tmp_path):
    path = tmp_path / "data"
    writer = EpisodeWriter(path, OBSERVATION, ACTION, FPS, "push")
    Recorded().record(writer, 1)
    shown, end = observation(np.random.default_rng(0), 0, 0), (0.0, False, False)
    with refused(names=("['penalty']", "[]")):
        writer.add(shown, np.zeros(2), *end)
    with refused(names=("'action'", "[3]", "[2]")):
        writer.add(shown, np.zeros(3), *end, extra={"penalty": 0})
    with refused(names="'goal'"):
        writer.add(
            {"agent_pos": np.zeros(3), "pixels": {}}, np.zeros(2), *end, extra={"penalty": 0}
        )
    for settings in (
        (OBSERVATION, Discrete(2), FPS),
        (OBSERVATION, ACTION, 10),
        (Box(-1, 1, (3,)), ACTION, FPS),
    ):
        with refused(names=("data", "12.5 frames per second")):
            EpisodeWriter(path, *settings)
    with refused(names=("Tuple", "Box, Discrete", "gymnasium.wrappers.FlattenObservation")):
        EpisodeWriter(tmp_path / "new", Tuple([ACTION]), ACTION, FPS)
    with refused(names=("nowhere", "meta/info.json")):
        read_episodes(tmp_path / "nowhere")
    assert not Path(tmp_path / "new").exists()


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    for name, act in {
        "pyarrow": lambda: EpisodeWriter(tmp_path / "new", OBSERVATION, ACTION, FPS),
        "av": lambda: EpisodeWriter(tmp_path / "new", OBSERVATION, ACTION, FPS),
        "minari": lambda: write_minari(tmp_path / "new", [], Box(-1, 1, (3,)), ACTION),
    }.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with refused(names="pip install -e '.[data]'"):
                act()
    assert not (tmp_path / "new").exists()


def test_columns_named_by_keys_have_the_shapes_of_the_recording(tmp_path):
    """LeRobot's format has neither pictures with channels first nor scalars."""
    space = Dict(front=Box(0, 255, (3, 32, 40), np.uint8), goal=Discrete(3))
    space.seed(1)
    writer = EpisodeWriter(tmp_path / "data", space, ACTION, FPS, pictures="png")
    writer.add(space.sample(), np.zeros(2), 0.0, True, False)
    writer.end_episode(space.sample())
    writer.finalise()
    keys = {"observation.images.front": "observation.top", "observation.goal": "observation.goal"}
    (plain,), (named,) = read_episodes(tmp_path / "data"), read_episodes(tmp_path / "data", keys)
    assert plain.observation["front"].shape == (2, 3, 32, 40)
    assert torch.equal(named.observation["top"], plain.observation["front"])
    assert torch.equal(named.observation["goal"], plain.observation["goal"])


SEEN = Dict(state=Box(-9, 9, (4,), np.float32), secret=Box(-9, 9, (2,), np.float32))


def test_a_key_that_no_network_reads_may_be_missing(tmp_path):
    """In a dataset for cloning; and in the env where a policy plays, what its critic alone reads."""
    known = Dict(state=SEEN["state"])
    gymnasium.register("Known-v0", partial(ScriptedEnv, known, UNIT, observe=draw, length=3))
    gymnasium.register("Secret-v0", partial(ScriptedEnv, SEEN, UNIT, observe=draw, length=3))
    policy = ActorCritic(SEEN, UNIT, actor_keys=["state"], critic_keys=["state", "secret"])
    (episode,) = play_policy(GymnasiumEnv(1, "Known-v0"), policy, [1], 3)
    assert episode.observation.keys() == {"state"}
    writer = EpisodeWriter(tmp_path / "data", known, UNIT, 30)
    writer.write(episode)
    writer.finalise()
    collected = partial(make_collector, DatasetCollector, num_steps=4, seed=3)
    settings = {"env": GymnasiumEnv(1, "Secret-v0"), "path": str(tmp_path / "data")}
    blind = ActorOnly(SEEN, UNIT, ignore_keys=["secret"])
    rollout = collected(policy=blind, **settings).collect()
    assert torch.equal(rollout["observation", "state"][0, :3], episode.observation["state"][:3])
    with refused(names="observation.secret"):
        collected(policy=policy, **settings)


def test_a_wrapper_of_chunks_reads_demonstrations_in_chunks(tmp_path):
    gymnasium.register("Chunked-v0", partial(ScriptedEnv, VECTOR, UNIT, length=4))
    writer = EpisodeWriter(tmp_path / "data", VECTOR, UNIT, 30)
    for t in range(4):
        writer.add(np.zeros(VECTOR.shape), np.full(1, t / 4), 0.0, t == 3, False)
    writer.end_episode(np.zeros(VECTOR.shape))
    chunks = ActionChunk(1, lambda count: GymnasiumEnv(count, "Chunked-v0"), 2)
    env = concrete(VectorEnvWrapper)(chunks)
    policy = ActorOnly(env.single_observation_space, env.single_action_space)
    path = str(tmp_path / "data")
    rollout = make_collector(DatasetCollector, env, policy, 4, 0, path=path).collect()
    assert rollout["action"][0, :2].flatten().tolist() == [0, 0.25, 0.5, 0.75]


def test_a_pass_reads_each_demonstration_once_and_a_resumed_run_goes_on_in_it(tmp_path):
    env = GymnasiumEnv(2, "CartPole-v1")
    spaces = env.single_observation_space, env.single_action_space
    writer = EpisodeWriter(tmp_path / "data", *spaces, env.render_fps)
    for number in range(5):
        for t in range(number + 1):
            writer.add(np.full(4, number), 0, 1.0, t == number, False)
        writer.end_episode(np.full(4, number))
    policy = ActorCritic(*spaces)

    def collector():
        path = str(tmp_path / "data")
        return make_collector(
            DatasetCollector, env, policy, 4, seed=3, path=path, episodes_per_rollout=2
        )

    def handed_out(collector):
        rollout = collector.collect()
        assert rollout.batch_size == (2, 6)
        numbers = rollout["observation"][:, 0, 0].int().tolist()
        steps = (~rollout["padding"]).sum(1).tolist()
        assert steps == [number + 1 for number in numbers], "nothing of the rollout before is left"
        assert torch.equal(
            next_observations(rollout)[0, steps[0] - 1], torch.full((4,), float(numbers[0]))
        )
        return numbers

    whole = collector()
    drawn = [handed_out(whole) for _ in range(5)]
    passes = [number for numbers in drawn for number in numbers]
    assert sorted(passes[:5]) == sorted(passes[5:]) == list(range(5))
    assert passes[:5] != passes[5:]
    cut, resumed = collector(), collector()
    assert [handed_out(cut) for _ in range(3)] == drawn[:3]
    resumed.load_state_dict(cut.state_dict())
    assert [handed_out(resumed) for _ in range(2)] == drawn[3:]
    env.close()


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """What LeRobot 0.4.4 wrote, and what it has opened of ours: see scripts/lerobot_roundtrip.py."""
    folder = tmp_path_factory.mktemp("exchanged")
    shutil.unpack_archive(Path(__file__).with_name("lerobot_044.zip"), folder)
    return folder


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return import_module("lerobot_roundtrip")


@pytest.mark.parametrize("pictures", ["png", "video"])
def test_what_lerobot_wrote_is_read_and_trained_from(pictures, exchanged, script):
    script.check_ours(exchanged / f"theirs-{pictures}", pictures)


@pytest.mark.parametrize("pictures", ["png", "video"])
def test_what_lerobot_deleted_from_and_merged_is_read(pictures, exchanged, script):
    for name, numbers in {"deleted": (0, 2), "merged": (0, 1, 2) * 2}.items():
        script.check_read(exchanged / f"{name}-{pictures}", pictures, numbers)


@pytest.mark.parametrize("pictures", ["png", "video"])
def test_what_we_write_is_still_what_lerobot_has_opened(pictures, exchanged, script, tmp_path):
    """The same files, of the same tables, of which it read the same numbers, tasks and bounds."""
    opened, written = exchanged / f"ours-{pictures}", tmp_path / "data"
    script.write_ours(written, pictures, finalised=True)
    names = sorted(str(file.relative_to(opened)) for file in opened.rglob("*") if file.is_file())
    assert names == sorted(
        str(file.relative_to(written)) for file in written.rglob("*") if file.is_file()
    )
    for name in names:
        if name.endswith(".parquet"):
            old, new = parquet.read_table(opened / name), parquet.read_table(written / name)
            assert new.schema.equals(old.schema), name
            assert (new.schema.metadata or {}).keys() == (old.schema.metadata or {}).keys()
            same_columns = [key for key in old.column_names if not key.startswith("stats/")]
            assert new.select(same_columns).equals(old.select(same_columns)), name
        elif name.endswith(".json") and "stats" not in name:
            now, then = (json.loads((one / name).read_text()) for one in (written, opened))
            now.pop("action_bounds", None)  # newer, and in a file of ours alone
            assert now == then, name
    tasks = parquet.read_schema(written / "meta/tasks.parquet").metadata[b"pandas"]
    assert json.loads(tasks)["index_columns"] == ["__index_level_0__"]


def contents(episodes):
    return [vars(episode) for episode in episodes]


def test_minari_and_back_is_the_same_bit_for_bit(tmp_path):
    pytest.importorskip("minari", reason="needs the extra data")
    writer = EpisodeWriter(tmp_path / "lerobot", OBSERVATION, ACTION, FPS, "push", "png")
    recorded = Recorded()
    for success in (True, None, False):
        recorded.record(writer, 4, success=success)
    episodes = read_episodes(tmp_path / "lerobot")
    write_minari(tmp_path / "minari", episodes, OBSERVATION, ACTION)
    again = read_episodes(
        tmp_path / "minari", observation_space=OBSERVATION, action_space=ACTION, fps=3
    )
    assert again.lengths == episodes.lengths
    assert_same(contents(episodes), contents(again))
    back = EpisodeWriter(tmp_path / "back", OBSERVATION, ACTION, FPS, pictures="png")
    for episode in again:
        back.write(episode)
    assert_same(contents(episodes), contents(read_episodes(tmp_path / "back")))
    with refused(names="minari"):
        write_minari(tmp_path / "minari", episodes, OBSERVATION, ACTION)


@pytest.mark.parametrize("count", [7, 300])
def test_numbers_of_minari_get_the_dtype_of_the_env(count, tmp_path):
    """A dataset of float64 was refused for an env of float32, unlike LeRobot's."""
    pytest.importorskip("minari", reason="needs the extra data")
    wide = Dict(x=Box(-9, 9, (2,), np.float64), n=Box(0, 999, (1,), np.int64))
    writer, seen = (
        EpisodeWriter(tmp_path / "a", wide, ACTION, FPS),
        {"x": np.ones(2) / 3, "n": [count]},
    )
    writer.add(seen, np.zeros(2), 0.0, True, False)
    writer.end_episode(seen)
    write_minari(tmp_path / "b", read_episodes(tmp_path / "a"), wide, ACTION)
    narrow = Dict(x=Box(-9, 9, (2,), np.float32), n=Box(0, 255, (1,), np.uint8))
    episodes = read_episodes(tmp_path / "b", observation_space=narrow, action_space=ACTION)
    if count > 255:
        with refused(names=("observation.n", "uint8", "300")):
            episodes[0]
        return
    expected = {"n": torch.full((2, 1), 7, dtype=torch.uint8), "x": torch.full((2, 2), 1 / 3)}
    assert_same(episodes[0].observation, expected)


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_bits_are_flat_floats_here_and_the_envs_own_in_the_files_of_others(shape, tmp_path):
    """They were refused as those of another env, and written for Minari as a Box."""
    pytest.importorskip("minari", reason="needs the extra data")
    own, flat = MultiBinary(shape), flat_actions(MultiBinary(shape))
    own.seed(1)
    actions = np.stack([own.sample() for _ in range(3)])
    expected = torch.from_numpy(actions.reshape(3, -1)).float()
    for name, space in {"own": own, "flat": flat}.items():
        writer = EpisodeWriter(tmp_path / name, UNIT, space, FPS)
        for t, action in enumerate(actions.reshape(3, *space.shape)):
            writer.add(np.zeros(1, np.float32), action, 0.0, t == 2, False)
        writer.end_episode(np.zeros(1, np.float32))
        episodes = read_episodes(tmp_path / name, action_space=flat)
        assert_same(episodes[0].action, expected)
        write_minari(tmp_path / f"minari-{name}", episodes, UNIT, flat)
        again = read_episodes(tmp_path / f"minari-{name}", action_space=flat)
        assert again.spaces()[1] == own
        assert_same(again[0].action, expected)
    with refused(names=("another env", own, "StructuredActions(MultiBinary(5))")):
        read_episodes(tmp_path / "minari-own", action_space=flat_actions(MultiBinary(5)))


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_what_minari_wrote_is_read_and_written_as_minari_reads_it(tmp_path, monkeypatch):
    """Float64 rewards and nested infos included."""
    minari = pytest.importorskip("minari", reason="needs the extra data")
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    generator = np.random.default_rng(1)
    space = Dict({"state": Box(-9, 9, (2,), np.float64), "eye": Box(0, 255, (8, 8, 3), np.uint8)})
    buffers = [
        EpisodeBuffer(
            observations={
                "state": generator.normal(size=(length + 1, 2)),
                "eye": generator.integers(0, 256, (length + 1, 8, 8, 3), dtype=np.uint8),
            },
            actions=generator.integers(0, 3, length),
            rewards=list(generator.normal(size=length)),
            terminations=[False] * length,
            truncations=[False] * (length - 1) + [True],
            infos={
                "body": {"height": generator.normal(size=length + 1)},
                "success": np.arange(length + 1) > 2,
            },
        )
        for length in (3, 1)
    ]
    made = minari.create_dataset_from_buffers(
        "toy/test-v0",
        buffers,
        observation_space=space,
        action_space=Discrete(3),
        jpeg_encoding=False,
    )
    episodes = read_episodes(
        tmp_path / "toy/test-v0", observation_space=space, action_space=Discrete(3)
    )
    assert episodes[0].reward.dtype == torch.float64
    assert [episode.success for episode in episodes] == [True, False]
    write_minari(tmp_path / "copy-v0", episodes, space, Discrete(3))
    for left, right in zip(made, minari.load_dataset("copy-v0"), strict=True):
        for name in ("actions", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        for name in ("state", "eye"):
            np.testing.assert_array_equal(left.observations[name], right.observations[name])
        np.testing.assert_array_equal(
            left.infos["body"]["height"][1:], right.infos["body"]["height"][1:]
        )


def all_transitions(replay, n_steps):
    """All that a replay may give, bit for bit, in an order of its own."""
    samples = replay.samples(torch.arange(len(replay)), n_steps, 0.9)
    del samples["intervened",]
    columns = [
        samples[name].flatten(1) if samples[name].dim() > 1 else samples[name][:, None]
        for name in sorted(samples)
    ]
    rows = zip(*[[row.numpy().tobytes() for row in column] for column in columns], strict=True)
    return sorted(rows)


@pytest.mark.parametrize(
    ("space", "padding"), [(VECTOR, True), (NESTED, False)], ids=["vector, padding", "tree"]
)
def test_a_replay_written_out_and_back_gives_the_same_transitions_bit_for_bit(
    space, padding, tmp_path
):
    """A full ring, cut streams, time-outs, interventions: LeRobot's own dump loses the ends of all."""
    replay = ReplayBuffer(space, OF_STREAMS, 3, capacity=60)
    stream = Stream(space, 3, seed=1, person=True, padding=padding)
    for continues in (True, True, False, True):
        replay.extend(stream.next(9, continues))
    write_replay(tmp_path / "data", replay, space, OF_STREAMS, 10, "flail")
    episodes = read_episodes(tmp_path / "data", observation_space=space)  # actions unclipped
    again = read_replay(episodes, space, OF_STREAMS)
    assert len(again) == len(replay) > 20
    for n_steps in (1, 3):
        assert all_transitions(again, n_steps) == all_transitions(replay, n_steps)
    assert all(episode.terminated[-1] ^ episode.truncated[-1] for episode in episodes)
    intervened = sum(int(episode.intervened.sum()) for episode in episodes)
    assert intervened == sum(int(piece["intervened"].sum()) for piece in fragments(replay)) > 0


def test_what_a_replay_cannot_learn_from_is_refused_or_left_out(tmp_path):
    """Of a foreign dataset: no rewards; an episode that time ended, of which nobody saw the end."""
    space = Box(-1, 1, (2,))
    writer = EpisodeWriter(tmp_path / "data", space, space, 10)
    for terminated in (False, True):
        for t in range(3):
            writer.add(np.full(2, t), np.zeros(2), 1.0, terminated and t == 2, False)
        writer.end_episode(np.full(2, 3))
    for file in (tmp_path / "data/meta/episodes").rglob("*.parquet"):
        table = parquet.read_table(file)
        parquet.write_table(table.drop_columns(["final/observation.state", "success"]), file)
    episodes = read_episodes(tmp_path / "data")
    assert not any(episode.final_known for episode in episodes)
    assert len(read_replay(episodes, space, space)) == 2 + 3
    info = json.loads((tmp_path / "data/meta/info.json").read_text())
    for name in ("next.reward", "next.terminated", "next.truncated"):
        del info["features"][name]
    (tmp_path / "data/meta/info.json").write_text(json.dumps(info))
    for ends, expected in {"success": False, "terminated": True, "truncated": False}.items():
        episodes = read_episodes(tmp_path / "data", ends=ends)
        assert bool(episodes[0].terminated[-1]) is expected
    with refused(names=("rewards", "rl-cli label", "keys: {<column>: reward}")):
        read_replay(episodes, space, space)
    chunked = ReplayBuffer(VECTOR, Box(-1, 1, (2, 2)), 1, capacity=10)
    chunked.extend(Stream(VECTOR, 1, seed=1, action=Box(-1, 1, (2, 2)), chunk=2).next(3))
    with refused(names=("replay", "ActionChunk")):
        write_replay(tmp_path / "chunks", chunked, VECTOR, Box(-1, 1, (2, 2)), 10)


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="Linux schedules so")
def test_a_video_is_encoded_without_a_real_time_priority(tmp_path):
    """As root the codec takes it for the thread that opens it, and for its own."""
    from lightning_rl.extensions.datasets.pictures import VideoWriter

    writer = VideoWriter(tmp_path / "a.mp4", 64, 64, 10)
    writer.add(np.zeros((64, 64, 3), np.uint8))
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    found = {os.sched_getscheduler(thread) for thread in (0, *threads)}
    assert not found & {os.SCHED_FIFO, os.SCHED_RR}
    writer.close()
