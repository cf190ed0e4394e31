"""Turn what the argument parser says into what its user needs.

The setting, what is allowed, and the closest match.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten
from typing import Any

import gymnasium
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from torch.optim import Optimizer

from lightning_rl.algorithms import Algorithm
from lightning_rl.algorithms.checks import PRECISIONS
from lightning_rl.buffers import Replay
from lightning_rl.checkpoints.trust import CURE
from lightning_rl.cli.help_pages import PROBES
from lightning_rl.cli.parsing import Given
from lightning_rl.collectors import Collector
from lightning_rl.envs import VectorEnv
from lightning_rl.policies import Encoder, Memory, Policy
from lightning_rl.system.errors import closest
from lightning_rl.training.data import RLDataModule
from lightning_rl.training.trainer import RLTrainer

FAMILIES: dict[str, type] = {
    "model": Algorithm,
    "model.policy": Policy,
    "model.policy.encoder": Encoder,
    "model.policy.memory": Memory,
    "model.optimizer": Optimizer,
    "data.env": VectorEnv,
    "data.eval_env": VectorEnv,
    "data.collector": Collector,
    "data.replay": Replay,
}
"""Which family of classes a key takes its class from."""

OF_LIGHTNING: dict[str, type] = {"trainer.callbacks": Callback, "trainer.logger": Logger}
"""The same, of classes whose settings are not ours to name."""

OURS = {"default_root_dir": "it is the directory of the run; set --output_dir or trainer.run_dir"}
"""Settings of Lightning's that this package sets itself, and what to set instead."""

OF_OTHERS = {
    **dict.fromkeys(("n_steps", "num_steps"), "data.buffer_size"),
    **dict.fromkeys(("n_envs", "nenvs"), "data.num_envs"),
    **dict.fromkeys(("total_timesteps", "timesteps"), "data.total_env_steps"),
    **dict.fromkeys(("lr", "actor_lr"), "model.learning_rate"),
    **dict.fromkeys(("clip_range", "clip_eps"), "model.clip_coef"),
    **dict.fromkeys(("net_arch", "hidden_dims"), "model.policy.hidden_sizes"),
    **dict.fromkeys(("gradient_steps", "train_freq", "utd_ratio"), "model.updates_per_env_step"),
    **dict.fromkeys(("n_eval_episodes", "eval_episodes"), "data.num_eval_episodes"),
    "clip_range_vf": "model.clip_value_loss",
    "activation_fn": "model.policy.activation",
    "update_epochs": "model.n_epochs",
    "optimizer_class": "model.optimizer",
    "eval_freq": "data.iterations_per_epoch",
    "seed": "seed_everything",
    "device": "trainer.accelerator",
    "tensorboard_log": "output_dir",
    "env_name": "data.env.id",
}
"""How Stable-Baselines3, CleanRL and others call a setting, and what it is here."""

POLICIES_OF_OTHERS = {
    "MlpPolicy": "ActorCritic for PPO, ActorOnly for GRPO, SquashedActorCritic for SAC, "
    "DeterministicActorCritic for TD3",
    "MultiInputPolicy": "ActorCritic, with --model.policy.encoder DictEncoder for pictures",
    "CnnPolicy": "ActorCritic, with --model.policy.encoder NatureCNN",
}
"""How Stable-Baselines3 calls a policy, and what it is here."""

OF_THE_RUN = (
    *("config", "ckpt_path", "exp_name", "output_dir", "trust_code", "restore_replay", "video"),
    *("seed_everything", "print_config", "model", "data", "trainer"),
)
"""Options of no section."""

WRAPPERS = "data.env.wrappers"
"""Where classes of Gymnasium stand, too many to name them all."""

ALLOWED = {"trainer.precision": " or ".join(PRECISIONS)}
"""What a setting may be, where the parser would say more."""

SECTIONS: dict[str, type] = {"data": RLDataModule, "trainer": RLTrainer}
"""The keys below which settings of one class stand."""

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "NoneType": "null",
    "Sequence": "a list",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping, such as {name: value}",
}
"""What to call the types that a value may have."""


