"""Add LoRA adapters of peft to a model, new or from a local directory."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import closest, require
from lightning_rl.extend.files import expanded, read_json
from lightning_rl.extensions.vla.weight_files import fitting, load_weights
from lightning_rl.extensions.vla.weights import extra, one_message

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""Files in which peft saves the weights of an adapter."""

LORA_SETTINGS = (
    *("r", "lora_alpha", "lora_dropout", "lora_bias", "bias", "use_rslora", "use_dora"),
    *("target_modules", "exclude_modules", "target_parameters", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("init_lora_weights", "trainable_token_indices", "ensure_weight_tying"),
)
"""Arguments of peft's `LoraConfig` that are passed on: none imports, fetches or opens a text."""

FIRST_WEIGHTS = (True, False, None, "gaussian", "olora", "orthogonal", "pissa")
"""Values of `init_lora_weights`; the others need data or further packages."""

NOTES = ("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping")
"""Notes of peft in an `adapter_config.json`, which are not read."""

LARGEST_RANK = 4096
"""Largest rank of an adapter: more need more memory than the layers of any model."""

LONGEST_MATCH = 20.0
"""Timeout in seconds for matching a regular expression with all names of a model."""

INSERTED = re.compile(
    r"^base_model\.model\.|\.(?:base_layer|original_module|(?:lora_\w+|modules_to_save)\.default)"
    r"(?=\.|$)"
)
"""Parts of a parameter's name that peft inserts."""

LORA = re.compile(r"\.lora_\w+\.")
"""Part of the names of all tensors of a LoRA adapter."""

FIRST_FACTOR = re.compile(r"(\.lora_(?:embedding_)?)A\.")
"""Part of the names of the first factors A; the second ones have B there."""

NEUTRAL = 1e-2
"""Largest norm of a product BA, relative to the norms of its factors, that counts as 0."""


def name_without_adapter(name: str) -> str:
    """Return a parameter's name without an adapter, or the name of the weight that it adapts."""
    return INSERTED.sub("", name)


def add_fresh_adapter(model: nn.Module, lora: Mapping[str, Any]) -> nn.Module:
    """Add a new LoRA adapter, which does not change the outputs yet, to a frozen model.

    `lora` are those arguments of peft's `LoraConfig` that `LORA_SETTINGS` lists. Default of
    `target_modules`: all linear layers.

    Raises:
        ConfigurationError: for an unknown argument, or one that does not fit the model.
    """
    peft = extra("peft")
    _check_settings(lora, "lora")
    require(
        not lora.get("lora_dropout"),
        f"lora has lora_dropout={lora.get('lora_dropout')!r}, which has no effect: a policy is in "
        "eval mode in training, too, so that a first ratio is 1. Remove it.",
    )
    # Without targets peft takes the layers of models that it knows, and refuses other models.
    settings = {"target_modules": "all-linear", "init_lora_weights": True, **lora}
    _check_names(model, settings, "lora")
    with one_message(f"lora={dict(lora)} cannot be added to {type(model).__name__}"):
        return cast(nn.Module, peft.get_peft_model(model, peft.LoraConfig(**settings)))


def add_saved_adapter(model: nn.Module, directory: str, strict: bool = True) -> nn.Module:
    """Add a trainable adapter from a local directory of peft's `save_pretrained`.

    `strict` refuses weights with other names or shapes; otherwise warn.

    Raises:
        ConfigurationError: for a missing or damaged file, or an adapter of another model.
    """
    peft = extra("peft")
    place = expanded(directory)
    settings = _saved_settings(place, peft.LoraConfig().to_dict())
    files = [place / name for name in ADAPTER_FILES if (place / name).is_file()]
    require(
        bool(files),
        f"No weights of an adapter in {directory}: there is no {' or '.join(ADAPTER_FILES)}. "
        "Nothing is downloaded; copy the file there.",
    )
    _check_names(model, settings, f"{directory}/adapter_config.json")
    with one_message(f"The adapter in {directory} cannot be added to {type(model).__name__}"):
        # Not by `from_pretrained` of peft, which reads all of adapter_config.json.
        adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    weights = load_weights(files[0])
    adapter_state = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    weights = fitting(adapter_state, weights, directory, strict)
    peft.set_peft_model_state_dict(adapted, weights)
    return cast(nn.Module, adapted)


def with_fresh_adapter(
    state: Mapping[str, Tensor], saved: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], str | None]:
    """Rename weights saved without an adapter for a policy with a LoRA adapter.

    If the policy has no adapter, or `saved` has an adapter, return `saved`. Otherwise return the
    renamed weights with the policy's adapter, and a message for the user.

    Args:
        state: the policy's state dict, [...].
        saved: the weights, [...].

    Raises:
        ConfigurationError: if the policy's adapter would change what the saved weights compute.
    """
    adapter = {key: value for key, value in state.items() if LORA.search(key)}
    if not adapter or any(LORA.search(key) for key in saved):
        return dict(saved), None
    require(
        _is_neutral(adapter),
        "The checkpoint has no LoRA adapter, but the policy's own one changes the outputs of its "
        "model from the beginning (pissa, olora, dora, or a saved adapter), so that the policy "
        "would not act like the checkpoint's. Remove init_lora_weights and use_dora from lora; or "
        "let path, instead of trainer.init_from, name the weights that the adapter belongs to.",
    )
    names = {key: _plain(key) for key in state if key not in adapter}
    renamed = {key: saved[base_name] for key, base_name in names.items() if base_name in saved}
    # Names that the policy does not have stay, so that loading reports them.
    renamed |= {key: value for key, value in saved.items() if key not in names.values()}
    note = (
        "The checkpoint has no LoRA adapter: the policy's own adapter starts fresh, "
        f"{len(adapter)} "
    )
    return renamed | adapter, f"{note}entries, and the saved weights go into the base model."


