"""The internals of TensorBoard (2.21) that the package uses; no other file imports them."""

import threading
from typing import Any

from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread as WriterThread


def leave_errors_to_the_caller() -> None:
    """Stop tracebacks of system errors from TensorBoard's thread; the next write raises them."""
    former = threading.excepthook
    # A second hook would call the first one.
    if getattr(former, "__name__", "") == leave_errors_to_the_caller.__name__:
        return

    def hook(failed: Any) -> None:
        is_refusal = isinstance(failed.exc_value, OSError)
        if not (is_refusal and isinstance(failed.thread, WriterThread)):
            former(failed)

    hook.__name__ = leave_errors_to_the_caller.__name__
    threading.excepthook = hook
