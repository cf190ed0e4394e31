"""Act in LeRobot with policies of ours, by the plug-in in plugins/.

    python scripts/lerobot_plugin.py               # makes an environment with LeRobot: 5 GB
    python scripts/lerobot_plugin.py --python lerobot/bin/python

Trains small policies on PushT for an iteration: one reads the arm's position, one has a memory,
one reads a picture as well. Each goes into a directory as a run, as weights and as an ONNX file.
`compare`, which runs in LeRobot's environment, plays an episode with LeRobot's own processing and
our plug-in, and with `load_policy`: the actions must be equal bit for bit (for ONNX files: to 1e-5
of the action's range). Then `lerobot-eval` plays two episodes.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from scripting import parser_of

ROOT = Path(__file__).parents[1]
CONFIG = """
model:
  class_path: PPO
  init_args:
    policy: {class_path: ActorCritic, init_args: {hidden_sizes: [32], KEYS}}
    batch_size: 16
data:
  env:
    class_path: GymnasiumEnv
    init_args:
      id: gym_pusht:gym_pusht/PushT-v0
      env_kwargs: {obs_type: pixels_agent_pos, observation_width: 96, observation_height: 96}
  num_envs: 1
  buffer_size: 16
  total_env_steps: 16
  num_eval_episodes: 1
trainer: {accelerator: cpu}
"""
KINDS = {
    "state": "ignore_keys: [pixels]",
    "memory": "ignore_keys: [pixels], memory: GRU",
    "picture": "encoder: DictEncoder",
}
RANGE = 512.0


def compare(directory: str, source: str) -> None:
    """Play an episode of LeRobot's PushT, and compare the actions of plug-in and `load_policy`."""
    import numpy as np
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.envs.configs import PushtEnv
    from lerobot.envs.factory import make_env
    from lerobot.envs.utils import preprocess_observation
    from lerobot.policies import make_policy, make_pre_post_processors
    from lerobot.utils.import_utils import register_third_party_plugins

    from lightning_rl import load_policy

    register_third_party_plugins()
    settings = PushtEnv(observation_height=96, observation_width=96)
    config = PreTrainedConfig.from_pretrained(directory)
    config.pretrained_path = Path(directory)
    policy = make_policy(config, env_cfg=settings)
    before, after = make_pre_post_processors(config, pretrained_path=directory)
    ours = load_policy(source)
    env = make_env(settings, n_envs=2)["pusht"][0]
    observation, _ = env.reset(seed=[1, 2])
    largest = 0.0
    for _ in range(env.call("_max_episode_steps")[0]):
        with torch.inference_mode():
            action = after(policy.select_action(before(preprocess_observation(observation))))
        expected = ours.act({key: observation[key] for key in ours.observation_space})
        largest = max(largest, float(np.abs(action.numpy() - expected).max()))
        observation, *_ = env.step(action.numpy())
    allowed = 1e-5 * RANGE if str(config.file).endswith(".onnx") else 0.0
    print(f"{directory}: largest difference {largest}, allowed {allowed}")
    assert largest <= allowed


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--python", type=Path, help="of LeRobot's environment, with the plug-in")
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compare:
        return compare(*args.compare)
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: object) -> None:
            print("$", *command, flush=True)
            subprocess.run([str(part) for part in command], check=True, cwd=folder)

        python = (args.python or Path(folder) / "lerobot/bin/python").absolute()
        if args.python is None:
            run("uv", "venv", "--python", "3.12", "lerobot")
            extras = f"{ROOT}[export]", f"{ROOT}/plugins/lerobot_policy_lightning_rl"
            run("uv", "pip", "install", "--python", python, *extras, "lerobot[pusht]")
        cli = python, "-m", "lightning_rl"
        for kind, keys in KINDS.items():
            Path(folder, "config.yaml").write_text(CONFIG.replace("KEYS", keys))
            run(*cli, "fit", "--config", "config.yaml", "--trainer.run_dir", kind)
            for form in ("safetensors", "onnx"):
                path = f"{kind}.{form}"
                run(*cli, "export", "--ckpt_path", kind, "--format", form, "--path", path)
            for source in (kind, f"{kind}.safetensors", f"{kind}.onnx"):
                directory = f"lerobot_{source}"
                run(python, "-m", "lerobot_policy_lightning_rl", source, directory)
                run(python, Path(__file__).absolute(), "--compare", directory, kind)
        options = "--eval.n_episodes=2 --eval.batch_size=2 --eval.use_async_envs=false"
        policy = "--policy.path=lerobot_state --policy.device=cpu --env.type=pusht"
        run(python.parent / "lerobot-eval", *policy.split(), *options.split())


if __name__ == "__main__":
    sys.exit(main())
