"""The tasks as Gymnasium's envs, and from a configuration."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from lightning_rl import CartPole, PointMass, PushCube
from lightning_rl.cli.app import run
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.envs import GymnasiumEnv
from lightning_rl.extensions.tasks.gymnasium_tasks import GymnasiumTask
from tests.messages import refused

TASKS = {"CartPole": CartPole, "PushCube": PushCube, "PointMass": PointMass}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.filterwarnings("ignore:.*Box (action|observation) space")
@pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space")
def test_gymnasiums_checker_accepts_the_single_env(name):
    env = gymnasium.make(f"lightning_rl/{name}-v0", render_mode="rgb_array")
    check_env(env.unwrapped)
    env.reset(seed=0)
    picture = env.render()
    assert picture.dtype == np.uint8
    assert picture.shape == (*TASKS[name].render_size, 3)
    env.close()


@pytest.mark.parametrize("name", TASKS)
def test_the_vector_env_is_the_task(name):
    env = gymnasium.make_vec(f"lightning_rl/{name}-v0", num_envs=6, max_episode_steps=4)
    task = TASKS[name](6, max_episode_steps=4)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert np.array_equal(env.reset(seed=5)[0], task.reset(seed=5)[0].numpy())
    env.action_space.seed(0)
    for t in range(10):
        action = env.action_space.sample()
        step, expected = env.step(action), task.step(torch.from_numpy(action))
        assert env.observation_space.contains(step[0])
        for array, tensor in zip(step[:4], expected[:4], strict=True):
            assert np.array_equal(array, tensor.numpy())
        done = step[2] | step[3]
        assert done.all() == (t % 4 == 3)
        assert np.array_equal(step[4]["_success"], ~done)
        assert ("final_obs" in step[4]) == done.any()
        if done.any():
            info = expected[4]
            assert np.array_equal(step[4]["final_obs"], info["final_obs"].numpy())
            final = step[4]["final_info"]
            assert np.array_equal(final["success"], info["success"].numpy())
            assert np.array_equal(final["_success"], done)
            for group in ("rewards", "metrics"):
                for key, value in info[group].items():
                    assert np.array_equal(final[group][key], value.numpy())
    env.close()


def test_the_vector_env_speaks_as_gymnasiums_own():
    """Where an episode ended: same keys and values as `SyncVectorEnv` of single envs gives."""
    batched = gymnasium.make_vec("lightning_rl/PushCube-v0", num_envs=3, max_episode_steps=3)
    looped = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make("lightning_rl/PushCube-v0", max_episode_steps=3)] * 3,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    assert np.array_equal(batched.reset(seed=2)[0], looped.reset(seed=2)[0])
    batched.action_space.seed(1)
    for _ in range(3):
        action = batched.action_space.sample()
        ours, theirs = batched.step(action), looped.step(action)
        for a, b in zip(ours[1:4], theirs[1:4], strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert theirs[3].all()
    assert theirs[4].keys() <= ours[4].keys()
    assert theirs[4]["final_info"].keys() == ours[4]["final_info"].keys()
    assert np.array_equal(np.stack(theirs[4]["final_obs"]), ours[4]["final_obs"])
    for group in ("rewards", "metrics"):
        for key, value in theirs[4]["final_info"][group].items():
            np.testing.assert_array_equal(value, ours[4]["final_info"][group][key])


def test_pictures_of_the_vector_env():
    env = gymnasium.make_vec("lightning_rl/CartPole-v0", num_envs=2, render_mode="rgb_array")
    env.reset(seed=0)
    pictures = env.render()
    assert len(pictures) == 2
    assert pictures[0].shape == (256, 384, 3)
    assert not np.array_equal(*pictures)
    quiet = gymnasium.make_vec("lightning_rl/CartPole-v0", num_envs=2)
    quiet.reset(seed=0)
    assert quiet.render() is None


def test_the_last_picture_is_of_the_end_of_the_episode():
    env = gymnasium.make(
        "lightning_rl/PushCube-v0", render_mode="rgb_array", disable_env_checker=True
    )
    task = env.unwrapped.task
    env.reset(seed=0)
    task.max_episode_steps = 2
    env.step(np.ones(2, np.float32))
    before = env.render()
    *_, truncated, _ = env.step(np.zeros(2, np.float32))
    assert truncated
    assert np.array_equal(env.render(), before)  # it stood still; the next start is elsewhere
    assert not np.array_equal(task.render([0])[0], before)


def test_without_a_seed_envs_begin_at_random():
    def starts():
        env = gymnasium.make_vec("lightning_rl/PointMass-v0", num_envs=2)
        return env.reset()[0], env.reset()[0]

    (a, b), (c, d) = starts(), starts()
    assert len({x.tobytes() for x in (a, b, c, d)}) == 4


def test_a_single_env_goes_on_exactly_by_replay():
    """Its later starts come of `np_random`, which a replay sets."""
    env, other = (GymnasiumEnv(2, "lightning_rl/PointMass-v0") for _ in range(2))
    env.reset(seed=0)
    action = torch.full((2, 2), 0.7)
    for _ in range(130):
        observation = env.step(action)[0].clone()
    assert torch.equal(other.load_state_dict(env.state_dict()), observation)
    for _ in range(120):
        assert torch.equal(env.step(action)[0], other.step(action)[0])
    env.close()
    other.close()


def test_an_unknown_render_mode_is_refused():
    with refused(names=("render_mode", "rgb_array", "'x'")):
        GymnasiumTask("PushCube", render_mode="x")


def test_terms_come_from_yaml(own_directory):
    settings = {
        "action": {"class_path": "Velocity", "init_args": {"scale": 0.2, "clip": 1.0}},
        "rewards": {"goal_progress": 5.0, "step": 0},
        "max_episode_steps": 7,
    }
    content = yaml.safe_load(shipped_configs()["ppo.yaml"].read_text())
    content["data"] |= {"num_envs": 4, "buffer_size": 16, "total_env_steps": 128}
    content["data"] |= {"num_eval_episodes": 2, "iterations_per_epoch": 1}
    content["data"]["env"] = {"class_path": "PushCube", "init_args": settings}
    content["model"]["init_args"]["batch_size"] = 32
    Path("task.yaml").write_text(yaml.safe_dump(content))
    run(["fit", "--config", "task.yaml"])
    config = next(Path("outputs").rglob("config.yaml"))
    saved = yaml.safe_load(config.read_text())["data"]["env"]["init_args"]
    assert saved["action"]["init_args"] == {"scale": 0.2, "clip": 1.0, "drives": None}
    assert saved["action"]["class_path"].endswith("Velocity")
    assert saved["rewards"] == {"goal_progress": 5.0, "step": 0}
    assert saved["max_episode_steps"] == 7
    run(["validate", "--ckpt_path", "last"])
