"""Callbacks of functions, for what a test does or looks at during a run."""

import os
import signal

from lightning.pytorch.callbacks import Callback


def callback(**hooks):
    """Return a callback whose hooks are functions: `callback(on_train_start=lambda trainer, module: ...)`."""
    unknown = {name for name in hooks if not hasattr(Callback, name)}
    assert not unknown, unknown
    methods = {name: staticmethod(function) for name, function in hooks.items()}
    return type("CallbackOfFunctions", (Callback,), methods)()


def at_iteration(iteration, act, hook="on_train_batch_end"):
    """Return a callback that calls `act(trainer)` once, when so many iterations have ended."""
    waiting = [iteration]

    def once(trainer, *args):
        if trainer.global_step in waiting and not trainer.sanity_checking:
            waiting.clear()
            act(trainer)

    return callback(**{hook: once})


def send(number=signal.SIGTERM):
    """Return a function, for `at_iteration` and `callback`, that sends this process a signal."""
    return lambda *args: os.kill(os.getpid(), number)


def signal_at(iteration, number=signal.SIGTERM, hook="on_train_batch_start"):
    """Return a callback that sends this process a signal, as an operator or a scheduler would."""
    return at_iteration(iteration, send(number), hook)


def stop(trainer, *args):
    """End the run after this iteration."""
    trainer.should_stop = True


def fail(error):
    """Return a function, for `at_iteration`, `callback` and `before`, that raises an error."""

    def act(*args, **kwargs):
        raise error

    return act
