"""What README says is true: its commands run, its code runs, its paths exist."""

import json
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
import yaml

from lightning_rl import CustomVLA
from lightning_rl.cli.app import run
from lightning_rl.cli.quick_help import asks_for_help
from tests.helpers import assert_same_run, last

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
    if line.strip()
]
SMALL = [
    "--data.total_env_steps",
    "512",
    "--data.buffer_size",
    "32",
    "--data.num_eval_episodes",
    "2",
]


FILES = {
    found[1]: block for _, block in BLOCKS if (found := re.match(r"# (\w+\.(?:py|yaml))\n", block))
}
"""What it shows of files of one's own, by their names."""

TINY = ["--data.num_envs", "8", "--data.buffer_size", "4", "--model.n_epochs", "1"]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    yield
    for name in FILES:  # so that no test runs what another has imported
        sys.modules.pop(name.removesuffix(".py"), None)


def test_the_two_commands_stand_within_the_first_fifteen_lines():
    head = README.splitlines()[:15]
    assert "pip install -c constraints.txt -e . && rl-cli fit --config configs/ppo.yaml" in head
    assert "pip install -c constraints.txt -e '.[dev]' && pytest" in head


def test_ci_installs_and_tests_as_the_readme_says():
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"pip install .*-c constraints\.txt -e '\.\[dev\]' && pytest", script)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if "rl-cli" in c and "torchrun" not in c and "a2c" not in c]
)
def test_every_rl_cli_command_runs(command, capsys):
    if "mujoco" in command:
        pytest.importorskip("mujoco")
    arguments = shlex.split(command.split("&&")[-1].strip())[1:]
    if "--ckpt_path" in arguments:  # of an earlier run
        run(["fit", "--config", "ppo.yaml", *SMALL, "--model.batch_size", "64"])
    if "--print_config" in arguments:
        with pytest.raises(SystemExit) as stop:
            run(arguments)
        assert stop.value.code in (0, None)
        assert yaml.safe_load(capsys.readouterr().out)["model"]["class_path"].endswith("PPO")
        return
    if asks_for_help(arguments):
        with pytest.raises(SystemExit) as stop:
            run(arguments)
        assert stop.value.code in (0, None)
        return
    if arguments[0] == "fit":
        arguments += [*SMALL, "--model.batch_size", "32"]
        if "vla" in command:
            arguments += TINY
        if "--trainer.init_from" in arguments:
            run(["fit", "--config", "vla_bc.yaml", *SMALL, "--model.batch_size", "32", *TINY])
        if "--ckpt_path" in arguments:
            arguments += ["--data.total_env_steps", "1024"]
    if "ddp" in command:  # the launcher starts the command anew, which here would be pytest
        subprocess.run([sys.executable, "-m", "lightning_rl", *arguments], check=True, timeout=120)
    else:
        run(arguments)


def test_the_command_for_two_machines_trains_on_two(tmp_path):
    """Both are this one, with a process each on the CPU in place of eight on GPUs."""
    (command,) = [c for c in COMMANDS if c.startswith("torchrun")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for there, here in {
        "torchrun": f"{sys.executable} -m torch.distributed.run",
        " rl-cli ": f" {Path(sys.executable).parent / 'rl-cli'} ",
        "node0": "127.0.0.1",
        "29500": str(port),
        "gpu": "cpu",
        " 8 ": " 1 ",
    }.items():
        assert there in command
        command = command.replace(there, here)
    small = [*SMALL, "--model.batch_size", "32"]
    nodes = [
        subprocess.Popen([*shlex.split(command.replace("rank 0", f"rank {i}")), *small])
        for i in range(2)
    ]
    try:
        assert [node.wait(timeout=120) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    (checkpoint,) = Path("outputs").glob("*/checkpoints/last.ckpt")
    assert len(torch.load(checkpoint, weights_only=True)["lightning_rl"]["ranks"]) == 2


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(("python ", "scripts/"))])
def test_every_script_exists_and_starts(command, monkeypatch):
    words = shlex.split(command)
    script = ROOT / (words[1] if words[0] == "python" else words[0])
    assert script.is_file()
    if script.suffix == ".sh":
        subprocess.run(["bash", "-n", str(script)], check=True)
        return
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    try:
        with pytest.raises(SystemExit) as stop:  # in this process, which has imported torch
            runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name != "stable_baselines3":
            raise
        pytest.skip("needs stable-baselines3")
    assert stop.value.code in (0, None)


