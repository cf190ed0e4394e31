"""Read a reference motion, compare a robot with it, and choose frames to start from."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import check_range, closest, reason_of, require
from lightning_rl.extend.files import open_file
from lightning_rl.extensions.mujoco.rotations import angle_between, inverse, product

LARGEST_FILE = 2**28
"""Most bytes of a file of a motion."""

ARRAYS = ("joint_pos", "fps", "joint_names", "body_pos_w", "body_quat_w")
"""Arrays of a file that are read."""

REACH, FADING = 3, 0.8
"""Bins before a failure that share its blame, and its factor from bin to bin."""

FORGETTING = 5e-4
"""Share of the counted failures that is forgotten per env step."""


@dataclass(frozen=True)
class Motion:
    """A motion of F frames, one per control period.

    Attributes:
        joints: [F, J] rad, in the order that `read_motion` was asked for.
        joint_velocities: [F, J] rad/s.
        root: [F, 3] m, position of the base in the world.
        rotation: [F, 4] of the base, unit quaternions with w first.
        velocity: [F, 3] m/s, of the base, in the world.
        turn_rate: [F, 3] rad/s, of the base, in its frame: as a free joint of MuJoCo has it.
    """

    joints: Tensor
    joint_velocities: Tensor
    root: Tensor
    rotation: Tensor
    velocity: Tensor
    turn_rate: Tensor

    @property
    def base(self) -> Tensor:
        """[F, 7], position and quaternion of the base."""
        return torch.cat((self.root, self.rotation), 1)

    @property
    def base_velocity(self) -> Tensor:
        """[F, 6], velocity and turn rate of the base."""
        return torch.cat((self.velocity, self.turn_rate), 1)

    def __len__(self) -> int:
        return len(self.joints)

    def to(self, device: torch.device | str) -> "Motion":
        """Return the motion on a device."""
        return Motion(*(getattr(self, field.name).to(device) for field in fields(self)))


def read_motion(
    path: str | Path,
    joints: Sequence[str],
    period: float,
    joint_names: Sequence[str] | None = None,
) -> Motion:
    """Read a motion from an npz file, at one frame per control period.

    The file has `joint_pos` [T, J], or [T, 7 + J] that begins with the position and the quaternion
    (w first) of the base, and `fps`. Without these seven, the first row of `body_pos_w` [T, B, 3]
    and `body_quat_w` [T, B, 4] is the base's. Frames between those of the file are interpolated;
    velocities are differences of the frames.

    Args:
        path: the npz file.
        joints: names of the J joints in the wanted order; others of the file are left out.
        period: seconds from frame to frame.
        joint_names: names of the file's joints in its order. Default: its array `joint_names`.

    Raises:
        ConfigurationError: an array is missing or has another shape, a joint is unknown, or a
            number is not finite.
    """
    arrays = _arrays(path)
    names = [str(name) for name in arrays.get("joint_names", joint_names or ())]
    require(
        bool(names),
        f"{path} has no joint_names: give joint_names, the names of its joints in its order.",
    )
    for joint in joints:
        require(
            joint in names,
            f"{path} has no joint {joint}; it has {', '.join(names)}{closest(joint, names)}.",
        )
    numbers, base = _checked(path, arrays, len(names))
    # Neighbouring quaternions on the same side, so that what lies between them is short.
    turned = np.sum(base[1:, 3:] * base[:-1, 3:], axis=1) < 0
    base[1:, 3:] *= np.where(np.logical_xor.accumulate(turned), -1.0, 1.0)[:, None]
    times = np.arange(len(numbers)) / float(np.ravel(arrays["fps"])[0])
    # A little more, so that a last frame that rounding moved behind the end stays.
    frames = np.arange(0.0, times[-1] + 1e-6, period)
    require(len(frames) > 2, f"{path} lasts {times[-1]:.3f} s, less than three control periods.")
    columns = np.concatenate((numbers[:, [names.index(joint) for joint in joints]], base), 1)
    sampled = np.stack([np.interp(frames, times, column) for column in columns.T], 1)
    positions, root, rotation = torch.from_numpy(sampled).split((len(joints), 3, 4), 1)
    rotation = rotation / rotation.norm(dim=1, keepdim=True)
    velocities = [torch.gradient(part, spacing=period, dim=0)[0] for part in (positions, root)]
    values = positions, velocities[0], root, rotation, velocities[1], _turn_rate(rotation, period)
    return Motion(*(value.float() for value in values))


def _arrays(path: str | Path) -> dict[str, np.ndarray]:
    require(Path(path).is_file(), f"motion: there is no file {path}.")
    try:
        with open_file(Path(path), None, LARGEST_FILE) as file, np.load(file) as arrays:
            # Without pickles, which could run code: NumPy's default.
            sizes = {info.filename: info.file_size for info in arrays.zip.infolist()}
            require(
                sum(sizes.values()) <= LARGEST_FILE,
                f"{path} unpacks to {sum(sizes.values()):,} bytes; allowed: {LARGEST_FILE:,}.",
            )
            return {name: arrays[name] for name in ARRAYS if name in arrays}
    except ConfigurationError:
        raise
    except Exception as error:  # NumPy raises many types for a file that is no npz
        raise ConfigurationError(f"{path} is no npz file of arrays: {reason_of(error)}") from error


def _checked(
    path: str | Path, arrays: dict[str, np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the joints [T, count] and of the base [T, 7], float64."""
    missing = [name for name in ("joint_pos", "fps") if name not in arrays]
    require(not missing, f"{path} has no {', '.join(missing)}.")
    check_range(f"{path}: fps", float(np.ravel(arrays["fps"])[0]), above=0)
    numbers: np.ndarray = arrays["joint_pos"].astype(np.float64)
    require(
        numbers.ndim == 2 and numbers.shape[1] in (count, count + 7),
        f"{path}: joint_pos is {list(numbers.shape)}, but must be [T, {count}], or [T, {count + 7}]"
        f" with the base first: there are {count} joint_names.",
    )
    if numbers.shape[1] == count:
        bodies = [arrays.get(name, np.empty(0)) for name in ("body_pos_w", "body_quat_w")]
        shapes = [list(body.shape) for body in bodies]
        require(
            all(body.ndim == 3 and len(body) == len(numbers) for body in bodies),
            f"{path} has the position of the base neither in joint_pos nor in body_pos_w and "
            f"body_quat_w: their shapes are {shapes[0]} and {shapes[1]}.",
        )
        base = np.concatenate([body[:, 0] for body in bodies], 1).astype(np.float64)
    else:
        base, numbers = numbers[:, :7], numbers[:, 7:]
    require(
        bool(np.isfinite(numbers).all() and np.isfinite(base).all()),
        f"{path} has numbers that are not finite.",
    )
    sizes = np.linalg.norm(base[:, 3:], axis=1)
    require(
        bool((abs(sizes - 1.0) < 1e-2).all()),
        f"{path}: a quaternion of the base has the length {sizes[abs(sizes - 1.0).argmax()]:.3f}.",
    )
    return numbers, base.copy()


