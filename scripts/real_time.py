"""Measure real-time chunks on a task with momentum: success, and jerk at the seams of chunks.

    python scripts/real_time.py --seeds 1 2 3 --output real_time.json

A flow of chunks of 16 actions at 30 Hz is cloned from an expert, and acts with a chunk every 8
steps. Each chunk takes d steps to compute. Waiting brakes meanwhile; skipping executes the old
chunk and continues with the new one; RTC guides the new chunk towards the old one. Then PPO trains
the clone in real time. "conditioned" is a clone that gets the old chunk's actions as input.

Success over 200 episodes per cell with a Wilson interval; jerk is the mean change of the action
from one step to the next where a chunk takes over, and within chunks.
"""

import argparse
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

GUST = 0.4
"""m/s."""

CHUNK, HORIZON, DELAYS, EPISODES = 16, 8, (0, 2, 4, 8), 200
TIMESTEP, FORCE, DAMPING, RADIUS, GOAL = 1 / 30, 4.0, 0.5, 0.25, 0.2
"""s, m/s^2 per unit of action, 1/s, m, m."""

METHODS = ("waiting", "skipping", "RTC", "RTC, PPO", "conditioned")


class Detour(TorchEnv):
    """Fly a point with momentum around a disc, on either side, to a goal.

    Gusts change the velocity. Touching the disc is a failure. The expert takes the nearer side, and
    a random one if both are about as near. The reward is 1 at the goal, and the progress.

    Observation: `proprio` [7], position, velocity, heights of the disc and of the goal, and above
    the disc. Action [2], the force.
    """

    start_size = 5

    def __init__(self, num_envs: int, device: torch.device | str = "cpu") -> None:
        box = gymnasium.spaces.Box(-20.0, 20.0, (7,), np.float32)
        action = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        space = gymnasium.spaces.Dict({"proprio": box})
        super().__init__(num_envs, space, action, 200, device)

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

    def observe(self, state: TensorDict) -> TensorDict:
        x, y = state["position"].split(1, 1)
        ahead, aside = state["velocity"].split(1, 1)
        # Scaled to about 1, which a small network learns from sooner.
        parts = [x, 3 * y, 2 * ahead, 3 * aside, 4 * state["disc"], 3 * state["goal"]]
        parts.append(6 * (y - state["disc"]))
        return TensorDict({"proprio": torch.cat(parts, 1)}, state.batch_size)

    def transition(self, state: TensorDict, action: Tensor) -> Any:
        gust = self.uniform(3)
        kick = (gust[:, :2] * 2.0 - 1.0) * GUST * (gust[:, 2:] < 0.02)
        force = FORCE * action.clamp(-1.0, 1.0)
        velocity = state["velocity"] + TIMESTEP * (force - DAMPING * state["velocity"]) + kick
        position = state["position"] + TIMESTEP * velocity
        moved = state.copy().update({"position": position, "velocity": velocity})
        before, after = (_distance(each, 1.2, each["goal"]) for each in (state, moved))
        success = after < GOAL
        hit = _distance(moved, 0.0, state["disc"]) < RADIUS
        far = (position.abs() > 2.0).any(1)
        info = {"success": success, "fail": hit | far}
        reward = before - after + success.float() - (hit | far).float()
        return moved, reward, success | hit | far, info

    def expert(self, state: TensorDict) -> Tensor:
        """Return the expert's action [M, 2] for a state [M]."""
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


CHUNKS = partial(ActionChunk, env=Detour, chunk_size=CHUNK, execute=HORIZON)


def make_policy(real_time: RealTime) -> VLAPolicy:
    env = CHUNKS(1)
    spaces = env.single_observation_space, env.single_action_space
    flow = FlowSettings(steps=5, hidden_sizes=(256, 256))
    body = PerceptronBackbone((128, 128), 4)
    return VLAPolicy(*spaces, body, head="flow", flow=flow, real_time=real_time)


def fit(
    place: Path, seed: int, module: Any, data: dict[str, Any], steps: int
) -> tuple[VLAPolicy, float]:
    """Train an algorithm without evaluations; return the policy and its CPU seconds."""
    torch.manual_seed(seed)
    begun = time.process_time()
    trainer = RLTrainer(
        run_dir=str(place),
        enable_progress_bar=False,
        accelerator="cpu",
        max_epochs=-1,
        limit_val_batches=0,
    )
    trainer.fit(module, RLDataModule(CHUNKS, total_env_steps=steps, seed=seed, **data))
    return module.policy, time.process_time() - begun


def clone(place: Path, seed: int, real_time: RealTime, passes: int) -> tuple[VLAPolicy, float]:
    torch.manual_seed(seed)
    prefix = HORIZON if real_time.method == "conditioned" else 0
    settings = {"learning_rate": 1e-3, "batch_size": 256, "lr_schedule": "linear"}
    module = BehaviorCloning(make_policy(real_time), n_epochs=4, prefix_steps=prefix, **settings)
    data = {
        "num_envs": 400,
        "buffer_size": 25,
        "collector": partial(DatasetCollector, episodes=2000),
    }
    return fit(place, seed, module, data, passes * 400 * 85)


