"""Act and train with a policy from a LeRobot directory."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import do_weights_follow, require
from lightning_rl.extend.files import expanded
from lightning_rl.extend.policies import check_weights_are_numbers
from lightning_rl.extend.spaces import names_of
from lightning_rl.extensions.vla.backbone import Backbone, Features
from lightning_rl.extensions.vla.heads import ActionHead, Level, Statistics
from lightning_rl.extensions.vla.lerobot.act import ACTNetwork, ACTSettings
from lightning_rl.extensions.vla.lerobot.diffusion import DiffusionNetwork, DiffusionSettings
from lightning_rl.extensions.vla.lerobot.directory import (
    ACTION,
    PolicyDirectory,
    load_parts,
    named_weights,
    read_directory,
    read_settings,
    write_text,
    write_weights,
)
from lightning_rl.extensions.vla.lerobot.inputs import Inputs, names_of_inputs, planes_of, space_of
from lightning_rl.extensions.vla.lerobot.network import Exploration, Network
from lightning_rl.extensions.vla.lerobot.processors import (
    Processors,
    find_local,
    load_tokenizer,
    write_processors,
)
from lightning_rl.extensions.vla.lerobot.smolvla import (
    MASK,
    TOKENS,
    SmolVLANetwork,
    SmolVLASettings,
)
from lightning_rl.extensions.vla.loading import freeze_matching
from lightning_rl.extensions.vla.policy import ChunkPolicy
from lightning_rl.extensions.vla.weights import one_message
from lightning_rl.kwargs import LeRobotPolicyKwargs, Unpack

OF_KIND = {
    "act": ("log_std_init",),
    "diffusion": (),
    "smolvla": ("noise", "noise_level", "lora", "language_model", "gradient_checkpointing"),
}
"""Settings of `LeRobotPolicy` for some kinds only."""


class LeRobotBackbone(Backbone):
    """The network of a LeRobot policy, from observations to features.

    Args:
        directory: directory of the policy.
        network: network of the directory.
        inputs: reads the observation.
    """

    needs_pictures = False

    def __init__(self, directory: PolicyDirectory, network: Network, inputs: Inputs) -> None:
        super().__init__()
        self.directory, self.network, self.inputs = directory, network, inputs
        self.reads, self.summary_size, self.slot_size = inputs.reads, network.summary_size, 1
        self.vocabulary = network.vocabulary

    @property
    def blocks(self) -> Sequence[str]:
        # FSDP gathers a block at its call, but the layers of a SmolVLA are called in parts.
        return () if isinstance(self.network, SmolVLANetwork) else super().blocks

    def build(self, observation: TensorDict, num_slots: int) -> None:
        self.num_slots = num_slots

    def forward(self, observation: TensorDict) -> Features:
        return self.of_inputs(self.inputs(observation))

    def of_inputs(self, inputs: Mapping[str, Tensor]) -> Features:
        """Return the features of prepared inputs [B, ...] by LeRobot's names."""
        features: Features = self.network(inputs)
        # The policy's chunk may be shorter than the network's.
        return features._replace(slots=features.slots[:, : self.num_slots])