def _turn_rate(rotation: Tensor, period: float) -> Tensor:
    """Return the angular velocities [F, 3] of quaternions [F, 4], in the frame of the base."""
    step = rotation_vector(product(inverse(rotation[:-1]), rotation[1:])) / period
    inner = (step[:-1] + step[1:]) / 2.0
    return torch.cat((step[:1], inner, step[-1:]))


def rotation_vector(quaternion: Tensor) -> Tensor:
    """Return the rotation vectors [..., 3], at most pi long, of unit quaternions [..., 4]."""
    w, u = quaternion[..., :1], quaternion[..., 1:]
    length = u.norm(dim=-1, keepdim=True)
    angle = 2.0 * torch.atan2(length, w.abs())
    # Near no rotation the ratio is 2; the sign of w chooses the shorter way.
    ratio = torch.where(length > 1e-9, angle / length.clamp(min=1e-9), 2.0)
    return u * ratio * torch.where(w < 0, -1.0, 1.0)


def tracking_errors(
    motion: Motion, frame: Tensor, joints: Tensor, joint_velocities: Tensor, base: Tensor
) -> dict[str, Tensor]:
    """Return the errors of robots [M] at frames [M] of a motion, each [M].

    `joint_error` is the mean size in rad. For rewards: `joints` and `joint_velocities` are sums of
    squares in rad^2 and (rad/s)^2, `root` is the squared distance in m^2, `rotation` the squared
    angle in rad^2.

    Args:
        motion: the motion.
        frame: [M] int64.
        joints: [M, J] rad.
        joint_velocities: [M, J] rad/s.
        base: [M, 7], position and quaternion (w first) in the world.
    """
    error = joints - motion.joints[frame]
    angle = angle_between(motion.rotation[frame], base[:, 3:])
    return {
        "joint_error": error.abs().mean(1),
        "joints": error.square().sum(1),
        "joint_velocities": (joint_velocities - motion.joint_velocities[frame]).square().sum(1),
        "root": (base[:, :3] - motion.root[frame]).square().sum(1),
        "rotation": angle.square(),
    }


def start_probabilities(failures: Tensor, uniform_share: float) -> Tensor:
    """Return the probabilities [M, B] to start in each of B parts of a motion.

    A failure in part b counts for the parts b, b - 1, b - 2 with the weights 1, .8, .64. Without
    failures all parts are equally probable.

    Source: Liao et al. 2025, "BeyondMimic", section III-D. Differs: failures are forgotten.

    Args:
        failures: [M, B], numbers of failures in each part.
        uniform_share: share of starts that does not depend on failures, in [0, 1].
    """
    count = failures.shape[1]
    blame = torch.zeros_like(failures)
    for part in range(min(REACH, count)):
        blame[:, : count - part] += FADING**part * failures[:, part:]
    total = blame.sum(1, keepdim=True)
    even = torch.full_like(blame, 1.0 / count)
    share = torch.where(total > 0, blame / total.clamp(min=1e-12), even)
    return uniform_share * even + (1.0 - uniform_share) * share


def start_frames(probabilities: Tensor, uniform: Tensor, frames: int) -> Tensor:
    """Return frames [M] int64 in [0, frames - 2], drawn with probabilities [M, B] of equal parts.

    Args:
        probabilities: [M, B].
        uniform: [M, 2] in [0, 1).
        frames: F, frames of the motion.
    """
    count = probabilities.shape[1]
    part = (probabilities.cumsum(1) <= uniform[:, :1]).sum(1).clamp(max=count - 1)
    frame = ((part + uniform[:, 1]) * (frames / count)).long()
    return frame.clamp(max=frames - 2)  # the last frame has no next one


def count_failures(failures: Tensor, frame: Tensor, fail: Tensor, frames: int) -> Tensor:
    """Return the failures [M, B] after a step to `frame` [M] int64 with `fail` [M] bool."""
    part = (frame * failures.shape[1] // frames).clamp(max=failures.shape[1] - 1)
    added = torch.zeros_like(failures).scatter(1, part[:, None], fail[:, None].to(failures))
    return (1.0 - FORGETTING) * failures + added
