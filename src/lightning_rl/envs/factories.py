"""Make envs from an id, a class or a function."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from lightning.pytorch.utilities import rank_zero_info

from lightning_rl.envs.gymnasium.adapter import GymnasiumEnv
from lightning_rl.envs.infos import READ
from lightning_rl.envs.other_libraries import replacement
from lightning_rl.envs.refusals import KINDS
from lightning_rl.envs.vector_env import VectorEnv
from lightning_rl.system.errors import ConfigurationError, closest, require
from lightning_rl.system.extensions import TASKS, function_at
from lightning_rl.system.renamed import refuse_earlier_names

EnvFactory = Callable[[int], VectorEnv]
"""Makes an env from `num_envs`; in YAML `{class_path: GymnasiumEnv, init_args: {id: CartPole-v1}}`.
"""

READ_ANYWAY = ("final_obs", "final_metrics", "log", *READ)
"""Info entries that `VectorEnv.step` defines."""

OF_THE_VECTOR = ("num_envs", "vectorization_mode", "max_episode_steps", "render_mode")
"""Settings that Gymnasium's vector envs add to the spec of their id."""

ALLOWED = (
    "Pass the id of a Gymnasium env ('CartPole-v1'), a task of this package (PushCube), "
    "partial(GymnasiumEnv, id='CartPole-v1', ...), or a function of the number of envs that "
    "returns a VectorEnv."
)
"""Allowed ways to name an env, for messages."""


def env_factory(env: Any, setting: str) -> EnvFactory:
    """Return the factory of an env.

    Args:
        env: a Gymnasium id, the name of a task, a class, a `partial` or another function.
        setting: name of the setting, for messages.

    Raises:
        ConfigurationError: `env` cannot make envs; the message names the allowed values.
    """
    if isinstance(env, str):
        return _by_name(env, setting)
    _refuse_other_libraries(env, setting)
    if isinstance(env, VectorEnv | gymnasium.Env | gymnasium.vector.VectorEnv):
        raise ConfigurationError(
            f"{setting} is a {type(_unwrapped(env)).__name__} that exists already, but training "
            f"and evaluation make their own envs. {_what_makes(env)}"
        )
    require(callable(env), f"{setting} is {env!r}, which makes no envs. {ALLOWED}")
    if isinstance(env, type) and not issubclass(env, VectorEnv):
        raise ConfigurationError(
            f"{setting} is the class {env.__name__}, which is no VectorEnv. {_to_register(env)}"
            if issubclass(env, gymnasium.Env)
            else f"{setting} is the class {env.__name__}, which is no VectorEnv. {ALLOWED}"
        )
    _check_arguments(env, setting)
    factory: EnvFactory = env
    return factory


def make_env(
    factory: EnvFactory,
    num_envs: int,
    setting: str,
    events: Mapping[str, Any] | None = None,
    extra_fields: Mapping[str, tuple[int, ...]] | None = None,
    random_first_episodes: bool = False,
) -> VectorEnv:
    """Make an env with `num_envs` copies and these changes; check its spaces.

    Raises:
        ConfigurationError: the factory returned something else, or the env does not take a change.
    """
    try:
        env: Any = factory(num_envs)
    except TypeError as error:
        if "instantiate abstract class" not in str(error):  # Python's words
            raise
        raise ConfigurationError(
            f"{setting} cannot be made: {error}. Define these methods."
        ) from error
    if not isinstance(env, VectorEnv):
        _refuse_other_libraries(env, setting)
        kind, cure = type(_unwrapped(env)).__name__, ALLOWED
        if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv):
            cure = _what_makes(env)
            env.close()
        raise ConfigurationError(
            f"{setting} returned a {kind}, which is no VectorEnv of this package. {cure}"
        )
    if env.num_envs != num_envs:
        env.close()
        raise ConfigurationError(
            f"{setting} returned {env.num_envs} envs, but {num_envs} were requested. The function "
            "must make as many envs as its argument says."
        )
    refuse_earlier_names(env, type(env), "VectorEnv")  # set by the constructor
    try:
        owner = getattr(env, "id", type(env).__name__)  # Gymnasium's id says more than the class
        _check_space(f"{setting}: {owner}", "observation", env.single_observation_space)
        _check_space(f"{setting}: {owner}", "action", env.single_action_space)
        if events:
            env.add_events(events)
        if extra_fields:
            env.record_info(extra_fields)
        if random_first_episodes:
            if env.max_episode_steps is None:
                raise ConfigurationError(
                    f"data.random_first_episode_length needs a time limit, but {owner} has none: "
                    "set its max_episode_steps, or remove the setting."
                )
            env.randomize_first_episodes(env.max_episode_steps)
    except ConfigurationError:
        env.close()
        raise
    return env


