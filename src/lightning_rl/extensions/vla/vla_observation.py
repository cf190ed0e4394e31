"""Convert observations for a vision-language-action policy, with tokenised instructions."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import check_range, closest, require
from lightning_rl.extend.spaces import named, names_of
from lightning_rl.extensions.vla.instructions import InstructionTokenizer


class VLAObservation(gymnasium.Wrapper):
    """Convert the observation of a Gymnasium env for `VLAPolicy`.

    `rgb` uint8 [H, W, 3], or [cameras, H, W, 3]; `depth` float32 [H, W], or [cameras, H, W], in
    metres; `proprio` float32 [P]; `language` int64 [S], tokenised once per episode and padded at
    the end. A slash names a nested part of the observation: `pixels/top`.

    `depth` is 0 for pixels without a measurement: NaN, infinite or not positive.

    Args:
        env: an env with a Dict observation.
        rgb: key of the pictures, or a list of keys.
        proprio: key of the robot's state; null for none.
        instruction: name of the text: an observation key, a key of the `info` of `reset`, or an
            attribute of the env; null for none.
        tokenizer: local directory of a transformers tokenizer, or of a LeRobot policy, whose other
            preprocessing of instructions is applied, too; needed for an instruction.
        length: S, maximum tokens of an instruction.
        depth: key (or keys) of the depth pictures, [H, W] or [H, W, 1]: floats in metres, or uint16
            in millimetres; null for none. Their size may differ from `rgb`.

    Raises:
        ConfigurationError: a part does not exist, or an instruction is too long.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        rgb: str | Sequence[str] = "rgb",
        proprio: str | None = "proprio",
        instruction: str | None = None,
        tokenizer: str | None = None,
        length: int = 32,
        depth: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(env)
        check_range("length", length, minimum=1)
        # A list of one key keeps the dimension of the cameras.
        self._depths = [] if depth is None else _as_list(depth)
        self._depths_stacked = not isinstance(depth, str)
        self._cameras, self._stacked = _as_list(rgb), not isinstance(rgb, str)
        self._proprio, self._instruction = proprio, instruction
        pictures = [self._space(name) for name in self._cameras]
        for name, space in zip(self._cameras, pictures, strict=True):
            require(
                space.dtype == np.uint8
                and len(space.shape) == 3
                and space.shape == (*pictures[0].shape[:2], 3),
                f"rgb: {name} is {space}, not uint8 [H, W, 3], of one size for all cameras.",
            )
        several = (len(pictures),) if self._stacked else ()
        shape = (*several, *pictures[0].shape)
        # Named, because cameras in another order would be taken for each other.
        cameras = self._cameras if self._stacked else ()
        rgb_space = named(gymnasium.spaces.Box(0, 255, shape, np.uint8), cameras, axis=0)
        spaces: dict[str, gymnasium.Space[Any]] = {"rgb": rgb_space}
        if self._depths:
            spaces["depth"] = self._depth_space()
        if proprio is not None:
            state_space = self._space(proprio)
            state = gymnasium.spaces.Box(-np.inf, np.inf, (int(np.prod(state_space.shape)),))
            spaces["proprio"] = named(state, names_of(state_space))
        if instruction is not None:
            self._tokenizer = InstructionTokenizer(tokenizer, length)
            # The upper bound of a Box is included.
            highest_token = self._tokenizer.vocabulary - 1
            spaces["language"] = gymnasium.spaces.Box(0, highest_token, (length,), np.int64)
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self._text: str | None = None
        self._tokens = np.zeros(length, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        if self._instruction is not None:
            # Once per episode: an instruction does not change within one.
            self._read(self._find_text(self._instruction, observation, info))
        return self._renamed(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._renamed(observation), reward, terminated, truncated, info

    def _renamed(self, observation: Any) -> dict[str, np.ndarray]:
        pictures = [np.asarray(_part(observation, name)) for name in self._cameras]
        renamed = {"rgb": np.stack(pictures) if self._stacked else pictures[0]}
        if self._depths:
            depths = [_metres(np.asarray(_part(observation, name))) for name in self._depths]
            renamed["depth"] = np.stack(depths) if self._depths_stacked else depths[0]
        if self._proprio is not None:
            state = _part(observation, self._proprio)
            renamed["proprio"] = np.asarray(state, np.float32).reshape(-1)
        if self._instruction is not None:
            renamed["language"] = self._tokens
        return renamed

    def _depth_space(self) -> gymnasium.Space[Any]:
        spaces = [self._space(name) for name in self._depths]
        shape = spaces[0].shape[:2]
        for name, space in zip(self._depths, spaces, strict=True):
            flat = space.shape in (shape, (*shape, 1)) and len(shape) == 2
            require(
                flat and (np.issubdtype(space.dtype, np.floating) or space.dtype == np.uint16),
                f"depth: {name} is {space}; it must be [H, W] or [H, W, 1], floats in metres or "
                "uint16 in millimetres, of one size for all cameras. Name pictures of colours as "
                "rgb.",
            )
        # The largest uint16, in millimetres.
        highest = max(
            65.535 if space.dtype == np.uint16 else float(space.high.max()) for space in spaces
        )
        several = (len(spaces),) if self._depths_stacked else ()
        box = gymnasium.spaces.Box(0.0, highest, (*several, *shape), np.float32)
        return named(box, self._depths if self._depths_stacked else (), axis=0)

    def _read(self, text: str) -> None:
        # Most episodes have the instruction of the last one.
        if text == self._text:
            return
        self._tokens = self._tokenizer(text)
        self._text = text

    def _find_text(self, name: str, observation: Any, info: dict[str, Any]) -> str:
        if isinstance(observation, dict) and name in observation:
            return str(observation[name])
        if name in info:
            return str(info[name])
        require(
            self.env.has_wrapper_attr(name),
            f"No instruction '{name}' in the observation ({_names(observation)}), the info of "
            f"reset ({_names(info)}) or the attributes of {type(self.env.unwrapped).__name__}.",
        )
        # Gymnasium's wrappers do not forward attributes.
        return str(self.env.get_wrapper_attr(name))

    def _space(self, name: str) -> Any:
        space: Any = self.env.observation_space
        for key in name.split("/"):
            if not isinstance(space, gymnasium.spaces.Dict) or key not in space.spaces:
                names = list(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else []
                raise ConfigurationError(
                    f"No '{name}' in the observation of {type(self.env.unwrapped).__name__}, "
                    f"{space}{closest(key, names)}."
                )
            space = space[key]
        return space


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _part(observation: Any, name: str) -> Any:
    for key in name.split("/"):
        observation = observation[key]
    return observation


def _metres(depth: np.ndarray) -> np.ndarray:
    metres = depth.astype(np.float32).reshape(depth.shape[:2])
    # uint16 has no NaN, and 0 where nothing was measured.
    if depth.dtype == np.uint16:
        return metres / np.float32(1000.0)
    return np.where(np.isfinite(metres) & (metres > 0.0), metres, np.float32(0.0))


def _names(value: Any) -> str:
    return ", ".join(value) if isinstance(value, dict) else type(value).__name__
