"""Policies from directories that LeRobot wrote."""

from lightning_rl.policies.lerobot.policy import LeRobotPolicy as LeRobotPolicy
