"""Which checkpoints a run keeps, what each kind is good for, and what is refused."""

import errno
import os
import shutil
from collections import deque
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from lightning_rl import GRPO, RLTrainer
from lightning_rl.checkpoints.format import SCHEMA
from lightning_rl.cli.app import run
from lightning_rl.system import files
from lightning_rl.system.errors import WriteError
from lightning_rl.system.files import write_atomically
from tests.callbacks import callback
from tests.envs import ScriptedEnv
from tests.helpers import (
    assert_same,
    error_of,
    last,
    load,
    make_data,
    make_ppo,
    newest,
    scalars,
    train,
)
from tests.messages import assert_names, refused

SMALL = [
    *("--data.num_envs", "4", "--data.buffer_size", "16", "--model.batch_size", "32"),
    *("--data.iterations_per_epoch", "2", "--data.num_eval_episodes", "2"),
]


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_best_is_that_of_the_metric_and_mode(tmp_path):
    data = {"iterations_per_epoch": 1, "total_env_steps": 4 * 16 * 8, "max_eval_episode_steps": 500}
    model = {"learning_rate": 0.03}
    trainer = {"best_metric": "eval/avg_length", "best_mode": "min"}
    train(tmp_path, data=data, model=model, trainer=trainer)
    curve = dict(scalars(tmp_path)["eval/avg_length"])
    assert len(set(curve.values())) > 1
    steps = load(tmp_path / "checkpoints" / "best.ckpt")["lightning_rl"]["env_steps"]
    assert curve[steps] == min(curve.values())


def test_the_check_before_training_is_no_evaluation_of_the_run(tmp_path):
    """An untrained policy has the shortest episodes."""
    data = {"max_eval_episode_steps": 500, "total_env_steps": 4 * 16 * 3}
    checked = {"num_sanity_val_steps": -1, "best_metric": "eval/avg_length", "best_mode": "min"}
    train(tmp_path, data=data, model={"learning_rate": 0.03}, trainer=checked)
    curves = scalars(tmp_path)
    assert [step for step, _ in curves["eval/avg_length"]] == [192]
    assert curves["eval/avg_length_best"] == curves["eval/avg_length"]


def test_a_metric_that_the_evaluation_lacks_is_one_readable_error(tmp_path):
    with refused(
        names=("trainer.best_metric", "'eval/avg_rewards'", "close matches: eval/avg_reward")
    ):
        train(tmp_path, trainer={"best_metric": "eval/avg_rewards"})
    with refused(names=("trainer.best_metric", "eval/...", "'train/loss'")):
        train(tmp_path, trainer={"best_metric": "train/loss"})


