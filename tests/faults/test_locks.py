"""A checkpoint decides nothing about where a run writes or deletes, and never for how long it reads."""

import inspect
import pkgutil
import re
import signal
from importlib import import_module
from pathlib import Path

import gymnasium
import pytest
import torch
from jsonargparse._util import get_import_path
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

import lightning_rl
from lightning_rl import Algorithm
from lightning_rl.checkpoints.format import CONFIG_KEY
from lightning_rl.checkpoints.registry import (
    CLASSES,
    GRANTS,
    NAMES,
    REFUSED,
)
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.cli.app import run
from lightning_rl.system.construction import to_config
from lightning_rl.system.declared import parts_of
from lightning_rl.system.jsonargparse_private import parameters_of
from lightning_rl.system.texts import imported
from tests.core.faults.test_trust import SETTINGS, settings
from tests.helpers import last, train
from tests.messages import assert_names, refused

BLOCKS = {"class_path": "lightning_rl.PushBlocks"}
CHUNKS = {"class_path": "lightning_rl.ActionChunk", "init_args": {"env": BLOCKS}}
ACTOR = {"class_path": "lightning_rl.ActorOnly"}
NEEDED = {"id": "CartPole-v1", "env": BLOCKS, "policy": ACTOR, "inner": ACTOR, "delay_ms": 0.0}
"""What constructors want beside the argument that is forged, by the argument's name."""

FLAGS, MAPPINGS = ("bool", "Any"), ("dict", "Mapping", "Any")
TEXTS = ("str", "Path", "Any", "object", "_empty")
"""Parts of the annotations that a flag, a mapping, and the path of a file can stand under."""


def classes_of(kind, packages):
    """Return all classes of a kind that some packages hold, by import path."""
    found = {}
    for package in packages:
        for attribute in vars(import_module(package)).values():
            is_one = isinstance(attribute, type) and issubclass(attribute, kind)
            if is_one and attribute is not kind and not inspect.isabstract(attribute):
                found[f"{package}.{attribute.__name__}"] = attribute
    return found


def arguments_of(cls):
    """Yield the parameters of a constructor, those behind **kwargs too."""
    seen = set()
    for base in cls.__mro__[:-1]:
        own = inspect.signature(base.__init__).parameters if "__init__" in vars(base) else {}
        for name, parameter in list(own.items())[1:]:
            # The parser takes no private ones.
            if (
                name not in seen
                and not name.startswith("_")
                and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            ):
                seen.add(name)
                yield name, str(parameter.annotation)


def forgeries(cls):
    """Yield arguments: each that may hold a path with one, and at last all flags at once."""
    flags = {}
    for name, annotation in arguments_of(cls):
        if any(part in annotation for part in TEXTS):
            yield {name: "{outside}/target"}
        if any(part in annotation for part in MAPPINGS):
            keys = ("path", "video_folder", "logdir", "xml_file")
            code = {"trust_remote_code": True, "auto_map": {"AutoModel": "evil.Model"}}
            yield {name: dict.fromkeys(keys, "{outside}/target") | code}
        if any(part in annotation for part in FLAGS):
            flags[name] = True
    if flags:
        yield flags


def named(path, cls, forged):
    needed = {n: NEEDED[n] for n, _ in arguments_of(cls) if n in NEEDED}
    if issubclass(cls, gymnasium.Wrapper):
        del needed["env"]  # which its maker gives, and no configuration may
    return {"class_path": path, "init_args": needed | forged}


