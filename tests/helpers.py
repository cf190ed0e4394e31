"""Build small training runs, and compare them."""

import argparse
import io
import runpy
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import seed_everything
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import lightning_rl
from lightning_rl import (
    DQN,
    GRPO,
    PPO,
    SAC,
    ActorCritic,
    ActorOnly,
    CollectorContext,
    DeterministicActorCritic,
    DiscreteActorCritic,
    DiscreteSAC,
    GymnasiumEnv,
    OffPolicyAlgorithm,
    QPolicy,
    RLDataModule,
    RLTrainer,
    SquashedActorCritic,
)
from lightning_rl.buffers.replay_files import Part, read_part
from lightning_rl.cli.app import run
from lightning_rl.compiled import graphs
from lightning_rl.compiled.update import CompiledUpdate
from lightning_rl.optim.update import Update


def parsed_config(name):
    """Return all settings of a shipped config, with defaults."""
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        run(["fit", "--config", name, "--print_config"])
    return yaml.safe_load(printed.getvalue())


def make_data(env="CartPole-v1", **kwargs):
    factory = partial(GymnasiumEnv, id=env) if isinstance(env, str) else env
    settings = {
        "num_envs": 4,
        "buffer_size": 16,
        "total_env_steps": 4 * 16 * 6,
        "iterations_per_epoch": 3,
        "num_eval_episodes": 2,
        "max_eval_episode_steps": 24,
    }
    return RLDataModule(factory, **settings | kwargs)


def make_collector(cls, env, policy, num_steps, seed, *own, **settings):
    """Make a collector outside of a run; `settings` are for its context or for itself."""
    names = {field.name for field in fields(CollectorContext)}
    context = {name: settings.pop(name) for name in names & settings.keys()}
    return cls(CollectorContext(env, policy, num_steps, seed, **context), *own, **settings)


def make_ppo(data, policy_kwargs=None, algorithm=PPO, **kwargs):
    settings = {"n_epochs": 2, "batch_size": 32, "lr_schedule": "linear"}
    names = {base.__name__ for base in algorithm.__mro__}  # those of extensions may be left out
    cls = ActorOnly if issubclass(algorithm, GRPO) else ActorCritic
    if issubclass(algorithm, OffPolicyAlgorithm):
        settings = {"batch_size": 16, "random_env_steps": 32, "lr_schedule": "linear"}
        cls = SquashedActorCritic if issubclass(algorithm, SAC) else DeterministicActorCritic
        if "FlowQAlgorithm" in names:
            cls = lightning_rl.FlowActorCritic
        if "GripperSAC" in names:
            cls = lightning_rl.GripperActorCritic
        cls = DiscreteActorCritic if issubclass(algorithm, DiscreteSAC) else cls
        cls = QPolicy if issubclass(algorithm, DQN) else cls
    own = dict(policy_kwargs or {})
    if "APG" in names:
        settings = {"n_epochs": 2, "batch_size": 32} if "SHAC" in names else {}
        cls = ActorCritic if "SHAC" in names else ActorOnly
        own = {"squash": True} | own
    cls = own.pop("policy_class", cls)
    policy = cls(data.observation_space, data.action_space, hidden_sizes=(16,), **own)
    return algorithm(policy, **settings | kwargs)


def policy_for(env, seed=1):
    """Make a small policy for an env."""
    torch.manual_seed(seed)
    return ActorCritic(env.single_observation_space, env.single_action_space, (8,))


def make_update(module, *, compile, optimizer=None, name=""):
    """Make an update of a module's loss, outside of a run; without an optimizer the weights stay."""
    objective = module.objectives[name]
    optimizer = optimizer or torch.optim.SGD(objective.parameters, lr=0.0)
    if compile:
        return CompiledUpdate(objective, optimizer, graphs.Graphs(module, torch.device("cpu")))
    return Update(objective, optimizer)


def compile_function(function, inputs):
    """Compile a function of tensors as a graph."""
    traced = make_fx(function)(*inputs)
    return graphs.compile_graph(traced, graphs.lift_tensors(traced), inputs)


