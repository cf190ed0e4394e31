"""Settings of algorithms: each bound is refused from its far side, and allowed on its near one."""

from functools import partial

import pytest
from torch.optim import LBFGS, AdamW, Muon, SparseAdam

from lightning_rl import DQN, GRPO, PPO, SAC, TD3, DiscreteSAC
from tests.helpers import make_data, make_ppo
from tests.messages import refused
from tests.variants import after

POSITIVE = ((0.0, 0.01),)
COUNT = ((0, 1),)
SHARE = ((-0.1, 0.0), (1.1, 1.0))
OPEN = ((0.0, 0.01), (1.0, 0.99))
NOT_NEGATIVE = ((-0.1, 0.0),)

EVERY = {
    "learning_rate": POSITIVE,
    "batch_size": COUNT,
    "max_grad_norm": POSITIVE,
    "max_nonfinite_steps": COUNT,
    "gamma": SHARE,
}
ON_POLICY = EVERY | {"n_epochs": COUNT, "target_kl": POSITIVE, "ent_coef": NOT_NEGATIVE}
OFF_POLICY = EVERY | {
    "n_steps": COUNT,
    "tau": ((0.0, 0.01), (1.1, 1.0)),
    "updates_per_env_step": ((0.0, 0.01), (10_001, 10_000)),
    "publish_every_updates": COUNT,
    "learning_starts": ((-1, 0),),
}
CRITICS = OFF_POLICY | {"critic_learning_rate": POSITIVE, "policy_delay": COUNT}

RANGES = {
    PPO: ON_POLICY
    | {
        "gae_lambda": SHARE,
        "clip_coef": OPEN,
        "vf_coef": NOT_NEGATIVE,
        "critic_warmup_iterations": ((-1, 0),),
        "behavior_weight_cap": ((0.9, 1.0),),
    },
    GRPO: {
        "clip_high": POSITIVE,
        "eps": POSITIVE,
        "kl_coef": NOT_NEGATIVE,
        "group_size": ((1, 2),),
    },
    SAC: CRITICS
    | {
        "random_env_steps": ((-1, 0),),
        "alpha_learning_rate": POSITIVE,
        "init_alpha": POSITIVE,
        "num_target_critics": ((0, 1), (3, 2)),
    },
    TD3: {"target_noise": NOT_NEGATIVE, "target_noise_clip": NOT_NEGATIVE},
    DQN: OFF_POLICY | {"target_update_interval": COUNT, "exploration_fraction": SHARE},
    DiscreteSAC: {"target_entropy_share": ((-0.1, 0.0), (1.0, 0.99))},
}


@pytest.mark.parametrize(
    ("algorithm", "setting"),
    [(algorithm, setting) for algorithm in RANGES for setting in RANGES[algorithm]],
)
def test_a_setting_keeps_its_range(algorithm, setting):
    data = make_data("Pendulum-v1" if algorithm in (PPO, SAC, TD3) else "CartPole-v1")
    for outside, inside in RANGES[algorithm][setting]:
        with refused(names=(setting, outside)):
            make_ppo(data, algorithm=algorithm, **{setting: outside})
        make_ppo(data, algorithm=algorithm, **{setting: inside})


def test_a_learning_rate_that_the_schedule_would_overwrite_is_refused():
    data, rate = make_data(), {"learning_rate": 2e-3}
    for optimizer in (AdamW, partial(AdamW, lr=2e-3)):
        module = make_ppo(data, optimizer=optimizer, **rate)
        for _ in range(2):  # a second `fit`
            assert len(module.configure_optimizers()) == 1
    with refused(names=("AdamW", "lr=1e-06", "model.learning_rate", "0.002")):
        make_ppo(data, optimizer=partial(AdamW, lr=1e-6), **rate).configure_optimizers()

    def grouped(module, objectives):
        groups = [{"params": module.policy.parameters(), "lr": 1e-6}]
        return [module.objective(module.loss, prepare=module.prepare, groups=groups)]

    with refused(names=("lr=1e-06", "model.learning_rate", "lr_scale")):
        make_ppo(data, algorithm=after(PPO, configure_objectives=grouped)).configure_optimizers()


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (LBFGS, ("LBFGS", "closure", "model.optimizer", "torch.optim.Adam")),
        (SparseAdam, ("SparseAdam", "sparse gradients", "model.optimizer", "torch.optim.Adam")),
        (Muon, ("model.optimizer", "Muon", "2D")),
        (partial(AdamW, eps=-1.0), ("model.optimizer", "epsilon", "-1.0")),
    ],
)
def test_an_optimizer_that_cannot_step_here_is_refused_before_a_run(optimizer, names):
    with refused(names=names):
        make_ppo(make_data(), optimizer=optimizer).configure_optimizers()
