"""Play a policy in many setups at once, and find the change with the largest reward."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_rl import Policy
from lightning_rl.extend.envs import import_mujoco
from lightning_rl.extend.errors import require
from lightning_rl.extend.spaces import names_of
from lightning_rl.extensions.algorithms.frozen import fits
from lightning_rl.extensions.mujoco.rotations import inverse, rotate
from lightning_rl.extensions.mujoco.threads import ThreadedPhysics
from lightning_rl.extensions.transfer.candidates import Setup, candidates, physics
from lightning_rl.extensions.transfer.layout import (
    PER_JOINT,
    LayoutTerm,
    PolicyLayout,
    columns_of_terms,
    equal,
)
from lightning_rl.extensions.transfer.onnx_policy import OnnxPolicy

ROUNDS = ((2, 1.2, 300), (3, 2.5, 20), (10, 5.0, 20))
"""Rounds of the search: episodes of each candidate, their seconds, candidates that remain."""

LAST_ACTION = ("actions", "action", "last_action", "prev_actions")
"""Names of terms of the last action."""

POSITIONS = ("dof_pos", "joint_pos", "joint_offsets", "joint_pos_rel")
"""Names of terms of joint positions relative to the default ones."""

MEMORY = 16
"""Kept actions of the policy, for delays and histories."""

PUSH, PUSH_EVERY = 0.75, 1.0
"""m/s: change of the base's velocity by a push; s between two pushes."""

CALM = 2.5
"""rad/s: root mean square speed of the joints' targets that is no shaking."""

SIMILAR = 0.05
"""Relative difference of rewards within which slower targets count."""


class Finding(NamedTuple):
    """The effect of a change; means over episodes.

    Attributes:
        seconds: until the fall.
        reward: sum of the rewards until the fall, times the seconds of a step.
        velocity_error: m/s, of envs that measure it.
        target_speed: rad/s, root mean square of the joints' targets.
    """

    kind: str
    setup: Setup
    seconds: float
    reward: float
    velocity_error: float
    target_speed: float

    def score(self, finding: "Finding") -> float:
        """Return the reward of another finding; of similar ones, slower targets are better."""
        # Shaking shows a fault long before the robot falls.
        calm, similar = max(CALM, self.target_speed), SIMILAR * abs(self.reward)
        is_similar = abs(finding.reward - self.reward) < similar
        speed = finding.target_speed if is_similar else self.target_speed
        return finding.reward / math.sqrt(1.0 + (speed / calm) ** 2)