class LeRobotPolicy(ChunkPolicy):
    """A policy that LeRobot's `save_pretrained` wrote: ACT, Diffusion or SmolVLA.

    Its actions are chunks of `n_action_steps`, in the units of its dataset. PPO and GRPO train an
    ACT as a normal distribution around its chunk, and a SmolVLA as a flow (`FlowHead`);
    `NoisePolicy` steers the noise of a Diffusion. The value head is new.

    Args:
        observation_space, action_space: spaces of one env. Default: the names and sizes of the
            directory.
        path: required; local directory, read whenever the policy is created.
        keys: by LeRobot's name of an input, such as `observation.images.top`, the key of the env's
            observation. By default the same name, its last part, or `proprio` and `rgb`. Null
            leaves a camera out (SmolVLA).
        overrides: fields of config.json to replace, such as `{n_action_steps: 10}`.
        dataset_stats: LeRobot dataset, or a file of statistics, to normalise by instead of the
            directory's statistics; read when a policy is new, then part of its weights.
        statistics_key: dataset in statistics of several datasets, such as `so100`.
        language_model: SmolVLA: local directory with `vlm_model_name` in it, or that directory.
            Default: the directory, the one above it, and the working directory.
        lora: SmolVLA: arguments of peft's `LoraConfig` for a new adapter of the expert.
        freeze: patterns of parameter names that are not trained, such as `*backbone*`.
        gradient_checkpointing: SmolVLA: recompute activations in the backward pass, to save memory.
        log_prob_level, log_std_init, noise, noise_level: see `Exploration`.
        kwargs: see `ChunkPolicy`.

    Raises:
        ConfigurationError: for a directory that is incomplete, damaged, of another kind or with an
            option that is not supported; for spaces that do not fit; for a setting of another kind.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any] | None = None,
        action_space: gymnasium.Space[Any] | None = None,
        path: str | None = None,
        *,
        keys: dict[str, str | None] | None = None,
        overrides: dict[str, Any] | None = None,
        dataset_stats: str | None = None,
        statistics_key: str | None = None,
        language_model: str | None = None,
        lora: dict[str, Any] | None = None,
        freeze: Sequence[str] = (),
        gradient_checkpointing: bool = False,
        log_prob_level: Level = "token",
        log_std_init: float | None = None,
        noise: Literal["sde", "learnt"] | None = None,
        noise_level: float | None = None,
        **kwargs: Unpack[LeRobotPolicyKwargs],
    ) -> None:
        if path is None:
            raise ConfigurationError(
                "LeRobotPolicy has no path: give a directory that LeRobot's save_pretrained wrote."
            )
        directory = read_directory(path, overrides)
        exploration = Exploration(log_prob_level, log_std_init, noise, noise_level)
        settings = {"lora": lora, "language_model": language_model, **vars(exploration)}
        settings["gradient_checkpointing"] = gradient_checkpointing or None
        _check_kind(directory, settings)
        # Anybody may have written the directory: its numbers and names may have any value.
        with one_message(f"{directory.path} describes no policy that can be made"):
            orders = names_of_inputs(observation_space, keys or {})
            orders[ACTION] = names_of(action_space)
            processors = Processors(directory, dataset_stats, statistics_key, orders)
            places = [expanded(place) for place in (language_model, path) if place is not None]
            places += [*(place.parent for place in places), Path()]
            network, padding = _network(directory, processors, places, gradient_checkpointing)
            load_parts(network.parts(), directory)  # before LoRA renames layers
            if isinstance(network, SmolVLANetwork) and lora is not None:
                network.add_lora(lora)
            if observation_space is None:
                observation_space = space_of(directory, processors, network)
            if action_space is None:
                shape = (network.action_steps, directory.action_size)
                action_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
            _check_actions(directory, network, action_space)
            inputs = Inputs(directory, processors, network, observation_space, keys or {}, padding)

        def make_head(space: gymnasium.spaces.Box) -> ActionHead:
            return network.head(space, exploration, processors.action_bounds())

        backbone = LeRobotBackbone(directory, network, inputs)
        super().__init__(observation_space, action_space, backbone, make_head, **kwargs)
        freeze_matching(self, freeze)
        self.dataset_stats, self.statistics_key = dataset_stats, statistics_key
        if not do_weights_follow():
            check_weights_are_numbers(self, path)
        self.eval()
        self._places, self._keys, self._model_path = places, keys, language_model or path
        self.has_critic = directory.kind != "diffusion"

    @property
    def directory(self) -> PolicyDirectory:
        """The content of config.json."""
        return self._backbone.directory

    @property
    def _backbone(self) -> LeRobotBackbone:
        assert isinstance(self.backbone, LeRobotBackbone)
        return self.backbone

    def missing_statistics(
        self, state: Mapping[str, Any], prefix: str
    ) -> tuple[Statistics, str | None]:
        processors, place = self._processors, f"{prefix}backbone.inputs.processors.action"
        if processors.action is None or f"{place}.first" not in state:
            return None, None
        # A checkpoint without the head's scale has the statistics of the normaliser.
        saved = {name: state[f"{place}.{name}"] for name in ("first", "second")}
        processors.action.load_state_dict(saved)
        return processors.action_bounds(), "its normalisation of actions"

    @property
    def _processors(self) -> Processors:
        return self._backbone.inputs.processors

    def prepare(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the network's inputs [B, ...], like LeRobot's pre-processor.

        Args:
            batch: by LeRobot's names, with the names of the data if the policy renames them:
                numbers [B, ...]; pictures float [B, 3, H, W] from 0 to 1, or uint8 [B, H, W, 3];
                `task`, a list of B instructions. [B, n_obs_steps, ...] for several steps.

        Raises:
            ConfigurationError: for a missing input, or one of another shape, range or B.
        """
        processors, inputs = self._processors, {}
        renamed = {processors.rename.get(name, name): value for name, value in batch.items()}
        for name in self._backbone.inputs.sources:
            require(name in renamed, f"The batch has no {name}; it has {', '.join(renamed)}.")
            inputs[name] = self._raw_input(name, renamed[name])
        rows = {name: len(value) for name, value in inputs.items()}
        words = processors.tokenization
        if words is not None:
            require(words.task_key in renamed, f"The batch has no instructions: {words.task_key}.")
            task = renamed[words.task_key]
            texts = list(task) if isinstance(task, Iterable) else [task]
            # One text holds for the whole batch.
            texts = [task] * min(rows.values()) if isinstance(task, str) else texts
            require(
                all(isinstance(text, str) for text in texts),
                f"The batch's {words.task_key} must be a text or a list of B texts, got {task!r}.",
            )
            rows[words.task_key] = len(texts)
        require(
            len(set(rows.values())) == 1,
            f"The parts of the batch have different numbers of rows, B: {rows}.",
        )
        inputs = {name: processors.prepare(name, value) for name, value in inputs.items()}
        if words is not None:
            # An env's instructions are tokens already (VLAObservation): only batches need a
            # tokenizer.
            tokens = words.tokens(load_tokenizer(words.name, self._places), texts)
            inputs |= {TOKENS: tokens["input_ids"], MASK: tokens["attention_mask"].bool()}
        return inputs

    def _raw_input(self, name: str, value: Any) -> Tensor:
        network, feature = self._backbone.network, self.directory.inputs[name]
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"The batch's {name} is not an array of numbers: {error}."
            ) from error
        is_picture = feature.kind == "VISUAL"
        numbers = tensor.float()
        # As in LeRobot's datasets: uint8 with the colours last, floats with the colours first.
        if is_picture and tensor.dtype == torch.uint8 and tensor.dim() >= 3:
            numbers = planes_of(tensor)
        steps = (network.obs_steps,) if network.obs_steps > 1 else ()
        # A SmolVLA resizes pictures itself.
        size = numbers.shape[-2:] if network.any_size else feature.shape[1:]
        expected = [*steps, *(feature.shape[:1] + size if is_picture else feature.shape)]
        cure = " Pictures are uint8 [B, H, W, 3], or float [B, 3, H, W] from 0 to 1."
        require(
            list(numbers.shape[1:]) == expected,
            f"The batch's {name} has the shape {list(tensor.shape)}, but the policy reads "
            f"{str(['B', *expected]).replace(chr(39), '')}.{cure if is_picture else ''}",
        )
        # Floats up to 255 would pass through the network without an error.
        low, high = float(numbers.min()), float(numbers.max())
        require(
            not is_picture or 0 <= low <= high <= 1,
            f"The batch's {name} has numbers from {low:g} to {high:g}.{cure}",
        )
        return numbers

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Any], noise: Tensor | None = None) -> Tensor:
        """Return the actions [B, n_action_steps, A] for a batch, in the units of the data.

        Args:
            batch: see `prepare`.
            noise: initial noise of a SmolVLA, [B, n_action_steps, max_action_dim], or a Diffusion,
                [B, horizon, A]; [B, 1 + M, horizon, A] with noise for M steps of DDPM. Default: the
                fixed noise of deterministic acting.

        Raises:
            ConfigurationError: for a missing input, or noise for a policy without.
        """
        self.put_in_eval_mode()  # a Diffusion has batch normalisation
        features = self._backbone.of_inputs(self.prepare(batch))
        if noise is None:
            return self.head.sample(features, None)["action"]
        require(
            self.noise_size > 0,
            f"noise is for policies that start from noise, but this is a {self.directory.kind}.",
        )
        action: Tensor = cast(Any, self.head).act(features, noise.flatten(1))
        return action

    def save_directory(self, path: str) -> None:
        """Write the policy as a directory for LeRobot, with adapters merged into weights.

        Raises:
            ConfigurationError: if the directory exists.
        """
        to = expanded(path)
        require(not to.exists(), f"{path} exists; give the path of a new directory.")
        # A copy, because this policy keeps its adapters.
        merged = copy.deepcopy(self._backbone.network)
        # The head owns the expert of a SmolVLA: it is no child of the network.
        for module in [merged, *getattr(merged, "_expert", ())]:
            _merge_adapters(module)
        to.mkdir(parents=True)
        write_processors(self._processors, self.directory, to)
        write_weights(to / "model.safetensors", named_weights(merged.parts()))
        write_text(to / "config.json", json.dumps(dict(self.directory.config), indent=4))

    def read_saved(self, path: str) -> "LeRobotPolicy":
        """Return the policy of a directory from `save_directory`."""
        # The directory of a SmolVLA does not hold its language model.
        language_model = self._model_path if self.directory.kind == "smolvla" else None
        return LeRobotPolicy(
            self.observation_space,
            self.action_space,
            path,
            keys=self._keys,
            language_model=language_model,
            ignore_keys=self.ignore_keys,
        )


