"""What README and docs/ say is true: commands and code run, settings exist, links lead somewhere, the site builds."""

import ast
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import gymnasium
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from torch.distributed.run import parse_args

import lightning_rl as rl
from lightning_rl.cli.app import RLCLI, run
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.cli.parsing import asks_for_help
from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.extensions.vla.real_time import RealTime
from lightning_rl.system.machine import MachineSettings
from tests.commands import Command, free_port
from tests.golden.make_lerobot import fill
from tests.helpers import (
    ParsedError,
    assert_same_run,
    last,
    newest,
    only_parsed,
    parse_of_script,
    uncompiled_traces,
)
from tests.markdown import blocks
from tests.messages import assert_names
from tests.remote import Threads
from tests.test_architecture import none

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()

ELSEWHERE = ("api", "tutorials")
"""Folders of docs/ whose pages have tests of their own."""

PAGES = {"README.md": README} | {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if path.relative_to(DOCS).parts[0] not in ELSEWHERE
}
BLOCKS = [block for page, text in PAGES.items() for block in blocks(page, text)]
COMMANDS = list(dict.fromkeys(command for block in BLOCKS for command in block.commands))
"""Each once, however many pages it stands on."""

FILES = {block.file: block.code for block in BLOCKS if block.file}
"""What pages show of files of one's own, by their names."""

SMALL = [
    *("--data.total_env_steps", "256", "--data.buffer_size", "16"),
    *("--data.num_eval_episodes", "2", "--data.max_eval_episode_steps", "32"),
]
SMALLER = [
    *("--data.total_env_steps", "64", "--data.num_envs", "8", "--data.buffer_size", "4"),
    *("--model.n_epochs", "1", "--model.batch_size", "32"),
]
FIRST = ("--config", "ppo.yaml", *SMALL, "--model.batch_size", "128")
"""Of the run that a command begins with which needs one; it is trained once, and copied."""
FEW = ["--data.collector.episodes", "8"]
"""Of 400 demonstrations."""
CLONING = [*SMALL, *SMALLER, *FEW]

SHORTER = {
    "total_env_steps=50_000": "total_env_steps=1_024, num_eval_episodes=2",
    "total_env_steps=100_000": "total_env_steps=2_048, num_eval_episodes=2",
    "total_env_steps=300_000": "total_env_steps=2_048, num_eval_episodes=2",
    "EPISODES, STEPS = 50": "EPISODES, STEPS = 4",
    "for seed in range(50)": "for seed in range(4)",
}
"""What is put in place of what in code, to be through with it sooner."""

STUBS = {
    "my_module.py": "from lightning_rl import TinyVLA\nclass MyBackbone(TinyVLA): ...\n",
    "my_vla.py": "from torch import nn\nclass MyVLA(nn.Linear):\n"
    "    def __init__(self, action_space, width): super().__init__(width, action_space.n)\n"
    "    def forward(self, td, deterministic=False, generator=None): ...\n"
    "    def evaluate_actions(self, td): ...\n",
}
"""Modules that pages name and do not show."""


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, content in (FILES | STUBS).items():
        (tmp_path / name).write_text(content)
    yield
    for name in FILES | STUBS:  # so that no test runs what another has imported
        sys.modules.pop(name.removesuffix(".py"), None)


def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_the_two_commands_stand_within_the_first_fifteen_lines():
    head = README.splitlines()[:15]
    assert "pip install -c constraints.txt -e . && rl-cli fit --config configs/ppo.yaml" in head
    assert "pip install -c constraints.txt -e '.[dev]' && pytest" in head


def test_ci_installs_and_tests_as_the_readme_says():
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^pip install .*-c constraints\.txt -e '\.\[dev\]'$", script, re.M)
    assert re.search(r"^pytest --ignore tests/core --junitxml ", script, re.M)
    assert re.search(r"^PYTHONPATH=\S+ pytest tests/core --junitxml ", script, re.M)
    assert script.rstrip().endswith('python tests/skips.py "$venv"/*.xml')


