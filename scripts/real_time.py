"""Measure real-time chunks on a task with momentum: success, and jerk at the seams of chunks.

    python scripts/real_time.py --seeds 1 2 3
    python scripts/real_time.py --task catch --delays 4 --place outputs/catch

A flow of chunks of 16 actions at 30 Hz is cloned from an expert, and acts with a chunk every 8
steps. Each chunk takes d steps to compute. Waiting brakes meanwhile; skipping executes the old
chunk and continues with the new one; RTC guides the new chunk towards the old one. Then PPO trains
the clone in real time, with RTC and with skipping. "conditioned" is a clone that gets the old
chunk's actions as input. Two tasks: a detour around a disc, and a ball to catch.

Success over 200 episodes per cell with a Wilson interval; jerk is the mean change of the action
from one step to the next where a chunk takes over, and within chunks.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import (
    PPO,
    ActionChunk,
    BehaviorCloning,
    DatasetCollector,
    FlowSettings,
    PerceptronBackbone,
    RealTime,
    RLDataModule,
    RLTrainer,
    VLAPolicy,
)
from lightning_rl.collectors.evaluation import wilson_interval
from lightning_rl.envs import TorchEnv
from scripting import parser_of

GUST = 0.4
"""m/s."""

CHUNK, HORIZON, EPISODES = 16, 8, 200
PASSES, PPO_STEPS = 100, 400_000
"""Iterations of cloning, and env steps of PPO."""

TIMESTEP, FORCE, DAMPING, RADIUS, GOAL = 1 / 30, 4.0, 0.5, 0.25, 0.2
"""s, m/s^2 per unit of action, 1/s, m, m."""

TRAINED: dict[str, Any] = {"RTC": "guided", "skipping": "skip"}
"""What PPO trains with: name in the table, method."""


class Flight(TorchEnv):
    """Move a point with momentum by a force, action [2]; gusts change its velocity.

    Observation: `proprio` [7]. An episode ends after 200 steps.
    """

    start_size = 5

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        box = gymnasium.spaces.Box(-20.0, 20.0, (7,), np.float32)
        action = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        space = gymnasium.spaces.Dict({"proprio": box})
        super().__init__(num_envs, space, action, 200, device)

    def observe(self, state: TensorDict) -> TensorDict:
        return TensorDict({"proprio": self.features(state)}, state.batch_size)

    def move(self, state: TensorDict, action: Tensor) -> TensorDict:
        """Return the state after a step, with a gust in one of 50 steps."""
        gust = self.uniform(3)
        kick = (gust[:, :2] * 2.0 - 1.0) * GUST * (gust[:, 2:] < 0.02)
        force = FORCE * action.clamp(-1.0, 1.0)
        velocity = state["velocity"] + TIMESTEP * (force - DAMPING * state["velocity"]) + kick
        position = state["position"] + TIMESTEP * velocity
        return state.copy().update({"position": position, "velocity": velocity})

    def features(self, state: TensorDict) -> Tensor:
        """Return the observation [M, 7], scaled to about 1, which small networks learn sooner."""
        raise NotImplementedError

    def expert(self, state: TensorDict) -> Tensor:
        """Return the expert's action [M, 2] for a state [M]."""
        raise NotImplementedError


class Detour(Flight):
    """Fly around a disc, on either side, to a goal.

    Touching the disc is a failure. The expert takes the nearer side, and a random one if both are
    about as near. The reward is 1 at the goal, and the progress.

    `proprio`: position, velocity, heights of the disc and of the goal, and above the disc.
    """

    def initial_state(self, uniform: Tensor) -> TensorDict:
        signed = uniform * 2.0 - 1.0
        start = torch.stack((torch.full_like(signed[:, 0], -1.2), 0.4 * signed[:, 0]), 1)
        nearer = start[:, 1:] - 0.2 * signed[:, 1:2]
        state = {
            "position": start,
            "velocity": torch.zeros_like(start),
            "disc": 0.2 * signed[:, 1:2],
            "goal": 0.4 * signed[:, 2:3],
            "side": torch.where(nearer + 0.1 * signed[:, 3:4] < 0.0, -1.0, 1.0),
        }
        return TensorDict(state, [len(uniform)], device=self.device)

    def features(self, state: TensorDict) -> Tensor:
        x, y = state["position"].split(1, 1)
        ahead, aside = state["velocity"].split(1, 1)
        parts = [x, 3 * y, 2 * ahead, 3 * aside, 4 * state["disc"], 3 * state["goal"]]
        parts.append(6 * (y - state["disc"]))
        return torch.cat(parts, 1)

    def transition(self, state: TensorDict, action: Tensor) -> Any:
        moved = self.move(state, action)
        before, after = (_distance(each, 1.2, each["goal"]) for each in (state, moved))
        success = after < GOAL
        hit = _distance(moved, 0.0, state["disc"]) < RADIUS
        far = (moved["position"].abs() > 2.0).any(1)
        info = {"success": success, "fail": hit | far}
        reward = before - after + success.float() - (hit | far).float()
        return moved, reward, success | hit | far, info

    def expert(self, state: TensorDict) -> Tensor:
        position, velocity = state["position"], state["velocity"]
        beside = state["disc"] + state["side"] * (RADIUS + 0.25)
        passed = position[:, :1] > 0.0
        aim = torch.where(
            passed,
            torch.cat((torch.full_like(beside, 1.2), state["goal"]), 1),
            torch.cat((torch.full_like(beside, 0.05), beside), 1),
        )
        way = aim - position
        wish = 1.1 * way / way.norm(dim=1, keepdim=True).clamp(min=0.3)
        return (1.5 * (wish - velocity)).clamp(-1.0, 1.0)


