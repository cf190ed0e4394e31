"""Parts of envs: the types of their steps, what they report, random numbers."""

from lightning_rl.envs.events import Event as Event
from lightning_rl.envs.events import Term as Term
from lightning_rl.envs.factories import EnvFactory as EnvFactory
from lightning_rl.envs.factories import env_factory as env_factory
from lightning_rl.envs.factories import make_env as make_env
from lightning_rl.envs.gymnasium.mujoco_bindings import import_mujoco as import_mujoco
from lightning_rl.envs.infos import InfoReader as InfoReader
from lightning_rl.envs.infos import report_intervention as report_intervention
from lightning_rl.envs.other_libraries import replacement as replacement
from lightning_rl.envs.pictures import one_picture as one_picture
from lightning_rl.envs.refusals import refuse_missing_end as refuse_missing_end
from lightning_rl.envs.step_results import bounds_of as bounds_of
from lightning_rl.envs.step_results import check_vector as check_vector
from lightning_rl.envs.torch.counter_random import key_of as key_of
from lightning_rl.envs.torch.counter_random import uniforms as uniforms
from lightning_rl.envs.torch.torch_env import Transition as Transition
from lightning_rl.envs.vector_env import Observation as Observation
from lightning_rl.envs.vector_env import RestoreError as RestoreError
from lightning_rl.envs.vector_env import Seed as Seed
from lightning_rl.envs.watch import EnvTimeoutError as EnvTimeoutError
from lightning_rl.envs.watch import EnvWatch as EnvWatch

__all__: list[str]
