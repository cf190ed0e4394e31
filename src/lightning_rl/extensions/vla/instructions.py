"""Turn instructions into tokens for a model."""

from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import require
from lightning_rl.extend.files import expanded
from lightning_rl.extensions.vla.lerobot.directory import read_directory
from lightning_rl.extensions.vla.lerobot.processors import Processors, find_local
from lightning_rl.extensions.vla.weights import extra


class InstructionTokenizer:
    """A tokenizer of transformers, or the tokenizer and other steps of a LeRobot policy.

    Args:
        path: local directory of a tokenizer, or of a LeRobot policy that reads instructions, with
            its tokenizer in the directory, next to it or in the working directory.
        length: S, maximum tokens of an instruction.

    Attributes:
        vocabulary: number of tokens.

    Raises:
        ConfigurationError: if there is no tokenizer.
    """

    def __init__(self, path: str | None, length: int) -> None:
        place = None if path is None else expanded(path)
        require(
            place is not None and place.is_dir(),
            f"No tokenizer at {path}: give the local directory of the model, where its "
            "tokenizer.json is, or of a LeRobot policy. Nothing is downloaded.",
        )
        assert place is not None
        self._length, self._steps, tokenizer_path = length, None, str(place)
        if (place / "policy_preprocessor.json").is_file():
            self._steps = Processors(read_directory(str(place))).tokenization
            require(self._steps is not None, f"The policy in {path} reads no instructions.")
            assert self._steps is not None
            places = [place, place.parent, Path()]
            tokenizer_path = find_local(self._steps.name, places, "tokenizer.json", "tokenizer")
        transformers = extra("transformers")
        try:
            # Without trust_remote_code, transformers asks at the keyboard.
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                tokenizer_path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} holds no tokenizer: {error}") from error
        self.vocabulary = len(self._tokenizer)

    def __call__(self, text: str) -> np.ndarray:
        """Return the tokens of an instruction, int64 [S], padded at the end.

        Raises:
            ConfigurationError: if it has more than S tokens.
        """
        # A LeRobot policy may end instructions with a new line.
        prompt = text if self._steps is None else self._steps.text(text)
        tokens = self._tokenizer(prompt)["input_ids"]
        # LeRobot cuts long instructions, if the policy says so; others are refused.
        if self._steps is not None and self._steps.truncation:
            tokens = tokens[: self._steps.max_length]
        require(
            len(tokens) <= self._length,
            f"The instruction '{text}' has {len(tokens)} tokens, more than length={self._length}: "
            "raise length.",
        )
        padded = np.full(self._length, self._tokenizer.pad_token_id or 0, np.int64)
        padded[: len(tokens)] = tokens
        return padded
