"""What must hold in every update, whatever it learns."""

import math
from contextlib import nullcontext

import pytest
import torch

from lightning_rl import GRPO, PPO
from lightning_rl.functional import ratio
from lightning_rl.optim.update import LearningRateSchedule, UpdateStatistics
from tests.callbacks import callback, signal_at
from tests.helpers import assert_same, last, load, scalars, train
from tests.messages import refused
from tests.probes import TimeLimitProbe
from tests.variants import after, before


def recorder():
    """Make a PPO that keeps what its loss saw."""

    def begin(module, rollout, batch_idx):
        ppo.staleness_seen.append(module.staleness(rollout))
        ppo.ratios.append([])

    def look(module, minibatch):
        new = module.policy.evaluate_actions(minibatch)["sample_log_prob"].detach()
        ppo.ratios[-1].append(ratio(new, minibatch["sample_log_prob"]))

    ppo = before(PPO, training_step=begin, loss=look)
    ppo.staleness_seen, ppo.ratios = [], []
    return ppo


@pytest.mark.parametrize(
    ("env", "policy"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"normalize_observation": True}),
        ("Pendulum-v1", {"squash": True, "normalize_observation": True}),
    ],
)
def test_the_first_ratio_of_every_update_is_one_and_the_policy_lag_zero(env, policy, tmp_path):
    module, _, _ = train(tmp_path, env=env, policy=policy, model={"algorithm": recorder()})
    assert module.staleness_seen == [0] * 6
    for first, *_ in module.ratios:
        torch.testing.assert_close(first, torch.ones_like(first), rtol=0, atol=1e-5)
    assert (module.ratios[-1][-1] - 1).abs().max() > 1e-4  # the check above can fail


def test_a_stale_rollout_is_refused(tmp_path):
    def another_update(module, *args):
        """As if another one had come between collection and training."""
        module.policy.version += 1

    forgetful = before(PPO, on_train_batch_start=another_update)
    forgetful = after(forgetful, finish_iteration=another_update)
    with refused(RuntimeError, names=("1 updates", "0")):
        train(tmp_path, model={"algorithm": forgetful})


def test_global_step_counts_iterations_whatever_the_number_of_optimizer_steps(tmp_path):
    module, _, trainer = train(tmp_path, model={"target_kl": 1e-6, "n_epochs": 4})
    assert trainer.global_step == 6
    assert module.env_steps == 6 * 4 * 16
    assert 6 * 2 <= module.optimizer_steps < 6 * 2 * 4  # at least one epoch of 2 minibatches each
    assert load(last(tmp_path))["global_step"] == 6


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_leaves_the_training_alone(deterministic, tmp_path):
    """Weights, optimizer, envs and random streams, bit for bit."""
    train(tmp_path / "without", data={"iterations_per_epoch": 1}, trainer={"limit_val_batches": 0})
    stream = torch.get_rng_state()
    data = {"iterations_per_epoch": 1, "num_eval_envs": 1, "eval_deterministic": deterministic}
    train(tmp_path / "with", data=data)
    assert torch.equal(torch.get_rng_state(), stream)
    a, b = load(last(tmp_path / "with")), load(last(tmp_path / "without"))
    for key in ("state_dict", "optimizer_states", "lightning_rl", "RLDataModule"):
        assert_same(a[key], b[key], key)


def test_seeds_decide_everything(tmp_path):
    runs = [train(tmp_path / str(i), seed=seed)[0] for i, seed in enumerate((1, 1, 2))]
    weights = [run.policy.actor[0].weight for run in runs]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def overflowing(bad, value):
    """Make a PPO whose loss is no number in minibatches of some numbers, from 1."""

    def spoil(module, result, minibatch):
        module.calls = getattr(module, "calls", 0) + 1
        return result[0] * (value if bad(module.calls) else 1.0), result[1]

    return after(PPO, loss=spoil)


def test_what_is_not_finite_is_skipped_counted_and_named(tmp_path):
    with refused(
        FloatingPointError, names=("3 optimizer steps", "loss, grad_norm", "learning_rate")
    ):
        train(
            tmp_path,
            model={
                "algorithm": overflowing(lambda call: call > 10, math.nan),
                "max_nonfinite_steps": 3,
            },
        )


def test_the_actor_stands_still_for_as_many_iterations_as_its_warm_up_has(tmp_path):
    weights, moved = [], []

    def look(module, result, rollout, batch_idx):
        weight = module.policy.actor[0].weight.detach().clone()
        moved.append(not torch.equal(weight, weights[-1]))
        weights.append(weight)

    def begin(module):
        weights.append(module.policy.actor[0].weight.detach().clone())

    watched = before(after(PPO, training_step=look), on_train_start=begin)
    train(tmp_path, model={"algorithm": watched, "critic_warmup_iterations": 2})
    assert moved == [False, False, True, True, True, True]


