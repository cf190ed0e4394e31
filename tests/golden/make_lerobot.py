"""Golden directories of LeRobot policies: `make` runs LeRobot, the tests only fill in weights.

Run it in an environment of its own with LeRobot, see README.md:

    python tests/golden/make_lerobot.py tests/golden
"""

import json
import math
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

TASKS = ["push the red block left", "push the block\n"]
ROWS = 2
PIXELS = 16  # of prepared pictures, each sixteenth row and column is stored
MASK = (1 << 32) - 1


def noise_of(name, shape):
    """Numbers in [-1, 1) by a formula of integers: the same everywhere, bit for bit."""
    x = (torch.arange(math.prod(shape)) + zlib.crc32(name.encode())) & MASK
    x = (x * 2654435761) & MASK
    x = ((x ^ (x >> 15)) * 2246822519) & MASK
    x = ((x ^ (x >> 13)) * 3266489917) & MASK
    x = x ^ (x >> 16)
    return (x.double() / 2**31 - 1.0).float().reshape(shape)


def pixels_of(name, shape):
    """Pictures uint8 [..., C, H, W]."""
    return ((noise_of(name, shape) + 1.0) * 127.5).to(torch.uint8)


def weights_of(shapes):
    """The weights of a policy from their names and shapes."""
    weights = {}
    for name, shape in shapes.items():
        value = noise_of(name, shape)
        if name.endswith("num_batches_tracked"):
            value = torch.zeros(shape, dtype=torch.int64)
        elif name.endswith("running_var"):
            value = 1.0 + 0.5 * value
        elif len(shape) == 1:
            value = (1.0 if name.endswith("weight") else 0.0) + 0.1 * value
        else:
            value = value * (3.0 / math.prod(shape[1:])) ** 0.5
        weights[name] = value
    return weights


def fill(golden, place):
    """Copy a golden directory to `place`, with its weights."""
    shutil.copytree(golden, place, ignore=shutil.ignore_patterns("io.*"))
    with safe_open(golden / "io.safetensors", "pt") as io:
        shapes = json.loads(io.metadata()["shapes"])
    save_file(weights_of(shapes), place / "model.safetensors")


def filled_in(root):
    """Return a function that fills a golden directory below `root`, once."""
    golden = Path(__file__).parent
    shutil.copytree(golden / "tiny_smolvlm", root / "tiny_smolvlm")

    def make(name):
        if not (root / name).exists():
            fill(golden / name, root / name)
        return root / name

    return make


def statistics_of(features):
    """Statistics of a dataset with these features."""
    found = {}
    for name, feature in features.items():
        shape = (feature.shape[0], 1, 1) if feature.type.value == "VISUAL" else feature.shape
        low = noise_of(f"{name}.low", shape) - 1.5
        high = noise_of(f"{name}.high", shape) + 1.5
        found[name] = {
            **{"min": low, "max": high, "mean": (low + high) / 2, "std": (high - low) / 3},
            **{"q01": low * 0.9, "q99": high * 0.9, "q10": low * 0.5, "q90": high * 0.5},
        }
    return found


def recipes():
    """The policies: type, inputs, size of the action, fields of the config, names to rename."""
    state, top = ("observation.state", (4,)), ("observation.images.top", (3, 64, 96))
    wrist = ("observation.images.wrist", (3, 64, 96))
    environment = ("observation.environment_state", (6,))
    small = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "latent_dim": 8}
    unet = {"horizon": 16, "n_groups": 4, "diffusion_step_embed_dim": 16}
    tiny = {"vlm_model_name": "tiny_smolvlm", "max_state_dim": 8, "max_action_dim": 8}
    quantiles = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "QUANTILES"}
    tenths = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILE10"}
    return {
        "act": (
            "act",
            [state, environment],
            3,
            {**small, "chunk_size": 8, "n_action_steps": 8, "n_encoder_layers": 2},
            {},
        ),
        "act_cameras": (
            "act",
            [top, state, wrist],
            5,
            {
                **small,
                **{"chunk_size": 6, "n_action_steps": 4, "pre_norm": True, "use_vae": False},
                **{"feedforward_activation": "gelu", "n_decoder_layers": 2},
                **{"pretrained_backbone_weights": None, "normalization_mapping": quantiles},
            },
            {"observation.images.high": "observation.images.top"},
        ),
        "diffusion": (
            "diffusion",
            [state, environment],
            3,
            {**unet, **{"down_dims": (16, 32), "n_action_steps": 4, "num_train_timesteps": 12}},
            {},
        ),
        "diffusion_cameras": (
            "diffusion",
            [state, top, wrist],
            2,
            {
                **unet,
                **{"down_dims": (16, 24, 32), "kernel_size": 3, "n_action_steps": 3},
                **{"n_obs_steps": 3, "resize_shape": (80, 90), "crop_ratio": 0.8},
                **{"use_group_norm": True, "pretrained_backbone_weights": None},
                **{"use_separate_rgb_encoder_per_camera": False, "beta_schedule": "linear"},
                **{"spatial_softmax_num_keypoints": 8, "use_film_scale_modulation": False},
                **{"noise_scheduler_type": "DDIM", "prediction_type": "sample"},
                **{"num_train_timesteps": 20, "num_inference_steps": 6, "clip_sample": False},
            },
            {},
        ),
        "smolvla": (
            "smolvla",
            [("observation.state", (2,)), ("observation.images.top", (3, 64, 64))],
            2,  # the numbers of PushBlocks
            {
                **tiny,
                **{"chunk_size": 4, "n_action_steps": 4, "num_steps": 4, "num_vlm_layers": 2},
                **{"resize_imgs_with_padding": (64, 64), "tokenizer_max_length": 8},
            },
            {},
        ),
        "smolvla_cameras": (
            "smolvla",
            [top, wrist, state],
            5,
            {
                **tiny,
                **{"chunk_size": 6, "n_action_steps": 5, "num_steps": 3, "num_vlm_layers": 2},
                **{"num_expert_layers": 1, "self_attn_every_n_layers": -1},
                **{"resize_imgs_with_padding": (64, 64), "tokenizer_max_length": 9},
                **{"pad_language_to": "max_length", "add_image_special_tokens": True},
                **{"prefix_length": 40, "expert_width_multiplier": 0.5, "min_period": 0.01},
                **{"normalization_mapping": tenths},
            },
            {},
        ),
    }


