"""A whole update of SAC and of TD3 is what a float64 reference with derivatives by hand says, compiled or not."""

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import SAC, TD3, DeterministicActorCritic, ReplayBuffer, SquashedActorCritic
from lightning_rl.algorithms.learner import Learner
from lightning_rl.compiled.choice import CompileDecision
from tests.helpers import last, load, train
from tests.messages import refused
from tests.q_references import SACReference, TD3Reference, flat
from tests.variants import variant

OBSERVATIONS, ACTIONS, BATCH = 3, 2, 16
SPACE = gymnasium.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
OBSERVATION_SPACE = gymnasium.spaces.Box(-np.inf, np.inf, (OBSERVATIONS,))


def exact(cls):
    """A policy that leaves observations in the precision that they have."""
    return variant(cls, actor_features=lambda policy, td: td["observation"])


def built(algorithm, policy, dtype, compile, policy_kwargs=None, space=SPACE, **kwargs):
    """An algorithm with its updates, as `fit` would make them."""
    torch.manual_seed(1)
    made = exact(policy)(OBSERVATION_SPACE, space, (8, 8), **(policy_kwargs or {}))
    module = algorithm(made, batch_size=BATCH, learning_rate=1e-2, tau=0.1, **kwargs).to(dtype)
    for parameter in made.actor[-1].parameters():  # begins small: as far from linear as the others
        torch.nn.init.normal_(parameter, std=0.5)
    if isinstance(module, TD3):
        module.target_actor.load_state_dict(made.actor.state_dict())
    choice = CompileDecision(compile, None)
    module.attach_learner(Learner(module, module.objectives, module.configure_optimizers(), choice))
    return module


def update(module, minibatch, with_actor=True):
    """One update, as in `training_step`."""
    if with_actor:
        module.update_in_turn(minibatch, *module.objectives)
    elif isinstance(module, TD3):
        module.updates["critic"](minibatch)
    else:
        module.update_in_turn(minibatch, *module.undelayed_objectives)


def array(parameter):
    return parameter.detach().double().numpy().copy()


def actor_layers(actor):
    layers = [layer for layer in actor if isinstance(layer, torch.nn.Linear)]
    return [(array(layer.weight.T), array(layer.bias)) for layer in layers]


def critic_layers(ensemble):
    layers = list(zip(ensemble.weights, ensemble.biases, strict=True))
    return [[(array(w[i]), array(b[i, 0])) for w, b in layers] for i in range(ensemble.num_critics)]


def drawn(rng, critics=None):
    """A minibatch as a replay and `noise_fields` give it: some steps terminal, some over several env steps."""
    batch = {
        "observation": rng.normal(size=(BATCH, OBSERVATIONS)),
        "next_observation": rng.normal(size=(BATCH, OBSERVATIONS)),
        "unit_action": rng.uniform(-1, 1, (BATCH, ACTIONS)),
        "reward": rng.normal(size=BATCH),
        "discount": 0.9 ** rng.integers(1, 4, BATCH) * (rng.random(BATCH) > 0.3),
        "noise": rng.normal(size=(BATCH, ACTIONS)),
        "next_noise": rng.normal(size=(BATCH, ACTIONS)),
    }
    if critics is not None:
        batch["target_critics"] = np.stack([rng.permutation(critics)[:2] for _ in range(BATCH)])
    return batch


def tensors(batch, dtype):
    fields = {key: torch.as_tensor(value) for key, value in batch.items() if key != "unit_action"}
    fields = {key: v.to(dtype) if v.is_floating_point() else v for key, v in fields.items()}
    low, high = (torch.as_tensor(bound).to(torch.float64) for bound in (SPACE.low, SPACE.high))
    unit = torch.as_tensor(batch["unit_action"])
    fields["action"] = ((high + low) / 2 + (high - low) / 2 * unit).to(dtype)
    return TensorDict(fields, [BATCH])


def assert_follows(module, reference, tolerance):
    ours, theirs = flat(actor_layers(module.policy.actor)), flat(reference.actor)
    for mine, wanted in (
        (module.policy.critic, reference.critics),
        (module.target_critic, reference.targets),
    ):
        ours += [a for critic in critic_layers(mine) for a in flat(critic)]
        theirs += [a for critic in wanted for a in flat(critic)]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
EXACT_AND_TRACED = [(torch.float64, False), (torch.float32, True)]
"""What is done is compared at the reference's own precision; that it is traced alike, at that of runs."""

SETTINGS = {
    "plain": ({}, {}),
    "delayed, clipped, no entropy in the target": (
        {"policy_delay": 2, "max_grad_norm": 0.5, "entropy_in_target": False},
        {},
    ),
    "clamped": ({}, {"log_std_bounds": (-0.4, 0.3)}),
    "four critics, two of them": (
        {"num_target_critics": 2, "target_entropy": -1.0},
        {"num_critics": 4},
    ),
}


