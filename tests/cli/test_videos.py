"""Films of evaluations: they play, they show what happened, and they change nothing."""

import re
import sys
from functools import partial
from pathlib import Path

import av
import gymnasium
import numpy as np
import pytest
import torch

from lightning_rl import LSTM, GymnasiumEnv, PushCube, RLTrainer
from lightning_rl.cli.app import run
from lightning_rl.envs import ActionChunk
from lightning_rl.extensions.videos.film import CAPTION, GAP, Film
from lightning_rl.training.callbacks import VideoSettings
from tests.envs import ScriptedEnv, ScriptedTask
from tests.helpers import SMALL_RUN, assert_same, assert_same_run, error_of, make_data, train
from tests.messages import assert_names, refused

pytestmark = pytest.mark.filterwarnings("error:No more videos")

EVERYTHING = VideoSettings(max_share=None)


def decode(path):
    """Return the frames [F, H, W, 3] and the frames per second of a film."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames).astype(int), float(stream.average_rate)


def films(run_dir, pattern="*"):
    return sorted(path.name for path in Path(run_dir, "videos").glob(f"{pattern}.mp4"))


def filmed(run_dir, video=EVERYTHING, **kwargs):
    return train(run_dir, trainer={"video": video}, **kwargs)


def tile(frames, i):
    """Return the pictures [F, H, W, 3] of one of the episodes, without the caption."""
    width = (frames.shape[2] - GAP) // 2
    return frames[:, CAPTION:, i * (width + GAP) :][:, :, :width]


def test_a_film_shows_every_step_of_the_first_episodes_and_training_stays_the_same(tmp_path):
    data = {"num_eval_episodes": 3}
    module, _, _ = filmed(tmp_path / "with", data=data)
    quiet, _, _ = train(tmp_path / "without", data=data)
    assert_same_run(tmp_path / "with", tmp_path / "without")
    assert_same(module.evaluation, quiet.evaluation)
    assert films(tmp_path / "with", "eval_*") == ["eval_192.mp4", "eval_384.mp4"]
    frames, fps = decode(tmp_path / "with" / "videos" / "eval_384.mp4")
    lengths = module.evaluation["lengths"][:2]
    # CartPole moves at 50 steps a second, a film at 30 frames at most: every other step, and the end.
    assert len(frames) == -(-max(lengths) // 2) + 1
    assert fps == 25
    assert frames.shape[1:] == (CAPTION + 200, 600 + GAP, 3)
    for i, length in enumerate(lengths):
        episode = tile(frames, i)
        moves = np.abs(np.diff(episode, axis=0)).max((1, 2, 3)) > 60
        still_runs = -(-length // 2) - 1
        assert moves[:still_runs].all(), "the pole moves in every frame"
        assert not moves[still_runs + 1 :].any(), "an episode that is over stands still"
        assert episode[0].mean() > 200, "a white background"
        assert (episode[0].min() < 60).all(), "with a black cart"
        assert 110 < episode[-1].mean() < 170, "dimmed at the end"


def test_a_policy_with_a_memory_is_filmed_as_it_plays(tmp_path):
    """Two envs play three episodes: the third begins beside a row that is idle, with a memory of its own."""
    run = {
        "data": {"num_eval_episodes": 3, "num_eval_envs": 2, "total_env_steps": 128},
        "policy": {"memory": partial(LSTM, size=8)},
        "model": {"sequence_length": 8},
    }
    module, _, _ = filmed(tmp_path / "with", **run)
    quiet, _, _ = train(tmp_path / "without", **run)
    assert_same_run(tmp_path / "with", tmp_path / "without")
    assert_same(module.evaluation, quiet.evaluation)
    run["data"]["num_eval_envs"] = 3
    beside, _, _ = train(tmp_path / "beside", **run)
    assert beside.evaluation["returns"] == module.evaluation["returns"]
    frames, _ = decode(tmp_path / "with" / "videos" / "eval_128.mp4")
    lengths = module.evaluation["lengths"][:2]
    assert len(frames) == -(-max(lengths) // 2) + 1  # every other step, and the end


def test_the_film_of_the_best_is_kept_also_where_it_was_not_due(tmp_path):
    rare = VideoSettings(every_n_evaluations=100, max_share=None)
    module, _, trainer = filmed(tmp_path, rare, data={"iterations_per_epoch": 1}, seed=1)
    best = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)
    steps = best["lightning_rl"]["env_steps"]
    assert steps > 64, "not the first evaluation, which is the one that was due"
    assert films(tmp_path) == [f"best_{steps}.mp4", "eval_64.mp4"]
    frames, _ = decode(tmp_path / "videos" / f"best_{steps}.mp4")
    trainer.validate(module, make_data(), ckpt_path=str(tmp_path / "checkpoints" / "best.ckpt"))
    lengths = module.evaluation["lengths"]
    assert len(frames) == -(-max(lengths) // 2) + 1
    again, _ = decode(tmp_path / "videos" / f"validate_{steps}.mp4")
    assert np.array_equal(frames, again)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_gymnasium_envs_draw_the_rows_that_are_asked_for(vectorization):
    env = GymnasiumEnv(3, "CartPole-v1", vectorization=vectorization)
    env.reset(seed=6)
    with refused(names="make_renderable()"):
        env.render([0])
    env.make_renderable()
    env.reset(seed=[5, 6, 7])
    for _ in range(3):
        env.step(torch.tensor([1, 1, 1]))
    pictures = env.render([2, 0])
    assert pictures.shape == (2, 400, 600, 3)
    assert pictures.dtype == np.uint8
    for seed, picture in zip((7, 5), pictures, strict=True):
        alone = gymnasium.make("CartPole-v1", render_mode="rgb_array")
        alone.reset(seed=seed)
        for _ in range(3):
            alone.step(1)
        assert np.array_equal(alone.render(), picture)
    env.close()


def invisible(num_envs):
    """An env that nobody can draw."""
    return ScriptedTask(num_envs, lambda uniform: {"x": uniform}, lambda *_: ({},))


class BrokenRenderer(PushCube):
    """An env whose renderer fails in the middle of a film."""

    drawn = 0

    def render(self, rows):
        type(self).drawn += 1
        if self.drawn > 4:
            raise OSError("the graphics card is gone")
        return super().render(rows)


gymnasium.register("Blind-v0", partial(ScriptedEnv, terminated=True))


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (invisible, "ScriptedTask"),
        (partial(GymnasiumEnv, id="Blind-v0"), "rgb_array"),
        (BrokenRenderer, "the graphics card is gone"),
    ],
)
def test_an_env_that_cannot_be_drawn_says_so_once_and_training_goes_on(env, reason, tmp_path):
    squash = {"squash": True} if env is BrokenRenderer else None
    with refused(UserWarning, names=("videos", reason)) as warned:
        module, _, _ = filmed(tmp_path, env=env, policy=squash)
    assert sum("No more videos" in str(w.message) for w in warned) == 1
    assert module.env_steps == 384
    assert films(tmp_path) == []


def test_a_disk_that_cannot_be_written_to_ends_the_films_and_not_the_run(tmp_path):
    (tmp_path / "videos").write_text("a file where the directory would be")
    with refused(UserWarning, names="videos"):
        module, _, _ = filmed(tmp_path)
    assert module.env_steps == 384


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with refused(names=("'av'", "pip install -e '.[video]'")):
        RLTrainer(run_dir=str(tmp_path), video=True)


def test_settings_out_of_range_are_refused():
    for wrong in ({"num_envs": 0}, {"fps": 0}, {"max_share": 2}, {"every_n_evaluations": 0}):
        with refused(names="trainer.video"):
            VideoSettings(**wrong)


@pytest.mark.parametrize("steps", [9, 10, 11, 100, 641])
def test_a_film_never_holds_more_than_its_capacity_evenly_spaced(steps):
    film = Film(1, 1, 10)
    for step in range(steps):
        if film.wants(step):
            picture = np.full((16, 16, 3), step % 256, np.uint8)
            picture[0, 0] = step // 256
            film.show(0, picture, "")
            film.take()
        assert len(film.frames) <= 10
    shown = [int(f[CAPTION + 5, 5, 0]) + 256 * int(f[CAPTION, 0, 0]) for f in film.frames]
    assert shown == list(range(0, steps, film.stride))
    assert len(shown) >= min(steps, 5)


EPISODE = re.compile(
    r"^Episode \d of 2 \(seed (\d+)\): return ([\d.]+) after (\d+) env steps$", re.MULTILINE
)


PLAY = ("play", "--ckpt_path", "last")


@pytest.fixture
def evaluated(tmp_path, monkeypatch, finished_run):
    """Stand where a run lies with an evaluation of its own; return that file."""
    monkeypatch.chdir(tmp_path)
    run_dir = finished_run("--config", "ppo.yaml", *SMALL_RUN, "--data.total_env_steps", "64")
    evaluation = run_dir / "evaluation.json"
    evaluation.write_text("of more episodes")
    yield evaluation
    assert evaluation.read_text() == "of more episodes"


def test_or_it_is_filmed_as_an_evaluation_is(evaluated, capfd):
    run([*PLAY, "--video", "true"])
    film = evaluated.parent.absolute() / "videos" / "play_64.mp4"
    out = capfd.readouterr().out
    seeds, returns, _ = zip(*EPISODE.findall(out), strict=True)
    assert seeds == ("11000", "11001")
    average = sum(map(float, returns)) / 2
    assert out.endswith(f"\nAverage return: {average:.2f}\nFilm: {film.relative_to(Path.cwd())}\n")
    assert decode(film)[0].shape[0] > 4


def test_without_a_window_it_says_how_to_film(evaluated, monkeypatch, capfd):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    error = error_of(capfd, *PLAY, status=1)
    assert_names(error, "DISPLAY", "WAYLAND_DISPLAY", "--video true")
    task = "lightning_rl/CartPole-v0"
    options = ["--data.env.id", task, "--data.eval_env", "GymnasiumEnv", "--data.eval_env.id", task]
    error = error_of(capfd, *PLAY, *options, status=1)
    assert_names(error, f"'{task}'", "['rgb_array']", "human", "--video true")
    error = error_of(capfd, *PLAY, "--data.env", "CartPole", status=1)
    assert_names(error, "CartPole", "--video true")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_film_of_chunks_shows_each_env_step_at_the_rate_of_the_env(tmp_path, vectorization):
    single = partial(GymnasiumEnv, id="CartPole-v1", vectorization=vectorization)
    data = {"num_eval_episodes": 2, "total_env_steps": 192}
    module, _, _ = filmed(tmp_path, env=partial(ActionChunk, env=single, chunk_size=3), data=data)
    frames, fps = decode(tmp_path / "videos" / films(tmp_path, "eval_*")[0])
    lengths = module.evaluation["lengths"]
    assert fps == 25  # every other step of 50 a second
    assert len(frames) == 1 + max(lengths) // 2 + 1  # of the reset, of the steps, and the end
    moves = np.abs(np.diff(tile(frames, 0), axis=0)).max((1, 2, 3)) > 60
    assert moves[: lengths[0] // 2].all()


@pytest.mark.parametrize("vectorization", ["sync", "async", "torch"])
def test_pictures_within_a_chunk_are_those_of_single_steps(vectorization):
    make = {"torch": PushCube}.get(
        vectorization, partial(GymnasiumEnv, id="Pendulum-v1", vectorization=vectorization)
    )
    single, chunked = make(2), ActionChunk(2, make, chunk_size=4, execute=3)
    for env in (single, chunked):
        env.make_renderable()
        env.reset(seed=[1, 2])
    actions = torch.rand(2, 4, *single.single_action_space.shape) * 2 - 1
    assert chunked.film([1], 2) == {}
    for turn, steps in enumerate([(2,), (4, 6)]):
        chunked.step(actions)
        for step in range(3 * turn + 1, 3 * turn + 4):
            single.step(actions[:, (step - 1) % 3])
            if step in steps:
                pictures = single.render([1])
        taken = chunked.film([1], 2)
        assert [(step, list(rows)) for step, rows in taken.items()] == [(s, [1]) for s in steps]
        assert np.array_equal(taken[steps[-1]][1], pictures[0])
    chunked.film([], 2)
    chunked.step(actions)
    assert chunked.film([], 2) == {}
    for env in (single, chunked):
        env.close()
