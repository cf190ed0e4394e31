"""Record a task's own expert, in chunks of actions, for BehaviorCloning.

python scripts/record_demonstrations.py demonstrations.pt --episodes 100 --seed 1
"""

import argparse

import lightning_rl.envs
from lightning_rl.envs import ActionChunk
from lightning_rl.offline.demonstrations import record, save

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the file to write")
    parser.add_argument("--task", default="PushBlocks", help="a task of lightning_rl.envs")
    parser.add_argument("--chunk-size", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first episode")
    arguments = parser.parse_args()
    task = getattr(lightning_rl.envs, arguments.task)
    env = ActionChunk(min(arguments.episodes, 256), task, arguments.chunk_size)
    data = record(env, arguments.episodes, arguments.seed)
    save(arguments.path, data)
    share = data["success"].any(1).float().mean().item()
    print(f"{arguments.episodes} episodes, {share:.0%} of them successful: {arguments.path}")
