"""An algorithm or an encoder of one's own is one file and one YAML: it trains, is saved, and resumes bit for bit, compiled or not."""

import sys
import textwrap

import pytest
import torch

from lightning_rl.cli.app import run
from tests.helpers import assert_same, assert_same_run, last, load
from tests.messages import assert_names

OFF_POLICY = '''
    """Soft actor-critic in small: two objectives, a replay, a target network."""

    import copy

    import torch
    from tensordict import TensorDict
    from torch.nn.functional import mse_loss

    from lightning_rl import Algorithm, Policy, Replay
    from lightning_rl.policies.networks.perceptron import flatten_observation, mlp
    from lightning_rl.rollout.contract import flat_transitions, next_observations


    class Ring(Replay):
        """A ring of single transitions."""

        FIELDS = ("observation", "action", "reward", "terminated", "next")

        def __init__(self, observation_space, action_space, num_envs, device, seed, directory, capacity=1000):
            self.capacity, self.count = capacity, 0
            self.generator = torch.Generator(device).manual_seed(seed)
            shapes = {"observation": observation_space.shape, "action": action_space.shape}
            shapes |= {"reward": (), "terminated": (), "next": observation_space.shape}
            self.storage = TensorDict(
                {key: torch.zeros(capacity, *shapes[key], device=device) for key in self.FIELDS}, [capacity]
            )

        def __len__(self):
            return min(self.count, self.capacity)

        def extend(self, rollout):
            fresh = flat_transitions(rollout, self.FIELDS[:-1])
            fresh["next"] = next_observations(rollout).transpose(0, 1).flatten(0, 1)
            for key in self.FIELDS:
                slots = torch.arange(self.count, self.count + len(fresh)) % self.capacity
                self.storage[key][slots] = fresh[key].to(torch.float32)
            self.count += len(fresh)

        def batches(self, count, batch_size, *, n_steps=1, gamma=0.99):
            for slots in torch.randint(len(self), (count, batch_size), generator=self.generator):
                batch = self.storage[slots]
                batch["discount"] = gamma * (1 - batch.pop("terminated"))
                yield batch.rename_key_("next", "next_observation")

        def state_dict(self, folder):
            own = {"count": self.count, "generator": self.generator.get_state()}
            return own | {"storage": self.storage.clone().to_dict()}

        def load_state_dict(self, state, folder):
            self.count = state["count"]
            self.generator.set_state(state["generator"])
            self.storage = TensorDict(state["storage"], [self.capacity])


    class ToySAC(Algorithm):
        def __init__(self, policy: Policy, updates: int = 6, tau: float = 0.05, alpha: float = 0.1, **kwargs):
            super().__init__(policy, **kwargs)
            sizes = policy.observation_space.shape[0], policy.action_space.shape[0]
            self.critic = mlp(sum(sizes), (32,), 1, activation="relu")
            self.target = copy.deepcopy(self.critic).requires_grad_(False)
            self.updates_per_iteration, self.tau, self.alpha = updates, tau, alpha

        def configure_objectives(self):
            return [
                self.objective(self.critic_loss, self.critic, name="critic", learning_rate=1e-3),
                self.objective(self.actor_loss, self.policy, name="actor", max_grad_norm=10.0),
            ]

        def training_step(self, rollout, batch_idx):
            self.replay.extend(rollout)
            for batch in self.replay.batches(self.updates_per_iteration, self.batch_size):
                batch["noise"] = torch.randn(batch["action"].shape, generator=self.generator)
                self.updates["critic"](batch)
                self.updates["actor"](batch)
                torch._foreach_lerp_(
                    [p for p in self.target.parameters()], [p.detach() for p in self.critic.parameters()], self.tau
                )
            self.finish_iteration(rollout)

        def act(self, observation, noise):
            std = self.policy.distribution.clamped_log_std().exp()
            u = self.policy.actor(flatten_observation(observation)) + std * noise
            log_prob = -(noise**2 / 2 + std.log() + torch.log(1 - u.tanh() ** 2 + 1e-6)).sum(-1)
            return 2.0 * u.tanh(), log_prob

        def q(self, critic, observation, action):
            return critic(torch.cat([observation, action], -1)).squeeze(-1)

        def critic_loss(self, batch):
            with torch.no_grad():
                action, log_prob = self.act(batch["next_observation"], batch["noise"])
                value = self.q(self.target, batch["next_observation"], action) - self.alpha * log_prob
                target = batch["reward"] + batch["discount"] * value
            loss = mse_loss(self.q(self.critic, batch["observation"], batch["action"]), target)
            return loss, {"target_mean": target.mean()}

        def actor_loss(self, batch):
            action, log_prob = self.act(batch["observation"], batch["noise"])
            loss = (self.alpha * log_prob - self.q(self.critic, batch["observation"], action)).mean()
            return loss, {"log_prob": log_prob.mean()}
'''

