"""A reward classifier: what it learns from, what it reports, and the reward that an env gets of it."""

import shutil
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box, Dict, Discrete
from lightning.pytorch import seed_everything

from lightning_rl import (
    ActorOnly,
    AsyncCollector,
    DictEncoder,
    EpisodeWriter,
    NatureCNN,
    RewardClassifier,
    RewardClassifierWrapper,
    RLDataModule,
    SuccessFramesEnv,
)
from lightning_rl.cli.app import run
from tests.envs import UNIT, ScriptedEnv
from tests.helpers import assert_same, assert_same_run, fit_in, last, load, train, uncompiled_traces
from tests.messages import assert_names, refused

ALL_OR_NONE = {
    1e-30: "At threshold 1e-30 100.0% of {} frames without success are false positives, and 0.0% of 2",
    1
    - 1e-9: "At threshold 1 0.0% of {} frames without success are false positives, and 100.0% of 2",
}


pytest.importorskip("pyarrow", reason="the extra data is not installed")
pytest.importorskip("av", reason="the extra data is not installed")

LIMIT, GOAL = 16, 8
STATES, TWO = Box(-np.inf, np.inf, (2,), np.float32), Discrete(2)
CAMERA = Box(0, 255, (32, 32, 3), np.uint8)
SEEN = Dict({"camera": CAMERA, "state": STATES})


def walk(action_space=TWO, space=STATES, view=lambda seen: seen):
    """Eight steps to the right are a success, of which the env says nothing: no reward, no end but by time."""

    def act(env):
        right = env.action == 1 if isinstance(action_space, Discrete) else env.action[0] > 0
        env.place = max(0, env.place + (1 if right else -1))

    def observe(env):
        noise = env.np_random.normal(size=1)
        return view(np.array([100 + 10 * env.place, *noise], np.float32))

    return ScriptedEnv(
        space,
        action_space,
        begin=lambda env: vars(env).update(place=0),
        act=act,
        observe=observe,
        reward=7.0,
        info=lambda env: {"metrics": {"place": env.place}},
    )


def picture_of(seen):
    """What a camera sees, beside the state: a lamp changes its colour at the goal."""
    picture = np.zeros(CAMERA.shape, np.uint8)
    picture[4:8, 4:8, 1 if seen[0] >= 100 + 10 * GOAL else 0] = 200
    picture[12:, 12:, 2] = int(seen[0])
    return {"camera": picture, "state": seen}


gymnasium.register("Walk-v0", walk, max_episode_steps=LIMIT)
gymnasium.register("WalkBoxed-v0", partial(walk, UNIT), max_episode_steps=LIMIT)
gymnasium.register(
    "WalkSeen-v0", partial(walk, space=SEEN, view=picture_of), max_episode_steps=LIMIT
)


def record(path, outcomes, space=STATES, view=lambda seen: seen):
    """Walk straight to the goal, or about; what of it is not known is not said."""
    env, writer = walk(), EpisodeWriter(path, space, TWO, fps=10, pictures="png")
    generator = np.random.default_rng(0)
    for number, success in enumerate(outcomes):
        seen, _ = env.reset(seed=number)
        while True:
            steps = env.place
            action = 1 if success else int(generator.random() < 0.5 and steps < GOAL - 1)
            after, *_ = env.step(action)
            ends = env.place == GOAL if success else generator.random() < 0.1
            writer.add(view(seen), action, 0.0, bool(success) and ends, ends and not success)
            seen = after
            if ends:
                break
        writer.end_episode(view(seen), success)
    writer.finalise()
    return str(path)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return record(tmp_path_factory.mktemp("walks") / "data", [True, False, False] * 8 + [None])


