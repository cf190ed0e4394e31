"""Critics beyond a value of a perceptron: distributions, residual networks, batch statistics, all actions at once."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl import (
    SAC,
    DiscreteActorCritic,
    DiscreteSAC,
    ReplayBuffer,
    SquashedActorCritic,
    ValueAtoms,
)
from lightning_rl.functional import (
    categorical_loss,
    categorical_projection,
    ensemble_loss,
)
from lightning_rl.policies.networks.perceptron import mlp
from lightning_rl.policies.networks.q_networks import QEnsemble
from lightning_rl.policies.normalization import ReturnNormalizer
from tests.core.numerics.test_sac import (
    OBSERVATION_SPACE,
    SPACE,
    actor_layers,
    built,
    critic_layers,
)
from tests.helpers import train
from tests.messages import refused
from tests.probes import MaskProbe
from tests.q_references import DiscreteSACReference, forward, log_softmax, projected
from tests.variants import after, variant


def drawn(rng, samples=12):
    """Samples whose atoms move within the support, beyond both of its ends, onto atoms exactly, and all onto one."""
    reward = rng.normal(size=samples)
    discount = 0.9 ** rng.integers(1, 4, samples)
    reward[:3], discount[2:4] = (10.0, -10.0, 0.5), 0.0
    discount[4], reward[4] = 1.0, 0.5
    cost = rng.normal(size=samples) * (np.arange(samples) != 4)
    probs = np.exp(log_softmax(rng.normal(size=(samples, len(ATOMS)))))
    return reward, discount, probs, cost


ATOMS = np.linspace(-2.0, 2.0, 9)


def test_it_refuses_what_would_broadcast():
    reward, probs, atoms = torch.zeros(12), torch.zeros(12, 9), torch.as_tensor(ATOMS)
    with refused(ValueError, names=("values [9, 12]", "probs [12, 9]")):
        categorical_projection(reward[:, None] + atoms, probs, atoms)
    with refused(ValueError, names=("q [12]", "target [12, 12]")):
        ensemble_loss(torch.zeros(2, 12), reward[:, None] + reward)
    with refused(ValueError, names=("logits [12, 9]", "target [12, 8]")):
        categorical_loss(torch.zeros(2, 12, 9), torch.zeros(12, 8))


@pytest.mark.parametrize("subset", [False, True])
def test_the_loss_of_categorical_critics_is_that_of_the_reference(subset):
    """SAC: the distribution of the critic that says least, lowered by what the next action costs."""
    module = built(
        SAC,
        SquashedActorCritic,
        torch.float64,
        False,
        {"value_atoms": ValueAtoms(9, 2.0), "num_critics": 3},
        init_alpha=0.3,
        num_target_critics=2 if subset else None,
    )
    rng = np.random.default_rng(3)
    for parameter in module.target_critic.parameters():
        parameter.data += torch.as_tensor(0.3 * rng.normal(size=parameter.shape))
    batch = {
        "observation": rng.normal(size=(16, 3)),
        "next_observation": rng.normal(size=(16, 3)),
        "action": rng.uniform(0, 1, (16, 2)),
        "reward": rng.normal(size=16),
        "discount": 0.9 * (rng.random(16) > 0.3),
        "next_noise": rng.normal(size=(16, 2)),
    }
    if subset:
        batch["target_critics"] = np.stack([rng.permutation(3)[:2] for _ in range(16)])
    minibatch = TensorDict({k: torch.as_tensor(v) for k, v in batch.items()}, [16])
    loss, scalars = module.critic_loss(minibatch)

    with torch.no_grad():
        there = TensorDict({"observation": minibatch["next_observation"]}, [16])
        action, log_prob = module.policy.draw_unit(there, minibatch["next_noise"])
    pairs = np.hstack([batch["next_observation"], action.numpy()])
    said = np.exp(
        log_softmax(np.stack([forward(c, pairs)[0] for c in critic_layers(module.target_critic)]))
    )
    now = np.hstack([batch["observation"], module.policy.unit(minibatch["action"]).numpy()])
    logits = log_softmax(
        np.stack([forward(c, now)[0] for c in critic_layers(module.policy.critic)])
    )
    total, mean, alpha = 0.0, 0.0, float(module.log_alpha.detach().exp())
    for i in range(16):
        known = batch["target_critics"][i] if subset else range(3)
        least = min(known, key=lambda e: (said[e, i] * ATOMS).sum())
        values = ATOMS - alpha * log_prob[i].item()
        wanted = projected(
            batch["reward"][i] + batch["discount"][i] * values, said[least, i], ATOMS
        )
        total -= (wanted * logits[:, i]).sum() / 16
        mean += (wanted * ATOMS).sum() / 16
    assert float(loss.detach()) == pytest.approx(total, rel=1e-9)
    assert float(scalars["q_target"]) == pytest.approx(mean, rel=1e-9)
    q = (np.exp(logits) * ATOMS).sum(-1).mean()
    assert float(scalars["q"].detach()) == pytest.approx(q, rel=1e-9)


def test_rewards_are_scaled_so_that_the_largest_return_fits():
    normalizer = ReturnNormalizer(limit=5.0)
    reward = torch.zeros(2, 30)
    reward[0, 10] = 100.0
    never = torch.zeros(2, 30, dtype=torch.bool)
    normalizer.observe(reward, never, discount=0.5)
    assert normalizer.largest.item() == 100.0
    assert normalizer.var.sqrt().item() < 20.0
    assert normalizer(torch.tensor(100.0)).item() == pytest.approx(5.0)
    spread = ReturnNormalizer()
    spread.observe(reward, never, discount=0.5)
    assert spread(torch.tensor(3.0)).item() == pytest.approx(3.0 / spread.var.sqrt().item())
    normalizer.observe(torch.full((2, 30), torch.nan), never, discount=0.5)
    assert normalizer.largest.item() == 100.0
    module = SAC(
        SquashedActorCritic(OBSERVATION_SPACE, SPACE, (8,), value_atoms=ValueAtoms(11, 4.0)),
        normalize_reward=True,
    )
    assert module.reward_normalizer.return_limit == 4.0
    module.reward_normalizer.largest.fill_(8.0)
    assert module.normalized_reward(torch.tensor([6.0])).tolist() == [3.0]


def test_values_that_bootstrap_through_time_limits_fit_between_the_atoms():
    """Rewards of 1 and episodes of 4 steps: Q is 10, but no return of an episode exceeds 3.44."""
    reward, cut, never = torch.ones(2, 9), torch.arange(9) % 4 == 3, torch.zeros(2, 9, dtype=bool)
    fields = {"reward": reward, "done": cut.expand(2, 9), "terminated": never}
    fields["continues"] = torch.tensor([[True], [False]]).expand(2, 9)
    rollout = TensorDict(fields, [2, 9])  # of 8 steps
    bounded, free = ReturnNormalizer(limit=1.0), ReturnNormalizer()
    for _ in range(20):
        bounded.observe_rollout(rollout, 0.9)
        free.observe_rollout(rollout, 0.9)
        resumed = ReturnNormalizer(limit=1.0)
        resumed.load_state_dict(bounded.state_dict())
        resumed.load_rank_state({})
        resumed.load_rank_state(bounded.rank_state())  # of each process
        bounded = resumed
    assert bounded.largest.item() == pytest.approx(10.0, rel=1e-4)
    torch.testing.assert_close(bounded.bootstrapped, torch.tensor([10.0, 10 * (1 - 0.9**8)]))
    assert (free.largest.item(), bounded.var.item()) == (pytest.approx(3.439), free.var.item())
    demonstrated = ReturnNormalizer(limit=1.0)
    rewards, ends = torch.ones(80), cut[:8].repeat(10)
    demonstrated.observe_offline(0.5, rewards, ends, ends, 0.9)
    assert demonstrated.largest.item() == pytest.approx(3.439)
    demonstrated.observe_offline(0.5, rewards, ends, ends & False, 0.9)
    assert demonstrated.largest.item() == pytest.approx(10 * (1 - 0.9**80))


@pytest.mark.parametrize("normalization", ["none", "layer", "rms"])
def test_residual_critics_are_as_many_residual_networks(normalization):
    critic = QEnsemble(5, (6, 6), 3, "relu", normalization, "residual").double()
    for parameter in critic.parameters():
        nn.init.normal_(parameter)
    features, action = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    for e in range(3):
        alone = mlp(
            5, (6, 6), 1, activation="relu", normalization=normalization, network="residual"
        ).double()
        linears = [layer for layer in alone.modules() if isinstance(layer, nn.Linear)]
        norms = [layer for layer in alone.modules() if isinstance(layer, nn.LayerNorm | nn.RMSNorm)]
        with torch.no_grad():
            for layer, weight, bias in zip(linears, critic.weights, critic.biases, strict=True):
                layer.weight.copy_(weight[e].T)
                layer.bias.copy_(bias[e, 0])
            for i, layer in enumerate(norms):
                layer.weight.copy_(critic.gains[i][e, 0])
                if normalization == "layer":
                    layer.bias.copy_(critic.shifts[i][e, 0])
        wanted = alone(torch.cat([features, action], -1)).squeeze(-1)
        torch.testing.assert_close(critic(features, action)[e], wanted)


@pytest.mark.parametrize("network", ["perceptron", "residual"])
def test_batch_statistics_are_of_both_passes_and_running_ones_of_all(network):
    critic = QEnsemble(3, (4, 4), 2, "relu", "batch", network)
    sets = [(torch.randn(8, 2), torch.randn(8, 1), torch.randn(8, 2) + 3, torch.randn(8, 1)) for _ in range(3)]  # fmt: skip
    for one in sets:
        now, following = critic.joint_outputs(*one)
    joined = torch.cat([torch.cat(sets[-1][:2], -1), torch.cat(sets[-1][2:], -1)])
    places = [name for name, _ in critic.named_buffers() if name.startswith("mean_")]
    assert len(places) == 3
    assert critic.seen == 3
    if network == "perceptron":  # by hand: what each layer reads is normalised
        x = joined
        for i, (weight, bias) in enumerate(zip(critic.weights, critic.biases, strict=True)):
            x = nn.functional.batch_norm(x, None, None, training=True)
            x = x @ weight[0] + bias[0]
            x = x.relu() if i < 2 else x
        torch.testing.assert_close(torch.cat([now[0], following[0]]), x)
        inputs = [torch.cat([torch.cat(s[:2], -1), torch.cat(s[2:], -1)]) for s in sets]
        torch.testing.assert_close(critic.mean_0[0, 0], torch.stack(inputs).mean((0, 1)))
        variances = torch.stack([one.var(0, correction=0) for one in inputs]).mean(0)
        torch.testing.assert_close(critic.var_0[0, 0], variances)
    before = {name: value.clone() for name, value in critic.named_buffers()}
    alone = critic(sets[0][0][:1], sets[0][1][:1])  # by the running ones: one sample has no spread
    torch.testing.assert_close(alone[:, 0], critic(*sets[0][:2])[:, 0])
    critic.joint_outputs(*(torch.full_like(one, torch.nan) for one in sets[0]))
    for name, value in critic.named_buffers():
        assert name == "seen" or torch.equal(value, before[name])


def test_after_many_minibatches_values_go_by_running_statistics_and_gradients_by_the_minibatch():
    """Batch renormalisation: within its bounds what comes out is as in `forward`."""
    critic = QEnsemble(3, (4,), 1, "relu", "batch").double()
    pair = [torch.randn(8, n, dtype=torch.float64, requires_grad=True) for n in (2, 1, 2, 1)]
    with torch.no_grad():
        critic.biases[0].fill_(2.0)  # so that each unit is at work
        critic.joint_outputs(*pair)
        for name, value in critic.named_buffers():
            value.copy_(torch.tensor(99_999.0) if name == "seen" else value * 1.5 + 0.01)
    x = torch.cat([torch.cat(pair[:2], -1), torch.cat(pair[2:], -1)])
    kept = {name: value.clone() for name, value in critic.named_buffers()}
    plain = torch.cat([one[0] for one in critic.joint_outputs(*pair)])  # minibatch 100,000
    critic.load_state_dict(critic.state_dict() | kept | {"seen": torch.tensor(100_000.0)})
    assert (plain - critic(x[:, :2], x[:, 2:]).T).abs().max() > 0.01

    found = torch.cat([one[0] for one in critic.joint_outputs(*pair)])
    for i, (weight, bias) in enumerate(zip(critic.weights, critic.biases, strict=True)):
        unit = nn.functional.batch_norm(x, None, None, training=True)
        running = (kept[f"{name}_{i}"].flatten() for name in ("mean", "var"))
        fixed = nn.functional.batch_norm(x, *running, training=False).detach()
        slope = ((fixed[1] - fixed[0]) / (unit[1] - unit[0])).detach()
        x = (fixed + slope * (unit - unit.detach())) @ weight[0] + bias[0]
        x = x.relu() if i == 0 else x
    torch.testing.assert_close(found, x)
    what = [*pair, *critic.weights]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), what), torch.autograd.grad(x.square().sum(), what)
    )
    # far from what has run: three times the spread and five of them aside, and no more
    far = [one.detach() * 100 + 5_000 for one in pair]
    x = torch.cat([torch.cat(far[:2], -1), torch.cat(far[2:], -1)])
    mean, scale = critic._statistics(x[None], 0, True)
    unit = nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(((x - mean) * scale)[0], unit * 3 + 5, atol=1e-5, rtol=1e-5)


def test_targets_of_the_critics_themselves_have_no_gradient():
    policy = SquashedActorCritic(OBSERVATION_SPACE, SPACE, (8,), critic_normalization="batch")
    module = SAC(policy, tau=None, init_alpha=0.3, entropy_in_target=False)
    observations = torch.randn(2, 16, 3)
    fields = {"observation": observations[0], "next_observation": observations[1]}
    fields |= {"action": torch.rand(16, 2), "reward": torch.randn(16), "discount": torch.ones(16)}
    minibatch = TensorDict(fields | {"next_noise": torch.randn(16, 2)}, [16])
    there = TensorDict({"observation": observations[1]}, [16])
    with torch.no_grad():
        following, _ = policy.draw_unit(there, minibatch["next_noise"])
        pairs = observations[0], policy.unit(fields["action"]), observations[1], following
        q, next_q = (policy.critic.mean(said) for said in policy.critic.joint_outputs(*pairs))
    loss, _ = module.critic_loss(minibatch)
    (gradient,) = torch.autograd.grad(loss, policy.critic.biases[-1])
    wanted = (q - fields["reward"] - next_q.amin(0)).mean(-1)
    torch.testing.assert_close(gradient.flatten(), wanted)


def test_what_cannot_be_is_refused():
    make = {"critic_normalization": "batch"}
    with refused(
        names=(
            "critic_normalization: batch",
            "tau=0.005",
            "model.tau: null",
            "critic_normalization: layer",
        )
    ):
        SAC(SquashedActorCritic(OBSERVATION_SPACE, SPACE, **make))
    with refused(names=("critic_normalization", "batch", "none, layer or rms")):
        DiscreteActorCritic(OBSERVATION_SPACE, gymnasium.spaces.Discrete(3), **make)
    uneven = {"network": "residual", "critic_hidden_sizes": (8, 16), "hidden_sizes": (8,)}
    with refused(names=("network: residual", "[256, 256]", "critic_hidden_sizes=[8, 16]")):
        SquashedActorCritic(OBSERVATION_SPACE, SPACE, **uneven)
    with refused(names=("value_atoms.num_atoms", "at least 2", "1")):
        ValueAtoms(1)
    with refused(names=("value_atoms.limit", "0")):
        ValueAtoms(limit=0)
    with refused(names=("DiscreteActorCritic", "Discrete", SPACE, "SquashedActorCritic", "PPO")):
        DiscreteActorCritic(OBSERVATION_SPACE, SPACE)
    continuous = SquashedActorCritic(OBSERVATION_SPACE, SPACE, (8,))
    discrete = DiscreteActorCritic(OBSERVATION_SPACE, gymnasium.spaces.Discrete(3), (8,))
    for algorithm, policy, wanted in (
        (DiscreteSAC, continuous, "DiscreteActorCritic"),
        (SAC, discrete, "SquashedActorCritic"),
    ):
        names = (algorithm.__name__, type(policy).__name__, f"class_path: {wanted}")
        with refused(names=names):
            algorithm(policy)


MASKED = gymnasium.spaces.Dict(
    {"action_mask": gymnasium.spaces.MultiBinary(4), "state": OBSERVATION_SPACE}
)


def of_actions(rng, masked, critics):
    mask = rng.random((2, 16, 4)) < (0.5 if masked else 2.0)
    mask[..., 0] |= ~mask.any(-1)
    first = rng.integers(0, 4, 16)
    action = np.array(
        [next(a for a in np.roll(range(4), k) if m[a]) for k, m in zip(first, mask[0], strict=True)]
    )
    batch = {
        "observation": rng.normal(size=(16, 3)),
        "next_observation": rng.normal(size=(16, 3)),
        "reward": rng.normal(size=16),
        "discount": 0.9 * (rng.random(16) > 0.3),
        "action": action,
        "mask": mask[0],
        "next_mask": mask[1],
    }
    if critics > 2:
        batch["target_critics"] = np.stack([rng.permutation(critics)[:2] for _ in range(16)])
    return batch


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("masked", "critics"), [(False, 2), (True, 4)])
def test_twenty_updates_of_discrete_actions_are_those_of_the_reference(
    masked, critics, compile, traced_only
):
    space = MASKED if masked else OBSERVATION_SPACE

    def read_space(policy, observation_space, *args, **kwargs):
        DiscreteActorCritic.__init__(policy, space, *args, **kwargs)

    module = built(
        DiscreteSAC,
        variant(DiscreteActorCritic, __init__=read_space),
        torch.float64,
        compile,
        {"num_critics": critics},
        gymnasium.spaces.Discrete(4),
        init_alpha=0.3,
        target_entropy_share=0.7,
        num_target_critics=2,
    )
    read = type(module.policy)
    read.actor_features = lambda self, td: (
        td["observation", "state"] if masked else td["observation"]
    )
    reference = DiscreteSACReference(
        actor_layers(module.policy.actor),
        critic_layers(module.policy.critic),
        alpha=float(module.log_alpha.detach().exp()),
        rate=1e-2,
        tau=0.1,
        share=0.7,
        mean_of_all=critics > 2,
    )
    rng = np.random.default_rng(2)
    for _ in range(20):
        batch = of_actions(rng, masked, critics)
        fields = {key: torch.as_tensor(value) for key, value in batch.items()}
        masks = fields.pop("mask"), fields.pop("next_mask")
        if masked:
            for key, mask in zip(("observation", "next_observation"), masks, strict=True):
                fields[key] = TensorDict({"state": fields[key], "action_mask": mask.to(torch.int8)}, [16])  # fmt: skip
        module.update_in_turn(TensorDict(fields, [16]), *module.objectives)
        reference.update(batch)
    for ours, theirs in (
        ([actor_layers(module.policy.actor)], [reference.actor]),
        (critic_layers(module.policy.critic), reference.critics),
        (critic_layers(module.target_critic), reference.targets),
    ):
        for mine, wanted in zip(ours, theirs, strict=True):
            for (w, b), (v, c) in zip(mine, wanted, strict=True):
                np.testing.assert_allclose(w, v, atol=1e-9)
                np.testing.assert_allclose(b, c, atol=1e-9)
    assert abs(float(module.log_alpha.detach()) - float(reference.log_alpha)) < 1e-9


def test_the_first_actions_are_drawn_from_what_is_allowed(tmp_path):
    seen = []

    def look(module, result, batch, batch_idx):  # after what refuses what is forbidden
        seen.append(batch[:, :-1].select("action", "sample_log_prob").clone())

    data = {"replay": partial(ReplayBuffer, capacity=500), "num_envs": 8, "total_env_steps": 256}
    sees = after(DiscreteSAC, on_train_batch_start=look)
    train(tmp_path, env=MaskProbe, data=data, model={"algorithm": sees, "random_env_steps": 128})
    assert set(seen[0]["action"].unique().tolist()) > {0, 10}  # both of each cell that is reached
    half = torch.full((8, 16), 0.5).log()
    torch.testing.assert_close(seen[0]["sample_log_prob"], half)
    assert not torch.equal(seen[1]["sample_log_prob"], half)


def test_a_projection_is_that_of_the_reference_and_keeps_the_mass():
    reward, discount, probs, cost = drawn(np.random.default_rng(0))
    values = reward + discount * (ATOMS[:, None] - cost)
    found = categorical_projection(*map(torch.as_tensor, (values, probs, ATOMS)))
    for i in range(len(reward)):
        np.testing.assert_allclose(found[i], projected(values[:, i], probs[i], ATOMS), atol=1e-12)
    np.testing.assert_allclose(found.sum(-1), 1.0, atol=1e-12)
    np.testing.assert_allclose((found[0, -1], found[1, 0]), 1.0, atol=1e-12)  # beyond an end
    assert (found[2] != 0).sum() == 1  # terminal: the reward alone, which is an atom
    torch.testing.assert_close(found[4, 1:-1], torch.as_tensor(probs[4, :-2]))  # moved by one atom
