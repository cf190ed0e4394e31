"""Names that a checkpoint may use without `--trust_code true`. A lookup imports nothing."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium

from lightning_rl.system.texts import is_import_path, is_model_file, is_plain_name, is_settings_file

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
PROBES = ["FiveDoors", "TwoDoors"]
"""Envs that test algorithms; they are not offered for training."""

_ENVS = (
    "VectorEnv",
    "ActionChunk CartPole CartPoleSwingUp EncodedObservations EnvPoolEnv GymnasiumEnv "
    "LeggedRobot LiberoEnv MotionRobot MujocoEnv PointMass PushBlocks PushCube Quadruped Reach "
    "ReturnFramesEnv SuccessFramesEnv TensorSimulator TermWrapper "
    f"{' '.join(PROBES)}",
)
_REPLAYS = ("Replay", "HindsightReplay MixedReplay ReplayBuffer")
_MANAGERS = f"{OURS}.extensions.managers"
_ACTIONS = "DeltaPosition Force Position Velocity"
_TERMS = (
    "action_size by_success constant entry is_failure is_success is_terminated measurement "
    "out_of_range over_steps randomize task_observation"
)
_ROBOT_TERMS = (
    "action_change bounce command fallen friction_and_load gravity joint_offsets joint_speeds "
    "last_action push random_command random_load random_pose roll_and_pitch tilt torso_height "
    "torso_velocity tracking turn_rate velocity_error yaw_error"
)
_OPTIMIZERS = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
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
    "DiscreteActorCritic FlowActorCritic GaussianResidualActorCritic GripperActorCritic "
    "LeRobotPolicy NoiseActorCritic NoisePolicy OnnxPolicy QPolicy ResidualActorCritic SlowPolicy "
    "SquashedActorCritic SteeredActorCritic VLAPolicy",
)
_TABLE = {
    "model": (
        "Algorithm",
        "APG AWAC BehaviorCloning CuriousPPO CuriousSAC DQN DiscreteSAC FQL FixedPolicy GRPO "
        "GripperSAC IQL NoiseSAC PPO QC RewardClassifier SAC SHAC StylePPO SymmetricPPO TD3 "
        "ValueFit",
    ),
    "policy": _POLICIES,
    "backbone": ("Backbone", "PerceptronBackbone TinyVLA TransformersBackbone"),
    "base": _POLICIES,
    "encoder": _ENCODERS,
    "critic_encoder": _ENCODERS,
    "curiosity": ("RandomNetworkDistillation", "RandomNetworkDistillation"),
    "memory": ("Memory", "GRU LSTM"),
    "env": _ENVS,
    "eval_env": _ENVS,
    "action": ("ActionTerm", _in(_MANAGERS, _ACTIONS)),
    "term": ("term", _in(f"{_MANAGERS}.functions", _TERMS)),
    "collector": ("Collector", "AsyncCollector DatasetCollector RayCollector SyncCollector"),
    "replay": _REPLAYS,
    "online": _REPLAYS,
    "offline": _REPLAYS,
    "optimizer": ("Optimizer", _in("torch.optim", _OPTIMIZERS)),
    "wrappers": (
        "Wrapper",
        "ActionMask GripperPenalty Intervention PartialObservation PenaltyTerms PickCube "
        "RewardClassifierWrapper VLAObservation "
        f"{_in('gymnasium.wrappers', _WRAPPERS)}",
    ),
    "source": (
        "InterventionSource",
        "Gamepad Keyboard ScriptedHelp ScriptedIntervention SpaceMouse",
    ),
}

SECTIONS = ("seed_everything", "exp_name", "output_dir", "model", "data", "trainer")
"""Top-level keys of a configuration."""

# Names without a package are public names of this one.
CLASSES = {
    key: AllowedClasses(kind, frozenset(n if "." in n else f"{OURS}.{n}" for n in names.split()))
    for key, (kind, names) in _TABLE.items()
}
"""Classes that a checkpoint may name, by the key of the setting; other keys take no class.

No class here writes files to a path from its arguments: a test forges each argument."""

NAMES = frozenset[str]().union(*(allowed.names for allowed in CLASSES.values()))


_LAY_IN_ENVS = "FiveDoors GripperPenalty Intervention PenaltyTerms TwoDoors"
_FUNCTIONS = f"{_MANAGERS}.functions"
_TERMS_RENAMED = {"measured": "measurement", "one": "constant", "own": "task_observation"}
_LIMITS_RENAMED = {"least": "minimum", "most": "maximum"}
PARAMETERS_RENAMED = {"by_success": _LIMITS_RENAMED, "over_steps": _LIMITS_RENAMED}
"""Parameters of terms, by term: earlier name and present name."""

RENAMED = {
    "lightning_rl.ClassifiedReward": "lightning_rl.RewardClassifierWrapper",
    "lightning_rl.Demonstrations": "lightning_rl.DatasetCollector",
    "lightning_rl.LabelledFrames": "lightning_rl.SuccessFramesEnv",
    "lightning_rl.ReturnFrames": "lightning_rl.ReturnFramesEnv",
    "lightning_rl.Script": "lightning_rl.ScriptedIntervention",
    "lightning_rl.WithTerms": "lightning_rl.TermWrapper",
    "lightning_rl.envs.HideEntries": "lightning_rl.PartialObservation",
    **{f"{OURS}.envs.{name}": f"{OURS}.{name}" for name in _LAY_IN_ENVS.split()},
    **{f"{_FUNCTIONS}.{old}": f"{_FUNCTIONS}.{new}" for old, new in _TERMS_RENAMED.items()},
    "lightning_rl.envs.managers": _MANAGERS,
    "lightning_rl.envs.people.gym_hil": OURS,
    f"{OURS}.policies.networks.encoders.FrozenEncoder": f"{OURS}.FrozenEncoder",
    "lightning_rl.extensions.audit": "lightning_rl.extensions.checks",
    "lightning_rl.extensions.people": "lightning_rl.extensions.teleoperation",
}
"""Import paths of earlier versions, of an object or of a module, and the present paths.

