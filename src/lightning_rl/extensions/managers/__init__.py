"""Terms of tasks: rewards, terminations, observations, actions, events, curriculum, metrics."""

from lightning_rl.extend.envs import Event as Event
from lightning_rl.extensions.managers.actions import Actions as Actions
from lightning_rl.extensions.managers.actions import ActionTerm as ActionTerm
from lightning_rl.extensions.managers.actions import DeltaPosition as DeltaPosition
from lightning_rl.extensions.managers.actions import EndEffectorPose as EndEffectorPose
from lightning_rl.extensions.managers.actions import Force as Force
from lightning_rl.extensions.managers.actions import Position as Position
from lightning_rl.extensions.managers.actions import Velocity as Velocity
from lightning_rl.extensions.managers.managed_env import ManagedEnv as ManagedEnv
from lightning_rl.extensions.managers.managed_env import TermSettings as TermSettings
from lightning_rl.extensions.managers.term import Curriculum as Curriculum
from lightning_rl.extensions.managers.term import Metric as Metric
from lightning_rl.extensions.managers.term import Noise as Noise
from lightning_rl.extensions.managers.term import Observation as Observation
from lightning_rl.extensions.managers.term import Reward as Reward
from lightning_rl.extensions.managers.term import Termination as Termination
from lightning_rl.extensions.managers.view import EnvView as EnvView
from lightning_rl.extensions.managers.wrapper import TermWrapper as TermWrapper
