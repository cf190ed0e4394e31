"""Settings behind `**kwargs`, written by scripts/write_kwargs.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict
from typing import Unpack as Unpack

from lightning_rl.algorithms.off_policy_correction import Correction
from lightning_rl.algorithms.sequence_sampler import SequenceLength
from lightning_rl.buffers.columns import Place
from lightning_rl.compiled.choice import Setting
from lightning_rl.extend.policies import PolicyFactory
from lightning_rl.extensions.managers import Event
from lightning_rl.extensions.managers.actions import ActionTerm
from lightning_rl.extensions.managers.term import (
    Curriculum,
    Metric,
    Observation,
    Reward,
    Termination,
)
from lightning_rl.extensions.mujoco.env import Backend
from lightning_rl.extensions.teleoperation.devices import Neutral
from lightning_rl.extensions.vla.real_time import RealTime
from lightning_rl.optim.update import OptimizerFactory
from lightning_rl.policies.distributions.gaussians import LogStd
from lightning_rl.policies.networks.encoders import EncoderFactory
from lightning_rl.policies.networks.memory import MemoryFactory
from lightning_rl.policies.networks.perceptron import Initialization, Network, Normalization
from lightning_rl.policies.networks.q_networks import CriticNormalization, ValueAtoms

class DatasetActorCriticKwargs(TypedDict, total=False):
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class ActorCriticKwargs(TypedDict, total=False):
    squash: bool
    log_std: LogStd
    log_std_init: float
    log_std_bounds: tuple[float, float]
    rescale_action: bool
    noise_correlation: float
    activation: str
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    initialization: Initialization
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class ActorOnlyKwargs(TypedDict, total=False):
    activation: str
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    initialization: Initialization
    encoder: EncoderFactory | None
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class BehaviorCloningKwargs(TypedDict, total=False):
    n_epochs: int
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class CuriousPPOKwargs(TypedDict, total=False):
    gae_lambda: float
    clip_coef: float
    clip_value_loss: bool
    normalize_advantage: Literal["minibatch", "rollout", "off", False]
    ent_coef: float
    vf_coef: float
    critic_warmup_iterations: int
    lr_schedule: Literal["constant", "linear", "adaptive"]
    desired_kl: float
    gamma: float
    normalize_reward: bool
    target_kl: float | None
    off_policy_correction: Correction
    behavior_weight_cap: float
    n_epochs: int
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class CuriousSACKwargs(TypedDict, total=False):
    target_entropy: float | None
    alpha_learning_rate: float | None
    init_alpha: float
    learn_alpha: bool
    entropy_in_target: bool
    num_target_critics: int | None
    critic_learning_rate: float | None
    policy_delay: int
    normalize_reward: bool
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    random_env_steps: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class DQNKwargs(TypedDict, total=False):
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    random_env_steps: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class DeterministicActorCriticKwargs(TypedDict, total=False):
    activation: str
    critic_hidden_sizes: Sequence[int] | None
    critic_activation: str | None
    num_critics: int
    critic_normalization: CriticNormalization
    value_atoms: ValueAtoms | None
    initialization: Initialization
    encoder: EncoderFactory | None
    critic_encoder: EncoderFactory | None
    critic_keys: Sequence[str] | None
    share_encoder: bool
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class DiscreteActorCriticKwargs(TypedDict, total=False):
    activation: str
    critic_hidden_sizes: Sequence[int] | None
    critic_activation: str | None
    num_critics: int
    initialization: Initialization
    encoder: EncoderFactory | None
    critic_encoder: EncoderFactory | None
    critic_keys: Sequence[str] | None
    share_encoder: bool
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class DiscreteSACKwargs(TypedDict, total=False):
    alpha_learning_rate: float | None
    init_alpha: float
    learn_alpha: bool
    entropy_in_target: bool
    num_target_critics: int | None
    critic_learning_rate: float | None
    policy_delay: int
    normalize_reward: bool
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    random_env_steps: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class FQLKwargs(TypedDict, total=False):
    random_env_steps: int
    critic_learning_rate: float | None
    policy_delay: int
    normalize_reward: bool
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class FlowActorCriticKwargs(TypedDict, total=False):
    critic_hidden_sizes: Sequence[int] | None
    critic_activation: str | None
    num_critics: int
    value_atoms: ValueAtoms | None
    initialization: Initialization
    encoder: EncoderFactory | None
    critic_encoder: EncoderFactory | None
    critic_keys: Sequence[str] | None
    share_encoder: bool
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class GRPOKwargs(TypedDict, total=False):
    lr_schedule: Literal["constant", "linear", "adaptive"]
    desired_kl: float
    gamma: float
    normalize_reward: bool
    target_kl: float | None
    off_policy_correction: Correction
    behavior_weight_cap: float
    n_epochs: int
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class GamepadKwargs(TypedDict, total=False):
    speed: float
    neutral: Neutral

class GaussianResidualActorCriticKwargs(TypedDict, total=False):
    critic_hidden_sizes: Sequence[int] | None
    encoder: EncoderFactory | None
    critic_encoder: EncoderFactory | None
    critic_keys: Sequence[str] | None
    share_encoder: bool
    log_std: LogStd
    log_std_bounds: tuple[float, float]
    noise_correlation: float
    activation: str
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    initialization: Initialization
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class GripperActorCriticKwargs(TypedDict, total=False):
    log_std_bounds: tuple[float, float]
    noise_correlation: float
    activation: str
    critic_hidden_sizes: Sequence[int] | None
    critic_activation: str | None
    num_critics: int
    value_atoms: ValueAtoms | None
    initialization: Initialization
    encoder: EncoderFactory | None
    critic_encoder: EncoderFactory | None
    critic_keys: Sequence[str] | None
    share_encoder: bool
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class GripperSACKwargs(TypedDict, total=False):
    target_entropy: float | None
    alpha_learning_rate: float | None
    init_alpha: float
    learn_alpha: bool
    entropy_in_target: bool
    num_target_critics: int | None
    critic_learning_rate: float | None
    policy_delay: int
    normalize_reward: bool
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    random_env_steps: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class HindsightReplayKwargs(TypedDict, total=False):
    directory: Path
    capacity: int
    storage: Place

class IQLKwargs(TypedDict, total=False):
    batch_size: int
    gamma: float
    n_epochs: int
    advantage_scale: float
    max_weight: float
    gae_lambda: float | None
    tau: float
    actions_within: float
    max_grad_norm: float | None
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class ImpalaCNNKwargs(TypedDict, total=False):
    normalize: bool
    crop: tuple[int, int, int, int] | None
    resize: tuple[int, int] | None

class KeyboardKwargs(TypedDict, total=False):
    speed: float
    neutral: Neutral

class LeRobotPolicyKwargs(TypedDict, total=False):
    value_hidden_size: int
    value_lr_scale: float
    detach_value: bool
    micro_batch_size: int | None
    ignore_keys: Sequence[str]
    real_time: RealTime | None

class LeggedRobotKwargs(TypedDict, total=False):
    keyframe: str | None
    rewards: dict[str, float | Reward | None] | None
    terminations: dict[str, Termination | None] | None
    metrics: dict[str, Metric | None] | None
    events: dict[str, Event | None] | None
    curriculum: dict[str, Curriculum | None] | None
    rewards_per_second: bool
    backend: Backend
    num_threads: int
    max_contacts: int | None
    max_constraints: int | None
    camera: str | None
    device: str

class MotionRobotKwargs(TypedDict, total=False):
    timestep: float
    integrator: Literal["implicitfast", "euler"]
    delay: int
    max_episode_steps: int
    keyframe: str | None
    rewards: dict[str, float | Reward | None] | None
    terminations: dict[str, Termination | None] | None
    metrics: dict[str, Metric | None] | None
    curriculum: dict[str, Curriculum | None] | None
    rewards_per_second: bool
    backend: Backend
    num_threads: int
    max_contacts: int | None
    max_constraints: int | None
    camera: str | None
    device: str

class NatureCNNKwargs(TypedDict, total=False):
    normalize: bool
    crop: tuple[int, int, int, int] | None
    resize: tuple[int, int] | None

class NoiseSACKwargs(TypedDict, total=False):
    target_entropy: float | None
    alpha_learning_rate: float | None
    init_alpha: float
    learn_alpha: bool
    entropy_in_target: bool
    num_target_critics: int | None
    critic_learning_rate: float | None
    policy_delay: int
    normalize_reward: bool
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    random_env_steps: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class OffPolicyAlgorithmKwargs(TypedDict, total=False):
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class OnPolicyAlgorithmKwargs(TypedDict, total=False):
    n_epochs: int
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class PPOKwargs(TypedDict, total=False):
    lr_schedule: Literal["constant", "linear", "adaptive"]
    desired_kl: float
    gamma: float
    normalize_reward: bool
    target_kl: float | None
    off_policy_correction: Correction
    behavior_weight_cap: float
    n_epochs: int
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class PushBlocksKwargs(TypedDict, total=False):
    action: ActionTerm | None
    rewards: dict[str, float | Reward | None] | None
    max_episode_steps: int | None
    device: str
    terminations: dict[str, Termination | None] | None
    metrics: dict[str, Metric | None] | None
    observations: dict[str, dict[str, Observation]] | None
    events: dict[str, Event | None] | None
    curriculum: dict[str, Curriculum | None] | None
    rewards_per_second: bool

class QActorCriticKwargs(TypedDict, total=False):
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class QAlgorithmKwargs(TypedDict, total=False):
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    random_env_steps: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class QCKwargs(TypedDict, total=False):
    random_env_steps: int
    critic_learning_rate: float | None
    policy_delay: int
    normalize_reward: bool
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class QPolicyKwargs(TypedDict, total=False):
    normalize_observation: bool
    encoder: EncoderFactory | None
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class QuadrupedKwargs(TypedDict, total=False):
    substeps: int
    keyframe: str | None
    rewards: dict[str, float | Reward | None] | None
    terminations: dict[str, Termination | None] | None
    metrics: dict[str, Metric | None] | None
    observations: dict[str, dict[str, Observation]] | None
    events: dict[str, Event | None] | None
    curriculum: dict[str, Curriculum | None] | None
    rewards_per_second: bool
    backend: Backend
    num_threads: int
    max_contacts: int | None
    max_constraints: int | None
    camera: str | None
    device: str

class ReachKwargs(TypedDict, total=False):
    substeps: int
    keyframe: str | None
    rewards: dict[str, float | Reward | None] | None
    terminations: dict[str, Termination | None] | None
    metrics: dict[str, Metric | None] | None
    observations: dict[str, dict[str, Observation]] | None
    events: dict[str, Event | None] | None
    curriculum: dict[str, Curriculum | None] | None
    rewards_per_second: bool
    backend: Backend
    num_threads: int
    max_contacts: int | None
    max_constraints: int | None
    device: str

class ResNetEncoderKwargs(TypedDict, total=False):
    normalize: bool
    crop: tuple[int, int, int, int] | None
    resize: tuple[int, int] | None

class ResidualActorCriticKwargs(TypedDict, total=False):
    log_std_bounds: tuple[float, float]
    noise_correlation: float
    activation: str
    critic_hidden_sizes: Sequence[int] | None
    critic_activation: str | None
    num_critics: int
    critic_normalization: CriticNormalization
    value_atoms: ValueAtoms | None
    initialization: Initialization
    encoder: EncoderFactory | None
    critic_encoder: EncoderFactory | None
    critic_keys: Sequence[str] | None
    share_encoder: bool
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class RewardClassifierKwargs(TypedDict, total=False):
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class RolloutAlgorithmKwargs(TypedDict, total=False):
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class SACKwargs(TypedDict, total=False):
    alpha_learning_rate: float | None
    init_alpha: float
    learn_alpha: bool
    entropy_in_target: bool
    num_target_critics: int | None
    critic_learning_rate: float | None
    policy_delay: int
    normalize_reward: bool
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    random_env_steps: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class SHACKwargs(TypedDict, total=False):
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    max_grad_norm: float | None
    max_nonfinite_steps: int
    gamma: float

class SpaceMouseKwargs(TypedDict, total=False):
    speed: float
    neutral: Neutral

class SpatialSoftmaxCNNKwargs(TypedDict, total=False):
    normalize: bool
    crop: tuple[int, int, int, int] | None
    resize: tuple[int, int] | None

class SquashedActorCriticKwargs(TypedDict, total=False):
    activation: str
    critic_hidden_sizes: Sequence[int] | None
    critic_activation: str | None
    num_critics: int
    critic_normalization: CriticNormalization
    value_atoms: ValueAtoms | None
    initialization: Initialization
    encoder: EncoderFactory | None
    critic_encoder: EncoderFactory | None
    critic_keys: Sequence[str] | None
    share_encoder: bool
    normalize_observation: bool
    actor_normalization: Normalization
    network: Network
    memory: MemoryFactory | None
    actor_keys: Sequence[str] | None
    ignore_keys: Sequence[str]

class SteeredActorCriticKwargs(TypedDict, total=False):
    checkpoint: str | None
    bound: float
    base: PolicyFactory | None
    hidden_sizes: Sequence[int]
    critic_hidden_sizes: Sequence[int] | None
    activation: str
    num_critics: int
    trust_code: bool

class StylePPOKwargs(TypedDict, total=False):
    gae_lambda: float
    clip_coef: float
    clip_value_loss: bool
    normalize_advantage: Literal["minibatch", "rollout", "off", False]
    ent_coef: float
    vf_coef: float
    critic_warmup_iterations: int
    lr_schedule: Literal["constant", "linear", "adaptive"]
    desired_kl: float
    gamma: float
    normalize_reward: bool
    target_kl: float | None
    off_policy_correction: Correction
    behavior_weight_cap: float
    n_epochs: int
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class SymmetricPPOKwargs(TypedDict, total=False):
    gae_lambda: float
    clip_coef: float
    clip_value_loss: bool
    normalize_advantage: Literal["minibatch", "rollout", "off", False]
    ent_coef: float
    vf_coef: float
    critic_warmup_iterations: int
    lr_schedule: Literal["constant", "linear", "adaptive"]
    desired_kl: float
    gamma: float
    normalize_reward: bool
    target_kl: float | None
    off_policy_correction: Correction
    behavior_weight_cap: float
    n_epochs: int
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class TD3Kwargs(TypedDict, total=False):
    critic_learning_rate: float | None
    normalize_reward: bool
    batch_size: int
    gamma: float
    n_steps: int
    tau: float | None
    updates_per_env_step: float
    publish_every_updates: int
    random_env_steps: int
    learning_starts: int | None
    max_grad_norm: float | None
    random_shift: int
    sequence_length: int | None
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting

class TransformersBackboneKwargs(TypedDict, total=False):
    config: Mapping[str, Any] | None
    trust_code: bool
    strict: bool
    dtype: str
    lora: Mapping[str, Any] | None
    adapter: str | None
    freeze: Sequence[str]
    gradient_checkpointing: bool
    allow_download: bool
    meta: bool

class VLAPolicyKwargs(TypedDict, total=False):
    value_hidden_size: int
    value_lr_scale: float
    detach_value: bool
    micro_batch_size: int | None
    ignore_keys: Sequence[str]
    real_time: RealTime | None

class ValueFitKwargs(TypedDict, total=False):
    batch_size: int
    sequence_length: SequenceLength
    burn_in: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear"]
    max_grad_norm: float | None
    optimizer: OptimizerFactory | None
    max_nonfinite_steps: int
    compile: Setting
