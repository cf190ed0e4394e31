"""Envs: base class, action chunks, Gymnasium and EnvPool adapters, torch envs, tasks, probes."""

from lightning_rl.envs.chunks import ActionChunk as ActionChunk
from lightning_rl.envs.chunks import StepsActiveRows as StepsActiveRows
from lightning_rl.envs.gymnasium.adapter import GymnasiumEnv as GymnasiumEnv
from lightning_rl.envs.torch.torch_env import TorchEnv as TorchEnv
from lightning_rl.envs.vector_env import RestoreError as RestoreError
from lightning_rl.envs.vector_env import VectorEnv as VectorEnv
from lightning_rl.envs.wrapper import VectorEnvWrapper as VectorEnvWrapper
from lightning_rl.rollout.structured_actions import FlatAction as FlatAction
from lightning_rl.system.lazy import names_of

__getattr__ = names_of("lightning_rl")  # classes of extensions lay here in earlier versions