@pytest.mark.parametrize(("dtype", "compile"), EXACT_AND_TRACED)
@pytest.mark.parametrize("settings", SETTINGS)
def test_twenty_updates_of_sac_are_those_of_the_reference(settings, dtype, compile, traced_only):
    kwargs, policy_kwargs = SETTINGS[settings]
    module = built(
        SAC, SquashedActorCritic, dtype, compile, policy_kwargs, init_alpha=0.3, **kwargs
    )
    reference = SACReference(
        actor_layers(module.policy.actor),
        critic_layers(module.policy.critic),
        alpha=float(module.log_alpha.detach().exp()),
        rate=1e-2,
        tau=0.1,
        target_entropy=kwargs.get("target_entropy", -ACTIONS),
        in_target=kwargs.get("entropy_in_target", True),
        limit=kwargs.get("max_grad_norm"),
        mean_of_all="num_target_critics" in kwargs,
        **{key: value for key, value in policy_kwargs.items() if key == "log_std_bounds"},
    )
    rng = np.random.default_rng(2)
    for i in range(20):
        batch = drawn(rng, policy_kwargs.get("num_critics"))
        with_actor = (i + 1) % kwargs.get("policy_delay", 1) == 0
        update(module, tensors(batch, dtype), with_actor)
        reference.update(batch, with_actor)
    # Adam divides by the size of a gradient: where that is near zero, float32's rounding grows to a part of a step.
    assert_follows(module, reference, TOLERANCE[dtype])
    assert abs(float(module.log_alpha.detach()) - float(reference.log_alpha)) < TOLERANCE[dtype]
    assert module.updates_done == 20


@pytest.mark.parametrize(("dtype", "compile"), EXACT_AND_TRACED)
def test_twenty_updates_of_td3_are_those_of_the_reference(dtype, compile, traced_only):
    module = built(TD3, DeterministicActorCritic, dtype, compile)
    actor, critics = actor_layers(module.policy.actor), critic_layers(module.policy.critic)
    reference = TD3Reference(actor, critics, rate=1e-2, tau=0.1)
    rng = np.random.default_rng(2)
    for i in range(20):
        batch = drawn(rng)
        batch["next_noise"] = np.clip(0.2 * batch["next_noise"], -0.5, 0.5)
        with_actor = i % 2 == 1
        update(module, tensors(batch, dtype), with_actor)
        reference.update(batch, with_actor)
    assert_follows(module, reference, TOLERANCE[dtype])


def test_an_actor_moves_no_critic_and_leaves_no_gradient_there():
    module = built(SAC, SquashedActorCritic, torch.float32, False)
    before = [p.clone() for p in module.policy.critic.parameters()]
    module.updates["actor"](tensors(drawn(np.random.default_rng(2)), torch.float32))
    for old, parameter in zip(before, module.policy.critic.parameters(), strict=True):
        assert torch.equal(old, parameter)
        assert parameter.grad is None


class ModelFirst(TD3):
    """Lists its losses from the last to the first, after that of a model that trains on other samples too."""

    def __init__(self, policy, **settings):
        super().__init__(policy, **settings)
        self.model = torch.nn.Linear(3, 1)

    def configure_objectives(self):
        model = self.objective(self.model_loss, self.model, name="model")
        return [model, *super().configure_objectives()[::-1]]

    def model_loss(self, batch):
        return (self.model(batch["observation"]).squeeze(-1) - batch["reward"]).square().mean(), {}

    def minibatches(self, rollout):
        for batch in self.replay.batches(4, 16):
            self.updates["model"](batch)
        yield from super().minibatches(rollout)


def test_the_order_of_the_objectives_does_not_change_the_number_of_updates(tmp_path):
    model = {"algorithm": ModelFirst, "updates_per_env_step": 0.25, "compile": False}
    run = {"env": "Pendulum-v1", "model": model}
    for steps in (128, 192):
        data = {"replay": ReplayBuffer, "total_env_steps": steps}
        ckpt = last(tmp_path / "128") if steps == 192 else None
        module, *_ = train(tmp_path / f"{steps}", data=data, ckpt_path=ckpt, **run)
        due = (steps - 32) // 4
        assert module.updates_done == due
        counts = {name: loss.statistics.applied for name, loss in module.objectives.items()}
        assert counts == {"model": steps // 16, "actor": due // 2, "critic": due}
    saved = load(last(tmp_path / "192"))
    del saved["lightning_rl"]["updates"]["done"]
    module.on_load_checkpoint(saved)
    assert module.updates_done == 12, "an older checkpoint counts the steps of the first objective"


def test_discrete_and_unbounded_actions_are_refused():
    discrete = gymnasium.spaces.Discrete(3)
    with refused(names=("Discrete(3)", "DiscreteSAC", "DiscreteActorCritic", "PPO")):
        SquashedActorCritic(OBSERVATION_SPACE, discrete)
    unbounded = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    with refused(
        names=("Box(-inf, inf, (2,), float32)", "gymnasium.wrappers.TransformAction", "PPO")
    ):
        DeterministicActorCritic(OBSERVATION_SPACE, unbounded)
