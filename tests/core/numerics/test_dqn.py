"""A whole update of DQN is that of a float64 reference, and actions explore as the rule says."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import DQN, SAC, QPolicy, ReplayBuffer
from lightning_rl.algorithms.learner import Learner
from lightning_rl.compiled.choice import CompileDecision
from lightning_rl.policies.acting import NumpyActor
from lightning_rl.policies.actors import StepwiseActor
from lightning_rl.rollout.allocation import allocate_rollout
from tests.core.numerics.test_critics import MASKED, of_actions
from tests.core.numerics.test_sac import OBSERVATION_SPACE, TOLERANCE, actor_layers
from tests.helpers import train
from tests.messages import refused
from tests.q_references import DQNReference
from tests.variants import after, variant

FOUR = gymnasium.spaces.Discrete(4)


def as_it_is(policy, td):
    """Leave observations in the precision that they have."""
    observation = td["observation"]
    return observation if torch.is_tensor(observation) else observation["state"]


def layers_of(network, dueling):
    networks = (network.value, network.advantage) if dueling else (network,)
    return [actor_layers(part) for part in networks]


def one_update(module, minibatch):
    """As in `training_step`."""
    if (module.updates_done + 1) % module.target_update_interval == 0:
        module.update_in_turn(minibatch, "q")
    else:
        module.updates["q"](minibatch)


@pytest.mark.parametrize(
    ("double", "dueling", "masked", "interval", "dtype"),
    [
        (False, False, False, 1, torch.float64),
        (False, True, True, 1, torch.float64),
        (True, True, True, 3, torch.float64),
        (True, True, True, 3, torch.float32),
    ],
)
def test_twenty_updates_are_those_of_the_reference(
    double, dueling, masked, interval, dtype, traced_only
):
    space = MASKED if masked else OBSERVATION_SPACE
    policy = variant(QPolicy, actor_features=as_it_is)(space, FOUR, (8, 8), dueling=dueling)
    settings = {"learning_rate": 1e-2, "tau": 0.1, "max_grad_norm": 0.3 if masked else None}
    module = DQN(
        policy, double_q=double, target_update_interval=interval, batch_size=16, **settings
    ).to(dtype)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    for slow, fast in module.target_networks():
        slow.load_state_dict(fast.state_dict())
    choice = CompileDecision(dtype == torch.float32, None)
    module.attach_learner(Learner(module, module.objectives, module.configure_optimizers(), choice))
    reference = DQNReference(
        layers_of(policy.actor, dueling), rate=1e-2, tau=0.1, interval=interval, double=double,
        limit=settings["max_grad_norm"],
    )  # fmt: skip
    rng = np.random.default_rng(2)
    for _ in range(20):
        batch = of_actions(rng, masked, 2)
        batch["reward"] = 2 * batch["reward"]  # errors below and above 1
        fields = {key: torch.as_tensor(value) for key, value in batch.items()}
        masks = fields.pop("mask"), fields.pop("next_mask")
        fields = {k: v.to(dtype) if v.is_floating_point() else v for k, v in fields.items()}
        if masked:
            for key, mask in zip(("observation", "next_observation"), masks, strict=True):
                fields[key] = TensorDict({"state": fields[key], "action_mask": mask.to(torch.int8)}, [16])  # fmt: skip
        one_update(module, TensorDict(fields, [16]))
        reference.update(batch)
    for network, wanted in (
        (policy.actor, reference.networks),
        (module.target_q, reference.targets),
    ):
        for ours, theirs in zip(layers_of(network, dueling), wanted, strict=True):
            for (w, b), (v, c) in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(w, v, rtol=0, atol=TOLERANCE[dtype])
                np.testing.assert_allclose(b, c, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("actor", [NumpyActor, StepwiseActor])
@pytest.mark.parametrize(
    ("rule", "amount"), [("epsilon", 0.4), ("epsilon", 1.0), ("boltzmann", 0.5)]
)
def test_actions_have_the_probabilities_of_the_rule(rule, amount, actor):
    policy = QPolicy(OBSERVATION_SPACE, FOUR, (8,), exploration=rule)
    policy.set_exploration(amount)
    values = np.array([0.3, -0.2, 0.9, 0.1])
    with torch.no_grad():
        policy.actor[-1].weight.zero_()
        policy.actor[-1].bias.copy_(torch.as_tensor(values))
    rollout = allocate_rollout(OBSERVATION_SPACE, FOUR, 64, 200)
    filled = actor(policy, rollout)
    with torch.no_grad():
        filled.begin(torch.Generator().manual_seed(3))
        for t in range(200):
            filled.act(t)
        filled.finish(0, 200)
    action = rollout["action"][:, :-1]
    if rule == "epsilon":
        expected = np.full(4, amount / 4)
        expected[2] += 1 - amount
    else:
        expected = np.exp(values / amount) / np.exp(values / amount).sum()
    share = np.bincount(action.flatten(), minlength=4) / action.numel()
    np.testing.assert_allclose(share, expected, atol=5 * np.sqrt(0.25 / action.numel()))
    log_prob = rollout["sample_log_prob"][:, :-1]
    np.testing.assert_allclose(log_prob.exp(), expected[action], rtol=1e-5)
    best = policy.get_action(TensorDict({"observation": torch.zeros(3, 3)}, [3]), True)["action"]
    assert best.tolist() == [2, 2, 2]


def test_exploration_and_target_follow_env_steps_and_updates(tmp_path):
    """The one falls from .8 to .2 in the first half of 384 steps, by rollouts of 64."""
    seen, moves = [], []

    def look(module, result, batch, batch_idx):
        seen.append(float(module.policy.distribution.amount))

    def note(module, result):
        moves.append(module.updates_done)

    sees = after(DQN, on_train_batch_start=look, update_targets=note)

    data = {"replay": partial(ReplayBuffer, capacity=500)}
    rates = {"exploration_initial": 0.8, "exploration_final": 0.2, "exploration_fraction": 0.5}
    model = {"algorithm": sees, "target_update_interval": 5, **rates}
    module, *_ = train(tmp_path, data=data, model=model)
    assert module.updates_done == 384 - 32
    assert len(moves) == module.updates_done // 5
    assert seen == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    assert module.metrics["train/exploration"] == pytest.approx(0.2)


def test_dropout_acts_in_no_target(tmp_path):
    """As in the network itself: both are in evaluation mode, also after an evaluation."""
    alike = []

    def drop(policy, *args, **kwargs):
        policy.actor = torch.nn.Sequential(policy.actor, torch.nn.Dropout(0.5))

    def look(module, result, minibatch):
        for network in (module.policy.actor, module.target_q):
            values = [network(minibatch["observation"]) for _ in range(2)]
            alike.append(torch.equal(*values))

    policy = {"policy_class": after(QPolicy, __init__=lambda *args, **kw: drop(args[0]))}
    model = {"algorithm": after(DQN, q_loss=look), "updates_per_env_step": 0.05, "compile": False}
    with pytest.warns(UserWarning, match=r"'actor\.1' of \w+ have no effect: .*eval mode"):
        train(tmp_path, data={"replay": ReplayBuffer}, policy=policy, model=model)
    assert len(alike) >= 30
    assert all(alike)


def test_what_does_not_fit_is_refused():
    policy = QPolicy(OBSERVATION_SPACE, FOUR, (8,))
    boltzmann = QPolicy(OBSERVATION_SPACE, FOUR, (8,), exploration="boltzmann")
    box = gymnasium.spaces.Box(-1, 1, (2,))
    td = TensorDict({"observation": torch.zeros(1, 3), "action": torch.zeros(1).long()}, [1])
    for call, words in (
        (lambda: QPolicy(OBSERVATION_SPACE, box), ("Discrete", "Box")),
        (lambda: QPolicy(OBSERVATION_SPACE, FOUR, exploration="greedy"), "epsilon, boltzmann"),
        (lambda: DQN(SAC.__new__(SAC)), "model.policy: {class_path: QPolicy}"),
        (lambda: DQN(policy, tau=None), "target network"),
        (lambda: DQN(policy, target_update_interval=0), "target_update_interval"),
        (lambda: DQN(policy, exploration_fraction=2.0), "exploration_fraction"),
        (lambda: DQN(policy, exploration_initial=1.5), "epsilon"),
        (lambda: DQN(boltzmann, exploration_final=0.0), "temperature"),
        (lambda: policy.evaluate_actions(td), ("DQN", "exploration: boltzmann")),
    ):
        with refused(names=words):
            call()
    assert boltzmann.evaluate_actions(td)["sample_log_prob"].requires_grad
