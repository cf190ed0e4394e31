"""Time a PPO loop written by hand: no library, no metrics, no checks.

`--compile` compiles the loss and fuses Adam.
"""

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from common import ON_POLICY, Clock, Run, parse
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from pendulum import ACTION_SIZE, OBSERVATION_SIZE, Pendulum
from torch import Tensor, nn

ACTIVATIONS = {"tanh": nn.Tanh, "elu": nn.ELU}
HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Envs:
    """A synchronous vector env, with tensors."""

    def __init__(self, run: Run) -> None:
        makers = [lambda: gymnasium.make(run.workload.env)] * run.workload.num_envs
        self.env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        self.seed, self.space = run.seed, self.env.single_action_space
        self.continuous = isinstance(self.space, gymnasium.spaces.Box)
        self.observation_size = self.env.single_observation_space.shape[0]
        self.outputs = self.space.shape[0] if self.continuous else int(self.space.n)

    def reset(self) -> Tensor:
        return torch.from_numpy(self.env.reset(seed=self.seed)[0]).float()

    def step(self, action: Tensor) -> tuple[Tensor, ...]:
        actions = action.numpy()
        if self.continuous:
            actions = np.clip(actions, self.space.low, self.space.high)
        obs, reward, terminated, truncated, info = self.env.step(actions)
        final = torch.from_numpy(obs).float()
        if "final_obs" in info:
            final = final.clone()
            for i in np.flatnonzero(terminated | truncated):
                final[i] = torch.from_numpy(info["final_obs"][i])
        numbers = (torch.from_numpy(x) for x in (reward, terminated, truncated))
        return torch.from_numpy(obs).float(), *numbers, final


class Moments:
    """Mean and variance of all that was seen."""

    def __init__(self, size: int) -> None:
        self.mean, self.var, self.count = torch.zeros(size), torch.ones(size), 1e-4

    def update(self, batch: Tensor) -> None:
        var, mean = torch.var_mean(batch, 0, correction=0)
        total = self.count + len(batch)
        weight, shift = len(batch) / total, mean - self.mean
        self.var += (var - self.var) * weight + shift**2 * weight * (1 - weight)
        self.mean += shift * weight
        self.count = total

    def scale(self, x: Tensor, shift: bool) -> Tensor:
        return ((x - self.mean if shift else x) * (self.var + 1e-8).rsqrt()).clamp(-10, 10)


class Agent(nn.Module):
    def __init__(self, inputs: int, outputs: int, continuous: bool, run: Run) -> None:
        super().__init__()
        self.continuous = continuous
        self.actor, self.critic = self.mlp(inputs, outputs, run), self.mlp(inputs, 1, run)
        self.log_std = nn.Parameter(torch.zeros(outputs)) if continuous else None

    @staticmethod
    def mlp(inputs: int, outputs: int, run: Run) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width in run.workload.hidden:
            layers += [nn.Linear(inputs, width), ACTIVATIONS[run.workload.activation]()]
            inputs = width
        return nn.Sequential(*layers, nn.Linear(inputs, outputs))

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        output = self.actor(obs)
        if self.continuous:
            action = output + torch.randn_like(output) * self.log_std.exp()
        else:
            action = torch.multinomial(output.softmax(-1), 1).squeeze(-1)
        return action, self.log_prob(output, action)[0]

    def log_prob(self, output: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        if self.continuous:
            z = (action - output) * (-self.log_std).exp()
            log_prob = (-0.5 * z.square() - self.log_std - HALF_LOG_TWO_PI).sum(-1)
            return log_prob, (self.log_std + 0.5 + HALF_LOG_TWO_PI).sum()
        log_probs = output.log_softmax(-1)
        chosen = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1).mean()

    def loss(
        self, obs: Tensor, action: Tensor, old: Tensor, adv: Tensor, target: Tensor, work: Any
    ) -> Tensor:
        log_prob, entropy = self.log_prob(self.actor(obs), action)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = (log_prob - old).exp()
        surrogate = torch.min(adv * ratio, adv * ratio.clamp(1 - work.clip, 1 + work.clip)).mean()
        value_loss = 0.5 * (self.critic(obs).squeeze(-1) - target).square().mean()
        return -surrogate + work.vf_coef * value_loss - work.ent_coef * entropy


def main() -> None:
    run = parse(ON_POLICY, "compile")
    work, clock, device = run.workload, Clock(run), run.device
    torch.manual_seed(run.seed)
    if run.name == "W3":
        env: Any = Pendulum(work.num_envs, device, run.seed)
        sizes = (OBSERVATION_SIZE, ACTION_SIZE, True)
    else:
        env = Envs(run)
        sizes = (env.observation_size, env.outputs, env.continuous)
    agent = Agent(*sizes, run).to(device)
    optimizer = torch.optim.Adam(
        agent.parameters(), work.learning_rate, eps=1e-5, fused=run.flags.compile or None
    )
    loss_of = torch.compile(agent.loss) if run.flags.compile else agent.loss
    normalizer = Moments(sizes[0]) if work.normalize else None
    returns, carry = Moments(1), torch.zeros(work.num_envs, device=device)

    def seen(x: Tensor) -> Tensor:
        return normalizer.scale(x, shift=True) if normalizer else x

    clock.start()
    obs = env.reset()
    for _ in range(run.total):
        began = clock.now()
        steps = []
        with torch.no_grad():
            for _ in range(work.steps):
                action, log_prob = agent.act(seen(obs))
                following, *outcome = env.step(action)
                steps.append((obs, action, log_prob, *outcome))
                obs = following
        clock.add("collect", clock.now() - began)
        fields = [torch.stack(field) for field in zip(*steps, strict=True)]
        raw, actions, old, reward, terminated, truncated, final = fields
        done, reward = terminated | truncated, reward.float()
        with torch.no_grad():
            observations = seen(raw)
            if work.normalize:
                carries = []
                for t in range(work.steps):
                    carry = reward[t] + work.gamma * carry
                    carries.append(carry)
                    carry = torch.where(done[t], 0.0, carry)
                returns.update(torch.stack(carries).reshape(-1, 1))
                reward = returns.scale(reward, shift=False)
            value = agent.critic(observations).squeeze(-1)
            last = agent.critic(seen(obs)).squeeze(-1)
            following_value = torch.cat((value[1:], last.unsqueeze(0)))
            if truncated.any():
                following_value[truncated] = agent.critic(seen(final[truncated])).squeeze(-1)
            delta = reward + work.gamma * following_value * ~terminated - value
            keep = work.gamma * work.gae_lambda * (~done).float()
            adv, trace = torch.empty_like(delta), torch.zeros_like(last)
            for t in reversed(range(work.steps)):
                trace = delta[t] + keep[t] * trace
                adv[t] = trace
        flat = [x.flatten(0, 1) for x in (observations, actions, old, adv, adv + value)]
        for _ in range(work.epochs):
            shuffled = torch.randperm(work.env_steps, device=device)
            for chosen in shuffled.split(work.batch_size):
                loss = loss_of(*(x[chosen] for x in flat), work)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), work.max_grad_norm)
                optimizer.step()
        if normalizer:
            normalizer.update(raw.flatten(0, 1))
        clock.end_iteration()
    clock.report("bare loop, compiled" if run.flags.compile else "bare loop", None)


if __name__ == "__main__":
    main()
