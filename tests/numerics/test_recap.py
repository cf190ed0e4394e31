"""RECAP: a policy that is told how good its action is, the value of recorded steps, and the rounds of both."""

import json
import os
import re
import signal
import sys
from contextlib import chdir
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box, Dict, Discrete
from lightning.pytorch import seed_everything
from tensordict import TensorDict

from lightning_rl import (
    GRU,
    PPO,
    ActorCritic,
    ActorOnly,
    AsyncCollector,
    BackboneEncoder,
    BehaviorCloning,
    ConditionedPolicy,
    EpisodeWriter,
    FlowSettings,
    PerceptronBackbone,
    ReturnFramesEnv,
    RLDataModule,
    TinyVLA,
    ValueFit,
    VLAPolicy,
    load_policy,
    read_episodes,
)
from lightning_rl.algorithms import Algorithm
from lightning_rl.cli.app import run
from lightning_rl.envs import ActionChunk
from lightning_rl.extensions.datasets.label import by_task
from lightning_rl.extensions.datasets.playing import play_policy
from lightning_rl.extensions.export.graph import ActingGraph, ports_of, traced
from lightning_rl.extensions.recap import command as rounds
from lightning_rl.extensions.recap.label_command import value_config
from lightning_rl.extensions.tasks.probes import FiveDoors, TwoDoors
from lightning_rl.functional import advantage_weight, guide
from tests.commands import Command
from tests.helpers import assert_same, fit_in, last, load, train
from tests.messages import assert_names, refused

pytest.importorskip("pyarrow", reason="the extra data is not installed")
pytest.importorskip("av", reason="the extra data is not installed")

FLAT = Box(-1, 1, (3,), np.float32)
PROPRIO = Dict({"proprio": FLAT})
SEEN = Dict({"rgb": Box(0, 255, (16, 16, 3), np.uint8), "language": Box(0, 8, (3,), np.int64)})
CHUNK = Box(-1, 1, (2, 2), np.float32)

vla = partial(VLAPolicy, backbone=PerceptronBackbone((16,)))
POLICIES = {
    "choices": (ActorOnly, FLAT, Discrete(3)),
    "numbers": (partial(ActorCritic, hidden_sizes=(8,)), FLAT, Box(-1, 1, (2,), np.float32)),
    "keys": (partial(ActorOnly, normalize_observation=True), PROPRIO, Discrete(3)),
    "tokens": (partial(vla, head="token", num_bins=5), PROPRIO, CHUNK),
    "gaussian": (partial(vla, head="gaussian"), PROPRIO, CHUNK),
    "flow": (partial(vla, head="flow"), PROPRIO, CHUNK),
    "learnt flow": (partial(vla, head="flow", flow=FlowSettings(noise="learnt")), PROPRIO, CHUNK),
    "pictures": (partial(VLAPolicy, head="flow"), SEEN, CHUNK),
}


def make(name, **settings):
    policy, *spaces = POLICIES[name]
    torch.manual_seed(0)
    made = ConditionedPolicy(*spaces, policy, **settings).eval()
    with torch.no_grad():  # a fresh actor's last layer is nearly zero
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def observed(name, rows=4):
    _, space, _ = POLICIES[name]
    generator = torch.Generator().manual_seed(1)
    if isinstance(space, Box):
        seen = torch.rand(rows, 3, generator=generator)
    elif "rgb" in space.spaces:
        rgb = torch.randint(0, 256, (rows, 16, 16, 3), generator=generator, dtype=torch.uint8)
        seen = TensorDict({"rgb": rgb, "language": torch.ones(rows, 3).long()}, [rows])
    else:
        seen = TensorDict({"proprio": torch.rand(rows, 3, generator=generator)}, [rows])
    return TensorDict({"observation": seen}, [rows])


