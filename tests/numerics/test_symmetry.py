"""Mirrored samples and the mirror loss are those of references."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from lightning_rl import GRU, PPO, ActorCritic, Quadruped, SymmetricPPO
from lightning_rl.extend.spaces import named
from lightning_rl.extensions.algorithms.symmetry import Mirror
from tests.core.numerics.test_sac import actor_layers
from tests.messages import refused
from tests.q_references import forward

PRIVILEGED = {"velocity": [1, -1, 1], "height": [1], "physics": [1, 1]}


SIDE = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0])


LEGS = {"hip_1": "-hip_4", "ankle_1": "ankle_4", "hip_2": "-hip_3", "ankle_2": "ankle_3"}


MEASURED = {
    "action": "joints",  # terms go by name, in any order
    "command": [1, -1, -1],
    "turn_rate": [-1, 1, -1],
    "gravity": [1, -1, 1],
    "joint_offsets": "joints",
    "joint_speeds": "joints",
}


JOINTS = {"left": "-right", "tail": "tail"}
TERMS = {"speed": [1, -1], "angles": "joints"}
ORDER, SIGNS = [0, 1, 3, 2, 4], np.array([1.0, -1.0, -1.0, -1.0, 1.0])
"""The mirror of an observation, by hand."""


def policy():
    torch.manual_seed(3)
    actions = named(Box(-1, 1, (3,)), ("left", "right", "tail"))
    return ActorCritic(Box(-9, 9, (5,)), actions, hidden_sizes=(16,), activation="relu")


def samples(size=12):
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(size, *shape, generator=generator)  # noqa: E731
    fields = {"observation": draw(5), "action": draw(3), "sample_log_prob": draw() - 3}
    fields |= {key: draw() for key in ("advantage", "return", "value")}
    return TensorDict(fields, [size])


def by_hand(minibatch):
    signs = torch.from_numpy(SIGNS).float()
    mirrored = {"observation": minibatch["observation"][:, ORDER] * signs}
    mirrored["action"] = minibatch["action"][:, [1, 0, 2]] * torch.tensor([-1.0, -1.0, 1.0])
    return minibatch.clone().update(mirrored)


def gradients(module, loss):
    module.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in module.policy.parameters()])


def test_a_minibatch_and_its_mirror_image_count_alike():
    settings = {"normalize_advantage": "off", "clip_value_loss": True, "ent_coef": 0.1}
    symmetric = SymmetricPPO(policy(), joints=JOINTS, observation=TERMS, **settings)
    plain = PPO(policy(), **settings)
    minibatch = samples()
    loss, scalars = symmetric.loss(minibatch)
    reference, _ = plain.loss(torch.cat((minibatch, by_hand(minibatch))))
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(gradients(symmetric, loss), gradients(plain, reference))
    assert symmetric.loss(by_hand(minibatch))[0] == loss
    _, original = plain.loss(minibatch)
    for name in ("approx_kl", "clip_fraction"):
        assert scalars[name] == original[name]


def test_the_mirror_loss_is_that_of_float64_and_moves_the_mirrored_side_alone():
    symmetric = SymmetricPPO(
        policy(), joints=JOINTS, observation=TERMS, augmentation=False, mirror_loss_coef=0.7
    )
    minibatch = samples()
    loss, scalars = symmetric.loss(minibatch)
    layers = actor_layers(symmetric.policy.actor)
    observation = minibatch["observation"].double().numpy()
    mean, in_mirror = (forward(layers, o)[0] for o in (observation, observation[:, ORDER] * SIGNS))
    error = in_mirror - mean[:, [1, 0, 2]] * np.array([-1.0, -1.0, 1.0])
    value = float(scalars["mirror_loss"].detach())
    np.testing.assert_allclose(value, (error**2).mean(), rtol=1e-5)
    plain, _ = PPO.loss(symmetric, minibatch)
    added = gradients(symmetric, loss) - gradients(symmetric, plain)
    bias = symmetric.policy.actor[-1].bias
    sizes = [p.numel() for p in symmetric.policy.parameters()]
    place = [p is bias for p in symmetric.policy.parameters()].index(True)
    # A gradient through the mirrored actions, too, would be another one for left and right.
    expected = 0.7 * 2 * error.mean(0) / 3
    np.testing.assert_allclose(added.split(sizes)[place].numpy(), expected, atol=1e-6)


def test_a_mirrored_quadruped_moves_as_its_image():
    """From mirrored states, mirrored actions lead to mirrored observations and the same rewards."""
    env = Quadruped(2, events=dict.fromkeys(("pose", "friction", "load", "command", "push")))
    walker = ActorCritic(env.single_observation_space, env.single_action_space)
    mirror = Mirror(walker, LEGS, {"proprioception": MEASURED, "privileged": PRIVILEGED})
    env.reset(seed=3)
    generator = torch.Generator().manual_seed(1)
    state = env.state.clone()
    turn = torch.tensor([0.99, 0.05, -0.04, 0.12])
    turn /= turn.norm()
    speeds, legs = torch.randn(6, generator=generator), torch.randn(2, 8, generator=generator) * 0.1
    state["qpos"][0, :7] = torch.cat((torch.tensor([0.0, 0.1, 0.7]), turn))
    state["qpos"][1, :7] = torch.cat((torch.tensor([0.0, -0.1, 0.7]), turn * SIDE[[3, 4, 5, 6]]))
    state["qpos"][0, 7:] += legs[0]
    state["qpos"][1, 7:] = mirror.action(state["qpos"][0, 7:])
    state["qvel"][0] = torch.cat((speeds, legs[1]))
    state["qvel"][1] = torch.cat((speeds * SIDE[[0, 1, 2, 4, 5, 6]], mirror.action(legs[1])))
    state["command"][0] = torch.tensor([0.5, 0.3, -0.4])
    state["command"][1] = torch.tensor([0.5, -0.3, 0.4])
    env.state = state
    for _ in range(6):
        action = torch.rand(1, 8, generator=generator) * 2 - 1
        observation, reward, *_ = env.step(torch.cat((action, mirror.action(action))))
        image = mirror(TensorDict({"observation": observation, "action": action.expand(2, 8)}, [2]))
        for key, value in observation.items():
            torch.testing.assert_close(image["observation", key][0], value[1], atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(reward[0], reward[1], atol=2e-3, rtol=1e-3)
    assert (
        image["observation", "proprioception"][0] - observation["proprioception"][0]
    ).abs().max() > 0.1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"joints": {}}, ("left", "right", "tail", "left: right")),
        ({"joints": {"left": "-right"}}, ("tail",)),
        ({"joints": JOINTS | {"nose": "nose"}}, ("nose", "left", "right", "tail")),
        ({"joints": JOINTS | {"right": "left"}}, ("right", "left")),
        ({"joints": {0: 1}}, ("joints", "(0, 1)", "'0': '-1'")),
        ({"observation": {"speed": [1, 1]}}, ("2", "5")),
        ({"observation": {"speed": [1, 2], "angles": "joints"}}, ("speed", "2", "joints")),
        ({"observation": [1, 1]}, ("term",)),
        ({"augmentation": False}, ("augmentation", "mirror_loss_coef")),
    ],
)
def test_what_is_no_mirror_is_refused(change, names):
    with refused(names=names):
        SymmetricPPO(policy(), **{"joints": JOINTS, "observation": TERMS} | change)


def test_policies_without_a_mirror_image_are_refused():
    spaces = Box(-9, 9, (5,)), Box(-1, 1, (3,))
    with refused(names=("bounds", "partners")):
        uneven = Box(np.array([-1, -1, -1.0]), np.array([1, 2, 1.0]), dtype=np.float32)
        joints = {"0": "1", "2": "2"}
        SymmetricPPO(ActorCritic(spaces[0], uneven), joints=joints, observation=TERMS)
    with refused(names=("memory", "ActorCritic")):
        SymmetricPPO(ActorCritic(*spaces, memory=GRU), joints={}, observation={})
    matrix = Dict({"scan": Box(-1, 1, (4, 4)), "arm": Box(-9, 9, (5,))})
    with refused(names=("scan", "vectors", "ignore")):
        rules = {"scan": TERMS, "arm": TERMS}
        SymmetricPPO(ActorCritic(matrix, spaces[1]), joints={"0": "1", "2": "2"}, observation=rules)