def test_readme_shows_how_to_train_in_fourteen_lines():
    trains, acts = (b.code for b in BLOCKS if b.page == "README.md" and b.language == "python")
    assert len(trains.strip().splitlines()) <= 14
    assert len(acts.strip().splitlines()) <= 8
    assert "policy.act(observation)" in acts


WITH_RAY = (
    *("ray ", "RAY_AUTH_MODE=token ray ", "rl-cli collect "),
    "rl-cli fit --ckpt_path last --data.collector.address ",
)
"""How those begin that need Ray: run word for word by `faults/test_ray.py`."""
OF_THEIR_OWN = ("torchrun ", "rl-cli fit --config a2c.yaml", *WITH_RAY)
"""How the commands begin that have tests of their own below."""
READ_ONLY = ("pip install", "tensorboard ", "python scripts/", "scripts/")
"""How those begin that are not run but read: by `test_what_is_not_run_could_be`."""
PYTHON_OF_OTHERS = "stable_baselines3"
"""What nobody has to install: code that imports it is parsed."""


def is_run(command):
    return not command.split(" && ")[-1].startswith((*OF_THEIR_OWN, *READ_ONLY, "pytest"))


RUN_ON = {command: block.page for block in reversed(BLOCKS) for command in block.commands}
"""The page that a command is run on: the first on which it stands."""
WITH_PYTHON = {block.page for block in BLOCKS if block.language == "python"}
FOLLOWED = WITH_PYTHON | {page for command, page in RUN_ON.items() if is_run(command)}


@pytest.mark.parametrize("page", [page for page in PAGES if page in FOLLOWED])
def test_a_page_can_be_followed(page, capfd, finished_run):
    """Its code in one namespace, its commands in one directory, in their order; budgets are cut."""
    names = {"__name__": "page"}
    first = partial(finished_run, *FIRST)
    for block in (block for block in BLOCKS if block.page == page):
        if block.language == "python" and not block.file:
            ast.parse(block.code)
            if PYTHON_OF_OTHERS not in block.code:
                exec(compile(shortened(block.code), page, "exec"), names)
        for command in block.commands:
            if command.startswith("python scripts/record_demonstrations.py"):
                as_script(*shlex.split(command)[1:])
            if RUN_ON[command] == page and is_run(command):
                follow(shlex.split(command.split(" && ")[-1])[1:], first)
    if page == "README.md":
        assert names["action"] in (0, 1)
        assert "[{'eval/avg_reward': " in capfd.readouterr().out


def shortened(code):
    for long, short in SHORTER.items():
        code = code.replace(long, short)
    return code


def follow(arguments, first):
    """Run what was typed, small: a command of rl-cli. In place of Ray's processes are threads, of Inductor the trace."""
    with pytest.MonkeyPatch.context() as patch, uncompiled_traces():
        patch.setattr("lightning_rl.extensions.remote.ray.RayCluster", Threads)
        follow_here(arguments, first)


SMALL_TASKS = ("velocity.yaml", "push_cube.yaml", "point_mass.yaml", "quadruped.yaml")