class Trial:
    """A policy in an env, with another setup in each row.

    Args:
        policy: an `OnnxPolicy`, or another one without a memory.
        make: makes n envs: a `MujocoEnv` with one free joint and `Position` actions.

    Attributes:
        layout: the policy's.
        base: the unchanged env.

    Raises:
        ConfigurationError: for a policy with a memory, or an env of another kind or with other
            observations.
    """

    def __init__(self, policy: Policy, make: Callable[[int], Any]) -> None:
        self.policy, self.make = policy, make
        env = make(1)
        self.joints = list(names_of(env.single_action_space))
        keys = ("default_joint_pos", "joint_stiffness", "joint_damping", "action_scale")
        missing = [key for key in keys if key not in env.metadata]
        require(
            not missing and hasattr(env, "physics"),
            f"transfer changes the physics of a MujocoEnv with Position actions, but "
            f"{type(env).__name__} names no {', '.join(missing) or 'physics'}: give another env, "
            "such as --data.env LeggedRobot.",
        )
        reads, observed = policy.acting_space, env.single_observation_space
        require(
            fits(reads, observed),
            f"The policy reads the observations {reads}, but {type(env).__name__} has {observed}: "
            "give it the same groups and terms.",
        )
        require(
            not policy.is_recurrent,
            f"transfer plays policies without a memory, but {type(policy).__name__} has one.",
        )
        described: dict[str, Any] = {
            name: dict(zip(self.joints, env.metadata[key], strict=False))
            for name, key in zip(PER_JOINT, keys, strict=True)
        }
        self.columns = columns_of_terms(policy.acting_space)
        if isinstance(policy, OnnxPolicy):
            self.layout = policy.layout
        else:
            num_joints, terms = len(self.joints), {}
            for name, columns in self.columns.items():
                frames = len(columns) // num_joints if len(columns) % num_joints == 0 else 0
                terms[name] = LayoutTerm(joints=frames > 0, history=max(1, frames))
            self.layout = PolicyLayout(terms, **described, control_period=env.step_dt, height=1.0)
        # The env's values, in the order of the policy's joints.
        for name in PER_JOINT:
            policy_value = getattr(self.layout, name)
            value = {joint: described[name][joint] for joint in policy_value}
            described[name] = policy_value if equal(policy_value, value) else value
        layout = replace(self.layout, **described, control_period=env.step_dt)
        self.base = Setup(layout, getattr(env, "delay", 0))
        self.action_scale = torch.tensor([layout.action_scale[joint] for joint in self.joints])
        order = env.layout.joints
        levels = [_level(env.layout.model, number) for number in range(len(order))]
        by_level = [order[number] for number in np.argsort(levels, kind="stable")]
        self.orders = {"in the model": order, "in the model, level by level": by_level}
        env.close()

    def explain(self) -> list[Finding]:
        """Return the changes that help most, each with its effect; the best first."""
        # Few, and with effects that short episodes do not show.
        always = [("as it is", self.base), *physics(self.base)]
        remaining = [*always, *candidates(self.base, self.layout, self.orders)]
        for episodes, seconds, count in ROUNDS:
            findings = self.play(remaining, range(episodes), seconds)
            base = next(finding for finding in findings if finding.setup is self.base)
            findings.sort(key=base.score, reverse=True)
            remaining = [(finding.kind, finding.setup) for finding in findings[:count]]
            remaining += [pair for pair in always if pair not in remaining]
        best: dict[str, Finding] = {}
        for finding in findings:
            # Some changes have no effect, such as another frame of a number.
            if finding is base or finding[2:] != base[2:]:
                best.setdefault(finding.kind, finding)
        return list(best.values())

    def play(
        self, setups: Sequence[tuple[str, Setup]], seeds: Sequence[int], seconds: float
    ) -> list[Finding]:
        """Return the findings of setups over episodes of these seeds."""
        groups: dict[str, list[tuple[str, Setup]]] = {}
        for kind, setup in setups:
            gains = setup.layout.stiffness, setup.layout.damping, setup.layout.control_period
            groups.setdefault(f"{gains} {setup.mass} {setup.friction}", []).append((kind, setup))
        findings: list[Finding] = []
        for group in groups.values():
            env = self.make(len(group) * len(seeds))
            _change_physics(env, group[0][1])
            findings += self._episodes(env, group, list(seeds), seconds)
            env.close()
        return findings

    def watch(self, episodes: int, seconds: float, look: Callable[[Tensor, Tensor], None]) -> None:
        """Play the unchanged setup without pushes.

        Call `look` at each step with the observations [E, D] and whether a row has not fallen [E].
        """
        env = self.make(episodes)
        self._episodes(env, [("as it is", self.base)], list(range(episodes)), seconds, look)
        env.close()

    def number_name(self, term: str, index: int) -> str:
        """Return the joint of a number of a term, or its index."""
        return (
            self.joints[index % len(self.joints)]
            if self.layout.observation[term].joints
            else f"number {index}"
        )

    @torch.no_grad()
    def _episodes(
        self,
        env: Any,
        group: list[tuple[str, Setup]],
        seeds: list[int],
        seconds: float,
        look: Callable[[Tensor, Tensor], None] | None = None,
    ) -> list[Finding]:
        observation, _ = env.reset(seed=seeds * len(group))
        readers = [_Reader(self, setup) for _, setup in group]
        num_rows, dt = env.num_envs, env.step_dt
        alive = torch.ones(num_rows, dtype=torch.bool)
        past = torch.zeros(num_rows, MEMORY, len(self.joints))
        sums, target, interval = torch.zeros(4, num_rows), None, round(PUSH_EVERY / dt)
        for step in range(1, round(seconds / dt) + 1):
            if look is not None:
                look(self.flat(observation), alive)
            elif step % interval == interval // 2:
                angle = torch.tensor([2.4 * (seed + 3 * step) for seed in seeds]).repeat(len(group))
                env.state["qvel"][:, :2] += PUSH * torch.stack((angle.cos(), angle.sin()), 1)
            parts = (self.flat(observation), past, env.state["qpos"][:, 3:7])
            rows = zip(readers, *(part.split(len(seeds)) for part in parts), strict=True)
            inputs = torch.cat([reader.inputs(*row) for reader, *row in rows])
            past = torch.cat((past[:, 1:], self._act(inputs)[:, None]), 1)
            rows = zip(readers, past.split(len(seeds)), strict=True)
            action = torch.cat([reader.action(row) for reader, row in rows])
            observation, reward, terminated, truncated, info = env.step(action)
            alive &= ~(terminated | truncated)
            speed = (action - (action if target is None else target)) * self.action_scale / dt
            target = action
            error = info["metrics"].get("velocity_error", torch.zeros(num_rows))
            values = (torch.ones(num_rows), reward, error, speed.square().mean(1))
            sums += torch.where(alive, torch.stack(values) * dt, 0.0)
        lived, reward, error, square = sums.view(4, len(group), len(seeds)).mean(2)
        duration = lived.clamp_min(dt)
        numbers = torch.stack((lived, reward, error / duration, (square / duration).sqrt()), 1)
        return [Finding(*c, *n) for c, n in zip(group, numbers.tolist(), strict=True)]

    def flat(self, observation: Any) -> Tensor:
        """Return the numbers [B, D] that the policy reads, in the order of `columns`."""
        space = self.policy.acting_space
        if isinstance(space, gymnasium.spaces.Dict):
            observation = torch.cat([observation[key] for key in space], 1)
        return observation  # type: ignore[no-any-return]  # a tensor

    def _act(self, inputs: Tensor) -> Tensor:
        if isinstance(self.policy, OnnxPolicy):
            action = torch.from_numpy(self.policy.graph(inputs.numpy()))
        else:
            space, tree = self.policy.acting_space, inputs
            if isinstance(space, gymnasium.spaces.Dict):
                sizes = [math.prod(part.shape or ()) for part in space.values()]
                parts = zip(space, inputs.split(sizes, 1), strict=True)
                tree = TensorDict(dict(parts), [len(inputs)])
            td = TensorDict({"observation": tree}, [len(inputs)])
            action = self.policy.get_action(td, deterministic=True)["action"]
        # A robot that has fallen may get any number.
        return action.nan_to_num(0.0, 0.0, 0.0).clamp(-100.0, 100.0)