def draw_from(distribution, output, generator, state=None):
    """Draw from a distribution by a generator; without one, return the mode."""
    noise = None
    if generator is not None:
        noise = output.new_empty(*output.shape[:-1], distribution.noise_size)
        distribution.fill_noise(noise, generator)
    return distribution.sample(output, noise, state)


def scalars_of(update, minibatch):
    """Return the scalars that an update reports for a minibatch, by name."""
    update(minibatch.clone())
    return update.objective.statistics.close()


def count_graphs(update, kind):
    """Return the number of graphs of a kind."""
    return sum(len(made) for key, made in update.graphs._compiled.items() if kind in key)


def train(
    run_dir,
    *,
    env="CartPole-v1",
    data=None,
    policy=None,
    model=None,
    trainer=None,
    ckpt_path=None,
    seed=3,
):
    """Train in a directory, and return (module, data module, trainer)."""
    seed_everything(seed)
    datamodule = make_data(env, **(data or {}))
    module = make_ppo(datamodule, policy, **(model or {}))
    runner = fit_in(run_dir, module, datamodule, ckpt_path=ckpt_path, **(trainer or {}))
    return module, datamodule, runner


def fit_in(run_dir, module, data, *, ckpt_path=None, **trainer):
    """Train a module that was made by hand on a CPU, and return the trainer."""
    settings = {"accelerator": "cpu", "enable_progress_bar": False} | trainer
    runner = RLTrainer(run_dir=str(run_dir), **settings)
    runner.fit(module, data, ckpt_path=ckpt_path)
    return runner


def collect_into(statistics, *steps, **more):
    """Give steps [N, T] to statistics of episodes, and add the finished episodes."""
    statistics.add(statistics.follow(*steps, **more))


@contextmanager
def uncompiled_traces():
    """Run traces eagerly: Inductor takes six seconds per graph; test_gradients.py tests it."""

    def run_unchanged(traced, inputs, **kwargs):
        return lambda *tensors: traced(*tensors)

    def keep_value(proxy, value):
        """Make no fake tensor of each result, which only the compiler reads: a third of a trace."""
        proxy.node.meta["val"] = value
        return proxy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "standalone_compile", run_unchanged)
        patch.setattr(proxy_tensor, "set_meta", keep_value)
        yield


def load(checkpoint):
    return torch.load(checkpoint, weights_only=True)


