"""Every kind of env can be recorded, and played for RECAP; an option without effect says so."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from lightning_rl import EpisodeWriter, GymnasiumEnv, PushBlocks, PushCube, read_episodes
from lightning_rl.cli.app import run
from lightning_rl.extensions.datasets.playing import play_side_by_side
from lightning_rl.extensions.datasets.record import Recorder, script_action_function
from lightning_rl.extensions.tasks.probes import FiveDoors
from tests.envs import ScriptedEnv
from tests.messages import assert_names

pytest.importorskip("pyarrow", reason="the extra data is not installed")


def one_to_five(env):
    """End each episode after as many steps as its seed says."""
    return env.age == 1 + (env.seed or 0) % 5


gymnasium.register(
    "reports/OneToFive-v0",
    entry_point=partial(
        ScriptedEnv, terminated=one_to_five, info=lambda env: {"success": (env.seed or 0) % 2 == 0}
    ),
)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_episodes_of_gymnasium_envs_end_with_their_own_final_observation(vectorization):
    env = GymnasiumEnv(4, "reports/OneToFive-v0", vectorization=vectorization)
    episodes = list(
        play_side_by_side(env, lambda *_: torch.zeros(4, dtype=torch.int64), [0, 1, 4], 3)
    )
    env.close()
    for episode, seed in zip(episodes, [0, 1, 4], strict=True):
        length = min(1 + seed % 5, 3)
        assert episode.observation.flatten().tolist() == [float(n) for n in range(length + 1)]
        assert bool(episode.terminated[-1]) is (seed != 4), "the last one was cut"
        assert episode.success is (seed % 2 == 0)


def recorded(env, path, seed):
    space, generator = env.single_action_space, np.random.default_rng(0)
    writer = EpisodeWriter(
        path, env.single_observation_space, space, env.render_fps, pictures="png"
    )
    chooser = script_action_function(
        lambda observation: generator.uniform(-1, 1, space.shape).astype(np.float32), space
    )
    results = list(Recorder(env).record_episodes(writer, 2, lambda _: chooser, seed=seed))
    writer.finalise()
    return results, list(read_episodes(path))


def leaves(observation):
    return dict(observation.items()) if hasattr(observation, "items") else {"": observation}


@pytest.mark.parametrize("task", [PushBlocks, FiveDoors, PushCube], ids=lambda cls: cls.__name__)
def test_a_task_is_recorded_as_a_gymnasium_env_is(task, tmp_path):
    results, episodes = recorded(task(1), tmp_path, seed=5)
    assert [one.steps for one in results] == [len(one.reward) for one in episodes]
    assert [one.success for one in results] == [one.success for one in episodes]
    env, episode = task(1), episodes[0]
    observation, _ = env.reset(seed=[5])
    for t, action in enumerate(episode.action):
        for name, leaf in leaves(observation).items():
            assert torch.equal(leaves(episode.observation)[name][t].to(leaf), leaf[0]), (name, t)
        observation, reward, *_ = env.step(action[None])
        assert float(episode.reward[t]) == pytest.approx(float(reward))


def idle(observation):
    return None


def test_options_without_effect_are_named(tmp_path, capsys):
    options = ["--max_steps", "999", "--fps", "3", "--execute", "2", "--episodes", "1"]
    env = ["--data.env", "lightning_rl.FiveDoors"]
    script = ["--script", "tests.reports.test_played_envs.idle"]
    run(["record", "--path", str(tmp_path / "data"), *env, *script, *options])
    lines = capsys.readouterr().err.splitlines()
    assert_names(lines[0], "--execute 2", "--ckpt_path")
    assert_names(lines[1], "--max_steps 999", "10")
    assert_names(lines[2], "--fps 3", "30")


def test_options_with_an_effect_are_not(tmp_path, capsys):
    env = ["--data.env", "lightning_rl.FiveDoors", "--max_steps", "4", "--episodes", "1"]
    script = ["--script", "tests.reports.test_played_envs.idle"]
    run(["record", "--path", str(tmp_path / "data"), *env, *script])
    assert "no effect" not in capsys.readouterr().err
