"""Make the policy of a checkpoint again, `load_policy(path)`, or its algorithm.

The checkpoint is data here as on the command line, and passes the same checks.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import gymnasium
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_info

from lightning_rl.algorithms import Algorithm
from lightning_rl.algorithms.checks import check_description, check_weights
from lightning_rl.checkpoints.format import CONFIG_KEY, SPACES_KEY, STATE_KEY, read_checkpoint
from lightning_rl.checkpoints.trust import checked_config, only_allowed_imports
from lightning_rl.cli.kept_config import config_of, in_words, lacks_of, of_a_script, settings_of
from lightning_rl.cli.messages import explain
from lightning_rl.cli.parsing import check_classes, take_numpy_numbers
from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.deploy.export.weights import is_exported, read_exported
from lightning_rl.envs import VectorEnv
from lightning_rl.envs.factories import EnvFactory, make_env
from lightning_rl.policies import Policy
from lightning_rl.policies.base import check_weights_are_numbers
from lightning_rl.policies.spaces import space_from
from lightning_rl.system.construction import GIVEN_BY_THE_ENV
from lightning_rl.system.errors import ConfigurationError, require
from lightning_rl.system.permission import CURE_IN_PYTHON
from lightning_rl.system.plain_yaml import dump_yaml
from lightning_rl.system.runs import find_checkpoint

Spaces = dict[str, gymnasium.Space[Any]]
"""By the names of a policy's arguments."""

LOAD_POLICY = "load_policy"
"""What a message calls the function; the other is `CLASS.load_from_checkpoint`."""


class Trained(NamedTuple):
    """What a checkpoint holds of a policy.

    Attributes:
        policy: with its weights, in eval mode.
        path: of the file.
        content: of the file.
        settings: the configuration of its run; empty where the file has none.
    """

    policy: Policy
    path: Path
    content: dict[str, Any]
    settings: dict[str, Any]


def load_policy(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    trust_code: bool = False,
    output_dir: str | Path = "outputs",
    policy: Policy | None = None,
) -> TrainedPolicy:
    """Make the policy of a checkpoint again, ready to act, without env, trainer or algorithm.

    Args:
        path: a checkpoint, a run directory (then its last one), `last` or `best` of the newest run,
            or a `.safetensors` file that `rl-cli export` wrote.
        device: where it computes.
        trust_code: import whatever class the file names as the policy's, or in it. Without it only
            those of this package count.
        output_dir: where runs are looked for, for `last` and `best`.
        policy: takes up the weights, where the file cannot say how it is made.

    Raises:
        ConfigurationError: for a file that cannot be read, one that names other classes, one that
            could not say how its policy is made, and weights of another policy than that given.
    """
    found = load_trained(path, trust_code=trust_code, output_dir=output_dir, policy=policy)
    return TrainedPolicy(found.policy.to(device))


def load_trained(
    checkpoint: str | Path,
    *,
    trust_code: bool = False,
    output_dir: str | Path = "outputs",
    policy: Policy | None = None,
    cure: str = CURE_IN_PYTHON,
) -> Trained:
    """Make the policy of a checkpoint, and return what else the file says; see `load_policy`.

    `cure` is what a refusal of code of others ends with.
    """
    path = find_checkpoint(str(checkpoint), output_dir)
    content = read_exported(path) if is_exported(path) else read_checkpoint(path)
    given = {} if policy is None else {"policy": policy}
    settings = settings_of(config_of(content, path), path) if CONFIG_KEY in content else {}
    with _locked(trust_code, cure):
        config = _of_the_policy(_config(path, content, given))
        if not trust_code:
            config = _checked(path, config, cure)
        lacks = {**lacks_of(content), **of_a_script(config)}
        if not given and "policy" not in config["model"]["init_args"]:
            lacks.setdefault("model.policy", "it holds no configuration of it")
        _refuse_lacking(LOAD_POLICY, path, _starting(lacks, "model.policy"), given)
        if policy is None:
            spaces = _spaces(path, content, config, LOAD_POLICY)
            with torch.random.fork_rng(devices=[]):  # of weights that are replaced at once
                policy = _build_policy(path, config["model"]["init_args"]["policy"], spaces)
    weights = content["state_dict"]
    own = {f"policy.{name}": value for name, value in policy.state_dict().items()}
    saved = {name: value for name, value in weights.items() if name.startswith("policy.")}
    cure = "Give the policy that it was trained with, or none where the file says how it is made."
    check_weights(own, saved, cure)
    check_description(policy, content[STATE_KEY], cure)
    policy.load_state_dict({name.removeprefix("policy."): one for name, one in saved.items()})
    check_weights_are_numbers(policy, str(path))
    policy.eval()
    trainer = settings.get("trainer")
    policy.compute_in(str(trainer.get("precision")) if isinstance(trainer, dict) else "")
    return Trained(policy, path, content, settings)


