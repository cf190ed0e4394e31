"""Make Gymnasium's vector envs, with error messages that name the cure."""

import errno
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import ClipAction

from lightning_rl.envs.gymnasium.inline import InlineVectorEnv
from lightning_rl.envs.gymnasium.mujoco_bindings import convert_mujoco_warnings
from lightning_rl.envs.gymnasium.replay import CheckedReturns, ReplayableEpisode
from lightning_rl.envs.gymnasium.workers import WorkerVectorEnv
from lightning_rl.envs.infos import EXECUTED_ACTION, INTERVENED, report_intervention
from lightning_rl.envs.other_libraries import replacement
from lightning_rl.rollout.names import named
from lightning_rl.rollout.structured_actions import FlatAction, StructuredActions, flat_actions
from lightning_rl.system.errors import ConfigurationError, closest, reason_of, require

EnvWrapper = Callable[[gymnasium.Env], gymnasium.Env]

NAMESPACES = {
    "ALE": ("ale_py", "'gymnasium[atari]'"),
    "dm_control": ("shimmy", "'shimmy[dm-control]'"),
    "gym_aloha": ("gym_aloha", "-c constraints-robots.txt -e '.[robots]'"),
    "gym_hil": ("gym_hil", "-c constraints-robots.txt -e '.[robots]'"),
    "gym_pusht": ("gym_pusht", "-c constraints-robots.txt -e '.[robots]'"),
}
"""Namespaces of env ids: the module that registers the envs, and what pip installs."""

EXTRAS = {
    "mujoco": "-e '.[mujoco]'",
    "box2d": "'gymnasium[box2d]'",
    "cv2": "'gymnasium[other]'",
    "opencv": "'gymnasium[other]'",
    "pygame": "'gymnasium[classic-control]'",
    "jax": "'gymnasium[jax]'",
    "ale_py": "'gymnasium[atari]'",
}
"""Packages to install where the error of an import contains the key."""


def make_gymnasium(
    id: str,
    num_envs: int,
    env_kwargs: dict[str, Any],
    vectorization: str,
    wrappers: list[EnvWrapper],
    names: dict[str, str],
) -> Any:
    """Call `gymnasium.make_vec`; its errors become messages that name the cure."""
    require(
        vectorization != "vector_entry_point" or not wrappers,
        "wrappers need vectorization sync or async; a vector entry point cannot be wrapped env by "
        "env.",
    )
    env_kwargs = from_environment(env_kwargs, "env_kwargs")
    make_one = partial(_make_one, id, env_kwargs, wrappers, names)
    try:
        if ":" in id:
            importlib.import_module(id.split(":", maxsplit=1)[0])
        env: Any
        if vectorization == "sync":
            env = InlineVectorEnv([make_one] * num_envs)
        elif vectorization == "async":
            # copy=False, because the collector copies observations before the next step.
            env = WorkerVectorEnv(
                [make_one] * num_envs,
                f"Env '{id}'",
                copy=False,
                autoreset_mode=AutoresetMode.SAME_STEP,
            )
        else:
            _import(id)  # in this process, which makes the batched env
            env = gymnasium.make_vec(
                id, num_envs=num_envs, vectorization_mode=vectorization, **env_kwargs
            )
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise _unregistered(id, error) from error
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise missing_package(id, error) from error
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigurationError(
            f"{num_envs} processes of env '{id}' need more open files than the limit of this "
            f"process ({error.strerror}). Raise the limit (ulimit -n 4096), set fewer "
            "data.num_envs, or vectorization: sync."
        ) from error
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigurationError(f"Env '{id}' could not be made: {reason_of(error)}") from error
    _check_batch(env, id, vectorization)
    return env


def _unregistered(id: str, error: Exception) -> ConfigurationError:
    if id in gymnasium.registry:
        return _of_a_script(id)
    if isinstance(error, gymnasium.error.NamespaceNotFound):
        return _unknown_namespace(id)
    likely = closest(id.split(":")[-1], gymnasium.registry)
    cure = "" if ":" in id else f" Your own module registers it? Name the module: my_module:{id}."
    return ConfigurationError(f"No Gymnasium env '{id}'{likely}. ({error}){cure}")