def _network(
    directory: PolicyDirectory, processors: Processors, places: Sequence[Path], recomputes: bool
) -> tuple[Network, int | None]:
    if directory.kind == "act":
        return ACTNetwork(read_settings(ACTSettings, directory), directory), None
    if directory.kind == "diffusion":
        return DiffusionNetwork(read_settings(DiffusionSettings, directory), directory), None
    settings = read_settings(SmolVLASettings, directory)
    require(
        processors.tokenization is not None,
        f"{directory.path}: policy_preprocessor.json has no tokenizer_processor.",
    )
    assert processors.tokenization is not None
    tokenizer = load_tokenizer(processors.tokenization.name, places)
    model = find_local(settings.vlm_model_name, places, "config.json", "language_model")
    network = SmolVLANetwork(settings, directory, model, tokenizer, recomputes)
    return network, tokenizer.pad_token_id or 0


def _check_kind(directory: PolicyDirectory, settings: Mapping[str, Any]) -> None:
    allowed = OF_KIND[directory.kind]
    for name in (name for names in OF_KIND.values() for name in names):
        require(
            settings[name] is None or name in allowed,
            f"{directory.path} is a {directory.kind}, which has no setting {name}; it has "
            f"{', '.join(allowed) or 'no allowed settings'}.",
        )


def _check_actions(
    directory: PolicyDirectory, network: Network, space: gymnasium.Space[Any]
) -> None:
    steps, shape = network.action_steps, tuple(space.shape or ())
    require(
        1 <= steps <= network.max_actions,
        f"{directory.path / 'config.json'}: n_action_steps={steps} must lie in [1, "
        f"{network.max_actions}].",
    )
    require(
        shape[1:] == (directory.action_size,),
        f"The policy in {directory.path} has chunks of actions of {directory.action_size} numbers, "
        f"but the action space is {space}. Wrap the env: "
        f"{{class_path: ActionChunk, init_args: {{env: ..., chunk_size: {steps}}}}}.",
    )
    require(
        shape[0] == steps,
        f"The policy in {directory.path} executes {steps} actions of a chunk, but the env's chunks "
        f"have {shape[0]}: set chunk_size: {steps}, or overrides: {{n_action_steps: {shape[0]}}} "
        f"(at most {network.max_actions}).",
    )


def _merge_adapters(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        # Only models of peft have this method.
        if hasattr(child, "merge_and_unload"):
            setattr(module, name, cast(Any, child).merge_and_unload())
        else:
            _merge_adapters(child)
