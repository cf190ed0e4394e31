"""The tasks of LIBERO and LIBERO-PRO."""

from lightning_rl.extensions.libero.env import LiberoEnv as LiberoEnv
