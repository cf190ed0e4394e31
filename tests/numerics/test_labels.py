"""`label`: rewards, returns, values and advantages are what their definitions say, and nothing is half written."""

import json
import os
import signal
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lightning_rl import (
    ActorCritic,
    ConditionedPolicy,
    DatasetCollector,
    EpisodeWriter,
    GymnasiumEnv,
    LabelSettings,
    MixedReplay,
    label_dataset,
    read_episodes,
    write_minari,
)
from lightning_rl.cli.app import run
from lightning_rl.extensions.datasets.label import (
    advantage_signal,
    positive_steps,
    return_to_go,
    step_advantage,
    success_reward,
)
from tests.helpers import make_collector
from tests.messages import assert_names, refused

parquet = pytest.importorskip("pyarrow.parquet", reason="the extra data is not installed")
pytest.importorskip("av", reason="the extra data is not installed")

SPACES = (Box(-np.inf, np.inf, (4,)), gymnasium.spaces.Discrete(2))
LENGTHS = (3, 5, 4, 6, 2)
SUCCESS = (True, False, True, False, True)


def record(path, lengths=LENGTHS, success=SUCCESS, task="balance", *, reward=1.0):
    writer = EpisodeWriter(path, *SPACES, 50, task)
    generator = np.random.default_rng(len(lengths))
    for length, succeeded in zip(lengths, success, strict=True):
        for t in range(length):
            seen = generator.normal(size=4).astype(np.float32)
            writer.add(seen, t % 2, reward * t, t == length - 1, False, intervened=t == 1)
        writer.end_episode(np.zeros(4), succeeded)
    writer.finalise()


def label(path, success=(), failure=(), **settings):
    return label_dataset(path, LabelSettings(**settings), success=success, failure=failure)


@pytest.fixture
def dataset(tmp_path):
    record(tmp_path / "data")
    return tmp_path / "data"


def by_definition(rewards, gamma):
    steps = range(len(rewards))
    return [sum(gamma ** (k - t) * rewards[k] for k in steps[t:]) for t in steps]


def test_success_is_corrected_in_the_column_that_is_read(dataset):
    """Some datasets name it `success`; the numbers keep the dtype that info.json names."""
    (file,) = dataset.glob("data/**/*.parquet")
    table = parquet.read_table(file)
    names = [name.replace("next.success", "success") for name in table.column_names]
    parquet.write_table(table.rename_columns(names), file)
    info = json.loads((dataset / "meta/info.json").read_text())
    info["features"]["success"] = info["features"].pop("next.success") | {"dtype": "int64"}
    (dataset / "meta/info.json").write_text(json.dumps(info))
    label(dataset, success=[1], failure=[0])
    found = [episode.success for episode in read_episodes(dataset)]
    assert found == [False, True, True, False, True]
    assert str(parquet.read_schema(file).field("success").type) == "int64"


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_and_advantages_are_their_definition(gamma):
    generator = torch.Generator().manual_seed(1)
    reward, value = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    returns = return_to_go(reward, gamma)
    torch.testing.assert_close(
        returns, torch.tensor(by_definition(reward.tolist(), gamma)).double()
    )
    for n in (1, 3, 7, 9, None):
        found = step_advantage(returns, value, gamma, n)
        for t in range(7):
            end = 7 if n is None else min(t + n, 7)
            expected = sum(gamma ** (k - t) * reward[k] for k in range(t, end)) - value[t]
            expected += gamma ** (end - t) * value[end] if end < 7 else 0
            assert found[t].item() == pytest.approx(float(expected))


def test_rewards_of_success_count_the_steps_that_were_still_needed():
    assert success_reward(3, True, 5, 6).tolist() == [-0.1, -0.1, 0]
    assert success_reward(5, False, 5, 6).tolist() == [-0.1, -0.1, -0.1, -0.1, -0.6]
    assert return_to_go(success_reward(5, False, 5, 6), 1.0)[0].item() == pytest.approx(-1)
    assert success_reward(1, True, 1, 0).tolist() == [0]


def test_a_share_is_positive_and_what_somebody_did_who_took_over():
    advantage, intervened = torch.arange(20.0), torch.zeros(20, dtype=torch.bool)
    good, threshold = positive_steps(advantage, intervened, 0.3)
    assert good.nonzero().flatten().tolist() == [*range(14, 20)]
    assert 13 <= threshold < 14
    intervened[:10] = True
    good, _ = positive_steps(advantage, intervened, 0.3)
    assert good.nonzero().flatten().tolist() == [*range(10), 17, 18, 19], (
        "and the threshold is of the others alone"
    )
    assert positive_steps(advantage, torch.ones(20, dtype=torch.bool), 0.3)[0].all()
    assert not positive_steps(torch.ones(5), torch.zeros(5, dtype=torch.bool), 0.3)[0].any(), (
        "a tie with the threshold is not above it"
    )


