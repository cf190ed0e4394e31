"""A part of a user's module with two names, as by `self.actor = policy.actor`."""

import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from lightning_rl import PPO, ActorCritic
from lightning_rl.algorithms.reference import ReferencePolicy
from tests.helpers import train
from tests.variants import before


def test_it_is_trained_compiled_as_eagerly(tmp_path, traced_only):
    def name_twice(module, stage=None):
        module.again = module.policy.actor

    runs = []
    for compile in (False, True):
        model = {"algorithm": before(PPO, setup=name_twice), "compile": compile}
        module, _, _ = train(tmp_path / str(compile), model=model)
        trained = {id(parameter) for parameter in module.objectives[""].parameters}
        assert trained == {id(parameter) for parameter in module.parameters()}
        runs.append(module.policy.state_dict())
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-3, atol=1e-4)


def test_a_reference_leaves_its_weights_alone():
    policy = ActorCritic(Box(-1, 1, (3,)), Discrete(2), (8,))
    policy.again = policy.actor
    reference = ReferencePolicy(policy)
    with torch.no_grad():
        policy.actor[0].weight.add_(1.0)
    changed = policy.actor[0].weight.clone()
    td = TensorDict({"observation": torch.zeros(2, 3)}, [2])
    acted = policy.get_action(td.copy(), deterministic=True)
    reference.evaluate_actions(acted)
    assert torch.equal(policy.actor[0].weight, changed)
