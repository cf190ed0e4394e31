"""Time PPO of TorchRL's parts, put together as in its PPO examples."""

from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from common import CLASSIC, Clock, Run, parse
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import (
    ClipTransform,
    DoubleToFloat,
    EnvBase,
    ExplorationType,
    GymEnv,
    GymWrapper,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


def make_env(run: Run) -> EnvBase:
    work = run.workload
    if work.num_envs == 1:
        env: EnvBase = GymEnv(work.env)
    else:
        makers = [lambda: gymnasium.make(work.env)] * work.num_envs
        env = GymWrapper(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED))
    env.set_seed(run.seed)
    if not work.normalize:
        return env
    # Statistics of single rewards, not of returns: TorchRL has no transform for the latter.
    keys, several = ["observation", "reward"], work.num_envs > 1
    env = TransformedEnv(env, VecNormV2(keys, decay=1.0, reduce_batch_dims=several))
    env.append_transform(ClipTransform(keys, low=-10, high=10))
    env.append_transform(DoubleToFloat(["observation"]))
    return env


def make_networks(run: Run, env: EnvBase) -> tuple[ProbabilisticActor, ValueOperator]:
    work = run.workload
    inputs = env.observation_spec["observation"].shape[-1]
    discrete = isinstance(gymnasium.spec(work.env).make().action_space, gymnasium.spaces.Discrete)
    outputs = env.action_spec.shape[-1]
    sizes = {"num_cells": list(work.hidden), "activation_class": nn.Tanh}
    actor: nn.Module = MLP(inputs, outputs, **sizes)
    if discrete:
        keys, kind = ["logits"], torch.distributions.OneHotCategorical
    else:
        actor = nn.Sequential(actor, AddStateIndependentNormalScale(outputs))
        keys, kind = ["loc", "scale"], IndependentNormal
    policy = ProbabilisticActor(
        TensorDictModule(actor, ["observation"], keys),
        in_keys=keys,
        spec=env.full_action_spec_unbatched,
        safe=False,
        distribution_class=kind,
        return_log_prob=True,
        default_interaction_type=ExplorationType.RANDOM,
    )
    return policy, ValueOperator(MLP(inputs, 1, **sizes), ["observation"])


def make_update(
    run: Run, policy: ProbabilisticActor, critic: ValueOperator
) -> Callable[[TensorDict], None]:
    work = run.workload
    gae = GAE(gamma=work.gamma, lmbda=work.gae_lambda, value_network=critic)
    loss_module = ClipPPOLoss(
        policy,
        critic,
        clip_epsilon=work.clip,
        entropy_bonus=work.ent_coef > 0,
        entropy_coeff=work.ent_coef,
        critic_coeff=work.vf_coef,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), work.learning_rate, eps=1e-5)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(work.env_steps, device=run.device),
        sampler=SamplerWithoutReplacement(),
        batch_size=work.batch_size,
    )

    def update(data: TensorDict) -> None:
        with torch.no_grad():
            gae(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for _ in range(work.epochs):
            for batch in buffer:
                losses = loss_module(batch)
                parts = [losses["loss_objective"], losses["loss_critic"]]
                loss = sum(parts) + losses.get("loss_entropy", 0.0)
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), work.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()

    return update


def main() -> None:
    run = parse(CLASSIC)
    work, clock = run.workload, Clock(run)
    torch.manual_seed(run.seed)
    env = make_env(run)
    policy, critic = make_networks(run, env)
    update: Any = make_update(run, policy, critic)
    collector = Collector(
        env,
        policy,
        frames_per_batch=work.env_steps,
        total_frames=run.total * work.env_steps,
        exploration_type=ExplorationType.RANDOM,
        device=run.device,
    )
    clock.start()
    for data in collector:
        began = clock.now()
        update(data)
        collector.update_policy_weights_()
        clock.add("update", clock.now() - began)
        clock.end_iteration()
    clock.report("torchrl", "torchrl")
    collector.shutdown()


if __name__ == "__main__":
    main()
