"""SmolVLA of LeRobot's directories: a vision-language model, and an expert for the actions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_rl.extend.errors import require
from lightning_rl.extend.files import expanded, read_json
from lightning_rl.extensions.vla.adapters import add_fresh_adapter
from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.extensions.vla.flow import FlowHead, FlowSettings
from lightning_rl.extensions.vla.heads import ActionHead, Statistics
from lightning_rl.extensions.vla.lerobot.directory import (
    STATE,
    PolicyDirectory,
    Settings,
    refuse_unsupported,
)
from lightning_rl.extensions.vla.lerobot.network import Exploration, Network
from lightning_rl.extensions.vla.loading import keep_recomputing, recompute_activations
from lightning_rl.extensions.vla.weights import extra, one_message, quiet

PROJECTIONS = (*("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),)
"""Layers that a LoRA adapter adapts by default."""

TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
"""LeRobot's names of a tokenised instruction."""

PICTURES = "pictures"
"""Name of an input that holds the output of `embed_cameras`, instead of the pictures."""

ROPE_BASE = 10_000
"""Base of rotary positions, instead of the language model's setting."""


@dataclass(frozen=True)
class SmolVLASettings(Settings):
    """Fields of config.json of a SmolVLA."""

    of_training: ClassVar[tuple[str, ...]] = (
        *("use_cache", "load_vlm_weights", "compile_model", "compile_mode"),
    )

    chunk_size: int = 50
    n_action_steps: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    resize_imgs_with_padding: tuple[int, int] | None = (512, 512)
    empty_cameras: int = 0
    adapt_to_pi_aloha: bool = False
    use_delta_joint_actions_aloha: bool = False
    tokenizer_max_length: int = 48
    num_steps: int = 10
    freeze_vision_encoder: bool = True
    train_expert_only: bool = True
    train_state_proj: bool = True
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    add_image_special_tokens: bool = False
    attention_mode: Literal["cross_attn", "self_attn"] = "cross_attn"
    prefix_length: int = -1
    pad_language_to: str = "longest"
    num_expert_layers: int = -1
    num_vlm_layers: int = 16
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75
    min_period: float = 4e-3
    max_period: float = 4.0
    rtc_config: Any = None

    def attends_to_itself(self, layer: int) -> bool:
        """Return whether the actions of a layer attend to each other, not only to the prefix."""
        every = self.self_attn_every_n_layers
        return self.attention_mode == "self_attn" or (every > 0 and layer % every == 0)


