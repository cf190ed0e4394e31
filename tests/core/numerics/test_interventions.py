"""What an env did instead of what it was told is in the rollout, from every kind of env."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl import (
    ActionChunk,
    GymnasiumEnv,
    SyncCollector,
    VectorEnvWrapper,
)
from lightning_rl.rollout.contract import next_observations
from tests.core.equivalence.test_resume import TWO_ENVS, assert_resumes
from tests.envs import ScriptedEnv, ScriptedTask, ScriptedVector
from tests.helpers import make_collector, policy_for
from tests.messages import refused
from tests.variants import after, concrete

LENGTH = 5
INSTEAD = [-0.25, 0.75]
OBSERVATION, ACTION = Box(-9, 9, (3,)), Box(-1, 1, (2,))
REPORTS = {"reports_interventions": True}


def helped():
    """A script takes over at each third step; of the others the env says little."""

    def act(env):
        if env.age % 3 == 0:
            env.action = np.array(INSTEAD, np.float32)

    def said(env):
        # At 2, somebody held on, and did what the policy would have done; at 4, the env's own way.
        told = {"executed_action": env.action, "intervened": env.age != 4}
        return told if env.age in (2, 3, 4) else {}

    return ScriptedEnv(
        OBSERVATION,
        ACTION,
        begin=lambda env: {"executed_action": [9.0, 9.0]},
        act=act,
        observe=lambda env: np.array([env.age, *env.action], np.float32),
        reward=1.0,
        terminated=lambda env: env.age == LENGTH,
        info=said,
        metadata=REPORTS,
    )


def three_numbers():
    info = {"executed_action": np.ones(3)}
    return ScriptedEnv(OBSERVATION, ACTION, info=info, metadata=REPORTS)


def by_number():
    """Its actions are 5, 6 and 7, and each second one is 7; nobody says more of it."""

    def said(env):
        assert env.action in env.action_space
        return {"executed_action": 7} if env.age % 2 == 0 else {}

    spaces = Box(-9, 9, (1,)), Discrete(3, start=5)
    return ScriptedEnv(*spaces, reward=1.0, info=said, length=6, metadata=REPORTS)


def batched_helped(num_envs=1, **kwargs):
    """`helped`, N times, with arrays and masks; the last step's info is the final one."""
    return ScriptedVector(num_envs, helped, metadata=REPORTS)


gymnasium.register("Helped-v0", helped)
gymnasium.register("ThreeNumbers-v0", three_numbers)
gymnasium.register("ByNumber-v0", by_number)
gymnasium.register("BatchedHelped-v0", helped, vector_entry_point=batched_helped)


class TorchHelped(ScriptedTask):
    """The same in torch."""

    reports_interventions = True

    def __init__(self, num_envs):
        def start(uniform):
            return {"observation": torch.zeros(len(uniform), 3)}

        super().__init__(num_envs, start, TorchHelped.move, action_space=ACTION, steps=LENGTH)

    def move(self, state, action):
        age = state["observation"][:, :1]
        helped = age % 3 == 2
        executed = torch.where(helped, torch.tensor(INSTEAD), action.clamp(-1, 1))
        observation = torch.cat((age + 1, executed), 1)
        info = {"executed_action": executed, "intervened": (helped | (age == 1)).squeeze(1)}
        return {"observation": observation}, None, observation[:, 0] == LENGTH, info


def own_helped(num_envs):
    """Make an env of one's own around another one, which says something only where somebody took over."""

    def forget(env, result, action):
        *results, info = result
        return *results, info if info["intervened"].any() else {"final_obs": info["final_obs"]}

    return after(concrete(VectorEnvWrapper), step=forget)(TorchHelped(num_envs))


KINDS = {
    "in-line": partial(GymnasiumEnv, id="Helped-v0"),
    "workers": partial(GymnasiumEnv, id="Helped-v0", vectorization="async"),
    "batched": partial(GymnasiumEnv, id="BatchedHelped-v0", vectorization="vector_entry_point"),
    "torch": TorchHelped,
    "own": own_helped,
}


