"""The public names of the package and their modules: `__init__.py` reads this file."""

from lightning_rl.algorithms import (
    APG as APG,
)
from lightning_rl.algorithms import (
    AWAC as AWAC,
)
from lightning_rl.algorithms import (
    DQN as DQN,
)
from lightning_rl.algorithms import (
    GRPO as GRPO,
)
from lightning_rl.algorithms import (
    IQL as IQL,
)
from lightning_rl.algorithms import (
    PPO as PPO,
)
from lightning_rl.algorithms import (
    SAC as SAC,
)
from lightning_rl.algorithms import (
    SHAC as SHAC,
)
from lightning_rl.algorithms import (
    TD3 as TD3,
)
from lightning_rl.algorithms import (
    Algorithm as Algorithm,
)
from lightning_rl.algorithms import (
    BehaviorCloning as BehaviorCloning,
)
from lightning_rl.algorithms import (
    DiscreteSAC as DiscreteSAC,
)
from lightning_rl.algorithms import (
    GripperSAC as GripperSAC,
)
from lightning_rl.algorithms import (
    NoiseSAC as NoiseSAC,
)
from lightning_rl.algorithms import (
    OffPolicyAlgorithm as OffPolicyAlgorithm,
)
from lightning_rl.algorithms import (
    OnPolicyAlgorithm as OnPolicyAlgorithm,
)
from lightning_rl.algorithms import (
    RewardClassifier as RewardClassifier,
)
from lightning_rl.algorithms import (
    RewardClassifierWrapper as RewardClassifierWrapper,
)
from lightning_rl.algorithms import (
    ValueFit as ValueFit,
)
from lightning_rl.audit.check_env import (
    check_env as check_env,
)
from lightning_rl.audit.checking import (
    check as check,
)
from lightning_rl.buffers import (
    HindsightReplay as HindsightReplay,
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
    RayCollector as RayCollector,
)
from lightning_rl.collectors import (
    SyncCollector as SyncCollector,
)
from lightning_rl.datasets import (
    DatasetCollector as DatasetCollector,
)
from lightning_rl.datasets import (
    Episode as Episode,
)
from lightning_rl.datasets import (
    Episodes as Episodes,
)
from lightning_rl.datasets import (
    EpisodeWriter as EpisodeWriter,
)
from lightning_rl.datasets import (
    LabelSettings as LabelSettings,
)
from lightning_rl.datasets import (
    MixedReplay as MixedReplay,
)
from lightning_rl.datasets import (
    ReturnFramesEnv as ReturnFramesEnv,
)
from lightning_rl.datasets import (
    SuccessFramesEnv as SuccessFramesEnv,
)
from lightning_rl.datasets import (
    label_dataset as label_dataset,
)
from lightning_rl.datasets import (
    read_episodes as read_episodes,
)
from lightning_rl.datasets import (
    read_replay as read_replay,
)
from lightning_rl.datasets import (
    write_minari as write_minari,
)
from lightning_rl.datasets import (
    write_replay as write_replay,
)
from lightning_rl.deploy.loading import (
    load_policy as load_policy,
)
from lightning_rl.envs import (
    ActionChunk as ActionChunk,
)
from lightning_rl.envs import (
    ActionMask as ActionMask,
)
from lightning_rl.envs import (
    CartPole as CartPole,
)
from lightning_rl.envs import (
    CartPoleSwingUp as CartPoleSwingUp,
)
from lightning_rl.envs import (
    EncodedObservations as EncodedObservations,
)
from lightning_rl.envs import (
    EnvPoolEnv as EnvPoolEnv,
)
from lightning_rl.envs import (
    Gamepad as Gamepad,
)
from lightning_rl.envs import (
    GymnasiumEnv as GymnasiumEnv,
)
from lightning_rl.envs import (
    Intervention as Intervention,
)
from lightning_rl.envs import (
    InterventionDecision as InterventionDecision,
)
from lightning_rl.envs import (
    InterventionSource as InterventionSource,
)
from lightning_rl.envs import (
    Keyboard as Keyboard,
)
from lightning_rl.envs import (
    ManagedEnv as ManagedEnv,
)
from lightning_rl.envs import (
    MujocoEnv as MujocoEnv,
)
from lightning_rl.envs import (
    MujocoView as MujocoView,
)
from lightning_rl.envs import (
    PointMass as PointMass,
)
from lightning_rl.envs import (
    PushBlocks as PushBlocks,
)
from lightning_rl.envs import (
    PushCube as PushCube,
)
from lightning_rl.envs import (
    Quadruped as Quadruped,
)
from lightning_rl.envs import (
    Reach as Reach,
)
from lightning_rl.envs import (
    RslRlVecEnv as RslRlVecEnv,
)
from lightning_rl.envs import (
    ScriptedIntervention as ScriptedIntervention,
)
from lightning_rl.envs import (
    SpaceMouse as SpaceMouse,
)
from lightning_rl.envs import (
    TensorSimulator as TensorSimulator,
)
from lightning_rl.envs import (
    TermWrapper as TermWrapper,
)
from lightning_rl.envs import (
    TorchEnv as TorchEnv,
)
from lightning_rl.envs import (
    VectorEnv as VectorEnv,
)
from lightning_rl.envs import (
    VectorEnvWrapper as VectorEnvWrapper,
)
from lightning_rl.envs import (
    VLAObservation as VLAObservation,
)
from lightning_rl.extensions.fsdp.strategy import (
    FSDP2Strategy as FSDP2Strategy,
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
    Backbone as Backbone,
)
from lightning_rl.policies import (
    BackboneEncoder as BackboneEncoder,
)
from lightning_rl.policies import (
    ConditionedPolicy as ConditionedPolicy,
)
from lightning_rl.policies import (
    CustomVLA as CustomVLA,
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
    FlowSettings as FlowSettings,
)
from lightning_rl.policies import (
    FrozenEncoder as FrozenEncoder,
)
from lightning_rl.policies import (
    GripperActorCritic as GripperActorCritic,
)
from lightning_rl.policies import (
    ImpalaCNN as ImpalaCNN,
)
from lightning_rl.policies import (
    LeRobotPolicy as LeRobotPolicy,
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
    PerceptronBackbone as PerceptronBackbone,
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
    ResNet10 as ResNet10,
)
from lightning_rl.policies import (
    ResNet18 as ResNet18,
)
from lightning_rl.policies import (
    SlowPolicy as SlowPolicy,
)
from lightning_rl.policies import (
    SpatialEmbedding as SpatialEmbedding,
)
from lightning_rl.policies import (
    SpatialSoftmaxCNN as SpatialSoftmaxCNN,
)
from lightning_rl.policies import (
    SquashedActorCritic as SquashedActorCritic,
)
from lightning_rl.policies import (
    TinyVLA as TinyVLA,
)
from lightning_rl.policies import (
    TransformersBackbone as TransformersBackbone,
)
from lightning_rl.policies import (
    ValueAtoms as ValueAtoms,
)
from lightning_rl.policies import (
    VLAModelInterface as VLAModelInterface,
)
from lightning_rl.policies import (
    VLAPolicy as VLAPolicy,
)
from lightning_rl.policies import (
    load_vla_model as load_vla_model,
)
from lightning_rl.policies.residual import (
    ResidualActorCritic as ResidualActorCritic,
)
from lightning_rl.policies.steering import (
    NoiseActorCritic as NoiseActorCritic,
)
from lightning_rl.policies.steering import (
    NoisePolicy as NoisePolicy,
)
from lightning_rl.policies.steering import (
    SteeredActorCritic as SteeredActorCritic,
)
from lightning_rl.robots.env import (
    RobotEnv as RobotEnv,
)
from lightning_rl.robots.teleoperator import (
    Teleoperator as Teleoperator,
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
