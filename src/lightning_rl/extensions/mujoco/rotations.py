"""Rotations by unit quaternions, with w first."""

import torch
from torch import Tensor


def rotate(quaternion: Tensor, vector: Tensor) -> Tensor:
    """Return vectors [..., 3], rotated by unit quaternions [..., 4].

    v' = v + w t + u x t with t = 2 u x v, for the quaternion (w, u) (Euler and Rodrigues).
    """
    w, u = quaternion[..., :1], quaternion[..., 1:]
    t = 2.0 * torch.linalg.cross(u, vector)
    rotated: Tensor = vector + w * t + torch.linalg.cross(u, t)
    return rotated


def inverse(quaternion: Tensor) -> Tensor:
    """Return the inverse [..., 4] of unit quaternions."""
    return torch.cat((quaternion[..., :1], -quaternion[..., 1:]), -1)


def product(first: Tensor, second: Tensor) -> Tensor:
    """Return the rotations [..., 4] by `second` [..., 4] and then by `first` [..., 4]."""
    w1, u1 = first[..., :1], first[..., 1:]
    w2, u2 = second[..., :1], second[..., 1:]
    w = w1 * w2 - (u1 * u2).sum(-1, keepdim=True)
    return torch.cat((w, w1 * u2 + w2 * u1 + torch.linalg.cross(u1, u2)), -1)


def heading(quaternion: Tensor) -> Tensor:
    """Return the yaw [...] in rad: the angle around z of the x axis of a rotated body."""
    w, x, y, z = quaternion.unbind(-1)
    return torch.atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))


def angle_between(first: Tensor, second: Tensor) -> Tensor:
    """Return the angle [...] in rad, in [0, pi], of the rotation from one quaternion to another."""
    turn = product(inverse(first), second)
    return 2.0 * torch.atan2(turn[..., 1:].norm(dim=-1), turn[..., 0].abs())