def test_what_is_recorded_into_it_later_is_not_labelled_until_it_is(dataset):
    label(dataset)
    record(dataset, (3, 2), (True, False))
    episodes = read_episodes(dataset)
    assert episodes.lengths == [*LENGTHS, 3, 2]
    assert episodes[5].extra["advantage"].isnan().all()
    assert episodes[4].extra["advantage"].isfinite().all()
    label(dataset)
    assert all(one.extra["advantage"].isfinite().all() for one in read_episodes(dataset))


def test_each_task_has_its_own_threshold_and_share(tmp_path):
    path = tmp_path / "data"
    record(path, (20, 20), (True, False), "one")
    record(path, (20, 20, 20, 20, 20), (True, False, False, False, False), "other")
    done = label(path)
    assert [task.task for task in done.tasks] == ["one", "other"]
    assert [task.success_rate for task in done.tasks] == [0.5, 0.2]
    assert [task.share for task in done.tasks] == [0.3, 0.2], "the success rate, at most .3"
    for rows, share, task in ((slice(0, 2), 0.3, 0), (slice(2, 7), 0.2, 1)):
        chosen = read_episodes(path)[rows]
        good = torch.cat([one.extra["advantage_positive"][~one.intervened] for one in chosen])
        advantage = torch.cat([one.extra["advantage"] for one in chosen])
        assert float(good.mean()) == pytest.approx(share, abs=0.03)
        assert done.tasks[task].spread == pytest.approx(done.tasks[task].error), "of a mean"
        known = torch.cat([one.extra["return"] for one in chosen])
        assert done.tasks[task].spread == pytest.approx(float(known.std(correction=0)))
        assert done.tasks[task].threshold < float(advantage.max())
    assert not done.tasks[1].doubts()


def test_labels_that_may_do_harm_are_doubted(tmp_path):
    path = tmp_path / "data"
    record(path, (6, 6, 6, 6), (True, False, False, False))

    def values(directory):
        assert directory == path
        return [torch.zeros(6)] * 4

    with refused(UserWarning, names=("'balance'", "positive=0.3", "0.25")) as found:
        label(path, positive=0.3)
    assert len(found) == 1, "a mean is not expected to explain returns"
    with refused(UserWarning, names=("'balance'", "2.46", "0.7", "n_steps")):
        label_dataset(path, value=values)
    with refused(names=("doubtful: refuse", "'balance'", "n_steps")):
        label_dataset(path, LabelSettings(doubtful="refuse", gamma=0.5), value=values)
    assert float(read_episodes(path)[0].extra["return"].min()) == pytest.approx(-5 / 11), "gamma 1"


def test_the_signal_of_advantages_is_the_share_that_is_not_error_of_the_value():
    """Of a random walk, whose end is the return: the exact value is the place, and the rest of the walk is luck."""
    generator = torch.Generator().manual_seed(0)
    walks, errors = torch.randn(2, 500, 20, generator=generator, dtype=torch.float64)
    exact = walks.cumsum(1)
    for scale in (0.0, 0.5, 20.0):
        values = exact + scale * errors
        returns = exact[:, -1:].expand(-1, 20)
        for n in (1, 2):
            advantages = [
                step_advantage(g, v, 1.0, n) for g, v in zip(returns, values, strict=True)
            ]
            found = advantage_signal(returns, values, advantages, n)
            assert found == pytest.approx(n / (n + 2 * scale**2), abs=0.1)
    assert advantage_signal(returns, values, advantages, 20) is None


