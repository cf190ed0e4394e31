"""A run that was stopped and resumed ends exactly where an uninterrupted one does."""

import math
import pickle
import signal
from copy import deepcopy
from itertools import count

import gymnasium
import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_rl import GRU, PPO, RLTrainer
from lightning_rl.envs import GymnasiumEnv
from tests.callbacks import signal_at
from tests.envs import ScriptedEnv, zeros
from tests.helpers import (
    assert_same,
    assert_same_run,
    fit_in,
    last,
    make_data,
    make_ppo,
    scalars,
    train,
)
from tests.messages import refused
from tests.probes import ActionProbe, ValueProbe
from tests.variants import after

LIVES = count()


def amnesiac():
    """An env whose episodes depend on more than their seed and actions."""
    return ScriptedEnv(observe=lambda env: zeros(env) + next(LIVES) % 20, length=7)


def stop_and_resume(run_dir, iteration, during="on_train_batch_start", **kwargs):
    stop = signal_at(iteration, hook=during)
    _, _, trainer = train(run_dir, trainer={"callbacks": [stop]}, **kwargs)
    assert trainer.stop_signal == signal.SIGTERM
    train(run_dir, ckpt_path=last(run_dir), **kwargs)


def assert_resumes(tmp_path, iteration, **kwargs):
    """Assert that a run that was stopped and resumed ends as the uninterrupted one, whose module is returned."""
    module, *_ = train(tmp_path / "whole", **kwargs)
    stop_and_resume(tmp_path / "stopped", iteration, **kwargs)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    return module


TWO_ENVS = {"num_envs": 2, "total_env_steps": 2 * 16 * 6}
"""A process for each env takes 0.08 s."""

ENVS = {
    "CartPole": {"env": "CartPole-v1"},
    "Pendulum": {
        "env": "Pendulum-v1",
        "policy": {"normalize_observation": True},
        "model": {"normalize_reward": True},
    },
    "Acrobot": {"env": "Acrobot-v1"},
    "MountainCar": {"env": "MountainCarContinuous-v0", "policy": {"squash": True}},
    "torch-native": {"env": lambda n: ActionProbe(n, continuous=True), "policy": {"squash": True}},
    "torch-native discrete": {"env": lambda n: ValueProbe(n, delay=3)},
    "recurrent": {  # its state is in the middle of an episode of 200 steps
        "env": "Pendulum-v1",
        "policy": {"memory": GRU, "normalize_observation": True},
        "model": {"sequence_length": 5, "burn_in": 2},
    },
    "async": {
        "env": lambda n: GymnasiumEnv(n, "CartPole-v1", vectorization="async"),
        "data": TWO_ENVS,
    },
}


@pytest.mark.parametrize("name", ENVS)
def test_resume_is_exact_for(name, tmp_path):
    assert_resumes(tmp_path, 3, **ENVS[name])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the directory of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("whole")
    train(run_dir)
    return run_dir


@pytest.mark.parametrize("iteration", [0, 4, 5])
def test_resume_is_exact_from_every_iteration(iteration, tmp_path, whole):
    """In the middle of an epoch, at its last iteration, and at the last one of the budget."""
    if iteration == 5:  # nothing is left to do: the run ends as if nobody had asked it to
        train(tmp_path / "stopped", trainer={"callbacks": [signal_at(5)]})
    else:
        stop_and_resume(tmp_path / "stopped", iteration)
    assert_same_run(whole, tmp_path / "stopped")


def test_a_signal_outside_the_iteration_is_honoured(tmp_path, whole):
    stop_and_resume(tmp_path / "stopped", 3, during="on_validation_start")
    assert_same_run(whole, tmp_path / "stopped")


def test_a_run_stopped_twice_is_exact(tmp_path, whole):
    run_dir = tmp_path / "stopped"
    train(run_dir, trainer={"callbacks": [signal_at(1)]})
    train(run_dir, trainer={"callbacks": [signal_at(3)]}, ckpt_path=last(run_dir))
    train(run_dir, ckpt_path=last(run_dir))
    assert_same_run(whole, run_dir)


