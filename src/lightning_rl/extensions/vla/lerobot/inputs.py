"""Turn an env's observations into the inputs of a LeRobot policy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.extend.errors import closest, require
from lightning_rl.extend.spaces import names_of
from lightning_rl.extensions.vla.lerobot.directory import ENVIRONMENT, STATE, PolicyDirectory
from lightning_rl.extensions.vla.lerobot.network import Network
from lightning_rl.extensions.vla.lerobot.processors import Processors

LANGUAGE = "language"
"""Key of an instruction's tokens in an observation."""

USUAL = {STATE: ("proprio", "agent_pos"), ENVIRONMENT: ("environment_state",)}
"""Keys of an env's observation for numbers, besides LeRobot's own."""


class Source(NamedTuple):
    """The place of an input in an observation: key, and number of a picture of several."""

    key: str
    camera: int | None = None


class Inputs(nn.Module):
    """Finds the inputs of a policy in an observation, and normalises them.

    Args:
        directory: directory of the policy.
        processors: processors of the policy.
        network: network of the policy. Several observations are the first dimension of each entry.
        space: space of the observation.
        keys: key of the observation for each input (LeRobot's name); null leaves a picture out.
        padding: token that fills an instruction; None without instructions.

    Attributes:
        sources: by LeRobot's name.

    Raises:
        ConfigurationError: for an input that the observation lacks, or that has another shape.
    """

    def __init__(
        self,
        directory: PolicyDirectory,
        processors: Processors,
        network: Network,
        space: gymnasium.Space[Any],
        keys: Mapping[str, str | None],
        padding: int | None,
    ) -> None:
        super().__init__()
        self.processors, self.padding = processors, padding
        require(
            isinstance(space, gymnasium.spaces.Dict),
            f"A LeRobot policy reads a Dict of {', '.join(directory.inputs)}, but the observation "
            f"is {space}.",
        )
        assert isinstance(space, gymnasium.spaces.Dict)
        for name in keys:
            require(
                name in directory.inputs,
                f"keys names '{name}', but the policy in {directory.path} reads "
                f"{', '.join(directory.inputs)}{closest(name, directory.inputs)}.",
            )
        # The directory has the names after renaming, and the env those before.
        raw = {new: old for old, new in processors.rename.items()}
        left_out = [name for name, key in keys.items() if key is None]
        cameras = [name for name in directory.cameras if name not in left_out]
        require(
            all(name in directory.cameras for name in left_out)
            and (not left_out or (network.any_size and bool(cameras))),
            f"keys leaves out {', '.join(left_out)}, which {directory.kind} needs.",
        )
        self.sources: dict[str, Source] = {}
        for name in [*(k for k in directory.inputs if k in USUAL), *cameras]:
            env_key = keys.get(name)
            views = cameras if name in cameras else []
            source = Source(env_key) if env_key else _find(raw.get(name, name), name, space, views)
            require(
                source is not None and source.key in space.spaces,
                f"The policy in {directory.path} reads {name}, but the observation has "
                f"{', '.join(space.spaces)}. Name the key: keys: {{{name}: KEY}}.",
            )
            assert source is not None
            _check_space(name, space[source.key], source, directory.inputs[name].shape, network)
            self.sources[name] = source
        require(
            padding is None or LANGUAGE in space.spaces,
            f"The policy in {directory.path} reads an instruction, but the observation has no "
            f"{LANGUAGE}: wrap the env in VLAObservation, with tokenizer: {directory.path}.",
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys of the observation that are read."""
        words = () if self.padding is None else (LANGUAGE,)
        # Each key once, in the order of the sources.
        return (*dict.fromkeys(source.key for source in self.sources.values()), *words)

    def forward(self, observation: TensorDict) -> dict[str, Tensor]:
        inputs = {}
        for name, source in self.sources.items():
            value: Tensor = observation[source.key]
            # Several pictures may stand under one key.
            value = value if source.camera is None else value[:, source.camera]
            # Only pictures are uint8.
            if value.dtype == torch.uint8:
                value = planes_of(value)
            inputs[name] = self.processors.prepare(name, value.float())
        if self.padding is not None:
            tokens = observation[LANGUAGE]
            inputs["observation.language.tokens"] = tokens
            inputs["observation.language.attention_mask"] = tokens != self.padding
        return inputs


def planes_of(pictures: Tensor) -> Tensor:
    """Return pictures uint8 [..., H, W, 3] as float32 [..., 3, H, W], 0 to 1."""
    return pictures.movedim(-1, -3).to(torch.float32).div(255.0)


def space_of(
    directory: PolicyDirectory, processors: Processors, network: Network
) -> gymnasium.spaces.Dict:
    """Return the space of observations with LeRobot's names, for a policy without an env."""
    raw = {new: old for old, new in processors.rename.items()}
    lead = (network.obs_steps,) if network.obs_steps > 1 else ()
    spaces: dict[str, gymnasium.Space[Any]] = {}
    for name, feature in directory.inputs.items():
        key = raw.get(name, name)
        if feature.kind == "VISUAL":
            shape = (*lead, *feature.shape[1:], feature.shape[0])
            spaces[key] = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        elif name in USUAL:
            shape = (*lead, *feature.shape)
            spaces[key] = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
    if network.vocabulary is not None and processors.tokenization is not None:
        length, last = (processors.tokenization.max_length,), network.vocabulary - 1
        spaces[LANGUAGE] = gymnasium.spaces.Box(0, last, length, np.int64)
    return gymnasium.spaces.Dict(spaces)


def names_of_inputs(
    space: gymnasium.Space[Any] | None, keys: Mapping[str, str | None]
) -> dict[str, Sequence[str]]:
    """Return the names of the env's numbers, such as joints, for each input of numbers."""
    spaces = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {}
    places = {name: (keys.get(name), *_usual(name, name)) for name in USUAL}
    present = {name: [key for key in place if key in spaces] for name, place in places.items()}
    return {name: names_of(spaces[place[0]]) for name, place in present.items() if place}


def _usual(raw: str, name: str) -> tuple[str, ...]:
    # The last part of a name, such as `top` of observation.images.top.
    short = raw.removeprefix("observation.").removeprefix("images.")
    return raw, name, short, *USUAL.get(name, ())


def _find(raw: str, name: str, space: gymnasium.spaces.Dict, cameras: list[str]) -> Source | None:
    for key in _usual(raw, name):
        if key in space.spaces:
            return Source(key)
    pictures = space.spaces.get("rgb")
    if not cameras or pictures is None or pictures.shape is None:
        return None
    # `rgb` of VLAObservation stacks the cameras; they count in the directory's order.
    if len(pictures.shape) == 4 and pictures.shape[0] == len(cameras):
        return Source("rgb", cameras.index(name))
    return Source("rgb") if len(cameras) == 1 else None


def _check_space(
    name: str,
    space: gymnasium.Space[Any],
    source: Source,
    expected: tuple[int, ...],
    network: Network,
) -> None:
    steps = network.obs_steps
    # FrameStackObservation puts the steps first.
    lead = (steps,) if steps > 1 else ()
    shape = tuple(space.shape or ())[0 if source.camera is None else 1 :]
    fits = shape[: len(lead)] == lead and math.prod(shape) == math.prod((*lead, *expected))
    if len(expected) == 3:
        # LeRobot's pictures are [C, H, W], and those of an env [H, W, C].
        expected = (*expected[1:], expected[0])
        sized = shape[len(lead) :] == expected or (network.any_size and shape[-1] == expected[-1])
        fits = shape[: len(lead)] == lead and len(shape) == len(lead) + 3 and sized
        fits = fits and space.dtype == np.uint8
    cure = (
        f" The policy reads the last {steps} observations: give the env the wrapper {{class_path: "
        f"gymnasium.wrappers.FrameStackObservation, init_args: {{stack_size: {steps}, "
        "padding_type: reset}}."
    )
    kind = "is a picture of uint8, of" if len(expected) == 3 else "has"
    require(
        fits,
        f"{name} {kind} the shape {[*lead, *expected]}, but '{source.key}' of the observation is "
        f"{space}.{cure if steps > 1 else ''}",
    )
