"""Train a small SmolVLA that LeRobot wrote, and let LeRobot open the result, version 0.6.1.

python scripts/lerobot_policies.py --python lerobot_env/bin/python

LeRobot has an environment of its own, see tests/golden/README.md. The directory of the golden tests
is cloned on a LeRobot dataset of the expert of PushBlocks, trained by PPO with LoRA, resumed in the
middle, which must change no bit, and exported. LeRobot loads it strictly, and must act as we do.
Both also open ACT and Diffusion as we write them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from lightning_rl import EpisodeWriter, LeRobotPolicy, PushBlocks
from lightning_rl.cli.app import run
from lightning_rl.extensions.datasets.demonstrations import expert_episodes
from lightning_rl.extensions.tasks.push_blocks import text_of

ROOT = Path(__file__).parents[1]
EPISODES = 64
SMALL = [
    *("--data.num_envs", "8", "--data.buffer_size", "8", "--data.num_eval_episodes", "8"),
    *("--trainer.enable_progress_bar", "false"),
]

LEROBOT = """
import sys
import torch
from safetensors.torch import load_file, save_file
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

path, given, to = sys.argv[1:]
config = PreTrainedConfig.from_pretrained(path)
policy = get_policy_class(config.type).from_pretrained(path, strict=True)
before, after = make_pre_post_processors(config, pretrained_path=path)
batch = load_file(given)
noise = {"noise": batch.pop("noise")} if "noise" in batch else {}
prepared = before({**batch, "task": ["push the red block left", "push the block"]})
with torch.no_grad():
    if config.type == "diffusion":
        condition = policy.diffusion._prepare_global_conditioning(prepared)
        chunk = policy.diffusion.conditional_sample(2, global_cond=condition, **noise)
        chunk = chunk[:, config.n_obs_steps - 1 :][:, : config.n_action_steps]
    else:
        chunk = policy.predict_action_chunk(prepared, **noise)
save_file({"action": after(chunk).contiguous()}, to)
"""


def write_dataset(path: Path) -> None:
    """Record episodes of the expert, with their tasks in words."""
    env = PushBlocks(8)
    spaces = env.single_observation_space, env.single_action_space
    writer = EpisodeWriter(path, *spaces, fps=env.render_fps, pictures="png")
    for episode in expert_episodes(env, EPISODES, seed=0):
        writer.write(replace(episode, task=text_of(episode.observation["language"][0])))
    writer.finalise()


def newest(name: str) -> Path:
    return max(Path("outputs").glob(f"{name}_*"), key=lambda path: path.stat().st_mtime_ns)


def trained(path: Path) -> Path:
    """Clone, train, resume and export a SmolVLA; return the directory."""
    config = yaml.safe_load((ROOT / "configs" / "vla_bc.yaml").read_text())
    config["model"]["init_args"]["policy"] = {"class_path": "LeRobotPolicy"}
    config["data"]["collector"]["init_args"] = {"path": "dataset"}
    Path("clone.yaml").write_text(yaml.safe_dump(config))
    policy = ["--model.policy.path", str(path)]
    more = ["--model.batch_size", "32", "--data.total_env_steps", "8000"]
    run(["fit", "--config", "clone.yaml", *policy, *SMALL, *more])
    options = ["fit", "--config", "smolvla_ppo.yaml", *policy, *SMALL, "--model.batch_size", "32"]
    options += ["--data.total_env_steps", "1024", "--data.iterations_per_epoch", "2"]
    options += ["--trainer.init_from", str(newest("clone"))]
    run([*options, "--exp_name", "whole"])
    run([*options, "--exp_name", "cut", "--trainer.max_epochs", "1"])
    run(["fit", "--ckpt_path", str(newest("cut")), "--trainer.max_epochs", "-1"])
    states = [
        torch.load(newest(name) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "cut")
    ]
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())
    print(f"Resumed exactly: {len(states[0])} tensors")
    run(["validate", "--ckpt_path", str(newest("whole"))])
    export = ["--format", "lerobot", "--path", "smolvla.lerobot"]
    run(["export", "--ckpt_path", str(newest("whole")), *export])
    return Path("smolvla.lerobot")


def compare(python: Path, path: Path, batch: dict[str, torch.Tensor]) -> None:
    """Compare LeRobot's actions with ours, in a directory that we wrote."""
    noise = batch.get("noise")
    save_file(batch, "batch.safetensors")
    files = ["batch.safetensors", "actions.safetensors"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    subprocess.run([python, "-c", LEROBOT, path, *files], check=True, env=environment)
    theirs = load_file("actions.safetensors")["action"]
    policy = LeRobotPolicy(path=str(path))
    tasks = ["push the red block left", "push the block"]
    ours = policy.predict({**batch, "task": tasks}, noise)
    difference = float((ours - theirs[:, : ours.shape[1]]).abs().max())
    print(f"LeRobot acts as {path}: at most {difference:.2g} off")
    assert difference < 3e-5  # the steps of a diffusion add up roundings, which depend on threads


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", type=Path, required=True, help="of the environment of LeRobot")
    python = parser.parse_args().python.absolute()
    sys.path.insert(0, str(ROOT))
    from tests.golden.make_lerobot import ROWS, fill, noise_of, pixels_of

    golden = ROOT / "tests" / "golden"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        (Path(folder) / "tiny_smolvlm").symlink_to(golden / "tiny_smolvlm")
        for name in ("act", "diffusion", "smolvla"):
            fill(golden / name, Path(name))
        write_dataset(Path("dataset"))
        state, top = noise_of("state", (ROWS, 2)), pixels_of("top", (ROWS, 3, 64, 64)) / 255.0
        batch = {"observation.state": state, "observation.images.top": top}
        compare(python, trained(Path("smolvla")), {**batch, "noise": noise_of("n", (ROWS, 4, 8))})
        for name, steps in (("act", ()), ("diffusion", (2,))):
            overrides = {"noise_scheduler_type": "DDIM"} if name == "diffusion" else None
            LeRobotPolicy(path=name, overrides=overrides).save_directory(f"{name}.lerobot")
            numbers = {"state": 4, "environment_state": 6}
            batch = {f"observation.{k}": noise_of(k, (ROWS, *steps, n)) for k, n in numbers.items()}
            batch |= {"noise": noise_of("n", (ROWS, 16, 3))} if name == "diffusion" else {}
            compare(python, Path(f"{name}.lerobot"), batch)


if __name__ == "__main__":
    main()