def placed(key, value):
    """Return the configuration, as YAML, with a class under its key."""
    vla = {"class_path": "lightning_rl.VLAPolicy", "init_args": {"backbone": value}}
    task = {"class_path": "lightning_rl.PointMass", "init_args": {"action": value}}
    mixed = {"class_path": "lightning_rl.MixedReplay", "init_args": {key: value}}
    taken = {"class_path": "lightning_rl.Intervention", "init_args": {"source": value}}
    policy = {"class_path": "lightning_rl.ActorCritic", "init_args": {"hidden_sizes": [16]}}
    model, env = "model.init_args", "data.env.init_args"
    places = {
        "model": {"model": value | {"init_args": {"policy": policy} | value.get("init_args", {})}},
        "policy": {f"{model}.policy": value},
        "encoder": {f"{model}.policy": ACTOR | {"init_args": {"encoder": value}}},
        "curiosity": {"model.class_path": "lightning_rl.CuriousPPO", f"{model}.curiosity": value},
        "memory": {f"{model}.policy": ACTOR | {"init_args": {"memory": value}}},
        "backbone": {f"{model}.policy": vla, "data.env": CHUNKS},
        "env": {"data.env": value},
        "action": {"data.env": task},
        "collector": {"data.collector": value},
        "replay": {"data.replay": value},
        "optimizer": {f"{model}.optimizer": value},
        "online": {"data.replay": mixed},
        "offline": {"data.replay": mixed},
        "wrappers": {f"{env}.wrappers": [value]},
        "source": {f"{env}.wrappers": [taken]},
    }
    return settings(places[key])


