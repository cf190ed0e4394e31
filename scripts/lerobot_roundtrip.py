"""Cross-check datasets with LeRobot's own reader and writer, version 0.4.4.

    python scripts/lerobot_roundtrip.py                     # both directions
    python scripts/lerobot_roundtrip.py --fixtures tests/numerics/lerobot_044.zip

LeRobot pins older versions of torch than ours. So it is installed without its dependencies, plus
the few that its datasets need, into a virtual environment that sees the packages of this one.
We read our datasets and those of LeRobot as they were given, and train from the latter. LeRobot
reads all of them, also labelled ones, those with a deleted episode and merged ones, and must agree
with us frame by frame.
An episode of LeRobot's has two tasks, and our copy keeps them. PyAV decodes the frames of videos in
both; LeRobot's default, TorchCodec, needs FFmpeg's libraries in the system.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict

from lightning_rl import (
    ActorOnly,
    BehaviorCloning,
    DatasetCollector,
    EpisodeWriter,
    GymnasiumEnv,
    RLDataModule,
    RLTrainer,
    read_episodes,
)
from lightning_rl.extensions.datasets.label import label_dataset
from scripting import QUIET, interpreter_in, parser_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.envs import ScriptedEnv

PACKAGES = (
    "lerobot==0.4.4",
    "datasets<5",
    "huggingface_hub<1",
    "numpy==2.2.*",
    "pandas",
    "torchvision==0.28.*",
    *("jsonlines", "draccus==0.10.0", "deepdiff", "einops", "xxhash", "dill", "multiprocess"),
    *("orderly-set", "mergedeep", "pyyaml-include", "typing-inspect", "termcolor", "toml"),
    *("python-dateutil", "pytz", "tzdata", "six", "httpx", "httpcore", "anyio", "sniffio"),
)
"""Packages to install without dependencies. Ours are torch, NumPy, PyArrow, PyAV, Pillow."""

OBSERVATION = Dict(
    {
        "agent_pos": Box(-1, 1, (3,), np.float32),
        "environment_state": Box(-1, 1, (2, 2), np.float32),
        "pixels": Dict({"front": Box(0, 255, (48, 64, 3), np.uint8)}),
    }
)
OF_LEROBOT = Dict({name: OBSERVATION[name] for name in ("agent_pos", "pixels")})
"""LeRobot's tools refuse columns of two dimensions."""

ACTION = Box(-9, 9, (2,), np.float32)
FPS = 10
LENGTHS = (5, 1, 4)
TASKS = ("Push the cube.", "Lift it.", "Push the cube.")
OF_STEPS = (("Push the cube.",) * 3 + ("Lift it.",) * 2, TASKS[1:2], TASKS[2:] * 4)
"""Tasks of the steps of LeRobot's episodes."""

DELETED = 1
"""The episode that LeRobot deletes."""

KEYS = {
    "observation.state": "observation.agent_pos",
    "observation.images.front": "observation.pixels.front",
}
CODEC_ERROR = 4.0
"""Allowed mean difference of a frame's bytes after a codec."""

