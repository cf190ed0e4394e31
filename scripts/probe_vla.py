"""Test whether a VLA of the toy task uses its inputs: success with shuffled images or instructions.

python scripts/probe_vla.py outputs/vla_ppo_.../checkpoints/last.ckpt --episodes 400
"""

import argparse

import torch
import yaml

from lightning_rl import ActionChunk, PolicyWrapper, PushBlocks, VLAPolicy
from lightning_rl.checkpoints.format import CONFIG_KEY, read_checkpoint
from lightning_rl.collectors.evaluation import run_episodes


class Shuffled(PolicyWrapper):
    """A policy whose envs each get the `key` of another env, in a fixed order."""

    def __init__(self, policy, key, count):
        super().__init__(policy)
        self.key = key
        self.order = torch.randperm(count, generator=torch.Generator().manual_seed(0))

    def forward(self, td, deterministic=False, generator=None):
        td["observation"] = td["observation"].clone()
        td["observation"][self.key] = td["observation"][self.key][self.order]
        return super().forward(td, deterministic, generator)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--seed", type=int, default=900_000, help="of the first episode")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content = read_checkpoint(arguments.checkpoint)
    settings = yaml.safe_load(content[CONFIG_KEY])["model"]["init_args"]["policy"]["init_args"]
    settings = {k: v for k, v in settings.items() if k != "backbone"}  # TinyVLA
    env = ActionChunk(arguments.episodes, PushBlocks, 4)
    spaces = {"observation_space": env.single_observation_space}
    spaces["action_space"] = env.single_action_space
    policy = VLAPolicy(**settings | spaces)
    saved = content["state_dict"]
    policy.load_state_dict({key: saved[f"policy.{key}"] for key in policy.state_dict()})
    seeds = range(arguments.seed, arguments.seed + arguments.episodes)
    actors = {"as it is": policy}
    for key, name in {"language": "instruction shuffled", "rgb": "picture shuffled"}.items():
        actors[name] = Shuffled(policy, key, arguments.episodes)
    for name, actor in actors.items():
        successes = sum(episode["success"] for episode in run_episodes(actor, env, seeds))
        print(f"{name:22} {successes} of {arguments.episodes} = {successes / len(seeds):.3f}")
