"""Step, and train a few iterations on, envs of robots by other packages.

    export MUJOCO_GL=egl
    python scripts/robot_envs.py
    python scripts/robot_envs.py FetchReach PushT

Prints a row of a table for each env: the package, env steps per CPU second with random actions, and
the env steps and updates of SAC; or the error.

Needs the environment of constraints-robots.txt. An env of a package that is not installed is
skipped.
"""

import importlib.util
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import FilterObservation, FlattenObservation
from lightning.pytorch import seed_everything

from lightning_rl import (
    SAC,
    GymnasiumEnv,
    HindsightReplay,
    ReplayBuffer,
    RLDataModule,
    RLTrainer,
    SquashedActorCritic,
)
from lightning_rl.extensions.tasks.gym_hil import PickCube
from scripting import QUIET, parser_of

STEPS = 50
"""Random steps that are timed."""


class Lift(gymnasium.Env):
    """robosuite's Lift with a Panda, by states; `unwrapped` of its wrapper is no Gymnasium env."""

    def __init__(self) -> None:
        import robosuite
        from robosuite.wrappers import GymWrapper

        blind = dict.fromkeys(("has_renderer", "use_camera_obs", "has_offscreen_renderer"), False)
        self._env = GymWrapper(robosuite.make("Lift", robots="Panda", ignore_done=True, **blind))
        self.observation_space, self.action_space = (
            gymnasium.spaces.Box(space.low, space.high, space.shape, np.float32)
            for space in (self._env.observation_space, self._env.action_space)
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._env.reset()[0], {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *_ = self._env.step(action)
        return observation, reward, False, False, {}


STATES: Any = [partial(FilterObservation, filter_keys=["observation"]), FlattenObservation]
JOINTS: Any = [partial(FilterObservation, filter_keys=["agent_pos"]), FlattenObservation]
BLOCK = {"random_block_position": True}
ENVS: dict[str, tuple[str, dict[str, Any]]] = {
    "FetchReach": ("gymnasium_robotics:FetchReach-v4", {}),
    "FetchPush": ("gymnasium_robotics:FetchPush-v4", {}),
    "HandReach": ("gymnasium_robotics:HandReach-v3", {}),
    "PointMaze": ("gymnasium_robotics:PointMaze_UMaze-v3", {}),
    "AdroitHandDoor": ("gymnasium_robotics:AdroitHandDoor-v1", {}),
    "FrankaKitchen": ("gymnasium_robotics:FrankaKitchen-v1", {"wrappers": STATES}),
    "PandaPickCube": (
        "gym_hil:gym_hil/PandaPickCube-v0",
        {"wrappers": [PickCube], "env_kwargs": BLOCK},
    ),
    "PushT": ("gym_pusht:gym_pusht/PushT-v0", {}),
    "AlohaTransferCube": (
        "gym_aloha:gym_aloha/AlohaTransferCube-v0",
        {"wrappers": JOINTS, "env_kwargs": {"obs_type": "pixels_agent_pos"}},
    ),
    "Lift": ("robosuite:robosuite/Lift-v0", {}),
}
"""Id, with the package before the colon, and settings of each env, by name."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENVS)}")
    names = parser.parse_args().names or list(ENVS)
    gymnasium.register("robosuite/Lift-v0", Lift, max_episode_steps=100)
    print("| env | package | env steps per CPU s | trained |\n|---|---|---|---|")
    failed = [name for name in names if not shown(name)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def shown(name: str) -> bool:
    """Print the row of an env; return whether nothing failed."""
    id, settings = ENVS[name]
    module = id.partition(":")[0]
    package = module.replace("_", "-")
    if importlib.util.find_spec(module) is None:
        print(f"| {name} | {package} | not installed | |", flush=True)
        return True
    env = partial(GymnasiumEnv, id=id, **settings)
    try:
        row = f"{speed(env):,.0f} | {trained(env)}"
    except Exception as error:
        print(f"| {name} | {package} | {type(error).__name__}: {error} | |", flush=True)
        return False
    print(f"| {name} | {package} {version(package)} | {row} |", flush=True)
    return True


def speed(make: Any) -> float:
    """Return env steps per CPU second with random actions."""
    env = make(1)
    env.reset(seed=1)
    actions = torch.from_numpy(np.stack([env.single_action_space.sample() for _ in range(STEPS)]))
    began = time.process_time()
    for action in actions:
        env.step(action[None])
    seconds = time.process_time() - began
    env.close()
    return STEPS / seconds


def trained(make: Any) -> str:
    """Train SAC for a few iterations; return what was done."""
    seed_everything(1, verbose=False)
    settings = {"num_envs": 1, "buffer_size": 16, "total_env_steps": 64, "iterations_per_epoch": 4}
    probe = make(1)
    replay = ReplayBuffer if probe.goals is None else HindsightReplay
    probe.close()
    data = RLDataModule(make, **settings, replay=partial(replay, capacity=1_000))
    policy = SquashedActorCritic(data.observation_space, data.action_space, (64, 64))
    model = SAC(policy, batch_size=32, random_env_steps=32, updates_per_env_step=0.5, compile=False)
    with tempfile.TemporaryDirectory() as folder:
        RLTrainer(run_dir=folder, accelerator="cpu", **QUIET).fit(model, data)
    return f"{model.env_steps} env steps, {model.updates_done} updates, {replay.__name__}"


if __name__ == "__main__":
    main()