def explain(message: str, typed: Sequence[str] = (), cure: str = CURE) -> str:
    """Rewrite a message of the parser.

    One that it does not know stays, less the parser's inner workings.

    Args:
        message: of the parser.
        typed: options, of which the message may be about one: they tell its whole path.
        cure: what to do about code of others.
    """
    given = Given(typed)
    key = _whole(_key(message), given)
    if option := _unknown_option(message):
        return _unknown_setting(option, given)
    if name := _search(r"Importing '([^']+)' is not allowed", message):
        return (
            f"'{name}' for {key} is code of others, and the configuration comes from a checkpoint. "
            f"{cure}"
        )
    if stray := _search(r"unrecognized arguments: ([^-]\S*)", message):
        return f"'{stray}' belongs to no option: an option is --name value."
    if missing := _search(r"arguments are required: (.+)", message):
        return _missing_setting(re.sub(r"(fit|check)[.]", "", missing), given)
    return (
        _about_a_class(message, key, given)
        or _about_a_value(message, key)
        or re.sub(r"\s+\n", "\n", message).strip()
    )


def _search(pattern: str, message: str) -> str | None:
    found = re.search(pattern, message)
    return found[1].strip() if found else None


def _key(message: str) -> str:
    """Return the key that a message is about, which may lack those above it."""
    return _search(r'Parser key "([^"]+)"', message) or _search(r"^--(\S+)\.help: ", message) or ""


def _whole(key: str, given: Given) -> str:
    """Return the whole path of a key, as far as what is given, or a class, tells it."""
    if "." in key or key in FAMILIES or key in SECTIONS or not key:
        return key
    if key_given := given.path_of(key):
        return key_given
    families = [path for path in FAMILIES if path.endswith(f".{key}")]
    owners = families or [
        f"{path}.{key}"
        for path, family in FAMILIES.items()
        if path != "data.eval_env" and any(key in _parameters(cls) for cls in _subclasses(family))
    ]
    return owners[0] if len(owners) == 1 else key


def _unknown_option(message: str) -> str | None:
    return (
        _search(r"Option '([^']+)' is not accepted", message)
        or _search(r"accept option '([^']+)'", message)
        or _search(r"unrecognized arguments: --([\w.]+)", message)
    )


def _unknown_setting(option: str, given: Given) -> str:
    """Say whose setting it would be, what that has, and what it may be meant for."""
    path = given.path_of(option) or option
    above, _, name = path.rpartition(".")
    if path.endswith(".help"):
        wanted = path.removesuffix(".help")
        topics = (*FAMILIES, *OF_LIGHTNING, *SECTIONS)
        first = next((f"--{path}.help" for path in FAMILIES if wanted.startswith(f"{path}.")), None)
        cure = f" Where only some classes have it, name one first: {first} NAME --{wanted}.help."
        return (
            f"There is no help on '{wanted}'{closest(wanted, topics)}; there is on "
            f"{', '.join(topics)}.{cure if first else ''}"
        )
    owner = _class_at(above, given)
    here = f"; here it is {OF_OTHERS[name]}" if name in OF_OTHERS else ""
    if owner is None and not above and not here:
        here = closest(name, OF_THE_RUN)
    if owner is None and here:
        return f"Unknown setting '{path}'{here}."
    if owner is None:
        matches = _matching_settings(option, _configurable())
        return f"Unknown setting '{path}'{matches or '; rl-cli fit --help lists what there is'}."
    if name in OURS:
        return f"Unknown setting '{name}' of {owner.__name__}: {OURS[name]}."
    matches = here or _matching_settings(name, [owner])
    matches = matches or _matching_settings(name, _configurable())
    allowed = ", ".join(_in_order(owner))
    return f"Unknown setting '{name}' of {owner.__name__}{matches}. It has {allowed}."


def _missing_setting(name: str, given: Given) -> str:
    """Say which setting has no value, and what a class that was changed takes in its place."""
    path, algorithm = _whole(name, given), _class_at("model", given)
    before = given.class_at("model.policy")
    if path != "model.policy" or before is None or algorithm is None:
        owner = next((cls for cls in _given_classes(given) if name in _parameters(cls)), None)
        if owner is None or "." in path:
            return f"Missing setting: {path}."
        example = f"{{class_path: {owner.__name__}, init_args: {{{name}: ...}}}}"
        return f"Missing setting: {name} of {owner.__name__}: write {example}."
    taken = parameters_of(algorithm)["policy"].annotation
    names = ", ".join(name for name in _class_names(path) if issubclass(_named(name), taken))
    return (
        f"Missing setting: model.policy. {before} was given, which {algorithm.__name__} does not "
        f"take; it takes {names}."
    )


