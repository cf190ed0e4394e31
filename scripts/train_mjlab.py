"""Train a task of the real mjlab with PPO through `TensorSimulator`, in an environment of its own.

    python scripts/train_mjlab.py --directory outputs/mjlab --env_steps 100000

mjlab pins other versions of MuJoCo and rsl_rl than this package. So the first run makes a virtual
environment in the directory, and installs mjlab 1.6.0 and this package there (2 GB; --install names
packages to install before them, such as a torch for the CPU alone). The script writes the
function that makes the simulator next to it, and runs `rl-cli` with mjlab.yaml.
"""

import subprocess
import time
from pathlib import Path

from scripting import interpreter_in, parser_of

MJLAB = "mjlab==1.6.0"
ROOT = str(Path(__file__).parents[1])

MAKE = '''"""Make a task of mjlab; see docs/simulators.md."""

import torch
from mjlab.envs import ManagerBasedRlEnv
from mjlab.tasks.registry import load_env_cfg


class ByIndex(ManagerBasedRlEnv):
    """Resets the envs of `options["env_idx"]`, so that final observations are true."""

    def reset(self, *, seed=None, options=None, env_ids=None):
        return super().reset(seed=seed, env_ids=(options or {}).get("env_idx", env_ids))


def make(num_envs):
    cfg = load_env_cfg("Mjlab-Cartpole-Balance")
    cfg.scene.num_envs, cfg.auto_reset = num_envs, False
    return ByIndex(cfg, device="cuda:0" if torch.cuda.is_available() else "cpu")


def report(simulator, info):
    """Return the reward terms of a step, which mjlab keeps in its manager."""
    manager = simulator.unwrapped.reward_manager
    return {"rewards": dict(zip(manager.active_terms, manager._step_reward.unbind(1)))}


def push(env, size=0.5):
    """Event: add to the velocities of some envs."""
    velocity = env.simulator.sim.data.qvel
    velocity[:] += (env.uniform(velocity.shape[1]) * 2 - 1) * size * env.rows[:, None]
'''

CONFIG = Path(__file__).with_name("mjlab.yaml")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("outputs/mjlab"))
    parser.add_argument("--env_steps", type=int, default=100_000)
    parser.add_argument("--install", nargs="*", default=[], help="packages to install first")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    installs = [packages for packages in (arguments.install, [MJLAB, "-e", ROOT]) if packages]
    python = interpreter_in(directory / "environment", *installs)
    # It comes with mjlab, is not needed, and breaks next to a torch of another build.
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "-y", "torchvision"], check=True)
    (directory / "my_mjlab.py").write_text(MAKE)
    began = time.perf_counter()
    command = [python, "-m", "lightning_rl", "fit", "--config", CONFIG.absolute()]
    command += ["--data.total_env_steps", str(arguments.env_steps)]
    subprocess.run(command, cwd=directory, check=True)
    seconds = time.perf_counter() - began
    print(f"{arguments.env_steps:,} env steps in {seconds:.0f} s, with the start")


if __name__ == "__main__":
    main()
