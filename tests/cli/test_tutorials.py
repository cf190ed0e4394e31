"""The tutorials can be followed: each block is executed, and prints what is shown of it; the slow cases word for word."""

import csv
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_rl.__main__ import main
from tests.markdown import blocks

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "index")

NUMBER = r"-?\d[\d,.e+-]*"
"""Of an output whose numbers may be others on another machine."""


def pattern(line, *, exact):
    """What a line that is shown stands for: `...` is anything, as is the width of a column."""
    parts = re.split(r"(\.\.\.|[─━]+|\s+|" + ("(?!)" if exact else NUMBER) + ")", line.strip())

    def means(part):
        if part == "...":
            return ".*"
        if re.fullmatch(r"[─━]+", part):
            return "[─━]+"
        if part.isspace():
            return r"\s+"
        return NUMBER if not exact and re.fullmatch(NUMBER, part) else re.escape(part)

    return re.compile("".join(map(means, parts)))


def assert_shown(expected, printed, *, exact):
    """Assert that the lines that are shown were printed, in their order."""
    lines = iter(printed.splitlines())
    for line in expected.splitlines():
        wanted = pattern(line, exact=exact)
        assert any(wanted.fullmatch(one.strip()) for one in lines), f"{line}\n\nin\n\n{printed}"


def run_command(command, monkeypatch):
    """Run a line of bash in this process; return whether it failed."""
    words = shlex.split(command, comments=True)
    assert words[0] == "rl-cli", f"{command}: nothing else is run"
    monkeypatch.setattr(sys, "argv", words)
    try:
        main()
    except SystemExit as stop:
        return bool(stop.code)
    return False


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_RL_KEY", str(tmp_path / "home" / "key"))  # runs of one's own
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:  # so that no page runs what another has imported
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def last_evaluation(exp_name):
    """The last evaluation of the newest run of a name."""
    run_dir = max(Path("outputs").glob(f"{exp_name}_*"), key=lambda path: path.stat().st_mtime_ns)
    with open(run_dir / "logs" / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["eval/avg_reward"]]
    return {name: float(value) for name, value in rows[-1].items() if value}


LEARNT = {
    "own_algorithm": lambda: (
        min(last_evaluation(name)["eval/avg_reward"] for name in ("reinforce", "two_rates")) > 150
    ),  # by chance 20
    "own_env": lambda: last_evaluation("parking")["eval/success_rate"] >= 0.9,
    "resume_evaluate_look": lambda: last_evaluation("whole")["eval/avg_reward"] > 150,
}
"""What is true at the end of a page, beyond what it prints."""
SHORTER = {
    "foreign_policy": {
        r"\b(total_env_steps:) (2_457_600|1_700_000|300_000)": r"\1 64",
        "(total_env_steps) 100_352": r"\1 64",
        "(total_env_steps) 1_700_000": r"\1 128",
        "(learning_starts:) 10_240": r"\1 32",
        "(teacher_env_steps:) 100_000": r"\1 32",
        "(max_episode_steps:) 1000": r"\1 8",
        "(num_envs:) (128|64)": r"\1 2",
        "(buffer_size:) (64|32)": r"\1 16",
        "(batch_size:) (2048|1024)": r"\1 16",
        "(num_eval_episodes:?) 16": r"\1 1",
        "(iterations_per_epoch:) 200": r"\1 1",
        "(critic_warmup_iterations:) 20": r"\1 1",
    },
    "own_algorithm": {
        "iterations_per_epoch: 20": "iterations_per_epoch: 2",
        "iterations_per_epoch=10": "iterations_per_epoch=1",
        "40_960": "4_096",
        "51_200": "5_120",
        "10_240": "1_024",
        "10240": "1024",
    },
    "own_env": {
        "iterations_per_epoch: 8": "iterations_per_epoch: 1",
        "iterations_per_epoch 4": "iterations_per_epoch 1",
        "iterations_per_epoch=4": "iterations_per_epoch=1",
        "12_288": "1_536",
        "32_768": "8_192",
        "num_eval_episodes: 50": "num_eval_episodes: 5",
        "num_eval_episodes=50": "num_eval_episodes=5",
    },
    "resume_evaluate_look": {
        "iterations_per_epoch 10": "iterations_per_epoch 1",
        "30_720": "3_072",
        "30 True": "3 True",
        "finished 30720": "finished 3072",
    },
}
"""What is put in place of what for a tenth of the rollouts, and as many evaluations: nothing is learnt."""


def write_wheels():
    """Write what the tutorial finds in two wheels: a box with 29 joints, and a graph that returns zeros."""
    onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
    pytest.importorskip("mujoco", reason="the extra mujoco is not installed")
    pytest.importorskip("onnxruntime", reason="the extra export is not installed")
    parts = ["hip_pitch", "hip_roll", "hip_yaw", "knee", "ankle_pitch", "ankle_roll"]
    parts += ["shoulder_pitch", "shoulder_roll"]
    names = [f"{side}_{part}_joint" for side in ("left", "right") for part in parts]
    names += [f"joint_{number}" for number in range(29 - len(names))]
    bodies = "".join(
        f'<body><joint name="{name}" armature=".01"/><geom type="sphere" size=".02" contype="0" conaffinity="0"/></body>'
        for name in names
    )
    robot = Path("holosoma/data/robots/g1/g1_29dof.xml")
    robot.parent.mkdir(parents=True)
    robot.write_text(
        f'<mujoco><worldbody><body name="base"><freejoint/><geom type="box" size=".3 .3 .8"/>{bodies}</body></worldbody></mujoco>'
    )
    kind, zeros = onnx.TensorProto.FLOAT, np.zeros((100, 29), np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["obs", "weight"], ["action"])],
        "policy",
        [onnx.helper.make_tensor_value_info("obs", kind, [1, 100])],
        [onnx.helper.make_tensor_value_info("action", kind, [1, 29])],
        [onnx.numpy_helper.from_array(zeros, "weight")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    model.ir_version = 9
    for key, value in {"dof_names": names, "kp": [50.0] * 29, "kd": [2.0] * 29}.items():
        model.metadata_props.add(key=key, value=json.dumps(value))
    path = Path("holosoma_inference/models/loco/g1_29dof/fastsac_g1_29dof.onnx")
    path.parent.mkdir(parents=True)
    onnx.save(model, str(path))


WHOLE = [pytest.param(page, "whole", marks=pytest.mark.slow) for page in LEARNT]


@pytest.mark.parametrize(("page", "budget"), [*((page, "a tenth") for page in PAGES), *WHOLE])
def test_a_tutorial_can_be_followed(page, budget, monkeypatch, capfd):
    text = (TUTORIALS / f"{page}.md").read_text()
    if "--video" in text:
        pytest.importorskip("av")
    if page == "foreign_policy":
        write_wheels()
    for long, short in SHORTER[page].items() if budget == "a tenth" else ():
        text, count = re.subn(long, short, text)
        assert count
    names, printed, failed = {"__name__": "__main__"}, "", False
    for block in blocks(page, text):
        if block.language in ("text", "output"):
            assert failed == block.code.startswith("rl-cli: error:"), printed
            assert_shown(block.code, printed, exact=block.language == "output")
            failed = False
            continue
        assert not failed, printed
        capfd.readouterr()
        if block.file:
            Path(block.file).write_text(block.code)
        elif block.language == "python":
            exec(compile(block.code, page, "exec"), names)
        elif block.language == "bash":
            for command in block.code.splitlines():
                failed = run_command(command, monkeypatch)
        out, err = capfd.readouterr()
        printed = out + err
    assert budget == "a tenth" or LEARNT[page]()