def classifier_data(path, iterations=20, **frames):
    env = partial(SuccessFramesEnv, path=path, **frames)
    budget = {"total_env_steps": 8 * 32 * iterations, "iterations_per_epoch": iterations // 2}
    return RLDataModule(env, num_envs=8, buffer_size=32, **budget)


def classify(run_dir, path, ckpt_path=None, *, policy=None, frames=None, trainer=None, **kwargs):
    """Train a classifier in a directory, and return it."""
    seed_everything(3)
    data = classifier_data(path, **(frames or {}))
    settings = {"hidden_sizes": (32,), "normalize_observation": True} | (policy or {})
    policy = ActorOnly(data.observation_space, data.action_space, **settings)
    settings = {"learning_rate": 0.02, "batch_size": 64, "n_epochs": 6} | kwargs
    model = RewardClassifier(policy, **settings)
    fit_in(run_dir, model, data, ckpt_path=ckpt_path, **(trainer or {}))
    return model


@pytest.fixture(scope="module")
def trained_model(dataset, tmp_path_factory):
    """A classifier as it ended its training, and the directory of that run."""
    directory = tmp_path_factory.mktemp("classifier") / "run"
    model = classify(directory, dataset)
    assert model.error_rates.max() < 0.05
    return model, directory


@pytest.fixture(scope="module")
def trained(trained_model):
    return str(trained_model[1])


def test_whole_episodes_are_held_out_of_both_kinds(dataset):
    env = SuccessFramesEnv(2, path=dataset, held_out=0.25)
    learnt, held_out = env._training, env.held_out
    assert sorted([*learnt, *held_out]) == list(range(24)), "the one of unknown success is left out"
    assert [sum(number % 3 == 0 for number in part) for part in (learnt, held_out)] == [6, 2]
    assert SuccessFramesEnv(7, path=dataset, held_out=0.25).held_out == held_out
    assert SuccessFramesEnv(2, path=dataset, held_out=0.25, split_seed=1).held_out != held_out


def shown(env, steps=200):
    """The frames that a run would see, with what it is told of them."""
    seen, _ = env.reset(seed=5)
    rows = []
    for _ in range(steps):
        after, reward, *_, info = env.step(torch.ones(env.num_envs, dtype=torch.int64))
        rows.append((seen.clone(), info["label"], info["weight"], reward))
        seen = after
    return [torch.cat(column) for column in zip(*rows, strict=True)]


def test_the_last_frames_of_a_success_show_it_the_final_one_among_them(dataset):
    env = SuccessFramesEnv(8, path=dataset, positive_frames=3)
    observation, label, weight, reward = shown(env)
    place = (observation[:, 0] - 100) / 10
    assert place[label == 1].min() == GOAL - 2
    assert place.max() == GOAL
    assert torch.equal(reward, (label == 1).float()), "1 for a right verdict"
    assert float(weight[label == 1].sum() / weight.sum()) == pytest.approx(0.5, abs=0.1)


REFUSED = {
    "no success is said": ([None] * 3, {}, ("0 successful", "3 have no success label")),
    "one success": ([True, False, False], {}, "1 successful"),
    "one failure": ([True, True, False], {}, ("1 failed", "negatives: all")),
    "no failure is wanted": ([True, True], {"negatives": "failures"}, "0 failed"),
    "no beginnings": ([True] * 2, {"positive_frames": 9}, ("8 frames", "9")),
    "a share of all": ([True] * 2, {"held_out": 1.0}, ("held_out", "(0, 1)", "1.0")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dataset_that_cannot_teach_it_is_refused(name, tmp_path):
    outcomes, settings, message = REFUSED[name]
    with refused(names=message):
        SuccessFramesEnv(1, path=record(tmp_path / "data", outcomes), **settings)


def test_successes_alone_teach_it_by_what_comes_before(tmp_path):
    env = SuccessFramesEnv(1, path=record(tmp_path / "data", [True] * 5))
    assert len(env.held_out) == 1


def test_it_reports_its_errors_on_what_was_held_out(dataset, trained_model):
    """In the log and in the checkpoint; the threshold decides."""
    model, run_dir = trained_model
    metrics = model.evaluation["metrics"]
    assert metrics["false_positive_rate"] <= 0.02
    assert metrics["false_negative_rate"] == 0
    saved = load(last(run_dir))["state_dict"]["error_rates"]
    assert saved.tolist() == model.error_rates.tolist()
    frames = SuccessFramesEnv(1, path=dataset)
    observation, label = frames.frames_of(frames.held_out)
    assert metrics["frames_with_success"] == label.sum() == 2
    assert metrics["frames_without_success"] == len(label) - 2
    probability = model.probability(observation)
    assert float((probability[label == 0] >= 0.5).float().mean()) == pytest.approx(
        metrics["false_positive_rate"]
    )
    table = (run_dir / "logs" / "metrics.csv").read_text().splitlines()[0]
    assert "eval/metrics/false_positive_rate" in table
    assert "eval/metrics/threshold" in table


@pytest.mark.parametrize("threshold", ALL_OR_NONE)
def test_its_line_says_threshold_and_rates_each_among_its_own_frames(
    threshold, dataset, tmp_path, caplog
):
    settings = {"threshold": threshold, "frames": {"iterations": 2}}
    with caplog.at_level("INFO"):
        model = classify(tmp_path / "run", dataset, **settings)
    (line, *_) = [record.message for record in caplog.records if "Held out" in record.message]
    without = int(model.evaluation["metrics"]["frames_without_success"])
    expected = ALL_OR_NONE[threshold].format(without)
    assert line == f"Held out: 5 episodes. {expected} frames with success are missed."
    assert model.error_rates.tolist() == ([1, 0] if threshold < 0.5 else [0, 1])


def test_it_learns_from_the_pictures_of_one_camera(tmp_path):
    """Whose bytes nothing scales but the encoder; an env may have more to observe."""
    path = record(tmp_path / "data", [True, False] * 8, SEEN, picture_of)
    small = partial(NatureCNN, size=16, channels=(8, 8), kernels=(8, 3), strides=(8, 1))
    model = classify(
        tmp_path / "run",
        path,
        frames={"keys": {"observation.images.camera": "observation.camera"}, "iterations": 10},
        policy={
            "encoder": partial(DictEncoder, encoders={"camera": small}),
            "normalize_observation": False,
            "hidden_sizes": (),
        },
    )
    assert model.policy.observation_space == Dict({"camera": CAMERA})
    assert model.error_rates.tolist() == [0, 0]
    steps = played(RewardClassifierWrapper(gymnasium.make("WalkSeen-v0"), str(tmp_path / "run")))
    assert [reward for reward, *_ in steps] == [0.0] * (GOAL - 1) + [1.0]
    with refused(names=("reward classifier", "Dict('camera'", "Box")):
        RewardClassifierWrapper(gymnasium.make("Walk-v0"), str(tmp_path / "run"))


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_stopped_and_resumed_it_ends_as_uninterrupted(mode, dataset, tmp_path):
    with uncompiled_traces():
        settings = {"n_epochs": 1, "frames": {"iterations": 4}, "compile": mode == "compiled"}
        classify(tmp_path / "whole", dataset, **settings)
        classify(tmp_path / "half", dataset, trainer={"max_epochs": 1}, **settings)
        shutil.copytree(tmp_path / "half", tmp_path / "resumed")
        classify(tmp_path / "resumed", dataset, last(tmp_path / "resumed"), **settings)
    whole, resumed = (load(last(tmp_path / name)) for name in ("whole", "resumed"))
    assert_same(whole["state_dict"], resumed["state_dict"])


def test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground(dataset, tmp_path):
    here = classify(tmp_path / "here", dataset, frames={"iterations": 4})
    seed_everything(3)
    data = classifier_data(dataset, iterations=4)
    data._make_collector = partial(AsyncCollector, max_staleness=0)
    policy = ActorOnly(data.observation_space, data.action_space, (32,), normalize_observation=True)
    there = RewardClassifier(policy, learning_rate=0.02, batch_size=64, n_epochs=6)
    fit_in(tmp_path / "there", there, data)
    assert_same(here.state_dict(), there.state_dict())


def test_an_env_of_something_else_is_refused(dataset, tmp_path):
    with refused(
        names=("RewardClassifier", "data.env", "GymnasiumEnv", "class_path: SuccessFramesEnv")
    ):
        train(tmp_path, env="CartPole-v1", model={"algorithm": RewardClassifier})
    data = classifier_data(dataset)
    data._make_eval_env = partial(SuccessFramesEnv, path=dataset, split_seed=1)
    policy = ActorOnly(data.observation_space, data.action_space)
    with refused(names=("RewardClassifier", "data.eval_env")):
        fit_in(tmp_path, RewardClassifier(policy), data)


def played(env, actions=(1,) * LIMIT):
    """Return rewards, ends and infos of an episode, up to its end."""
    env.reset(seed=1)
    steps = []
    for action in actions:
        _, *step = env.step(action)
        steps.append(step)
        if step[1] or step[2]:
            break
    return steps


def test_success_is_rewarded_and_ends_the_episode(trained):
    steps = played(RewardClassifierWrapper(gymnasium.make("Walk-v0"), trained, success_reward=2.5))
    rewards, terminated, truncated, infos = zip(*steps, strict=True)
    assert rewards == (0.0,) * (GOAL - 1) + (2.5,), "that of the env is dropped"
    assert terminated == (False,) * (GOAL - 1) + (True,)
    assert not any(truncated)
    assert [info["success"] for info in infos] == [False] * (GOAL - 1) + [True]
    assert infos[-1]["metrics"]["success_probability"] > 0.5
    assert infos[-1]["metrics"]["place"] == GOAL, "what the env says stays"


def test_it_goes_on_where_that_is_asked_for_and_counts_what_is_in_a_row(trained):
    env = RewardClassifierWrapper(
        gymnasium.make("Walk-v0"), trained, ends_episode=False, consecutive_frames=2
    )
    steps = played(env, [1] * 8 + [0, 1, 1, 0, 0] + [1] * 3)
    successes = [info["success"] for *_, info in steps]
    assert successes == [False] * 10 + [True] * 2 + [False] * 2 + [True] * 2
    assert [reward for reward, *_ in steps] == [float(one) for one in successes]
    assert steps[-1][2], "time still ends it"
    assert not any(step[1] for step in steps)
    always = RewardClassifierWrapper(
        gymnasium.make("Walk-v0"), trained, threshold=1e-30, consecutive_frames=2
    )
    assert [len(played(always)) for _ in range(3)] == [2] * 3, "the count begins with the episode"


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_a_policy_learns_by_it_and_resumes_exactly(name, trained, tmp_path, monkeypatch):
    """From YAML; the checkpoint's own config names the wrapper, and is looked at before it is used."""
    monkeypatch.chdir(tmp_path)
    wrapper = {"class_path": "RewardClassifierWrapper", "init_args": {"checkpoint": trained}}
    env_id = "Walk-v0" if name == "PPO" else "WalkBoxed-v0"
    env = {"class_path": "GymnasiumEnv", "init_args": {"id": env_id, "wrappers": [wrapper]}}
    policy = {"PPO": "ActorCritic", "SAC": "SquashedActorCritic"}[name]
    model = {"policy": {"class_path": policy, "init_args": {"hidden_sizes": [16]}}}
    model |= {"batch_size": 16} if name == "PPO" else {"batch_size": 16, "random_env_steps": 16}
    data = {"env": env, "num_envs": 2, "buffer_size": 16, "total_env_steps": 64}
    data |= {"iterations_per_epoch": 1, "num_eval_episodes": 1}
    if name == "SAC":
        data["replay"] = {"class_path": "ReplayBuffer", "init_args": {"capacity": 1000}}
    config = {
        "model": {"class_path": name, "init_args": model},
        "data": data,
        "trainer": {"accelerator": "cpu", "enable_progress_bar": False},
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    run(["fit", "--config", "config.yaml", "--exp_name", "whole"])
    (whole,) = Path("outputs").glob("whole*")
    half = ["--exp_name", "half", "--trainer.max_epochs", "1"]
    run(["fit", "--config", "config.yaml", *half])
    (stopped,) = Path("outputs").glob("half*")
    resumed = ["--trainer.max_epochs", "2", "--ckpt_path", str(stopped), "--trust_code", "true"]
    run(["fit", *resumed])  # trusted, as the env is the test's own
    assert_same_run(whole, stopped)


WRONG = {
    "a policy's": ("policy", None, "holds a PPO, which is no RewardClassifier. Load it by PPO"),
    "no file": ("nowhere", None, "nowhere"),
    "other observations": ("classifier", "CartPole-v1", ("reward classifier", "(2,)", "(4,)")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_one_message(name, trained, tmp_path):
    kind, env, message = WRONG[name]
    if kind == "policy":
        train(tmp_path / "policy")
    checkpoint = trained if kind == "classifier" else str(tmp_path / kind)
    with refused(names=message):
        RewardClassifierWrapper(gymnasium.make(env or "Walk-v0"), checkpoint)


def test_a_checkpoint_cannot_ask_for_code(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrapper = {
        "class_path": "lightning_rl.RewardClassifierWrapper",
        "init_args": {"checkpoint": trained, "trust_code": True},
    }
    train(tmp_path / "run")
    path = last(tmp_path / "run")
    content = load(path)
    config = yaml.safe_load(content["rl_config"])
    config["data"]["env"]["init_args"]["wrappers"] = [wrapper]
    content["rl_config"] = yaml.safe_dump(config)
    torch.save(content, path)
    with pytest.raises(SystemExit):
        run(["fit", "--ckpt_path", str(path), "--data.total_env_steps", "1000"])
    error = capsys.readouterr().err
    assert "sets trust_code: true" in error
    assert_names(error, "--trust_code true")
