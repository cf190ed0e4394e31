"""Names that a checkpoint may use without `--trust_code true`. A lookup imports nothing."""

from importlib import import_module
from typing import Any, NamedTuple

import gymnasium

OURS = "lightning_rl"

PACKAGES = (OURS, "torch.optim", "gymnasium.wrappers")
"""Packages of these classes."""

ENV_PACKAGES = (OURS, "gymnasium", "gym_hil")
"""Packages whose env ids a checkpoint may name."""


class AllowedClasses(NamedTuple):
    """The classes for a key: name of the base class, for messages, and shortest import paths."""

    kind: str
    names: frozenset[str]


def _in(package: str, names: str) -> str:
    return " ".join(f"{package}.{name}" for name in names.split())


_ENCODERS = (
    "Encoder",
    "BackboneEncoder DictEncoder FrozenEncoder ImpalaCNN NatureCNN OneHot PerceptronEncoder "
    "ResNet10 ResNet18 SpatialEmbedding SpatialSoftmaxCNN",
)
_PROBES = "ActionProbe FiveDoors TimeLimitProbe TwoDoors ValueProbe"
_ENVS = (
    "VectorEnv",
    "ActionChunk CartPole CartPoleSwingUp EncodedObservations EnvPoolEnv GymnasiumEnv "
    "LabelledFrames MujocoEnv PointMass PushBlocks PushCube Quadruped Reach ReturnFrames "
    "TensorSimulator WithTerms "
    f"{_in(f'{OURS}.envs', _PROBES)}",
)
_REPLAYS = ("Replay", "HindsightReplay MixedReplay ReplayBuffer")
_MANAGERS = f"{OURS}.envs.managers"
_ACTIONS = "DeltaPosition Force Position Velocity"
_TERMS = (
    "action_size by_success entry is_failure is_success is_terminated measured one out_of_range "
    "over_steps own randomize"
)
_OPTIMIZERS = (
    "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS Muon NAdam RAdam RMSprop Rprop SGD "
    "SparseAdam"
)
_WRAPPERS = (
    "AddRenderObservation AddWhiteNoise AtariPreprocessing Autoreset ClipAction ClipReward "
    "DelayObservation DiscretizeAction DiscretizeObservation DtypeObservation FilterObservation "
    "FlattenObservation FrameStackObservation GrayscaleObservation "
    "MaxAndSkipObservation NormalizeObservation NormalizeReward ObstructView "
    "OrderEnforcing PassiveEnvChecker RecordEpisodeStatistics RenderCollection RepeatAction "
    "RescaleAction RescaleObservation ReshapeObservation ResizeObservation StickyAction "
    "TimeAwareObservation TimeLimit TransformAction TransformObservation TransformReward"
)
_POLICIES = (
    "Policy",
    "ActorCritic ActorOnly ConditionedPolicy CustomVLA DeterministicActorCritic "
    "DiscreteActorCritic GripperActorCritic LeRobotPolicy NoiseActorCritic NoisePolicy QPolicy "
    "ResidualActorCritic SlowPolicy SquashedActorCritic SteeredActorCritic VLAPolicy",
)
_TABLE = {
    "model": (
        "Algorithm",
        "APG AWAC BehaviorCloning DQN DiscreteSAC GRPO GripperSAC IQL NoiseSAC PPO "
        "RewardClassifier SAC SHAC TD3 ValueFit",
    ),
    "policy": _POLICIES,
    "backbone": ("Backbone", "PerceptronBackbone TinyVLA TransformersBackbone"),
    "base": _POLICIES,
    "encoder": _ENCODERS,
    "critic_encoder": _ENCODERS,
    "memory": ("Memory", "GRU LSTM"),
    "env": _ENVS,
    "eval_env": _ENVS,
    "action": ("ActionTerm", _in(_MANAGERS, _ACTIONS)),
    "term": ("term", _in(f"{_MANAGERS}.functions", _TERMS)),
    "collector": ("Collector", "AsyncCollector Demonstrations RayCollector SyncCollector"),
    "replay": _REPLAYS,
    "online": _REPLAYS,
    "offline": _REPLAYS,
    "optimizer": ("Optimizer", _in("torch.optim", _OPTIMIZERS)),
    "wrappers": (
        "Wrapper",
        "ActionMask ClassifiedReward Intervention VLAObservation "
        f"{_in(f'{OURS}.envs', 'GripperPenalty HideEntries PenaltyTerms people.gym_hil.PickCube')} "
        f"{_in('gymnasium.wrappers', _WRAPPERS)}",
    ),
    "source": (
        "InterventionSource",
        f"Gamepad Keyboard Script SpaceMouse {OURS}.envs.people.gym_hil.ScriptedHelp",
    ),
}

CLASSES = {
    key: AllowedClasses(kind, frozenset(n if "." in n else f"{OURS}.{n}" for n in names.split()))
    for key, (kind, names) in _TABLE.items()
}
"""Classes that a checkpoint may name, by the key of the setting; other keys take no class.

No class here writes files to a path from its arguments: a test forges each argument."""

NAMES = frozenset[str]().union(*(allowed.names for allowed in CLASSES.values()))

REFUSED = {
    "RecordVideo": "writes files to paths in its settings",
    "HumanRendering": "opens a window",
    "ArrayConversion": "imports modules that its settings name",
}
"""Gymnasium wrappers that are not allowed, and why."""

GRANTS = ("trust_code", "trust_remote_code", "allow_download", "model_class", "auto_map")
"""Arguments that allow code or downloads, of these classes or of the models that they load."""

FROM_A_HUB = ("attn_implementation", "experts_implementation")
"""Arguments of models that download code if the value is a repository: `owner/kernel`."""


def packages_of(id: str) -> set[str]:
    """Return the packages that implement a Gymnasium id; empty for an unregistered id."""
    makers = []
    for spec in gymnasium.registry.values():
        # A name without a version means its latest.
        if id in (spec.id, spec.id.rpartition("-v")[0]):
            makers += [spec.entry_point, spec.vector_entry_point]
            makers += [wrapper.entry_point for wrapper in spec.additional_wrappers]
    homes = [maker if isinstance(maker, str) else maker.__module__ for maker in makers if maker]
    return {home.replace(":", ".").partition(".")[0] for home in homes}


def imported(name: str) -> Any:
    """Import an object by its path, `package.module.name`."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)