def follow_here(arguments, first):
    if arguments[0] == "export":
        pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")
        # Of the graph, which takes seconds, docs/deployment.md and docs/robot.md show the use.
        arguments = ["safetensors" if word == "onnx" else word for word in arguments]
    config = arguments[arguments.index("--config") + 1] if "--config" in arguments else None
    if "--print_config" in arguments or asks_for_help(arguments):
        only_parsed(arguments)
    elif "trainer/ddp.yaml" in arguments:  # test_ddp_faults.py has its launcher start two ranks
        only_parsed([*arguments, "--print_config"])
    elif arguments in (["fit", "--config", name] for name in shipped_configs()):
        pass  # test_commands.py trains each of them
    elif "--model.policy.checkpoint" in arguments and config.startswith("sac"):
        pass  # the same
    elif arguments[0] == "fit" and "--ckpt_path" in arguments:
        first()  # with so few env steps that there are some left
        run([*arguments, *SMALL, "--data.total_env_steps", "512"])
    elif arguments[0] == "fit":
        if config == "ppo_mujoco.yaml" or "HalfCheetah-v5" in arguments:
            pytest.importorskip("mujoco")
        clones = config.startswith(("vla", "two_doors"))
        if "--trainer.init_from" in arguments and "student" not in config:
            cloned = "vla_flow_bc.yaml" if "flow" in config else "vla_bc.yaml"
            run(["fit", "--config", cloned, *CLONING]) if clones else first()
        if "--model.policy.checkpoint" in arguments:
            run(["fit", "--config", "two_doors_bc.yaml", *CLONING])
            (arguments[-1],) = map(str, Path("outputs").glob("two_doors_bc_*"))
        arguments = [*arguments, *SMALL]
        if clones:
            arguments += SMALLER + (FEW if config.endswith("bc.yaml") else [])
        elif config.startswith(("sac", "td3", "soft_q", "dqn")):
            arguments += ["--data.total_env_steps", "128", "--model.random_env_steps", "32"]
            arguments += ["--model.updates_per_env_step", "0.25", "--model.batch_size", "32"]
        elif not config.startswith("apg"):  # which has no minibatches
            one_env = config == "ppo_mujoco.yaml"
            arguments += ["--model.batch_size", "16" if one_env else "64"]
        if config.endswith(SMALL_TASKS) or "student" in config:
            arguments += ["--data.num_envs", "16"]
        run(arguments)
    elif arguments[0] == "sweep":
        without_trials(arguments)
    elif arguments[0] == "recap":  # numerics/test_recap.py has some rounds run
        run_without("recap.command.Rounds.run", arguments)
    elif arguments[0] == "check":
        run([*arguments, "--seconds", "0.1"])
    else:
        for place, word in enumerate(arguments[:-1]):
            if word in ("--episodes", "--data.num_eval_episodes"):
                arguments[place + 1] = "2"
        trained = [*Path().glob("robot/checkpoints"), *Path("outputs").glob("*/checkpoints")]
        if not trained or "--video" in arguments:  # MuJoCo takes 7 s to draw
            first()
        run(arguments)


def without_trials(arguments):
    """All that a sweep does before its first trial: `cli/test_sweep.py` has some run."""
    pytest.importorskip("optuna", reason="the extra sweep (optuna) is not installed")
    run_without("sweeps.sweep._Sweep.run", arguments)


def run_without(method, arguments):
    """Run a command, but not what takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"lightning_rl.extensions.{method}", lambda *_: None)
        run(arguments)


def as_script(script, *arguments):
    """Run a script in this process, which has imported torch."""
    path = ROOT / script
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(path.parent)
        runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(("python ", "scripts/"))])
def test_what_is_not_run_could_be(command):
    """A script takes the arguments that a page gives it."""
    words = shlex.split(command)
    words = words[1:] if words[0] == "python" else words
    script = ROOT / words[0]
    assert script.is_file()
    if script.suffix == ".sh":
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert all(f"== {word} " in script.read_text() for word in words[1:])
        return
    assert not parse_of_script(script, *words[1:])


def is_run_on_its_page(block):
    return block.file and any(is_run(c) and block.file in c for c in COMMANDS)


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language == "yaml" and not is_run_on_its_page(block)],
    ids=lambda block: block.page,
)
def test_what_is_configured_could_be(block, monkeypatch):
    """The parser takes it beside a shipped config, with the classes and settings that it names."""
    content = yaml.safe_load(block.code)
    if "policy" in content:
        content = {"model": {"class_path": "PPO", "init_args": content}}
    Path("block.yaml").write_text(yaml.safe_dump(content))
    if "space" in content:
        without_trials(["sweep", "--config", "ppo.yaml", "--sweep", "block.yaml"])
        return

    def stop_there(self):
        raise ParsedError(self.config["fit"])

    monkeypatch.setattr(RLCLI, "instantiate_classes", stop_there)
    with pytest.raises(ParsedError) as parsed:
        run(["fit", "--config", "ppo.yaml", "--config", "block.yaml"])
    assert set(vars(parsed.value.args[0])) >= set(content)


ARM = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

class Robot(gymnasium.Env):
    observation_space = Dict(state=Box(-1, 1, (4,)), environment_state=Box(-1, 1, (6,)))
    action_space = Box(-1, 1, (3,))
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation(), {}
    def step(self, action):
        self.steps += 1
        return self.observation(), float(-abs(action).sum()), False, self.steps == 16, {}
    def observation(self):
        draw = self.np_random.uniform(-1, 1, 10).astype(np.float32)
        return {"state": draw[:4], "environment_state": draw[4:]}

gymnasium.register("Robot-v0", Robot)
"""