LEROBOT = '''
import importlib.util, json, pathlib, re, sys
import numpy as np, torch

# Its compiled operators, which datasets do not use, are built for another build of torch.
vision = pathlib.Path(importlib.util.find_spec("torchvision").origin).parent
text = (vision / "_meta_registrations.py").read_text()
library = torch.library.Library("torchvision", "DEF")
for pair in set(re.findall(r'register_meta\\("(\\w+)|torchvision::(\\w+)', text)):
    library.define("".join(pair) + "(Tensor x) -> Tensor")

import av
from lerobot.datasets import lerobot_dataset

def decode(path, timestamps, tolerance, backend=None):
    frames = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            if any(abs(frame.time - t) < tolerance for t in timestamps):
                frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
    assert len(frames) == len(timestamps), "no frame within LeRobot's own tolerance"
    return torch.stack(frames).permute(0, 3, 1, 2).float() / 255

lerobot_dataset.decode_video_frames = decode

def read(root):
    """Print all that LeRobot has of a dataset, as JSON."""
    dataset = lerobot_dataset.LeRobotDataset("local/ours", root=root)
    bounds = [[e["dataset_from_index"], e["dataset_to_index"]] for e in dataset.meta.episodes]
    tasks = [dataset.meta.get_task_index(task) for task in dataset.meta.tasks.index]
    frames = []
    for i in range(len(dataset)):
        item = dataset[i]
        camera = item.pop("observation.images.front")
        frames.append({k: v if isinstance(v, str) else v.tolist() for k, v in item.items()})
        frames[-1]["front"] = (camera * 255).round().int().permute(1, 2, 0).tolist()
    stats = dataset.meta.stats or {}  # none before a dataset is finalised
    stats = {k: {n: v.tolist() for n, v in s.items()} for k, s in stats.items()}
    said = {"fps": dataset.fps, "episodes": dataset.num_episodes, "tasks": tasks}
    print("RESULT" + json.dumps({**said, "bounds": bounds, "frames": frames, "stats": stats}))

def edit(target, *roots):
    """Merge datasets, or delete an episode of one; the result is another dataset."""
    from lerobot.datasets import dataset_tools

    opened = [
        lerobot_dataset.LeRobotDataset(f"local/{pathlib.Path(root).name}", root=root)
        for root in roots
    ]
    if len(opened) > 1:
        dataset_tools.merge_datasets(opened, "local/merged", output_dir=target)
    else:
        dataset_tools.delete_episodes(opened[0], [DELETED], target, "local/deleted")

def write(root, source, video):
    """Write episodes that are given as an npz, as LeRobot's recorder does."""
    given = np.load(source, allow_pickle=False)
    pictures = "video" if video == "video" else "image"
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "observation.images.front": {
            "dtype": pictures, "shape": given["front"].shape[1:],
            "names": ["height", "width", "channels"],
        },
        "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "dy"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    dataset = lerobot_dataset.LeRobotDataset.create(
        "local/theirs", 10, features, root=root, use_videos=video == "video"
    )
    ends = np.cumsum(given["lengths"])
    for i in range(ends[-1]):
        dataset.add_frame({
            "observation.state": given["state"][i], "observation.images.front": given["front"][i],
            "action": given["action"][i], "next.reward": given["reward"][i : i + 1],
            "next.done": np.array([i + 1 in ends]),
            "task": str(given["tasks"][i]),
        })
        if i + 1 in ends:
            dataset.save_episode(parallel_encoding=False)
    dataset.finalize()

globals()[sys.argv[1]](*sys.argv[2:])
'''


