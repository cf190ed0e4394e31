"""The public names of the package and their modules: `__init__.py` reads this file."""

from lightning_rl.algorithms import (
    DQN as DQN,
)
from lightning_rl.algorithms import (
    GRPO as GRPO,
)
from lightning_rl.algorithms import (
    PPO as PPO,
)
from lightning_rl.algorithms import (
    SAC as SAC,
)
from lightning_rl.algorithms import (
    TD3 as TD3,
)
from lightning_rl.algorithms import (
    Algorithm as Algorithm,
)
from lightning_rl.algorithms import (
    DiscreteSAC as DiscreteSAC,
)
from lightning_rl.algorithms import (
    OffPolicyAlgorithm as OffPolicyAlgorithm,
)
from lightning_rl.algorithms import (
    OnPolicyAlgorithm as OnPolicyAlgorithm,
)
from lightning_rl.algorithms import (
    QAlgorithm as QAlgorithm,
)
from lightning_rl.algorithms import (
    RolloutAlgorithm as RolloutAlgorithm,
)
from lightning_rl.buffers import (
    Replay as Replay,
)
from lightning_rl.buffers import (
    ReplayBuffer as ReplayBuffer,
)
from lightning_rl.collectors import (
    AsyncCollector as AsyncCollector,
)
from lightning_rl.collectors import (
    Collector as Collector,
)
from lightning_rl.collectors import (
    CollectorContext as CollectorContext,
)
from lightning_rl.collectors import (
    SyncCollector as SyncCollector,
)
from lightning_rl.deploy.loading import (
    load_policy as load_policy,
)
from lightning_rl.envs import (
    ActionChunk as ActionChunk,
)
from lightning_rl.envs import (
    GymnasiumEnv as GymnasiumEnv,
)
from lightning_rl.envs import (
    TorchEnv as TorchEnv,
)
from lightning_rl.envs import (
    VectorEnv as VectorEnv,
)
from lightning_rl.envs.wrapper import VectorEnvWrapper as VectorEnvWrapper
from lightning_rl.extensions.algorithms.apg import APG as APG
from lightning_rl.extensions.algorithms.behavior_cloning import BehaviorCloning as BehaviorCloning
from lightning_rl.extensions.algorithms.curiosity import CuriousPPO as CuriousPPO
from lightning_rl.extensions.algorithms.curiosity import CuriousSAC as CuriousSAC
from lightning_rl.extensions.algorithms.curiosity import (
    RandomNetworkDistillation as RandomNetworkDistillation,
)
from lightning_rl.extensions.algorithms.flow_actor import FlowActorCritic as FlowActorCritic
from lightning_rl.extensions.algorithms.fql import FQL as FQL
from lightning_rl.extensions.algorithms.fql import QC as QC
from lightning_rl.extensions.algorithms.gripper import GripperActorCritic as GripperActorCritic
from lightning_rl.extensions.algorithms.gripper_sac import GripperSAC as GripperSAC
from lightning_rl.extensions.algorithms.hindsight import HindsightReplay as HindsightReplay
from lightning_rl.extensions.algorithms.iql import AWAC as AWAC
from lightning_rl.extensions.algorithms.iql import IQL as IQL
from lightning_rl.extensions.algorithms.noise_sac import NoiseSAC as NoiseSAC
from lightning_rl.extensions.algorithms.residual import (
    GaussianResidualActorCritic as GaussianResidualActorCritic,
)
from lightning_rl.extensions.algorithms.residual import (
    ResidualActorCritic as ResidualActorCritic,
)
from lightning_rl.extensions.algorithms.reward_classifier import (
    RewardClassifier as RewardClassifier,
)
from lightning_rl.extensions.algorithms.reward_classifier import (
    RewardClassifierWrapper as RewardClassifierWrapper,
)
from lightning_rl.extensions.algorithms.shac import SHAC as SHAC
from lightning_rl.extensions.algorithms.steering import (
    NoiseActorCritic as NoiseActorCritic,
)
from lightning_rl.extensions.algorithms.steering import (
    NoisePolicy as NoisePolicy,
)
from lightning_rl.extensions.algorithms.steering import (
    SteeredActorCritic as SteeredActorCritic,
)
from lightning_rl.extensions.algorithms.symmetry import SymmetricPPO as SymmetricPPO
from lightning_rl.extensions.checks.check_env import (
    check_env as check_env,
)
from lightning_rl.extensions.checks.checking import (
    check as check,
)
from lightning_rl.extensions.datasets.dataset_statistics import (
    DatasetStatistics as DatasetStatistics,
)
from lightning_rl.extensions.datasets.demonstrations import DatasetCollector as DatasetCollector
from lightning_rl.extensions.datasets.episode import Episode as Episode
from lightning_rl.extensions.datasets.episode import Episodes as Episodes
from lightning_rl.extensions.datasets.frames import ReturnFramesEnv as ReturnFramesEnv
from lightning_rl.extensions.datasets.frames import SuccessFramesEnv as SuccessFramesEnv
from lightning_rl.extensions.datasets.label import LabelSettings as LabelSettings
from lightning_rl.extensions.datasets.label import label_dataset as label_dataset
from lightning_rl.extensions.datasets.minari import write_minari as write_minari
from lightning_rl.extensions.datasets.mixed_replay import MixedReplay as MixedReplay
from lightning_rl.extensions.datasets.reader import read_episodes as read_episodes
from lightning_rl.extensions.datasets.replays import read_replay as read_replay
from lightning_rl.extensions.datasets.replays import write_replay as write_replay
from lightning_rl.extensions.datasets.writer import EpisodeWriter as EpisodeWriter
from lightning_rl.extensions.fsdp.strategy import (
    FSDP2Strategy as FSDP2Strategy,
)
from lightning_rl.extensions.libero.env import LiberoEnv as LiberoEnv
from lightning_rl.extensions.managers.managed_env import ManagedEnv as ManagedEnv
from lightning_rl.extensions.managers.wrapper import TermWrapper as TermWrapper
from lightning_rl.extensions.motions.robot import MotionRobot as MotionRobot
from lightning_rl.extensions.motions.style import StylePPO as StylePPO
from lightning_rl.extensions.mujoco.env import MujocoEnv as MujocoEnv
from lightning_rl.extensions.mujoco.env import MujocoView as MujocoView
from lightning_rl.extensions.mujoco.quadruped import Quadruped as Quadruped
from lightning_rl.extensions.mujoco.reach import Reach as Reach
from lightning_rl.extensions.recap.conditioned import ConditionedPolicy as ConditionedPolicy
from lightning_rl.extensions.recap.value_fit import ValueFit as ValueFit
from lightning_rl.extensions.remote.ray import RayCollector as RayCollector
from lightning_rl.extensions.robots.env import (
    RobotEnv as RobotEnv,
)
from lightning_rl.extensions.robots.teleoperator import (
    Teleoperator as Teleoperator,
)
from lightning_rl.extensions.simulators.envpool_env import EnvPoolEnv as EnvPoolEnv
from lightning_rl.extensions.simulators.rsl_rl_env import RslRlVecEnv as RslRlVecEnv
from lightning_rl.extensions.simulators.tensor_simulator import TensorSimulator as TensorSimulator
from lightning_rl.extensions.tasks.cart_pole import CartPole as CartPole
from lightning_rl.extensions.tasks.gym_hil import (
    PickCube as PickCube,
)
from lightning_rl.extensions.tasks.gym_hil import (
    ScriptedHelp as ScriptedHelp,
)
from lightning_rl.extensions.tasks.point_mass import PointMass as PointMass
from lightning_rl.extensions.tasks.probes import (
    FiveDoors as FiveDoors,
)
from lightning_rl.extensions.tasks.probes import (
    TwoDoors as TwoDoors,
)
from lightning_rl.extensions.tasks.push_blocks import PushBlocks as PushBlocks
from lightning_rl.extensions.tasks.push_cube import PushCube as PushCube
from lightning_rl.extensions.tasks.swing_up import CartPoleSwingUp as CartPoleSwingUp
from lightning_rl.extensions.teleoperation.devices import Gamepad as Gamepad
from lightning_rl.extensions.teleoperation.devices import Keyboard as Keyboard
from lightning_rl.extensions.teleoperation.devices import SpaceMouse as SpaceMouse
from lightning_rl.extensions.teleoperation.intervention import Intervention as Intervention
from lightning_rl.extensions.teleoperation.intervention import (
    InterventionDecision as InterventionDecision,
)
from lightning_rl.extensions.teleoperation.intervention import (
    InterventionSource as InterventionSource,
)
from lightning_rl.extensions.teleoperation.intervention import (
    ScriptedIntervention as ScriptedIntervention,
)
from lightning_rl.extensions.transfer.fixed import FixedPolicy as FixedPolicy
from lightning_rl.extensions.transfer.legged import LeggedRobot as LeggedRobot
from lightning_rl.extensions.transfer.onnx_policy import OnnxPolicy as OnnxPolicy
from lightning_rl.extensions.vla.backbone import Backbone as Backbone
from lightning_rl.extensions.vla.custom import CustomVLA as CustomVLA
from lightning_rl.extensions.vla.encoder import BackboneEncoder as BackboneEncoder
from lightning_rl.extensions.vla.flow import FlowSettings as FlowSettings
from lightning_rl.extensions.vla.frozen_encoder import FrozenEncoder as FrozenEncoder
from lightning_rl.extensions.vla.heads import ActionHead as ActionHead
from lightning_rl.extensions.vla.interface import VLAModelInterface as VLAModelInterface
from lightning_rl.extensions.vla.lerobot.policy import LeRobotPolicy as LeRobotPolicy
from lightning_rl.extensions.vla.loading import load_vla_model as load_vla_model
from lightning_rl.extensions.vla.policy import VLAPolicy as VLAPolicy
from lightning_rl.extensions.vla.real_time import RealTime as RealTime
from lightning_rl.extensions.vla.resnet import ResNet10 as ResNet10
from lightning_rl.extensions.vla.resnet import ResNet18 as ResNet18
from lightning_rl.extensions.vla.resnet import SpatialEmbedding as SpatialEmbedding
from lightning_rl.extensions.vla.tiny import PerceptronBackbone as PerceptronBackbone
from lightning_rl.extensions.vla.tiny import TinyVLA as TinyVLA
from lightning_rl.extensions.vla.transformers_backbone import (
    TransformersBackbone as TransformersBackbone,
)
from lightning_rl.extensions.vla.vla_observation import VLAObservation as VLAObservation
from lightning_rl.extensions.wrappers.action_mask import ActionMask as ActionMask
from lightning_rl.extensions.wrappers.encoded import EncodedObservations as EncodedObservations
from lightning_rl.extensions.wrappers.hide import (
    PartialObservation as PartialObservation,
)
from lightning_rl.extensions.wrappers.penalty import (
    GripperPenalty as GripperPenalty,
)
from lightning_rl.extensions.wrappers.penalty import (
    PenaltyTerms as PenaltyTerms,
)
from lightning_rl.policies import (
    GRU as GRU,
)
from lightning_rl.policies import (
    LSTM as LSTM,
)
from lightning_rl.policies import (
    ActorCritic as ActorCritic,
)
from lightning_rl.policies import (
    ActorOnly as ActorOnly,
)
from lightning_rl.policies import (
    DeterministicActorCritic as DeterministicActorCritic,
)
from lightning_rl.policies import (
    DictEncoder as DictEncoder,
)
from lightning_rl.policies import (
    DiscreteActorCritic as DiscreteActorCritic,
)
from lightning_rl.policies import (
    Encoder as Encoder,
)
from lightning_rl.policies import (
    ImpalaCNN as ImpalaCNN,
)
from lightning_rl.policies import (
    Memory as Memory,
)
from lightning_rl.policies import (
    NatureCNN as NatureCNN,
)
from lightning_rl.policies import (
    OneHot as OneHot,
)
from lightning_rl.policies import (
    PerceptronEncoder as PerceptronEncoder,
)
from lightning_rl.policies import (
    Policy as Policy,
)
from lightning_rl.policies import (
    PolicyWrapper as PolicyWrapper,
)
from lightning_rl.policies import (
    QActorCritic as QActorCritic,
)
from lightning_rl.policies import (
    QPolicy as QPolicy,
)
from lightning_rl.policies import (
    SlowPolicy as SlowPolicy,
)
from lightning_rl.policies import (
    SpatialSoftmaxCNN as SpatialSoftmaxCNN,
)
from lightning_rl.policies import (
    SquashedActorCritic as SquashedActorCritic,
)
from lightning_rl.policies import (
    ValueAtoms as ValueAtoms,
)
from lightning_rl.system.errors import (
    ConfigurationError as ConfigurationError,
)
from lightning_rl.training.data import (
    RLDataModule as RLDataModule,
)
from lightning_rl.training.trainer import (
    RLTrainer as RLTrainer,
)

__all__: list[str]
