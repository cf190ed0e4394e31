"""Actions of several parts lie flat, are chosen together, and come to the env in their own structure."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple

import tests.envs  # noqa: F401  # registers envs
from lightning_rl import (
    ActionChunk,
    ActorCritic,
    GripperActorCritic,
    GymnasiumEnv,
    Intervention,
    SquashedActorCritic,
    SyncCollector,
)
from lightning_rl.policies.distributions.gaussians import distribution_for
from lightning_rl.rollout.structured_actions import FlatAction, StructuredActions, flat_actions
from tests.envs import PARTS
from tests.helpers import draw_from, make_collector
from tests.messages import refused
from tests.references import gaussian_log_prob, masked_categorical

STATE = Box(-1.0, 1.0, (3,))
ARM = Dict({"arm": Box(-2.0, 2.0, (2,)), "gripper": Discrete(3)})


def make(space, **settings):
    defaults = {"squash": False, "log_std_init": -0.3, "log_std_bounds": (-5.0, 2.0)}
    return distribution_for(space, **defaults | settings)


def takes_parts(num_envs=3, **kwargs):
    return GymnasiumEnv(num_envs, "tests/StructuredActionEnv-v0", **kwargs)


def test_whatever_a_space_holds_comes_back_from_its_flat_form():
    flat = StructuredActions(PARTS)
    flat.seed(3)
    names = [part.name for part in flat.parts]
    assert names == ["arm.left", "arm.right", "bits", "modes", "pair.0", "pair.1"]
    for _ in range(100):
        action = PARTS.sample()
        laid_out = flat.flatten(action)
        assert laid_out.dtype == np.float32
        assert flat.contains(laid_out)
        back = flat.unflatten(laid_out)
        assert PARTS.contains(back)
        assert (back["bits"] == action["bits"]).all()
        assert (back["modes"] == action["modes"]).all()
        assert back["pair"][0] == action["pair"][0]
        assert np.allclose(back["arm"]["left"], action["arm"]["left"])
        tensors = flat.tensors(torch.from_numpy(laid_out)[None])
        assert tensors["modes"][0].tolist() == action["modes"].tolist()
        assert tensors["pair"][1].shape == (1, 2, 2)
    assert PARTS.contains(flat.unflatten(flat.sample()))


def test_another_order_of_the_parts_is_another_space():
    right, left = Box(-1, 1, (2,)), Box(-1, 1, (2,))
    space = StructuredActions(Dict(right=right, left=left))
    assert space == StructuredActions(Dict(right=right, left=left))
    assert space != StructuredActions(Dict(left=left, right=right))


def test_counts_up_to_two_to_the_24_are_exact_and_more_are_refused():
    space = StructuredActions(Tuple([Discrete(2**24, start=7)]))
    for category in (0, 2**24 - 2, 2**24 - 1):
        laid_out = space.flatten((np.int64(category + 7),))
        assert space.unflatten(laid_out) == (category + 7,)
    with refused(names=("'0'", "16,777,217", "float32", "MultiDiscrete")):
        StructuredActions(Tuple([Discrete(2**24 + 1)]))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            Dict({"word": gymnasium.spaces.Text(3)}),
            ("'word'", "Text", "Box", "Discrete, MultiDiscrete"),
        ),
        (Dict({"a": Dict({"b": Box(0, 9, (2,), np.int64)})}), ("'a.b'", "int64")),
        (Dict({}), "Dict()"),
    ],
)
def test_what_cannot_be_chosen_is_refused(space, message):
    with refused(names=message):
        flat_actions(space)


@torch.no_grad()
@pytest.mark.parametrize("squash", [False, True])
def test_the_log_prob_is_the_sum_of_those_of_its_parts(squash):
    space = flat_actions(ARM)
    joint = make(space, squash=squash)
    arm, gripper = make(ARM["arm"], squash=squash), make(ARM["gripper"])
    output = torch.randn(50, joint.num_outputs, generator=torch.Generator().manual_seed(1))
    drawn = draw_from(joint, output, torch.Generator().manual_seed(2))
    key = "unsquashed_action" if squash else "unit_action"
    assert set(drawn) == {"action", "sample_log_prob", f"{key}_0"}
    alone = {"action": drawn["action"][:, :2], key: drawn[f"{key}_0"]}
    of_arm, entropy_of_arm = arm.log_prob_and_entropy(output[:, :2], alone)
    choice = {"action": drawn["action"][:, 2].long()}
    of_gripper, entropy_of_gripper = gripper.log_prob_and_entropy(output[:, 2:], choice)
    log_prob, entropy = joint.log_prob_and_entropy(output, drawn)
    torch.testing.assert_close(log_prob, of_arm + of_gripper)
    torch.testing.assert_close(entropy, entropy_of_arm + entropy_of_gripper)
    torch.testing.assert_close(drawn["sample_log_prob"], log_prob)
    if not squash:
        for row in range(50):
            p, _ = masked_categorical(output[row, 2:].tolist(), [1, 1, 1])
            mean, std = 2 * output[row, :2].double().numpy(), 2 * np.exp(-0.3)
            expected = gaussian_log_prob(drawn["action"][row, :2].double().numpy(), mean, std)
            expected += np.log(p[int(drawn["action"][row, 2])])
            assert log_prob[row].item() == pytest.approx(expected, abs=1e-5)


def test_the_first_ratio_is_one_for_actions_of_all_kinds():
    env = takes_parts()
    policy = ActorCritic(env.single_observation_space, env.single_action_space, (16,))
    rollout = make_collector(SyncCollector, env, policy, 20, seed=0).collect()[:, :-1].flatten()
    again = policy.evaluate_actions(rollout)["sample_log_prob"]
    torch.testing.assert_close(again, rollout["sample_log_prob"], rtol=1e-5, atol=1e-5)
    fields = policy.fields_of(rollout["action"])
    assert set(fields) == {"unit_action_0", "unit_action_1"}  # the pair's Box has bounds of ±1
    torch.testing.assert_close(rollout.select(*fields).to_dict(), fields)


def test_an_intervention_stands_around_the_flat_form():
    def help_left(observation):
        action = np.zeros(13, np.float32)
        action[:2] = 0.5
        return action

    wrappers = [FlatAction, partial(Intervention, source=help_left)]
    env = takes_parts(wrappers=wrappers)
    assert env.single_action_space == StructuredActions(PARTS)
    policy = ActorCritic(env.single_observation_space, env.single_action_space, (16,))
    rollout = make_collector(SyncCollector, env, policy, 4, seed=0).collect()
    assert (rollout["executed_action"][:, :4, :2] == 0.5).all()
    assert rollout["intervened"][:, :4].all()


def test_numbers_beside_choices_are_always_clipped_and_another_setting_is_refused():
    with refused(names=("clip_action is false", "tests/StructuredActionEnv-v0", "TransformAction")):
        takes_parts(clip_action=False)


def test_sac_and_chunks_refuse_it_and_say_who_does_not():
    message = ("StructuredActions(Dict", "PPO")
    with refused(names=message):
        SquashedActorCritic(STATE, flat_actions(ARM))
    with refused(names=("GripperActorCritic", "StructuredActions", "SquashedActorCritic")):
        GripperActorCritic(STATE, flat_actions(ARM))
    with refused(names=("Dict", "Box", "Discrete")):
        ActionChunk(2, takes_parts, 3)
    with refused(names=("squash", "MultiBinary(3)")):
        make(MultiBinary(3), squash=True)
