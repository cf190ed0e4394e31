"""The diffusion policy of LeRobot's directories: a U-Net over the actions, and its chain."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, cast

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import check_range, require
from lightning_rl.extend.rollout import FieldSpec
from lightning_rl.extensions.vla.backbone import Features
from lightning_rl.extensions.vla.heads import ActionHead, Level, Statistics
from lightning_rl.extensions.vla.lerobot.act import blocks_of
from lightning_rl.extensions.vla.lerobot.directory import (
    ENVIRONMENT,
    STATE,
    PolicyDirectory,
    Settings,
    refuse_unsupported,
)
from lightning_rl.extensions.vla.lerobot.network import Exploration, Network
from lightning_rl.extensions.vla.real_time import Continuation, guidance_weight, pull
from lightning_rl.extensions.vla.resnet import ResNet


@dataclass(frozen=True)
class DiffusionSettings(Settings):
    """Fields of config.json of a diffusion policy."""

    of_training: ClassVar[tuple[str, ...]] = (
        *("drop_n_last_frames", "crop_is_random", "pretrained_backbone_weights"),
        *("gradient_checkpointing", "compile_mode", "do_mask_loss_for_padding"),
    )

    n_obs_steps: int = 2
    horizon: int = 64
    n_action_steps: int = 32
    vision_backbone: str = "resnet18"
    resize_shape: tuple[int, int] | None = None
    crop_ratio: float = 1.0
    crop_shape: tuple[int, int] | None = None
    use_group_norm: bool = False
    spatial_softmax_num_keypoints: int = 32
    use_separate_rgb_encoder_per_camera: bool = True
    down_dims: tuple[int, ...] = (512, 1024, 2048)
    kernel_size: int = 5
    n_groups: int = 8
    diffusion_step_embed_dim: int = 128
    use_film_scale_modulation: bool = True
    noise_scheduler_type: Literal["DDPM", "DDIM"] = "DDPM"
    num_train_timesteps: int = 100
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"] = (
        "squaredcos_cap_v2"
    )
    beta_start: float = 0.0001
    beta_end: float = 0.02
    prediction_type: Literal["epsilon", "sample"] = "epsilon"
    clip_sample: bool = True
    clip_sample_range: float = 1.0
    num_inference_steps: int | None = None
    compile_model: bool = False

    @property
    def crop(self) -> tuple[int, int] | None:
        """Height and width of the crop at the centre; None for whole pictures."""
        if self.resize_shape is None:
            return self.crop_shape
        height, width = self.resize_shape
        ratio = self.crop_ratio
        return (int(height * ratio), int(width * ratio)) if ratio < 1.0 else None

    @property
    def steps(self) -> int:
        """Number of denoising steps."""
        return self.num_inference_steps or self.num_train_timesteps


class DiffusionNetwork(Network):
    """Predict noise or actions [B, H, A] from noisy actions, a time and observations.

    Names of layers are LeRobot's. Source: Chi et al. 2023, "Diffusion Policy".

    Args:
        settings: settings in config.json.
        directory: gives the features.

    Raises:
        ConfigurationError: for unsupported settings or features.
    """

    def __init__(self, settings: DiffusionSettings, directory: PolicyDirectory) -> None:
        super().__init__()
        refuse_unsupported(directory, {"compile_model": (settings.compile_model, False)})
        _check(settings, directory)
        self.settings, self.cameras = settings, list(directory.cameras)
        self._steps = _denoising_steps(settings)  # not part of a description
        self.obs_steps, self.action_steps = settings.n_obs_steps, settings.n_action_steps
        # A chunk begins at the last observation, which is at n_obs_steps - 1 of the horizon.
        self.max_actions = settings.horizon - settings.n_obs_steps + 1
        self.numbers = [name for name in (STATE, ENVIRONMENT) if directory.size_of(name)]
        size = sum(directory.size_of(name) or 0 for name in self.numbers)
        if self.cameras:
            shape = directory.cameras[self.cameras[0]].shape
            count = len(self.cameras) if settings.use_separate_rgb_encoder_per_camera else 1
            encoders = [_PointEncoder(settings, directory, shape) for _ in range(count)]
            separate = settings.use_separate_rgb_encoder_per_camera
            self.rgb_encoder = nn.ModuleList(encoders) if separate else encoders[0]
            size += 2 * settings.spatial_softmax_num_keypoints * len(self.cameras)
        self.summary_size = size * settings.n_obs_steps
        self.unet = _UNet(settings, directory.action_size, self.summary_size)

    def parts(self) -> dict[str, nn.Module]:
        return {"diffusion.": self}

    def head(
        self, space: gymnasium.spaces.Box, exploration: Exploration, statistics: Statistics
    ) -> ActionHead:
        return DiffusionHead(space, exploration.log_prob_level, self, statistics)

    def forward(self, inputs: Mapping[str, Tensor]) -> Features:
        """Return the condition of the denoiser [B, G] as summary, without slots."""
        steps = self.settings.n_obs_steps
        # One observation is a history of length 1.
        inputs = inputs if steps > 1 else {name: x[:, None] for name, x in inputs.items()}
        parts = [inputs[STATE]]
        for number, camera in enumerate(self.cameras):
            pictures = inputs[camera]
            shared = self.rgb_encoder
            encoder = shared[number] if isinstance(shared, nn.ModuleList) else shared
            parts.append(encoder(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2]))
        if ENVIRONMENT in self.numbers:
            parts.append(inputs[ENVIRONMENT])
        condition = torch.cat(parts, -1).flatten(1)
        return Features(condition.new_zeros(condition.shape[0], 0, 1), condition)

    def chain(
        self,
        condition: Tensor,
        noise: Tensor,
        extra: Sequence[Tensor] | None,
        old: Continuation | None = None,
    ) -> Tensor:
        """Return actions [B, H, A], normalised, from noise by all denoising steps.

        Args:
            condition: [B, G].
            noise: [B, H, A], standard normal.
            extra: for DDPM, noise [B, H, A] of each of the `noisy_steps`; None for steps to the
                mean.
            old: the old chunk, which guides the new one; its target and mask have H actions.
        """
        actions = noise
        for number, step in enumerate(self._steps):
            time = torch.full((noise.shape[0],), step.time, device=noise.device)
            predict = partial(self.unet, time=time, condition=condition)
            prediction = predict(actions) if old is None else step.guided(predict, actions, old)
            mean = step.mean(prediction, actions)
            # The last step has no noise to add.
            step_noise = () if extra is None else extra[number : number + 1]
            actions = mean + step.std * step_noise[0] if step_noise else mean
        return actions

    def steps_at(self, numbers: Tensor) -> "_DenoisingStep":
        """Return the steps with given numbers [B]; `time` is [B], other factors are [B, 1, 1]."""
        # A table, because a graph cannot index a list. All steps share the fields after the sixth.
        table = torch.tensor([step[:6] for step in self._steps], device=numbers.device)
        time, *factors = table[numbers].unbind(1)
        columns: list[Any] = [time, *(factor[:, None, None] for factor in factors)]
        return _DenoisingStep(*columns, *cast(Any, self._steps[0])[6:])

    @property
    def noisy_steps(self) -> int:
        """Number of steps that add noise."""
        return self.settings.steps - 1 if self.settings.noise_scheduler_type == "DDPM" else 0


class DiffusionHead(ActionHead):
    """The actions of a diffusion policy, which have no log-prob; `NoisePolicy` steers its noise.

    Deterministic acting begins from `fixed_noise`, one draw of seed 0.

    Args:
        space, level, statistics: see `ActionHead`.
        network: predicts noise or clean actions.
    """

    real_time_methods = ("guided", "skip")
    has_entropy = False
    fixed_noise: Tensor

    def __init__(
        self,
        space: gymnasium.spaces.Box,
        level: Level,
        network: DiffusionNetwork,
        statistics: Statistics,
    ) -> None:
        super().__init__(space, level, statistics)
        self._network = (network,)  # a tuple, so that the network is not a child of this module
        settings = network.settings
        self.first, self.horizon = settings.n_obs_steps - 1, settings.horizon
        self.noise_size = self.horizon * self.action_size
        # The initial noise, then that of each noisy step.
        self.noise_shape = (1 + network.noisy_steps, self.horizon, self.action_size)
        self.all_noise, self.steps = math.prod(self.noise_shape), settings.steps
        fixed = torch.randn(self.all_noise, generator=torch.Generator().manual_seed(0))
        self.register_buffer("fixed_noise", fixed, persistent=False)

    @property
    def fields(self) -> dict[str, FieldSpec]:
        return {}

    def draw_noise(self, batch: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
        noise = torch.empty(*batch, self.all_noise, device=self.center.device)
        return noise.normal_(generator=generator)

    def sample(self, features: Features, noise: Tensor | None) -> dict[str, Tensor]:
        rows = features.summary.shape[0]
        chain_noise = self.fixed_noise.expand(rows, -1) if noise is None else noise
        # The rollout has the field, but no update reads it: see log_prob_and_entropy.
        unused = chain_noise.new_zeros(rows, self.num_parts)
        return {"action": self.act(features, chain_noise), "sample_log_prob": unused}

    def act(self, features: Features, noise: Tensor) -> Tensor:
        """Return actions [B, K, A] from the initial noise [B, S], or from all noise [B, Z]."""
        # With the initial noise alone, the steps take the fixed noise.
        tail = self.fixed_noise[noise.shape[1] :].expand(noise.shape[0], -1)
        chain = torch.cat((noise, tail), 1).unflatten(1, self.noise_shape)
        start, *step_noises = chain.unbind(1)
        old = features.old_chunk
        if old is not None and old.settings.method == "guided":
            # The chunk begins at the last observation of the horizon.
            around = (self.first, self.horizon - self.first - self.chunk_size)
            target = F.pad(old.target, (0, 0, *around))
            old = old._replace(target=target, mask=F.pad(old.mask, around))
        else:
            old = None
        return self.to_chunk(self._network[0].chain(features.summary, start, step_noises, old))

    def advance(self, features: Features, x: Tensor, step: Tensor, noise: Any = None) -> Tensor:
        """Return x [B, H, A] after the steps with the numbers `step` [B]; `noise` is theirs."""
        steps = self._network[0].steps_at(step)
        mean = steps.mean(self._network[0].unet(x, cast(Tensor, steps.time), features.summary), x)
        return mean if noise is None else mean + steps.std * noise

    def to_chunk(self, x: Tensor) -> Tensor:
        """Return the actions [B, K, A] at the end of a chain, x [B, H, A]."""
        return self.to_action(x[:, self.first :][:, : self.chunk_size].flatten(1))

    def log_prob_and_entropy(
        self, features: Features, fields: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        raise ConfigurationError(
            "A diffusion policy has no log-prob of its actions, and cannot be cloned. Instead, "
            "train its noise: policy: "
            "{class_path: NoisePolicy, init_args: {base: {class_path: LeRobotPolicy, init_args: "
            "{path: DIR}}}}."
        )

    def fields_of(self, action: Tensor) -> dict[str, Tensor]:
        return {}


class _DenoisingStep(NamedTuple):
    """A step of a chain: mean = clean_factor * clean + other_factor * other.

    Attributes:
        time: time of the noisy actions.
        signal, spread: factors of clean actions and of noise in the noisy actions.
        std: standard deviation of the noise that is added to the mean.
        limit: clean actions are clipped to ±limit; infinite for no clipping.
        predicts_noise: whether the network predicts noise instead of clean actions.
        implicit: whether `other` is the noise (DDIM) instead of the noisy actions (DDPM).
    """

    time: int
    signal: float
    spread: float
    clean_factor: float
    other_factor: float
    std: float
    limit: float
    predicts_noise: bool
    implicit: bool

    def mean(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        noise = prediction
        if not self.predicts_noise:
            noise = (noisy - self.signal * prediction) / self.spread
        other = noise if self.implicit else noisy
        return self.clean_factor * self.clean(prediction, noisy) + self.other_factor * other

    def clean(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        # noisy = signal * clean + spread * noise, solved for the clean actions.
        if self.predicts_noise:
            prediction = (noisy - self.spread * prediction) / self.signal
        return prediction.clamp(-self.limit, self.limit)

    def guided(
        self, predict: Callable[[Tensor], Tensor], noisy: Tensor, old: Continuation
    ) -> Tensor:
        """Return a prediction [B, H, A] whose clean actions are pulled towards the old chunk.

        x / (signal + spread) moves as in a flow, at the time spread / (signal + spread). There a
        guided velocity adds t * weight * correction to the clean actions.
        """

        def predict_clean(x: Tensor) -> tuple[Tensor, Tensor]:
            prediction = predict(x)
            return prediction, self.clean(prediction, x)

        prediction, correction = pull(predict_clean, noisy, old.target, old.mask[..., None])
        weight = guidance_weight(
            torch.tensor(self.spread / (self.signal + self.spread)),
            old.settings.max_guidance_weight,
        )
        # The derivative by x is that by the noisy actions, times signal + spread.
        added = self.spread * float(weight) * correction
        # As noise it counts -spread / signal times.
        return prediction + (-self.signal / self.spread if self.predicts_noise else 1.0) * added


def _denoising_steps(settings: DiffusionSettings) -> list[_DenoisingStep]:
    """Return the steps from noise to actions (Ho et al. 2020; DDIM: Song et al. 2021)."""
    signals, clean_share = _signal_shares(settings), torch.ones(())
    # Fewer steps than in training skip times evenly.
    every = settings.num_train_timesteps // settings.steps
    limit = float(settings.clip_sample_range) if settings.clip_sample else math.inf
    implicit = settings.noise_scheduler_type == "DDIM"
    predicts_noise = settings.prediction_type == "epsilon"
    steps = []
    for time in range((settings.steps - 1) * every, -1, -every):
        now, previous = signals[time], signals[time - every] if time >= every else clean_share
        beta = 1.0 - now / previous
        if implicit:
            clean, other, variance = previous.sqrt(), (1.0 - previous).sqrt(), 0.0 * clean_share
        else:
            clean = previous.sqrt() * beta / (1.0 - now)
            other = (now / previous).sqrt() * (1.0 - previous) / (1.0 - now)
            # diffusers has this bound, because it takes the logarithm of the variance.
            variance = ((1.0 - previous) / (1.0 - now) * beta).clamp(min=1e-20)
        signal, spread = float(now.sqrt()), float((1.0 - now).sqrt())
        factors = (signal, spread, float(clean), float(other), float(variance.sqrt()))
        steps.append(_DenoisingStep(time, *factors, limit, predicts_noise, implicit))
    return steps


def _signal_shares(settings: DiffusionSettings) -> Tensor:
    """Return alpha bar of each time, [T] float32: the product of 1 - beta up to that time."""
    count, low, high = settings.num_train_timesteps, settings.beta_start, settings.beta_end
    if settings.beta_schedule == "squaredcos_cap_v2":
        edges = torch.arange(count + 1, dtype=torch.float64) / count
        bars = ((edges + 0.008) / 1.008 * math.pi / 2).cos().square()
        betas = (1.0 - bars[1:] / bars[:-1]).clamp(max=0.999).float()
    elif settings.beta_schedule == "linear":
        betas = torch.linspace(low, high, count)
    elif settings.beta_schedule == "scaled_linear":
        betas = torch.linspace(low**0.5, high**0.5, count).square()
    else:
        betas = torch.linspace(-6.0, 6.0, count).sigmoid() * (high - low) + low
    # In float32 like the training, where 1 - .999 has four digits.
    return (1.0 - betas).cumprod(0)


class _PointEncoder(nn.Module):
    """Points of a picture [M, C, H, W] by a residual network and a spatial softmax: [M, 2K]."""

    def __init__(
        self, settings: DiffusionSettings, directory: PolicyDirectory, shape: Sequence[int]
    ) -> None:
        super().__init__()
        self.resize, self.crop = settings.resize_shape, settings.crop
        norm = _group_norm if settings.use_group_norm else nn.BatchNorm2d
        # As a sequence, because LeRobot's names number the layers.
        layers = ResNet(blocks_of(settings.vision_backbone, directory), norm).children()
        self.backbone = nn.Sequential(*layers)
        height, width = self.crop or self.resize or shape[1:]
        self.pool = _Points(-(-height // 32), -(-width // 32), settings)
        size = 2 * settings.spatial_softmax_num_keypoints
        self.out = nn.Linear(size, size)

    def forward(self, pictures: Tensor) -> Tensor:
        if self.resize is not None:
            pictures = F.interpolate(pictures, self.resize, mode="bilinear", antialias=True)
        if self.crop is not None:
            height, width = self.crop
            # torchvision rounds the centre in this way.
            top = round((pictures.shape[-2] - height) / 2.0)
            left_edge = round((pictures.shape[-1] - width) / 2.0)
            pictures = pictures[..., top : top + height, left_edge : left_edge + width]
        points: Tensor = self.pool(self.backbone(pictures))
        return self.out(points).relu()  # type: ignore[no-any-return]  # nn.Module


class _Points(nn.Module):
    """Map planes [M, 512, H, W] to the mean places of their channels, [M, 2K]."""

    pos_grid: Tensor

    def __init__(self, height: int, width: int, settings: DiffusionSettings) -> None:
        super().__init__()
        self.nets = nn.Conv2d(512, settings.spatial_softmax_num_keypoints, 1)
        # The places come from the directory.
        self.register_buffer("pos_grid", torch.zeros(height * width, 2))

    def forward(self, planes: Tensor) -> Tensor:
        logits: Tensor = self.nets(planes)
        return (logits.flatten(2).softmax(-1) @ self.pos_grid).flatten(1)


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // 16, channels)


class _UNet(nn.Module):
    """A convolutional U-Net over time with FiLM: features scale and shift its channels."""

    def __init__(self, settings: DiffusionSettings, action_size: int, condition_size: int) -> None:
        super().__init__()
        step_size, dims = settings.diffusion_step_embed_dim, settings.down_dims
        self.diffusion_step_encoder = nn.Sequential(
            _TimeEncoding(step_size),
            nn.Linear(step_size, 4 * step_size),
            nn.Mish(),
            nn.Linear(4 * step_size, step_size),
        )

        def block(inputs: int, width: int) -> nn.Module:
            return _Residual(inputs, width, step_size + condition_size, settings)

        self.down_modules = nn.ModuleList()
        for inputs, width in zip((action_size, *dims[:-1]), dims, strict=True):
            last = len(self.down_modules) == len(dims) - 1
            halve = nn.Identity() if last else nn.Conv1d(width, width, 3, 2, 1)
            self.down_modules.append(
                nn.ModuleList([block(inputs, width), block(width, width), halve])
            )
        self.mid_modules = nn.ModuleList([block(dims[-1], dims[-1]) for _ in range(2)])
        self.up_modules = nn.ModuleList()
        for inputs, width in zip(dims[:0:-1], dims[-2::-1], strict=True):
            double = nn.ConvTranspose1d(width, width, 4, 2, 1)
            # Twice the inputs: the planes of the way down are joined.
            self.up_modules.append(
                nn.ModuleList([block(2 * inputs, width), block(width, width), double])
            )
        self.final_conv = nn.Sequential(
            # LeRobot has 8 groups here, whatever n_groups is.
            _Convolution(dims[0], dims[0], settings.kernel_size, 8),
            nn.Conv1d(dims[0], action_size, 1),
        )

    def forward(self, noisy: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        features = torch.cat((self.diffusion_step_encoder(time), condition), -1)
        planes, skipped = noisy.transpose(1, 2), []
        for module in self.down_modules:
            first, second, halve = cast(nn.ModuleList, module)
            planes = second(first(planes, features), features)
            # The way up reads these in reverse order.
            skipped.append(planes)
            planes = halve(planes)
        for block in self.mid_modules:
            planes = block(planes, features)
        for module in self.up_modules:
            first, second, double = cast(nn.ModuleList, module)
            planes = torch.cat((planes, skipped.pop()), 1)
            planes = double(second(first(planes, features), features))
        return self.final_conv(planes).transpose(1, 2)  # type: ignore[no-any-return]  # nn.Module


class _TimeEncoding(nn.Module):
    """Sine and cosine encodings [B, D] of times [B]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, time: Tensor) -> Tensor:
        half = self.size // 2
        rate = torch.arange(half, device=time.device) * (-math.log(10_000) / (half - 1))
        angle = time[:, None] * rate.exp()
        return torch.cat((angle.sin(), angle.cos()), -1)