def through_file(state):
    """Return a state as it comes back from a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def without(content, *keys):
    """Return a checkpoint without some keys and without its list of keys, as old versions wrote it."""
    dropped = {*keys, "contents"}
    state = {key: value for key, value in content["lightning_rl"].items() if key not in dropped}
    kept = {key: value for key, value in content.items() if key not in dropped}
    return kept | {"lightning_rl": state}


def newest():
    """Return the directory in outputs/ that was changed last."""
    return max(Path("outputs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def last(run_dir):
    return Path(run_dir) / "checkpoints" / "last.ckpt"


def scalars(run_dir, ignore=("charts/SPS",)):
    """Return {tag: [(env steps, value), ...]} of a run, except tags that depend on the clock.

    Reads files in the order of their creation. TensorBoard sorts them by name, which depends on process ids within a
    second.
    """
    files = Path(run_dir, "logs").glob("events.out.tfevents.*[0-9]")  # not the settings
    read = [list(EventFileLoader(str(file)).Load()) for file in files]
    rows = []
    for events in sorted(filter(None, read), key=lambda events: events[0].wall_time):
        for event in events:
            if event.HasField("session_log"):
                rows = [row for row in rows if row[0] < event.step]
            rows += [
                (event.step, value.tag, tensor_util.make_ndarray(value.tensor).item())
                for value in event.summary.value
                if value.metadata.plugin_data.plugin_name == "scalars"
            ]
    tags = sorted({tag for _, tag, _ in rows if not tag.startswith(ignore)})
    return {tag: [(step, value) for step, name, value in rows if name == tag] for tag in tags}


def assert_same(a, b, path=""):
    """Assert that two trees of tensors and plain values are equal bit for bit."""
    are_tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)  # or parameters
    assert are_tensors or type(a) is type(b), f"{path}: {type(a)} and {type(b)}"
    if are_tensors:
        assert a.dtype == b.dtype, path
        assert torch.equal(
            a.nan_to_num(7.0) if a.is_floating_point() else a,
            b.nan_to_num(7.0) if b.is_floating_point() else b,
        ), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{path}: {a.keys() ^ b.keys()}"
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    else:
        assert a == b or (a != a and b != b), f"{path}: {a} and {b}"


def saved_replay(run_dir, state):
    """Pop the files of a saved replay, and return their joined content, however it is divided."""
    if "online" in state:
        state.pop("files")
        return {name: saved_replay(run_dir, state[name]) for name in ("online", "offline")}
    folder, begin, columns, aside = Path(run_dir) / "checkpoints" / "replay", state["begin"], {}, {}
    parts = [Part(name, *map(int, name.split("-")[1:3]), 0) for name in state.pop("files")]
    for part in parts:
        content = read_part(folder, part)
        kept = content["aside", "cells"] // state["num_envs"] >= begin
        for key, value in content.items():
            if key[0] == "aside":
                aside.setdefault(key, []).append(value[kept])
            else:
                columns.setdefault(key, []).append(value[max(0, begin - part.first) :])
    return {key: torch.cat(values) for key, values in (columns | aside).items()}


def assert_same_run(one, other):
    """Assert that two runs ended equally: weights, optimizer, counters, random streams, envs, curves."""
    a, b = load(last(one)), load(last(other))
    replays = [
        [
            saved_replay(run, state)
            for state in content["RLDataModule"].get("replays", [])
            if "files" in state
        ]
        for run, content in ((one, a), (other, b))
    ]
    assert_same(*replays, "replay")
    for key in (
        "state_dict",
        "optimizer_states",
        "lightning_rl",
        "RLDataModule",
        "global_step",
        "epoch",
    ):
        assert_same(a[key], b[key], key)
    curves, others = scalars(one), scalars(other)
    assert curves.keys() == others.keys()
    for tag in curves:
        assert_same(curves[tag], others[tag], tag)


SMALL_RUN = [
    *("--data.num_envs", "4", "--data.buffer_size", "16", "--model.batch_size", "32"),
    *("--data.iterations_per_epoch", "3", "--data.num_eval_episodes", "2"),
]
"""Options of a short `rl-cli fit --config ppo.yaml`; an iteration has 64 env steps."""


def error_of(capture, *arguments, status=(1, 2), alone=False):
    """Run `rl-cli`, which ends with an error and an exit code; return what `capsys` or `capfd` has of stderr.

    If `alone`, one line is all that it prints there.
    """
    capture.readouterr()
    with pytest.raises(SystemExit) as stop:
        run([*map(str, arguments)])
    assert stop.value.code in (status if isinstance(status, tuple) else (status,))
    error = capture.readouterr().err.strip()
    assert "rl-cli: error: " in error
    assert "Traceback" not in error
    assert not alone or (error.startswith("rl-cli: error: ") and "\n" not in error)
    return error


def script(name, monkeypatch):
    """Import a script, which finds those next to it and in scripts/."""
    folder = Path(__file__).parents[1] / "scripts"
    for place in (folder, (folder / name).parent):
        monkeypatch.syspath_prepend(str(place))
    return import_module(Path(name).name)


class ParsedError(Exception):
    """The arguments have been read, and the rest need not be done."""


def parse_of_script(path, *arguments):
    """Run a script until it has read its arguments; return those that it does not know."""
    known = argparse.ArgumentParser.parse_known_args

    def parse_all(self, *args, **kwargs):
        raise ParsedError(known(self, *args, **kwargs)[1])

    def parse_some(self, *args, **kwargs):
        known(self, *args, **kwargs)
        raise ParsedError([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_all)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_some)
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(Path(path).parent)
        with pytest.raises(ParsedError) as stop:
            runpy.run_path(str(path), run_name="__main__")
    return stop.value.args[0]


def only_parsed(arguments):
    """Run `rl-cli` with an option that ends it once its arguments are read."""
    with pytest.raises(SystemExit) as stop:
        run(arguments)
    assert stop.value.code in (0, None)


def tensors_of(module):
    """Return copies of the tensors of a module's state by their names."""
    return {k: v.clone() for k, v in module.state_dict().items() if torch.is_tensor(v)}
