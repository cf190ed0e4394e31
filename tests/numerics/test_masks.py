"""What a mask forbids has no probability, and is neither drawn, taken nor learnt from."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from tensordict import TensorDict

from lightning_rl import (
    ActionChunk,
    ActionMask,
    ActorCritic,
    ActorOnly,
    GymnasiumEnv,
    SyncCollector,
)
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.policies.distributions.gaussians import distribution_for
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.masks import check_allowed
from lightning_rl.system.errors import EnvFaultError
from tests.envs import ScriptedEnv
from tests.helpers import make_collector, policy_for
from tests.messages import refused
from tests.probes import MaskProbe, StructureProbe
from tests.references import masked_categorical

STATE = Box(-1.0, 1.0, (3,))


def make(space):
    return distribution_for(space, squash=False, log_std_init=0.0, log_std_bounds=(-5.0, 2.0))


def observed(mask_space):
    return Dict({"state": STATE, "action_mask": mask_space})


def env_with_masks(vectorization="sync", key="action_mask", **kwargs):
    settings = {"vectorization": vectorization, "wrappers": [partial(ActionMask, key=key)]}
    return GymnasiumEnv(4, "tests/ReportsActionMask-v0", kwargs | {"key": key}, **settings)


def test_log_probs_and_entropies_are_those_of_what_is_left():
    rng = np.random.default_rng(0)
    distribution = make(Discrete(6))
    logits, mask = rng.normal(0, 3, (50, 6)), rng.random((50, 6)) < 0.5
    mask[np.arange(50), rng.integers(6, size=50)] = True
    output = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    masked = distribution.masked(output, torch.tensor(mask, dtype=torch.int8))
    for action in range(6):
        fields = {"action": torch.full((50,), action)}
        log_prob, entropy = distribution.log_prob_and_entropy(masked, fields)
        for row in range(50):
            p, expected = masked_categorical(output[row].tolist(), mask[row])
            assert log_prob[row].exp().item() == pytest.approx(p[action], abs=1e-6)
            assert entropy[row].item() == pytest.approx(expected, abs=1e-6)
            if mask[row, action]:
                assert log_prob[row].item() == pytest.approx(np.log(p[action]), abs=2e-6)
            else:
                assert log_prob[row].exp().item() == 0.0
    allowed = torch.tensor(mask.argmax(1))
    log_prob, entropy = distribution.log_prob_and_entropy(masked, {"action": allowed})
    (log_prob + entropy).sum().backward()
    assert output.grad.isfinite().all()
    assert (output.grad[~torch.tensor(mask)] == 0).all()


@pytest.mark.parametrize(
    ("mask", "action_space", "message"),
    [
        (MultiBinary(4), Discrete(5), ("'action_mask'", "Discrete(5)", "5 categories", "(5,)")),
        (Box(0, 1, (5,)), Discrete(5), ("'action_mask'", "MultiBinary", "Box")),
        (MultiBinary(2), STATE, ("'action_mask'", "Box(-1.0, 1.0, (3,), float32)")),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_at_construction(mask, action_space, message):
    with refused(names=message):
        ActorCritic(observed(mask), action_space)


def test_a_mask_holds_for_one_action_and_not_for_a_chunk():
    env = ActionChunk(4, lambda num_envs: env_with_masks(), 3)
    spaces = env.single_observation_space, env.single_action_space
    with refused(names=("'action_mask'", "ActionChunk", "policy.ignore_keys: [action_mask]")):
        ActorCritic(*spaces)
    assert not ActorCritic(*spaces, ignore_keys=["action_mask"]).masks_actions


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_what_infos_say_is_observed_at_resets_and_steps_and_held_to(vectorization):
    env = env_with_masks(vectorization=vectorization)  # which fails where it is not held to
    collector = make_collector(SyncCollector, env, policy_for(env), 40, seed=0)
    rollout = collector.collect()
    mask = rollout["observation", "action_mask"][:, :-1]
    assert (mask.sum(-1) == 2).all()
    assert (mask.gather(-1, rollout["action"][:, :-1, None]) == 1).all()
    assert (
        rollout["final_observation"].in_use()["action_mask"][1:] == 1
    ).all()  # the end says nothing
    collector.close()


def test_an_env_that_allows_nothing_is_named_with_env_and_step():
    message = ("GymnasiumEnv", "'action_mask'", "env 0 at step 3", "5 categories")
    env = env_with_masks(empty_at=3)
    with refused(names=message):
        make_collector(SyncCollector, env, policy_for(env), 8, seed=0).collect()
    with refused(names=("action_mask", "env 0 at step 3", "5 categories")):
        run_episodes(policy_for(env), env, [1, 2, 3, 4], deterministic=True)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"silent_at": 2}, ("ActionMask", "'action_mask'", "5 entries")), ({"key": "legal"}, None)],
)
def test_the_infos_key_is_a_setting_and_is_missed(kwargs, message):
    env = env_with_masks(**kwargs)
    collector = make_collector(SyncCollector, env, policy_for(env), 8, seed=0)
    if message is None:
        collector.collect()
        return
    with refused(EnvFaultError, names=message):
        collector.collect()


def test_masks_of_several_choices_are_joined_and_continuous_ones_refused():
    masks = {"action_mask": (np.array([1, 0]), np.array([0, 1, 1]))}
    choices = ScriptedEnv(Box(-1, 1, (3,)), MultiDiscrete([2, 3]), begin=lambda env: masks)

    env = ActionMask(choices)
    assert env.reset()[0]["action_mask"].tolist() == [1, 0, 0, 1, 1]
    assert env.observation_space.contains(env.reset()[0])
    with refused(names=("ActionMask", "Box")):
        ActionMask(gymnasium.make("Pendulum-v1"))
    with refused(names=("ActionMask", "'action_mask'")):
        ActionMask(env)


def test_a_forbidden_demonstration_is_refused_and_padding_is_not_looked_at():
    env = MaskProbe(2)
    rollout = allocate_rollout(env.single_observation_space, env.single_action_space, 2, 3)
    rollout["observation", "action_mask"][..., 4] = 1
    rollout["action"].fill_(4)
    rollout["action"][1, 2] = 7
    with refused(names=("env 1 at step 2", "7", "action_mask")):
        check_allowed(rollout, env.single_action_space)
    rollout["padding"] = torch.zeros_like(rollout["done"])
    rollout["padding"][1, 2] = True
    check_allowed(rollout, env.single_action_space)


def test_parts_are_masked_in_the_order_in_which_they_lie():
    """A Dict of Box and Discrete has one mask, of the latter; a choice that it leaves none of is frozen."""
    action_space = StructureProbe(1).single_action_space
    policy = ActorOnly(observed(MultiBinary(3)), action_space, (8,))
    td = TensorDict({"observation": {"state": torch.randn(9, 3)}}, [9])
    td["observation", "action_mask"] = torch.tensor([0, 0, 1]).expand(9, 3)
    taken = policy.get_action(td.clone())
    assert (taken["action"][:, 2] == 2).all()
    policy.evaluate_actions(taken)["sample_log_prob"].sum().backward()
    last = policy.actor[-1].weight.grad
    assert (last[2:] == 0).all()  # of the gripper's three logits, behind the arm's two means
    assert (last[:2] != 0).any()