def _given_classes(given: Given) -> Iterator[type]:
    """Yield the classes whose names are given, in a list too."""
    words = given.words
    for family in (*FAMILIES.values(), *OF_LIGHTNING.values(), gymnasium.Wrapper):
        yield from (cls for cls in _subclasses(family) if cls.__name__ in words)


def _named(name: str) -> type:
    return next(cls for cls in _subclasses(Policy) if cls.__name__ == name)


def _class_at(path: str, given: Given) -> type | None:
    """Return the class whose settings stand below a path, if it can be told."""
    if path in SECTIONS:
        return SECTIONS[path]
    if path not in FAMILIES:
        return None
    name = (given.class_at(path) or "").rpartition(".")[2]
    found = [cls for cls in _subclasses(FAMILIES[path]) if cls.__name__ == name]
    return found[0] if found else None


def _about_a_class(message: str, key: str, given: Given) -> str | None:
    """Explain why a class cannot be taken, or return None if a message is not about that."""
    name = _name_of_the_class(message)
    if name is None:
        return None
    if "." not in name and "." in (given.class_at(key) or ""):
        name = str(given.class_at(key))
    module = name.rpartition(".")[0]
    what = f"'{name}' for {key}"
    known = _class_names(key)
    if name in POLICIES_OF_OTHERS:
        return f"{what} is of Stable-Baselines3; here it is {POLICIES_OF_OTHERS[name]}."
    if issubclass(VectorEnv, _family(key)) and (cure := _of_gymnasium(name, key)):
        return f"{what} is {cure}"
    if "Expected an instantiatable class" in message:
        methods = ", ".join(sorted(getattr(imported(name), "__abstractmethods__", ())))
        return f"{what} is abstract: define {methods}, or name a class that does{_known(known)}."
    if missing := _search(r"No module named '([^']+)'", message):
        if f"{module}.".startswith(f"{missing}."):
            return (
                f"{what} cannot be found: there is no module '{missing}' in the working directory "
                f"or among the installed packages{_known(known)}."
            )
        return f"{what} cannot be imported: {module} needs '{missing}', which is not installed."
    if f"module '{module}' has no attribute" in message:
        wanted = name.rpartition(".")[2]
        here = _names_in(module, _family(key))
        others = f"; it has {', '.join(here)}" if here else f", and no other {_kind(key)}"
        return (
            f"{what} cannot be found: module '{module}' has no '{wanted}'{others}"
            f"{closest(wanted, here)}{_known(known)}."
        )
    if "Expected a dot import path string" in message:
        allowed = f"known here: {', '.join(known)}; " if known else "give its name, "
        wrappers = _subclasses(gymnasium.Wrapper) if key == WRAPPERS else ()
        names = known or [cls.__name__ for cls in wrappers]
        path = f"or an import path such as my_module.MyClass{closest(name, names)}"
        return f"Unknown class '{name}' for {key}: {allowed}{path}."
    if re.search(r"subclass of|Unexpected import object|function that returns", message):
        return f"{what} is not a subclass of {_kind(key)}, as it must be{_known(known)}."
    return None


def _of_gymnasium(name: str, key: str) -> str | None:
    """Say how an env of Gymnasium is given, whose id or class stands for a VectorEnv."""
    ids = [spec.id for spec in gymnasium.registry.values()]
    if name in ids:
        return f"the id of a Gymnasium env: write --{key} GymnasiumEnv --{key}.id {name}."
    cls = imported(name)
    if not (isinstance(cls, type) and issubclass(cls, gymnasium.Env)):
        return None
    module = name.rpartition(".")[0]
    places = (cls, f"{cls.__module__}:{cls.__qualname__}")
    found = [spec.id for spec in gymnasium.registry.values() if spec.entry_point in places]
    if found and module.startswith("gymnasium."):
        return f"a Gymnasium env: write --{key} GymnasiumEnv --{key}.id {found[-1]}."
    id = found[-1] if found else f"{cls.__name__}-v0"
    register = "" if found else f"call gymnasium.register('{id}', {cls.__name__}) in {module}, and "
    return f"a Gymnasium env: {register}write --{key} GymnasiumEnv --{key}.id {module}:{id}."