def from_environment(settings: Any, path: str) -> Any:
    """Replace `${NAME}` in a tree of settings by environment variables; `path` is for messages.

    The files of a run keep `${NAME}`, so they contain no secrets.
    """
    if isinstance(settings, dict):
        return {key: from_environment(child, f"{path}.{key}") for key, child in settings.items()}
    if isinstance(settings, list):
        return [from_environment(child, f"{path}.{i}") for i, child in enumerate(settings)]
    match = re.fullmatch(r"\$\{(\w+)\}", settings) if isinstance(settings, str) else None
    if match is None:
        return settings
    require(
        match[1] in os.environ,
        f"{path} is {settings}, but the environment has no variable {match[1]}: export it.",
    )
    return os.environ[match[1]]


def _check_batch(env: Any, id: str, vectorization: str) -> None:
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.SAME_STEP:
        env.close()
        raise ConfigurationError(
            f"Env '{id}' with vectorization={vectorization} has autoreset mode {mode}; finished "
            "envs must reset in the same step, because training would otherwise use wrong "
            "transitions. Use vectorization: sync or async."
        )
    flat_space = flat_actions(env.single_action_space)
    # Single envs have the wrapper `FlatAction`, which splits flat actions.
    if isinstance(flat_space, StructuredActions) and flat_space != env.single_action_space:
        env.close()
        raise ConfigurationError(
            f"Env '{id}' has actions of several parts, {env.single_action_space}, which "
            "vectorization: vector_entry_point does not support: use vectorization: sync or async."
        )


def _make_one(
    id: str, env_kwargs: dict[str, Any], wrappers: list[EnvWrapper], names: dict[str, str]
) -> gymnasium.Env:
    _import(id)
    # Remove Gymnasium's checker, which only warns, and only in the first steps.
    env = gymnasium.make(id, disable_env_checker=True, **env_kwargs)
    _refuse_batched(id, env.unwrapped)
    env = _with_returns_checked(env)  # innermost, below Gymnasium's own wrappers
    for wrapper in (None, *wrappers):  # each layer may use the env's own names
        env = env if wrapper is None else wrapper(env)
        env = _NamedInterventions(env, names) if names else env
    _check_layers(env)
    _check_units(env)
    # `FlatAction` outermost, so that the user's wrappers see the env's own actions.
    structured = isinstance(flat_actions(env.action_space), StructuredActions)
    env = ReplayableEpisode(FlatAction(env) if structured else env)
    env.action_space = named(env.action_space, env.metadata.get("action_names") or ())
    return env


def _with_returns_checked(env: gymnasium.Env) -> gymnasium.Env:
    outer = env
    while isinstance(outer, gymnasium.Wrapper) and isinstance(outer.env, gymnasium.Wrapper):
        outer = outer.env
    if not isinstance(outer, gymnasium.Wrapper):
        return CheckedReturns(outer)
    outer.env = CheckedReturns(outer.env)
    return env


def _check_layers(env: gymnasium.Env) -> None:
    layers = [env]
    while isinstance(env, gymnasium.Wrapper):
        layers.append(env := env.env)
    for layer in layers:
        name = type(layer).__name__
        statistics = [key for key, value in vars(layer).items() if _is_statistics(value)]
        require(
            not statistics,
            f"The wrapper {name} keeps its own statistics ({', '.join(statistics)}): each env, "
            "the evaluation, a resumed run and an exported policy would scale differently. "
            "Remove the wrapper, and let the policy normalise with shared and saved statistics: "
            "model.policy.normalize_observation: true, and model.normalize_reward: true.",
        )
        require(
            not isinstance(layer, gymnasium.wrappers.Autoreset),
            "The wrapper Autoreset resets a finished env one step late, but training resets it "
            "within the step: remove the wrapper.",
        )
        parameters = inspect.signature(layer.reset).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        missing = [key for key in ("seed", "options") if key not in parameters and not takes_any]
        require(
            not missing,
            f"{name}.reset does not take {' and '.join(missing)}: the env may be written for an "
            "old version of Gym. Gymnasium calls reset(*, seed=None, options=None), which "
            "returns observation and info, and step returns observation, reward, terminated, "
            "truncated and info. Correct the env, or wrap it in shimmy's GymV21CompatibilityV0.",
        )


def _is_statistics(value: Any) -> bool:
    # By name, because Gymnasium's wrappers and others have classes of their own.
    return any(cls.__name__ == "RunningMeanStd" for cls in type(value).__mro__)


