"""EnvPool behind the env contract: against Gymnasium's dynamics, and against EnvPool stepped by hand."""

import sys
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from lightning_rl import EnvPoolEnv
from tests.core.numerics.test_envs import plain, play, random_actions, row
from tests.envs import NUMBER
from tests.helpers import assert_same
from tests.messages import refused


def test_a_missing_package_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with refused(names="pip install -e '.[envpool]'"):
        EnvPoolEnv(2, "CartPole-v1")


def test_choices_are_those_of_the_space(monkeypatch):
    config = SimpleNamespace(max_num_players=1, max_episode_steps=9)
    spaces = {"observation": NUMBER, "action": Discrete(3, start=1)}
    spaces = {f"gymnasium_{name}_space": space for name, space in spaces.items()}
    zeros, taken = np.zeros((2, 1), np.float32), []

    def step(actions):
        taken.append(actions.tolist())
        return zeros, zeros[:, 0], zeros[:, 0] > 0, zeros[:, 0] > 0, {}

    fake = SimpleNamespace(
        list_all_envs=lambda: ["X"],
        make_spec=lambda id, **_: SimpleNamespace(config=config, **spaces),
        make_gymnasium=lambda id, **_: SimpleNamespace(reset=lambda: (zeros, {}), step=step),
    )
    monkeypatch.setitem(sys.modules, "envpool", fake)
    env = EnvPoolEnv(2, "X")
    env.reset(seed=0)
    env.step(torch.tensor([0, 2]))
    assert taken == [[1, 3]]


@pytest.fixture
def make():
    pytest.importorskip("envpool")
    return partial(EnvPoolEnv, num_threads=2)


def begin(observation):
    """Return the env of Gymnasium in the state that EnvPool shows."""
    env = gymnasium.make("CartPole-v1", disable_env_checker=True)
    env.reset()
    env.unwrapped.state = observation.numpy().astype(np.float64)
    return env


def test_cart_pole_moves_and_ends_as_in_gymnasium(make):
    """No step is lost or doubled by a reset: every episode ends on the step where Gymnasium's does."""
    env = make(3, "CartPole-v1")
    actions = random_actions(env.single_action_space, 200, 3)
    by_hand = [begin(first) for first in plain(env.reset(seed=[11, 5, 7])[0])]
    ends = 0
    for t, (step, action) in enumerate(zip(play(env, actions), actions, strict=True)):
        for i in range(3):
            expected, reward, terminated, *_ = by_hand[i].step(action[i].numpy())
            assert (bool(step[2][i]), bool(step[3][i])) == (terminated, False), (t, i)
            actual = step[4][i] if terminated else step[0][i]
            assert actual.dtype == torch.float32
            np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-3)
            assert step[1][i] == reward
            if terminated:
                ends += 1
                by_hand[i] = begin(step[0][i])
    env.close()
    assert ends > 15


def test_a_seed_gives_the_same_episodes_again(make):
    env = make(3, "CartPole-v1")
    actions = random_actions(env.single_action_space, 100, 3)
    runs = []
    for seed in (40, [40, 41, 42], 43):
        first = plain(env.reset(seed=seed)[0])
        runs.append([(first,), *(step[:4] for step in play(env, actions))])
    assert_same(runs[0], runs[1])
    assert not torch.equal(runs[0][0][0], runs[2][0][0])
    assert not torch.equal(runs[0][0][0][0], runs[0][0][0][1])
    env.close()


def test_continuous_actions_are_clipped_to_the_space(make):
    given = torch.tensor([[-50.0], [0.5]])
    rewards = {}
    for clip_action in (True, False):
        env = make(2, "HalfCheetah-v5", clip_action=clip_action)
        for factor in (1, 10):
            env.reset(seed=0)
            action = (given * factor).expand(2, 6)
            rewards[clip_action, factor] = env.step(action)[1].clone()
    # The control cost tells what was received.
    assert rewards[True, 1][0] == rewards[True, 10][0]
    assert rewards[False, 1][0] > rewards[False, 10][0]


def test_a_tree_of_observations(make):
    env = make(2, "HopperHop-v1", env_kwargs={"max_episode_steps": 4})
    first = plain(env.reset(seed=0)[0])
    assert set(first) == set(env.single_observation_space.spaces)
    steps = play(env, torch.zeros(6, 2, 4))
    assert all(value.dtype == torch.float32 for value in first.values())
    cut = [t for t, step in enumerate(steps) if step[4] is not None]
    assert cut == [3]
    assert not torch.equal(row(steps[3][4], 0)["position"], row(steps[3][0], 0)["position"])
    env.close()


def test_success_is_said_at_every_step(make):
    env = make(2, "MetaWorld/Reach-v3", env_kwargs={"max_episode_steps": 3})
    env.reset(seed=0)
    for t in range(6):
        *_, truncated, info = env.step(torch.zeros(2, 4))
        assert "success" in info
        assert bool(truncated.all()) == (t in (2, 5))
    assert info["success"].dtype == torch.bool
    assert info["success"].tolist() == [False, False]
    env.close()


def test_reward_terms_add_up_to_the_reward(make):
    """Ant's terms are per step, G1's per second, and its step takes .02 s."""
    for id in ("Ant-v5", "G1JoystickFlatTerrain-v1"):
        env = make(2, id)
        env.reset(seed=0)
        _, reward, _, _, info = env.step(torch.zeros(2, *env.single_action_space.shape))
        assert all(term.dtype == torch.float32 for term in info["rewards"].values())
        assert len(info["rewards"]) >= 4
        torch.testing.assert_close(sum(info["rewards"].values()), reward, rtol=1e-4, atol=1e-6)
        env.close()


@pytest.mark.parametrize("id", ["CartPole-v1", "HalfCheetah-v5"])
def test_pictures_show_the_chosen_envs(make, id, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    env = make(3, id)
    env.make_renderable()
    env.reset(seed=0)
    env.step(torch.as_tensor(np.stack([env.single_action_space.sample() for _ in range(3)])))
    everyone = env.render([0, 1, 2])
    assert everyone.dtype == np.uint8
    assert everyone.shape[-1] == 3
    np.testing.assert_array_equal(env.render([2, 0]), everyone[[2, 0]])
    assert (everyone[0] != everyone[1]).any()


def test_a_task_of_mujoco_without_gl_is_not_drawn(make, monkeypatch):
    """EnvPool would end the process."""
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with refused(names=("HalfCheetah-v5", "MUJOCO_GL=egl")):
        make(1, "HalfCheetah-v5").make_renderable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "CartPol-v1"}, ("'CartPol-v1'", "CartPole-v1")),
        ({"num_envs": 0}, ("num_envs", "at least 1", "0")),
        ({"env_kwargs": {"gravitas": 1}}, ("'CartPole-v1'", "gravitas")),
    ],
)
def test_an_env_that_cannot_be_made_says_why(make, arguments, message):
    with refused(names=message):
        EnvPoolEnv(**{"num_envs": 2, "id": "CartPole-v1"} | arguments)
