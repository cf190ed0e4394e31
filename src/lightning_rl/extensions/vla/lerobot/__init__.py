"""Policies from directories that LeRobot wrote."""

from lightning_rl.extensions.vla.lerobot.policy import LeRobotPolicy as LeRobotPolicy
