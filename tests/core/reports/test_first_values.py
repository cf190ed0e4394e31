"""A setting that only gives a first value to what a checkpoint holds is named at a resume."""

import warnings
from functools import partial
from inspect import Parameter, signature

import pytest
import torch

from lightning_rl import PPO, SAC, TD3, ActorCritic, DiscreteSAC, ReplayBuffer
from lightning_rl.training.callbacks.settings import FIRST_VALUES
from tests.helpers import last, make_data, make_ppo, train
from tests.messages import refused

LONGER = {"total_env_steps": 4 * 16 * 9}


@pytest.mark.parametrize(
    ("algorithm", "changed", "name"),
    [
        (PPO, {"policy": {"log_std_init": -2.0}}, "model.policy.log_std_init: -2.0"),
        (SAC, {"model": {"init_alpha": 0.01}}, "model.init_alpha: 0.01"),
        (
            PPO,
            {"model": {"lr_schedule": "adaptive", "learning_rate": 0.1}},
            "model.learning_rate: 0.1",
        ),
    ],
)
def test_a_first_value_that_a_resumed_run_sets_is_named(tmp_path, algorithm, changed, name):
    data = {"replay": partial(ReplayBuffer, capacity=500)} if algorithm is SAC else {}
    fewer = {"updates_per_env_step": 0.1} if algorithm is SAC else {}
    of_all = {"env": "Pendulum-v1", "model": {"algorithm": algorithm} | fewer}
    train(tmp_path / "first", data=data, **of_all)
    changed = changed | {"model": of_all["model"] | changed.get("model", {})}
    settings = of_all | changed | {"data": data | LONGER, "ckpt_path": last(tmp_path / "first")}
    with refused(UserWarning, names=name):
        train(tmp_path / "second", **settings)


def test_a_first_value_is_named_at_a_warm_start_and_an_equal_one_is_not(tmp_path):
    both = {"env": "Pendulum-v1", "policy": {"log_std_init": -1.0}}
    train(tmp_path / "first", **both)
    checkpoint = last(tmp_path / "first")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*log_std_init")
        train(tmp_path / "same", **both, data=LONGER, ckpt_path=checkpoint)
    with refused(UserWarning, names="model.policy.log_std_init: 0.5"):
        start = {"init_from": str(checkpoint)}
        train(tmp_path / "warm", env="Pendulum-v1", policy={"log_std_init": 0.5}, trainer=start)


@pytest.mark.parametrize("algorithm", [PPO, SAC, TD3, DiscreteSAC])
def test_all_numbers_that_only_change_weights_are_first_values(algorithm):
    """A new setting of this kind must enter the table: find it by what a changed number changes."""
    data = make_data("CartPole-v1" if algorithm is DiscreteSAC else "Pendulum-v1")

    def state_and_rest(settings, policy):
        torch.manual_seed(0)
        module = make_ppo(data, policy, algorithm, **settings)
        rest = {
            f"{name}.{key}": value
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, int | float) and not key.startswith("_")
        }
        return {key: value.clone() for key, value in module.state_dict().items()}, repr(rest)

    state, rest = state_and_rest({}, {})
    for cls in {*algorithm.__mro__[:-1], ActorCritic}:
        own = vars(cls).get("__init__")
        for name, argument in signature(own).parameters.items() if own else ():
            if type(argument.default) is not float or argument.kind is Parameter.VAR_KEYWORD:
                continue
            try:
                of_policy = cls is ActorCritic
                changed = {name: 0.5 * argument.default + 0.01}
                other, others = state_and_rest(
                    {} if of_policy else changed, changed if of_policy else {}
                )
            except (TypeError, ValueError):  # of another class, or out of range
                continue
            moved = any(not torch.equal(state[key], other[key]) for key in state)
            assert not moved or others != rest or name in FIRST_VALUES, name
    data.close()
