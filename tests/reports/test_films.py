"""Films: of every form of an id, to every logger that takes them, or an error where they are asked for."""

from functools import partial
from pathlib import Path

import av
import gymnasium
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger

from lightning_rl import GymnasiumEnv
from lightning_rl.cli.app import run
from lightning_rl.envs import ActionChunk
from lightning_rl.envs.gymnasium.making import spec_of
from lightning_rl.envs.pictures import one_picture
from lightning_rl.system.errors import EnvFaultError
from lightning_rl.training.callbacks import VideoSettings
from tests.helpers import train
from tests.messages import assert_names, refused

MODULE = """
import gymnasium
import numpy as np

from tests.envs import NUMBER, UNIT, ScriptedEnv


class Drawn(ScriptedEnv):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, **settings):
        end = {"terminated": lambda env: env.age >= 4, "metadata": self.metadata}
        super().__init__(NUMBER, UNIT, reward=1.0, **end, **settings)

    def render(self):
        return np.full((32, 32, 3), 40 * self.age, np.uint8)


class Blind(Drawn):
    metadata = {"render_modes": []}


class Failing(Drawn):
    def render(self):
        if self.age > 2:
            raise OSError("the graphics card is gone")
        return super().render()


for cls in (Drawn, Blind, Failing):
    gymnasium.register(f"{cls.__name__}-v0", cls)
"""

SMALL = [
    *("--data.total_env_steps", "16", "--data.num_envs", "2", "--data.buffer_size", "8"),
    *("--data.num_eval_episodes", "2", "--model.batch_size", "8", "--model.compile", "false"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module of envs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("filmed_envs.py").write_text(MODULE)
    yield tmp_path
    for name in ("Drawn-v0", "Blind-v0", "Failing-v0"):
        gymnasium.registry.pop(name, None)
    import sys

    sys.modules.pop("filmed_envs", None)


def fitted(id, *options):
    run(["fit", "--config", "ppo.yaml", "--data.env.id", id, *SMALL, *options])
    (directory,) = Path("outputs").iterdir()
    return directory


def frames(path):
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(container.streams.video[0]))


def names(directory):
    return sorted(path.name for path in (directory / "videos").glob("*.mp4"))


def test_an_env_whose_id_names_a_module_is_filmed(here, capfd):
    directory = fitted("filmed_envs:Drawn-v0", "--trainer.video.max_share", "null")
    assert "eval_16.mp4" in names(directory)
    for command in ("validate", "play"):
        run([command, "--ckpt_path", "last", "--trust_code", "true", "--video", "true"])
        assert frames(directory / "videos" / f"{command}_16.mp4") >= 4
    assert "Film: " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("id", "reason", "commands"),
    [
        ("filmed_envs:Blind-v0", "cannot be drawn: its render modes are", ["validate", "play"]),
        ("filmed_envs:Failing-v0", "the graphics card is gone", ["test"]),
    ],
)
@pytest.mark.filterwarnings("ignore:No more videos")
def test_a_film_that_cannot_be_made_is_an_error_where_it_is_asked_for(
    id, reason, commands, here, capfd
):
    directory = fitted(id, "--video", "true")  # of a training run, it is a warning
    for command in commands:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            run([command, "--ckpt_path", "last", "--trust_code", "true"])
        assert stop.value.code == 1
        error = capfd.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("rl-cli: error: ")
        assert_names(error, "film", reason)
    assert names(directory) == []


def test_a_renderer_that_fails_within_a_chunk_ends_the_film_only(here, tmp_path):
    env = partial(ActionChunk, env=partial(GymnasiumEnv, id="filmed_envs:Failing-v0"), chunk_size=4)
    with refused(UserWarning, names="the graphics card is gone"):
        module, _, _ = train(tmp_path / "run", env=env, trainer={"video": VideoSettings()})
    assert set(module.evaluation["lengths"]) == {4}


def test_a_film_that_cannot_be_written_is_an_error(here, capfd):
    directory = fitted("filmed_envs:Drawn-v0", "--video", "false")
    (directory / "videos").write_text("a file where the directory would be")
    with pytest.raises(SystemExit) as stop:
        run(["validate", "--ckpt_path", "last", "--trust_code", "true", "--video", "true"])
    assert stop.value.code == 1
    assert_names(capfd.readouterr().err, "film", "videos")


