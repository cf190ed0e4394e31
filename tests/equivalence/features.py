"""A run in which a user's own policy and algorithm, chunks, partial infos, normalisers and warm-up all meet."""

from functools import partial

import gymnasium
import torch
from tensordict import TensorDict
from torch import nn

from lightning_rl import PPO, ActionChunk, GymnasiumEnv, Policy
from lightning_rl.policies.networks.perceptron import flatten_observation
from lightning_rl.policies.normalization import ObservationNormalizer

WARM_UP = 2
"""Iterations in which the actor stands still."""


class MinimalInfo(gymnasium.Wrapper):
    """Say success only where there is one, and a metric at every other step."""

    def reset(self, **kwargs):
        self.steps = 0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        if self.steps % 2:
            success = {"success": True} if terminated else {}
            info = info | {"metrics": {"steps": self.steps}} | success
        return observation, reward, terminated, truncated, info


def make_env(num_envs):
    inner = partial(GymnasiumEnv, id="CartPole-v1", wrappers=[MinimalInfo])
    return ActionChunk(num_envs, inner, chunk_size=2)


class OwnPolicy(Policy):
    """Chunks of two discrete actions, with a log-prob each; what it returns is a TensorDict of its own."""

    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space)
        self.chunk = len(action_space.nvec)
        self.normalizer = ObservationNormalizer(4)
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2 * self.chunk))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    @property
    def extra_fields(self):
        return {"sample_log_prob": ((self.chunk,), torch.float32)}

    def log_probs(self, td):
        return self.actor(self.features(td)).unflatten(-1, (self.chunk, 2)).log_softmax(-1)

    def features(self, td):
        return self.normalizer(flatten_observation(td["observation"]))

    def forward(self, td, deterministic=False, generator=None):
        log_probs = self.log_probs(td)
        noise = torch.empty_like(log_probs).exponential_(generator=generator).log()
        action = (log_probs if deterministic else log_probs - noise).argmax(-1)
        chosen = log_probs.gather(-1, action[..., None]).squeeze(-1)
        return TensorDict({"action": action, "sample_log_prob": chosen}, td.batch_size)

    def get_value(self, td):
        return td.set("value", self.critic(self.features(td)).squeeze(-1))

    def evaluate_actions(self, td):
        log_probs = self.log_probs(td)
        chosen = log_probs.gather(-1, td["action"][..., None]).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        value = self.critic(self.features(td)).squeeze(-1)
        result = {"sample_log_prob": chosen, "entropy": entropy, "value": value}
        return TensorDict(result, td.batch_size)

    def update_normalization(self, rollout):
        self.normalizer.update(rollout["observation"][:, :-1].flatten(0, 1))


class OwnAlgorithm(PPO):
    """PPO with a bonus of its own, annealed over the run."""

    bonus = 0.0

    def __init__(self, policy, **kwargs):
        torch.manual_seed(7)
        own = OwnPolicy(policy.observation_space, policy.action_space)
        super().__init__(own, critic_warmup_iterations=WARM_UP, normalize_reward=True, **kwargs)

    def training_step(self, rollout, batch_idx):
        self.bonus = 0.05 * (1 - self.iterations_done / 8)
        super().training_step(rollout, batch_idx)

    def loss(self, minibatch):
        loss, scalars = super().loss(minibatch)
        if not self.warms_up:
            loss = loss - self.bonus * scalars["entropy"]
        return loss, scalars | {"bonus": scalars["entropy"] * self.bonus}


ALL = {
    "env": make_env,
    "data": {"total_env_steps": 2 * 4 * 16 * 5, "iterations_per_epoch": 5, "num_eval_episodes": 8},
    "model": {"algorithm": OwnAlgorithm, "lr_schedule": "adaptive", "learning_rate": 1e-3},
}
