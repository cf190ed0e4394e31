"""What an env does besides stepping: it exits, fails to close, or changes torch for all."""

import json
import sys
import weakref
from datetime import timedelta
from functools import partial

import gymnasium
import numpy as np
import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)

from lightning_rl import AsyncCollector, GymnasiumEnv, check_env
from lightning_rl.cli.app import _curable
from lightning_rl.envs.gymnasium.adapter import _close
from lightning_rl.system.errors import EnvFaultError
from tests.envs import ScriptedEnv
from tests.helpers import train
from tests.messages import assert_names, refused


def leave(env):
    sys.exit(0)


class LeavesAtOnce(ScriptedEnv):
    def __init__(self):
        sys.exit()


LEAVES = {
    "step": partial(ScriptedEnv, length=8, act=leave),
    "reset": partial(ScriptedEnv, length=8, begin=leave),
    "construction": LeavesAtOnce,
}
for name, make in LEAVES.items():
    gymnasium.register(f"Leaves-{name}-v0", make)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("where", LEAVES)
def test_an_env_that_exits_does_not_end_the_run_as_a_success(where, vectorization, tmp_path):
    env = partial(GymnasiumEnv, id=f"Leaves-{where}-v0", vectorization=vectorization)
    with pytest.raises(EnvFaultError) as caught:
        train(tmp_path, env=env)
    code = "" if where == "construction" else "0"
    assert_names(caught.value, f"sys.exit({code})", "terminated", "exception")


def test_an_env_that_exits_in_the_background_is_named(tmp_path):
    env = partial(GymnasiumEnv, id="Leaves-step-v0")
    with pytest.raises(Exception, match=r".") as caught:
        train(tmp_path, env=env, data={"collector": AsyncCollector})
    assert_names(_curable(caught.value), "sys.exit(0)", "GymnasiumEnv")


def test_the_check_names_an_env_that_exits():
    findings = check_env("Leaves-step-v0", 2)
    assert_names(findings[-1].text, "sys.exit(0)")
    assert findings[-1].level == "error"


class Observes(ScriptedEnv):
    def __init__(self, kind):
        place, x = gymnasium.spaces.Discrete(4), gymnasium.spaces.Box(-1, 1, (1,), np.float32)
        space = gymnasium.spaces.Dict(place=place, x=x) if kind == "dict" else place
        super().__init__(space, observe=self.seen, length=5)
        self.kind = kind

    def seen(self, env):
        place = int(env.np_random.integers(4))
        place = np.array(place) if self.kind == "array" else place
        return {"place": place, "x": np.ones(1, np.float32)} if self.kind == "dict" else place


gymnasium.register("Observes-v0", Observes)


@pytest.mark.parametrize("kind", ["plain", "dict", "array"])
def test_the_check_judges_what_the_env_returned(kind):
    """Not the array that this package makes of it."""
    env = partial(GymnasiumEnv, id="Observes-v0", env_kwargs={"kind": kind})
    texts = [finding.text for finding in check_env(env, 2, seconds=0.2)]
    assert any("should be an int" in text for text in texts) == (kind == "array")


def fail_to_close():
    raise OSError("the socket is gone")


gymnasium.register("FailsToClose-v0", partial(ScriptedEnv, length=8, close=fail_to_close))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_env_that_fails_to_close_does_not_fail_a_complete_run(vectorization, tmp_path):
    env = partial(GymnasiumEnv, id="FailsToClose-v0", vectorization=vectorization)
    with refused(UserWarning, names=("ScriptedEnv", "OSError", "close", "the socket is gone")):
        train(tmp_path, env=env)
    assert json.loads((tmp_path / "run.json").read_text())["outcome"] == "finished"
    env = GymnasiumEnv(1, "FailsToClose-v0")
    _close(weakref.ref(env))  # at the exit of the process: it was reported


@pytest.mark.parametrize(
    ("callback", "cure"),
    [
        (LearningRateFinder(), "rl-cli sweep"),
        (BatchSizeFinder(), "rl-cli sweep"),
        (BackboneFinetuning(), "trainer.init_from"),
        (StochasticWeightAveraging(1e-2), "EMAWeightAveraging"),
        (OnExceptionCheckpoint("saved"), "ckpt_path"),
        (LambdaCallback(on_before_zero_grad=lambda *_: None), "on_before_backward"),
        (ModelCheckpoint(save_on_exception=True), "trainer.checkpoint_every_n_iterations"),
        (
            ModelCheckpoint(train_time_interval=timedelta(seconds=1)),
            "trainer.checkpoint_every_n_iterations",
        ),
    ],
)
def test_a_callback_of_lightning_that_does_not_fit_is_refused_by_name(callback, cure, tmp_path):
    with refused(names=("trainer.callbacks", type(callback).__name__, cure)):
        train(tmp_path, trainer={"callbacks": [callback]})
