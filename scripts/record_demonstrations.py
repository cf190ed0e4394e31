"""Record a task's own expert into a dataset, or the policy of a run.

It extends an existing dataset.

python scripts/record_demonstrations.py demonstrations --episodes 100 --seed 1
python scripts/record_demonstrations.py mixed --task PushCube --episodes 60
python scripts/record_demonstrations.py mixed --task PushCube --episodes 240 --run outputs/half_...
"""

import argparse

import torch
from tensordict import TensorDict

import lightning_rl.envs
from lightning_rl import EpisodeWriter, load_policy
from lightning_rl.extensions.datasets.demonstrations import expert_episodes

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the directory of the dataset")
    parser.add_argument("--task", default="PushBlocks", help="a task of lightning_rl.envs")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first episode")
    parser.add_argument("--sparse", action="store_true", help="pay for success alone")
    parser.add_argument("--run", help="play the policy of this run, drawing its actions")
    arguments = parser.parse_args()
    task = getattr(lightning_rl.envs, arguments.task)
    rewards = {name: float(name == "success") for name in task.default_rewards}
    settings = {"rewards": rewards} if arguments.sparse else {}
    env = task(min(arguments.episodes, 256), **settings)
    if arguments.run is not None:
        policy = load_policy(arguments.run).module
        generator = torch.Generator().manual_seed(arguments.seed)

        def draw(state: TensorDict) -> torch.Tensor:
            td = TensorDict({"observation": env.observation_of(state)}, [env.num_envs])
            return policy.get_action(td, generator=generator)["action"]

        env.expert = draw
    spaces = env.single_observation_space, env.single_action_space
    settings = {"task": arguments.task, "pictures": "png"}
    writer = EpisodeWriter(arguments.path, *spaces, env.render_fps, **settings)
    successes = 0
    for episode in expert_episodes(env, arguments.episodes, arguments.seed):
        writer.write(episode)
        successes += bool(episode.success)
    writer.finalise()
    share = successes / arguments.episodes
    print(f"{arguments.episodes} episodes, {share:.0%} of them successful: {arguments.path}")
