"""`rl-cli judge` and `rl-cli compare`: equal seeds give equal episodes, whoever plays them, and whenever."""

import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Dict

from lightning_rl.cli.app import run
from lightning_rl.collectors.first_episodes import FirstEpisodes
from lightning_rl.extensions.judging import command
from tests.envs import UNIT, ScriptedEnv, draw
from tests.helpers import SMALL_RUN, error_of, train
from tests.messages import assert_names

CART_POLE = gymnasium.make("CartPole-v1").observation_space
pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture
def policy(finished_run):
    return finished_run("--config", "ppo.yaml", *SMALL_RUN, "--data.total_env_steps", "64")


@pytest.fixture
def register(monkeypatch):
    """Return a function that registers an env of the shelf like CartPole for this test."""
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))

    def make(name, limit=5, **answers):
        env = partial(ScriptedEnv, CART_POLE, gymnasium.spaces.Discrete(2), **answers)
        gymnasium.register(name, env, max_episode_steps=limit)
        return ["--data.env", "GymnasiumEnv", "--data.env.id", name]

    return make


def judge(policy, *options, episodes=3):
    """Judge a policy; return its table and the lines of its journal by task and number."""
    run(["judge", str(policy), "--episodes", str(episodes), *map(str, options)])
    path = max((policy / "judged").glob("*.json"), key=lambda p: p.stat().st_mtime_ns)
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    return json.loads(path.read_text()), sorted(lines), path


def test_a_table_has_each_task_each_suite_and_all(policy, capsys):
    steps = "{env_kwargs: [{max_episode_steps: 3}, {max_episode_steps: 4}], vectorization: [sync, async]}"
    table, lines, _ = judge(policy, "--tasks", steps, episodes=2)
    rows = table["rows"]
    assert [row["episodes"] for row in rows.values()] == [2, 2, 2, 2, 4, 4, 8]
    assert list(rows)[4] == 'env_kwargs={"max_episode_steps": 3}'
    assert rows[list(rows)[4]]["avg_length"] == 3
    assert rows["all"]["avg_reward"] == 3.5
    assert len(lines) == 8
    assert table["versions"]["gymnasium"] == gymnasium.__version__
    assert_names(capsys.readouterr().out, "all", "gymnasium", gymnasium.__version__)


@pytest.mark.parametrize("options", [(), ("--data.eval_deterministic", "false")])
def test_a_second_run_gives_equal_bits(policy, options):
    _, lines, path = judge(policy, *options)
    path.with_suffix(".jsonl").unlink()
    assert judge(policy, *options)[1] == lines
    assert len({json.loads(line)["trace"] for line in lines}) == 3


FEW = ("--data.num_envs", "2", "--data.buffer_size", "8", "--data.total_env_steps", "16")
NEIGHBOURS = {
    "ppo_lstm_cart_pole.yaml": ("--data.total_env_steps", "64"),
    "vla_flow_ppo.yaml": ("--data.total_env_steps", "64"),
    "ppo_push_cube_pixels.yaml": (*FEW, "--model.batch_size", "16"),
}


@pytest.mark.parametrize("config", NEIGHBOURS)
def test_policies_with_memory_chunks_and_pictures_are_judged(finished_run, config):
    """Their envs: a Gymnasium env, chunks of it, and a batched task in torch."""
    untested = ("--trainer.limit_val_batches", "0", *NEIGHBOURS[config])
    policy = finished_run("--config", config, *untested)
    limit = ("--data.max_eval_episode_steps", "12")
    _, lines, path = judge(policy, *limit, episodes=2)
    path.with_suffix(".jsonl").unlink()
    assert judge(policy, *limit, episodes=2)[1] == lines
    if config == "vla_flow_ppo.yaml":  # the task within its ActionChunk
        inner = "{env: [{max_episode_steps: 3}, {max_episode_steps: 5}]}"
        rows = judge(policy, "--tasks", inner, episodes=1)[0]["rows"]
        assert [row["avg_length"] for row in rows.values()] == [3, 5, 4]
    assert {json.loads(line)["length"] <= 12 for line in lines} == {True}


