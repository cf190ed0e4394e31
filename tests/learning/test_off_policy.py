"""Off-policy learners find the known answers of probe envs, count updates against env steps, and refuse what cannot be."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from tensordict import TensorDict

from lightning_rl import (
    DQN,
    PPO,
    SAC,
    TD3,
    ActorCritic,
    BehaviorCloning,
    DiscreteSAC,
    ReplayBuffer,
    RLDataModule,
    ValueAtoms,
)
from tests.algorithms import limit_is_failure
from tests.envs import UNIT, ScriptedTask
from tests.helpers import fit_in
from tests.messages import refused
from tests.probes import ActionProbe, MaskProbe
from tests.variants import before


def corridor(num_envs):
    """Pays 1 at each step but the first, for ever; only time ends an episode, after 5 steps.

    Q = 1 / (1 - gamma) everywhere but at the start, where it is gamma times that.
    """

    def move(env, state, action):
        return {"inside": torch.ones_like(state["inside"])}, state["inside"].squeeze(-1)

    return ScriptedTask(num_envs, lambda uniform: {"inside": torch.zeros_like(uniform)}, move)


def reset_is_successor(replay, rollout):
    """The mistake: what follows a step is what the next slot holds, the reset observation where time ran out."""
    rollout["truncated"], rollout["done"] = (torch.zeros_like(rollout["done"]) for _ in range(2))


def learn(run_dir, env, *, algorithm=SAC, replay=ReplayBuffer, policy=None, data=None, **model):
    """Train in a directory, without an evaluation."""
    seed_everything(3)
    settings = {"num_envs": 4, "buffer_size": 25, "total_env_steps": 400, "iterations_per_epoch": 4}
    replay = partial(replay, capacity=1000)
    module_data = RLDataModule(env, replay=replay, **settings | (data or {}))
    spaces = module_data.observation_space, module_data.action_space
    chosen = {"batch_size": 64, "learning_rate": 3e-3, "random_env_steps": 100} | model
    module = algorithm(algorithm.policy_kind(*spaces, (32,), **(policy or {})), **chosen)
    fit_in(run_dir, module, module_data, limit_val_batches=0, logger=False)
    return module


# What the critics come to at the fourfold step inside, of which the last in an episode is cut: Q = 1 + g (3/4 Q + 1/4 X)
# with X = Q, the true final observation's; 0; or g Q, that of the start.
CLOSED_FORM = {
    ReplayBuffer: 1 / (1 - 0.9),
    before(ReplayBuffer, "LimitIsFailure", extend=limit_is_failure): 1 / (1 - 0.9 * 3 / 4),
    before(ReplayBuffer, "ResetIsSuccessor", extend=reset_is_successor): 1
    / (1 - 0.9 * 3 / 4 - 0.81 / 4),
}


@pytest.mark.parametrize(
    "replay",
    [  # the mistakes, too, come to what they should
        pytest.param(kind, marks=() if kind is ReplayBuffer else pytest.mark.slow)
        for kind in CLOSED_FORM
    ],
)
def test_q_under_a_time_limit_is_that_of_the_endless_task(replay, tmp_path):
    settings = {"gamma": 0.9, "tau": 0.1, "entropy_in_target": False, "updates_per_env_step": 6}
    module = learn(tmp_path, corridor, replay=replay, **settings)
    inside = TensorDict({"observation": torch.ones(3, 1)}, [3])
    action = torch.tensor([[-0.9], [0.0], [0.9]])
    with torch.no_grad():
        q = module.policy.q_values(inside, action)
    assert q.mean().item() == pytest.approx(CLOSED_FORM[replay], rel=0.06)


CATEGORICAL = {"value_atoms": ValueAtoms(21, 3.0), "critic_normalization": "layer"}
SLOW = "SAC, categorical and residual"
ACTORS = {
    "SAC": (SAC, {}, {}),
    "TD3": (TD3, {"exploration_std": 0.3}, {}),
    SLOW: (
        SAC, CATEGORICAL | {"network": "residual", "actor_normalization": "layer"}, {"normalize_reward": True},
    ),
    "CrossQ": (SAC, {"critic_normalization": "batch"}, {"tau": None}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == SLOW else ()) for n in ACTORS]
)
def test_the_actor_learns_a_continuous_action(name, tmp_path):
    algorithm, policy, model = ACTORS[name]
    env = partial(ActionProbe, continuous=True)
    module = learn(
        tmp_path,
        env,
        algorithm=algorithm,
        policy=policy,
        data={"total_env_steps": 800 if name == "CrossQ" else 400},
        updates_per_env_step=3,
        **({"init_alpha": 0.01, "learn_alpha": False} if algorithm is SAC else {}),
        **model,
    )
    seen = TensorDict({"observation": torch.tensor([[1.0], [-1.0]])}, [2])
    action = module.policy.get_action(seen, deterministic=True)["action"]
    assert action.flatten().tolist() == pytest.approx([0.5, -0.5], abs=0.12)


@pytest.mark.parametrize("algorithm", [DiscreteSAC, DQN])
def test_it_learns_which_of_the_allowed_actions_leads_on(algorithm, tmp_path):
    """SAC aims at half of log 2, as two of twenty are allowed."""
    data = {"num_envs": 8, "buffer_size": 25, "total_env_steps": 1600}
    own = {"init_alpha": 0.01} if algorithm is DiscreteSAC else {"policy": {"dueling": True}}
    module = learn(tmp_path, MaskProbe, algorithm=algorithm, data=data, gamma=0.9, tau=0.05, **own)
    cells = torch.arange(MaskProbe.cells)
    env = MaskProbe(MaskProbe.cells)
    seen = env.observe(TensorDict({"cell": cells}, [len(cells)]))
    chosen = module.policy.get_action(TensorDict({"observation": seen}, [len(cells)]), True)
    assert torch.equal(chosen["action"], 7 * cells % 20)
    if algorithm is DiscreteSAC:
        assert module.metrics["train/target_entropy"] == pytest.approx(0.5 * np.log(2.0))


def test_the_first_steps_are_drawn_uniformly_and_say_so(tmp_path):
    seen = []

    def look(replay, rollout):
        seen.append((rollout["action"][:, :-1].clone(), rollout["sample_log_prob"][:, :-1].clone()))

    learn(
        tmp_path,
        corridor,
        replay=before(ReplayBuffer, extend=look),
        batch_size=8,
        random_env_steps=200,
    )
    actions = torch.cat([action for action, _ in seen[:2]]).flatten()
    assert actions.abs().max() <= 1.0
    assert actions.std().item() == pytest.approx(1 / 3**0.5, abs=0.06)
    assert torch.cat([log_prob for _, log_prob in seen[:2]]).unique().tolist() == [
        pytest.approx(-np.log(2.0))
    ]
    assert seen[2][1].unique().numel() > 10  # the policy's


def test_settings_that_cannot_be_are_refused(tmp_path):
    total = "400 (data.total_env_steps)"
    with refused(names=(total, "model.learning_starts=400", "model.batch_size=64")):
        learn(tmp_path / "a", corridor, learning_starts=400)
    with refused(names=("data.replay.capacity=1000", "model.batch_size=2000")):
        learn(tmp_path / "b", corridor, batch_size=2000, data={"total_env_steps": 4000})
    with refused(names=("SAC", "ActorCritic", "class_path: SquashedActorCritic")):
        SAC(ActorCritic(UNIT, UNIT))
    with refused(names=("model.n_steps=6", "5 steps")):
        learn(tmp_path / "c", corridor, n_steps=6)


@pytest.mark.parametrize("algorithm", ["PPO", "BehaviorCloning"])
def test_a_replay_that_nobody_would_fill_is_refused(algorithm, tmp_path):
    data = RLDataModule(
        corridor,
        num_envs=2,
        buffer_size=8,
        total_env_steps=64,
        replay=partial(ReplayBuffer, capacity=100),
    )
    policy = ActorCritic(data.observation_space, data.action_space)
    model = {"PPO": PPO, "BehaviorCloning": BehaviorCloning}[algorithm](policy, batch_size=16)
    with refused(names=("data.replay", "ReplayBuffer", algorithm, "uses_replay = True")):
        fit_in(tmp_path, model, data)
