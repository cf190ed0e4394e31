"""What a checkpoint may name: classes, by the key under which they stand, and who makes envs.

All else needs `--trust_code true`. Nothing is imported to look a name up.
"""

from importlib import import_module
from typing import Any, NamedTuple

import gymnasium

OURS = "lightning_rl"

PACKAGES = (OURS, "torch.optim", "gymnasium.wrappers")
"""Where the classes come from."""

ENV_PACKAGES = (OURS, "gymnasium", "gym_hil")
"""Whose envs a checkpoint may name by their ids."""


class Allowed(NamedTuple):
    """The classes that may stand under a key.

    Attributes:
        kind: what they are called in a message.
        names: their import paths, the shortest ones, as runs write them.
    """

    kind: str
    names: frozenset[str]


def _in(package: str, names: str) -> str:
    return " ".join(f"{package}.{name}" for name in names.split())


_ENCODERS = (
    "Encoder",
    "DictEncoder FrozenEncoder ImpalaCNN NatureCNN OneHot PerceptronEncoder SpatialSoftmaxCNN",
)
_PROBES = "ActionProbe MaskProbe RecallProbe StructureProbe TimeLimitProbe ValueProbe"
_ENVS = (
    "VectorEnv",
    "ActionChunk CartPole EncodedObservations EnvPoolEnv GymnasiumEnv LabelledFrames PointMass "
    f"PushBlocks PushCube TensorSimulator {_in(f'{OURS}.envs', _PROBES)}",
)
_REPLAYS = ("Replay", "MixedReplay ReplayBuffer")
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
_TABLE = {
    "model": (
        "Algorithm",
        "BehaviorCloning DiscreteSAC GRPO GripperSAC PPO RewardClassifier SAC TD3",
    ),
    "policy": (
        "Policy",
        "ActorCritic ActorOnly CustomVLA DeterministicActorCritic DiscreteActorCritic "
        "GripperActorCritic SlowPolicy SquashedActorCritic VLAPolicy",
    ),
    "backbone": ("Backbone", "TinyVLA TransformersBackbone"),
    "encoder": _ENCODERS,
    "critic_encoder": _ENCODERS,
    "memory": ("Memory", "GRU LSTM"),
    "env": _ENVS,
    "eval_env": _ENVS,
    "action": ("ActionTerm", _in(f"{OURS}.envs.tasks", "DeltaPosition Force Position Velocity")),
    "collector": ("Collector", "AsyncCollector Demonstrations RayCollector SyncCollector"),
    "replay": _REPLAYS,
    "online": _REPLAYS,
    "offline": _REPLAYS,
    "optimizer": ("Optimizer", _in("torch.optim", _OPTIMIZERS)),
    "wrappers": (
        "Wrapper",
        "ActionMask ClassifiedReward Conditioned Intervention VLAObservation "
        f"{_in(f'{OURS}.envs', 'HideEntries PenaltyTerms people.gym_hil.PickCube')} "
        f"{_in('gymnasium.wrappers', _WRAPPERS)}",
    ),
    "source": (
        "InterventionSource",
        f"Gamepad Keyboard Script SpaceMouse {OURS}.envs.people.gym_hil.ScriptedHelp",
    ),
}

CLASSES = {
    key: Allowed(kind, frozenset(n if "." in n else f"{OURS}.{n}" for n in names.split()))
    for key, (kind, names) in _TABLE.items()
}
"""By the key under which they may stand; under any other key a checkpoint may name none.

None of them writes to a place of its own choice: a test forges each of their arguments.
"""

NAMES = frozenset[str]().union(*(allowed.names for allowed in CLASSES.values()))

REFUSED = {
    "RecordVideo": "writes files where its settings say",
    "HumanRendering": "opens a window",
    "ArrayConversion": "imports the modules that its settings name",
}
"""Wrappers of Gymnasium that are left out above, and why."""

GRANTS = ("trust_code", "trust_remote_code", "allow_download", "model_class", "auto_map")
"""Arguments of these classes, and of the models that they load, that let code run or be loaded."""

FROM_A_HUB = ("attn_implementation", "experts_implementation")
"""Arguments of models that load code from a hub where they name one: `owner/kernel`."""


def makers_of(id: str) -> set[str]:
    """Return the packages that make the envs of a Gymnasium id; none where it is not registered."""
    makers = []
    for spec in gymnasium.registry.values():
        # A name without a version means its latest.
        if id in (spec.id, spec.id.rpartition("-v")[0]):
            makers += [spec.entry_point, spec.vector_entry_point]
            makers += [wrapper.entry_point for wrapper in spec.additional_wrappers]
    homes = [maker if isinstance(maker, str) else maker.__module__ for maker in makers if maker]
    return {home.replace(":", ".").partition(".")[0] for home in homes}


def imported(name: str) -> Any:
    """Import what an import path leads to.

    Raises:
        ImportError, AttributeError, ValueError: where it leads to nothing.
    """
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)
