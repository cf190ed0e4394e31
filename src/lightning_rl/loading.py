"""Make the algorithm of a checkpoint again, with its policy: `PPO.load_from_checkpoint(path)`.

The checkpoint is data here as on the command line, and passes the same checks.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import gymnasium
import torch
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_info

from lightning_rl.algorithms import Algorithm
from lightning_rl.checkpoint_format import CONFIG_KEY, SPACES_KEY, STATE_KEY, read_checkpoint
from lightning_rl.cli.kept_config import config_of, in_words, lacks_of, of_a_script, settings_of
from lightning_rl.cli.messages import explain
from lightning_rl.cli.parsing import take_numpy_numbers
from lightning_rl.cli.trust import checked_config, only_allowed_imports
from lightning_rl.construction import GIVEN_BY_THE_ENV
from lightning_rl.envs.factories import EnvFactory, make_env
from lightning_rl.errors import ConfigurationError, require
from lightning_rl.permission import CURE_IN_PYTHON
from lightning_rl.plain_yaml import dump_yaml
from lightning_rl.policies.spaces import space_from
from lightning_rl.runs import find_checkpoint

Spaces = dict[str, gymnasium.Space[Any]]


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
    lock = nullcontext() if trust_code else only_allowed_imports((), CURE_IN_PYTHON)
    with lock:
        config = _config(path, content, given)
        if not trust_code:
            config = _checked(path, config)
        kind = _class_of(cls, path, config["model"].get("class_path"))
        lacks = {**lacks_of(content), **of_a_script(config)}
        if CONFIG_KEY not in content:
            lacks["model.policy"] = "it holds no configuration"
        _refuse_lacking(kind, path, lacks, given)
        spaces = {} if "policy" in given else _spaces(path, content, config)
        with torch.random.fork_rng(devices=[]):  # of weights that are replaced at once
            arguments = {**config["model"].get("init_args", {}), **given}
            module = _build(path, kind, arguments, spaces)
        module.begin_with(content)
    return module.to(map_location).eval()


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


def _checked(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration, if it names no code of others."""
    checked = checked_config(dump_yaml(config), path, CURE_IN_PYTHON)
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
    kind: type[Algorithm], path: Path, lacks: Mapping[str, str], given: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint that cannot say how its algorithm is made, unless the caller says it."""
    wanted: dict[str, str] = {}
    for name, what in lacks.items():
        section, _, setting = name.partition(".")
        if section == "model" and setting and setting.split(".")[0] not in given:
            wanted[setting] = what
    arguments = sorted({f"{setting.split('.')[0]}=..." for setting in wanted})
    require(
        not wanted,
        f"The checkpoint {path} cannot hold {in_words(wanted)}, and does not say how to make it. "
        f"Pass it: {kind.__name__}.load_from_checkpoint(path, {', '.join(arguments)}).",
    )


def _kept_spaces(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spaces of the policy as data; nothing where they could not be kept, or were not.

    Checkpoints of earlier versions have none.
    """
    kept = content[STATE_KEY].get(SPACES_KEY)
    return kept if isinstance(kept, dict) and None not in kept.values() else {}


def _spaces(path: Path, content: Mapping[str, Any], config: Mapping[str, Any]) -> Spaces:
    """Return the spaces of the policy: those that the checkpoint holds, or those of its env."""
    kept = _kept_spaces(content)
    if not kept:
        return _spaces_of_env(path, config.get("data", {}).get("env"))
    try:
        return {name: space_from(kept[name]) for name in GIVEN_BY_THE_ENV}
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The checkpoint {path} holds spaces that cannot be made: {error!r}. Pass a policy: "
            "load_from_checkpoint(path, policy=...)."
        ) from error


def _spaces_of_env(path: Path, env: Any) -> Spaces:
    require(
        env is not None,
        f"The checkpoint {path} holds neither the spaces of its policy nor an env that has them. "
        "Pass a policy: load_from_checkpoint(path, policy=...).",
    )
    parser = _parser()
    parser.add_argument("--env", type=EnvFactory)
    with _explained(path):
        made = make_env(_parsed(parser, {"env": env}).env, 1, "data.env")
    made.close()
    return {name: getattr(made, f"single_{name}") for name in GIVEN_BY_THE_ENV}


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
    made: Namespace = parser.instantiate(parser.parse_object(settings))
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