def env_of(trained: Trained, trust_code: bool = False, cure: str = CURE_IN_PYTHON) -> VectorEnv:
    """Make one env of those that a policy was trained in; `cure` as in `load_trained`.

    Raises:
        ConfigurationError: where the file names none, or one that cannot be made here, or that is
            code of others.
    """
    data = trained.settings.get("data")
    config = {"data": {"env": data.get("env") if isinstance(data, dict) else None}}
    with _locked(trust_code, cure):
        if not trust_code:
            config = _checked(trained.path, config, cure)
        return _made_env(trained.path, config["data"]["env"], LOAD_POLICY)


def load_algorithm(
    cls: type[Algorithm],
    checkpoint: str | Path,
    map_location: torch.device | str,
    trust_code: bool,
    output_dir: str | Path,
    given: Mapping[str, Any],
) -> Algorithm:
    """Return the algorithm of a checkpoint; see `Algorithm.load_from_checkpoint`.

    Args:
        cls: which it has to be.
        checkpoint: a file, a run directory, `last` or `best`.
        map_location: where its tensors go.
        trust_code: run whatever code its configuration names.
        output_dir: where runs are looked for.
        given: arguments of the constructor that replace those of the checkpoint.

    Raises:
        ConfigurationError: see there.
    """
    path = find_checkpoint(str(checkpoint), output_dir)
    content = read_checkpoint(path)
    with _locked(trust_code):
        config = _config(path, content, given)
        if not trust_code:
            config = _checked(path, config)
        kind = _class_of(cls, path, config["model"].get("class_path"))
        lacks = {**lacks_of(content), **of_a_script(config)}
        if CONFIG_KEY not in content:
            lacks["model.policy"] = "it holds no configuration"
        _refuse_lacking(f"{kind.__name__}.load_from_checkpoint", path, lacks, given)
        spaces = {}
        if "policy" not in given:
            spaces = _spaces(path, content, config, "load_from_checkpoint")
        with torch.random.fork_rng(devices=[]):  # of weights that are replaced at once
            arguments = {**config["model"].get("init_args", {}), **given}
            module = _build(path, kind, arguments, spaces)
        module.begin_with(content)
    return module.to(map_location).eval()


def _locked(trust_code: bool, cure: str = CURE_IN_PYTHON) -> AbstractContextManager[None]:
    """Have what is built inside run no code of others, unless that is trusted."""
    return nullcontext() if trust_code else only_allowed_imports((), cure)


def _of_the_policy(config: dict[str, Any]) -> dict[str, Any]:
    """Return of a configuration what makes the policy: of the algorithm's code nothing is run."""
    arguments = config["model"]["init_args"]
    kept = {name: value for name, value in arguments.items() if name == "policy"}
    return {**config, "model": {"init_args": kept}}


