"""Use a vision-language model of transformers as a backbone."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_rl.extend.errors import check_range, do_weights_follow, require
from lightning_rl.extensions.vla.backbone import Backbone, Features, refuse_unknown_tokens
from lightning_rl.extensions.vla.loading import (
    image_statistics,
    keep_recomputing,
    load_vla_model,
)
from lightning_rl.kwargs import TransformersBackboneKwargs, Unpack


class TransformersBackbone(Backbone):
    """An image-text-to-text model, such as SmolVLM, PaliGemma or LLaVA.

    Its inputs are the pictures, the instruction, and one placeholder token per number of the action
    chunk. The last hidden states of the placeholders are the slots, from one pass ("parallel
    decoding"); the first slot is the summary. A linear layer adds `proprio` to the slots;
    `condition` is one token after the instruction, masked if it is absent. With `head: token` the
    bins are tokens of the vocabulary.

    Args:
        kind: `hf` or `hf_config`; see `load_vla_model`.
        path: the directory, or `config.json` or its directory.
        placeholder: token for a number of the action. Default: the language model's padding token,
            or 0.
        token_offset: added to the env's tokens, to match the model's numbering.
        padding: the env's masked token. Default: the language model's padding token; 0 if it has
            none, and with a `token_offset`.
        condition_tokens: for bad and good, such as "negative" and "positive". Default: the first
            two tokens that are neither placeholder nor image.
        bin_tokens: tokens of the lowest and the highest bin of `head: token`. Default: the last
            `num_bins` outputs, in their order. OpenVLA's lowest bin has the largest token.
        image_mean: per color, 0 to 1, to scale pixels. Default: from preprocessor_config.json.
        image_std: see `image_mean`.

    Raises:
        ConfigurationError: see `load_vla_model`; also without pixel scaling, or for unknown tokens.
    """

    reads = ("rgb", "language", "proprio", "condition")
    vocabulary: int
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        kind: Literal["hf", "hf_config"] = "hf",
        path: str | None = None,
        *,
        placeholder: int | None = None,
        token_offset: int = 0,
        padding: int | None = None,
        condition_tokens: tuple[int, int] | None = None,
        bin_tokens: tuple[int, int] | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        **kwargs: Unpack[TransformersBackboneKwargs],
    ) -> None:
        super().__init__()
        check_range("token_offset", token_offset, minimum=0)
        self._set_statistics(kind, path, image_mean, image_std)
        self.model = load_vla_model(kind, path, model_class=None, model_config=None, **kwargs)
        settings = cast(Any, self.model).config
        self.image_size = int(_of(settings.vision_config, "image_size"))
        # Earlier configurations call it image_token_index.
        old = not hasattr(settings, "image_token_id")
        self.image_token = int(_of(settings, "image_token_index" if old else "image_token_id"))
        embeddings = int(cast(Any, self.model).get_input_embeddings().num_embeddings)
        pad = _padding_token(settings, embeddings)
        self.placeholder = placeholder if placeholder is not None else pad
        self.token_offset, self.bin_tokens = token_offset, bin_tokens
        self.padding = padding if padding is not None else 0 if token_offset else pad
        # A token of the env plus the offset must be a token of the model.
        self.vocabulary = embeddings - token_offset
        defaults = [t for t in range(4) if t not in (self.placeholder, self.image_token)][:2]
        self.condition_tokens = list(condition_tokens or defaults)
        tokens = {
            "condition_tokens": self.condition_tokens,
            "placeholder": [self.placeholder],
            "padding": [self.padding],
            "bin_tokens": list(bin_tokens or ()),
        }
        for name, values in tokens.items():
            require(
                all(0 <= token < embeddings for token in values),
                f"{name}={values}, but the tokens of the model are 0 to {embeddings - 1}.",
            )
        self.slot_size = self.summary_size = int(_of(settings.text_config, "hidden_size"))
        self.is_paligemma = settings.model_type == "paligemma"
        self.many_images = settings.model_type in ("smolvlm", "idefics3")
        self.tokens_per_image = _tokens_per_image(settings)

    def train(self, mode: bool = True) -> "TransformersBackbone":
        super().train(mode)
        keep_recomputing(self.model)
        return self

    def build(self, observation: TensorDict, num_slots: int) -> None:
        self.num_slots = num_slots
        self.from_proprio = None
        if "proprio" in observation.keys():
            self.from_proprio = nn.Linear(observation["proprio"].shape[-1], self.slot_size)

    def forward(self, observation: TensorDict) -> Features:
        pixels = self._pixels(observation["rgb"])
        batch, cameras = pixels.shape[:2]
        ids, mask = self._token_ids(observation, batch, cameras)
        # Positions skip padding, so that the length of the padding does not change the output.
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        extra_inputs: dict[str, Tensor] = {}
        if self.is_paligemma:  # positions start at 1; type 0 is a prompt with full attention
            positions, extra_inputs = positions + 1, {"token_type_ids": 1 - mask}
        try:
            output = self.model(
                input_ids=ids,
                pixel_values=pixels if self.many_images else pixels.flatten(0, 1),
                attention_mask=mask,
                position_ids=positions,
                output_hidden_states=True,
                use_cache=False,
                **extra_inputs,
            )
        except IndexError:
            refuse_unknown_tokens(observation["language"], self.vocabulary)
            raise
        slots: Tensor = output.hidden_states[-1][:, -self.num_slots :].float()
        if self.from_proprio is not None:
            slots = slots + self.from_proprio(observation["proprio"].float())[:, None]
        return Features(slots, slots[:, 0])

    def token_head(self, num_bins: int) -> nn.Module:
        embeddings = cast(Any, self.model).get_output_embeddings()
        size = embeddings.weight.shape[0]
        require(
            num_bins <= size, f"num_bins={num_bins} is more than the model's vocabulary, {size}."
        )
        lowest, highest = self.bin_tokens or (size - num_bins, size - 1)
        step = 1 if lowest <= highest else -1
        tokens = range(lowest, highest + step, step)
        require(
            len(tokens) == num_bins,
            f"bin_tokens={self.bin_tokens} are {len(tokens)} tokens, but num_bins={num_bins}.",
        )
        return VocabularyBins(embeddings, tokens)

    def _token_ids(
        self, observation: TensorDict, batch: int, cameras: int
    ) -> tuple[Tensor, Tensor]:
        device = observation["rgb"].device
        pictures = torch.full(
            (batch, cameras * self.tokens_per_image), self.image_token, device=device
        )
        parts, masks = [pictures], [torch.ones_like(pictures)]
        if "language" in observation.keys():
            words = observation["language"]
            parts.append(words + self.token_offset)
            masks.append((words != self.padding).to(masks[0].dtype))
        if "condition" in observation.keys():
            bad_token, good_token = self.condition_tokens
            condition = observation["condition"] > 0.5
            parts.append(torch.where(condition[:, :1], good_token, bad_token))
            # (0, 0) is absent: masked, so that no attention reads it.
            masks.append(condition.any(1, keepdim=True).to(masks[0].dtype))
        parts.append(torch.full((batch, self.num_slots), self.placeholder, device=device))
        masks += [torch.ones_like(part) for part in parts[len(masks) :]]
        return torch.cat(parts, 1), torch.cat(masks, 1)

    def _pixels(self, rgb: Tensor) -> Tensor:
        pictures = rgb if rgb.dim() == 5 else rgb[:, None]
        planes = pictures.flatten(0, 1).permute(0, 3, 1, 2).to(torch.float32).div(255.0)
        if planes.shape[-2:] != (self.image_size, self.image_size):
            planes = F.interpolate(
                planes, (self.image_size, self.image_size), mode="bilinear", antialias=True
            )
        planes = (planes - self.pixel_mean) / self.pixel_std
        dtype = next(self.model.parameters()).dtype
        cameras: Tensor = planes.to(dtype).unflatten(0, pictures.shape[:2])
        return cameras

    def _set_statistics(
        self, kind: str, path: str | None, mean: Sequence[float] | None, std: Sequence[float] | None
    ) -> None:
        statistics = (mean, std) if mean is not None and std is not None else image_statistics(path)
        require(
            statistics is not None or kind == "hf_config" or do_weights_follow(),
            f"{path} has no preprocessor_config.json with image_mean and image_std, which scale "
            "pixels. Copy the model's file there, or set both (0.5 for each colour, if the model "
            "takes -1 to 1).",
        )
        scaling = statistics or ([0.5] * 3, [0.5] * 3)
        for name, values in zip(("pixel_mean", "pixel_std"), scaling, strict=True):
            tensor = torch.tensor(list(values or ())).view(3, 1, 1)
            self.register_buffer(name, tensor)


class VocabularyBins(nn.Module):
    """Logits of successive tokens of a vocabulary, from a layer that the language model owns."""

    def __init__(self, embeddings: nn.Linear, tokens: range) -> None:
        super().__init__()
        self._embeddings = (embeddings,)  # a tuple, so that the layer is not a child of this module
        self._first, self._is_descending = min(tokens), tokens.step < 0
        self._end = self._first + len(tokens)

    def forward(self, slots: Tensor) -> Tensor:
        (embeddings,) = self._embeddings
        weight = cast(Any, embeddings).weight[self._first : self._end]
        logits = F.linear(slots.float(), weight.float())
        return logits.flip(-1) if self._is_descending else logits


def _padding_token(config: Any, embeddings: int) -> int:
    # SmolVLM's config has a token above its language model's, which is beyond the vocabulary.
    tokens = (getattr(part, "pad_token_id", None) for part in (config.text_config, config))
    return next((int(t) for t in tokens if t is not None and 0 <= t < embeddings), 0)


def _tokens_per_image(config: Any) -> int:
    vision = config.vision_config
    patches = (int(_of(vision, "image_size")) // int(_of(vision, "patch_size"))) ** 2
    factor = int(getattr(config, "scale_factor", 1) or 1)
    # The model joins factor x factor patches into one token.
    return patches // factor**2


def _of(config: Any, name: str) -> Any:
    return config[name] if isinstance(config, Mapping) else getattr(config, name)