class _Convolution(nn.Module):
    def __init__(self, inputs: int, width: int, kernel: int, groups: int) -> None:
        super().__init__()
        convolution = nn.Conv1d(inputs, width, kernel, padding=kernel // 2)
        self.block = nn.Sequential(convolution, nn.GroupNorm(groups, width), nn.Mish())

    def forward(self, planes: Tensor) -> Tensor:
        return self.block(planes)  # type: ignore[no-any-return]  # nn.Module


class _Residual(nn.Module):
    """Two convolutions with a shortcut; features scale and shift the channels between them."""

    def __init__(self, inputs: int, width: int, features: int, settings: DiffusionSettings) -> None:
        super().__init__()
        kernel, groups = settings.kernel_size, settings.n_groups
        self.scales = settings.use_film_scale_modulation
        self.conv1 = _Convolution(inputs, width, kernel, groups)
        self.conv2 = _Convolution(width, width, kernel, groups)
        outputs = 2 * width if self.scales else width
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(features, outputs))
        unchanged = inputs == width
        self.residual_conv = nn.Identity() if unchanged else nn.Conv1d(inputs, width, 1)

    def forward(self, planes: Tensor, features: Tensor) -> Tensor:
        hidden, film = self.conv1(planes), self.cond_encoder(features)[..., None]
        if self.scales:
            scale, shift = film.chunk(2, 1)
            hidden = scale * hidden + shift
        else:
            hidden = hidden + film
        return self.conv2(hidden) + self.residual_conv(planes)  # type: ignore[no-any-return]  # nn.Module


def _check(settings: DiffusionSettings, directory: PolicyDirectory) -> None:
    file = directory.path / "config.json"
    require(
        STATE in directory.inputs and len(directory.inputs) > 1,
        f"{file}: a diffusion policy reads {STATE}, and a picture or {ENVIRONMENT}.",
    )
    shapes = {camera.shape for camera in directory.cameras.values()}
    require(len(shapes) <= 1, f"{file}: pictures have the shapes {sorted(shapes)}, not one.")
    check_range(
        f"{file}: num_inference_steps",
        settings.steps,
        minimum=1,
        maximum=settings.num_train_timesteps,
    )
    factor = 2 ** len(settings.down_dims)
    require(
        settings.horizon % factor == 0,
        f"{file}: horizon={settings.horizon} is no multiple of {factor}, which "
        f"down_dims={list(settings.down_dims)} requires.",
    )
    first = settings.n_obs_steps - 1
    check_range(
        f"{file}: n_action_steps",
        settings.n_action_steps,
        minimum=1,
        maximum=settings.horizon - first,
    )