def test_the_script_that_probes_a_vla_probes_one(capsys):
    run(["fit", "--config", "vla_bc.yaml", *SMALL, "--model.batch_size", "32", *TINY])
    (checkpoint,) = Path("outputs").glob("*/checkpoints/last.ckpt")
    script = [sys.executable, str(ROOT / "scripts" / "probe_vla.py"), str(checkpoint)]
    out = subprocess.run([*script, "--episodes", "4"], capture_output=True, text=True, check=True)
    assert "instruction shuffled" in out.stdout


def test_the_measure_of_the_overhead_measures(tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "bench_overhead.py"), "--workloads", "W1"]
    small = ["--repeats", "1", "--iterations", "2", "--warmup", "1"]
    out = subprocess.run([*script, *small], capture_output=True, text=True, check=True)
    assert "Final parameters of the two loops: bit-identical." in out.stdout


def test_no_command_is_left_untested():
    tested = ("rl-cli", "python ", "scripts/", "pip install", "tensorboard ")
    assert not [command for command in COMMANDS if not any(part in command for part in tested)]


def python_code(code):
    names = {"__name__": "readme"}
    exec(compile(code.replace("100_000", "2_048"), "README.md", "exec"), names)
    return names


def test_the_python_code_trains_and_acts(capsys):
    trains, acts = (b for kind, b in BLOCKS if kind == "python" and b not in FILES.values())
    assert len(trains.strip().splitlines()) <= 14
    run_dir = python_code(trains)["trainer"].run_dir
    assert (run_dir / "evaluation.json").is_file()
    assert "[{'eval/avg_reward': " in capsys.readouterr().out
    assert python_code(acts)["action"] in (0, 1)


def newest():
    return max(Path("outputs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def evaluated(run_dir):
    run(["validate", "--ckpt_path", str(last(run_dir)), "--trust_code", "true"])
    return json.loads((run_dir / "evaluation.json").read_text())["avg_reward"]


def test_the_algorithm_that_it_shows_solves_cartpole():
    """By its own command. It took 6 s of CPU time; seeds 1 to 12 ended at 500, all of them."""
    (command,) = [c for c in COMMANDS if c == "rl-cli fit --config a2c.yaml"]
    run(shlex.split(command)[1:])
    assert evaluated(newest()) >= 475


def test_the_policy_that_it_shows_trains_evaluates_and_resumes_exactly():
    lines = FILES["my_policy.py"].splitlines()[1:]
    assert len([line for line in lines if line]) <= 25
    (command,) = [c for c in COMMANDS if c.endswith("--model.policy my_policy.MyPolicy")]
    few = ["--data.total_env_steps", "10240", "--data.iterations_per_epoch", "10"]

    def trained(name, *more):
        run([*shlex.split(command)[1:], *few, "--exp_name", name, *more])
        return newest()

    whole = trained("whole")
    part = trained("part", "--trainer.max_epochs", "1")
    rest = ["--trainer.max_epochs", "-1", "--trust_code", "true"]
    run(["fit", "--ckpt_path", "last", *rest])
    assert_same_run(whole, part)
    assert evaluated(part) == evaluated(whole) > 20  # what chance gives


def test_the_settings_of_a_vla_of_ones_own_are_those_that_there_are(tmp_path):
    (block,) = (block for _, block in BLOCKS if "class_path: CustomVLA" in block)
    settings = yaml.safe_load(block)["policy"]["init_args"]
    (tmp_path / "my_vla.py").write_text(
        "from torch import nn\nclass MyVLA(nn.Linear):\n"
        "    def __init__(self, action_space, width): super().__init__(width, action_space.n)\n"
        "    def forward(self, td, deterministic=False, generator=None): ...\n"
        "    def evaluate_actions(self, td): ...\n"
    )
    weights = {"weight": torch.ones(2, 64), "bias": torch.ones(2)}
    Path(settings["model_path"]).mkdir()
    torch.save(weights, Path(settings["model_path"], "model.pt"))
    sys.path.append(str(tmp_path))
    space = gymnasium.spaces.Discrete(2)
    policy = CustomVLA(space, space, **settings, freeze=["w*"])
    assert [name for name, p in policy.named_parameters() if p.requires_grad] == ["model.bias"]
    assert torch.equal(policy.model.weight, weights["weight"])
    sys.modules.pop("my_vla")


def test_the_files_it_names_exist():
    for name in re.findall(r"`([\w/]+\.(?:py|sh|yaml|md))`", README):
        candidates = [ROOT / name, ROOT / "src" / "lightning_rl" / name, ROOT / "configs" / name]
        if name not in ("config.yaml", "hparams.yaml", *FILES):
            assert any(path.exists() for path in candidates), name
