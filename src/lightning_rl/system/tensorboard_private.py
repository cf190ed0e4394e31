"""All that is used of TensorBoard beyond its documented interface; nothing else imports such names.

Tried with tensorboard 2.21.
"""

import threading
from typing import Any

from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread as WriterThread


def leave_errors_to_the_caller() -> None:
    """Have TensorBoard's thread print no traceback of what the system refuses it.

    It raises the same error in the thread that gives it something to write. This holds for the
    whole process, and for no other thread of it.
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