class _Reader:
    """Read the env's observations, and drive its joints, as a setup says."""

    def __init__(self, trial: Trial, setup: Setup) -> None:
        layout, positions = setup.layout, trial.base.layout.default_position
        self.setup, self.columns = setup, trial.columns
        self.order = torch.tensor([trial.joints.index(joint) for joint in layout.joints])
        self.signs = torch.tensor([layout.sign(joint) for joint in trial.joints])
        scale = torch.tensor([layout.action_scale[joint] for joint in trial.joints])
        self.scale = self.signs * scale / trial.action_scale
        self.shift = torch.tensor([layout.default_position[j] - positions[j] for j in trial.joints])
        self.action_shift = self.shift / trial.action_scale

    def inputs(self, observation: Tensor, past: Tensor, rotation: Tensor) -> Tensor:
        """Return the policy's inputs [E, D] for observations, last actions and rotations."""
        parts = []
        for name, term in self.setup.layout.observation.items():
            frames = observation[:, self.columns[name]].unflatten(1, (term.history, -1))
            if name in LAST_ACTION:
                frames = past[:, MEMORY - term.history :]
            elif term.joints:
                frames = frames - self.shift if name in POSITIONS else frames
                frames = (frames * self.signs)[:, :, self.order]
            frame = self.setup.frames.get(name)
            if frame is not None and frames.shape[2] == 3:
                turn = rotation if frame == "world" else inverse(rotation)
                frames = rotate(turn[:, None].expand(-1, term.history, -1), frames)
            frames = frames.flip(1) if term.newest_first else frames
            parts.append(frames.flatten(1) * term.scale)
        return torch.cat(parts, 1)

    def action(self, past: Tensor) -> Tensor:
        """Return the env's actions [E, A] for the policy's last ones [E, MEMORY, A]."""
        applied = past[:, MEMORY - 1 - self.setup.delay, self.order.argsort()]
        return applied * self.scale + self.action_shift


def _change_physics(env: Any, setup: Setup) -> None:
    model, layout = env.layout.model, setup.layout
    for number, joint in enumerate(env.layout.joints):
        if layout.stiffness.get(joint):
            model.actuator_gainprm[number, 0] = layout.stiffness[joint]
            model.actuator_biasprm[number, 1] = -layout.stiffness[joint]
            model.actuator_biasprm[number, 2] = -layout.damping[joint]
    model.body_mass[:] *= setup.mass
    model.body_inertia[:] *= setup.mass
    if setup.friction is not None:
        model.geom_friction[:, 0] = model.pair_friction[:, :2] = setup.friction
    mujoco = import_mujoco()
    mujoco.mj_setConst(model, mujoco.MjData(model))
    # Events change these fields relative to the nominal ones.
    for name, value in env.parameters().items():
        value.copy_(torch.from_numpy(np.array(getattr(model, name))))
    env.step_dt, env.delay = layout.control_period, 0
    substeps = max(1, round(env.step_dt / model.opt.timestep))
    env.physics = ThreadedPhysics(env.layout, env.num_envs, substeps)


def _level(model: Any, actuator: int) -> int:
    """Return the number of bodies from the world to a joint."""
    body, level = model.jnt_bodyid[model.actuator_trnid[actuator, 0]], 0
    while body > 0:
        body, level = model.body_parentid[body], level + 1
    return level
