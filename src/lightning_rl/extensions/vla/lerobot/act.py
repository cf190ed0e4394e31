"""The action chunking transformer (ACT) of LeRobot's directories."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.extend.errors import require
from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.extensions.vla.heads import ActionHead, GaussianHead, Statistics
from lightning_rl.extensions.vla.lerobot.directory import (
    ENVIRONMENT,
    STATE,
    PolicyDirectory,
    Settings,
    refuse_unsupported,
)
from lightning_rl.extensions.vla.lerobot.network import Exploration, Network
from lightning_rl.extensions.vla.resnet import BLOCKS, ResNet


@dataclass(frozen=True)
class ACTSettings(Settings):
    """Fields of config.json of an ACT."""

    of_training: ClassVar[tuple[str, ...]] = (
        *("pretrained_backbone_weights", "dropout", "kl_weight"),
    )

    chunk_size: int = 100
    n_action_steps: int = 100
    vision_backbone: str = "resnet18"
    replace_final_stride_with_dilation: bool | int = False
    pre_norm: bool = False
    dim_model: int = 512
    n_heads: int = 8
    dim_feedforward: int = 3200
    feedforward_activation: Literal["relu", "gelu"] = "relu"
    n_encoder_layers: int = 4
    n_decoder_layers: int = 1
    use_vae: bool = True
    latent_dim: int = 32
    n_vae_encoder_layers: int = 4
    temporal_ensemble_coeff: float | None = None


class ACTNetwork(Network):
    """Chunks of actions from pictures and numbers, by an encoder and a decoder.

    The latent variable is 0, as in acting; the weights of its encoder have no effect. Names of
    layers are LeRobot's.

    Source: Zhao et al. 2023, "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware".

    Args:
        settings: settings in config.json.
        directory: gives the features.

    Raises:
        ConfigurationError: for unsupported settings or features.
    """

    def __init__(self, settings: ACTSettings, directory: PolicyDirectory) -> None:
        super().__init__()
        self.summary_size = settings.dim_model
        self.max_actions, self.action_steps = settings.chunk_size, settings.n_action_steps
        refuse_unsupported(
            directory,
            {
                "n_obs_steps": (settings.n_obs_steps, 1),
                "temporal_ensemble_coeff": (settings.temporal_ensemble_coeff, None),
                "replace_final_stride_with_dilation": (
                    bool(settings.replace_final_stride_with_dilation),
                    False,
                ),
            },
        )
        self.settings, dim = settings, settings.dim_model
        state, environment = (directory.size_of(name) for name in (STATE, ENVIRONMENT))
        self.inputs = [name for name in (STATE, ENVIRONMENT) if directory.size_of(name)]
        self.cameras = list(directory.cameras)
        require(
            bool(self.cameras) or environment is not None,
            f"{directory.path}: an ACT reads a picture or {ENVIRONMENT}, but has neither.",
        )
        # Without this encoder its weights in the directory would be surplus.
        if settings.use_vae:
            self._add_latent_encoder(state, directory.action_size)
        if self.cameras:
            self.backbone = ResNet(blocks_of(settings.vision_backbone, directory))
            self.encoder_img_feat_input_proj = nn.Conv2d(512, dim, 1)
        self.encoder = _Stack(settings, settings.n_encoder_layers, cross=False)
        self.decoder = _Stack(settings, settings.n_decoder_layers, cross=True)
        if state is not None:
            self.encoder_robot_state_input_proj = nn.Linear(state, dim)
        if environment is not None:
            self.encoder_env_state_input_proj = nn.Linear(environment, dim)
        self.encoder_latent_input_proj = nn.Linear(settings.latent_dim, dim)
        # One token for the latent variable, and one per input.
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + len(self.inputs), dim)
        self.decoder_pos_embed = nn.Embedding(settings.chunk_size, dim)
        self.action_head = nn.Linear(dim, directory.action_size)

    def parts(self) -> dict[str, nn.Module]:
        return {"model.": self}

    def head(
        self, space: gymnasium.spaces.Box, exploration: Exploration, statistics: Statistics
    ) -> ActionHead:
        log_std_init = exploration.log_std_init
        log_std = -2.0 if log_std_init is None else log_std_init
        head = GaussianHead(space, exploration.log_prob_level, 1, log_std, 1.0, statistics)
        head.to_mean = nn.Identity()  # type: ignore[assignment]  # the slots are the means
        return head

    def forward(self, inputs: Mapping[str, Tensor]) -> Features:
        first = next(iter(inputs.values()))
        latent = first.new_zeros(first.shape[0], self.settings.latent_dim)
        tokens = [self.encoder_latent_input_proj(latent)]
        if STATE in self.inputs:
            tokens.append(self.encoder_robot_state_input_proj(inputs[STATE]))
        if ENVIRONMENT in self.inputs:
            tokens.append(self.encoder_env_state_input_proj(inputs[ENVIRONMENT]))
        sequence, places = torch.stack(tokens, 1), self.encoder_1d_feature_pos_embed.weight
        for camera in self.cameras:
            planes = self.backbone(inputs[camera])
            # The places of pixels are computed, because their number depends on the picture.
            position = _place_encoding(planes.shape[-2:], self.settings.dim_model, planes.device)
            patches = self.encoder_img_feat_input_proj(planes).flatten(2).transpose(1, 2)
            sequence, places = torch.cat((sequence, patches), 1), torch.cat((places, position))
        memory = self.encoder(sequence, places)
        queries = memory.new_zeros(first.shape[0], *self.decoder_pos_embed.weight.shape)
        decoded = self.decoder(queries, self.decoder_pos_embed.weight, memory, places)
        # One slot of size 1 per number: the slot is the mean.
        return Features(self.action_head(decoded).flatten(1)[..., None], memory.mean(1))

    def _add_latent_encoder(self, state: int | None, action_size: int) -> None:
        settings, dim = self.settings, self.settings.dim_model
        self.vae_encoder = _Stack(settings, settings.n_vae_encoder_layers, cross=False)
        self.vae_encoder_cls_embed = nn.Embedding(1, dim)
        if state is not None:
            self.vae_encoder_robot_state_input_proj = nn.Linear(state, dim)
        self.vae_encoder_action_input_proj = nn.Linear(action_size, dim)
        self.vae_encoder_latent_output_proj = nn.Linear(dim, 2 * settings.latent_dim)
        places = settings.chunk_size + (1 if state is None else 2)
        # The numbers come from the directory.
        self.register_buffer("vae_encoder_pos_enc", torch.zeros(1, places, dim))
        # Acting never calls the encoder of the latent variable: an optimizer must not move it.
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith("vae_encoder"))


class _Stack(nn.Module):
    def __init__(self, settings: ACTSettings, count: int, *, cross: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(settings, cross=cross) for _ in range(count))
        # LeRobot's decoder always ends with a norm, its encoder only with pre_norm.
        last = cross or settings.pre_norm
        self.norm = nn.LayerNorm(settings.dim_model) if last else nn.Identity()

    def forward(
        self,
        tokens: Tensor,
        places: Tensor,
        memory: Tensor | None = None,
        memory_places: Tensor | None = None,
    ) -> Tensor:
        for layer in self.layers:
            tokens = layer(tokens, places, memory, memory_places)
        return self.norm(tokens)  # type: ignore[no-any-return]  # nn.Module


class _Layer(nn.Module):
    def __init__(self, settings: ACTSettings, *, cross: bool) -> None:
        super().__init__()
        dim, heads = settings.dim_model, settings.n_heads
        require(dim % heads == 0, f"dim_model={dim} is not a multiple of n_heads={heads}.")
        self.pre_norm = settings.pre_norm
        self.activation = F.relu if settings.feedforward_activation == "relu" else F.gelu
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.multihead_attn: nn.Module | None = None
        if cross:
            self.multihead_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.linear1 = nn.Linear(dim, settings.dim_feedforward)
        self.linear2 = nn.Linear(settings.dim_feedforward, dim)
        self.norms = ["norm1", "norm2", *(["norm3"] if cross else [])]
        for name in self.norms:
            self.add_module(name, nn.LayerNorm(dim))

    def forward(
        self,
        tokens: Tensor,
        places: Tensor,
        memory: Tensor | None = None,
        memory_places: Tensor | None = None,
    ) -> Tensor:
        steps: list[Callable[[Tensor], Tensor]] = [lambda x: self._attend(x, places)]
        if self.multihead_attn is not None and memory is not None:
            # Places are added to queries and keys, not to values.
            keys = memory if memory_places is None else memory + memory_places
            look = self.multihead_attn
            steps.append(lambda x: look(x + places, keys, memory, need_weights=False)[0])
        steps.append(lambda x: self.linear2(self.activation(self.linear1(x))))
        for name, step in zip(self.norms, steps, strict=True):
            norm = self.get_submodule(name)
            # Normalise before each step, or after the step and its shortcut.
            tokens = tokens + step(norm(tokens)) if self.pre_norm else norm(tokens + step(tokens))
        return tokens

    def _attend(self, tokens: Tensor, places: Tensor) -> Tensor:
        query = tokens + places
        return self.self_attn(query, query, tokens, need_weights=False)[0]  # type: ignore[no-any-return]  # nn.Module


def _place_encoding(sides: tuple[int, int] | torch.Size, size: int, device: torch.device) -> Tensor:
    """Return sine and cosine encodings [H * W, D] of the places in a plane, rows first.

    Source: Carion et al. 2020, "End-to-End Object Detection with Transformers", appendix A.4.
    """
    # Sine and cosine of a pair share a period.
    entries = torch.arange(size // 2, device=device)
    period = 10_000 ** (2 * (entries // 2) / (size // 2))
    encodings = []
    for side in sides:
        angle = torch.arange(1, side + 1, device=device) / (side + 1e-6) * (2 * math.pi)
        angles = angle[:, None] / period
        encodings.append(torch.where(entries % 2 == 0, angles.sin(), angles.cos()))
    rows, columns = sides
    y = encodings[0][:, None].expand(rows, columns, -1)
    x = encodings[1][None].expand(rows, columns, -1)
    return torch.cat((y, x), -1).flatten(0, 1)


def blocks_of(name: str, directory: PolicyDirectory) -> tuple[int, ...]:
    """Return the blocks of a residual network.

    Raises:
        ConfigurationError: for an unsupported network.
    """
    require(
        name in BLOCKS,
        f"{directory.path / 'config.json'} sets vision_backbone: {name}; supported are "
        f"{', '.join(BLOCKS)}.",
    )
    return BLOCKS[name]
