"""What must hold in every update without a critic: groups that are groups, and steps that count."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import GRPO, PPO, ActorCritic, ActorOnly, GymnasiumEnv
from lightning_rl.algorithms.on_policy import TransitionSampler, epochs
from lightning_rl.rollout.contract import flat_transitions
from tests.envs import NUMBER, ScriptedTask
from tests.helpers import make_data, make_ppo, scalars, train
from tests.messages import refused
from tests.references import group_advantage
from tests.variants import after, before

GROUPS = {"num_envs": 8, "buffer_size": 40, "total_env_steps": 8 * 40 * 4}


def countdown(num_envs):
    """Pay the action; end after a number of steps drawn at the start."""

    def start(uniform):
        return {"left": (uniform * 12).floor() + 2}

    def move(env, state, action):
        left = state["left"] - 1
        return {"left": left}, action.squeeze(-1), left.squeeze(-1) <= 0

    settings = {"observe": lambda state: state["left"], "action_space": NUMBER, "steps": 1000}
    return ScriptedTask(num_envs, start, move, **settings)


def recorder():
    """Make a GRPO that keeps its rollouts."""

    def keep(module, result, rollout, batch_idx):
        module.rollouts.append(rollout.clone())

    def look(module, minibatch):
        module.sizes.append(len(minibatch))

    grpo = before(after(GRPO, training_step=keep), loss=look)
    grpo.rollouts, grpo.sizes = [], []
    return grpo


def learn(tmp_path, env="CartPole-v1", data=GROUPS, **model):
    model = {"algorithm": recorder(), "group_size": 4, "n_epochs": 1} | model
    return train(tmp_path, env=env, data=data, model=model)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_members_of_a_group_begin_alike_and_groups_do_not(vectorization, tmp_path):
    module, _, _ = learn(
        tmp_path, env=lambda n: GymnasiumEnv(n, "CartPole-v1", vectorization=vectorization)
    )
    starts = torch.stack([rollout["observation"][:, 0] for rollout in module.rollouts])
    groups = starts.unflatten(1, (2, 4))
    assert (groups == groups[:, :, :1]).all()
    assert len(groups[:, :, 0].flatten(0, 1).unique(dim=0)) == 2 * len(module.rollouts)


def test_statistics_count_first_episodes_and_nothing_leaks_into_the_next_rollout(tmp_path):
    module, _, _ = learn(tmp_path, env=countdown)
    logged = scalars(tmp_path)
    assert [s for s, _ in logged["charts/episodes"]] == [s for s, _ in logged["train/policy_loss"]]
    episodes = [value for _, value in logged["charts/episodes"]]
    assert episodes == [8.0 * (i + 1) for i in range(len(episodes))]
    own = [
        float(rollout["reward"][n, : int(rollout["done"][n].long().argmax()) + 1].double().sum())
        for rollout in module.rollouts
        for n in sorted(range(8), key=lambda n: int(rollout["done"][n].long().argmax()))
    ]
    averages = [value for _, value in logged["charts/episode_reward_avg_100"]]
    for i, average in enumerate(averages[:12]):
        assert average == pytest.approx(np.mean(own[: 8 * (i + 1)]), abs=1e-5)


def test_masked_steps_are_in_no_minibatch_and_every_other_step_is_in_one(tmp_path):
    module, _, _ = learn(tmp_path, env=countdown)
    sizes = iter(module.sizes)
    for rollout in module.rollouts:
        counted = sum(int(row.long().argmax()) + 1 for row in rollout["done"][:, :-1])
        expected = [32] * (counted // 32) + [counted % 32] * (counted % 32 > 0)
        assert [next(sizes) for _ in expected] == expected
    shares = [value for _, value in scalars(tmp_path)["train/effective_samples"]]
    assert 0.3 < min(shares) < 1


@pytest.mark.parametrize("mode", ["step", "trajectory"])
@pytest.mark.parametrize("aggregation", ["token", "trajectory"])
def test_the_loss_is_that_of_the_definition(mode, aggregation, tmp_path):
    """At ratio 1 the gradient of the loss is -sum of weight * A * grad log pi: weigh by hand."""
    module, _, _ = learn(tmp_path, env=countdown, mode=mode, aggregation=aggregation, ent_coef=0.1)
    rollout = module.rollouts[0]
    advantage, counts = group_advantage(
        rollout["reward"][:, :-1].double().numpy(),
        rollout["done"][:, :-1].numpy(),
        4,
        0.99,
        mode,
        1e-3,
        True,
        False,
        True,
    )
    samples = rollout[:, :-1]
    np.testing.assert_allclose(samples["advantage"].numpy(), advantage, atol=1e-4)
    evaluated = module.policy.evaluate_actions(samples.reshape(-1))
    log_prob = evaluated["sample_log_prob"].view(8, -1)
    entropy = evaluated["entropy"].view(8, -1)
    if aggregation == "token":
        weights = counts / counts.sum()
    else:
        weights = counts / counts.sum(1, keepdims=True) / len(counts)
    weights = torch.tensor(weights)
    expected = -(weights * (torch.tensor(advantage) * log_prob + 0.1 * entropy)).sum()
    mask = torch.tensor(counts)
    rollout["sample_log_prob"] = torch.nn.functional.pad(log_prob.detach(), (0, 1))
    drawing = TransitionSampler(flat_transitions(rollout, module.fields), mask)
    ((everything,),) = epochs(drawing, 1, 10_000, torch.Generator(), prepare=lambda *_: {})
    loss, _ = module.loss(everything)
    for ours, theirs in zip(
        torch.autograd.grad(loss, list(module.policy.parameters()), retain_graph=True),
        torch.autograd.grad(expected, list(module.policy.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-3, atol=1e-5)


def test_a_filter_needs_an_env_that_says_success(tmp_path):
    with refused(names=("filter_groups: true", "info['success']", "filter_groups: false")):
        learn(tmp_path, filter_groups=True)


def test_a_group_is_left_out_only_where_all_its_members_have_ended_alike(tmp_path):
    data = make_data("CartPole-v1", **GROUPS)
    module = make_ppo(data, algorithm=recorder(), group_size=4, filter_groups=True)
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(reports_success=True))
    # Rows by what became of them: success, failure, still under way.
    outcomes = {"SSSS": 0, "FFFF": 0, "SSFF": 1, "SSSU": 1, "FFFU": 1, "UUUU": 1, "SUUU": 1}
    rows = "".join(outcomes)
    done, success = torch.zeros(2, len(rows), 6, dtype=torch.bool)
    for n, outcome in enumerate(rows):
        done[n, n % 5] = outcome != "U"
        success[n, n % 5] = outcome == "S"
        if outcome != "U":  # what follows the first episode of a row is not asked
            done[n, 4], success[n, 4] = True, success[n, 4] | (outcome == "F" and n % 5 < 4)
    rollout = TensorDict({"done": done, "success": success}, [len(rows), 6])
    kept = module._undecided(rollout)
    assert kept.view(-1, 4).all(1).tolist() == [bool(keep) for keep in outcomes.values()]
    assert torch.equal(kept.view(-1, 4).any(1), kept.view(-1, 4).all(1))
    data.close()


def test_the_reference_is_the_policy_that_training_began_with(tmp_path):
    torch.manual_seed(3)
    module, _, _ = learn(tmp_path, kl_coef=0.5, n_epochs=3)
    first = module.rollouts[0]
    torch.testing.assert_close(
        first["reference_log_prob"], first["sample_log_prob"], rtol=0, atol=1e-5
    )
    later = module.rollouts[-1]
    assert (later["reference_log_prob"] - later["sample_log_prob"]).abs().max() > 1e-3
    assert not any(p.requires_grad for p in module.reference.parameters())
    kl = [value for _, value in scalars(tmp_path)["train/reference_kl"]]
    free, _, _ = learn(tmp_path / "free", kl_coef=0.0, n_epochs=3)
    assert kl[-1] > 0
    began = list(module.reference.kept)  # parameters, then buffers
    distance = [
        sum((p - q).square().sum() for p, q in zip(m.policy.parameters(), began, strict=False))
        for m in (module, free)
    ]
    assert distance[0] < distance[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 3}, ("num_envs=8", "group_size=3", "9")),
        ({"mode": "trajectory", "truncate_at_first_done": False}, "mode: trajectory"),
        ({"filter_groups": True, "truncate_at_first_done": False}, "filter_groups: true"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message, tmp_path):
    with refused(names=message):
        learn(tmp_path, **settings)


def test_ppo_refuses_a_policy_without_a_critic():
    data = make_data()
    with refused(names=("PPO", "ActorOnly", "ActorCritic")):
        PPO(ActorOnly(data.observation_space, data.action_space))


def test_an_actor_is_the_same_with_a_critic_and_without():
    data = make_data("Pendulum-v1")
    torch.manual_seed(4)
    alone = ActorOnly(data.observation_space, data.action_space, (16,))
    torch.manual_seed(4)
    both = ActorCritic(data.observation_space, data.action_space, (16,))
    td = TensorDict({"observation": torch.randn(5, 3), "action": torch.randn(5, 1)}, [5])
    a, b = alone.evaluate_actions(td), both.evaluate_actions(td)
    assert torch.equal(a["sample_log_prob"], b["sample_log_prob"])
    assert (a["value"] == 0).all()
    assert (alone.get_value(td.clone())["value"] == 0).all()
    assert not (b["value"] == 0).all()