def _import(id: str) -> None:
    spec = spec_of(id)
    if spec is not None and spec.entry_point is not None:
        is_text = isinstance(spec.entry_point, str)
        creator = load_env_creator(spec.entry_point) if is_text else spec.entry_point
        if isinstance(creator, type):  # a function shows nothing before its call
            _refuse_batched(id, creator)
    convert_mujoco_warnings()


def _refuse_batched(id: str, env: Any) -> None:
    cure = replacement(env)
    require(cure is None, f"Env '{id}' is no single env: {cure}")


def spec_of(id: str) -> Any:
    """Return the spec of an id (also `module:name`, or without version), or None."""
    # `gymnasium.spec` does not accept these two forms.
    name = id.rpartition(":")[2]
    versions = [spec for spec in gymnasium.registry.values() if spec.id.rpartition("-v")[0] == name]
    newest = max(versions, key=lambda spec: spec.version or 0, default=None)
    return gymnasium.registry.get(name, newest)


def _check_units(env: gymnasium.Env) -> None:
    while isinstance(env, gymnasium.Wrapper) and env.metadata.get("reports_interventions"):
        inner = env.env
        # Clipping keeps the unit of an action, other wrappers may scale it.
        if isinstance(env, gymnasium.ActionWrapper) and not isinstance(env, ClipAction):
            require(
                env.action_space == inner.action_space,
                f"The wrapper {type(env).__name__} changes actions from {env.action_space} to "
                f"{inner.action_space}, but an inner env reports executed actions in the inner "
                "space. Put the reporting wrapper, such as Intervention, after it in `wrappers`.",
            )
        env = inner


class _NamedInterventions(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, names: dict[str, str]) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, "reports_interventions": True}
        self._theirs = {ours: theirs for theirs, ours in names.items()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *result, info = self.env.step(action)
        reports = {o: info[t] for o, t in self._theirs.items() if t in info}
        if not reports:
            return *result, info
        report = report_intervention(reports, action, False)
        return *result, report_intervention(info, report[EXECUTED_ACTION], report[INTERVENED])


def _of_a_script(id: str) -> ConfigurationError:
    entry_point = gymnasium.registry[id].entry_point
    module = entry_point.partition(":")[0] if isinstance(entry_point, str) else "module"
    return ConfigurationError(
        f"Env '{id}' is registered in this process, but not in the spawned processes of the envs. "
        f"Register it in a module, and put the module before the id: {module}:{id}."
    )


def _unknown_namespace(id: str) -> ConfigurationError:
    name = id.rpartition(":")[2]
    namespace = name.partition("/")[0]
    begins = f"No Gymnasium env '{id}': its namespace '{namespace}' is not registered"
    names = sorted({spec.namespace for spec in gymnasium.registry.values() if spec.namespace})
    if namespace not in NAMESPACES:
        return ConfigurationError(
            f"{begins}; registered are {', '.join(names)}{closest(namespace, names)}. For an env "
            f"of another package, name the module that registers it: its_module:{name}."
        )
    module, package = NAMESPACES[namespace]
    # Installed, but not imported.
    install = "" if importlib.util.find_spec(module) else f"pip install {package}, and "
    return ConfigurationError(
        f"{begins}, because {module} is not imported. To import it, {install}name the module with "
        f"the id: {module}:{name}."
    )


def missing_package(id: str, error: Exception) -> ConfigurationError:
    """Return an error with the packages to install for an env."""
    if "moviepy" in str(error):
        return ConfigurationError(
            f"Env '{id}' has a wrapper that needs a package which is not installed: pip install "
            "moviepy. (trainer.video films evaluations without render_mode.)"
        )
    if "have been moved to" in str(error):
        return ConfigurationError(
            f"Env '{id}' is no longer part of Gymnasium{_newer(id)}. ({reason_of(error)})"
        )
    # The env or one of its wrappers may need it.
    packages = [package for key, package in EXTRAS.items() if key in str(error).lower()]
    cure = f"pip install {packages[0]} ({reason_of(error)})" if packages else reason_of(error)
    return ConfigurationError(f"Env '{id}' needs a package that is not installed: {cure}")


def _newer(id: str) -> str:
    name = id.rpartition("-v")[0]
    versions = [spec for spec in gymnasium.registry.values() if spec.name == name]
    newest = max(versions, key=lambda spec: spec.version or 0, default=None)
    return f"; use {newest.id}" if newest and newest.id != id else ""