def test_an_evaluation_whose_episodes_do_not_report_the_metric_is_passed_over(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    reports = [{}, {"seconds": 2.0}, {}, {"seconds": 1.0}, {}]
    answers = {"info": lambda env: {"metrics": reports[0]}, "length": 3}
    gymnasium.register("Reports-v0", partial(ScriptedEnv, **answers))
    data = {"iterations_per_epoch": 1, "total_env_steps": 4 * 16 * 4}
    trainer = {"callbacks": [callback(on_validation_end=lambda *_: reports.pop(0))]}
    trainer |= {"best_metric": "eval/metrics/seconds", "best_mode": "min"}
    with pytest.warns(UserWarning, match=r"trainer\.best_metric") as warned:
        train(tmp_path, env="Reports-v0", data=data, trainer=trainer)
    (line,) = (text for text in (str(w.message) for w in warned) if "best_metric" in text)
    assert_names(line, "'eval/metrics/seconds'", "eval/avg_reward")
    curve = dict(scalars(tmp_path)["eval/metrics/seconds"])
    assert list(curve.values()) == [2.0, 1.0]
    steps = load(tmp_path / "checkpoints" / "best.ckpt")["lightning_rl"]["env_steps"]
    assert steps == max(curve) == 4 * 16 * 4


def test_a_run_goes_on_before_the_first_success_that_its_env_reports(tmp_path):
    with refused(UserWarning, names=("trainer.best_metric", "'eval/success_rate'")):
        train(tmp_path, trainer={"best_metric": "eval/success_rate"})
    assert names(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("limit", [24, 5])
def test_the_best_of_another_evaluation_does_not_count(tmp_path, caplog, limit):
    """No episode of 5 steps is better than one of 24; the policy stays as it is."""
    data, still = {"total_env_steps": 64, "max_eval_episode_steps": 24}, {"learning_rate": 1e-9}
    train(tmp_path, data=data, model=still)
    data |= {"total_env_steps": 128, "max_eval_episode_steps": limit}
    train(tmp_path, data=data, model=still, ckpt_path=last(tmp_path))
    best = load(tmp_path / "checkpoints" / "best.ckpt")["lightning_rl"]["env_steps"]
    assert best == (128 if limit == 5 else 64)
    (_, first), (_, second) = scalars(tmp_path)["eval/avg_reward_best"]
    assert second == (5 if limit == 5 else first)
    if limit == 5:
        assert_names(caplog.text, "best.ckpt", "data.max_eval_episode_steps")
    assert ("another evaluation" in caplog.text) == (limit == 5)


def test_a_trainer_does_not_overwrite_one_model_by_another(tmp_path):
    module, data, trainer = train(tmp_path)
    other = make_ppo(data)
    with refused(names=(tmp_path, "best.ckpt", "last.ckpt", "RLTrainer")):
        trainer.fit(other, data)
    trainer.validate(other, data)
    data.total_env_steps += 64
    trainer.fit(module, data)
    assert load(last(tmp_path))["global_step"] == 7


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    state = {"best": np.float64(1.5), "by_task": [np.int64(2), {np.int64(3): np.bool_(True)}]}
    train(tmp_path, trainer={"callbacks": [callback(state_dict=lambda: state)]})
    saved = load(last(tmp_path))["callbacks"]["CallbackOfFunctions"]
    assert_same(saved, {"best": 1.5, "by_task": [2, {3: True}]})
    assert type(state["best"]) is np.float64  # of the callback, which goes on with it


@pytest.mark.parametrize("value", [np.arange(3.0), Path("x"), deque([1])])
def test_what_no_checkpoint_can_give_back_is_refused_at_the_first_save(value, tmp_path):
    """Instead of a run whose files nobody can read."""

    def save(trainer, module, checkpoint):
        checkpoint["mine"] = {"values": [1.0, value]}

    with refused(names=("mine.values.1", type(value).__name__, "tensors")):
        train(tmp_path, trainer={"callbacks": [callback(on_save_checkpoint=save)]})
    assert not last(tmp_path).exists()


def test_a_smoke_test_leaves_no_checkpoint_and_offers_none(tmp_path, capsys):
    """`last` would name it, instead of that of a real run."""
    settings = {"checkpoint_every_n_iterations": 1, "enable_progress_bar": True}
    train(tmp_path, trainer=settings | {"fast_dev_run": True})
    assert not list(tmp_path.rglob("*.ckpt"))
    printed = capsys.readouterr().out
    assert_names(printed, "Run directory")
    assert ".ckpt" not in printed


def test_periodic_checkpoints_rotate(tmp_path):
    trainer = {"checkpoint_every_n_iterations": 2, "keep_checkpoints": 2}
    train(tmp_path, trainer=trainer)
    assert names(tmp_path) == [
        *("best.ckpt", "iteration_000004.ckpt", "iteration_000006.ckpt", "last.ckpt")
    ]
    # A run that goes back removes the oldest files, not its own new ones of smaller numbers, and
    # no copy of the user's.
    early = tmp_path / "checkpoints" / "iteration_000004.ckpt"
    copy = Path(shutil.copy(early, early.with_name("iteration_000004_paper.ckpt")))
    train(tmp_path, trainer=trainer | {"checkpoint_every_n_iterations": 5}, ckpt_path=early)
    copy.unlink()
    assert names(tmp_path) == [
        *("best.ckpt", "iteration_000005.ckpt", "iteration_000006.ckpt", "last.ckpt")
    ]


@pytest.mark.parametrize("iteration", [2, 3])
def test_resume_is_exact_from_a_periodic_checkpoint(iteration, tmp_path):
    """In the middle of an epoch, and at its end, where the evaluation comes first."""
    trainer = {"checkpoint_every_n_iterations": 1, "keep_checkpoints": None}
    train(tmp_path / "whole", trainer=trainer)
    checkpoint = tmp_path / "whole" / "checkpoints" / f"iteration_{iteration:06d}.ckpt"
    assert load(checkpoint)["global_step"] == iteration
    train(tmp_path / "resumed", trainer=trainer, ckpt_path=checkpoint)
    a, b = load(last(tmp_path / "whole")), load(last(tmp_path / "resumed"))
    for content in (a, b):  # the paths of best.ckpt, and its score, are of each run
        del content["callbacks"]
    assert_same(a, b)


@pytest.fixture
def short_run(own_directory, finished_run):
    """Return the directory of a run of one iteration, below ./outputs."""
    return finished_run("--config", "ppo.yaml", *SMALL, "--data.total_env_steps", "64")


def cli_run(*more, steps=64):
    run(["fit", "--config", "ppo.yaml", *SMALL, "--data.total_env_steps", str(steps), *more])
    return newest()


def test_the_weights_only_kind_acts_and_begins_but_does_not_go_on(own_directory, capsys):
    run_dir = cli_run("--trainer.checkpoint_weights_only", "true", steps=256)
    best = run_dir / "checkpoints" / "best.ckpt"
    content = load(best)
    assert set(content) == {
        *("epoch", "global_step", "pytorch-lightning_version", "state_dict"),
        *("rl_config", "lightning_rl"),
    }
    said = {"schema", "kind", "version", "env_steps", "policy", "spaces", "contents"}
    assert set(content["lightning_rl"]) == said
    assert best.stat().st_size < last(run_dir).stat().st_size / 2
    run(["validate", "--ckpt_path", str(best)])
    run(["test", "--ckpt_path", "best"])
    config = (run_dir / "config.yaml").read_text()
    error = error_of(
        capsys, "fit", "--ckpt_path", str(best), "--data.num_eval_episodes", "3", alone=True
    )
    assert_names(error, "weights")
    assert "--trainer.init_from" in error
    assert (run_dir / "config.yaml").read_text() == config  # a refusal changes nothing
    start = ("--trainer.init_from", str(best), "--model.learning_rate", "1e-9")
    warm = cli_run("--exp_name", "warm", *start)
    ended = load(last(warm))
    assert ended["lightning_rl"]["env_steps"] == 64
    assert ended["state_dict"]["policy.version"] == 1
    for key, value in content["state_dict"].items():
        if key.startswith("policy.actor"):
            assert torch.allclose(value, ended["state_dict"][key], atol=1e-6)
    # resumed, a warm-started run goes on with its own weights, even where the other file is gone
    best.unlink()
    run(["fit", "--ckpt_path", str(warm), "--data.total_env_steps", "128"])
    assert load(last(warm))["state_dict"]["policy.version"] == 2


def test_grpo_is_warm_started_with_its_reference(tmp_path):
    model = {"algorithm": GRPO, "group_size": 2, "kl_coef": 0.1, "learning_rate": 1e-9}
    settings = {"model": model | {"lr_schedule": "constant"}, "data": {"total_env_steps": 64}}
    train(tmp_path / "a", seed=5, **settings)
    module, _, _ = train(
        tmp_path / "b", seed=6, trainer={"init_from": str(last(tmp_path / "a"))}, **settings
    )
    weights = load(last(tmp_path / "a"))["state_dict"]["policy.actor.0.weight"]
    assert torch.allclose(module.policy.actor[0].weight, weights, atol=1e-6)
    assert torch.equal(module.reference.kept[0], weights)


def test_a_run_that_resumes_goes_on_with_its_own_weights(tmp_path):
    train(tmp_path / "a", data={"total_env_steps": 64}, model={"learning_rate": 0.1})
    settings = {"trainer": {"init_from": str(last(tmp_path / "a"))}}
    still = settings | {"model": {"learning_rate": 1e-9, "lr_schedule": "constant"}}
    begun, *_ = train(tmp_path / "b", model={"learning_rate": 0.1}, **settings)
    data = {"total_env_steps": begun.env_steps + 64}
    resumed, *_ = train(tmp_path / "b", data=data, ckpt_path=last(tmp_path / "b"), **still)
    own, others = begun.policy.actor[0].weight, load(last(tmp_path / "a"))["state_dict"]
    assert (own - others["policy.actor.0.weight"]).abs().max() > 0.01
    torch.testing.assert_close(resumed.policy.actor[0].weight, own, rtol=0, atol=1e-6)


def test_warm_starting_with_another_policy_is_refused(tmp_path):
    train(tmp_path / "a", data={"total_env_steps": 64})
    with refused(names=("3 entries", "actor.0.weight", "[16, 4]", "[16, 6]", "hidden_sizes: [16]")):
        train(tmp_path / "b", env="Acrobot-v1", trainer={"init_from": str(tmp_path / "a")})


@pytest.mark.parametrize("schema", [SCHEMA + 1, None, "new"])
def test_a_checkpoint_of_another_schema_is_refused(schema, tmp_path, short_run, capsys):
    run_dir = short_run
    content = load(last(run_dir))
    content["lightning_rl"] |= {"schema": schema, "version": "9.8.7"}
    torch.save(content, last(run_dir))
    for command in ("validate", "fit"):
        error = error_of(capsys, command, "--ckpt_path", str(last(run_dir)), alone=True)
        assert_names(error, f"schema {schema}", "lightning_rl 9.8.7", f"schema {SCHEMA}")
        assert f"reads schema {SCHEMA}" in error
        assert ("Upgrade lightning_rl." in error) == (schema == SCHEMA + 1)
    with refused(names=("last.ckpt", "schema", "lightning_rl 9.8.7")):  # and without a command line
        train(tmp_path / "python", ckpt_path=last(run_dir))


class Malicious:
    def __reduce__(self):
        return os.system, (f"touch {Path.cwd() / 'pwned'}",)


def damage(path, how):
    content, checkpoint = path.read_bytes(), load(path)
    if how == "pickle":
        torch.save(checkpoint | {"callbacks": Malicious()}, path)
    elif how == "old pickle":
        torch.save(checkpoint | {"x": Malicious()}, path, _use_new_zipfile_serialization=False)
    else:
        weights = checkpoint["state_dict"]["policy.actor.2.weight"].numpy().tobytes()
        flipped = weights[:10] + bytes([weights[10] ^ 1]) + weights[11:]
        damaged = {
            "truncated": content[: len(content) // 2],
            "one byte": content.replace(weights, flipped),
        }
        path.write_bytes(damaged[how])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "damaged"),
        ("one byte", "damaged"),
        ("pickle", "code"),
        ("old pickle", "damaged"),
    ],
)
def test_a_damaged_or_malicious_checkpoint_is_refused(how, message, short_run, capsys):
    run_dir = short_run
    damage(last(run_dir), how)
    commands = [
        ["validate", "--ckpt_path", str(run_dir)],
        ["fit", "--ckpt_path", "last", "--data.total_env_steps", "128"],
        ["fit", "--config", "ppo.yaml", *SMALL, "--ckpt_path", str(last(run_dir))],
    ]
    for arguments in commands:
        error = error_of(capsys, *arguments, alone=True)
        assert message in error
        assert_names(error, "last.ckpt", message)
    assert not Path("pwned").exists()
    data = make_data()
    trainer = RLTrainer(run_dir="python", logger=False, accelerator="cpu")
    with refused(names=("last.ckpt", "iteration_*.ckpt")):
        trainer.fit(make_ppo(data), data, ckpt_path=str(last(run_dir)), weights_only=False)
    assert not Path("pwned").exists()
    run(["validate", "--ckpt_path", "best"])  # what else was saved is whole