OFF_POLICY_CONFIG = """
    seed_everything: 1
    model:
      class_path: MODULE.ToySAC
      init_args:
        policy: {class_path: ActorOnly, init_args: {hidden_sizes: [32], squash: true}}
        batch_size: 32
        learning_rate: 1e-3
    data:
      env: {class_path: GymnasiumEnv, init_args: {id: Pendulum-v1}}
      replay: {class_path: MODULE.Ring, init_args: {capacity: 150}}
      num_envs: 2
      buffer_size: 16
      total_env_steps: 256
      iterations_per_epoch: 2
      num_eval_episodes: 2
      max_eval_episode_steps: 32
"""

ON_POLICY = '''
    """REINFORCE with rewards to go, and a coefficient of its own."""

    from lightning_rl import OnPolicyAlgorithm, Policy
    from lightning_rl.functional import gae
    from lightning_rl.rollout.contract import add_transition_field


    class ToyReinforce(OnPolicyAlgorithm):
        def __init__(self, policy: Policy, value_weight: float = 0.5, **kwargs):
            super().__init__(policy, **kwargs)
            self.value_weight = value_weight

        def training_step(self, rollout, batch_idx):
            self.evaluate_values(rollout)
            steps = rollout[:, :-1]
            advantage, target = gae(
                self.rewards(rollout), rollout["value"], steps["terminated"], steps["truncated"],
                steps["final_value"], gamma=self.gamma, gae_lambda=1.0,
            )
            add_transition_field(rollout, "advantage", advantage)
            add_transition_field(rollout, "return", target)
            for minibatch in self.minibatches(rollout, ("observation", "action", "advantage", "return")):
                self.update(minibatch)
            self.finish_iteration(rollout)

        def loss(self, minibatch):
            new = self.policy.evaluate_actions(minibatch)
            policy_loss = -(minibatch["advantage"] * new["sample_log_prob"]).mean()
            value_loss = (new["value"] - minibatch["return"]).square().mean()
            return policy_loss + self.value_weight * value_loss, {"policy_loss": policy_loss}
'''

ON_POLICY_CONFIG = """
    seed_everything: 1
    model:
      class_path: MODULE.ToyReinforce
      init_args:
        policy: {class_path: ActorCritic, init_args: {hidden_sizes: [16], normalize_observation: true}}
        n_epochs: 1
        batch_size: 32
    data:
      env: {class_path: GymnasiumEnv, init_args: {id: CartPole-v1}}
      num_envs: 2
      buffer_size: 32
      total_env_steps: 512
      iterations_per_epoch: 2
      num_eval_episodes: 2
      max_eval_episode_steps: 32
"""