class Wandb(Logger):
    """Takes what `WandbLogger` does."""

    name = version = "stub"

    def __init__(self):
        super().__init__()
        self.videos = []

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def log_video(self, key, videos, step=None, **kwargs):
        self.videos.append((key, [frames(video) for video in videos], step))


def test_loggers_that_take_videos_get_them(tmp_path):
    logger = Wandb()
    settings = {"video": VideoSettings(max_share=None, at_best=False), "logger": logger}
    train(tmp_path, trainer=settings)
    assert logger.videos
    assert all(key == "eval/video" and counts[0] > 1 for key, counts, _ in logger.videos)
    steps = [step for _, _, step in logger.videos]
    assert steps == sorted(set(steps))
    assert [f"eval_{step}.mp4" for step in steps] == sorted(
        names(tmp_path), key=lambda name: int(name[5:-4])
    )


def test_the_spec_of_an_id_is_that_of_what_is_made():
    for id in ("CartPole-v1", "CartPole", "gymnasium.envs:CartPole-v1", "gymnasium:CartPole"):
        assert spec_of(id).id == "CartPole-v1"
    assert spec_of("Nothing-v0") is None


def test_the_camera_follows_a_robot_whose_id_names_a_module():
    pytest.importorskip("mujoco")
    env = GymnasiumEnv(1, "gymnasium:Hopper-v5")
    env.make_renderable()
    assert env.env_kwargs["camera_name"] == "track"
    env.close()


def test_pictures_of_an_id_with_a_module_and_without_a_version(here):
    env = GymnasiumEnv(2, "filmed_envs:Drawn")
    env.make_renderable()
    env.reset(seed=0)
    assert env.render([1]).shape == (1, 32, 32, 3)
    assert env.render([1]).dtype == np.uint8
    env.close()


COLOURS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
GREY = COLOURS[..., 0]
THREE = np.repeat(GREY[..., None], 3, -1)


@pytest.mark.parametrize(
    ("drawn", "picture"),
    [
        (COLOURS, COLOURS),
        (GREY, THREE),
        (GREY[..., None], THREE),
        (GREY.astype(float) / 255, THREE),
        (GREY > 9, THREE.astype(bool) * 0 + 255 * (THREE > 9)),
        (COLOURS.astype(np.int64), COLOURS),
        (COLOURS.tolist(), COLOURS),
        (torch.from_numpy(COLOURS), COLOURS),
        (torch.from_numpy(COLOURS / 255.0).movedim(-1, 0), COLOURS),
        (np.concatenate([COLOURS, COLOURS[..., :1]], -1), COLOURS),
        ((COLOURS, COLOURS[:2]), np.concatenate([COLOURS, np.pad(COLOURS[:2], ((0, 2), (0, 0), (0, 0)))], 1)),
        ([GREY, torch.from_numpy(GREY)], np.concatenate([THREE, THREE], 1)),
    ],
)  # fmt: skip
def test_what_render_returns_becomes_a_picture(drawn, picture):
    made = one_picture("Env 'Drawn-v0'", drawn)
    assert made.dtype == np.uint8
    assert np.array_equal(made, picture)


@pytest.mark.parametrize(
    ("drawn", "named"),
    [
        (None, "None"),
        ([], "list"),
        ("+--+", "str"),
        ([[1, 2], [3]], "list"),
        (np.zeros((6, 5, 2), np.uint8), "[6, 5, 2]"),
        (np.zeros((2, 4, 5, 3), np.uint8), "[2, 4, 5, 3]"),
        (np.zeros((0, 5, 3), np.uint8), "[0, 5, 3]"),
        (np.full((4, 5, 3), 200.0), "200"),
        (np.full((4, 5, 3), np.nan), "nan"),
        (np.full((4, 5, 3), -1), "-1"),
        (np.full((4, 5, 3), 70_000), "7e+04"),
        (np.zeros((4, 5, 3), complex), "complex128"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(drawn, named):
    with refused(EnvFaultError, names=("Env 'Drawn-v0'", "render", "uint8", named)):
        one_picture("Env 'Drawn-v0'", drawn)
