"""Names of earlier versions: typed, they are refused with the present name; in files they are translated."""

import pytest

import lightning_rl
from lightning_rl import PointMass
from lightning_rl.checkpoints.registry import OURS, RENAMED, SECTIONS, TEXTS, present_path
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.cli.checking import check_options, kinds_of
from lightning_rl.cli.parsing import read_settings, settings_in
from lightning_rl.extensions.managers.term import Reward
from lightning_rl.system.errors import ConfigurationError
from lightning_rl.system.plain_yaml import dump_yaml, load_yaml
from lightning_rl.system.texts import imported
from tests.messages import assert_names, refused

FIT = kinds_of("fit")
OLD = {
    "data.env": "lightning_rl.ReturnFrames",
    "data.collector": "lightning_rl.Demonstrations",
    "wrappers": "lightning_rl.envs.HideEntries",
    "term": "own",
}
NEW = {
    "data.env": "lightning_rl.ReturnFramesEnv",
    "data.collector": "lightning_rl.DatasetCollector",
    "wrappers": "lightning_rl.PartialObservation",
    "term": "task_observation",
}


def config_of(names):
    """The configuration of a run, with an env, a collector, a wrapper and a term."""
    wrapper = {"class_path": names["wrappers"], "init_args": {"entries": [1]}}
    env = {"class_path": "lightning_rl.GymnasiumEnv", "init_args": {"id": "CartPole-v1"}}
    env["init_args"]["wrappers"] = [wrapper, names["wrappers"]]
    group = {"policy": {"state": {"term": names["term"]}}}
    shown = {"class_path": names["data.env"], "init_args": {"path": "data", "observations": group}}
    collector = {"class_path": names["data.collector"], "init_args": {"episodes": 4}}
    data = {"env": env, "eval_env": shown, "collector": collector}
    model = {"class_path": "lightning_rl.PPO", "init_args": {}}
    values = {"seed_everything": 1, "exp_name": "run", "output_dir": "outputs", "trainer": {}}
    return {name: ({"model": model, "data": data} | values)[name] for name in SECTIONS}


def test_a_checkpoint_of_an_earlier_version_is_translated_before_it_is_judged(tmp_path):
    old = checked_config(dump_yaml(config_of(OLD)), tmp_path)
    assert old.config == checked_config(dump_yaml(config_of(NEW)), tmp_path).config
    assert load_yaml(old.config)["data"] == config_of(NEW)["data"]


@pytest.mark.parametrize(
    ("old", "new"),
    {
        "lightning_rl.envs.people.gym_hil.PickCube": "lightning_rl.PickCube",
        "lightning_rl.envs.managers.Force": "lightning_rl.extensions.managers.Force",
        "lightning_rl.envs.managers.functions.one": (
            "lightning_rl.extensions.managers.functions.constant"
        ),
        "lightning_rl.envs.TwoDoors": "lightning_rl.TwoDoors",
        "lightning_rl.environment.People": "lightning_rl.environment.People",
    }.items(),
)
def test_a_module_that_moved_takes_its_names_along(old, new):
    assert present_path(old) == new


def test_a_file_of_an_earlier_version_is_translated(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml({"data": config_of(OLD)["data"], "exp_name": "Script"}))
    assert read_settings(str(file))["data"] == settings_in(config_of(NEW)["data"], "data")
    file.write_text("data: {collector: Demonstrations}\nexp_name: Script")
    assert read_settings(str(file)) == {
        "data": {"collector": "DatasetCollector"},
        "exp_name": "Script",
    }


@pytest.mark.parametrize("name", ["Demonstrations", "lightning_rl.Demonstrations"])
def test_a_typed_old_class_is_refused_with_the_new_one(name):
    with refused(ConfigurationError, names=("data.collector", name, "DatasetCollector")):
        check_options(["--model=PPO", f"--data.collector={name}"], FIT)


@pytest.mark.parametrize("name", ["own", "lightning_rl.extensions.managers.functions.own"])
def test_a_typed_old_term_is_refused_with_the_new_one(name):
    with refused(names=("rewards", name, "task_observation")):
        PointMass(2, rewards={"mine": Reward(name)})


def test_an_old_name_in_a_script_names_the_new_one():
    with pytest.raises(AttributeError) as error:
        _ = lightning_rl.WithTerms
    assert_names(str(error.value), "WithTerms", "TermWrapper")


@pytest.mark.parametrize("old", RENAMED)
def test_a_new_name_exists(old):
    new = present_path(old)
    assert new == OURS or imported(new)
    assert old.startswith(f"{OURS}.")
    assert not TEXTS["term"].fits(old.rpartition(".")[2])