def test_a_dataset_of_lerobot_is_cloned_improved_and_sent_back():
    """The head of docs/from_lerobot.md, with a small ACT, a small dataset and small budgets."""
    Path("my_robot.py").write_text(ARM)
    env = gymnasium.make("my_robot:Robot-v0")
    writer = rl.EpisodeWriter(
        "DEMOS", env.observation_space, env.action_space, fps=10, task="reach"
    )
    for seed in range(2):
        observation, truncated = env.reset(seed=seed)[0], False
        while not truncated:
            action = env.action_space.sample()
            following, reward, terminated, truncated, _ = env.step(action)
            writer.add(observation, action, reward, terminated, truncated)
            observation = following
        writer.end_episode(observation)
    writer.finalise()
    fill(ROOT / "tests" / "golden" / "act", Path("ACT"))
    page = [block for block in BLOCKS if block.page == "docs/from_lerobot.md"]
    config, commands = (next(b.code for b in page if b.language == x) for x in ("yaml", "text"))
    Path("act_bc.yaml").write_text(config.replace("chunk_size: 100", "chunk_size: 8"))
    small = [*SMALL, "--trainer.accelerator", "cpu", "--data.num_envs", "2"]
    small += ["--data.buffer_size", "4", "--model.batch_size", "8"]
    for command in commands.splitlines():
        words = shlex.split(command.split("  #")[0].split(" # ")[0])[1:]
        run([*words, *(small if words[0] == "fit" else [])])
    clone, improved = (
        rl.LeRobotPolicy(path=str(path)).backbone.network.state_dict()
        for path in ("ACT", "improved")
    )
    assert clone.keys() == improved.keys()
    assert not torch.equal(clone["action_head.weight"], improved["action_head.weight"])
    assert newest().name.startswith("act_ppo")


