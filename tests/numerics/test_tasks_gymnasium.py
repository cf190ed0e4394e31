"""The tasks as Gymnasium's envs, and from a configuration."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from lightning_rl import CartPole, PointMass, PushCube
from lightning_rl.envs import GymnasiumEnv
from lightning_rl.extensions.managers import Curriculum, Event
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


@pytest.mark.parametrize("name", ["curriculum/level", "rub"])
def test_what_lasts_longer_than_an_episode_is_refused(name):
    friction = {"name": "friction", "low": 0.1, "high": 0.9}
    settings = {
        "curriculum/level": {"curriculum": {"level": Curriculum("over_steps", {"steps": 10})}},
        "rub": {"events": {"rub": Event("randomize", friction, "startup")}},
    }
    with refused(names=("GymnasiumTask", name, "data.env")):
        GymnasiumTask("PushCube", **settings[name])


def test_an_unknown_render_mode_is_refused():
    with refused(names=("render_mode", "rgb_array", "'x'")):
        GymnasiumTask("PushCube", render_mode="x")