def test_what_was_evaluated_is_not_where_the_next_run_begins(tmp_path, whole):
    """Envs, replay and random streams of a checkpoint are for the call that loads it."""
    seed_everything(3)
    data = make_data()
    module = make_ppo(data)
    trainer = RLTrainer(run_dir=str(tmp_path / "run"), accelerator="cpu", logger=False)
    trainer.validate(module, datamodule=data, ckpt_path=last(whole))
    seed_everything(3)
    fit_in(tmp_path / "new", make_ppo(data), data)
    assert_same_run(whole, tmp_path / "new")
    trainer.validate(module, datamodule=data, ckpt_path=last(whole))
    fit_in(tmp_path / "again", module, data)  # its budget is used up: nothing is drawn
    fresh = torch.Generator().manual_seed(data.seed_for("shuffle"))
    assert torch.equal(module.generator.get_state(), fresh.get_state())


@pytest.mark.parametrize("error", [RuntimeError, FloatingPointError])
def test_the_same_objects_are_resumed_exactly_after_an_error_in_an_update(error, tmp_path, whole):
    failed = []

    def spoil(module, result, minibatch):
        if module.iterations_done == 4 and len(failed) < 2:
            failed.append(minibatch)
            if error is RuntimeError and len(failed) == 2:
                raise RuntimeError("out of memory")
            return result[0] * (math.nan if error is FloatingPointError else 1.0), result[1]

    seed_everything(3)
    data = make_data()
    module = make_ppo(data, algorithm=after(PPO, loss=spoil), max_nonfinite_steps=2)
    with pytest.raises(error):
        fit_in(tmp_path, module, data)
    fit_in(tmp_path, module, data, ckpt_path=last(tmp_path))
    assert_same_run(whole, tmp_path)


def test_a_trained_module_can_be_pickled(tmp_path):
    """As by `torch.save(module)`, a debugger's snapshot or a process pool."""
    module, _, _ = train(tmp_path, data={"total_env_steps": 64})
    assert_same(pickle.loads(pickle.dumps(module)).state_dict(), module.state_dict())


def test_resume_keeps_the_learning_rate(tmp_path):
    model = {"lr_schedule": "adaptive", "desired_kl": 1e-4, "target_kl": 0.05}
    assert_resumes(tmp_path, 3, model=model)
    rates = [value for _, value in scalars(tmp_path / "whole")["train/learning_rate"]]
    assert len(set(rates)) > 1


def test_the_next_fit_trains_by_the_settings_of_then(tmp_path):
    """Of rates, optimizers and frozen layers; the counts of steps go on."""
    module, data, _ = train(tmp_path / "run", model={"lr_schedule": "constant"})
    steps = module.optimizer_steps
    module.learning_rate, module.make_optimizer = 1e-5, torch.optim.SGD
    module.policy.critic.requires_grad_(False)
    before = deepcopy(module.policy.critic.state_dict())
    data.total_env_steps *= 2
    fit_in(tmp_path / "on", module, data)
    rates = [rate for _, rate in scalars(tmp_path / "on")["train/learning_rate"]]
    assert rates == [pytest.approx(1e-5)] * len(rates)
    assert isinstance(module.updates[""].optimizer, torch.optim.SGD)
    assert_same(module.policy.critic.state_dict(), before)
    assert module.optimizer_steps == 2 * steps


def test_a_finished_run_can_be_extended(tmp_path):
    """With a rate that does not depend on the budget, a longer run is the shorter one and then more."""
    model = {"lr_schedule": "constant"}
    longer = {"total_env_steps": 4 * 16 * 9}
    train(tmp_path / "whole", model=model, data=longer)
    train(tmp_path / "extended", model=model)
    train(tmp_path / "extended", model=model, data=longer, ckpt_path=last(tmp_path / "extended"))
    assert_same_run(tmp_path / "whole", tmp_path / "extended")


def test_an_env_that_cannot_be_restored_restarts_with_a_warning(tmp_path):
    gymnasium.register("Amnesiac-v0", amnesiac)
    try:
        train(tmp_path, env="Amnesiac-v0", trainer={"callbacks": [signal_at(3)]})
        with refused(UserWarning, names=("env", "episodes")):
            train(tmp_path, env="Amnesiac-v0", ckpt_path=last(tmp_path))
    finally:
        del gymnasium.registry["Amnesiac-v0"]
