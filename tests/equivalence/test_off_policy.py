"""SAC and TD3 beside their neighbours: resumed, compiled, in the background, normalised, in chunks, they do what they do alone."""

import logging
from functools import partial

import pytest
import torch

import lightning_rl as rl
from lightning_rl.policies.networks import q_networks
from tests.arms import helped_arm, mixed
from tests.core.equivalence.test_resume import assert_resumes, stop_and_resume
from tests.core.learning.test_probes import PictureProbe
from tests.equivalence.features import MinimalInfo
from tests.equivalence.test_async import background
from tests.goal_envs import GoalProbe
from tests.helpers import assert_same, assert_same_run, last, load, scalars, train
from tests.messages import refused
from tests.probes import MaskProbe
from tests.variants import after, variant


def chunked(num_envs):
    return rl.ActionChunk(num_envs, lambda n: rl.GymnasiumEnv(n, "Pendulum-v1"), 3)


def be_shy(policy, result, *args, **kwargs):
    policy.register_buffer("shyness", torch.tensor(0.1))


SHY = after(
    rl.SquashedActorCritic,
    __init__=be_shy,
    q_values=lambda policy, values, *args, **kwargs: values - policy.shyness,
)
"""Its critics expect a little less than they would."""


def have_made(module, policy, **kwargs):
    own = SHY(policy.observation_space, policy.action_space, (16,))
    rl.SAC.__init__(module, own, **kwargs)


ITERATIONS, STOP = 6, 4
"""Iterations of 16 steps, and that in which a run is stopped: its replay of 60 is full."""


def settings(
    *, collector=None, algorithm=rl.SAC, env="Pendulum-v1", policy=None, replay=None, **model
):
    budget = 2 * 8 * ITERATIONS * (3 if env is chunked else 1)
    data = {"num_envs": 2, "buffer_size": 8, "total_env_steps": budget}
    # Fewer than there are: the oldest make room.
    data["replay"] = replay or partial(rl.ReplayBuffer, capacity=60)
    data["collector"] = collector or rl.SyncCollector
    return {"env": env, "data": data, "policy": policy, "model": {"algorithm": algorithm, **model}}