def _starting(lacks: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return what is lacking of a setting."""
    return {name: what for name, what in lacks.items() if f"{name}.".startswith(f"{setting}.")}


def _config(path: Path, content: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the configuration of a checkpoint is needed, `model` and perhaps `data.env`.

    Without what the caller gives. A run in Python wrote none in earlier versions.
    """
    settings = settings_of(config_of(content, path), path) if CONFIG_KEY in content else {}
    model = settings.get("model")
    model = dict(model) if isinstance(model, dict) else {}
    arguments = model.get("init_args")
    arguments = arguments if isinstance(arguments, dict) else {}
    model["init_args"] = {name: value for name, value in arguments.items() if name not in given}
    data = settings.get("data")
    if "policy" in given or _kept_spaces(content) or not isinstance(data, dict):
        return {"model": model}
    return {"model": model, "data": {"env": data.get("env")}}


def _checked(path: Path, config: dict[str, Any], cure: str = CURE_IN_PYTHON) -> dict[str, Any]:
    """Return the configuration, if it names no code of others."""
    checked = checked_config(dump_yaml(config), path, cure)
    if checked.reads:
        reads = re.sub("[^ -~]", "?", ", ".join(checked.reads.values()))
        rank_zero_info(f"The checkpoint {path} reads, as data: {reads}.")
    return config


def _class_of(cls: type[Algorithm], path: Path, named: str | None) -> type[Algorithm]:
    """Return the class that a checkpoint names, if it is the one that the caller wants.

    Where it could name none, as no module has it, that is the one the caller wants.
    """
    found = cls
    if named is not None and not of_a_script({"model": named}):
        parser = _parser()
        parser.add_argument("--model", type=type[Algorithm])
        with _explained(path):
            found = _parsed(parser, {"model": named}).model
    require(
        issubclass(found, cls),
        f"The checkpoint {path} holds a {found.__name__}, which is no {cls.__name__}. Load it by "
        f"{found.__name__}.load_from_checkpoint, or by Algorithm.load_from_checkpoint, which takes "
        "any.",
    )
    require(
        found is not Algorithm,
        f"The checkpoint {path} does not say which algorithm it holds. Load it by "
        "load_from_checkpoint of that algorithm's class, such as PPO.load_from_checkpoint.",
    )
    return found


def _refuse_lacking(
    call: str, path: Path, lacks: Mapping[str, str], given: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint that cannot say how all is made, unless the caller says it."""
    wanted: dict[str, str] = {}
    for name, what in lacks.items():
        section, _, setting = name.partition(".")
        if section == "model" and setting and setting.split(".")[0] not in given:
            wanted[setting] = what
    arguments = sorted({f"{setting.split('.')[0]}=..." for setting in wanted})
    require(
        not wanted,
        f"The checkpoint {path} cannot hold {in_words(wanted)}, and does not say how to make it. "
        f"Pass it: {call}(path, {', '.join(arguments)}).",
    )


def _kept_spaces(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spaces of the policy as data; nothing where they could not be kept, or were not.

    Checkpoints of earlier versions have none.
    """
    kept = content[STATE_KEY].get(SPACES_KEY)
    return kept if isinstance(kept, dict) and None not in kept.values() else {}


def _spaces(path: Path, content: Mapping[str, Any], config: Mapping[str, Any], call: str) -> Spaces:
    """Return the spaces of the policy: those that the checkpoint holds, or those of its env."""
    kept = _kept_spaces(content)
    if not kept:
        made = _made_env(path, config.get("data", {}).get("env"), call)
        made.close()
        return {name: getattr(made, f"single_{name}") for name in GIVEN_BY_THE_ENV}
    try:
        return {name: space_from(kept[name]) for name in GIVEN_BY_THE_ENV}
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The checkpoint {path} holds spaces that cannot be made: {error!r}. Pass a policy: "
            f"{call}(path, policy=...)."
        ) from error


def _made_env(path: Path, env: Any, call: str) -> VectorEnv:
    require(
        env is not None,
        f"The checkpoint {path} holds neither the spaces of its policy nor an env that has them. "
        f"Pass a policy: {call}(path, policy=...).",
    )
    parser = _parser()
    parser.add_argument("--env", type=EnvFactory)
    with _explained(path):
        return make_env(_parsed(parser, {"env": env}).env, 1, "data.env")


def _build_policy(path: Path, config: dict[str, Any], spaces: Spaces) -> Policy:
    """Make a policy by the parser of the command line, which checks each argument."""
    parser = _parser()
    with _explained(path):
        parser.add_subclass_arguments(Policy, "policy", required=True)
        for name in spaces:
            parser.add_argument(f"--{name}", type=gymnasium.Space)
            parser.link_arguments(name, f"policy.init_args.{name}")
        return cast(Policy, _parsed(parser, {"policy": config, **spaces}).policy)


def _build(
    path: Path, kind: type[Algorithm], arguments: dict[str, Any], spaces: Spaces
) -> Algorithm:
    """Make an algorithm by the parser of the command line, which checks each argument."""
    parser = _parser()
    with _explained(path):
        parser.add_class_arguments(kind, "model")
        for name in spaces:
            parser.add_argument(f"--{name}", type=gymnasium.Space)
            parser.link_arguments(name, f"model.policy.init_args.{name}")
        return cast(Algorithm, _parsed(parser, {"model": arguments, **spaces}).model)


def _parser() -> LightningArgumentParser:
    take_numpy_numbers()
    return LightningArgumentParser(exit_on_error=False)


def _parsed(parser: LightningArgumentParser, settings: dict[str, Any]) -> Namespace:
    """Check settings, and make what they say."""
    parsed = parser.parse_object(settings)
    check_classes(parsed)
    made: Namespace = parser.instantiate(parsed)
    return made


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what the parser and constructors raise, which may be anything, into one message."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigurationError):
            cause = cause.__cause__ or cause.__context__
        raise ConfigurationError(
            f"What the checkpoint {path} describes cannot be made: "
            f"{cause or explain(str(error), cure=CURE_IN_PYTHON)}"
        ) from error