def snapshot(root):
    """Return the content of all files below a directory, and its folders."""
    return {
        path.relative_to(root): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def place(elsewhere):
    """Return (the run, what lies outside of it), and stand in a third place."""
    run_dir, outside = elsewhere / "theirs" / "run_20260101_000000", elsewhere / "outside"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(SETTINGS)
    victim = outside / "target" / "checkpoints"
    victim.mkdir(parents=True)
    for number in range(3):
        (victim / f"iteration_{number:06d}.ckpt").write_text("of another run")
    mark = f"from pathlib import Path\nPath({str(outside / 'ran')!r}).touch()\n"
    (outside / "target" / "evil.py").write_text(mark)
    (outside / "target" / "__init__.py").write_text(mark)
    return run_dir, outside


def by_command(*arguments):
    """Return what uses a checkpoint on the command line."""
    return lambda path: run([*arguments, "--ckpt_path", str(path)])


def attack(run_dir, content, config, use):
    """Save a forged checkpoint in a run and use it; what it is refused for does not matter."""
    torch.save(content | {CONFIG_KEY: config}, last(run_dir))
    try:
        use(last(run_dir))
    except (SystemExit, Exception) as error:
        return error


LONG = ("env", "optimizer", "wrappers")
"""Keys with dozens of classes: a minute in all. The others take seconds."""

USES = {"validate": by_command("validate"), "load_from_checkpoint": Algorithm.load_from_checkpoint}


@pytest.mark.parametrize(
    ("key", "use"),
    [
        # Both read a checkpoint by the same function: a parse of 0.2 s before it finds nothing more.
        pytest.param(
            key,
            USES[use],
            marks=pytest.mark.slow if key in LONG or (use, key) > ("validate", "collector") else (),
            id=f"{key}-{use}",
        )
        for use in USES
        for key in CLASSES
        if key
        not in ("eval_env", "critic_encoder", "base", "term")  # env, encoder, policy, functions
    ],
)
def test_no_class_that_a_checkpoint_may_name_writes_outside_its_run(key, use, place, trained):
    run_dir, outside = place
    before, tried = snapshot(outside), 0
    for path in sorted(CLASSES[key].names):
        cls = imported(path)
        for forged in forgeries(cls):
            config = placed(key, named(path, cls, forged)).replace("{outside}", str(outside))
            attack(run_dir, trained, config, use)
            assert snapshot(outside) == before, f"{path}: {forged}"
            assert not list(Path().iterdir()), f"{path}: {forged}"
            tried += 1
    assert tried or key in ("action", "memory"), (
        "the registry has no class whose arguments can be forged"
    )


@pytest.mark.parametrize("path", ["gymnasium.wrappers.RecordVideo"])
def test_a_class_that_writes_is_refused(path, place):
    _, outside = place
    value = {"class_path": path, "init_args": {"video_folder": str(outside / "films")}}
    with refused(names=("policy.ckpt", "wrappers.0.class_path", "--trust_code true")):
        checked_config(placed("wrappers", value), Path("policy.ckpt"))


OUTSIDE = {
    "ModelCheckpoint": (
        *("callbacks", "lightning.pytorch.callbacks"),
        {"dirpath": "{outside}", "filename": "../made", "save_top_k": -1},
    ),
    "CSVLogger": ("logger", "lightning.pytorch.loggers", {"save_dir": "{outside}"}),
}
"""Section, package and arguments of classes that write files."""


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("own", [True, False], ids=["in its run", "alone"])
def test_resuming_writes_inside_the_run_only(name, own, place, trained):
    run_dir, outside = place
    key, package, init_args = OUTSIDE[name]
    value = {"class_path": f"{package}.{name}", "init_args": init_args}
    changes = {
        f"trainer.{key}": [value] if key == "callbacks" else value,
        "output_dir": "{outside}",
        "trainer.output_dir": "{outside}",
    }
    config = settings(changes).replace("{outside}", str(outside))
    if not own:
        (run_dir / "config.yaml").unlink()  # as a file that somebody sent
    before, theirs = snapshot(outside), snapshot(run_dir)
    more = ["--data.total_env_steps", "192"]
    assert attack(run_dir, trained, config, by_command("fit", *more)) is None
    assert snapshot(outside) == before
    if own:
        assert not list(Path().iterdir())
    else:
        assert set(snapshot(run_dir)) == {*theirs, Path("checkpoints/last.ckpt")}
        assert [path.name for path in Path().iterdir()] == ["outputs"]


def test_no_path_in_the_state_of_a_callback_is_acted_on(place, trained):
    """Also not where the user has given the callback, and the checkpoint its state.

    Lightning itself removes only what lies below the callback's own directory.
    """
    run_dir, outside = place
    callback = ModelCheckpoint(
        dirpath=outside, monitor="eval/avg_reward", save_top_k=1, save_last=True, mode="min"
    )
    victim = str(outside / "target")
    state = {
        "dirpath": str(outside),
        "best_model_path": victim,
        "kth_best_model_path": victim,
        "best_k_models": {victim: torch.tensor(1e9)},
        "kth_value": torch.tensor(1e9),
        "last_model_path": victim,
        "best_model_score": torch.tensor(1e9),
        "current_score": torch.tensor(1e9),
        "monitor": "eval/avg_reward",
    }
    own = {key: value | state for key, value in trained["callbacks"].items() if "Best" in key}
    forged = {**trained["callbacks"], **own, callback.state_key: state}
    torch.save(trained | {"callbacks": forged}, last(run_dir))
    before = snapshot(outside)
    data = {"total_env_steps": 192}
    train(run_dir, data=data, trainer={"callbacks": [callback]}, ckpt_path=last(run_dir))
    assert before.items() <= snapshot(outside).items()
    assert Path(callback.best_model_path).is_file()


def test_what_is_left_out_and_what_is_read_is_said(place, trained, capsys):
    run_dir, _ = place
    collector = {"class_path": "lightning_rl.DatasetCollector"}
    stop = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {}}
    changes = {
        "trainer.callbacks": [stop],
        "trainer.profiler": "simple",
        "trainer.num_nodes": 2,
        "trainer.devices": 100_000,
        "trainer.plugins": [{"class_path": "subprocess.Popen"}],
        "trainer.strategy": "deepspeed",
        "trainer.init_from": "elsewhere.ckpt",
        "trainer.max_epochs": 40,
        "data.collector": collector | {"init_args": {"path": "some\x1b[2J.pt"}},
    }
    attack(run_dir, trained, settings(changes), by_command("validate"))
    assert capsys.readouterr().err.splitlines()[:2] == [
        "Ignored settings of the checkpoint, because they concern files, machines or code: trainer.callbacks "
        "(EarlyStopping), trainer.devices (100000), trainer.num_nodes (2), trainer.plugins (Popen), "
        "trainer.profiler (simple), trainer.strategy (deepspeed). To use them, pass them again, add --trust_code "
        "true if you trust the checkpoint's source, or give the run's config.yaml as --config.",
        "The checkpoint's configuration reads these files as data: some?[2J.pt "
        "(data.collector.init_args.path).",
    ]


