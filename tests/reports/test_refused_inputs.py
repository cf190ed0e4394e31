"""Inputs that were ignored, or ended in an IndexError far from their cause, are refused by name."""

from functools import partial

import pytest

from lightning_rl import (
    GRPO,
    PPO,
    SAC,
    TD3,
    Algorithm,
    BehaviorCloning,
    OnPolicyAlgorithm,
    ReplayBuffer,
)
from lightning_rl.cli.app import run
from tests.helpers import fit_in, make_data, make_ppo
from tests.messages import assert_names, refused


class OfTwoSteps(OnPolicyAlgorithm):
    """Looks at a rollout through `rewards` alone."""

    def training_step(self, rollout, batch_idx):
        self.rewards(rollout)
        self.finish_iteration(rollout)

    def loss(self, minibatch):
        raise NotImplementedError


WAYS = {
    "flattened": lambda rollout: rollout.flatten(),
    "without its steps": lambda rollout: rollout[:, :1],
    "of one env": lambda rollout: rollout[0],
}


@pytest.mark.parametrize("algorithm", [PPO, GRPO, BehaviorCloning, SAC, TD3, OfTwoSteps])
def test_a_rollout_that_lost_its_time_gets_a_message(tmp_path, algorithm):
    """Also after the first one, when a replay has its layout."""
    told = []

    class Flattening(algorithm):
        def on_train_start(self):
            Algorithm.on_train_start(self)  # a cloner's own would ask for demonstrations

        def training_step(self, rollout, batch_idx):
            if algorithm in (SAC, TD3):
                super().training_step(rollout, batch_idx)
            for way, change in WAYS.items():
                with refused(ValueError, names="[num_envs, steps + 1]") as caught:
                    super().training_step(change(rollout), batch_idx)
                told.append((way, str(caught.value)))
            self.finish_iteration(rollout)

    off_policy = algorithm in (SAC, TD3)
    env = "Pendulum-v1" if off_policy else "CartPole-v1"
    replay = {"replay": partial(ReplayBuffer, capacity=200)} if off_policy else {}
    data = make_data(env, total_env_steps=4 * 16 * 2, iterations_per_epoch=1, **replay)
    settings = {"group_size": 2} if algorithm is GRPO else {}
    settings |= {"updates_per_env_step": 0.01} if off_policy else {}
    if algorithm is BehaviorCloning:
        module = BehaviorCloning(make_ppo(data).policy, batch_size=16, compile=False)
        module.__class__ = Flattening
    else:
        module = make_ppo(data, algorithm=Flattening, compile=False, **settings)
    fit_in(tmp_path, module, data, limit_val_batches=0)
    assert {way for way, _ in told} == set(WAYS)
    assert "[68]" in dict(told)["flattened"]


@pytest.mark.parametrize(
    ("setting", "cure"),
    [
        ("exp_name: mine", "exp_name: NAME at the top"),
        ("output_dir: there", "output_dir: DIR at the top"),
        ("restore_replay: false", "--restore_replay false"),
    ],
)
@pytest.mark.parametrize("subcommand", ["fit", "check", "sweep"])
def test_a_setting_of_the_run_in_the_trainers_section_is_not_ignored(
    tmp_path, capsys, setting, cure, subcommand
):
    config = tmp_path / "own.yaml"
    config.write_text(f"model: {{class_path: PPO}}\ntrainer:\n  {setting}\n")
    more = ["--grid", "model.gamma=[0.9]"] if subcommand == "sweep" else []
    with pytest.raises(SystemExit):
        run([subcommand, "--config", str(config), *more])
    error = capsys.readouterr().err
    name = setting.partition(":")[0]
    assert_names(error, f"trainer.{name}", cure)
    assert cure in error