def test_a_killed_evaluation_goes_on_where_it_stopped(policy):
    _, lines, path = judge(policy)
    journal = path.with_suffix(".jsonl")
    whole = journal.read_text()
    journal.write_text(whole.replace('"seed"', '"kept": 1, "seed"', 1)[:-40])
    again = judge(policy)[1]
    assert ["kept" in line for line in again] == [True, False, False]
    assert again[1:] == lines[1:]


@pytest.mark.parametrize("workers", [3, 10])
def test_workers_change_nothing(policy, monkeypatch, workers):
    """Processes that are forked here start soon; `rl-cli` starts new ones."""
    _, lines, path = judge(policy, "--tasks", "{vectorization: [sync, async]}")
    path.with_suffix(".jsonl").unlink()
    fork = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
    monkeypatch.setattr(command, "ProcessPoolExecutor", lambda *_, **__: fork)
    options = ("--tasks", "{vectorization: [sync, async]}", "--workers", workers)
    assert judge(policy, *options)[1] == lines


def test_new_processes_change_nothing(policy):
    _, lines, path = judge(policy)
    path.with_suffix(".jsonl").unlink()
    assert judge(policy, "--workers", 2)[1] == lines


def test_an_env_without_a_limit_is_cut_where_the_evaluations_of_the_run_cut_it(
    policy, register, monkeypatch, capsys
):
    monkeypatch.setattr(FirstEpisodes, "LEAST_BOUND", 20)
    (row,) = judge(policy, *register("Endless-v0", limit=None))[0]["rows"].values()
    assert row["lengths"] == [3 * 16] * 3, "an epoch: three iterations of 16 steps"
    assert_names(capsys.readouterr().out, "3 of 3", "data.max_eval_episode_steps")


def test_a_typed_setting_has_its_own_journal(policy):
    paths = {judge(policy)[2], judge(policy, "--seed", 1)[2], judge(policy, episodes=4)[2]}
    assert len(paths) == 2


OWN_ENV = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Own(CartPoleEnv):
    def __init__(self, scene, render_mode=None):
        super().__init__()