def bombs():
    levels = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 12))
    return {
        "aliases": f"l0: &l0 [x]\n{levels}\n",
        "itself": "model: &a [*a]\n",
        "depth": "model: " + "[" * 5000 + "]" * 5000 + "\n",
    }


@pytest.mark.parametrize("name", bombs())
def test_a_configuration_beyond_all_bounds_is_refused(name, place, trained, capsys):
    run_dir, _ = place
    torch.save(trained | {CONFIG_KEY: bombs()[name]}, last(run_dir))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(30)
    try:
        with pytest.raises(SystemExit):
            run(["validate", "--ckpt_path", str(last(run_dir))])
    finally:
        signal.alarm(0)
    bound = "100 levels" if name == "depth" else "10,000 values, or itself"
    assert_names(capsys.readouterr().err, "rl-cli: error:", last(run_dir), bound, "--config")


@pytest.mark.parametrize("devices", [10_000, [0] * 4_000, ",".join("0" * 4_000)])
def test_processes_are_as_many_as_this_machine_has_cores(devices):
    checked = checked_config(settings({"trainer.devices": devices}), Path("policy.ckpt"))
    assert set(checked.left_out) == {"trainer.devices"}
    assert not checked_config(settings({"trainer.devices": 1}), Path("policy.ckpt")).left_out


INNER = {
    "lightning_rl.extensions.algorithms.recorded_frames.FrameAlgorithm",
    "lightning_rl.extensions.checks.play.RandomPolicy",
    "lightning_rl.extensions.vla.lerobot.policy.LeRobotBackbone",
    "lightning_rl.extensions.datasets.offline.DatasetSpaces",
    "lightning_rl.extensions.managers.wrapper.EndsByTerms",
    "lightning_rl.extensions.managers.EndEffectorPose",  # takes a function, which is code
    "lightning_rl.extensions.export.exported.ExportedPolicy",  # of `load_policy`
    "lightning_rl.extensions.vla.resnet.ResNetEncoder",
    "lightning_rl.extensions.algorithms.steering.BaseFeatures",
    "lightning_rl.rollout.structured_actions.FlatAction",
    "lightning_rl.envs.chunk_wrapper.ChunkWrapper",
    "lightning_rl.envs.gymnasium.recorded_info.RecordedInfo",
    "lightning_rl.envs.gymnasium.first_episode.RandomFirstEpisode",
    "lightning_rl.envs.gymnasium.replay.CheckedReturns",
    "lightning_rl.envs.gymnasium.replay.ReplayableEpisode",
    "lightning_rl.Teleoperator",  # takes the import path of a device, which is code
    "lightning_rl.extensions.teleoperation.intervention.QueueSource",  # takes a queue, which no configuration holds
}
"""Classes that the package makes itself, and no configuration names."""


def in_the_package(kind):
    for part in pkgutil.walk_packages(lightning_rl.__path__, "lightning_rl."):
        module = None if part.name == "lightning_rl.__main__" else import_module(part.name)
        for one in vars(module).values() if module else ():
            own = isinstance(one, type) and issubclass(one, kind) and one.__module__ == part.name
            if own and not inspect.isabstract(one) and not one.__name__.startswith("_"):
                yield one