def test_as_many_steps_as_are_allowed_are_skipped_in_a_row_and_no_more():
    fine, bad = torch.zeros(2), torch.tensor([torch.nan, 0.0])
    statistics = UpdateStatistics(3)
    for rows, exhausted in (((bad, bad, fine, bad), False), ((bad,), False), ((bad,), True)):
        for row in rows:
            statistics.add(["loss", "grad_norm"], row)
        statistics.close()
        assert statistics.exhausted is exhausted
    assert (statistics.applied, statistics.skipped) == (1, 5)


@pytest.mark.parametrize("normalize_advantage", ["minibatch", "rollout", "off"])
def test_advantages_are_normalized_as_asked(normalize_advantage, tmp_path):
    seen = []

    watched = before(PPO, loss=lambda module, minibatch: seen.append(minibatch["advantage"]))
    train(tmp_path, model={"algorithm": watched, "normalize_advantage": normalize_advantage})
    epoch = torch.cat(seen[:2])  # two minibatches of 32 make the 64 transitions of a rollout
    normalized = abs(float(epoch.mean())) < 1e-5 and abs(float(epoch.std()) - 1) < 1e-4
    assert normalized == (normalize_advantage == "rollout")


def test_the_linear_rate_ends_at_zero_with_the_budget(tmp_path):
    train(tmp_path, model={"lr_schedule": "linear", "learning_rate": 0.6})
    rates = [value for _, value in scalars(tmp_path)["train/learning_rate"]]
    assert rates == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_the_adaptive_rate_follows_the_kl():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = LearningRateSchedule("adaptive", 1e-3, 0.01)
    schedule.apply(optimizer, 0, 10)
    for kl, expected in ((0.03, 1e-3 / 1.5), (0.001, 1e-3), (0.01, 1e-3), (1e-17, 1e-3)):
        schedule.adapt(optimizer, kl)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
    schedule.apply(optimizer, 5, 10)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("kind", ["constant", "linear", "adaptive"])
def test_a_rate_that_the_schedule_would_overwrite_is_refused(kind, hook, tmp_path):
    def slow_down(trainer, *args):
        trainer.optimizers[0].param_groups[0]["lr"] = 1e-12

    overwrites = kind != "adaptive" or hook != "on_train_batch_end"  # its first rate alone is fixed
    names = ("learning_rate", "1e-12", "lr_schedule", kind, "schedule_from")
    with refused(names=names) if overwrites else nullcontext():
        model = {"lr_schedule": kind}
        train(tmp_path, model=model, trainer={"callbacks": [callback(**{hook: slow_down})]})


def test_a_resumed_run_takes_another_rate(tmp_path):
    model = {"lr_schedule": "constant"}
    train(tmp_path, model=model, trainer={"callbacks": [signal_at(1)]})
    train(tmp_path, model=model | {"learning_rate": 1e-2}, ckpt_path=last(tmp_path))
    rates = [value for _, value in scalars(tmp_path)["train/learning_rate"]]
    assert rates == pytest.approx([3e-4, 3e-4, 1e-2, 1e-2, 1e-2, 1e-2])


@pytest.mark.parametrize("compile", [False, True])
def test_the_adaptive_rate_stands_still_while_the_actor_does(
    compile, tmp_path, traced_only, monkeypatch
):
    """In critic warm-up, and in GRPO as long as all members of a group earn the same."""
    adaptive = {"lr_schedule": "adaptive", "desired_kl": 0.01, "compile": compile}
    data = {"total_env_steps": 4 * 16 * 3}
    warm_up = adaptive | {"critic_warmup_iterations": 3}
    module, _, trainer = train(tmp_path / "ppo", data=data, model=warm_up)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 3e-4
    assert module.optimizer_steps > 0
    # A KL that is not noise, as where actor and critic share layers, is not of the actor's rate either.
    monkeypatch.setattr(UpdateStatistics, "mean_since", lambda *_: 1e-3)
    _, _, trainer = train(tmp_path / "shared", data=data, model=warm_up)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 3e-4
    monkeypatch.undo()
    alike = adaptive | {"algorithm": GRPO, "group_size": 4, "mode": "trajectory"}
    # -1 a step, and nobody arrives
    _, _, trainer = train(tmp_path / "grpo", env="MountainCar-v0", data=data, model=alike)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 3e-4


def test_a_batch_larger_than_the_rollout_is_refused_before_training(tmp_path):
    with refused(names=("model.batch_size=65", "data.num_envs * data.buffer_size = 64")):
        train(tmp_path, model={"batch_size": 65})


def test_time_limits_reach_the_targets(tmp_path):
    """The return of a truncated step bootstraps from the final observation, which the env made."""
    targets = {}

    def look(module, result, rollout):
        transitions = rollout[:, :-1]
        cut = transitions["truncated"]
        targets["got"] = transitions["return"][cut]
        # all observations of this probe are alike, so are their values
        targets["expected"] = 1.0 + module.gamma * transitions["value"][cut]

    train(tmp_path, env=TimeLimitProbe, model={"algorithm": after(PPO, add_advantages=look)})
    assert len(targets["got"]) > 0
    torch.testing.assert_close(targets["got"], targets["expected"])
