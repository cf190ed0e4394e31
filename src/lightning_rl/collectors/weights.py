"""Hand versions of a policy's weights from the learner to whoever acts with a copy of it."""

import copy
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_rl.buffers import BufferClosed
from lightning_rl.policies import Policy
from lightning_rl.system.torch_private import copy_all


class PublishedWeights:
    """The newest weights that a policy acts by, its version included, whole at any moment.

    Publishing and loading copy under one lock, so nobody sees half of what was published. What is
    frozen stays out of it: it is the same always.

    Args:
        policy: whose weights are the first to be published.
        device: where they are kept.

    Attributes:
        version: of the newest weights.
        number: how often weights have been published; an algorithm may do so more than once within
            a version.
        closed: whether nobody is to wait any longer.
        publish_seconds: how long the last publication took.
        waited_seconds: how long `wait_until` has waited in all.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._changed = threading.Condition()
        self._names = set(changing_weights(policy))
        self._tensors = [tensor.to(device, copy=True) for tensor in self._changing(policy)]
        self.version = int(policy.version)
        self.number = 0
        self.closed = False
        self.publish_seconds = 0.0
        self.waited_seconds = 0.0

    def publish(self, policy: Policy) -> None:
        """Make the weights of a policy the newest, and wake whoever waits for them."""
        start = time.perf_counter()
        with self._changed:
            # One call for all: to enter an operation takes longer than to copy a small tensor.
            copy_all(self._tensors, self._changing(policy))
            self.version = int(policy.version)
            self.number += 1
            self._changed.notify_all()
        self.publish_seconds = time.perf_counter() - start

    def load_into(self, policy: Policy) -> int:
        """Copy the newest weights into a policy of the same make; return their number."""
        with self._changed:
            copy_all(self._changing(policy), self._tensors)
            return self.number

    def wait_until(self, enough: Callable[[int], bool]) -> None:
        """Wait until the newest version is good enough.

        Raises:
            BufferClosed: after `close`, also while waiting.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self.closed or enough(self.version))
        self.waited_seconds += time.perf_counter() - start
        self.refuse_closed()

    def refuse_closed(self) -> None:
        """Refuse to act after `close`.

        Raises:
            BufferClosed: after `close`.
        """
        if self.closed:
            raise BufferClosed("The collector was closed: nobody acts any more.")

    def close(self) -> None:
        """Wake whoever waits, for good."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _changing(self, policy: Policy) -> list[Tensor]:
        """Return what changes; written in place, outside autograd."""
        state = policy.acting_state()
        return [tensor.detach() for name, tensor in state.items() if name in self._names]


def changing_weights(policy: Policy) -> dict[str, Tensor]:
    """Return what of a learner's policy acting depends on and training changes, by name."""
    # Buffers change without gradients: running means, and the version itself.
    buffers = {name for name, _ in policy.named_buffers()}
    return {
        name: tensor.detach()
        for name, tensor in policy.acting_state().items()
        if tensor.requires_grad or name in buffers
    }


def acting_copy(policy: Policy, device: torch.device) -> Policy:
    """Return a copy to act with; on the learner's own device it shares what is frozen."""
    here = device == policy.version.device
    # A frozen vision model is most of a VLA's memory, and never written.
    shared = {id(p): p for p in policy.parameters() if here and not p.requires_grad}
    return copy.deepcopy(policy, dict(shared)).to(device).requires_grad_(False)
