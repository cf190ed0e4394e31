"""Load a vision-language model from a class, a local directory, or a configuration.

All kinds but `class` need the extra `vla`. Nothing is downloaded by default.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import asks_a_hub, closest, imported, reason_of, require
from lightning_rl.extend.files import expanded, read_json
from lightning_rl.extensions.vla.adapters import (
    add_fresh_adapter,
    add_saved_adapter,
    name_without_adapter,
)
from lightning_rl.extensions.vla.weight_files import KeyReport
from lightning_rl.extensions.vla.weights import extra, fill_with_weights, one_message, quiet

Kind = Literal["class", "hf", "hf_config"]
"""Source of a model: a class, a directory of transformers, or a configuration alone."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes of weights, by their names in settings."""

ALLOWED = ("lightning_rl.",)
"""Packages of classes that need no `trust_code`."""


def load_vla_model(
    kind: Kind,
    path: str | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    model_class: str | None = None,
    model_config: Mapping[str, Any] | None = None,
    trust_code: bool = False,
    strict: bool = True,
    dtype: str = "float32",
    lora: Mapping[str, Any] | None = None,
    adapter: str | None = None,
    freeze: Sequence[str] = (),
    gradient_checkpointing: bool = False,
    allow_download: bool = False,
    meta: bool = False,
) -> nn.Module:
    """Make a model.

    Args:
        kind: `class`, an import path with arguments and optional weights; `hf`, a local directory
            from `save_pretrained` of transformers, with safetensors; `hf_config`, random weights.
        path: file of weights (`class`), directory (`hf`), or `config.json` or its directory.
        config: for `hf_config`, a configuration with `model_type` instead of a path.
        model_class: for `class`, a class of `lightning_rl`, or any class with `trust_code`.
        model_config: for `class`, the arguments of its constructor.
        trust_code: import any class, and code next to weights. Checkpoints cannot set it.
        strict: refuse weights with other names or shapes; otherwise warn.
        dtype: dtype of the weights, `float32` or `bfloat16`.
        lora: arguments of peft's `LoraConfig` for a new adapter.
        adapter: directory of a saved adapter to train, instead of `lora`.
        freeze: patterns of parameter names that are not trained, such as `*vision*`.
        gradient_checkpointing: recompute activations in the backward pass, to save memory.
        allow_download: let `path` be a model on a hub. Checkpoints cannot set it.
        meta: only the first process reads weights; the others create the model on the device
            `meta`, without memory, and `trainer.strategy: fsdp` gives them their shards.

    Raises:
        ConfigurationError: for a missing, unsafe or different file, a pattern without a match, or
            an argument that the kind does not take.
    """
    path = path and str(expanded(path))
    require(dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got '{dtype}'.")
    require(lora is None or adapter is None, "Give lora (a fresh adapter) or adapter, not both.")
    with away_from_first(meta) as on_meta:  # shapes alone; FSDP fills them from the first process
        if kind == "class":
            weights = None if on_meta else path
            model = _from_class(model_class, model_config or {}, weights, trust_code, strict)
            model = model.to(DTYPES[dtype])
        elif kind == "hf" and not on_meta:
            model = _from_directory(path, DTYPES[dtype], trust_code, strict, allow_download)
        else:
            kinds = ("hf", "hf_config")
            require(kind in kinds, f"kind must be class, hf or hf_config, got '{kind}'.")
            model = _from_config(path, config, DTYPES[dtype])
        if gradient_checkpointing:
            recompute_activations(model)
        model = _with_adapter(model, lora, adapter, strict)
    freeze_matching(model, freeze)  # last: a pattern freezes the adapters of its layers, too
    return model


@contextmanager
def away_from_first(meta: bool) -> Iterator[bool]:
    """With `meta`, create tensors on `meta`, except in the first process; yield whether."""
    first = getattr(rank_zero_only, "rank", 0) == 0  # known before the processes are connected
    on_meta = meta and not first
    with torch.device("meta") if on_meta else nullcontext():
        yield on_meta


def _with_adapter(
    model: nn.Module, lora: Mapping[str, Any] | None, adapter: str | None, strict: bool
) -> nn.Module:
    if adapter is not None:
        return add_saved_adapter(model, adapter, strict)
    return model if lora is None else add_fresh_adapter(model, lora)


def recompute_activations(model: nn.Module) -> None:
    """Compute the activations of a model's layers again in the backward pass, to save memory.

    Raises:
        ConfigurationError: the model cannot.
    """
    require(
        getattr(model, "supports_gradient_checkpointing", True)
        and hasattr(model, "gradient_checkpointing_enable"),
        f"{type(model).__name__} has no gradient_checkpointing_enable: remove "
        "gradient_checkpointing.",
    )
    # Reentrant checkpointing drops gradients if a block's inputs have none, as with frozen
    # embeddings.
    cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})