RUNS = {
    "SAC": {},
    "SAC, all at once": {
        "policy": {"normalize_observation": True, "num_critics": 3, "critic_normalization": "layer"},
        "num_target_critics": 2, "policy_delay": 2, "n_steps": 3, "updates_per_env_step": 0.7, "max_grad_norm": 1.0,
    },
    "TD3": {"algorithm": rl.TD3},
    "SAC in chunks": {"env": chunked, "updates_per_env_step": 0.4, "n_steps": 2},
    "SAC on a torch task": {"env": rl.PushCube, "policy": {"normalize_observation": True}},
    "a policy of one's own, told little": {
        "algorithm": variant(rl.SAC, __init__=have_made),
        "env": partial(rl.GymnasiumEnv, id="Pendulum-v1", wrappers=[MinimalInfo]),
    },
    "SAC that remembers": {
        "policy": {"memory": partial(rl.GRU, size=4), "normalize_observation": True, "noise_correlation": 0.5, "network": "residual"},
        "sequence_length": 3, "burn_in": 1, "n_steps": 2, "updates_per_env_step": 0.4, "policy_delay": 2,
    },
    "TD3 that remembers, in chunks": {
        "algorithm": rl.TD3, "env": chunked, "sequence_length": 2, "updates_per_env_step": 0.1,
        "policy": {"memory": partial(rl.LSTM, size=4), "value_atoms": rl.ValueAtoms(5, 9.0)}, "normalize_reward": True,
    },
    "an arm with a gripper, and help": {
        "algorithm": rl.GripperSAC, "env": helped_arm, "replay": mixed, "policy_delay": 2, "updates_per_env_step": 2, "n_steps": 2,
        "policy": {"actor_normalization": "layer", "critic_normalization": "layer", "normalize_observation": True},
    },
    "CrossQ": {
        "tau": None, "policy_delay": 3, "num_target_critics": 2,
        "policy": {"critic_normalization": "batch", "num_critics": 3, "encoder": partial(rl.PerceptronEncoder, hidden_sizes=(8,))},
    },
    "SAC, categorical and residual": {
        "normalize_reward": True, "n_steps": 2, "num_target_critics": 2,
        "policy": {
            "network": "residual", "actor_normalization": "rms", "critic_normalization": "layer", "critic_hidden_sizes": (8, 8),
            "value_atoms": rl.ValueAtoms(11, 5.0), "num_critics": 3, "normalize_observation": True,
        },
    },
    "TD3, categorical, in chunks": {
        "algorithm": rl.TD3, "env": chunked, "updates_per_env_step": 0.4, "normalize_reward": True,
        "policy": {"value_atoms": rl.ValueAtoms(11, 5.0), "critic_normalization": "layer"},
    },
    "CrossQ that remembers": {
        "tau": None, "sequence_length": 2, "updates_per_env_step": 0.25,
        "policy": {"memory": partial(rl.GRU, size=4), "critic_normalization": "batch"},
    },
    "discrete SAC, of what is allowed": {
        "algorithm": rl.DiscreteSAC, "env": MaskProbe, "num_target_critics": 2, "policy_delay": 2, "normalize_reward": True,
        "policy": {"num_critics": 3, "critic_normalization": "layer", "encoder": partial(rl.DictEncoder, normalize=True)},
    },
    "DQN of pictures": {
        "algorithm": rl.DQN, "env": PictureProbe, "n_steps": 2, "target_update_interval": 3, "tau": 1.0, "random_shift": 1,
        "policy": {"dueling": True, "encoder": partial(rl.NatureCNN, size=8, channels=(4,), kernels=(2,), strides=(1,))},
    },
    "DQN that remembers what is allowed": {
        "algorithm": rl.DQN, "env": MaskProbe, "sequence_length": 3, "burn_in": 1, "n_steps": 2, "updates_per_env_step": 0.4,
        "exploration_fraction": 0.8,
        "policy": {"exploration": "boltzmann", "memory": partial(rl.GRU, size=4), "normalize_observation": True},
    },
    "goals in hindsight": {
        "env": partial(rl.GymnasiumEnv, id="tests/Point-v0"), "replay": partial(rl.HindsightReplay, capacity=60), "n_steps": 2,
        "policy": {"normalize_observation": True}, "normalize_reward": True,
    },
    "FQL in chunks, and help": {
        "algorithm": rl.FQL, "env": helped_arm, "replay": mixed, "policy": {"chunk_size": 3, "normalize_observation": True},
        "policy_delay": 2, "normalize_q": True, "normalize_reward": True,
    },
    "QC of goals in hindsight": {
        "algorithm": rl.QC, "env": partial(rl.GymnasiumEnv, id="tests/Point-v0"), "replay": partial(rl.HindsightReplay, capacity=60),
        "policy": {"chunk_size": 2, "num_samples": 3, "q_reduction": "min", "network": "residual"}, "target_samples": 2,
    },
    "goals in hindsight, by DQN": {
        "algorithm": rl.DQN, "env": partial(GoalProbe, discrete=True), "replay": partial(rl.HindsightReplay, capacity=60, strategy="episode"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_stopped_and_resumed_ends_as_uninterrupted(name, tmp_path):
    run = settings(**RUNS[name])
    module = assert_resumes(tmp_path, STOP, **run)
    assert module.updates_done > 15
    assert ("metrics/steps" in scalars(tmp_path / "whole")) == ("told little" in name)


def test_another_pace_of_a_resumed_run_counts_from_there(tmp_path, caplog):
    """Nothing is made up for, and nothing is waited for."""
    had = {}
    with caplog.at_level(logging.INFO):
        for budget, each in ((64, 1.0), (128, 2.0), (160, 2.0)):
            run = settings(updates_per_env_step=each)
            run["data"]["total_env_steps"] = budget
            ckpt = last(tmp_path) if had else None
            module, *_ = train(tmp_path, ckpt_path=ckpt, **run)
            had[budget] = module.updates_done
    assert had == {64: 32, 128: 32 + 64 * 2, 160: 32 + 96 * 2}
    said = "From env step 64, updates_per_env_step is 2; it was 1."
    assert caplog.text.count("From env step") == caplog.text.count(said) == 1


RENORMALIZED_EARLY = 3
"""Minibatches; else it takes 100,000."""

IN_OTHERS = ("SAC", "TD3", "SAC in chunks", "TD3, categorical, in chunks")
"""Runs of which each setting is compiled in another of them."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in IN_OTHERS else ()) for n in RUNS]
)
def test_compiled_it_follows_the_eager_run(name, tmp_path, traced_only):
    run = settings(**RUNS[name], compile=True)
    eager, *_ = train(tmp_path / "eager", **settings(**RUNS[name]))
    compiled, *_ = train(tmp_path / "compiled", **run)
    assert compiled.learner.compilation.compiled
    # Adam makes steps of one size of gradients that are little more than rounding noise.
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), rtol=1e-3, atol=3e-4)
    if q_networks.RENORMALIZED_AFTER == RENORMALIZED_EARLY:
        stop_and_resume(tmp_path / "stopped", STOP, **run)
        assert_same_run(tmp_path / "compiled", tmp_path / "stopped")


@pytest.mark.parametrize(
    "name", ["CrossQ", pytest.param("CrossQ that remembers", marks=pytest.mark.slow)]
)
def test_renormalised_critics_are_compiled_and_resumed_alike(
    name, tmp_path, monkeypatch, traced_only
):
    """After 100,000 minibatches, here after 3, batch statistics are renormalised."""
    plain, *_ = train(tmp_path / "plain", **settings(**RUNS[name]))
    monkeypatch.setattr(q_networks, "RENORMALIZED_AFTER", RENORMALIZED_EARLY)
    test_compiled_it_follows_the_eager_run(name, tmp_path, traced_only)
    renormalised = load(last(tmp_path / "eager"))["state_dict"]["policy.critic.weights.1"]
    assert not torch.equal(renormalised, plain.policy.critic.weights[1])


IN_THE_BACKGROUND = [
    *("SAC", "CrossQ", "SAC that remembers", "discrete SAC, of what is allowed"),
    *("DQN that remembers what is allowed", "goals in hindsight"),
    *("FQL in chunks, and help", "QC of goals in hindsight"),
]


@pytest.mark.parametrize("name", IN_THE_BACKGROUND)
def test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground(name, tmp_path):
    train(tmp_path / "sync", **settings(**RUNS[name]))
    train(tmp_path / "async", **settings(**RUNS[name], collector=background(0)))
    for key in ("state_dict", "optimizer_states"):
        assert_same(*(load(last(tmp_path / kind))[key] for kind in ("sync", "async")))


def kept_in(made):
    """What makes a collector in the background, and keeps it."""

    def make(context):
        made.append(rl.AsyncCollector(context, max_staleness=1, timeout_s=30))
        return made[-1]

    return make


def test_in_the_background_it_learns_from_older_steps_and_publishes_within_an_iteration(tmp_path):
    """All iterations but two have 16 updates, and 10 of them are enough for a publication."""
    made = []
    module, _, _ = train(tmp_path, **settings(collector=kept_in(made)))
    assert module.metrics["train/skipped_steps"] == 0
    assert module.updates_done == 2 * 8 * ITERATIONS - 32
    assert module.publish_every_updates == 10
    assert module.policy.version == ITERATIONS
    assert made[0]._weights.number == 1 + ITERATIONS + ITERATIONS - 2


def test_a_collector_that_drops_rollouts_is_refused(tmp_path):
    dropping = partial(rl.AsyncCollector, overflow="overwrite", timeout_s=30)
    cure = ("updates_per_env_step=1", "overflow: block", "max_staleness")
    with refused(names=("data.collector.overflow=overwrite", "SAC", *cure)):
        train(tmp_path, **settings(collector=dropping))