def test_luck_is_no_doubt_about_an_advantage_of_few_steps(tmp_path):
    """The same value: with all rewards the luck of the return is part of each advantage."""
    path = tmp_path / "data"
    generator = torch.Generator().manual_seed(0)
    walks = torch.randn(40, 6, generator=generator).cumsum(1)
    generator.manual_seed(1)
    successes = (walks[:, -1] + 1.5 * torch.randn(40, generator=generator) > 0).tolist()
    record(path, (6,) * 40, successes)
    values = [0.05 * walk - 0.5 for walk in walks]
    with refused(UserWarning, names=("'balance'", "0.7", "n_steps")):
        label_dataset(path, LabelSettings(), value=lambda _: values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        label_dataset(path, LabelSettings(n_steps=1), value=lambda _: values)
    with refused(UserWarning, names=("'balance'", "above 1")):
        label_dataset(path, LabelSettings(n_steps=1), value=lambda _: [torch.zeros(6)] * 40)
    noise = [0.1 * torch.randn(6, generator=generator) - 0.5 for _ in walks]
    with refused(UserWarning, names=("'balance'", "above 1")):
        label_dataset(path, LabelSettings(n_steps=1), value=lambda _: noise)


@pytest.mark.parametrize(
    ("name", "step"), [("replace", 5), ("unlink", 7), ("fsync", 17), ("rmdir", 5)]
)
def test_a_kill_leaves_the_old_dataset_or_the_new_one(tmp_path, name, step):
    """At each call that changes a directory; what was recorded is there either way."""
    killed, at = True, 0
    while killed:
        path = tmp_path / str(at)
        record(path)
        process = os.fork()
        if process == 0:
            original, calls = getattr(os, name), 0

            def call(*arguments, original=original, at=at, **settings):
                nonlocal calls
                calls += 1
                if calls == at // 2 + 1 and at % 2 == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = original(*arguments, **settings)
                if calls == at // 2 + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            try:
                setattr(os, name, call)
                label(path)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status in (0, -signal.SIGKILL)
        killed, at = status != 0, at + step
        episodes = read_episodes(path)
        assert [len(episode) for episode in episodes] == list(LENGTHS)
        assert len({len(episode.extra) for episode in episodes}) == 1, "all or none"
        label(path)
        assert sum(one.extra["return"].isfinite().sum() for one in read_episodes(path)) == 20
        assert {one.name for one in path.iterdir()} == {"data", "meta"}
    assert at > 2


@pytest.mark.parametrize(
    ("options", "names"),
    [
        pytest.param(
            "--success 9", ("success", "episode 9", "data", "0 to 4"), id="unknown episode"
        ),
        pytest.param("--success 1 --failure 1", ("episode", "once"), id="both"),
        pytest.param("--failure x", ("--failure", "all", "x"), id="no number"),
    ],
)
def test_what_cannot_be_labelled_is_one_message_and_status_1(
    options, names, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    record("data")
    with pytest.raises(SystemExit) as stop:
        run(["label", "data", *options.split()])
    assert stop.value.code == 1
    assert_names(capsys.readouterr().err, "rl-cli: error:", *names)


def test_other_datasets_are_refused(tmp_path):
    record(tmp_path / "data", reward=np.nan)
    with refused(names=("data", "--reward success")):
        label(tmp_path / "data", reward="env")
    with refused(names="info.json"):
        label(tmp_path / "none")
    pytest.importorskip("h5py", reason="the extra data is not installed")
    write_minari(tmp_path / "minari", read_episodes(tmp_path / "data"), *SPACES)
    with refused(names=("Minari", "LeRobotDataset v3.0", "EpisodeWriter.write")):
        label(tmp_path / "minari")


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record("data", success=[None] * 5, reward=np.nan)
    with refused(names=("rl-cli label", "keys: {<column>: reward}")):
        MixedReplay(*SPACES, 1, demonstrations="data")
    run(["label", "data", "--success", "0", "3", "--failure=all", "--value_steps", "2"])
    out = capsys.readouterr().out
    assert "5 episodes (success 2, failure 3), 20 steps: " in out
    assert "Dataset: data" in out
    keys = {"complementary_info.reward": "reward"}
    replay = MixedReplay(*SPACES, 1, demonstrations="data", keys=keys)
    assert len(list(replay._source)) == 5, "what a replay refused it takes with these rewards"
    with pytest.raises(SystemExit) as stop:
        run(["label", "data", "--successes", "1"])
    assert stop.value.code == 2
    assert_names(capsys.readouterr().err, "label", "--successes", "close matches: success")


def demonstrations(path, policy=ConditionedPolicy, **settings):
    env = GymnasiumEnv(2, "CartPole-v1", vectorization="sync")
    spaces = (env.single_observation_space, env.single_action_space)
    made = policy(*spaces, ActorCritic) if policy is ConditionedPolicy else policy(*spaces)
    return make_collector(DatasetCollector, env, made, 8, 0, path=path, **settings)


def test_demonstrations_hand_out_the_label_of_each_step(dataset):
    assert "advantage" not in demonstrations(str(dataset)).collect().keys()
    label(dataset)
    rollout = demonstrations(str(dataset), condition="advantage_positive").collect()
    plain = demonstrations(str(dataset)).collect()
    for row, episode in enumerate(read_episodes(dataset)):
        length = len(episode)
        assert torch.equal(rollout["observation"][row, :length], episode.observation[:length])
        expected = torch.where(episode.extra["advantage_positive"] == 1, 1, 2)
        assert torch.equal(rollout["condition"][row, :length], expected), "good is 1, bad is 2"
        assert torch.equal(rollout["advantage"][row, :length], episode.extra["advantage"])
    assert set(rollout["condition"][:, :-1].unique().tolist()) == {0, 1, 2}
    assert not plain["condition"].any(), "absent without labels"


def test_a_condition_that_is_not_there_is_refused(dataset):
    with refused(names=("'advantage_positive'", "rl-cli label")):
        demonstrations(str(dataset), condition="advantage_positive")
    with refused(
        names=(
            "'advantage_positive'",
            "ActorCritic",
            "model.policy: {class_path: ConditionedPolicy",
        )
    ):
        demonstrations(str(dataset), ActorCritic, condition="advantage_positive")
    with refused(names=("'advantage_positive'", "rl-cli label")):
        demonstrations(None, condition="advantage_positive")
    label(dataset)
    record(dataset, (2,), (True,))
    with refused(names=("'advantage_positive'", "close matches: advantage_positive")):
        demonstrations(str(dataset), condition="advantage_positive")


def test_options_without_effect_say_so(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record("data")
    options = ["--value_steps", "7", "--seed", "2", "--failure_cost", "3"]
    run(["label", "data", "--value", "mean", "--reward", "env", *options])
    out = capsys.readouterr().err
    assert_names(out, "--value_steps 7", "--seed 2", "--value fitted")
    assert_names(out, "--failure_cost 3.0", "--reward success")