class SmolVLANetwork(Network):
    """Keys and values of each layer of the language model, for pictures, instruction and state.

    Source: Shukor et al. 2025, "SmolVLA: A Vision-Language-Action Model for Affordable and
    Efficient Robotics".

    Args:
        settings: settings of config.json.
        directory: gives the features.
        language_model: local directory of the language model's config.json.
        tokenizer: tokenizer of transformers.
        recomputes: compute the activations of each layer again in the backward pass.

    Raises:
        ConfigurationError: for unsupported settings or features.
    """

    def __init__(
        self,
        settings: SmolVLASettings,
        directory: PolicyDirectory,
        language_model: str,
        tokenizer: Any,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        _check(settings, directory)
        self.settings, self.cameras = settings, list(directory.cameras)
        self.max_actions, self.action_steps = settings.chunk_size, settings.n_action_steps
        self.any_size = settings.resize_imgs_with_padding is not None
        self.vlm = _language_model(language_model, settings.num_vlm_layers)
        self.text = _text_settings(self.vlm)
        self.summary_size = int(self.text.hidden_size)
        self.state_proj = nn.Linear(settings.max_state_dim, self.summary_size)
        self._expert = (Expert(settings, self.text),)  # a tuple: the head owns it
        self._recomputes = self.expert.recomputes = recomputes
        if recomputes:  # pictures by the model's own method; `forward` calls the layers in parts
            recompute_activations(self.vlm)
        self.vocabulary = int(self.text.vocab_size)
        names = ("fake_image", "global_image") if settings.add_image_special_tokens else ()
        special: list[Any] = [getattr(tokenizer, f"{name}_token_id", None) for name in names]
        self.around = (special, special[:1])
        require(
            None not in special,
            f"{language_model}: add_image_special_tokens needs a tokenizer with fake_image_token "
            "and global_image_token.",
        )
        if settings.train_expert_only:
            self.vlm.requires_grad_(False)
        elif settings.freeze_vision_encoder:
            cast(Any, self.vlm).model.vision_model.requires_grad_(False)
        for name, parameter in self.vlm.named_parameters():
            if name.startswith(("lm_head", "model.text_model.norm")) or any(
                f"text_model.layers.{layer}." in name for layer in self.unused_layers
            ):
                parameter.requires_grad_(False)  # no action depends on it
        self.state_proj.requires_grad_(settings.train_state_proj)

    @property
    def expert(self) -> "Expert":
        """The velocity network of the flow; the head owns it."""
        return self._expert[0]

    @property
    def unused_layers(self) -> range:
        """The layers of the language model whose outputs no action depends on."""
        # The expert reads keys and values of a layer, not its output: the last one's is unused.
        last = (len(cast(Any, self.expert.lm_expert).layers) - 1) * self.expert.every
        return range(last, int(self.text.num_hidden_layers))

    def parts(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = dict(self.expert.named_children())
        modules |= {"vlm": self.vlm, "state_proj": self.state_proj}
        nested = ("vlm", "lm_expert")
        return {
            f"model.{'vlm_with_expert.' if name in nested else ''}{name}.": module
            for name, module in modules.items()
        }

    def head(
        self, space: gymnasium.spaces.Box, exploration: Exploration, statistics: Statistics
    ) -> ActionHead:
        flow = FlowSettings(
            self.settings.num_steps, exploration.noise or "sde", exploration.noise_level or 0.5
        )
        parts = (exploration.log_prob_level, self.expert, self.summary_size)
        return FlowHead(space, *parts, flow, statistics)

    def add_lora(self, lora: Mapping[str, Any]) -> None:
        """Add a LoRA adapter to the expert, and to a trained language model."""
        settings = {"target_modules": list(PROJECTIONS), **lora}
        self.expert.lm_expert = add_fresh_adapter(self.expert.lm_expert, settings)
        if not self.settings.train_expert_only:
            text = cast(Any, self.vlm).model.text_model
            used = list(range(self.unused_layers.start))
            # Layers on which no action depends get no adapter.
            layers = {"layers_to_transform": used, "layers_pattern": "layers"}
            cast(Any, self.vlm).model.text_model = add_fresh_adapter(text, settings | layers)

    def train(self, mode: bool = True) -> "SmolVLANetwork":
        super().train(mode)
        keep_recomputing(self.vlm)
        return self

    def forward(self, inputs: Mapping[str, Tensor]) -> Features:
        """Return keys, values [B, layers, P, heads, size] and mask [B, P] as `prefix`; no slots."""
        hidden, mask, state_at = self._embedded(inputs)
        later = torch.arange(mask.shape[1], device=mask.device) >= state_at
        # Pictures and words do not attend to the state. Padding attends to itself, so that each row
        # has a key.
        visible = (later[:, None] | ~later[None]) & mask[:, None] & mask[:, :, None]
        visible = visible | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        # Positions skip padding.
        positions = mask.cumsum(1) - 1
        keys, values = [], []
        model = cast(Any, self.vlm).model.text_model

        def run_layer(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            normed = layer.input_layernorm(hidden)
            query, key, value = _projected(layer.self_attn, normed, normed, self.text.head_dim)
            query, key = _rotated(query, positions), _rotated(key, positions)
            hidden = hidden + layer.self_attn.o_proj(_attended(query, key, value, visible))
            # Keys are stored with their rotation, as the expert reads them.
            return key, value, hidden + layer.mlp(layer.post_attention_layernorm(hidden))

        for layer in model.layers:
            key, value, hidden = _run(self._recomputes, run_layer, layer, hidden)
            keys.append(key)
            values.append(value)
        summary = model.norm(hidden[:, state_at])
        empty = summary.new_zeros(summary.shape[0], 0, summary.shape[1])
        return Features(empty, summary, (torch.stack(keys, 1), torch.stack(values, 1), mask))

    def _embedded(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        """Return the input vectors [B, P, D], their mask [B, P], and the index of the state."""
        tokens, state = inputs[TOKENS], inputs[STATE]
        pictures = inputs[PICTURES] if PICTURES in inputs else self.embed_cameras(inputs)
        words = self._words(tokens, tokens.shape[0]) * self._root
        # The pretrained layer reads a fixed number of entries.
        padded = F.pad(state, (0, self.settings.max_state_dim - state.shape[1]))
        robot = self.state_proj(padded)[:, None]
        picture_mask = torch.ones(pictures.shape[:2], dtype=torch.bool, device=tokens.device)
        mask = torch.cat((picture_mask, inputs[MASK].bool(), picture_mask[:, :1]), 1)
        hidden = torch.cat((pictures, words, robot), 1)
        state_at = hidden.shape[1] - 1
        missing = max(0, self.settings.prefix_length - hidden.shape[1])
        return F.pad(hidden, (0, 0, 0, missing)), F.pad(mask, (0, missing)), state_at

    def embed_cameras(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the input vectors [B, P, D] of all pictures, which stand first in the prefix."""
        parts: list[Tensor] = []
        for camera in (camera for camera in self.cameras if camera in inputs):
            pictures = inputs[camera]
            start, end = (self._words(tokens, pictures.shape[0]) for tokens in self.around)
            parts += [start, self._embed_pictures(pictures) * self._root, end]
        return torch.cat(parts, 1)

    @property
    def _root(self) -> float:
        # LeRobot scales embeddings by the root of their size.
        return math.sqrt(self.text.hidden_size)

    def _words(self, tokens: Tensor | Sequence[int], rows: int) -> Tensor:
        table = cast(Any, self.vlm).get_input_embeddings()
        if not isinstance(tokens, Tensor):
            ids = torch.tensor(tokens, dtype=torch.int64, device=table.weight.device)
            tokens = ids.expand(rows, -1)
        return table(tokens)  # type: ignore[no-any-return]  # nn.Module

    def _embed_pictures(self, pictures: Tensor) -> Tensor:
        if self.settings.resize_imgs_with_padding is not None:
            # LeRobot puts the width first.
            width, height = self.settings.resize_imgs_with_padding
            pictures = _resized_with_padding(pictures, height, width)
        model = cast(Any, self.vlm).model
        # The vision model reads -1 to 1.
        pixels = (pictures * 2.0 - 1.0).to(model.vision_model.dtype)
        outputs = model.vision_model(pixel_values=pixels, patch_attention_mask=None)
        return model.connector(outputs.last_hidden_state)  # type: ignore[no-any-return]  # nn.Module


class Expert(nn.Module):
    """The velocity of noisy actions, which attend to the prefix: every layer, or to each other.

    Args:
        settings: settings of config.json.
        text: settings of the language model's text.

    Attributes:
        action_size: P, numbers of an action with padding.
        recomputes: compute the activations of each layer again in the backward pass.
        takes_action_times: the actions may have different times.

    Raises:
        ConfigurationError: if the layers of the language model are not a multiple of the expert's.
    """

    recomputes = False
    takes_action_times = True

    def __init__(self, settings: SmolVLASettings, text: Any) -> None:
        super().__init__()
        layers = int(text.num_hidden_layers)
        count = settings.num_expert_layers if settings.num_expert_layers > 0 else layers
        require(
            layers % count == 0,
            f"num_expert_layers={count} does not divide the {layers} layers of the language model.",
        )
        self.settings, self.head_dim = settings, int(text.head_dim)
        self.every = layers // count
        self.action_size = settings.max_action_dim
        size = int(text.hidden_size * settings.expert_width_multiplier)
        share = torch.linspace(0.0, 1.0, size // 2, dtype=torch.float64, device="cpu")
        period = settings.min_period * (settings.max_period / settings.min_period) ** share
        # Numbers, because torch's ONNX exporter computes a range of float64 in float32.
        self._frequencies: list[float] = (2.0 * math.pi / period).tolist()
        keys = text.num_key_value_heads * text.head_dim
        self.lm_expert = nn.Module()
        self.lm_expert.layers = nn.ModuleList(
            _ExpertLayer(size, size if settings.attends_to_itself(i) else keys, text)
            for i in range(count)
        )
        # LeRobot makes layer i for i, and uses it as layer `every * i`.
        fits = all(
            settings.attends_to_itself(i) == settings.attends_to_itself(i * self.every)
            for i in range(count)
        )
        require(
            fits or size == keys,
            f"self_attn_every_n_layers={settings.self_attn_every_n_layers} with {count} layers of "
            f"the expert for {layers} of the language model is not supported by LeRobot.",
        )
        self.lm_expert.norm = nn.RMSNorm(size, text.rms_norm_eps)
        self.action_in_proj = nn.Linear(self.action_size, size)
        self.action_out_proj = nn.Linear(size, self.action_size)
        self.action_time_mlp_in = nn.Linear(2 * size, size)
        self.action_time_mlp_out = nn.Linear(size, size)

    def forward(self, features: Features, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity [B, K, P] of noisy actions x [B, K, P] at t [B] or [B, K]."""
        keys, values = (cache.to(x.dtype) for cache in features.prefix[:2])
        mask = features.prefix[2]
        rows, steps = x.shape[:2]
        actions = self.action_in_proj(x)
        time = _time_encoding(t, self._frequencies).to(actions.dtype)
        time = time if t.dim() == 2 else time[:, None]
        joined = torch.cat((actions, time.expand_as(actions)), -1)
        hidden = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(joined)))
        order = torch.arange(steps, device=x.device)
        # The actions' positions follow the prefix without its padding.
        positions = mask.sum(1, keepdim=True) + order
        to_prefix = mask[:, None].expand(rows, steps, -1)
        # An action attends to the prefix, to itself and to earlier actions.
        causal = torch.cat((to_prefix, (order <= order[:, None]).expand(rows, -1, -1)), 2)

        def run_layer(number: int, layer: Any, hidden: Tensor) -> Tensor:
            at = number * self.every
            normed = layer.input_layernorm(hidden)
            if self.settings.attends_to_itself(at):
                query, key, value = _projected(layer.self_attn, normed, normed, self.head_dim)
                query, key = _rotated(query, positions), _rotated(key, positions)
                key = torch.cat((keys[:, at], key), 1)
                mixed = _attended(query, key, torch.cat((values[:, at], value), 1), causal)
            else:
                cached = (keys[:, at].flatten(2), values[:, at].flatten(2))
                query, key, value = _projected(layer.self_attn, normed, cached, self.head_dim)
                # Here LeRobot counts positions from the first action.
                mixed = _attended(_rotated(query, order.expand(rows, -1)), key, value, to_prefix)
            hidden = hidden + layer.self_attn.o_proj(mixed)
            return hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[no-any-return]  # nn.Module

        for number, layer in enumerate(cast(Any, self.lm_expert).layers):
            hidden = _run(self.recomputes, run_layer, number, layer, hidden)
        return self.action_out_proj(cast(Any, self.lm_expert).norm(hidden))  # type: ignore[no-any-return]  # nn.Module


class _ExpertLayer(nn.Module):
    """Weights of a layer of the expert, with the names of the language model."""

    def __init__(self, size: int, key_inputs: int, text: Any) -> None:
        super().__init__()
        heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
        bias = bool(text.attention_bias)
        self.input_layernorm = nn.RMSNorm(size, text.rms_norm_eps)
        sizes = {"q": (size, heads), "k": (key_inputs, kv_heads), "v": (key_inputs, kv_heads)}
        layers = {
            f"{name}_proj": nn.Linear(inputs, count * text.head_dim, bias)
            for name, (inputs, count) in sizes.items()
        }
        layers["o_proj"] = nn.Linear(heads * text.head_dim, size, bias)
        self.self_attn = nn.ModuleDict(layers)
        self.post_attention_layernorm = nn.RMSNorm(size, text.rms_norm_eps)
        self.mlp = _GatedPerceptron(size, _inner_size(size), bool(text.mlp_bias))


class _GatedPerceptron(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, SwiGLU)."""

    def __init__(self, size: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]  # nn.Module


def _projected(
    attention: Any, hidden: Tensor, source: Tensor | tuple[Tensor, Tensor], size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries of `hidden` [B, L, D], keys and values of `source`, [B, M, heads, size]."""
    for_keys, for_values = source if isinstance(source, tuple) else (source, source)
    parts = (attention.q_proj(hidden), attention.k_proj(for_keys), attention.v_proj(for_values))
    query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
    return query, key, value


def _run(recomputes: bool, function: Callable[..., Any], *inputs: Any) -> Any:
    if not recomputes:
        return function(*inputs)
    # Without dropout no random numbers have to be repeated.
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def _attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the attention [B, L, D] of queries [B, L, heads, size]; `mask` is bool [B, L, M]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    # Several query heads share a key head.
    mixed = F.scaled_dot_product_attention(query, key, value, mask[:, None], enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def _rotated(vectors: Tensor, positions: Tensor) -> Tensor:
    """Rotate entries i and i + size / 2 of [B, L, heads, size] by their positions [B, L]."""
    half = vectors.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float32, device=vectors.device) / half
    angle = positions[..., None, None].float() / ROPE_BASE**exponent
    # In float32, because far positions have large angles.
    first, second = vectors.float().split(half, -1)
    sine, cosine = angle.sin(), angle.cos()
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    return rotated.to(vectors.dtype)


def _time_encoding(t: Tensor, frequencies: list[float]) -> Tensor:
    """Return sine and cosine encodings [..., 2 * F] of times [...] for F angular frequencies."""
    angle = t[..., None] * torch.tensor(frequencies, dtype=torch.float64, device=t.device)
    return torch.cat((angle.sin(), angle.cos()), -1)


def _resized_with_padding(pictures: Tensor, height: int, width: int) -> Tensor:
    """Resize pictures [B, C, H, W] without distortion, with black above and on the left."""
    rows, columns = pictures.shape[-2:]
    if (rows, columns) == (height, width):
        return pictures
    ratio = max(columns / width, rows / height)
    size = [int(rows / ratio), int(columns / ratio)]
    smaller = F.interpolate(pictures, size, mode="bilinear", align_corners=False)
    return F.pad(smaller, (max(0, width - size[1]), 0, max(0, height - size[0]), 0))


def _inner_size(size: int) -> int:
    """Return the inner units of a gated perceptron: 8/3 of its inputs, a multiple of 256."""
    return 256 * -(-int(4 * int(2 * size / 3)) // 256)


def _language_model(path: str, layers: int) -> nn.Module:
    """Make a SmolVLM of transformers with random weights and its first layers (0: all)."""
    transformers = extra("transformers")
    config = read_json(expanded(path) / "config.json")
    require(
        config.get("model_type") == "smolvlm",
        f"{path} holds a model of type '{config.get('model_type')}', not smolvlm.",
    )
    with quiet(transformers), one_message(f"{path} does not describe a language model"):
        settings = transformers.SmolVLMConfig(**config)
        model = transformers.SmolVLMForConditionalGeneration(settings).float()
    text = model.model.text_model
    if layers > 0:
        text.layers = text.layers[:layers]
    return cast(nn.Module, model)


def _text_settings(vlm: nn.Module) -> Any:
    text = cast(Any, vlm).config.text_config
    text.num_hidden_layers = len(cast(Any, vlm).model.text_model.layers)
    return text


def _check(settings: SmolVLASettings, directory: PolicyDirectory) -> None:
    refuse_unsupported(
        directory,
        {
            "n_obs_steps": (settings.n_obs_steps, 1),
            "empty_cameras": (settings.empty_cameras, 0),
            "adapt_to_pi_aloha": (settings.adapt_to_pi_aloha, False),
            "use_delta_joint_actions_aloha": (settings.use_delta_joint_actions_aloha, False),
            "rtc_config": (settings.rtc_config, None),
        },
    )
    state = directory.size_of(STATE)
    require(
        state is not None and bool(directory.cameras),
        f"{directory.path}: a SmolVLA reads {STATE} and pictures; it has "
        f"{', '.join(directory.inputs)}.",
    )
    assert state is not None
    for name, size, limit in (
        (STATE, state, settings.max_state_dim),
        ("action", directory.action_size, settings.max_action_dim),
    ):
        require(
            size <= limit,
            f"{directory.path}: {name} has {size} numbers, but config.json allows at most {limit}.",
        )
