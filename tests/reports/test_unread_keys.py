"""Keys of an observation that a policy was given and did not read."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary
from tensordict import TensorDict

from lightning_rl import (
    ActorCritic,
    ActorOnly,
    Backbone,
    DeterministicActorCritic,
    DiscreteActorCritic,
    GripperActorCritic,
    SquashedActorCritic,
    TinyVLA,
    VLAPolicy,
)
from lightning_rl.extensions.vla.backbone import Features
from tests.messages import refused

ACTIONS = Box(-1, 1, (2, 2))
SEEN = {"rgb": Box(0, 255, (16, 16, 3), np.uint8), "language": Box(0, 8, (3,), np.int64)}
CONDITION = Box(0, 1, (2,), np.float32)


def space(**more):
    return gymnasium.spaces.Dict({**SEEN, **more})


def observed(condition, **more):
    observation = {
        "rgb": torch.full((1, 16, 16, 3), 90, dtype=torch.uint8),
        "language": torch.tensor([[1, 2, 3]]),
        "condition": torch.tensor([[condition, 1.0 - condition]]),  # good or bad
    }
    return TensorDict({"observation": TensorDict(observation | more, [1])}, [1])


class Blind(Backbone):
    """A backbone of a user's own, written before there was a condition."""

    slot_size = summary_size = 4

    def build(self, observation, num_slots):
        self.seen, self.num_slots = sorted(observation.keys()), num_slots

    def forward(self, observation):
        assert sorted(observation.keys()) == self.seen
        slots = (
            observation["rgb"].float().mean((1, 2, 3))[:, None, None].expand(-1, self.num_slots, 4)
        )
        return Features(slots, slots[:, 0])


def test_chunks_depend_on_the_condition():
    torch.manual_seed(0)
    policy = VLAPolicy(space(condition=CONDITION), ACTIONS, head="gaussian")
    good, bad = (policy.get_action(observed(c), deterministic=True)["action"] for c in (1.0, 0.0))
    assert (good - bad).abs().max() > 1e-5


def test_a_language_model_reads_the_condition_as_a_token():
    pytest.importorskip("transformers")
    from lightning_rl import TransformersBackbone
    from tests.numerics.test_vla_loading import CONFIGS

    torch.manual_seed(0)
    backbone = TransformersBackbone("hf_config", config=CONFIGS["smolvlm"], condition_tokens=(7, 9))
    policy = VLAPolicy(space(condition=CONDITION), ACTIONS, backbone)
    good, bad = (policy.features(observed(c)).slots for c in (1.0, 0.0))
    assert (good - bad).abs().max() > 1e-4
    with refused(names=("condition_tokens=[1, 512]", "0 to 511")):
        TransformersBackbone("hf_config", config=CONFIGS["smolvlm"], condition_tokens=(1, 512))


@pytest.mark.parametrize("key", ["condition", "touch"])
def test_what_a_backbone_does_not_read_is_refused_or_ignored_by_name(key):
    spaces = space(**{key: CONDITION})
    with refused(names=(key, "VLAPolicy", f"ignore_keys: [{key}]")):
        VLAPolicy(spaces, ACTIONS, Blind())
    policy = VLAPolicy(spaces, ACTIONS, Blind(), ignore_keys=[key])
    policy.get_action(observed(1.0) if key == "condition" else observed_with_touch())
    assert sorted(policy.acting_space.spaces) == ["language", "rgb"]


def observed_with_touch():
    td = observed(1.0, touch=torch.zeros(1, 2))
    return TensorDict({"observation": td["observation"].exclude("condition")}, [1])


def test_a_key_to_ignore_that_is_not_there_is_refused():
    with refused(
        names=("ignore_keys", "conditon", "condition, language, rgb", "close matches: condition")
    ):
        VLAPolicy(space(condition=CONDITION), ACTIONS, TinyVLA(), ignore_keys=["conditon"])


@pytest.mark.parametrize(
    ("policy", "actions"),
    [
        (ActorCritic, Discrete(4)),
        (ActorOnly, Discrete(4)),
        (DiscreteActorCritic, Discrete(4)),
        (SquashedActorCritic, Box(-1, 1, (2,))),
        (DeterministicActorCritic, Box(-1, 1, (2,))),
        (GripperActorCritic, Box(-1, 1, (2,))),
    ],
)
def test_every_policy_of_perceptrons_ignores_what_it_is_told_to(policy, actions):
    spaces = {"state": Box(-1, 1, (3,)), "condition": CONDITION, "action_mask": MultiBinary(4)}
    made = policy(gymnasium.spaces.Dict(spaces), actions, ignore_keys=["condition", "action_mask"])
    assert (made.actor_keys, made.masks_actions) == (("state",), False)
    assert list(made.acting_space.spaces) == ["state"]
    with refused(names=("actor_keys", "ignore_keys", "state")):
        policy(made.observation_space, actions, actor_keys=["state"], ignore_keys=["state"])
    with refused(names=("condition", "actor_keys", "ignore_keys: [condition]")):
        keys = {"actor_keys": ["state"], "ignore_keys": ["action_mask"]}
        policy(made.observation_space, actions, **keys)