def check(rollout):
    """What was executed is what the next observation shows, and who did it depends on the age."""
    age = rollout["observation"][:, :-1, 0]
    helped = age % 3 == 2
    told, executed = (rollout[key][:, :-1].clamp(-1, 1) for key in ("action", "executed_action"))
    expected = torch.where(helped[..., None], torch.tensor(INSTEAD), told)
    assert torch.equal(executed, expected)
    assert torch.equal(next_observations(rollout)[..., 1:], executed)
    assert torch.equal(rollout["intervened"][:, :-1], helped | (age == 1))
    assert not rollout["intervened"][:, -1].any()
    assert helped.any()
    assert not helped.all()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_it_is_in_the_rollout_from_every_kind_of_env(make):
    env = make(3)
    collector = make_collector(SyncCollector, env, policy_for(env), 12, seed=1)
    for _ in range(2):
        rollout = collector.collect()
        check(rollout)
        if isinstance(env, GymnasiumEnv):
            assert rollout["executed_action"].abs().max() <= 1.0, "as it was clipped"
            assert rollout["action"].abs().max() > 1.0
    collector.close()
    env.close()


@pytest.mark.parametrize("make", [KINDS["in-line"], TorchHelped])
def test_of_a_chunk_it_is_a_chunk(make):
    env = ActionChunk(2, make, 4, 3)
    rollout = make_collector(SyncCollector, env, policy_for(env), 6, seed=1).collect()[:, :-1]
    told, executed = rollout["action"].clamp(-1, 1), rollout["executed_action"]
    # Chunks of three, then of the two that an episode of five has left.
    for t in range(6):
        first = (0, 3)[t % 2]
        for k in range(3 if first == 0 else 2):
            expected = torch.tensor(INSTEAD).expand(2, 2) if first + k == 2 else told[:, t, k]
            assert torch.equal(executed[:, t, k].clamp(-1, 1), expected), (t, k)
        assert rollout["intervened"][:, t].all() == (first == 0)
        assert torch.equal(executed[:, t, 3].clamp(-1, 1), told[:, t, 3]), "not executed"
    env.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_numbered_actions_begin_at_zero_and_are_compared_where_nobody_says_who_it_was(
    vectorization,
):
    env = GymnasiumEnv(4, "ByNumber-v0", vectorization=vectorization)
    rollout = make_collector(SyncCollector, env, policy_for(env), 12, seed=1).collect()[:, :-1]
    told, executed = rollout["action"], rollout["executed_action"]
    assert torch.equal(executed[:, 1::2], torch.full((4, 6), 2))
    assert torch.equal(executed[:, ::2], told[:, ::2])
    assert torch.equal(rollout["intervened"], executed != told)
    assert rollout["intervened"].any()
    env.close()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_action_of_another_shape_is_refused(vectorization):
    env = GymnasiumEnv(2, "ThreeNumbers-v0", vectorization=vectorization)
    collector = make_collector(SyncCollector, env, policy_for(env), 4, seed=1)
    with refused(names=("'ThreeNumbers-v0'", "executed_action", "[3]", "[2]")):
        collector.collect()
    env.close()


def test_an_action_of_another_shape_of_ones_own_env_is_refused():
    def short(env, result, state, action):
        *moved, info = result
        return *moved, info | {"executed_action": info["executed_action"][:, :1]}

    env = after(TorchHelped, "Wrong", transition=short)(2)
    with refused(names=("Wrong", "executed_action", "[2, 1]", "[2, 2]")):
        make_collector(SyncCollector, env, policy_for(env), 4, seed=1).collect()


@pytest.mark.parametrize("make", [KINDS["workers"], TorchHelped])
def test_a_run_with_it_resumes_exactly(make, tmp_path):
    assert_resumes(tmp_path, 3, env=make, data=TWO_ENVS)