def _is_neutral(adapter: Mapping[str, Tensor]) -> bool:
    """Return whether an adapter changes no output of any model."""
    # DoRA's magnitudes are the norms of the weights that it was made for.
    if any(".lora_magnitude_vector." in key for key in adapter):
        return False
    for key, value in adapter.items():
        partner = adapter.get(FIRST_FACTOR.sub(r"\1B.", key))
        if partner is None or partner is value:
            continue
        a, b = (x.full_tensor() if isinstance(x, DTensor) else x for x in (value, partner))
        a, b = a.float().flatten(1), b.float().flatten(1)  # [r, in], [out, r]
        # |BA|^2 by matrices [r, r]: BA itself is as large as the weight.
        product = ((b.T @ b) * (a @ a.T)).sum()
        if product > (NEUTRAL * a.norm() * b.norm()) ** 2:
            return False
    return True


def _plain(key: str) -> str:
    name = key.replace(".base_model.model.", ".", 1)
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.default)\.", ".", name)


def _check_settings(settings: Mapping[str, Any], source: str) -> None:
    for name in settings:
        # The distance of the names does not show that peft calls the rank r.
        likely = ", did you mean 'r'?" if name == "rank" else closest(name, LORA_SETTINGS)
        require(
            name in LORA_SETTINGS,
            f"{source} has '{name}', but allowed are {', '.join(LORA_SETTINGS)}{likely}.",
        )
    by_name = settings.get("rank_pattern") or {}
    require(isinstance(by_name, Mapping), f"{source} has rank_pattern={by_name!r}, no mapping.")
    # 8 is peft's default.
    for rank in (settings.get("r", 8), *by_name.values()):
        require(
            type(rank) is int and 1 <= rank <= LARGEST_RANK,
            f"{source} has r={rank!r}; the rank must be a whole number of at least 1 and at most "
            f"{LARGEST_RANK}.",
        )
    first = settings.get("init_lora_weights", True)
    require(
        first in FIRST_WEIGHTS,
        f"{source} has init_lora_weights={first!r}; allowed: {', '.join(map(str, FIRST_WEIGHTS))}.",
    )


def _saved_settings(place: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    file = place / "adapter_config.json"
    require(
        file.is_file(),
        f"No adapter at {place}: there is no adapter_config.json. Give a directory that "
        "save_pretrained of peft wrote, or lora for a fresh one.",
    )
    settings = read_json(file)
    # Other types load models and tokenizers from a hub, and import what the file names.
    kind = settings.pop("peft_type", None)
    require(
        kind == "LORA",
        f"{file} has peft_type: {kind!r}, but only adapters of type LORA are read. Write one with "
        "save_pretrained of peft.",
    )
    settings.pop("lora_dropout", None)  # of the training before; here it has no effect
    # A newer peft writes settings that this list does not have: unset ones change nothing.
    settings = {
        name: value
        for name, value in settings.items()
        if name in LORA_SETTINGS or not (name in NOTES or _is_unset(value, defaults.get(name)))
    }
    _check_settings(settings, str(file))
    return settings


def _is_unset(value: Any, default: Any) -> bool:
    return not value or value == default


def _check_names(model: nn.Module, settings: Mapping[str, Any], source: str) -> None:
    names = [name for name, _ in model.named_modules()]
    targets = settings.get("target_modules")
    if isinstance(targets, list | tuple | set):
        # peft matches a whole name, or its end after a dot.
        ends = sorted({name.rpartition(".")[2] for name in names})
        for target in targets:
            require(
                any(name == target or name.endswith(f".{target}") for name in names),
                f"{source}: target_modules has '{target}', but no module of the model has that "
                f"name{closest(str(target), ends)}.",
            )
    for setting in ("target_modules", "exclude_modules"):
        expression = settings.get(setting)
        if isinstance(expression, str) and expression != "all-linear":
            matches = _matching(expression, names, f"{source}: {setting}")
            require(
                matches > 0 or setting != "target_modules",
                f"{source}: target_modules '{expression}' matches no module of the model. Set a "
                "regular expression for whole names, such as '.*q_proj', or a list of names.",
            )
    # peft matches these keys as expressions, at the end of a name.
    for setting in ("rank_pattern", "alpha_pattern"):
        for key in settings.get(setting) or ():
            _matching(rf"(.*\.)?({key})", names, f"{source}: {setting}")


def _matching(expression: str, names: Sequence[str], setting: str) -> int:
    try:
        re.compile(expression)
        program = "import json, re, sys; e, n = json.load(sys.stdin); "
        program += "print(sum(re.fullmatch(e, x) is not None for x in n))"
        # Use a subprocess, because Python cannot interrupt a slow expression.
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            input=json.dumps([expression, list(names)]),
            capture_output=True,
            text=True,
            timeout=LONGEST_MATCH,
            check=True,
        )
    except re.error as error:
        raise ConfigurationError(
            f"{setting} '{expression}' is not a regular expression: {error}."
        ) from error
    except subprocess.TimeoutExpired:
        raise ConfigurationError(
            f"{setting} '{expression}' takes more than {LONGEST_MATCH:g} s to match the names of "
            "the model, probably because of nested repetitions such as (a+)+. Give a list of "
            "names."
        ) from None
    return int(done.stdout)
