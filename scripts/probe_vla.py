"""Test whether VLAs of the toy task use their inputs: success with shuffled images or instructions.

python scripts/probe_vla.py outputs/vla_ppo_... --episodes 400
"""

import argparse

import torch

from lightning_rl import ActionChunk, PolicyWrapper, PushBlocks
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.deploy.loading import load_trained

FIRST_SEED = 900_000


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
    parser.add_argument("runs", nargs="+", help="run directories, or checkpoints")
    parser.add_argument("--episodes", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    env = ActionChunk(arguments.episodes, PushBlocks, 4)
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.episodes)
    for run in arguments.runs:
        print(run)
        policy = load_trained(run).policy
        actors = {"as it is": policy}
        for key, name in {"language": "instruction shuffled", "rgb": "picture shuffled"}.items():
            actors[name] = Shuffled(policy, key, arguments.episodes)
        for name, actor in actors.items():
            successes = sum(episode["success"] for episode in run_episodes(actor, env, seeds))
            print(f"{name:22} {successes} of {arguments.episodes} = {successes / len(seeds):.3f}")