def test_a_bit_flipped_in_the_configuration_is_seen_before_it_is_read(short_run, capsys):
    path = last(short_run)
    content = path.read_bytes()
    assert content.count(b"gamma: 0.99") == 1
    path.write_bytes(content.replace(b"gamma: 0.99", b"gamma: 0.98"))
    for subcommand in ("fit", "validate"):
        error = error_of(capsys, subcommand, "--ckpt_path", str(path), alone=True)
        assert_names(error, "rl-cli: error:", path, "iteration_*.ckpt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [", "is not valid YAML: while parsing a flow node"),
        (b"\xff\xfe\xff", "is not in UTF-8 (byte 0xff at 0)"),
        (b"nothing but text", "holds no settings."),
    ],
)
def test_a_broken_config_in_a_run_directory_is_one_message(
    content, message, tmp_path, short_run, capsys
):
    path = last(short_run)
    config = path.parents[1] / "config.yaml"
    config.write_bytes(content)
    error = error_of(capsys, "fit", "--ckpt_path", str(path), alone=True)
    assert error.startswith(f"rl-cli: error: {config.absolute()} {message}")
    assert_names(error, "rl-cli", "copy")
    elsewhere = tmp_path / "copy.ckpt"
    elsewhere.write_bytes(path.read_bytes())
    run(["fit", "--ckpt_path", str(elsewhere), "--data.total_env_steps", "128"])


