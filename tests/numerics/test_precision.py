"""bf16-mixed: networks in bfloat16 wherever they are called, and all that comes out in float32."""

from functools import partial

import pytest
import torch

from lightning_rl import (
    APG,
    DQN,
    GRPO,
    PPO,
    SAC,
    SHAC,
    PointMass,
    PushBlocks,
    ReplayBuffer,
    RLDataModule,
    RLTrainer,
    VLAPolicy,
)
from lightning_rl.algorithms.checks import check_run
from lightning_rl.algorithms.off_policy import OffPolicyAlgorithm
from lightning_rl.collectors import AsyncCollector, SyncCollector
from lightning_rl.envs import ActionChunk
from lightning_rl.policies.networks.perceptron import mlp
from lightning_rl.policies.networks.q_networks import ValueAtoms
from tests.helpers import assert_same_run, fit_in, last, train
from tests.messages import refused
from tests.variants import before

BF16 = {"precision": "bf16-mixed"}
PLAIN = {"limit_val_batches": 0, "enable_checkpointing": False, "logger": False}


def keeps_rollouts(algorithm):
    """An algorithm that keeps each rollout as the update finds it, and the log-probs that the update computes."""

    def look(module, rollout):
        flat = rollout[:, :-1].transpose(0, 1)
        with torch.no_grad():
            rows = [module.policy.evaluate_actions(step) for step in flat]
        kept.log_probs.append(torch.stack([row["sample_log_prob"] for row in rows], 1))
        kept.rollouts.append(rollout[:, :-1].clone())

    kept = before(algorithm, correct_staleness=look)
    kept.rollouts, kept.log_probs = [], []
    return kept


@pytest.mark.parametrize(
    "collector", [SyncCollector, partial(AsyncCollector, max_staleness=0)], ids=["sync", "async"]
)
@pytest.mark.parametrize("algorithm", [PPO, GRPO])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_acting_and_updating_compute_the_same_log_prob(env, algorithm, collector, tmp_path):
    model = {"algorithm": keeps_rollouts(algorithm)}
    model |= {"group_size": 2} if algorithm is GRPO else {}
    data = {"collector": collector}
    module, *_ = train(tmp_path, env=env, data=data, model=model, trainer=PLAIN | BF16)
    assert len(module.rollouts) == 6
    for rollout, log_prob in zip(module.rollouts, module.log_probs, strict=True):
        assert torch.equal(rollout["sample_log_prob"], log_prob), "as many envs at once: same bits"
        plain = module.policy.evaluate_actions(rollout)["sample_log_prob"]
        assert not torch.allclose(plain, log_prob, atol=1e-5), "float32 would be something else"
    assert module.rollouts[0]["sample_log_prob"].dtype == torch.float32


@pytest.mark.parametrize("head", ["token", "gaussian"])
def test_a_vla_computes_its_backbone_in_bfloat16_and_its_heads_in_float32(head, tmp_path):
    seen = {}

    def look(name):
        return lambda module, args, output: seen.setdefault(name, set()).add(output.dtype)

    data = RLDataModule(
        lambda n: ActionChunk(n, lambda m: PushBlocks(m, size=32), 4),
        num_envs=4,
        buffer_size=4,
        total_env_steps=100,
        num_eval_episodes=2,
    )
    torch.manual_seed(0)
    policy = VLAPolicy(data.observation_space, data.action_space, head=head)
    for name, module in policy.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(look(name))
    module = keeps_rollouts(PPO)(policy, n_epochs=1, batch_size=8)
    fit_in(tmp_path, module, data, **(PLAIN | BF16))
    heads = {name: dtypes for name, dtypes in seen.items() if not name.startswith("backbone")}
    backbone = {name: dtypes for name, dtypes in seen.items() if name.startswith("backbone")}
    assert len(heads) >= 3
    assert all(dtypes == {torch.float32} for dtypes in heads.values())
    assert len(backbone) >= 3
    assert all(dtypes == {torch.bfloat16} for dtypes in backbone.values())
    rollout, log_prob = module.rollouts[0], module.log_probs[0]
    torch.testing.assert_close(rollout["sample_log_prob"], log_prob, rtol=0, atol=1e-5)
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in policy.parameters())


def test_a_scaled_loss_is_refused(monkeypatch):
    """On a CPU Lightning takes bf16-mixed instead, but checkpoints would keep the other name."""
    with refused(names=("trainer.precision", "16-mixed", "bf16-mixed")):
        RLTrainer(**PLAIN, accelerator="cpu", precision="16-mixed")
    trainer = RLTrainer(**PLAIN, accelerator="cpu", enable_progress_bar=False)
    monkeypatch.setattr(RLTrainer, "precision", "16-mixed")
    with refused(names=("trainer.precision", "16-mixed", "bf16-mixed")):
        check_run(trainer, torch.nn.Identity())


SHORT = partial(PointMass, max_episode_steps=5)
BATCH = {"policy": {"critic_normalization": "batch"}, "model": {"tau": None}}


@pytest.mark.parametrize(
    ("algorithm", "env", "settings"),
    [
        (SAC, "Pendulum-v1", {}),
        (SAC, "Pendulum-v1", {"data": {"collector": AsyncCollector}}),
        (SAC, "Pendulum-v1", {"policy": {"value_atoms": ValueAtoms(11, 5.0)}}),
        (SAC, "Pendulum-v1", BATCH),
        (SAC, "Pendulum-v1", {"policy": {"critic_normalization": "layer"}}),
        (DQN, "CartPole-v1", {}),
        (APG, SHORT, {}),
        (SHAC, SHORT, {}),
    ],
)
def test_all_algorithms_train_in_it(algorithm, env, settings, tmp_path):
    model = {"algorithm": algorithm} | settings.get("model", {})
    policy = settings.get("policy")
    off_policy = issubclass(algorithm, OffPolicyAlgorithm)
    data = {"replay": partial(ReplayBuffer, capacity=500)} if off_policy else {}
    data |= {"total_env_steps": 128} | settings.get("data", {})
    trainer = PLAIN | BF16
    module, *_ = train(tmp_path, env=env, data=data, policy=policy, model=model, trainer=trainer)
    state = module.state_dict()
    assert all(one.dtype != torch.bfloat16 for one in state.values())
    assert all(one.isfinite().all() for one in state.values())


@pytest.mark.parametrize("crossq", [False, True], ids=["PPO", "CrossQ"])
def test_resume_is_exact(crossq, tmp_path):
    settings = {}
    if crossq:
        replay = partial(ReplayBuffer, capacity=500)
        data = {"replay": replay, "buffer_size": 8, "total_env_steps": 160}
        model = BATCH["model"] | {"algorithm": SAC}
        settings = BATCH | {"env": "Pendulum-v1", "data": data, "model": model}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(whole, trainer=BF16, **settings)
    train(broken, trainer=BF16 | {"max_epochs": 1}, **settings)
    train(broken, trainer=BF16, ckpt_path=last(broken), **settings)
    assert_same_run(whole, broken)


def test_other_precisions_are_refused(tmp_path):
    with refused(names=("trainer.precision bf16-true", "rollouts", "32-true or bf16-mixed")):
        train(tmp_path, trainer={"precision": "bf16-true"})


@pytest.mark.filterwarnings("error")
def test_rms_norm_reads_bfloat16_next_to_float32_weights():
    network = mlp(3, (16, 16), 2, normalization="rms", network="residual")
    x = torch.randn(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(x)
    torch.testing.assert_close(rounded.float(), network(x), atol=0.03, rtol=0.03)