def make(to, name, kind, inputs, action_size, fields, rename):
    """Write the golden directory `name`: settings, processors, shapes, inputs and outputs."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import (
        get_policy_class,
        make_policy_config,
        make_pre_post_processors,
    )

    kinds = {1: FeatureType.STATE, 3: FeatureType.VISUAL}
    features = {
        key: PolicyFeature(
            FeatureType.ENV if key.endswith("environment_state") else kinds[len(shape)], shape
        )
        for key, shape in inputs
    }
    action = {"action": PolicyFeature(FeatureType.ACTION, (action_size,))}
    config = make_policy_config(
        kind, input_features=features, output_features=action, device="cpu", **fields
    )
    policy = get_policy_class(kind)(config)
    statistics = statistics_of({**features, **action})
    before, after = make_pre_post_processors(config, dataset_stats=statistics)
    before.steps[0].rename_map = rename
    place = to / name
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary) / name
        for part in (policy, before, after):
            part.save_pretrained(whole)
        shapes = {k: list(v.shape) for k, v in load_file(whole / "model.safetensors").items()}
        save_file(weights_of(shapes), whole / "model.safetensors")
        policy = get_policy_class(kind).from_pretrained(whole, strict=True)
        io = run(policy, before, after, inputs, action_size, rename)
        save_file(io, whole / "io.safetensors", {"shapes": json.dumps(shapes)})
        keep = shutil.ignore_patterns("model.safetensors", "tokenizer")
        shutil.copytree(whole, place, ignore=keep)
    for file in place.glob("*.json"):  # on one line each: programs read them
        content = json.dumps(json.loads(file.read_text()), separators=(",", ":"))
        file.write_text(f"{content}\n")


def run(policy, before, after, inputs, action_size, rename):
    """Return inputs and outputs of LeRobot's own run."""
    config, others = policy.config, {new: old for old, new in rename.items()}
    batch, stored = {}, {}
    steps = (config.n_obs_steps,) if config.type == "diffusion" else ()
    for key, shape in inputs:
        raw = others.get(key, key)
        if len(shape) == 3:
            batch[raw] = pixels_of(key, (ROWS, *steps, *shape)).float() / 255.0
        else:
            stored[raw] = batch[raw] = noise_of(key, (ROWS, *steps, *shape)) * 2.0
    prepared = before({**batch, "task": list(TASKS)})
    for key, value in prepared.items():
        if isinstance(value, torch.Tensor) and key.startswith("observation"):
            picture = value.dim() >= 4
            stored[f"prepared.{key}"] = value[..., ::PIXELS, ::PIXELS] if picture else value
    with torch.no_grad():
        if config.type == "act":
            chunk = policy.predict_action_chunk(prepared)
        elif config.type == "smolvla":
            shape = (ROWS, config.chunk_size, config.max_action_dim)
            stored["noise"] = noise_of("noise", shape) * 1.7
            chunk = policy.predict_action_chunk(prepared, noise=stored["noise"].clone())
        else:
            noise = stored["noise"] = noise_of("noise", (ROWS, config.horizon, action_size)) * 1.7
            if keys := list(config.image_features):
                prepared["observation.images"] = torch.stack([prepared[k] for k in keys], dim=-4)
            condition = policy.diffusion._prepare_global_conditioning(prepared)
            time = torch.tensor([3, 1])
            stored["denoised"] = policy.diffusion.unet(noise, time, global_cond=condition)
            torch.manual_seed(11)
            sample = policy.diffusion.conditional_sample
            chunk = sample(ROWS, global_cond=condition, noise=noise.clone())
    stored["chunk"], stored["action"] = chunk, after(chunk)
    return {k: v.contiguous().clone() for k, v in stored.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(folder)  # a SmolVLA names its language model by a relative path
    for name, recipe in recipes().items():
        if not sys.argv[2:] or name in sys.argv[2:]:
            make(folder, name, *recipe)
            print(name, flush=True)