def imported(name: str) -> Any:
    """Return what has an import path, or is one of our classes, if the parser has imported it."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module or "lightning_rl"), attribute, None)


def _name_of_the_class(message: str) -> str | None:
    """Return the class that a message is about: the parser says it in many ways."""
    ways = (
        r"Expected a dot import path string: ([^\W\d]\S*)",
        r"class_path='([^']+)'",
        r"class_path '([^']+)'",
        r"Import path (\S+) does not correspond",
        r"Expected '([^']+)' to be a",
        r"Expected an instantiatable class, but (\S+) is abstract",
        r'"([^"]+)" is not a subclass of',
        r"Got value: ([^\W\d][\w.]*)\Z",
        r"Given value: ([^\W\d][\w.]*)\Z",
        r"module '(\S+)' has no attribute '\w+'",
        r"No module named '([\w.]+)'",
    )
    found = next((name for way in ways if (name := _search(way, message))), None)
    attribute = _search(r"has no attribute '(\w+)'", message)
    return f"{found}.{attribute}" if found and attribute and "." not in found else found


def _known(names: Sequence[str]) -> str:
    return f"; known here: {', '.join(names)}" if names else ""


def _family(key: str) -> type:
    return (FAMILIES | OF_LIGHTNING).get(key, object)


def _kind(key: str) -> str:
    """Name the family of a key; what is no family of ours is named by its key."""
    family = _family(key)
    return key.rpartition(".")[2] if family is object else family.__name__


def _names_in(module: str, family: type) -> list[str]:
    """Return the classes of a family that a module defines, which was imported."""
    members = vars(sys.modules[module]).items() if module in sys.modules else ()
    return sorted(
        name
        for name, member in members
        if isinstance(member, type) and issubclass(member, family) and member.__module__ == module
    )


def _about_a_value(message: str, key: str) -> str | None:
    """Explain why a value cannot be taken, or return None if a message is not about that."""
    if odd := re.search(r"(?:subclass of \w+|, but got .+?)\. Got value: (.+)", message):
        spec = "the name of a class, or {class_path: NAME, init_args: {...}}"
        return f"{key} must be {spec}, got {_shown(odd[1])}{_known(_class_names(key))}."
    if text := _search(r"Unable to load config '(.+)'", message):
        return (
            f"{key} must be a mapping of settings, or the path of a YAML file, got {_shown(text)}."
        )
    if literal := re.search(r"typing\.Literal\[(.+?)\]\. Got value: (.+)", message):
        quotes = " (YAML reads off, no, on and yes so: put the text in quotes)"
        note = quotes if literal[2] in ("True", "False") else ""
        return f"{key} must be one of {literal[1].replace(chr(39), '')}, got {literal[2]}{note}."
    if plain := re.search(r"Expected a <class '([\w.]+)'>\. Got value: ?(.*)", message):
        cure = _bracketed([plain[1]], plain[2])
        if plain[1] == "str" and plain[2] in ("True", "False", "None"):
            cure = " (YAML reads off, no, on, yes and null so: put the text in quotes)"
        return f"{key} must be {article(plain[1])}, got {_shown(plain[2])}{cure}."
    if length := re.search(r"Expected a tuple with (\d+) elements\. Got value: (.+)", message):
        return f"{key} must be a list of {length[1]}, got {length[2]}."
    value = _search(r"Given value: (.+)", message)
    value = _search(r"NestedArg\(.*val='?(.*?)'?\)$", value or "") or value
    errors = re.findall(r"^\s+- (.+)$", message.partition("Errors:")[2], re.M)
    if value is None or not errors:
        return None
    if key in ALLOWED:
        return f"{key} must be {ALLOWED[key]}, got {_shown(value)}."
    reasons = [error for error in errors if not error.startswith("Expected a ")]
    if not reasons:
        kinds = [_search(r"<class '([\w.]+)'>", error) for error in errors]
        allowed = list(dict.fromkeys(map(_allowed, errors)))
        return (
            f"{key} must be {' or '.join(allowed)}, got {_shown(value)}{_bracketed(kinds, value)}."
        )
    return f"{key} cannot be {_shown(value)}: {'; '.join(reasons)}."


def _allowed(error: str) -> str:
    """Say what one of several types takes."""
    if choices := _search(r"typing\.Literal\[(.+)\]", error):
        return f"one of {choices.replace(chr(39), '')}"
    kind = _search(r"<class '([\w.]+)'>", error)
    return article(kind) if kind else "the name of a class"


def _shown(value: str) -> str:
    return "null" if value == "None" else f"'{shorten(value, 200)}'"


def _bracketed(kinds: Sequence[str | None], value: str) -> str:
    """Show a value as the list that was meant."""
    is_list = value[:1] not in ("[", "{") and any(article(kind or "") == "a list" for kind in kinds)
    return f": write [{value}]" if is_list else ""


def article(kind: str) -> str:
    """Say what a value of a type is called."""
    name = kind.rpartition(".")[2]
    return KINDS.get(name, f"a {name}")


def _matching_settings(option: str, classes: Iterable[type]) -> str:
    """Return close matches among the settings of classes, each with the class that has it."""
    name = option.split(".")[-1]
    owners: dict[str, list[str]] = {}
    for cls in classes:
        for parameter in _parameters(cls):
            owners.setdefault(parameter, []).append(cls.__name__)
    within = [one for one in owners if name.endswith(f"_{one}") or one.endswith(f"_{name}")]
    matches = closest(name, owners)
    if within and not matches:
        matches = f"; close matches: {', '.join(within)}"
    elif within:
        first = [one for one in within if not re.search(rf"[ ,]{one}(,|$)", matches)]
        matches = matches.replace("matches: ", "matches: " + "".join(f"{one}, " for one in first))
    return re.sub(
        r"(\w+)(?=,|$)",
        lambda found: f"{found[1]} of {_some(owners[found[1]])}",
        matches,
    )


def _some(names: list[str]) -> str:
    """Name the first two, for a setting that many classes have."""
    return (
        names[0]
        if len(names) == 1
        else f"{names[0]} and {names[1] if len(names) == 2 else 'others'}"
    )


def _configurable() -> Iterator[type]:
    yield from SECTIONS.values()
    for family in dict.fromkeys(FAMILIES.values()):
        yield from _subclasses(family)


def _parameters(cls: type) -> set[str]:
    """Return the names of a constructor's parameters, and of those behind its `**kwargs`."""
    return set(_in_order(cls))


