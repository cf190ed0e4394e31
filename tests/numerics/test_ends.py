"""How episodes end: by failure, success, time or a reason of the env's own, and what is kept of it."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from lightning_rl import ActionChunk, GymnasiumEnv, SyncCollector
from lightning_rl.algorithms.rollout_evaluation import write_values
from lightning_rl.envs import TorchEnv, VectorEnv
from lightning_rl.extensions.tasks import gymnasium_tasks
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import (
    FinalObservationWriter,
)
from tests.envs import ScriptedEnv, ScriptedVector
from tests.helpers import make_collector, policy_for
from tests.messages import refused
from tests.policies import SUM_OF_OBSERVATION

LENGTH = 4


class Limited(VectorEnv):
    """A tensor env written by hand: every episode ends after 4 steps, and `final` gives the info."""

    device = torch.device("cpu")

    def __init__(self, num_envs=3, tree=False, final=lambda observation: {}):
        self.num_envs, self.tree, self.final = num_envs, tree, final
        box = Box(-9, 9, (2,), np.float32)
        self.single_observation_space = gymnasium.spaces.Dict({"x": box}) if tree else box
        self.single_action_space = Discrete(2)

    def _observe(self):
        flat = torch.full((self.num_envs, 2), float(self.age))
        return TensorDict({"x": flat}, [self.num_envs]) if self.tree else flat

    def reset(self, seed=None, options=None):
        self.age = 0
        return self._observe(), {}

    def step(self, action):
        self.age += 1
        ended = torch.full((self.num_envs,), self.age == LENGTH)
        info = self.final(self._observe()) if self.age == LENGTH else {}
        self.age %= LENGTH
        return self._observe(), torch.ones(self.num_envs), torch.zeros_like(ended), ended, info


def collector_of(env, num_steps=10):
    return make_collector(SyncCollector, env, policy_for(env, seed=0), num_steps, 1)


@pytest.mark.parametrize("tree", [False, True])
def test_a_time_out_without_its_final_observation_is_refused(tree):
    message = ("Limited", "env 0", "step 3", "info['final_obs']")
    with refused(names=message):
        collector_of(Limited(tree=tree)).collect()


@pytest.mark.parametrize("tree", [False, True])
def test_final_observations_of_a_wrong_shape_are_refused(tree):
    def first_row(observation):
        return {"final_obs": observation[:1]}

    message = ("Limited", "final_obs.x" if tree else "final_obs", "[1, 2]", "[3, 2]")
    with refused(names=message):
        collector_of(Limited(tree=tree, final=first_row)).collect()


def cut_together(num_envs, told):
    """Make a batched Gymnasium env whose episodes are cut after 2 steps; it tells the first rows of the ends."""

    def make():
        return ScriptedEnv(Box(-9, 99, (2,), np.float32), reward=1.0, length=2)

    def change(env, results):
        *results, info = results
        if told == 0 or "final_obs" not in info:
            return *results, {}
        return *results, {"final_obs": info["final_obs"][:told]}

    return ScriptedVector(num_envs, make, change=change)


gymnasium.register("tests/Batched-v0", lambda: None, vector_entry_point=cut_together)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (0, ("GymnasiumEnv", "env 0", "step 1", "final_obs")),
        (1, ("GymnasiumEnv", "final_obs", "[1, 2]", "[3, 2]")),
    ],
    ids=["nothing", "one row"],
)
def test_a_batched_gymnasium_env_owes_its_final_observations_too(told, message):
    env = GymnasiumEnv(3, "tests/Batched-v0", {"told": told}, "vector_entry_point")
    with refused(names=message):
        collector_of(env).collect()


class Mill(TorchEnv):
    """Turn until something happens, at a step that the start draws: success, failure, or a cut."""

    start_size = 2
    ENDS = ("success", "fail", "cut", "time")

    def __init__(self, num_envs, spoil=lambda info: info):
        box = Box(-np.inf, np.inf, (2,), np.float32)
        super().__init__(num_envs, box, box, 9)
        self.spoil = spoil

    def initial_state(self, uniform):
        kind = (uniform[:, :1] * 4).floor()
        left = (uniform[:, 1:] * 7).floor() + 1 + 100 * (kind == 3)
        return TensorDict({"kind": kind, "left": left}, [len(uniform)])

    def observe(self, state):
        return torch.cat((state["kind"], state["left"]), 1)

    def transition(self, state, action):
        kind = state["kind"].squeeze(1)
        moved = TensorDict({"kind": state["kind"], "left": state["left"] - 1}, state.batch_size)
        now = moved["left"].squeeze(1) <= 0
        success, fail, cut = (now & (kind == i) for i in range(3))
        # It says success of failures as well: failing is what counts.
        info = {"success": success | fail, "fail": fail, "truncated": cut}
        return moved, torch.ones(len(kind)), success, self.spoil(info)


def ends_of(observation):
    """How the episode of a row ends, by what it first observed."""
    kind, left = int(observation[0]), int(observation[1])
    return Mill.ENDS[kind], min(left, 9)


def follow(env, decisions, chunk=None):
    """Play, and check each end against what its start announced; count the ends of each kind."""
    observation, _ = env.reset(seed=3)
    starts, ages = observation.clone(), torch.zeros(env.num_envs, dtype=torch.int64)
    seen = dict.fromkeys(Mill.ENDS, 0)
    for _ in range(decisions):
        shape = (env.num_envs, chunk, 2) if chunk else (env.num_envs, 2)
        observation, _, terminated, truncated, info = env.step(torch.zeros(shape))
        ages += info["executed"].sum(1) if chunk else 1
        for i in range(env.num_envs):
            kind, length = ends_of(starts[i])
            ended = bool(terminated[i] | truncated[i])
            assert ended == (int(ages[i]) == length)
            if not ended:
                continue
            assert bool(terminated[i]) == (kind in ("success", "fail"))
            assert bool(truncated[i]) == (kind in ("cut", "time"))
            assert bool(info["success"][i]) == (kind == "success")
            assert info["final_obs"][i, 1] == starts[i, 1] - length
            seen[kind] += 1
            starts[i], ages[i] = observation[i], 0
    return seen


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("looks", [True, False])
def test_a_torch_env_fails_and_cuts_its_episodes_for_reasons_of_its_own(chunk, looks):
    inner = Mill(12)
    inner._on_cpu = looks  # as on an accelerator, where nothing looks at which rows finished
    env = ActionChunk(12, lambda n: inner, chunk) if chunk else inner
    assert min(follow(env, 40, chunk).values()) > 5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("fail", torch.zeros(4, 1, dtype=torch.bool), ("fail", "[4]", "torch.bool")),
        ("truncated", torch.zeros(4), ("truncated", "torch.float32", "torch.bool")),
    ],
)
def test_ends_of_another_shape_or_kind_are_refused(key, value, message):
    env = Mill(4, spoil=lambda info: info | {key: value})
    env.reset(seed=0)
    with refused(names=("Mill", *message)):
        env.step(torch.zeros(4, 2))


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_the_adapters_to_gymnasium_pass_these_ends_on(vectorization, monkeypatch):
    monkeypatch.setattr(Mill, "render_fps", 10, raising=False)
    monkeypatch.setitem(gymnasium_tasks.TASKS, "PushCube", lambda n, **settings: Mill(n))
    env = GymnasiumEnv(12, "lightning_rl/PushCube-v0", vectorization=vectorization)
    seen = follow(env, 40)
    env.close()
    assert min(seen.values()) > 5


def test_the_final_value_is_that_of_the_true_final_observation_where_time_ran_out():
    rollout = allocate_rollout(Box(-1, 1, (2,), np.float32), Discrete(2), 16, 8)
    generator = torch.Generator().manual_seed(0)
    rollout["observation"].uniform_(generator=generator)
    for key in ("terminated", "truncated"):
        rollout[key].bernoulli_(0.5, generator=generator)
    finals, writer = torch.rand(16, 8, 2, generator=generator), FinalObservationWriter(rollout)
    for t in range(8):
        writer.write(t, finals[:, t])
    write_values(SUM_OF_OBSERVATION, rollout)
    torch.testing.assert_close(rollout["value"], rollout["observation"].sum(-1))
    cut = (rollout["truncated"] & ~rollout["terminated"])[:, :-1]
    expected = torch.where(cut, finals.sum(-1), 0.0)
    torch.testing.assert_close(rollout["final_value"][:, :-1], expected)