def test_the_table_has_each_class_that_a_run_may_name():
    """By the path that runs write, those of the command line and those of Python."""
    for key, allowed in CLASSES.items():
        found = [imported(name) for name in sorted(allowed.names)]
        if key == "term":  # functions
            assert all(map(callable, found))
            continue
        kind = next(one for one in found[0].__mro__ if one.__name__ == allowed.kind)
        assert all(issubclass(one, kind) for one in found), key
        assert sorted(map(get_import_path, found)) == sorted(allowed.names), key
        written = {to_config(one)["class_path"] for one in found}
        assert written == allowed.names, key
        ours = {get_import_path(one) for one in in_the_package(kind)} - INNER
        assert ours <= allowed.names, key
    wrappers = {
        f"gymnasium.wrappers.{name}"
        for name in vars(gymnasium.wrappers)
        if name in gymnasium.wrappers.__all__
    }
    wrappers = {name for name in wrappers if isinstance(imported(name), type)}
    assert (
        wrappers - CLASSES["wrappers"].names
        == {f"gymnasium.wrappers.{name}" for name in REFUSED} & wrappers
    )
    optimizers = {
        f"torch.optim.{one.__name__}" for one in classes_of(Optimizer, ["torch.optim"]).values()
    }
    unusable = {"torch.optim.LBFGS", "torch.optim.SparseAdam"}
    assert optimizers - unusable == CLASSES["optimizer"].names


def test_each_argument_that_takes_such_a_class_is_a_key_of_the_table():
    kinds = {allowed.kind for allowed in CLASSES.values()}
    known = {*CLASSES, "encoders", "actions", "make_env"}  # the last is given by the data module
    for name in NAMES - CLASSES["wrappers"].names:
        for argument, parameter in parameters_of(imported(name)).items():
            taken = parts_of(parameter.annotation)
            classes = [*taken.families, *parts_of(taken.values).families]
            if any(family.cls.__name__ in kinds for family in classes):
                assert argument in known, (name, argument)


def test_each_argument_that_would_grant_something_is_known():
    words = re.compile("trust|allow_|download|remote|class$")
    found = {
        argument
        for name in NAMES
        for argument in parameters_of(imported(name))
        if words.search(argument)
    }
    assert found == {"trust_code", "allow_download", "model_class"} <= set(GRANTS)


@pytest.mark.parametrize("value", ["trust_code", "allow_download", "trust_remote_code", "auto_map"])
@pytest.mark.parametrize(
    "place", ["init_args", "dict_kwargs", "init_args.config", "init_args.config.text_config"]
)
def test_no_key_grants_anything_wherever_it_stands(value, place):
    backbone = {"class_path": "lightning_rl.TransformersBackbone"}
    at = backbone
    for name in place.split("."):
        at = at.setdefault(name, {})
    at[value] = {"AutoModel": "code.Model"} if value == "auto_map" else True
    with refused(names=(value, "policy.ckpt", "--trust_code true")):
        checked_config(placed("backbone", backbone), Path("policy.ckpt"))


def test_a_model_loads_no_code_from_a_hub():
    for kernel in ("owner/kernel", {"text_config": "owner/kernel"}):
        config = {"model_type": "smolvlm", "attn_implementation": kernel}
        backbone = {
            "class_path": "lightning_rl.TransformersBackbone",
            "init_args": {"config": config},
        }
        with refused(names=("attn_implementation", "owner/kernel", "--trust_code true")):
            checked_config(placed("backbone", backbone), Path("policy.ckpt"))
    config["attn_implementation"] = "sdpa"
    checked_config(placed("backbone", backbone), Path("policy.ckpt"))


@pytest.mark.parametrize("name", ["my_vla.MyVLA", "my-vla.MyVLA", "lightning_rl.TinyVLA"])
def test_no_checkpoint_names_the_class_of_a_model(name):
    policy = {"class_path": "lightning_rl.CustomVLA", "init_args": {"model_class": name}}
    with refused(names=("model_class", "model.init_args.policy", "--trust_code true")):
        checked_config(placed("policy", policy), Path("policy.ckpt"))