def checked_info_fields(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `data.extra_fields` by name.

    Raises:
        ConfigurationError: a name that is read anyway, or a shape with sizes below 1.
    """
    for name, shape in shapes.items():
        require(
            name not in READ_ANYWAY,
            f"data.extra_fields names '{name}', which is read without it where the env reports it.",
        )
        require(
            all(size >= 1 for size in shape),
            f"data.extra_fields.{name} is the shape {list(shape)}: give sizes of at least 1, or [] "
            "for one number.",
        )
    return {name: tuple(shape) for name, shape in shapes.items()}


def check_one_arm(env: VectorEnv, evaluates: bool) -> None:
    """Refuse envs that would move the same real arm at the same time.

    Args:
        env: the env of training.
        evaluates: whether training is interrupted by evaluations on an env made like it.

    Raises:
        ConfigurationError: `env` is real, and holds several envs or would be evaluated.
    """
    if not env.metadata.get("is_real"):
        return
    require(
        env.num_envs == 1,
        f"data.num_envs is {env.num_envs}, but the env moves one real arm: set data.num_envs: 1.",
    )
    require(
        not evaluates,
        "An evaluation during training would move the arm that the training moves: set "
        "trainer.limit_val_batches: 0, and evaluate later by rl-cli validate; or set "
        "data.eval_env.",
    )


def tell_first_levels(env: VectorEnv, evaluates: bool) -> None:
    """Print the names of the persistent state, which each evaluation episode resets."""
    if evaluates and env.persistent_state:
        names = ", ".join(env.persistent_state)
        rank_zero_info(
            f"Evaluations, and with them best.ckpt, begin each episode with the first value of "
            f"{names}, not with the value that training has reached. For another level of a "
            "curriculum set data.eval_env: the settings of data.env, with this level as start "
            "(curriculum: {name: {..., start: 1.0}})."
        )


def check_no_pauses(env: VectorEnv) -> None:
    """Refuse chunks of actions in the env of a real arm.

    Raises:
        ConfigurationError: `env` is real, and its actions are chunks.
    """
    require(
        not env.metadata.get("is_real") or env.steps_per_action == 1,
        "ActionChunk would stop the arm after each chunk, while the policy computes the next one: "
        "remove ActionChunk from data.env. rl-cli record --ckpt_path plays a policy of chunks "
        "without pauses, in the env without ActionChunk.",
    )


def _refuse_other_libraries(env: Any, setting: str) -> None:
    cls = env if isinstance(env, type) else type(env)
    # An instance with a spec is made by its id, for which `_what_makes` has the better cure.
    if issubclass(cls, VectorEnv) or (env is not cls and _spec_of(env) is not None):
        return
    cure = replacement(env if env is cls else _unwrapped(env))
    if cure is not None and env is not cls:
        getattr(env, "close", lambda: None)()  # it may hold processes or a window
    require(cure is None, f"{setting} makes no VectorEnv of this package. {cure}")


def _by_name(name: str, setting: str) -> EnvFactory:
    if name in TASKS:  # before Gymnasium: tasks are in no registry
        return function_at(TASKS[name])
    # An id without its version is allowed, but only whole ids are suggested.
    ids = [spec.id for spec in gymnasium.registry.values()]
    names = [*ids, *(id.rpartition("-v")[0] for id in ids), *TASKS]
    # The env of an id `module:name` is registered when its module is imported.
    require(
        ":" in name or name in names,
        f"{setting} is '{name}', which is neither the id of a Gymnasium env nor a task of this "
        f"package ({', '.join(sorted(TASKS))}){closest(name, [*ids, *TASKS])}. For an env of "
        "another package name the package that registers it: my_package:Name-v0.",
    )
    return partial(GymnasiumEnv, id=name)


def _check_arguments(factory: Callable[..., Any], setting: str) -> None:
    """Refuse a callable that needs more arguments than the number of envs."""
    if isinstance(factory, partial) and isinstance(factory.func, type):
        name = factory.func.__name__
        require(
            not factory.args,
            f"{setting} is a partial of {name} with positional arguments, but the first argument "
            f"of an env is num_envs. Pass them by name: partial({name}, id=...).",
        )
        require(
            "num_envs" not in factory.keywords,
            f"{setting} is a partial of {name} that sets num_envs. Remove num_envs there, and set "
            "num_envs=... and num_eval_envs=... of RLDataModule.",
        )
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # a builtin without signature: its call raises the error
    try:
        signature.bind(1)  # as `make_env` calls it
    except TypeError as error:
        raise ConfigurationError(
            f"{setting} cannot be called with the number of envs alone: {error}. "
            f"{_completed(factory, signature)}"
        ) from error


def _completed(factory: Callable[..., Any], signature: inspect.Signature) -> str:
    # The message completes the class with the arguments that it lacks.
    cls = factory.func if isinstance(factory, partial) else factory
    if not isinstance(cls, type):
        return (
            "Pass a function of one argument: lambda num_envs: GymnasiumEnv(num_envs, "
            "id='CartPole-v1')."
        )
    missing = [
        name
        for name, parameter in list(signature.parameters.items())[1:]  # without num_envs
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    keywords = getattr(factory, "keywords", {})
    arguments = [f"{name}={value!r}" for name, value in keywords.items()]
    arguments += [f"{name}=..." for name in missing if name not in keywords]
    return f"Pass partial({', '.join([cls.__name__, *arguments])})."


def _what_makes(env: Any) -> str:
    if isinstance(env, GymnasiumEnv):
        return f"Pass its factory: {_of_id(env.id, env.env_kwargs)}."
    if isinstance(env, VectorEnv):
        name = type(env).__name__
        return f"Pass its factory: {name}, or partial({name}, ...) with its settings."
    spec = _spec_of(env)
    if spec is None:
        return _to_register(type(_unwrapped(env)))
    return f"Pass its factory: {_of_id(spec.id, spec.kwargs)}."


def _spec_of(env: Any) -> EnvSpec | None:
    spec = getattr(env, "spec", None)
    return spec if isinstance(spec, EnvSpec) else None  # EnvPool has a class of its own


def _of_id(id: str, env_kwargs: dict[str, Any]) -> str:
    kwargs = {name: value for name, value in env_kwargs.items() if name not in OF_THE_VECTOR}
    if not kwargs:
        return f"its id, '{id}'"
    return f"partial(GymnasiumEnv, id='{id}', env_kwargs={kwargs})"


def _to_register(cls: type) -> str:
    name = cls.__name__
    return (
        f"Register it, gymnasium.register('{name}-v0', {name}, max_episode_steps=...), and pass "
        f"its id, '{name}-v0'."
    )


def _unwrapped(env: Any) -> Any:
    return getattr(env, "unwrapped", env)


def _check_space(owner: str, kind: str, space: gymnasium.Space[Any], field: str = "") -> None:
    """Refuse a space of one env that rollouts cannot store; `kind` is `observation` or `action`.

    Raises:
        ConfigurationError: names the part and the cure.
    """
    part = f"{kind}{field}"
    wrapper = f"gymnasium.wrappers.Transform{kind.title()}"
    if isinstance(space, gymnasium.spaces.Dict):
        for key, child in space.items():
            if not (isinstance(key, str) and key):
                raise ConfigurationError(
                    f"{owner} has the key {key!r} in its {part} space, but keys must be texts: "
                    f"rename it in the env ('{key}'), or by a wrapper ({wrapper})."
                )
            _check_space(owner, kind, child, f"{field}.{key}")
        if not len(space.spaces):
            raise ConfigurationError(f"{owner} has a {part} space without keys.")
        return
    if space.shape is not None and 0 in space.shape:  # None: a space without arrays
        nothing = "there is nothing to do" if kind == "action" else "it shows nothing"
        raise ConfigurationError(
            f"{owner} has the {part} space {space}, which holds no numbers: {nothing}. Remove the "
            f"space, or announce a space with numbers ({wrapper})."
        )
    dtype = space.dtype
    if dtype is not None and (dtype.kind not in KINDS or dtype.name in ("uint64", "longdouble")):
        raise ConfigurationError(
            f"{owner} has the {part} space {space} of {dtype}, which torch cannot compute with: "
            f"use int64, or float32 ({wrapper}, or the env itself)."
        )
