"""Replay a compiled graph on a GPU as a CUDA graph: one launch in place of one per kernel."""

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_rl.system.machine import settings

LARGEST = 2**26
"""Bytes of inputs; a larger graph is not captured: launching takes nothing of its time, and what
its activations take would be kept for it alone."""


def is_worth_capturing(tensors: Iterable[Tensor]) -> bool:
    """Tell whether it pays to capture a graph of these inputs."""
    tensors = list(tensors)
    return (
        settings().cuda_graphs
        and all(tensor.is_cuda for tensor in tensors)
        and sum(tensor.nbytes for tensor in tensors) <= LARGEST
    )


class CapturedGraph:
    """A graph that a GPU replays as it was captured.

    The first call runs it as it is, since what its kernels set up when they are first used must not
    be captured. The second captures it. From then on inputs that lie elsewhere each time are copied
    to where they lay then. Where another input has moved, such as the state of an optimizer that
    has loaded another, all this begins anew.

    Source: the PyTorch documentation, "CUDA semantics", section "CUDA Graphs".

    Args:
        graph: takes tensors on one GPU, may write into them, and returns tensors.
        moving: which of its inputs, only read, lie elsewhere at each call.
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
        """Return what the graph returns, in tensors of its own."""
        if self._fails:
            return self._graph(*inputs)
        # A captured graph reads and writes addresses, whatever lies there by then.
        addresses = [tensor.data_ptr() for tensor in inputs]
        del addresses[self._moving]
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
        # The next replay writes over them, and statistics keep scalars until the iteration is over.
        return [output.clone() for output in self._outputs]

    def _capture(self, inputs: list[Tensor]) -> None:
        """Record the graph without running it; where that fails, warn and never try again."""
        self._places = [tensor.clone() for tensor in inputs[self._moving]]
        inputs[self._moving] = self._places
        try:
            self._replay, self._outputs = capture(lambda: self._graph(*inputs))
        except RuntimeError as error:
            self._fails = True
            warnings.warn(
                "The compiled update is not replayed as a CUDA graph, and launches its kernels one "
                f"by one: {str(error).strip().splitlines()[0]}",
                stacklevel=2,
            )


def run_on_side_stream(function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Call a function on a stream of its own, as what is to be captured has to be warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = function()
    torch.cuda.current_stream().wait_stream(stream)
    return outputs


def capture(
    function: Callable[[], Sequence[Tensor]],
) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Record what a function has a GPU do; return what does it again, and where the results lie."""
    graph = torch.cuda.CUDAGraph()
    # A collector's thread may use the GPU meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function()
    return graph.replay, outputs