def parameters_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor, and of those behind its `**kwargs`."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        found |= {name: one for name, one in parameters.items() if name not in found}
        if inspect.Parameter.VAR_KEYWORD not in {one.kind for one in parameters.values()}:
            break
    return found


def _in_order(cls: type) -> list[str]:
    """Return those that a user can set, in the order of the constructors."""
    names = parameters_of(cls)
    hidden = {"self", "args", "kwargs", "params", "observation_space", "action_space"}
    hidden |= {"distribution"}  # which policies give their base class
    first = next((path for path, family in FAMILIES.items() if issubclass(cls, family)), "")
    hidden |= {"num_envs"} if first == "data.env" else set()
    hidden |= {"env", "policy", "buffer_size", "seed"} if first == "data.collector" else set()
    hidden |= {"num_envs", "device", "seed", "directory"} if first == "data.replay" else set()
    return [name for name in names if name not in hidden]


def _class_names(key: str) -> list[str]:
    family = _family(key)
    if family is object:
        return []
    ours = key in FAMILIES
    return sorted(
        {
            cls.__name__
            for cls in _subclasses(family)
            if not cls.__name__.startswith("_")
            and cls.__name__ not in PROBES
            and (ours or cls.__module__.startswith("lightning.pytorch."))
        }
    )


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    children: list[type[Any]] = cls.__subclasses__()
    for child in children:
        if not inspect.isabstract(child):
            yield child
        yield from _subclasses(child)
