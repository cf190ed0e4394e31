"""Random numbers of envs: global generators in workers, and a source of its own for a TorchEnv."""

from contextlib import closing

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl import GymnasiumEnv, RslRlVecEnv, TensorSimulator
from tests.envs import ScriptedEnv, ScriptedTask
from tests.messages import refused
from tests.variants import variant


def drawn():
    """Draws from NumPy's and torch's global generators."""

    def draw_globally(env):
        return np.array([np.random.uniform(-1, 1), float(torch.rand(()))], np.float32)

    return ScriptedEnv(
        spaces.Box(-1, 1, (2,)), observe=draw_globally, terminated=lambda env: env.age >= 4
    )


gymnasium.register("tests/Drawn-v0", drawn)


def walked(env, steps):
    return torch.stack(
        [env.step(torch.zeros(2, dtype=torch.int64))[0].clone() for _ in range(steps)]
    )


def test_workers_draw_numbers_of_their_own_that_a_seed_and_a_resume_repeat():
    with closing(GymnasiumEnv(2, "tests/Drawn-v0", vectorization="async")) as env:
        env.reset(seed=1)
        seen = walked(env, 6)
        state = env.state_dict()
        following = walked(env, 6)
        env.reset(seed=1)
        assert torch.equal(walked(env, 6), seen)
    assert (seen[:, 0] != seen[:, 1]).all()
    assert not torch.equal(seen[:3], seen[4:])  # nor is an episode like the one before it
    with closing(GymnasiumEnv(2, "tests/Drawn-v0", vectorization="async")) as env:
        env.load_state_dict(state)
        assert torch.equal(walked(env, 6), following)


def pushed(num_envs):
    """A point that is pushed at random, and seen through a noise of its own."""

    def move(env, state, action):
        x = state["x"] + env.uniform(1)
        return {"x": x, "seen": x + env.uniform(1, stream=1)}, x[:, 0]

    return ScriptedTask(
        num_envs,
        lambda uniform: {"x": uniform, "seen": uniform},
        move,
        observe=lambda state: torch.cat([state["x"], state["seen"]], 1),
    )


def test_a_random_transition_depends_on_seed_episode_and_step_alone():
    def play(num_envs, seeds, steps=8):
        env = pushed(num_envs)
        env.reset(seed=seeds)
        return torch.stack([env.step(torch.zeros(num_envs, 1))[0] for _ in range(steps)]), env

    together, env = play(3, [4, 5, 6])
    alone, _ = play(1, [5])
    assert torch.equal(together[:, 1:2], alone)
    push, noise = together[:4, :, 0].diff(dim=0), (together[..., 1] - together[..., 0])[1:4]
    assert (push != noise).all()  # each purpose has a stream of its own
    state, other = env.state_dict(), pushed(3)
    other.load_state_dict(state)
    action = torch.zeros(3, 1)
    assert torch.equal(env.step(action)[0], other.step(action)[0])


class VecEnv:
    """An env as rsl_rl trains on it: episodes end by a fall, or by time after three steps."""

    num_actions, device, max_episode_length = 2, "cpu", 3

    def __init__(self, num_envs):
        self.num_envs, self.t = num_envs, torch.zeros(num_envs, dtype=torch.int64)

    def get_observations(self):
        seen = self.t[:, None].float().repeat(1, 3)
        return seen, {"observations": {"critic": seen.repeat(1, 2)}}

    def reset(self):
        self.t.zero_()
        return self.get_observations()

    def step(self, action):
        self.t = self.t + 1
        time_outs = self.t >= 3
        fell = action[:, 0] > 0
        done = time_outs | fell
        self.t = self.t.masked_fill(done, 0)
        observation, extras = self.get_observations()
        extras |= {"time_outs": time_outs, "log": {"reach": 1.0}}
        return observation, torch.ones(self.num_envs), done.long(), extras


def test_an_env_of_rsl_rl_is_stepped_as_a_simulator():
    env = TensorSimulator(
        2, lambda count: RslRlVecEnv(VecEnv(count), 1.0), missing_final="last_observation"
    )
    assert env.max_episode_steps == 3
    assert env.single_observation_space["critic"].shape == (6,)
    env.reset(seed=1)
    falls = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    ends = []
    for _ in range(3):
        _, reward, terminated, truncated, info = env.step(falls)
        ends.append((terminated.tolist(), truncated.tolist()))
        assert reward.tolist() == [1.0, 1.0]
    assert ends == [([True, False], [False, False])] * 2 + [([True, False], [False, True])]
    assert info["final_obs"]["policy"][1].tolist() == [
        2.0,
        2.0,
        2.0,
    ]  # before the step that was cut


class Genesis(VecEnv):
    """As Genesis' go2_env.py: reset returns no extras, and one of its groups may be None."""

    def reset(self):
        return super().reset()[0], None

    def get_observations(self):
        seen, extras = super().get_observations()
        return seen, {"observations": extras["observations"] | {"rnd": None}}


def simulated(env):
    return TensorSimulator(2, lambda n: RslRlVecEnv(env(n)), missing_final="last_observation")


def test_groups_that_an_env_of_rsl_rl_does_not_return_from_reset_are_asked_for():
    env = simulated(Genesis)
    assert set(env.single_observation_space) == {"policy", "critic"}
    assert set(env.reset(seed=1)[0].keys()) == {"policy", "critic"}
    assert set(env.step(torch.zeros(2, 2))[0].keys()) == {"policy", "critic"}


class OfRslRl1(VecEnv):
    """As legged_gym: privileged observations are a value of their own."""

    privileged = torch.zeros(2, 7)

    def reset(self):
        return super().reset()[0], self.privileged

    def step(self, action):
        seen, *results = super().step(action)
        return seen, self.privileged, *results


def with_extras(**entries):
    def step(self, action):
        *results, extras = VecEnv.step(self, action)
        return *results, extras | entries

    return variant(VecEnv, "Said", step=step)


@pytest.mark.parametrize(
    ("env", "names"),
    [
        (OfRslRl1, ("OfRslRl1", "Tensor", "rsl_rl 1", "extras['observations']['critic']")),
        (variant(OfRslRl1, "Five", privileged=None), ("Five", 5, "rsl_rl 1", "TensorSimulator")),
        (with_extras(time_outs=True), ("Said", "extras['time_outs']", "True", [2])),
        (with_extras(observations={"critic": np.zeros((2, 1))}), ("Said", "ndarray", "[2, ...]")),
    ],
)
def test_what_an_env_of_another_rsl_rl_returns_is_refused_by_name(env, names):
    with refused(names=names):
        simulated(env).step(torch.zeros(2, 2))


@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (8, 8, 3)])
def test_a_vec_env_of_rsl_rl_is_drawn(shape):
    """Isaac Lab draws one view of all envs, which stands for each of them."""
    drawn = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)

    class Drawing(VecEnv):
        def render(self):
            return drawn

    env = TensorSimulator(
        2, lambda count: RslRlVecEnv(Drawing(count), 1.0), missing_final="last_observation"
    )
    pictures = env.render([1])
    assert pictures.shape == (1, 8, 8, 3)
    assert np.array_equal(pictures[0], drawn[1] if len(shape) == 4 else drawn)
    env = TensorSimulator(
        2, lambda count: RslRlVecEnv(VecEnv(count), 1.0), missing_final="last_observation"
    )
    with refused(names=("VecEnv", "render")):
        env.render([0])
