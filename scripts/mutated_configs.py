"""Run randomly changed configs: each must train, or end with one message.

A mutated config is a shipped config with one or two random changes.

    python scripts/mutated_configs.py --count 400 --seed 0

One process imports the package, and forks for each config; the same seed makes the same configs. A
fork is a finding if it prints a traceback, ends with another status than 0 without one message, or
does not begin to train within --seconds. The script prints the output of each finding.
"""

import contextlib
import copy
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import yaml

from lightning_rl.cli.config_files import shipped_configs
from scripting import parser_of

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.commands import Command

MEMORY = 24 * 2**30
"""Bytes of address space of a fork."""

LEFT_OUT = ("smolvlm", "hil_")
"""Parts of names of configs that download weights, or wait for a person."""

SMALL = {
    "total_env_steps": 256,
    "num_envs": 8,
    "buffer_size": 16,
    "num_eval_episodes": 1,
    "iterations_per_epoch": 1,
}
"""Settings of the data for short runs; mutations override them."""

VALUES = [None, True, False, 0, 1, -1, 2, 7, 3.5, -0.1, 1e9, 10**12, 10**30, 1e-300]
VALUES += [float("inf"), float("nan"), "", "x", "none", "auto", "1e6", "../..", "a.b", "os.system"]
VALUES += ["ActorCritic", "PPO", "GymnasiumEnv", "é" * 50, [], [0], [1, 2, 3], ["x"], [[1]], [None]]
VALUES += [{}, {"a": 1}, {"class_path": "PPO"}, {"init_args": {}}]
"""Values of mutations."""

NAMES = ["gamma", "id", "class_path", "init_args", "env", "policy", "x", "", "a.b", 3, None]
NAMES += ["encoder", "lr", "devices"]
"""Names of added or renamed keys."""


def places(tree, path=()):
    """Yield the paths of all values of a tree."""
    if not isinstance(tree, dict | list):
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        yield from places(value, (*path, key))


def mutate(config, draw):
    """Change one place of a config, and describe the change."""
    path = draw.choice(sorted(places(config), key=str))
    holder = config
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    way = draw.choice(("value", "value", "value", "remove", "add", "rename", "swap", "text"))
    if way == "remove":
        del holder[key]
    elif way == "add" and isinstance(holder, dict):
        holder[draw.choice(NAMES)] = copy.deepcopy(draw.choice(VALUES))
    elif way == "rename" and isinstance(holder, dict):
        holder[draw.choice((*NAMES, f"{key}s"))] = holder.pop(key)
    elif way == "swap":
        other = draw.choice(sorted(places(config), key=str))
        source = config
        for part in other:
            source = source[part]
        holder[key] = copy.deepcopy(source)
    elif way == "text":
        holder[key] = str(holder[key])
    else:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    return f"{way} at {'.'.join(map(str, path))}"


def mutated(number, seed):
    """Return the name, the changes and the config of a number."""
    draw = random.Random(f"{seed}/{number}")
    names = [name for name in shipped_configs() if not any(part in name for part in LEFT_OUT)]
    name = draw.choice(names)
    config = yaml.safe_load(shipped_configs()[name].read_text())
    config.setdefault("data", {}).update(SMALL)
    model = config["model"].setdefault("init_args", {})
    model["batch_size"] = min(model.get("batch_size", 32), 32)
    changes = [mutate(config, draw) for _ in range(draw.choice((1, 1, 2)))]
    return name, changes, config


def ended(seconds, *arguments):
    """Run `rl-cli`; return its exit code (None if it hangs) and its output."""
    command = Command(*arguments)
    deadline = time.monotonic() + seconds
    while command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    code = command.returncode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)  # its workers, too
    return code, command.stdout + command.stderr


def finding(code, text):
    """Describe the fault of an end, if it has one."""
    if "Traceback (most recent call last)" in text:
        return "traceback"
    if code is None:
        return None if "Run directory: " in text else "hang"
    messages = text.count("rl-cli: error: ")
    if code < 0:
        return f"signal {-code}"
    if code != 0 and messages != 1:
        return f"exit code {code} and {messages} messages"
    return None


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    findings = ends = 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # the forks inherit it
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for number in range(options.count):
            name, changes, config = mutated(number, options.seed)
            Path("mutated.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
            code, text = ended(options.seconds, "fit", "--config", "mutated.yaml")
            ends += code == 0 or code is None
            wrong = finding(code, text)
            findings += wrong is not None
            if wrong is not None:
                print(f"--- {number}, {name}: {wrong}; {'; '.join(changes)}", flush=True)
                print(text[-1500:], flush=True)
    messages = options.count - ends - findings
    print(f"{options.count} configs: {ends} runs, {messages} messages, {findings} findings")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
