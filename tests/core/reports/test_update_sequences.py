"""Several losses step down one minibatch: what passes from one to the next is what is declared, and nothing else."""

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import SAC, ReplayBuffer, SquashedActorCritic
from lightning_rl.algorithms.learner import Learner
from lightning_rl.compiled.choice import CompileDecision
from tests.helpers import train, uncompiled_traces
from tests.messages import refused
from tests.variants import after

OBSERVATION = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
ACTION = gymnasium.spaces.Box(-1, 1, (1,), np.float32)


class Watching(SAC):
    """Its critics' loss reports, and writes, what the losses after it must not read."""

    reports, writes = {}, {}

    def critic_loss(self, minibatch):
        loss, scalars = super().critic_loss(minibatch)
        for name, value in self.writes.items():
            minibatch[name] = torch.full((len(minibatch),), value)
        return loss, scalars | {name: torch.tensor(value) for name, value in self.reports.items()}

    def actor_loss(self, minibatch):
        loss, scalars = super().actor_loss(minibatch)
        return loss, scalars | {
            "seen_action": minibatch["action"].mean(),
            "fields": torch.tensor(float(len(minibatch.keys()))),
        }


def trained(tmp_path, cls):
    data = {"replay": ReplayBuffer, "total_env_steps": 4 * 16 * 3}
    model = {"algorithm": cls, "compile": False, "updates_per_env_step": 0.1}
    module, _, _ = train(tmp_path, env="Pendulum-v1", data=data, model=model)
    return module


def one_update(cls, compile=False, **settings):
    """The scalars of one update by all losses, and the minibatch as it is afterwards."""
    torch.manual_seed(0)
    policy = SquashedActorCritic(OBSERVATION, ACTION, (8,))
    module = cls(policy, batch_size=8, **settings)
    optimizers = module.configure_optimizers()
    module.attach_learner(
        Learner(module, module.objectives, optimizers, CompileDecision(compile, None))
    )
    minibatch = TensorDict(
        {
            **{name: torch.rand(8, 3) for name in ("observation", "next_observation")},
            **{name: torch.rand(8, 1) for name in ("action", "noise", "next_noise")},
            **{name: torch.rand(8) for name in ("reward", "discount")},
        },
        [8],
    )
    expected = minibatch.clone()
    with uncompiled_traces():
        module.update_in_turn(minibatch, *module.objectives)
    means = {}
    for objective in module.objectives.values():
        means |= objective.statistics.close()
    return means, expected, minibatch


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("way", ["reports", "writes"])
def test_a_scalar_with_the_name_of_a_field_leaves_the_minibatch_as_it_is(way, compile):
    cls = type("Overwriting", (Watching,), {way: {"action": 99.0, "extra": 1.0}})
    means, expected, after = one_update(cls, compile)
    assert means["seen_action"] == pytest.approx(float(expected["action"].mean()))
    assert means["fields"] == len(expected.keys())
    assert set(after.keys()) == set(expected.keys())
    assert (after["action"] == expected["action"]).all()


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "traced"])
def test_what_is_passed_must_be_reported_and_have_a_name_of_its_own(compile):
    taken = type("Taken", (Watching,), {"actor_forwarded_scalars": ("entropy", "action")})
    with refused(names=("'action'", "minibatch")):
        one_update(taken, compile)
    missing = type("Missing", (Watching,), {"actor_forwarded_scalars": ("entropy", "temperature")})
    with refused(names=("'actor'", "'temperature'", "'entropy'", "forwarded_scalars=")):
        one_update(missing, compile)


def test_two_losses_cannot_pass_on_the_same_name():
    def share(module, objectives):
        for objective in objectives[:2]:
            objective.forwarded_scalars = ("entropy",)

    with refused(names=("Two objectives", "'entropy'")):
        one_update(after(Watching, configure_objectives=share))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("critic_loss", "'critic_loss'"),
        ("alpha", "train/alpha"),
        ("actor_learning_rate", "train/actor_learning_rate"),
    ],
)
def test_two_numbers_are_not_charted_under_one_name(tmp_path, name, told):
    cls = type("Charting", (Watching,), {"reports": {name: 1.0}})
    with refused(names=told):
        trained(tmp_path, cls)


def test_a_run_ends_the_same_whatever_a_loss_reports(tmp_path):
    reporting = type("Reporting", (Watching,), {"reports": {"reward": 7.0, "noise": 9.0}})
    plain = trained(tmp_path / "plain", SAC)
    other = trained(tmp_path / "other", reporting)
    assert (other.metrics["train/reward"], other.metrics["train/noise"]) == (7.0, 9.0)
    assert float(plain.log_alpha.detach()) != 0.0
    weights = plain.state_dict(), other.state_dict()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
