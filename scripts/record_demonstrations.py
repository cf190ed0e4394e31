"""Record a task's own expert into a dataset, for BehaviorCloning.

python scripts/record_demonstrations.py demonstrations --episodes 100 --seed 1
"""

import argparse

import lightning_rl.envs
from lightning_rl import EpisodeWriter
from lightning_rl.datasets.demonstrations import expert_episodes

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the directory of the dataset")
    parser.add_argument("--task", default="PushBlocks", help="a task of lightning_rl.envs")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first episode")
    parser.add_argument("--sparse", action="store_true", help="pay for success alone")
    parser.add_argument("--pictures", default="png", choices=("png", "video"))
    arguments = parser.parse_args()
    task = getattr(lightning_rl.envs, arguments.task)
    rewards = {name: float(name == "success") for name in task.default_rewards}
    settings = {"rewards": rewards} if arguments.sparse else {}
    env = task(min(arguments.episodes, 256), **settings)
    spaces = env.single_observation_space, env.single_action_space
    settings = {"task": arguments.task, "pictures": arguments.pictures}
    writer = EpisodeWriter(arguments.path, *spaces, env.render_fps, **settings)
    successes = 0
    for episode in expert_episodes(env, arguments.episodes, arguments.seed):
        writer.write(episode)
        successes += bool(episode.success)
    writer.finalise()
    share = successes / arguments.episodes
    print(f"{arguments.episodes} episodes, {share:.0%} of them successful: {arguments.path}")