Settings of any version are translated before anything else reads them: the configuration in a
checkpoint, YAML, and options. A script gets the present class, with a warning."""


def present_path(path: str) -> str:
    """Return the present import path for one of any version."""
    for old, new in RENAMED.items():  # an object comes before the module that contained it
        if path == old or path.startswith(f"{old}."):
            # Once more, because a name may have changed twice.
            return present_path(new + path.removeprefix(old))
    return path


def present_settings(settings: Any, key: str = "") -> Any:
    """Return the settings of any version with present names; `key` is the name of the setting."""
    if isinstance(settings, dict):
        present = {name: present_settings(value, name) for name, value in settings.items()}
        term = str(present.get("term")).removeprefix(f"{_FUNCTIONS}.")
        if term in PARAMETERS_RENAMED and isinstance(params := present.get("params"), dict):
            renamed = PARAMETERS_RENAMED[term]
            present["params"] = {renamed.get(name, name): params[name] for name in params}
        return present
    if isinstance(settings, list):
        return [present_settings(value, key) for value in settings]
    if not isinstance(settings, str):
        return settings
    # Terms of this package stand without their module.
    if key == "term" and "." not in settings:
        return _TERMS_RENAMED.get(settings, settings)
    if "." not in settings and (key == "class_path" or key in CLASSES):  # a class, in short
        return present_path(f"{OURS}.{settings}").removeprefix(f"{OURS}.")
    return present_path(settings) if settings.startswith(f"{OURS}.") else settings


class TextForm(NamedTuple):
    """A form of texts.

    Attributes:
        form: the form, for messages and docs/security.md.
        fits: whether a text has the form; the reader of the setting asks the same function.
        is_file: whether the text is the path of a file that is read as data.
    """

    form: str
    fits: Callable[[str], object]
    is_file: bool = False


_FILES = "a local path, which is read as data"
_PATH = TextForm(_FILES, lambda text: not is_settings_file(text), is_file=True)
_SENTENCE = TextForm(
    "a text that is neither an import path nor a YAML file",
    lambda text: not is_import_path(text) and not is_settings_file(text),
)
_NOTHING = TextForm("allowed in a checkpoint: only the user may give it", lambda text: False)

STATISTICS_FILES = ("action_statistics", "dataset_stats")
"""Settings of files that a new policy reads; a checkpoint's weights contain what was read."""

OTHER_TEXTS = TextForm(
    "a text without dots, colons and slashes", re.compile(r"[^./\\:$~]*").fullmatch
)
"""The form of texts of all other settings: it names nothing to import or to open."""

TEXTS = {
    "env_model": TextForm("a file of a robot", is_model_file, is_file=True),
    "term": TextForm(
        "a term of this package",
        f"{_TERMS} {_in(f'{OURS}.extensions.mujoco.quadruped', _ROBOT_TERMS)}".split().__contains__,
    ),
    "id": TextForm("the id of an env", re.compile(r"[\w/-]+").fullmatch),
    "device": TextForm("a device of torch", re.compile(r"[a-z]+(:\d+)?").fullmatch),
    "exp_name": TextForm("a plain name", is_plain_name),
    "address": _NOTHING,
    "layout": TextForm("a YAML file, which is read as data", is_settings_file, is_file=True),
    **dict.fromkeys(STATISTICS_FILES, _PATH._replace(is_file=False)),
    **dict.fromkeys(
        (
            *("path", "model_path", "adapter", "tokenizer", "language_model", "vlm_model_name"),
            *("weights", "checkpoint", "teacher"),
            *("demonstrations", "motion", "xml_file"),
        ),
        _PATH,
    ),
    **dict.fromkeys(
        (
            *(
                "instruction",
                "condition",
                "keys",
                "key",
                "teacher_key",
                "critic_keys",
                "actor_keys",
            ),
            *("ignore_keys", "executed_action_key", "intervened_key", "filter_keys", "prefix"),
            *("rgb", "proprio", "freeze", "target_modules", "exclude_modules", "modules_to_save"),
            *("keyframe", "camera", "drives", "joints", "names", "name", "transformers_version"),
            "_name_or_path",
        ),
        _SENTENCE,
    ),
}
"""The forms of texts in a checkpoint, by the key of the setting, wherever it stands."""

REFUSED = {
    "RecordVideo": "writes files to paths in its settings",
    "HumanRendering": "opens a window",
    "ArrayConversion": "imports modules that its settings name",
}
"""Gymnasium wrappers that are not allowed, and why."""

GRANTS = ("trust_code", "allow_download", "model_class")
"""Arguments that allow code or downloads."""


def packages_of(id: str) -> set[str]:
    """Return the packages that implement a Gymnasium id; empty for an unregistered id."""
    return {module.partition(".")[0] for module in modules_of(id)}


def modules_of(id: str) -> set[str]:
    """Return the modules that implement a Gymnasium id; empty for an unregistered id."""
    makers = []
    for spec in gymnasium.registry.values():
        # A name without a version means its latest.
        if id in (spec.id, spec.id.rpartition("-v")[0]):
            makers += [spec.entry_point, spec.vector_entry_point]
            makers += [wrapper.entry_point for wrapper in spec.additional_wrappers]
    makers = [getattr(maker, "func", maker) for maker in makers if maker]  # of a partial
    return {
        maker.partition(":")[0] if isinstance(maker, str) else maker.__module__ for maker in makers
    }
