"""The internals of TensorBoard that the package uses; no other file imports them.

Tried with tensorboard 2.21.
"""

import threading
from typing import Any

from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread as WriterThread


def leave_errors_to_the_caller() -> None:
    """Stop tracebacks of system errors from TensorBoard's thread, in the whole process.

    The next write raises the same error in the caller's thread.
    """
    before = threading.excepthook
    if getattr(before, "__name__", "") == leave_errors_to_the_caller.__name__:
        return

    def hook(failed: Any) -> None:
        is_refusal = isinstance(failed.exc_value, OSError)
        if not (is_refusal and isinstance(failed.thread, WriterThread)):
            before(failed)

    hook.__name__ = leave_errors_to_the_caller.__name__
    threading.excepthook = hook
