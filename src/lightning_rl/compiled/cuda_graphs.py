"""Replay a compiled graph on a GPU as a CUDA graph: one launch instead of one per kernel."""

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_rl.system.machine import settings

LARGEST = 2**26
"""Most bytes of inputs of a captured graph: larger graphs gain little, and reserve much memory."""


def is_worth_capturing(tensors: Iterable[Tensor]) -> bool:
    """Return whether a graph of these inputs should be captured."""
    tensors = list(tensors)
    return (
        settings().cuda_graphs
        and all(tensor.is_cuda for tensor in tensors)
        and sum(tensor.nbytes for tensor in tensors) <= LARGEST
    )


class CapturedGraph:
    """A graph that a GPU replays; it may write into its inputs, except the slice `moving`.

    The first call runs the graph, because the setup of kernels must not be captured. The second
    call captures the graph. Later calls copy the `moving` inputs to their captured addresses. If
    another input has moved, such as a reloaded optimizer state, the graph is captured again.

    Source: the PyTorch documentation, "CUDA semantics", section "CUDA Graphs".
    """

    def __init__(self, graph: Callable[..., Sequence[Tensor]], moving: slice) -> None:
        self._graph = graph
        self._moving = moving
        self._addresses: list[int] | None = None
        self._replay: Callable[[], None] | None = None
        self._places: Sequence[Tensor] = ()
        self._outputs: Sequence[Tensor] = ()
        self._fails = False

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if self._fails:
            return self._graph(*inputs)
        # A captured graph reads and writes fixed addresses.
        addresses = [tensor.data_ptr() for tensor in inputs]
        del addresses[self._moving]  # moving inputs are copied to the captured addresses
        if addresses != self._addresses:
            self._addresses, self._replay = addresses, None
            return run_on_side_stream(lambda: self._graph(*inputs))
        if self._replay is None:
            self._capture(list(inputs))
        if self._replay is None:
            return self._graph(*inputs)
        for place, value in zip(self._places, inputs[self._moving], strict=True):
            place.copy_(value)
        self._replay()
        # Copy the outputs: the next replay overwrites them, and statistics need them later.
        return [output.clone() for output in self._outputs]

    def _capture(self, inputs: list[Tensor]) -> None:
        """Record the graph without running it; after an error, warn and stop capturing."""
        self._places = [tensor.clone() for tensor in inputs[self._moving]]
        inputs[self._moving] = self._places
        try:
            self._replay, self._outputs = capture(lambda: self._graph(*inputs))
        except RuntimeError as error:
            self._fails = True
            warnings.warn(
                "The compiled update runs without a CUDA graph: "
                f"{str(error).strip().splitlines()[0]}",
                stacklevel=2,
            )


def run_on_side_stream(function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Call a function on a side stream, the warm-up that a capture needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs may still be in the making
    with torch.cuda.stream(stream):
        outputs = function()
    torch.cuda.current_stream().wait_stream(stream)
    return outputs


def capture(
    function: Callable[[], Sequence[Tensor]],
) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Capture a function's GPU work; return a function that replays it, and the outputs."""
    graph = torch.cuda.CUDAGraph()
    # A collector's thread may use the GPU during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function()
    return graph.replay, outputs
