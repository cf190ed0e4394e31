"""Recurrent layers, GRU and LSTM, whose state is part of the rollout."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl.policies.networks.perceptron import check_weights_fit, orthogonal_
from lightning_rl.rollout.sequences import Sequences
from lightning_rl.system.errors import check_range


class Memory(nn.Module, ABC):
    """Base class of recurrent layers, which do not hold a state.

    A subclass implements `step`, and may move work that does not depend on the state to `project`,
    which runs once for all steps of a sequence. The first constructor argument is `input_size`. In
    the config: `memory: {class_path: my_module.MyMemory}`.

    Args:
        input_size: D, number of input features.
        size: H, number of outputs.
        state_size: S, numbers in the state.
    """

    def __init__(self, input_size: int, size: int, state_size: int) -> None:
        super().__init__()
        check_range("memory: size", size, minimum=1)
        self.input_size = input_size
        self.size = size
        self.state_size = state_size

    @abstractmethod
    def step(self, projected: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [B, H] and next state [B, S] for `projected` [B, P] and state [B, S]."""

    def project(self, features: Tensor) -> Tensor:
        """Return the inputs [..., P] of `step` for features [..., D]. Default: the features."""
        return features

    def forward(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.step(self.project(features), state)

    def unroll(self, features: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """Run L steps, with gradients through time; return the outputs [B, L, H].

        Args:
            features: [B, L, D].
            state: [B, S], before the first step.
            starts: [B, L] bool, the first steps of episodes; they reset the state.
        """
        outputs = []
        steps = self.project(features).unbind(1), starts.unbind(1)
        for projected, start in zip(*steps, strict=True):
            # An episode that starts within the sequence begins with a zero state.
            output, state = self.step(projected, state.masked_fill(start[:, None], 0.0))
            outputs.append(output)
        return torch.stack(outputs, 1)

    @torch.no_grad()
    def burn_in(self, features: Tensor, state: Tensor, starts: Tensor, real: Tensor) -> Tensor:
        """Return the state [B, S] after C steps, without gradients.

        Args:
            features: [B, C, D].
            state: [B, S], before the first step.
            starts: [B, C] bool, the first steps of episodes.
            real: [B, C] bool; other steps do not change the state.
        """
        steps = (tensor.unbind(1) for tensor in (self.project(features), starts, real))
        for projected, start, is_real in zip(*steps, strict=True):
            _, next_state = self.step(projected, state.masked_fill(start[:, None], 0.0))
            # Padding leaves the state unchanged.
            state = torch.where(is_real[:, None], next_state, state)
        return state

    def unroll_samples(
        self, sequences: Sequences, encode: Callable[[TensorDict], Tensor]
    ) -> Tensor:
        """Return the outputs [M, H] at the samples of `sequences`.

        Args:
            sequences: steps, and the state before them; its first S numbers are the memory's state.
            encode: makes features [S, L, D] of steps [S, L].
        """
        state = self._first_state(sequences, encode)
        first = sequences.burn_in
        steps = sequences.steps[:, first : first + sequences.length]
        return sequences.samples(self.unroll(encode(steps), state, steps["starts"]))

    @torch.no_grad()
    def unroll_next(
        self, sequences: Sequences, encode: Callable[[TensorDict], Tensor], next_features: Tensor
    ) -> Tensor:
        """Return the outputs [M, H] for the next observations of the samples.

        Uses the state after a sample's last step, even if the episode ended there.

        Args:
            sequences: see `unroll_samples`; `last` is required.
            encode: see `unroll_samples`.
            next_features: [M, D], features of the next observations.
        """
        state = self._first_state(sequences, encode)
        steps = sequences.steps[:, sequences.burn_in :]
        inputs = self.project(encode(steps)).unbind(1), steps["starts"].unbind(1)
        # All states are kept: a sample may be any step of its sequence.
        states = []
        for projected, start in zip(*inputs, strict=True):
            _, state = self.step(projected, state.masked_fill(start[:, None], 0.0))
            states.append(state)
        last = cast(Tensor, sequences.last)
        # `last` counts through the steps of all sequences, one sequence after another.
        end_state = torch.stack(states, 1).flatten(0, 1).index_select(0, last)
        output: Tensor = self(next_features, end_state)[0]
        return output

    def _first_state(self, sequences: Sequences, encode: Callable[[TensorDict], Tensor]) -> Tensor:
        state = sequences.state[..., : self.state_size]
        if sequences.burn_in == 0:
            return state
        steps = sequences.steps[:, : sequences.burn_in]
        # Burn-in only warms the state up: gradients begin at the first sample.
        with torch.no_grad():
            features = encode(steps)
        return self.burn_in(features, state, steps["starts"], steps["real"])


MemoryFactory = Callable[[int], Memory]
"""Makes a memory for a number of features; in YAML `{class_path: GRU, init_args: {size: 64}}`."""


class GRU(Memory):
    """A gated recurrent unit. Its state is its output.

    h' = (1 - z) n + z h, n = tanh(W x + b + r (U h + c)), r, z = sigmoid(W x + U h + b).

    Source: Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder". Differs: r
    follows the product with U, as in torch.nn.GRU; the bias of z starts at 1.

    Args:
        input_size: D, number of input features.
        size: H, units.
    """

    def __init__(self, input_size: int, size: int = 64) -> None:
        super().__init__(input_size, size, size)
        self.input = _input_weights(input_size, 3 * size)
        self.recurrent = _recurrent_weights(size, gates=3)
        with torch.no_grad():
            # A bias of 1 keeps the state at first, and gradients with it.
            self.input.bias[size : 2 * size].fill_(1.0)

    def project(self, features: Tensor) -> Tensor:
        return _in_float32(self.input(features))

    def step(self, projected: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        # The gates r and z, then the candidate n, whose recurrent part r scales first.
        of_gates, of_new = projected.tensor_split([2 * self.size], -1)
        gates, recalled = _in_float32(self.recurrent(state)).tensor_split([2 * self.size], -1)
        reset, update = (of_gates + gates).sigmoid().chunk(2, -1)
        new = (of_new + reset * recalled).tanh()
        # (1 - z) n + z h, with one product.
        next_state = new + update * (state - new)
        return next_state, next_state


class LSTM(Memory):
    """A long short-term memory. Its state is [h, c], the output h and the cell c.

    c' = f c + i tanh(g), h' = o tanh(c'), i, f, g, o = W x + U h + b, sigmoids on i, f, o.

    Source: Hochreiter and Schmidhuber 1997, "Long Short-Term Memory"; forget gate: Gers et al.
    2000, with an initial bias of 1 (Jozefowicz et al. 2015).

    Args:
        input_size: D, number of input features.
        size: H, units.
    """

    def __init__(self, input_size: int, size: int = 64) -> None:
        super().__init__(input_size, size, 2 * size)
        self.input = _input_weights(input_size, 4 * size)
        self.recurrent = _recurrent_weights(size, gates=4, bias=False)
        with torch.no_grad():
            # The forget gate is the second of four, see `step`.
            self.input.bias[size : 2 * size].fill_(1.0)

    def project(self, features: Tensor) -> Tensor:
        return _in_float32(self.input(features))

    def step(self, projected: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, cell = state.chunk(2, -1)
        gates = projected + _in_float32(self.recurrent(output))
        write, keep, new, show = gates.chunk(4, -1)
        cell = keep.sigmoid() * cell + write.sigmoid() * new.tanh()
        output = show.sigmoid() * cell.tanh()
        return output, torch.cat([output, cell], -1)


def _in_float32(product: Tensor) -> Tensor:
    """Return a product in float32: rounding errors of autocast would add up in the state."""
    return product.float() if product.dtype in (torch.bfloat16, torch.float16) else product


def _input_weights(input_size: int, outputs: int) -> nn.Linear:
    check_weights_fit((input_size, outputs))
    layer = nn.Linear(input_size, outputs)
    orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _recurrent_weights(size: int, gates: int, bias: bool = True) -> nn.Linear:
    """Return a layer with orthogonal weights per gate, which keep the norm of the state."""
    check_weights_fit((size, gates * size))
    layer = nn.Linear(size, gates * size, bias=bias)
    for gate in layer.weight.detach().chunk(gates):
        orthogonal_(gate)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