def keep_recomputing(model: nn.Module) -> None:
    """Let `recompute_activations` also hold in eval mode; call it after each change of the mode."""
    # Layers recompute activations only if their own training flag is set. Their children, with
    # dropout, keep the mode.
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and any(module.children()):
            module.training = True


def freeze_matching(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names, without adapters, match a pattern.

    Raises:
        ConfigurationError: for a pattern without a match.
    """
    names = {name: name_without_adapter(name) for name, _ in model.named_parameters()}
    for pattern in patterns:
        matching = [name for name, plain_name in names.items() if fnmatchcase(plain_name, pattern)]
        options = list(dict.fromkeys(names.values()))
        require(
            bool(matching),
            f"freeze pattern '{pattern}' matches no parameter{closest(pattern, options)}. Names "
            f"look like {', '.join(options[:3])}; use *, as in '*vision*'.",
        )
        for name in matching:
            model.get_parameter(name).requires_grad_(False)


def import_model_class(model_class: str) -> type[nn.Module]:
    """Import a class by its path, which runs the code of its module.

    Raises:
        ConfigurationError: if the import fails, or the class is not an `nn.Module`.
    """
    try:
        cls = imported(model_class)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"model_class '{model_class}' cannot be imported: {error}. Give the path of a class, "
            "as in my_vla.MyVLA, whose module is installed or in the working directory."
        ) from error
    require(
        isinstance(cls, type) and issubclass(cls, nn.Module),
        f"model_class '{model_class}' is a {type(cls).__name__}: it must be the path of a class "
        "that is a torch.nn.Module, as in my_vla.MyVLA.",
    )
    return cast(type[nn.Module], cls)


def instantiate_model(
    cls: type[nn.Module], model_config: Mapping[str, Any], provided: Mapping[str, Any] | None = None
) -> nn.Module:
    """Make a model; `provided` arguments are passed only if the constructor names them.

    Raises:
        ConfigurationError: for an unknown or missing argument, or lazy layers.
    """
    parameters = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
    arguments = {key: value for key, value in (provided or {}).items() if key in parameters}
    # The policy provides the other arguments: they are no settings.
    settable = [
        p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in arguments
    ]
    names = [p.name for p in settable]
    takes = f"it takes {', '.join(names) if names else 'none'}"
    for name in model_config:
        require(
            name in names or any(p.kind is p.VAR_KEYWORD for p in parameters.values()),
            f"model_config has '{name}', which {cls.__name__} does not take; {takes}"
            f"{closest(name, names)}.",
        )
    for p in settable:
        require(
            p.name in model_config or p.default is not p.empty,
            f"model_config has no '{p.name}', which {cls.__name__} needs; {takes}.",
        )
    model = cls(**arguments, **model_config)
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    require(
        not lazy,
        f"{cls.__name__} has layers whose sizes are unknown before the first call: "
        f"{', '.join(lazy[:3])}. Weights are loaded before that: replace lazy layers, such as "
        "nn.LazyLinear by nn.Linear.",
    )
    return model


def image_statistics(path: str | None) -> tuple[list[float], list[float]] | None:
    """Return mean and standard deviation of pixels from a directory's preprocessor config."""
    # transformers may nest the settings of pictures.
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = expanded(path or "") / name
        if path is not None and file.is_file():
            content = read_json(file)
            content = content.get("image_processor", content)
            if "image_mean" in content and "image_std" in content:
                return list(content["image_mean"]), list(content["image_std"])
    return None


def _from_class(
    model_class: str | None,
    model_config: Mapping[str, Any],
    path: str | None,
    trust_code: bool,
    strict: bool,
) -> nn.Module:
    if model_class is None:
        raise ConfigurationError("kind: class needs model_class, an import path: my_vla.MyVLA.")
    require(
        trust_code or model_class.startswith(ALLOWED),
        f"{model_class} is not imported, because importing runs its code. Set trust_code: true if "
        f"you trust the class; otherwise classes must come from {', '.join(ALLOWED)}.",
    )
    model = instantiate_model(import_model_class(model_class), model_config)
    if path is not None:
        fill_with_weights(model, path, strict)
    return model


def _from_directory(
    path: str | None, dtype: torch.dtype, trust_code: bool, strict: bool, allow_download: bool
) -> nn.Module:
    require(path is not None, "kind: hf needs the path of a directory.")
    assert path is not None
    # Without the file, the path may be the name of a model on a hub.
    local = (Path(path) / "config.json").is_file()
    require(
        local or allow_download,
        f"No model at {path}: there is no {Path(path) / 'config.json'}. Nothing is downloaded "
        "unless allow_download: true; give a local directory that save_pretrained wrote.",
    )
    require(
        not (Path(path) / "adapter_config.json").is_file(),
        f"{path} holds an adapter, but transformers would load its base model: give the directory "
        "of the model as path, and of the adapter as adapter.",
    )
    # Without trust, the configuration may name neither code nor a hub.
    if local and not trust_code:
        file = Path(path) / "config.json"
        _refuse_a_hub(read_json(file), str(file))
    transformers = extra("transformers")
    try:
        with quiet(transformers):
            model, info = transformers.AutoModelForImageTextToText.from_pretrained(
                path,
                local_files_only=local or not allow_download,  # no hub for directories
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_code,
                ignore_mismatched_sizes=True,  # reported below, with missing weights
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} cannot be loaded: {reason_of(error)} Weights must be .safetensors, because a "
            "pickle can run any code. Convert a pickle that you trust with save_pretrained."
        ) from error
    # The entries are names, or tuples that begin with the name, depending on the version.
    mismatched = [str(key[0] if isinstance(key, tuple) else key) for key in info["mismatched_keys"]]
    report = KeyReport(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), mismatched)
    report.check(path, strict)
    return cast(nn.Module, model)