def tune(
    place: Path, seed: int, policy: VLAPolicy, real_time: RealTime, steps: int
) -> tuple[VLAPolicy, float]:
    torch.manual_seed(seed)
    tuned = make_policy(real_time)
    tuned.load_state_dict(policy.state_dict())
    module = PPO(tuned, learning_rate=1e-4, n_epochs=4, batch_size=256, ent_coef=0.0, gamma=0.995)
    return fit(place, seed, module, {"num_envs": 64, "buffer_size": 32}, steps)


@torch.no_grad()
def measure(policy: VLAPolicy, method: str, delay: int, seed: int) -> dict[str, Any]:
    """Play 200 episodes step by step, with drawn noise."""
    kind = {"waiting": "skip", "skipping": "skip"}.get(method)
    settings = replace(policy.real_time, delay_steps=delay, method=kind or policy.real_time.method)
    policy.real_time = settings
    policy.head.noise_level = 1e-4  # the ODE from drawn noise
    policy.eval()
    env = Detour(EPISODES)
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

    chunks = 0
    while running.any():
        td = TensorDict({"observation": observation, "state": state}, [EPISODES])
        if method == "waiting":
            td["state"] = torch.zeros_like(state)
        result = policy(td, generator=generator)
        state, chunk = result["next_state"], result["action"]
        if method == "waiting" and chunks:
            for number in range(delay):
                velocity = env.state["velocity"]
                step((-1.5 * velocity).clamp(-1.0, 1.0), number == 0)
        # With d = s the old chunk fills an interval, and the seam is at the next one.
        takes_over = delay % HORIZON if method != "waiting" and chunks else 0
        for number in range(HORIZON):
            step(chunk[:, number], number == takes_over)
        chunks += 1
    count = int(success.sum())
    return {
        "success": count / EPISODES,
        "interval": wilson_interval(count, EPISODES),
        "successes": count,
        "seam": float(torch.cat(seams).mean()),
        "inner": float(torch.cat(inner).mean()),
    }


def run(seed: int, place: Path, passes: int, steps: int, delays: Sequence[int]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    base, seconds = clone(place / f"clone{seed}", seed, RealTime(HORIZON), passes)
    rows["clone"] = {"cpu_s": seconds}
    given, seconds = clone(
        place / f"given{seed}", seed, RealTime(HORIZON, method="conditioned"), passes
    )
    rows["conditioned clone"] = {"cpu_s": seconds}
    weights = {key: value.clone() for key, value in base.state_dict().items()}
    for delay in delays:
        for method in ("waiting", "skipping", "RTC", "conditioned"):
            policy = given
            if method != "conditioned":
                policy = make_policy(RealTime(HORIZON, delay))
                policy.load_state_dict(weights)
            rows[f"{method}, {delay}"] = measure(policy, method, delay, seed)
            print(
                json.dumps({seed: {f"{method}, {delay}": rows[f"{method}, {delay}"]}}), flush=True
            )
    for delay in delays if steps else ():
        base.load_state_dict(weights)
        tuned, seconds = tune(
            place / f"ppo{seed}_{delay}", seed, base, RealTime(HORIZON, delay), steps
        )
        name = f"RTC, PPO, {delay}"
        rows[name] = measure(tuned, "RTC", delay, seed) | {"cpu_s": seconds}
        print(json.dumps({seed: {name: rows[name]}}), flush=True)
    return rows


def cost(batch: int = 256, repeats: int = 40) -> dict[str, Any]:
    """Return CPU ms and MB of saved activations per gradient, for each method."""
    found: dict[str, Any] = {}
    for method in ("skip", "guided"):
        policy = make_policy(RealTime(HORIZON, 4, method=method))
        td = TensorDict({"observation": CHUNKS(batch).reset(seed=0)[0]}, [batch])
        with torch.no_grad():
            td["state"] = policy(td.clone())["next_state"]
            td = policy(td)
        numbers = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal numbers
            numbers += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            policy.evaluate_actions(td)["sample_log_prob"].sum().backward()
        begun = time.process_time()
        for _ in range(repeats):
            policy.evaluate_actions(td)["sample_log_prob"].sum().backward()
        seconds = (time.process_time() - begun) / repeats
        found[method] = {"ms": 1e3 * seconds, "MB": numbers * 4 / 2**20}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--delays", nargs="+", type=int, default=list(DELAYS))
    parser.add_argument("--passes", type=int, default=100, help="iterations of cloning")
    parser.add_argument("--steps", type=int, default=400_000, help="env steps of PPO")
    parser.add_argument("--place", type=Path, default=Path("outputs/real_time"))
    parser.add_argument("--cost", action="store_true", help="time and memory of a gradient alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cost:
        print(json.dumps(cost()))
        return
    rows = {
        seed: run(seed, args.place, args.passes, args.steps, args.delays) for seed in args.seeds
    }
    (args.place / "rows.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
