"""A function where a class belongs: it must not be called to find out."""

import os
import shutil

import pytest
from jsonargparse import Namespace

from lightning_rl import PPO
from lightning_rl.cli.app import run
from lightning_rl.cli.checking import check_class
from tests.helpers import error_of
from tests.messages import assert_names, refused

FIT = ("fit", "--model", "PPO", "--model.policy", "ActorCritic")
CART_POLE = ("--data.env", "GymnasiumEnv", "--data.env.id", "CartPole-v1")


@pytest.mark.parametrize(
    "arguments",
    [
        (*FIT, "--data.env", "{}"),
        (*FIT, *CART_POLE, "--data.eval_env", "{}"),
        (*FIT, *CART_POLE, "--data.collector", "{}"),
        (*FIT, *CART_POLE, "--model.optimizer", "{}"),
        (*FIT, *CART_POLE, "--model.policy.encoder", "{}"),
    ],
    ids=["env", "eval_env", "collector", "optimizer", "encoder"],
)
def test_a_function_is_refused_before_it_is_called(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec = '{"class_path": "os.system", "init_args": {"command": "touch called"}}'
    with pytest.raises(SystemExit):
        run([spec if one == "{}" else one for one in arguments])
    assert not os.path.exists("called")
    assert_names(capsys.readouterr().err, "rl-cli: error: ", "os.system")


def says_nothing():
    raise AssertionError


def says_a_number() -> int:
    raise AssertionError


def says_a_class() -> Namespace:
    raise AssertionError


@pytest.mark.parametrize("function", [says_nothing, says_a_number, shutil.rmtree, print])
def test_by_what_it_says(function):
    name = f"{function.__module__}.{function.__name__}"
    with refused(names=("a.0.b.class_path", "def make(...) -> MyEnv")):
        check_class(name, "a.0.b")


def test_classes_and_functions_that_say_one_are_taken():
    for name in ("torch.optim.Adam", f"{__name__}.says_a_class", "nowhere.Nothing"):
        check_class(name, "a")


class Untyped(PPO):
    def __init__(self, policy, **settings):
        super().__init__(policy, **settings)


def test_an_own_algorithm_whose_policy_has_no_type_is_told_to_declare_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    model = ("--model", f"{__name__}.Untyped", "--model.policy", "ActorCritic")
    error = error_of(capsys, "fit", *model, *CART_POLE)
    assert_names(error, "Untyped", "policy: Policy", "str")