def _refuse_a_hub(settings: Any, source: str) -> None:
    """Refuse settings, at any depth, with which transformers imports or downloads code."""
    for key, value in settings.items() if isinstance(settings, Mapping) else enumerate(settings):
        require(
            not asks_a_hub(key, value),
            f"{source} sets {key}: {value!r}, with which transformers may import or download code. "
            f"Remove {key}; of implementations, eager and sdpa are allowed.",
        )
        if isinstance(value, Mapping | list):
            _refuse_a_hub(value, source)


def _from_config(
    path: str | None, config: Mapping[str, Any] | None, dtype: torch.dtype
) -> nn.Module:
    require((path is None) != (config is None), "kind: hf_config needs path or config, not both.")
    if path is not None:
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        require(file.is_file(), f"No configuration at {file}.")
        config = read_json(file)
    # A copy, because model_type is taken out below.
    settings = dict(cast(Mapping[str, Any], config))
    require("model_type" in settings, "The configuration has no model_type, such as 'smolvlm'.")
    _refuse_a_hub(settings, "The configuration of the model")
    transformers = extra("transformers")
    with (
        quiet(transformers),
        one_message("transformers cannot make a model from the configuration"),
    ):
        spec = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = transformers.AutoModelForImageTextToText.from_config(spec, trust_remote_code=False)
    return cast(nn.Module, model.to(dtype))