def _distance(state: TensorDict, x: float, y: Tensor) -> Tensor:
    ahead = state["position"][:, 0] - x
    return (ahead.square() + (state["position"][:, 1] - y[:, 0]).square()).sqrt()


class Catch(Flight):
    """Catch a ball that flies by between two walls: be near it, at its velocity.

    Gusts change the ball's velocity, too. A ball that leaves to the left is lost. The reward is 1
    for a catch, and what the distance and the difference of velocities lost.

    `proprio`: position, velocity, and the ball's from there; its sideward velocity.
    """

    def initial_state(self, uniform: Tensor) -> TensorDict:
        signed = uniform * 2.0 - 1.0
        ahead, aside = signed[:, 0], signed[:, 1]
        state = {
            "position": torch.stack((-0.8 + 0.2 * ahead, 0.4 * aside), 1),
            "velocity": torch.zeros_like(signed[:, :2]),
            "ball": torch.stack((1.2 + 0.2 * ahead, 0.5 * signed[:, 2]), 1),
            "speed": torch.stack((-0.8 + 0.2 * signed[:, 3], 0.8 * signed[:, 4]), 1),
        }
        return TensorDict(state, [len(uniform)], device=self.device)

    def features(self, state: TensorDict) -> Tensor:
        way, speed = self.offset(state)
        return torch.cat((2 * way, 2 * speed, state["speed"], 2 * state["ball"][:, 1:]), 1)

    def transition(self, state: TensorDict, action: Tensor) -> Any:
        moved = self.move(state, action)
        gust = self.uniform(3)
        speed = state["speed"] + (gust[:, :2] * 2.0 - 1.0) * GUST * (gust[:, 2:] < 0.02)
        ball = state["ball"] + TIMESTEP * speed
        beyond = ball[:, 1].abs() > 0.6
        speed[:, 1] = torch.where(beyond, -speed[:, 1].abs() * ball[:, 1].sign(), speed[:, 1])
        moved.update({"ball": ball, "speed": speed})
        before, after = (self.gap(each) for each in (state, moved))
        way, gap = self.offset(moved)
        success = (way.norm(dim=1) < 0.08) & (gap.norm(dim=1) < 0.25)
        lost = (ball[:, 0] < -1.5) | (moved["position"].abs() > 2.0).any(1)
        reward = before - after + success.float() - lost.float()
        return moved, reward, success | lost, {"success": success, "fail": lost}

    def gap(self, state: TensorDict) -> Tensor:
        """Return the distance in m plus .2 s times the difference of velocities, [M]."""
        way, speed = self.offset(state)
        return way.norm(dim=1) + 0.2 * speed.norm(dim=1)

    def expert(self, state: TensorDict) -> Tensor:
        way, speed = self.offset(state)
        return (6.0 * way + 3.0 * speed).clamp(-1.0, 1.0)

    @staticmethod
    def offset(state: TensorDict) -> tuple[Tensor, Tensor]:
        """Return the ball's position and velocity relative to the point, [M, 2] each."""
        return state["ball"] - state["position"], state["speed"] - state["velocity"]


TASKS: dict[str, type[Flight]] = {"detour": Detour, "catch": Catch}


def chunks(task: str) -> Any:
    return partial(ActionChunk, env=TASKS[task], chunk_size=CHUNK, execute=HORIZON)


def make_policy(real_time: RealTime) -> VLAPolicy:
    env = chunks("detour")(1)  # both tasks have these spaces
    spaces = env.single_observation_space, env.single_action_space
    flow = FlowSettings(steps=5, hidden_sizes=(256, 256))
    body = PerceptronBackbone((128, 128), 4)
    return VLAPolicy(*spaces, body, head="flow", flow=flow, real_time=real_time)


def fit(module: Any, task: str, folder: Path, seed: int, **data: Any) -> tuple[VLAPolicy, float]:
    """Train an algorithm without evaluations; return the policy and its CPU seconds."""
    torch.manual_seed(seed)
    begun = time.process_time()
    trainer = RLTrainer(
        run_dir=str(folder),
        enable_progress_bar=False,
        accelerator="cpu",
        max_epochs=-1,
        limit_val_batches=0,
    )
    trainer.fit(module, RLDataModule(chunks(task), seed=seed, **data))
    return module.policy, time.process_time() - begun