def test_a_run_without_evaluations_is_evaluated_on_request(own_directory, capsys):
    path = last(cli_run("--trainer.limit_val_batches", "0"))
    capsys.readouterr()
    run(["validate", "--ckpt_path", str(path)])
    assert_names(capsys.readouterr().out, "return")
    assert (path.parents[1] / "evaluation.json").is_file()
    run(["test", "--ckpt_path", str(path), "--trainer.limit_test_batches", "0"])
    assert (path.parents[1] / "test.json").is_file()


def test_unfinished_files_of_a_killed_run_go_at_the_next_start(tmp_path):
    train(tmp_path, data={"total_env_steps": 64})
    dead = [tmp_path / ".tmp-4194304-x", tmp_path / "checkpoints" / f".tmp-{os.getpid()}-y"]
    alive = tmp_path / "checkpoints" / f".tmp-{os.getppid()}-z"
    for path in (*dead, alive):
        path.touch()
    train(tmp_path, ckpt_path=last(tmp_path))
    assert not [path for path in dead if path.exists()]
    assert alive.exists()


def test_torch_save_on_a_full_disk_leaves_the_old_file_and_says_so(tmp_path):
    path = tmp_path / "last.ckpt"
    write_atomically(path, lambda file: torch.save({"a": 1}, file))

    class Full:
        def __init__(self, file):
            self.file, self.left = file, 2000

        def write(self, content):
            self.left -= len(content)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(content)

        def __getattr__(self, name):
            return getattr(self.file, name)

    with refused(WriteError, names=(path, os.strerror(errno.ENOSPC), "--output_dir")):
        write_atomically(path, lambda file: torch.save({"a": torch.zeros(9999)}, Full(file)))
    assert load(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_rename_reaches_the_disk_too(tmp_path, monkeypatch):
    calls = []
    real = os.fsync
    monkeypatch.setattr(
        files.os, "fsync", lambda fd: calls.append(os.path.isdir(f"/proc/self/fd/{fd}")) or real(fd)
    )
    write_atomically(tmp_path / "file", lambda file: file.write(b"x"))
    assert calls == [False, True]