@pytest.mark.parametrize("by", ["forks", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_command_for_two_machines_trains_on_two(by):
    """Both are this one, with a process each on the CPU in place of eight on GPUs; torchrun itself takes 15 CPU seconds."""
    (command,) = [c for c in COMMANDS if c.startswith("torchrun")]
    for there, here in {
        " rl-cli ": f" {Path(sys.executable).parent / 'rl-cli'} ",
        "node0": "127.0.0.1",
        "29500": str(free_port()),
        "gpu": "cpu",
        " 8 ": " 1 ",
    }.items():
        assert there in command
        command = command.replace(there, here)
    torchrun, *words = shlex.split(command)
    assert torchrun == "torchrun"
    small = [*SMALL, "--model.batch_size", "32"]
    nodes = []
    try:
        for rank in ("0", "1"):
            words[words.index("--node_rank") + 1] = rank
            if by == "torchrun":
                nodes.append(Command(*words, *small, program="torch.distributed.run"))
            else:
                asked = parse_args(words)
                assert asked.training_script.endswith("/rl-cli")
                nodes.append(Command(*asked.training_script_args, *small, env=of_node(asked)))
        for node in nodes:
            assert node.wait().returncode == 0, node.stderr
    finally:
        for node in nodes:
            node.kill()
    (checkpoint,) = Path("outputs").glob("*/checkpoints/last.ckpt")
    assert len(torch.load(checkpoint, weights_only=True)["lightning_rl"]["ranks"]) == 2


def of_node(asked):
    """Return what torchrun sets for the only process of a node."""
    settings = {"RANK": asked.node_rank, "GROUP_RANK": asked.node_rank, "LOCAL_RANK": 0}
    settings |= {"WORLD_SIZE": asked.nnodes, "LOCAL_WORLD_SIZE": asked.nproc_per_node}
    settings |= {"MASTER_ADDR": asked.master_addr, "MASTER_PORT": asked.master_port}
    settings |= {"TORCHELASTIC_RUN_ID": "suite", "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in settings.items()}


def test_the_script_that_probes_a_vla_probes_one(capsys):
    run(["fit", "--config", "vla_bc.yaml", *CLONING])
    (run_dir,) = Path("outputs").iterdir()
    as_script("scripts/probe_vla.py", str(run_dir), "--episodes", "4")
    assert "instruction shuffled" in capsys.readouterr().out


def test_the_measure_of_the_overhead_measures(capsys):
    small = ["--workloads", "W1", "--repeats", "1", "--iterations", "2", "--warmup", "1"]
    with pytest.raises(SystemExit) as stop:
        as_script("scripts/bench_overhead.py", *small)
    assert stop.value.code in (0, None)
    assert_names(capsys.readouterr().out, "bit-identical")


def evaluated(run_dir):
    run(["validate", "--ckpt_path", str(last(run_dir)), "--trust_code", "true"])
    return json.loads((run_dir / "evaluation.json").read_text())["avg_reward"]


def test_the_algorithm_that_is_shown_solves_cartpole():
    """By its own command. It took 6 s of CPU time; seeds 1 to 12 ended at 500, all of them."""
    (command,) = [c for c in COMMANDS if c == "rl-cli fit --config a2c.yaml"]
    run(shlex.split(command)[1:])
    assert evaluated(newest()) >= 475


@pytest.mark.slow
def test_the_off_policy_algorithm_that_is_shown_solves_cartpole():
    """By its own command: about a minute of CPU time."""
    (command,) = [c for c in COMMANDS if c == "rl-cli fit --config soft_q.yaml"]
    run(shlex.split(command)[1:])
    assert evaluated(newest()) >= 475


def test_the_policy_that_is_shown_trains_evaluates_and_resumes_exactly():
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


def arguments_of(cls):
    """The arguments of a constructor, with those that its `**kwargs` stand for."""
    names: set[str] = set()
    for one in cls.__mro__:
        if "__init__" in vars(one) and one.__module__.startswith(("lightning_rl", "lightning.")):
            parameters = inspect.signature(one.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names


SPACES = {"observation_space", "action_space"}
COLLECTING = {"context"}
TABLES = {
    "docs/algorithms/ppo.md": arguments_of(rl.PPO) - {"policy"},
    "docs/algorithms/grpo.md": arguments_of(rl.GRPO) - arguments_of(rl.OnPolicyAlgorithm),
    "docs/algorithms/behavior_cloning.md": arguments_of(rl.BehaviorCloning) - {"policy"},
    "docs/policies.md": arguments_of(rl.ActorCritic) - SPACES - {"distribution"},
    "docs/asynchronous.md": arguments_of(rl.AsyncCollector) - COLLECTING,
    "docs/distributed.md": arguments_of(rl.RayCollector) - COLLECTING,
    "docs/demonstrations.md": arguments_of(rl.DatasetCollector) - COLLECTING,
    "docs/vla.md": arguments_of(rl.VLAPolicy) - SPACES - {"value_hidden_size", "make_head"},
    "docs/flows.md": arguments_of(rl.FlowSettings) | arguments_of(RealTime),
    "docs/performance.md": set(inspect.signature(MachineSettings).parameters),
    "docs/configuration.md": arguments_of(rl.RLDataModule),
    "docs/evaluation.md": {name for name in arguments_of(rl.RLDataModule) if "eval" in name},
}
"""The settings that a table of a page has to list."""


def settings_in_tables(text):
    """The names in code in the first column of those tables whose second column is a default."""
    for table in re.findall(r"^\|[^\n]*\| default \|[^\n]*\n((?:\|.*\n)+)", text, re.MULTILINE):
        for row in table.splitlines():
            yield from re.findall(r"`(?:\w+\.)?(\w+)`", row.split("|")[1])


def test_a_table_of_settings_lists_them_all():
    wrong = []
    for page, settings in TABLES.items():
        listed = set(settings_in_tables(PAGES[page]))
        wrong += [f"{page}: {name} is not listed" for name in settings - listed]
        if page not in ("docs/configuration.md", "docs/policies.md"):
            wrong += [f"{page}: {name} is no setting" for name in listed - settings]
    none(wrong)


OWNERS = {
    "model": (
        *(rl.PPO, rl.GRPO, rl.BehaviorCloning),
        *(rl.SAC, rl.TD3, rl.SymmetricPPO, rl.CuriousPPO),
    ),
    "data": (rl.RLDataModule,),
    "trainer": (rl.RLTrainer, Trainer),
    "policy": (
        *(rl.ActorCritic, rl.VLAPolicy, TrainedPolicy),
        rl.LeRobotPolicy,
        *(rl.SquashedActorCritic, rl.DeterministicActorCritic),
        rl.FlowActorCritic,
    ),
}
OF_OTHERS = {"docs/stable_baselines3.md": {"learn", "predict", "save"}}


@cache
def settings_of(section):
    known = {"py"}
    for cls in OWNERS[section]:
        known |= arguments_of(cls) | set(dir(cls))
        known |= {name for one in cls.__mro__ for name in vars(one).get("__annotations__", ())}
    return known


def test_the_settings_that_pages_name_exist():
    unknown = [
        f"{page}: {section}.{name}"
        for page, text in PAGES.items()
        for section, name in re.findall(r"`(?:--)?(model|data|trainer|policy)\.(\w+)", text)
        if name not in settings_of(section) | OF_OTHERS.get(page, set())
    ]
    none(unknown)


WRITTEN_BY_RUNS = ("config.yaml", "hparams.yaml", "base.yaml", "sweep.yaml", *FILES)


def test_the_files_that_pages_name_exist():
    folders = (".", "docs/examples", "docs/examples/my_lab", "src/lightning_rl", "configs")
    missing = [
        f"{page}: {name}"
        for page, text in PAGES.items()
        for name in re.findall(r"`([\w./]+\.(?:py|sh|yaml|md))`", text)
        if name not in WRITTEN_BY_RUNS
        and not any((ROOT / folder / name).exists() for folder in folders)
    ]
    none(missing)


def anchors(text):
    """The anchors of the headings of a page, as GitHub and the site make them."""
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md"])
def test_the_links_of_a_page_outside_of_the_site_lead_somewhere(page):
    """Of those within it the build tells."""
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


@pytest.mark.timeout(900)  # it takes a minute on a slow core
@pytest.mark.parametrize("builder", ["dummy", pytest.param("html", marks=pytest.mark.slow)])
def test_the_site_builds_without_a_warning(builder, tmp_path):
    """Of a link to nothing, of a page in no table of contents, of an object of the source that has gone.

    The builder "dummy" resolves all of it, and writes no pages: writing takes as long again.
    """
    options = ["-W", "--keep-going", "-q", "-b", builder]
    options += ["-D", "smartquotes=0"] if builder == "dummy" else []
    built = Command(*options, DOCS, tmp_path / "site", program="sphinx").wait(800)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    if builder == "dummy":
        return
    page = (tmp_path / "site" / "algorithms" / "ppo.html").read_text()
    assert "<math " in page, "an equation shows without a network"
    assert "https://cdn" not in page
    links = set(re.findall(r'href="\.\./(_code/[^"#]+)#(L-\d+)"', page))
    assert len(links) > 20
    for name, line in links:
        assert f'id="{line}"' in (tmp_path / "site" / name).read_text()