def test_guidance_and_weights_are_their_definition():
    generator = torch.Generator().manual_seed(0)
    conditional, absent = torch.randn(2, 5, 3, generator=generator)
    factor = torch.tensor([0.0, 1.0, 1.5, 2.0, 3.0])
    expected = absent.numpy() + factor.numpy()[:, None] * (conditional - absent).numpy()
    np.testing.assert_allclose(guide(conditional, absent, factor), expected, rtol=1e-5, atol=1e-6)
    advantage = torch.tensor([-1.0, -0.05, 0.0, 0.05, 1.0])
    expected = [np.exp(-20), np.exp(-1), 1, np.exp(1), 20]
    np.testing.assert_allclose(advantage_weight(advantage, 20.0, 20.0), expected, rtol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_log_probs_with_guidance_are_recomputed(name):
    """So PPO's first ratio is 1; and cloning is without guidance."""
    policy = make(name, guidance=1.7)
    td = policy.get_action(observed(name), generator=torch.Generator().manual_seed(2))
    again = policy.evaluate_actions(td)["sample_log_prob"]
    torch.testing.assert_close(again, td["sample_log_prob"], rtol=1e-4, atol=1e-4)
    plain = make(name)
    assert (plain.evaluate_actions(td)["sample_log_prob"] - again).abs().max() > 1e-4
    noise = policy.draw_clone_noise([4], torch.Generator().manual_seed(3))
    td = td.set("clone_noise", noise) if noise.numel() else td
    assert torch.equal(policy.clone_loss(td)["clone_loss"], plain.clone_loss(td)["clone_loss"])


class Own(ActorCritic):
    """A policy of a user's own, whose outputs are something else."""

    def action_output(self, td, features):
        return super().action_output(td, features).exp()


KEYS = Dict({"state": FLAT, "goal": FLAT})
REFUSED = {
    "actor_keys": (partial(ActorCritic, actor_keys=["state"]), KEYS, {}, ("condition", "state")),
    "memory": (partial(ActorCritic, memory=partial(GRU, size=8)), FLAT, {}, "memory"),
    "guidance": (Own, KEYS, {"guidance": 2.0}, ("guidance=2", "VLAPolicy", "ActorCritic")),
    "space": (ActorCritic, Box(0, 255, (4,), np.uint8), {}, ("Box", "condition")),
    "number": (ActorCritic, FLAT, {"guidance": -1}, ("guidance", "at least 0", "-1")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_policy_that_would_ignore_the_condition_is_refused(name):
    policy, space, settings, message = REFUSED[name]
    with refused(names=message):
        ConditionedPolicy(space, Discrete(3), policy, **settings)


def test_the_condition_and_guidance_are_in_what_is_exported():
    policy = make("flow", guidance=1.5)
    graph = ActingGraph(policy, ports_of(policy))
    assert [port.name for port in graph.ports.inputs] == ["observation.proprio"]
    seen = observed("flow", 3)
    found = traced(graph).module()({"observation.proprio": seen["observation", "proprio"]})
    expected = policy.get_action(seen, deterministic=True)["action"].clamp(-1, 1)
    torch.testing.assert_close(found["action"], expected, rtol=1e-4, atol=1e-5)


def in_rollouts(*spaces, hidden_sizes):
    own = partial(ActorCritic, hidden_sizes=hidden_sizes, normalize_observation=True)
    return ConditionedPolicy(*spaces, own, guidance=1.5)


def test_it_trains_by_ppo_in_the_foreground_as_in_the_background(tmp_path):
    settings = {"policy": {"policy_class": in_rollouts}, "data": {"total_env_steps": 4 * 16 * 2}}
    here, *_ = train(tmp_path / "here", **settings)
    seed_everything(3)
    background = {"collector": partial(AsyncCollector, max_staleness=0)}
    there, *_ = train(
        tmp_path / "there", **{**settings, "data": {**settings["data"], **background}}
    )
    assert isinstance(here, PPO)
    assert_same(dict(here.state_dict()), dict(there.state_dict()))
    assert load_policy(last(tmp_path / "here")).observation_space.shape == (4,)


def cloned_with(policy, **settings):
    module = BehaviorCloning(policy, **settings)
    module.generator = torch.Generator().manual_seed(0)
    return module


def test_a_share_of_the_conditions_is_dropped():
    module = cloned_with(make("choices"), condition_dropout=0.3)
    condition = torch.randint(1, 3, (2000,), generator=torch.Generator().manual_seed(0))
    minibatch = TensorDict({"condition": condition.clone()}, [2000])
    module._drop_condition(minibatch)
    dropped = minibatch["condition"] == 0
    assert float(dropped.float().mean()) == pytest.approx(0.3, abs=0.03)
    assert torch.equal(minibatch["condition"][~dropped], condition[~dropped])
    with refused(names=("condition_dropout=0.1", "ConditionedPolicy", "ActorOnly")):
        BehaviorCloning(ActorOnly(FLAT, Discrete(3)), condition_dropout=0.1)


def test_weights_of_advantages_have_mean_1_and_leave_padding_out():
    module = cloned_with(ActorOnly(FLAT, Discrete(3)), advantage_temperature=0.1)
    advantage = torch.tensor([[0.1, -0.1, 9.0, 5.0]])
    rollout = TensorDict({"advantage": advantage}, [1, 4])
    mask = torch.tensor([[True, True, False]])
    weight = module._weight(rollout, mask)
    raw = np.exp([1, -1])
    np.testing.assert_allclose(weight, [[*(raw / raw.mean()), 0]], rtol=1e-5)
    for broken in (rollout.exclude("advantage"), rollout.set("advantage", advantage * torch.nan)):
        with refused(names=("advantage_temperature=0.1", "rl-cli label PATH")):
            module._weight(broken, mask)


def record(
    path, episodes=24, tasks=("",), seen=FLAT, view=lambda place: place, known=True, extra=None
):
    """Episodes whose length, and so the return, stands in their first number."""
    writer = EpisodeWriter(path, seen, Discrete(2), 10, pictures="png")
    generator = np.random.default_rng(0)
    for number in range(episodes):
        length = 2 + number % 5
        for t in range(length):
            left = (length - t) / 6
            place = np.array([left, *generator.normal(size=2)], np.float32)
            said = {"task": tasks[number % len(tasks)], "extra": extra or {}}
            writer.add(view(place), 0, 0.0, t == length - 1, False, **said)
        writer.end_episode(view(place), True if known else None)
    writer.finalise()
    return str(path)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return record(tmp_path_factory.mktemp("steps") / "data", 8)


def fit(
    run_dir, path, ckpt_path=None, frames=None, policy=None, trainer=None, iterations=8, **more
):
    seed_everything(3)
    env = partial(ReturnFramesEnv, path=path, bins=21, **(frames or {}))
    budget = {"total_env_steps": 32 * 8 * iterations, "iterations_per_epoch": iterations // 2}
    data = RLDataModule(env, num_envs=32, buffer_size=8, **budget)
    spaces = (data.observation_space, data.action_space)
    settings = {"hidden_sizes": (32,), "normalize_observation": True} | (policy or {})
    model = ValueFit(ActorOnly(*spaces, **settings), learning_rate=0.01, batch_size=64, **more)
    fit_in(run_dir, model, data, ckpt_path=ckpt_path, **(trainer or {}))
    return model


def test_no_member_knows_the_returns_of_its_part(tmp_path):
    """Returns by chance, in episodes that can be told apart, are not remembered."""
    path = str(tmp_path / "data")
    writer = EpisodeWriter(path, Box(-1, 1, (16,)), Discrete(2), 10)
    for number in range(16):
        for t in range(3):
            writer.add(np.eye(16, dtype=np.float32)[number], 0, 0.0, t == 2, False)
        writer.end_episode(np.zeros(16), number % 3 == 0)
    writer.finalise()
    model = fit(tmp_path / "run", path, n_epochs=20, policy={"normalize_observation": False})
    frames = ReturnFramesEnv(1, path)
    parts = [frames.fold_of(number) for number in range(16)]
    assert sorted(parts) == sorted([0, 1, 2, 3] * 4)
    assert parts != [0, 1, 2, 3] * 4
    returns = torch.stack(frames.returns)
    unseen = torch.stack(model.values(path))
    assert (unseen - returns).abs().mean() > 0.3
    model.members[0].eval()
    own = parts.index(0)
    model.others[0].load_state_dict(model.members[0].state_dict())
    known = torch.stack(model.values(path))
    others = [number for number, part in enumerate(parts) if part == 1]
    assert (known[others] - returns[others]).abs().mean() < 0.2, "of another part it knows them"
    assert torch.equal(known[own], unseen[own])


def test_a_value_is_stopped_and_resumed_as_uninterrupted(dataset, tmp_path):
    path = dataset
    fit(tmp_path / "whole", path, iterations=4)
    fit(tmp_path / "half", path, iterations=4, trainer={"max_epochs": 1})
    fit(tmp_path / "half", path, last(tmp_path / "half"), iterations=4)
    whole, resumed = (load(last(tmp_path / name)) for name in ("whole", "half"))
    assert_same(whole["state_dict"], resumed["state_dict"])


CAMERA = Dict({"rgb": Box(0, 255, (16, 16, 3), np.uint8), "proprio": Box(-5, 5, (2,))})


def picture(place):
    rgb = np.zeros((16, 16, 3), np.uint8)
    rgb[:, : round(place[0] * 16)] = 250
    return {"rgb": rgb, "proprio": place[1:]}


@pytest.mark.slow  # six seconds
def test_the_value_reads_pictures_by_a_backbone(tmp_path):
    path = record(tmp_path / "data", 12, seen=CAMERA, view=picture)
    own = {
        "encoder": lambda space: BackboneEncoder(space, TinyVLA((4, 8, 8), 32, 8)),
        "normalize_observation": False,
    }
    model = fit(tmp_path / "run", path, policy=own, n_epochs=6)
    assert model.evaluation["metrics"]["error_over_spread"] < 0.9, "after 192 minibatches"
    with refused(names=("goal", "PerceptronBackbone")):
        BackboneEncoder(Dict({"proprio": FLAT, "goal": FLAT}), PerceptronBackbone())


def test_features_of_any_backbone_have_unit_scale():
    """Large ones saturated the tanh layer after them: the value was a constant."""
    encoder = BackboneEncoder(Dict({"proprio": FLAT}), PerceptronBackbone())
    with torch.no_grad():
        for parameter in encoder.backbone.parameters():
            parameter.mul_(1e2)
    features = encoder(TensorDict({"proprio": torch.randn(5, 3)}, [5]))
    torch.testing.assert_close(features.square().mean(-1), torch.ones(5), rtol=0, atol=0.02)


def test_the_value_is_told_the_task(tmp_path):
    path = record(tmp_path / "data", 4, tasks=("push", "lift"))
    assert list(by_task(list(read_episodes(path)))) == ["lift", "push"]
    frames = ReturnFramesEnv(1, path)
    assert frames.single_observation_space.shape == (5,)
    assert frames.steps_of(0)[:, 3:].tolist() == [[0, 1]] * 2
    assert frames.steps_of(1)[:, 3:].tolist() == [[1, 0]] * 3


def test_the_value_of_a_single_picture_is_told_the_task(tmp_path):
    def view(place):
        return np.full((48, 48, 3), round(255 * place[0]), np.uint8)

    rgb = Box(0, 255, (48, 48, 3), np.uint8)
    path = record(tmp_path / "data", 4, tasks=("push", "lift"), seen=rgb, view=view)
    steps = ReturnFramesEnv(1, path).steps_of(0)
    assert steps["observation"].shape == (2, 48, 48, 3)
    assert steps["task"].tolist() == [[0, 1]] * 2
    policy = value_config(path, {}, 500, 1)["model"]["init_args"]["policy"]["init_args"]
    assert policy["encoder"]["class_path"] == "DictEncoder"


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        pytest.param({"folds": 9}, ("8 episodes", "folds=9"), id="few episodes"),
        pytest.param({"folds": 1}, ("folds", "at least 2"), id="one fold"),
        pytest.param({"folds": 2}, ("data.env.folds", "2", "model.folds", "4"), id="other folds"),
    ],
)
def test_what_a_value_cannot_be_fitted_to_is_refused(frames, message, dataset, tmp_path):
    with refused(names=message):
        fit(tmp_path / "run", dataset, frames=frames)


def test_unknown_success_and_other_observations_are_refused(dataset, tmp_path):
    path = record(tmp_path / "data", 4, known=False)
    with refused(names=("episodes 0, 1", "--success", "--reward env")):
        fit(tmp_path / "run", path)
    model = fit(tmp_path / "run", dataset, iterations=2)
    pictures = record(tmp_path / "pictures", 4, seen=CAMERA, view=picture)
    with refused(names=("Box", "pictures", "Dict")):
        model.values(pictures)
    with refused(names=("ValueFit", "ActorOnly", "VLAPolicy")):
        ValueFit(VLAPolicy(PROPRIO, CHUNK, PerceptronBackbone()))


def test_a_checkpoint_of_a_value_labels_by_its_own_returns(tmp_path, capsys):
    path = record(tmp_path / "data", 8)
    fit(tmp_path / "run", path, frames={"gamma": 0.9}, iterations=2)
    run(["label", path, "--value", str(tmp_path / "run"), "--n_steps", "1"])
    assert_names(capsys.readouterr().out, "error / spread")
    expected = ReturnFramesEnv(1, path, gamma=0.9).returns[3]
    torch.testing.assert_close(read_episodes(path)[3].extra["return"], expected.float())
    with pytest.raises(SystemExit):
        run(["label", path, "--value", str(tmp_path / "run"), "--gamma", "0.8"])
    assert_names(capsys.readouterr().err, "returns")
    writer = EpisodeWriter(path, FLAT, Discrete(2), 10, pictures="png")
    for t in range(9):
        writer.add(np.zeros(3, np.float32), 0, 0.0, t == 8, False)
    writer.end_episode(np.zeros(3, np.float32), False)
    writer.finalise()
    with pytest.raises(SystemExit):
        run(["label", path, "--value", str(tmp_path / "run")])
    assert_names(capsys.readouterr().err, "6 steps", 9, path, "fit the value")


CONFIG = """
seed_everything: 1
model:
  class_path: BehaviorCloning
  init_args:
    policy:
      class_path: ConditionedPolicy
      init_args:
        guidance: 1.5
        policy:
          class_path: VLAPolicy
          init_args: {head: flow, backbone: {class_path: PerceptronBackbone}}
    n_epochs: 1
data:
  env: {class_path: ActionChunk, init_args: {env: {class_path: lightning_rl.FiveDoors}, chunk_size: 2}}
  collector: {class_path: DatasetCollector, init_args: {episodes: 12}}
  num_envs: 12
  buffer_size: 10
  total_env_steps: 480
  iterations_per_epoch: 1
trainer: {accelerator: cpu, limit_val_batches: 0, logger: false}
"""
OPTIONS = ["--config", "doors.yaml", "--episodes", "10", "--eval_episodes", "4", "--num_envs", "4",
           "--rounds", "1", "--value", "value.yaml"]  # fmt: skip
VALUE = """
model: {class_path: ValueFit, init_args: {policy: {class_path: ActorOnly}, batch_size: 32}}
data: {env: {class_path: ReturnFramesEnv}, num_envs: 32, buffer_size: 2, total_env_steps: 256, iterations_per_epoch: 2}
trainer: {accelerator: cpu, logger: false}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run that nothing interrupted, and the configs."""
    path = tmp_path_factory.mktemp("rounds")
    with chdir(path):
        write_configs()
        run(["recap", *OPTIONS, "--run_dir", "whole"])
    return path


def write_configs(**changed):
    for name, text in {"doors": CONFIG, "value": VALUE, **changed}.items():
        Path(f"{name}.yaml").write_text(text)


def end_as(whole, name, places):
    """Assert that a run ended as the uninterrupted one; return the results in both tables."""
    for place in places:
        one, other = (load(last(whole / run / place)) for run in ("whole", name))
        assert_same(one["state_dict"], other["state_dict"])
    one, other = (list(read_episodes(whole / run / "dataset")) for run in ("whole", name))
    assert len(one) == len(other) == 10
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.action, b.action)
        assert_same(a.extra, b.extra)
    return [json.loads((whole / run / rounds.STATE).read_text())["done"] for run in ("whole", name)]


def die_once_in_each_phase():
    """Kill this process within each phase that writes step by step, and before the end of each is noted.

    The variable DIE names the places, as a pattern.
    """

    kills = Path("kills")

    def die(place):
        earlier = kills.read_text().splitlines() if kills.exists() else []
        if re.search(os.environ["DIE"], place) and place not in earlier:
            kills.write_text("\n".join([*earlier, place]))
            os.kill(os.getpid(), signal.SIGKILL)

    write, finish = EpisodeWriter.write, Algorithm.finish_iteration
    phase = rounds.Rounds._phase

    def write_some(writer, episode):
        if writer._episodes == 5:
            die("within the collection")
        write(writer, episode)

    def finish_some(module, rollout):
        finish(module, rollout)
        if module.iterations_done == 3:
            die(f"within {type(module).__name__} {module.trainer.run_dir}")

    def phase_but(self, name, work):
        phase(self, name, lambda: (work(), die(f"after {name}"))[0])

    EpisodeWriter.write, Algorithm.finish_iteration = write_some, finish_some
    rounds.Rounds._phase = phase_but


DIE = {"collection|round_1/value": 2 + 1, ".": 2 + 5 + 3 + 1}


@pytest.mark.parametrize("places", DIE)
def test_rounds_that_are_killed_in_every_phase_end_as_uninterrupted(
    places, whole, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(whole)
    monkeypatch.setenv("DIE", places)
    command = ["recap", *OPTIONS, "--run_dir", "killed"]
    for path in (Path("kills"), Path("killed")):
        if path.exists():
            path.rename(tmp_path / path.name)
    for _ in range(20):
        process = Command(*command, program="tests.numerics.test_recap").wait()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, process.stderr
    kills = Path("kills").read_text().splitlines()
    assert len(kills) == DIE[places], kills
    one, other = end_as(whole, "killed", ("base", "round_1/value", "round_1/policy"))
    del one["base"], other["base"]  # the place of a checkpoint
    assert one == other
    with pytest.raises(SystemExit):
        run([*command, "--positive", "0.5"])
    assert_names(capsys.readouterr().err, "positive")


def test_recordings_take_the_place_of_the_first_collection(whole, monkeypatch):
    monkeypatch.chdir(whole)
    given = ["--base", "whole/base", "--from", "whole/dataset", "--num_envs", "3"]
    run(["recap", *OPTIONS, *given, "--run_dir", "people"])
    one, other = end_as(whole, "people", ("round_1/value", "round_1/policy"))
    assert one["round 1 collection"] == other["round 1 collection"]
    assert one["round 1 labels"] == other["round 1 labels"]


class Silent(FiveDoors):
    """Doors that do not say whether an episode succeeded."""

    def transition(self, state, action):
        *moved, _ = super().transition(state, action)
        return *moved, {}


SILENT = CONFIG.replace("lightning_rl.FiveDoors", f"{__name__}.Silent")
NOT_STARTED = {
    "labels": ({"known": False}, {}, ("24 episodes", "data")),
    "env": ({}, {}, "different dataset"),
    "extra": ({"extra": {"penalty": 0.0}}, {}, ("data", "penalty", "--extra")),
    "value": (None, {"value": CONFIG}, "value.yaml"),
    "column": (
        None,
        {"value": VALUE.replace("ReturnFramesEnv}", "ReturnFramesEnv, init_args: {keys: {states: observation}}}")},
        ("keys", "states"),
    ),
    "silent": (None, {"doors": SILENT.replace("episodes: 12", "path: shown")}, ("Silent", "4 episodes")),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_STARTED)
def test_what_rounds_cannot_use_is_refused_before_they_train(
    name, whole, tmp_path, monkeypatch, capsys
):
    recordings, files, message = NOT_STARTED[name]
    monkeypatch.chdir(tmp_path)
    write_configs(**files)
    given = [] if recordings is None else ["--from", record("data", **recordings)]
    with pytest.raises(SystemExit):
        run(
            ["recap", *OPTIONS, "--base", str(whole / "whole" / "base"), "--run_dir", "run", *given]
        )
    printed = capsys.readouterr()
    assert_names(printed.err, *([message] if isinstance(message, str) else message))
    assert ("--from shown adds them" in printed.out) == (name == "silent")


def test_the_code_of_a_base_is_not_imported_without_trust(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_configs()
    content = load(last(whole / "whole" / "base"))
    content["rl_config"] = content["rl_config"].replace(".ConditionedPolicy", ".Stranger")
    torch.save(content, "sent.ckpt")
    with pytest.raises(SystemExit):
        run(["recap", *OPTIONS, "--base", "sent.ckpt", "--run_dir", "run"])
    assert_names(capsys.readouterr().err, "Stranger", "trust_code=True")


PLAIN = ("ConditionedPolicy", "VLAPolicy")
NOT_FOR_ROUNDS = {
    "algorithm": (("BehaviorCloning", "PPO"), "model: {class_path: BehaviorCloning"),
    "policy": (PLAIN, "labels"),
    "processes": (("trainer: {", "trainer: {devices: 2, "), "trainer.devices: 2"),
}


@pytest.mark.parametrize("name", NOT_FOR_ROUNDS)
def test_a_config_that_rounds_cannot_improve_is_refused(name, tmp_path):
    change, message = NOT_FOR_ROUNDS[name]
    with refused(names=message):
        rounds._checked(yaml.safe_load(CONFIG.replace(*change)), "doors.yaml")
    weights = CONFIG.replace("n_epochs: 1", "advantage_temperature: 0.05").replace(*PLAIN)
    assert rounds._asking_for(rounds._checked(yaml.safe_load(weights), ""), "good")


def test_chunks_are_executed_as_by_the_env_of_chunks():
    """Actions of a recording lead to what the chunked env shows after each chunk."""
    torch.manual_seed(0)
    policy = VLAPolicy(TwoDoors(1).single_observation_space, Box(-1, 1, (4, 1), np.float32), PerceptronBackbone(), head="flow")  # fmt: skip
    played = list(play_policy(TwoDoors(2), policy, [5, 6], 8, chunk_size=4, execute=2))
    alone = list(play_policy(TwoDoors(1), policy, [6], 8, chunk_size=4, execute=2))
    torch.testing.assert_close(alone[0].action, played[1].action)
    env = ActionChunk(2, TwoDoors, 4, 2)
    observation, _ = env.reset(seed=[5, 6])
    for step in range(0, 8, 2):
        for row, episode in enumerate(played):
            torch.testing.assert_close(
                observation["proprio"][row], episode.observation["proprio"][step]
            )
        chunk = torch.zeros(2, 4, 1)
        chunk[:, :2] = torch.stack([one.action[step : step + 2] for one in played])
        observation, *_ = env.step(chunk)
    with refused(names=("observation space", "(2,)", "(3,)")):
        list(play_policy(FiveDoors(1), policy, [0], 8, chunk_size=4))


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in conftest.py
    die_once_in_each_phase()
    run(sys.argv[1:])