def environment(path: Path) -> Path:
    """Make the virtual environment; return its interpreter."""
    python = interpreter_in(path, ["--no-deps", *PACKAGES])
    (site,) = path.glob("lib/python*/site-packages")
    # After its own packages, which may have older versions.
    (site / "ours.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


def by_lerobot(python: Path, *arguments: object) -> dict:
    """Run LeRobot; return its output."""
    run = subprocess.run(
        [python, "-c", LEROBOT.replace("DELETED", str(DELETED)), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "SVT_LOG": "1", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    if run.returncode:
        raise SystemExit(run.stderr)
    result = run.stdout.partition("RESULT")[2]
    return json.loads(result) if result else {}


def episodes() -> list[dict[str, np.ndarray]]:
    """Return episodes of L steps, with numbers that use all bits, and moving pictures."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:48, :64]
    made = []
    for number, length in enumerate(LENGTHS):
        frames = [
            np.stack([2 * x + 9 * t, 3 * y + 40 * number, np.full_like(x, 20 * t)], -1) % 256
            for t in range(length + 1)
        ]
        made.append(
            {
                "state": generator.normal(size=(length + 1, 3)).astype(np.float32),
                "block": generator.normal(size=(length + 1, 2, 2)).astype(np.float32),
                "front": np.stack(frames).astype(np.uint8),
                "action": generator.normal(size=(length, 2)).astype(np.float32),
                "reward": np.eye(length, dtype=np.float32)[-1],
            }
        )
    return made


def write_ours(path: Path, pictures: str, finalised: bool) -> None:
    """Record the episodes by our own writer."""
    for number, episode in enumerate(episodes()):
        writer = EpisodeWriter(path, OBSERVATION, ACTION, FPS, TASKS[number], pictures)

        def seen(t: int, episode: dict[str, np.ndarray] = episode) -> dict:
            named = {"agent_pos": episode["state"][t], "environment_state": episode["block"][t]}
            return {**named, "pixels": {"front": episode["front"][t]}}

        for t in range(LENGTHS[number]):
            last = t == LENGTHS[number] - 1
            step = (episode["action"][t], episode["reward"][t], last and number == 0, False)
            writer.add(seen(t), *step, t % 2 == 1, {"penalty": -0.5 * t})
        writer.end_episode(seen(-1), success=number == 0)
    if finalised:
        writer.finalise()


def differ(found: object, expected: object) -> float:
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64)).mean())


def check_ours(path: Path, pictures: str) -> None:
    """Check our reading of a dataset that LeRobot wrote, and train from it."""
    check_read(path, pictures, range(len(LENGTHS)))
    train(path)


def check_read(
    path: Path, pictures: str, numbers: Sequence[int], written_by_us: bool = False
) -> None:
    """Check our reading of a dataset against what was given.

    Args:
        path: path of the dataset.
        pictures: format of its pictures.
        numbers: expected episodes.
        written_by_us: instead of by LeRobot, which keeps no final observation.
    """
    space = OBSERVATION if written_by_us else OF_LEROBOT
    read = read_episodes(path, observation_space=space, action_space=ACTION, fps=FPS)
    assert read.lengths == [LENGTHS[number] for number in numbers]
    worst, given = 0.0, episodes()
    for number, episode in zip(numbers, read, strict=True):
        expected, steps = given[number], len(episode) + written_by_us
        state, front = episode.observation["agent_pos"], episode.observation["pixels"]["front"]
        np.testing.assert_array_equal(state[:steps].numpy(), expected["state"][:steps])
        np.testing.assert_array_equal(episode.action.numpy(), expected["action"])
        np.testing.assert_array_equal(episode.reward.numpy(), expected["reward"])
        worst = max(worst, *map(difference, front[:steps].numpy(), expected["front"][:steps]))
        assert episode.final_known == written_by_us
        if written_by_us:
            block = episode.observation["environment_state"]
            np.testing.assert_array_equal(block.numpy(), expected["block"])
            assert episode.task == TASKS[number]
            assert episode.success == bool(episode.terminated[-1]) == (number == 0)
            assert episode.intervened.tolist() == [t % 2 == 1 for t in range(len(episode))]
            assert episode.extra["penalty"].tolist() == [-0.5 * t for t in range(len(episode))]
        else:
            assert (episode.tasks or (episode.task,) * len(episode)) == OF_STEPS[number]
    assert worst <= (CODEC_ERROR if pictures == "video" else 0.0), worst
    print(f"We read {path.name}: {sum(read.lengths)} frames, {worst:.2f} of 255 off")


def difference(picture: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(picture.astype(np.float64) - expected).mean())


def check_agreement(path: Path, read: dict) -> None:
    """Check that LeRobot (`read`) and we read each frame of a dataset equally."""
    rows = iter(read["frames"])
    ours = read_episodes(path, KEYS, fps=FPS)
    assert [end - begin for begin, end in read["bounds"]] == ours.lengths
    assert (read["fps"], read["episodes"], read["tasks"]) == (FPS, len(ours), [0, 1])
    for number, episode in enumerate(ours):
        tasks = episode.tasks or (episode.task,) * len(episode)
        for t in range(len(episode)):
            row, last = next(rows), t == len(episode) - 1
            assert (row["episode_index"], row["frame_index"], row["task"]) == (number, t, tasks[t])
            assert row["observation.state"] == episode.observation["agent_pos"][t].tolist()
            assert row["action"] == episode.action[t].tolist()
            assert row["next.reward"] == episode.reward[t].item()
            assert row["next.done"] == last == bool((episode.terminated | episode.truncated)[t])
            if "next.terminated" in row:
                assert row["next.terminated"] == episode.terminated[t]
                assert row["next.truncated"] == episode.truncated[t]
                assert row["next.success"] == bool(last and episode.success)
                assert row["complementary_info.is_intervention"] == episode.intervened[t]
            for name, numbers in episode.extra.items():
                assert row[f"complementary_info.{name}"] == numbers[t].item()
            if "environment_state" in episode.observation:
                block = episode.observation["environment_state"][t].tolist()
                assert row["observation.environment_state"] == block
            front = episode.observation["pixels"]["front"][t]
            np.testing.assert_array_equal(np.array(row["front"]), front.numpy())
    assert next(rows, None) is None
    print(f"Both read the same of {path.name}: {sum(ours.lengths)} frames")


def copied(source: Path, path: Path, pictures: str) -> Path:
    """Copy a dataset of LeRobot by our reader and writer."""
    writer = EpisodeWriter(path, OF_LEROBOT, ACTION, FPS, pictures=pictures)
    for episode in read_episodes(source, observation_space=OF_LEROBOT, action_space=ACTION):
        writer.write(episode)
    writer.finalise()
    assert not any(episode.final_known for episode in read_episodes(path))
    return path


def train(path: Path) -> None:
    """Clone the episodes of a dataset, for an iteration."""
    space = Dict({"agent_pos": OBSERVATION["agent_pos"]})  # the policy ignores the pictures
    still = partial(ScriptedEnv, space, ACTION, truncated=True, metadata={"render_fps": FPS})
    gymnasium.register("Still-v0", still)
    data = RLDataModule(
        partial(GymnasiumEnv, id="Still-v0"),
        collector=partial(DatasetCollector, path=str(path)),
        num_envs=len(LENGTHS),
        buffer_size=max(LENGTHS),
        total_env_steps=sum(LENGTHS),
        num_eval_episodes=1,
    )
    policy = ActorOnly(data.observation_space, data.action_space)
    before = [parameter.clone() for parameter in policy.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = RLTrainer(run_dir=folder, accelerator="cpu", **QUIET)
        trainer.fit(BehaviorCloning(policy, n_epochs=1, batch_size=4), data)
    pairs = zip(before, policy.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--fixtures", type=Path, help="an archive of what both wrote")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        python = environment(work / "environment")
        given = episodes()
        frames = {
            name: np.concatenate([episode[name][: len(episode["action"])] for episode in given])
            for name in ("state", "front", "action", "reward")
        }
        np.savez(work / "given.npz", **frames, lengths=LENGTHS, tasks=np.concatenate(OF_STEPS))
        for pictures in ("png", "video"):
            check_direction_to_lerobot(python, work, pictures)
            check_direction_from_lerobot(python, work, pictures)
        if arguments.fixtures is not None:
            target = str(arguments.fixtures.with_suffix(""))
            shutil.make_archive(target, "zip", work / "fixtures")


def check_direction_to_lerobot(python: Path, work: Path, pictures: str) -> None:
    """Let LeRobot read a dataset of ours: unfinished, finalised and labelled."""
    for finalised in (False, True):
        ours = work / f"ours-{pictures}-{finalised}"
        write_ours(ours, pictures, finalised)
        check_read(ours, pictures, range(len(LENGTHS)), written_by_us=True)
        read = by_lerobot(python, "read", ours)
        check_agreement(ours, read)
        columns = [key for key in read["stats"] if key.startswith("observation.")]
        assert len(columns) == (3 if finalised else 0)
    shutil.copytree(ours, work / "fixtures" / f"ours-{pictures}")
    label_dataset(ours, success=[0], failure="all")
    check_agreement(ours, by_lerobot(python, "read", ours))


def check_direction_from_lerobot(python: Path, work: Path, pictures: str) -> None:
    """Read and copy what LeRobot wrote, merged and deleted from."""
    theirs = work / f"theirs-{pictures}"
    by_lerobot(python, "write", theirs, work / "given.npz", pictures)
    check_ours(theirs, pictures)
    check_agreement(theirs, by_lerobot(python, "read", theirs))
    copy = copied(theirs, work / f"copied-{pictures}", pictures)
    check_agreement(copy, by_lerobot(python, "read", copy))
    datasets = {"theirs": theirs}
    for name, numbers in {"deleted": (0, 2), "merged": (0, 1, 2) * 2}.items():
        for source in (copy, theirs):
            datasets[name] = work / f"{name}-{source.name}"
            sources = [source] * (2 if name == "merged" else 1)
            by_lerobot(python, "edit", datasets[name], *sources)
            check_agreement(datasets[name], by_lerobot(python, "read", datasets[name]))
        check_read(datasets[name], pictures, numbers)
    for name, dataset in datasets.items():
        shutil.copytree(dataset, work / "fixtures" / f"{name}-{pictures}")


if __name__ == "__main__":
    main()
