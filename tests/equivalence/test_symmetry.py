"""Mirrored samples meet compiled updates, resume and the background; two ranks are in ddp_runs.py."""

import torch

from lightning_rl import SymmetricPPO
from tests.core.equivalence.test_resume import stop_and_resume
from tests.equivalence.test_async import assert_same_training, background
from tests.helpers import assert_same_run, scalars, train

RUN = {
    "env": "Pendulum-v1",
    "data": {"buffer_size": 40, "total_env_steps": 4 * 40 * 6},  # 200 steps are an episode
    "policy": {"normalize_observation": True},
    "model": {
        "algorithm": SymmetricPPO,
        "joints": {"0": "-0"},
        "observation": {"height": [1], "side": [-1], "speed": [-1]},
        "mirror_loss_coef": 0.5,
    },
}


def test_in_the_background_and_stopped_it_ends_as_uninterrupted(tmp_path):
    train(tmp_path / "whole", **RUN)
    train(tmp_path / "background", **RUN | {"data": RUN["data"] | {"collector": background(0)}})
    assert_same_training(tmp_path / "whole", tmp_path / "background")
    stop_and_resume(tmp_path / "stopped", 3, **RUN)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert scalars(tmp_path / "whole")["train/mirror_loss"]


def test_compiled_it_follows_the_eager_run(tmp_path, traced_only):
    eager, *_ = train(tmp_path / "eager", **RUN)
    compiled, *_ = train(tmp_path / "compiled", **RUN | {"model": RUN["model"] | {"compile": True}})
    assert any(key[1] == "loss" for key in compiled.learner.graphs._compiled)
    for key, value in eager.policy.state_dict().items():
        torch.testing.assert_close(compiled.policy.state_dict()[key], value, rtol=1e-3, atol=1e-4)
