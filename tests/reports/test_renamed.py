"""Names of earlier versions mean the present ones: in checkpoints, in files, typed, and in scripts."""

from importlib import import_module

import pytest

import lightning_rl
from lightning_rl import IQL, NoiseActorCritic, PointMass, TermWrapper
from lightning_rl.checkpoints.registry import (
    OURS,
    RENAMED,
    SECTIONS,
    TEXTS,
    present_path,
    present_settings,
)
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.cli.checking import check_options, kinds_of
from lightning_rl.cli.parsing import read_settings, settings_in
from lightning_rl.extensions.managers.functions import task_observation
from lightning_rl.extensions.managers.term import BoundTerm, Curriculum, function_of
from lightning_rl.system.plain_yaml import dump_yaml, load_yaml
from lightning_rl.system.texts import imported
from tests.messages import refused

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
        "lightning_rl.extensions.people.devices.Keyboard": (
            "lightning_rl.extensions.teleoperation.devices.Keyboard"
        ),
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
def test_a_typed_class_of_an_earlier_version_is_the_present_one(name):
    options = [
        "--model=PPO",
        "--model.policy=ActorCritic",
        f"--data.collector={name}",
        "--data.collector.episodes=4",
    ]
    options += ["--data.env=GymnasiumEnv", "--data.env.id=CartPole-v1", "--exp_name=Script"]
    options += ["--data.env.wrappers=[lightning_rl.envs.people.gym_hil.PickCube]"]
    tree = check_options(options, FIT)
    assert tree["data"]["collector"]["class_path"].endswith("DatasetCollector")
    assert tree["exp_name"] == "Script"


@pytest.mark.parametrize("name", ["own", "lightning_rl.envs.managers.functions.own"])
def test_a_term_of_an_earlier_version_is_the_present_one(name):
    assert function_of(name, "a reward") is task_observation


@pytest.mark.parametrize("path", ["", "lightning_rl.envs.managers.functions."])
def test_a_parameter_of_a_term_is_translated_in_files_and_refused_in_python(path):
    term = {"term": f"{path}over_steps", "params": {"steps": 9, "most": 0.5}}
    assert present_settings({"push": term})["push"]["params"] == {"steps": 9, "maximum": 0.5}
    theirs = {"term": "my.over_steps", "params": {"most": 0.5}}
    assert present_settings(theirs) == theirs
    with refused(names=("push", "'most'", "'maximum'")):
        BoundTerm(Curriculum(term["term"], term["params"]), "curriculum", "push", "Task", 2)


@pytest.mark.parametrize(
    ("base", "earlier", "present"),
    [
        (PointMass, "refreshed", "with_derived_entries"),
        (NoiseActorCritic, "replayed", "rollout_for_replay"),
        (IQL, "value_here", "state_value"),
    ],
)
def test_a_hook_of_a_subclass_learns_its_present_name(base, earlier, present):
    with refused(names=("Mine", f"'{earlier}'", f"'{present}'")):
        type("Mine", (base,), {earlier: None})


def test_a_script_gets_the_present_class_with_a_warning():
    with refused(FutureWarning, names=("WithTerms", "lightning_rl.TermWrapper")):
        assert lightning_rl.WithTerms is TermWrapper
    with pytest.raises(AttributeError, match="Nothing"):
        _ = lightning_rl.Nothing


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "lightning_rl.envs": "MujocoEnv TwoDoors",
        "lightning_rl.envs.managers": "Observation Position",
        "lightning_rl.envs.mujoco.env": "MujocoEnv",
        "lightning_rl.audit.check_env": "EnvCheck",
        "lightning_rl.envs.people.gym_hil": "ScriptedHelp",
        "lightning_rl.envs.people.devices": "Keyboard",
        "lightning_rl.extensions.audit.play": "RandomPolicy",
        "lightning_rl.extensions.people.intervention": "Intervention",
        "lightning_rl.envs.tasks": "PointMass CartPole",
        "lightning_rl.policies": "VLAPolicy",
        "lightning_rl.policies.lerobot.policy": "LeRobotPolicy",
        "lightning_rl.reports": "iqm",
        "lightning_rl.robots.stand_in": "StandInArm",
    }.items(),
)
def test_imports_of_earlier_versions_stay(module, names):
    for name in names.split():
        assert getattr(import_module(module), name).__module__.startswith("lightning_rl.extensions")


@pytest.mark.parametrize("old", RENAMED)
def test_a_new_name_exists(old):
    new = present_path(old)
    assert new == OURS or imported(new)
    assert old.startswith(f"{OURS}.")
    assert not TEXTS["term"].fits(old.rpartition(".")[2])
