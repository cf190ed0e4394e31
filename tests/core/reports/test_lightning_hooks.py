"""Hooks of Lightning in users' classes: what would be lost in silence is refused where the class is defined."""

from functools import cached_property, wraps

import pytest

from lightning_rl import PPO, SAC, RLDataModule
from lightning_rl.cli.app import run
from tests.callbacks import callback
from tests.helpers import train
from tests.messages import assert_names, refused
from tests.variants import after, variant


def hook(self, *args):
    self.seen = args


WITHOUT_SUPER = [
    (PPO, "on_train_batch_start", "super().on_train_batch_start(batch, batch_idx)"),
    (SAC, "on_save_checkpoint", "super().on_save_checkpoint(checkpoint)"),
    (PPO, "setup", "super().setup(stage)"),
    (PPO, "on_validation_epoch_end", "super().on_validation_epoch_end()"),
    (RLDataModule, "state_dict", "super().state_dict()"),
]


@pytest.mark.parametrize(("base", "name", "cure"), WITHOUT_SUPER)
def test_one_that_does_not_call_that_of_its_base_class_is_refused(base, name, cure):
    with refused(names=(f"Mine.{name}", cure)):
        variant(base, "Mine", **{name: hook})
    with refused(names=(f"Mixin.{name}", cure)):
        type("Mine", (type("Mixin", (), {name: hook}), base), {})


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("configure_optimizers", "configure_objectives"),
        ("configure_gradient_clipping", "max_grad_norm"),
        ("optimizer_step", "on_before_optimizer_step"),
        ("lr_scheduler_step", "schedule_from"),
    ],
)
def test_one_that_would_step_the_optimizer_otherwise_is_refused(name, cure):
    """Also if it calls that of its base class."""
    with refused(names=(f"Mine.{name}", cure)):
        after(PPO, "Mine", **{name: hook})


def test_one_that_calls_it_or_may_call_it_is_taken():
    class Calls(PPO):
        def on_train_start(self):
            super().on_train_start()

        def on_train_end(self):
            [PPO.on_train_end(part) for part in (self,)]

    method = Calls.on_train_start
    variant(PPO, on_train_start=lambda self: method(self))
    variant(PPO, on_train_start=wraps(method)(lambda self: None))
    variant(PPO, on_train_start=cached_property(hook))
    variant(Calls, training_step=hook, on_train_epoch_end=hook)
    variant(PPO, validation_step=hook, on_validation_epoch_end=hook)


def test_what_users_log_counts_each_iteration_and_batch_of_episodes_once(tmp_path):
    def log(module, *args):
        module.log("mine", float(args[-1]), on_epoch=True)

    def log_all(module, *_):
        module.log_dict({"val/mine": 1.0, "val/other": 2.0})

    own = after(PPO, training_step=log, validation_step=log_all)
    both = callback(
        on_train_batch_end=lambda _, *args: log(*args),
        on_validation_batch_end=lambda _, *args: log_all(*args),
    )
    _, _, trainer = train(tmp_path, model={"algorithm": own}, trainer={"callbacks": [both]})
    logged = trainer.callback_metrics
    assert [logged[name] for name in ("mine_epoch", "val/mine", "val/other")] == [1.0, 1.0, 2.0]


def test_the_command_line_says_why_a_class_is_refused(tmp_path, monkeypatch, capsys):
    lines = ("from lightning_rl import PPO", "class Mine(PPO):", "    def setup(self, stage): ...")
    (tmp_path / "hooks_of_mine.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        run(["fit", "--config", "ppo.yaml", "--model", "hooks_of_mine.Mine"])
    assert_names(capsys.readouterr().err, "rl-cli: error:", "Mine.setup", "super().setup(stage)")