ENCODER = '''
    """An encoder with a parameter and running statistics of its own."""

    import torch
    from torch import nn

    from lightning_rl.policies.networks.encoders import Encoder


    class Waves(Encoder):
        def __init__(self, observation_space, frequencies: int = 4):
            super().__init__(observation_space)
            self.frequencies = nn.Parameter(2.0 ** torch.arange(frequencies) / 4)
            self.register_buffer("largest", torch.ones(observation_space.shape))
            self.size = observation_space.shape[0] * 2 * frequencies

        def update_normalization(self, observation):
            self.largest.copy_(torch.maximum(self.largest, observation.abs().amax(0)))

        def forward(self, observation):
            angles = ((observation / self.largest).unsqueeze(-1) * self.frequencies).flatten(-2)
            return torch.cat([angles.sin(), angles.cos()], -1)
'''

ENCODER_CONFIG = ON_POLICY_CONFIG.replace("MODULE.ToyReinforce", "PPO").replace(
    "normalize_observation: true",
    "encoder: {class_path: MODULE.Waves, init_args: {frequencies: 3}}",
)
KINDS = {
    "off": (OFF_POLICY, OFF_POLICY_CONFIG),
    "on": (ON_POLICY, ON_POLICY_CONFIG),
    "encoder": (ENCODER, ENCODER_CONFIG),
}


@pytest.fixture
def written(tmp_path, own_directory, monkeypatch):
    """Write the two files of an algorithm; return the name of its YAML."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(kind):
        name = f"own_{kind}_policy"
        code, config = (textwrap.dedent(text) for text in KINDS[kind])
        (tmp_path / f"{name}.py").write_text(code)
        (tmp_path / f"{name}.yaml").write_text(config.replace("MODULE", name))
        monkeypatch.delitem(sys.modules, name, raising=False)  # that of another test
        return f"{name}.yaml"

    return write


def fit(*arguments):
    options = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    run(["fit", *arguments, *options])


@pytest.mark.parametrize(
    ("kind", "compile"),
    [(kind, c) for kind in KINDS for c in ("false", "true") if (kind, c) != ("encoder", "true")],
)
def test_it_trains_is_saved_and_resumes_bit_for_bit(kind, compile, written, tmp_path, traced_only):
    config = written(kind)
    settings = ["--config", config, "--model.compile", compile]
    fit(*settings, "--output_dir", "whole", "--exp_name", "whole")
    fit(*settings, "--output_dir", "half", "--exp_name", "half", "--trainer.max_steps", "4")
    (whole,), (half,) = (list((tmp_path / name).glob(f"{name}_*")) for name in ("whole", "half"))
    fit("--ckpt_path", str(half), "--trainer.max_steps", "-1", "--trust_code", "true")
    assert_same_run(whole, half)
    state = load(last(whole))
    assert len(state["optimizer_states"]) == (2 if kind == "off" else 1)
    if kind == "encoder":
        began = 2.0 ** torch.arange(3) / 4
        (name,) = [name for name in state["state_dict"] if name.endswith("frequencies")]
        assert not torch.equal(state["state_dict"][name], began), "it is trained"
        (name,) = [name for name in state["state_dict"] if name.endswith("largest")]
        assert (state["state_dict"][name] > 1).any(), "its statistics are moved"
    if kind == "off":
        saved, other = (load(last(run))["RLDataModule"]["replays"][0] for run in (whole, half))
        assert saved["count"] == other["count"] == 256 > 150
        assert_same(saved["storage"], other["storage"])


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_does_what_it_does_uncompiled(kind, written, tmp_path, traced_only):
    config, weights = written(kind), []
    for compile in ("false", "true"):
        fit("--config", config, "--model.compile", compile, "--output_dir", compile)
        (run,) = (tmp_path / compile).glob("*_*")
        weights.append(load(last(run))["state_dict"])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)


def test_what_samples_from_a_replay_says_where_it_comes_from(written, capsys):
    config = written("off")
    with pytest.raises(SystemExit) as ended:
        fit("--config", config, "--data.replay", "null")
    assert ended.value.code == 1
    assert_names(" ".join(capsys.readouterr().err.split()), "ToySAC", "data.replay", "RLDataModule")
