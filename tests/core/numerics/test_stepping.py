"""The loop that training, evaluation and recording share, and what it carries: a policy's state."""

import pytest
import torch
from gymnasium.spaces import Discrete

from lightning_rl import PolicyWrapper, SyncCollector
from lightning_rl.collectors import EpisodeSettings
from lightning_rl.collectors.evaluation import run_episodes
from tests.envs import ScriptedTask
from tests.helpers import make_collector
from tests.messages import refused
from tests.policies import ScriptedPolicy
from tests.variants import concrete, variant

ENDS = 5


def clock(num_envs):
    """Make an env that shows how old the episode is; env i ends, by its seed, after 3 to 5 steps."""

    def start(uniform):
        ends = 3 + (3 * uniform).floor()
        return {"age": torch.zeros_like(ends), "ends": ends}

    def move(env, state, action):
        age = state["age"] + 1
        return {"age": age}, action.float(), (age >= state["ends"])[:, 0]

    return ScriptedTask(num_envs, start, move, action_space=Discrete(9), steps=ENDS)


def count_steps(policy, td, generator):
    """Act by the state, which is the number of steps that it has taken in the episode."""
    if generator is not None:
        torch.rand((), generator=generator)
    td["next_state"] = td["state"] + 1
    return td["state"][:, 0].long()


def counts(*spaces):
    return ScriptedPolicy(*spaces, count_steps, {"state": ((2,), torch.float32)})


def around(*spaces):
    return concrete(PolicyWrapper)(counts(*spaces))


def policy_for(env, cls=counts):
    return cls(env.single_observation_space, env.single_action_space)


def check_state(rollout):
    """The state before each step, in the bootstrap slot too, is the age of the episode."""
    age = rollout["observation"][..., :1].expand(*rollout.shape, 2)
    assert torch.equal(rollout["state"], age)
    assert torch.equal(rollout["action"][:, :-1], age[:, :-1, 0].long())


@pytest.mark.parametrize("cls", [counts, around])
@pytest.mark.parametrize("reset", [False, True])
def test_a_state_goes_on_from_step_to_step_and_from_rollout_to_rollout(cls, reset):
    env = clock(4)
    episode_settings = EpisodeSettings(reset_every_rollout=reset)
    collector = make_collector(
        SyncCollector, env, policy_for(env, cls), 7, seed=1, episode_settings=episode_settings
    )
    ages = set()
    for _ in range(4):
        rollout = collector.collect()
        check_state(rollout)
        ages |= set(rollout["state"][:, 0, 0].tolist())
    assert (ages == {0.0}) == reset, "rollouts begin within episodes"


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_state_goes_on_in_an_evaluation(deterministic):
    env = clock(5)
    episodes = run_episodes(policy_for(env), env, range(4), deterministic=deterministic)
    assert len({episode["length"] for episode in episodes}) > 1
    for episode in episodes:  # 0 + 1 + 2 + ...
        assert episode["return"] == sum(range(episode["length"]))


@pytest.mark.parametrize(
    ("field", "told"),
    [
        (None, "no 'next_state'; it must be"),
        (torch.zeros(3, 1), "'next_state' as torch.float32 of shape [3, 1]; it must be"),
    ],
)
def test_a_state_that_is_not_as_announced_is_refused(field, told):
    def forgets(policy, td, generator):
        td["action"] = count_steps(policy, td, generator)
        del td["next_state"]
        if field is not None:
            td["next_state"] = field
        return td["action"]

    def make(*spaces):
        cls = variant(ScriptedPolicy, "Forgets")
        return cls(*spaces, forgets, {"state": ((2,), torch.float32)})

    env = clock(3)
    with refused(
        names=("Forgets.forward", told, "[3, 2]", "extra_fields", "'state'", "next_state")
    ):
        make_collector(SyncCollector, env, policy_for(env, make), 7, seed=1).collect()