gymnasium.register("Own-v0", Own, max_episode_steps=3)
"""


@pytest.mark.usefixtures("register")
def test_episodes_of_other_code_or_of_another_scene_are_played_again(policy, capsys):
    """The module stays imported here: what counts is its file."""
    env, scene = Path("judged_env.py"), Path("the scene.xml")
    env.write_text(OWN_ENV)
    scene.write_text("<mujoco/>")
    options = ["--data.env", "GymnasiumEnv", "--data.env.id", "judged_env:Own-v0"]
    options += ["--data.env.env_kwargs", json.dumps({"scene": f"{scene}"}), "--trust_code", "true"]
    paths = [judge(policy, *options)[2]]
    for file in (env, scene):
        file.write_text(file.read_text() + "\n")
        paths.append(judge(policy, *options)[2])
    assert len(set(paths)) == 3
    capsys.readouterr()
    assert judge(policy, *options, episodes=4)[2] == paths[-1]
    assert_names(capsys.readouterr().out, "3 of 4 episodes", paths[-1].with_suffix(".jsonl"))


def test_an_env_without_seeds_is_refused(policy, register, capsys):
    stream = np.random.default_rng()
    env = register("Unseeded-v0", observe=lambda env: stream.uniform(-1, 1, 4).astype(np.float32))
    text = error_of(capsys, "judge", policy, *env)
    assert_names(text, "env", "self.np_random", "reset(seed=...)")


def test_an_env_that_remembers_the_last_episode_is_refused(policy, register, capsys):
    env = register("Remembers-v0", observe=lambda env: np.full(4, env.episode, np.float32))
    assert_names(error_of(capsys, "judge", policy, *env), "self.np_random")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--tasks", "{idd: [1]}"), ("idd", "data.env.id")),
        (("--tasks", "{id: [CartPole-v1, CartPole-v1]}"), ("--tasks", "id", "CartPole-v1")),
        (("--episodes", "0"), ("--episodes", "0")),
        (("--tasks", "{id: [Pendulum-v1]}"), ("Pendulum-v1", "--data.env")),
    ],
)
def test_what_cannot_be_judged_is_refused_by_name(policy, options, names, capsys):
    assert_names(error_of(capsys, "judge", policy, *options), *names)


@pytest.mark.usefixtures("register")
def test_a_robot_need_not_tell_what_only_the_critic_reads():
    for name, keys in {"Simulator-v0": ("joints", "mass"), "Robot-v0": ("joints",)}.items():
        space = Dict(dict.fromkeys(keys, UNIT))
        gymnasium.register(name, partial(ScriptedEnv, space, observe=draw, length=5))
    critics = {"actor_keys": ["joints"], "critic_keys": ["joints", "mass"]}
    train("trained", env="Simulator-v0", data={"total_env_steps": 64}, policy=critics)
    robot = ("--data.env", "GymnasiumEnv", "--data.env.id", "Robot-v0")
    table, *_ = judge(Path("trained"), *robot, "--trust_code", "true", episodes=1)
    assert table["rows"]["env"]["episodes"] == 1


def test_policies_must_be_named(policy, capsys):
    assert_names(error_of(capsys, "judge"), "policies")
    assert_names(error_of(capsys, "compare", policy), "rl-cli compare", "1")
    assert_names(error_of(capsys, "judge", "nothing.ckpt"), "nothing.ckpt", "last")


def test_a_policy_does_not_differ_from_itself_and_not_from_its_export(policy, capsys):
    run(["export", "--ckpt_path", str(policy), "--format", "safetensors"])
    (exported,) = (policy / "export").glob("*.safetensors")
    run(["compare", str(policy), str(exported), "--episodes", "3"])
    first, second = (
        sorted(path.read_text().splitlines())
        for folder in (policy, policy / "export")
        for path in (folder / "judged").glob("*.jsonl")
    )
    assert first == second
    assert_names(capsys.readouterr().out, "No difference is shown")


def test_two_policies_play_by_the_limit_and_the_way_of_acting_of_the_first(
    policy, register, monkeypatch
):
    """The second run had rollouts of another length, which set the limit in an env without one."""
    monkeypatch.setattr(FirstEpisodes, "LEAST_BOUND", 20)
    other = policy.with_name("other")
    shutil.copytree(policy, other)
    path = other / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    for old, new in {
        "buffer_size: 16": "buffer_size: 32",
        "deterministic: true": "deterministic: false",
    }.items():
        assert old in checkpoint["rl_config"]
        checkpoint["rl_config"] = checkpoint["rl_config"].replace(old, new)
    torch.save(checkpoint, path)
    env = register("Endless-v0", limit=None)
    run(["compare", str(policy), str(other), "--episodes", "2", *env])
    (journal,) = (other / "judged").glob("*.jsonl")
    assert [json.loads(line)["length"] for line in journal.read_text().splitlines()] == [3 * 16] * 2
    assert "eval_deterministic=true" in journal.with_suffix(".json").read_text()


def test_two_policies_differ_by_the_episodes_that_one_of_them_solves(policy, register, capsys):
    """The second policy pushes to the left: it is a copy whose last bias was moved."""
    env = register(
        "ToTheRight-v0",
        observe=lambda env: draw(env, gymnasium.spaces.Box(-1, 1, (4,), np.float32)),
        info=lambda env: {"success": True} if env.action == 1 else {},
    )
    other = policy.with_name("other")
    shutil.copytree(policy, other)
    for directory, choice in ((policy, 1), (other, 0)):
        path = directory / "checkpoints" / "last.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        weights = checkpoint["state_dict"]
        bias = next(n for n, w in weights.items() if "bias" in n and w.shape == (2,))
        weights[bias][choice] += 100
        torch.save(checkpoint, path)
    run(["compare", str(policy), str(other), "--episodes", "8", *env])
    told = capsys.readouterr().out
    assert_names(told, "The policies differ", "8 : 0", "p = 0.00781", "0.0%")
    assert "not reported" not in told
    (path,) = (policy / "judged").glob("*-*-*-*.json")
    (row,) = json.loads(path.read_text()).values()
    assert row["success_rate"] == 1.0