def clone(task: str, folder: Path, seed: int, real_time: RealTime) -> tuple[VLAPolicy, float]:
    torch.manual_seed(seed)
    prefix = HORIZON if real_time.method == "conditioned" else 0
    settings = {"learning_rate": 1e-3, "batch_size": 256, "lr_schedule": "linear"}
    module = BehaviorCloning(make_policy(real_time), n_epochs=4, prefix_steps=prefix, **settings)
    data = {"num_envs": 400, "buffer_size": 25, "total_env_steps": PASSES * 400 * 85}
    collector = partial(DatasetCollector, episodes=2000)
    return fit(module, task, folder, seed, **data, collector=collector)


def tune(
    task: str, folder: Path, seed: int, weights: dict[str, Tensor], real_time: RealTime
) -> tuple[VLAPolicy, float]:
    torch.manual_seed(seed)
    policy = make_policy(real_time)
    policy.load_state_dict(weights)
    module = PPO(policy, learning_rate=1e-4, n_epochs=4, batch_size=256, ent_coef=0.0, gamma=0.995)
    data = {"num_envs": 64, "buffer_size": 32, "total_env_steps": PPO_STEPS}
    return fit(module, task, folder, seed, **data)


@torch.no_grad()
def measure(task: str, policy: VLAPolicy, method: str, delay: int, seed: int) -> dict[str, Any]:
    """Play 200 episodes step by step, with drawn noise."""
    kind = {"waiting": "skip", "skipping": "skip"}.get(method)
    settings = replace(policy.real_time, delay_steps=delay, method=kind or policy.real_time.method)
    policy.real_time = settings
    policy.head.noise_level = 1e-4  # the ODE from drawn noise
    policy.eval()
    env = TASKS[task](EPISODES)
    observation, _ = env.reset(seed=1_000_000)
    generator = torch.Generator().manual_seed(seed)
    state = policy.first_state(EPISODES)["state"]
    running = torch.ones(EPISODES, dtype=torch.bool)
    success = torch.zeros_like(running)
    seams: list[Tensor] = []
    inner: list[Tensor] = []
    last: Tensor | None = None

    def step(action: Tensor, is_seam: bool) -> None:
        nonlocal observation, last, running, success
        action = action.clamp(-1.0, 1.0)
        if last is not None:
            (seams if is_seam else inner).append((action - last).norm(dim=1)[running])
        last = action
        observation, _, terminated, truncated, info = env.step(action)
        success |= running & info["success"]
        running = running & ~(terminated | truncated)

    count = 0
    while running.any():
        td = TensorDict({"observation": observation, "state": state}, [EPISODES])
        if method == "waiting":
            td["state"] = torch.zeros_like(state)
        result = policy(td, generator=generator)
        state, chunk = result["next_state"], result["action"]
        if method == "waiting" and count:
            for number in range(delay):
                velocity = env.state["velocity"]
                step((-1.5 * velocity).clamp(-1.0, 1.0), number == 0)
        # With d = s the old chunk fills an interval, and the seam is at the next one.
        takes_over = delay % HORIZON if method != "waiting" and count else 0
        for number in range(HORIZON):
            step(chunk[:, number], number == takes_over)
        count += 1
    successes = int(success.sum())
    return {
        "success": successes / EPISODES,
        "interval": wilson_interval(successes, EPISODES),
        "successes": successes,
        "seam": float(torch.cat(seams).mean()),
        "inner": float(torch.cat(inner).mean()),
    }


def run(task: str, seed: int, folder: Path, delays: Sequence[int]) -> dict[str, Any]:
    """Train and measure all rows of a seed."""
    base, base_seconds = clone(task, folder / f"clone{seed}", seed, RealTime(HORIZON))
    prefix = RealTime(HORIZON, method="conditioned")
    conditioned, seconds = clone(task, folder / f"conditioned{seed}", seed, prefix)
    rows: dict[str, Any] = {
        "clone": {"cpu_s": base_seconds},
        "conditioned clone": {"cpu_s": seconds},
    }
    weights = {key: value.clone() for key, value in base.state_dict().items()}

    for delay in delays:
        for method in ("waiting", "skipping", "RTC", "conditioned"):
            policy = conditioned
            if method != "conditioned":
                policy = make_policy(RealTime(HORIZON, delay))
                policy.load_state_dict(weights)
            rows[f"{method}, {delay}"] = measure(task, policy, method, delay, seed)
    for delay in delays:
        for name, method in TRAINED.items():
            settings = RealTime(HORIZON, delay, method=method)
            run_dir = folder / f"ppo_{method}{seed}_{delay}"
            tuned, seconds = tune(task, run_dir, seed, weights, settings)
            row = measure(task, tuned, name, delay, seed) | {"cpu_s": seconds}
            rows[f"{name}, PPO, {delay}"] = row
    print(json.dumps({seed: rows}), flush=True)
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--task", choices=TASKS, default="detour")
    parser.add_argument("--delays", nargs="+", type=int, default=[0, 2, 4, 8])
    parser.add_argument("--place", type=Path, default=Path("outputs/real_time"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = {seed: run(args.task, seed, args.place, args.delays) for seed in args.seeds}
    (args.place / "rows.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
