"""Policies of lightning_rl for LeRobot's commands. LeRobot imports this package by its name."""

from .configuration_lightning_rl import LightningRLConfig

__all__ = ["LightningRLConfig"]
