"""Pass new versions of a policy's weights from the learner to the acting copies."""

import copy
import threading
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from lightning_rl.buffers import BufferClosed
from lightning_rl.policies import Policy
from lightning_rl.system.errors import require
from lightning_rl.system.sharded import whole
from lightning_rl.system.torch_private import copy_all


class PublishedWeights:
    """The newest weights of an acting policy and their version, always complete.

    A lock guards publishing and loading. Frozen weights are excluded, because they never change.

    Args:
        policy: source of the first weights.
        device: where the weights are stored.

    Attributes:
        version: version of the newest weights.
        number: number of publications; an algorithm may publish several times per version.
        closed: whether `close` has been called.
        publish_seconds: duration of the last publication.
        waited_seconds: total duration of `wait_until`.
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
        """Copy the weights of a policy, and wake the threads that wait for them."""
        start = time.perf_counter()
        newest = self._changing(policy)  # without the lock, because this may wait for other ranks
        with self._changed:
            # Copy all tensors in one call: the overhead of a call exceeds the copy of a small
            # tensor.
            copy_all(self._tensors, newest)
            self.version = int(policy.version)
            self.number += 1
            self._changed.notify_all()
        self.publish_seconds = time.perf_counter() - start

    def load_into(self, policy: Policy) -> int:
        """Copy the newest weights into a policy of the same structure; return `number`."""
        with self._changed:
            copy_all(self._changing(policy), self._tensors)
            return self.number

    def wait_until(self, accepts: Callable[[int], bool]) -> None:
        """Wait until `accepts` is true for the newest version.

        Raises:
            BufferClosed: after `close`, also while waiting.
        """
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self.closed or accepts(self.version))
        self.waited_seconds += time.perf_counter() - start
        self.refuse_closed()

    def refuse_closed(self) -> None:
        """Raise after `close`.

        Raises:
            BufferClosed: after `close`.
        """
        if self.closed:
            raise BufferClosed("The collector is closed.")

    def close(self) -> None:
        """End this and all later waits."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _changing(self, policy: Policy) -> list[Tensor]:
        state = policy.acting_state()
        return [whole(tensor.detach()) for name, tensor in state.items() if name in self._names]


def changing_weights(policy: Policy) -> dict[str, Tensor]:
    """Return the tensors by name that acting reads and training changes."""
    # Include buffers, such as running means and the version: they change without gradients.
    buffers = {name for name, _ in policy.named_buffers()}
    return {
        name: whole(tensor.detach())
        for name, tensor in policy.acting_state().items()
        if tensor.requires_grad or name in buffers or name in policy.moved
    }


def acting_copy(policy: Policy, device: torch.device) -> Policy:
    """Return a copy to act with; on the learner's device, it shares the frozen parameters.

    Raises:
        ConfigurationError: if a module of the policy holds a computed tensor.
    """
    if policy.sharding is not None:
        return cast(Policy, policy.sharding.copy(device))
    for name, module in policy.named_modules():
        for key, value in vars(module).items():
            require(
                not isinstance(value, Tensor) or value.is_leaf,
                f"{type(policy).__name__} cannot be copied to act in the background, because "
                f"{f'{name}.' if name else ''}{key} is computed from its parameters. Use "
                "weight_norm and spectral_norm of nn.utils.parametrizations, not of nn.utils; "
                "compute other such tensors in forward.",
            )
    same_device = device == policy.version.device
    # Share frozen parameters: a frozen vision model is most of a VLA's memory.
    shared = {
        id(weight): weight
        for name, weight in policy.named_parameters()
        if same_device and not weight.requires_grad and name not in policy.moved
    }
    # Parameters still require gradients: torch multiplies by those that do in another way.
    return copy.deepcopy(policy, dict(shared)).to(device)
