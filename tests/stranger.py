"""The runs of docs/examples/my_lab, a user's folder outside of the package with a file for each kind of extension."""

import csv
import random
from copy import deepcopy
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[1] / "docs" / "examples"

DATA = {"num_envs": 2, "buffer_size": 8, "total_env_steps": 96, "iterations_per_epoch": 2}
DATA |= {"num_eval_episodes": 1, "max_eval_episode_steps": 8}
CART_POLE = {"class_path": "GymnasiumEnv", "init_args": {"id": "CartPole-v1"}}


def own(name, **settings):
    """Return the YAML of a class of the folder."""
    return {"class_path": f"my_lab.{name}", "init_args": settings}


def small(name, **settings):
    return {"class_path": name, "init_args": {"hidden_sizes": [8], **settings}}


def ppo(policy=None, **settings):
    settings = {"n_epochs": 1, "batch_size": 8, "policy": policy or small("ActorCritic")} | settings
    return {"class_path": "PPO", "init_args": settings}


def off_policy(name, policy):
    settings = {"batch_size": 8, "random_env_steps": 16, "policy": policy}
    settings["updates_per_env_step"] = 0.25
    return {"class_path": name, "init_args": settings}


TERMS = {
    "class_path": "PushCube",
    "init_args": {
        "max_episode_steps": 6,
        "rewards": {"near_wall": {"term": "my_lab.term.near_wall", "weight": -1.0}},
        "terminations": {
            "idle": {"term": "my_lab.term.Idle", "ends": "fail", "params": {"steps": 3}}
        },
    },
}
CHUNKS = {"class_path": "ActionChunk", "init_args": {"env": "PushBlocks", "chunk_size": 2}}
TINY = {"class_path": "TinyVLA", "init_args": {"hidden_size": 16, "slot_size": 8}}
LOGISTIC = own("head.LogisticHead", log_scale_init=-1.5)
VLA = {"class_path": "VLAPolicy", "init_args": {"own_head": LOGISTIC, "backbone": TINY}}
DEMOS = {"class_path": "DatasetCollector", "init_args": {"path": "demos"}}
DEMOS["init_args"]["reader"] = own("reader.CsvEpisodes")
CLONING = {"n_epochs": 1, "batch_size": 8, "policy": small("ActorOnly")}

RUNS = {
    "on-policy": {"model": ppo(n_epochs=2) | {"class_path": "my_lab.a2c.A2C"}},
    "off-policy": {
        "model": off_policy("my_lab.soft_q.SoftQ", own("policy.Categorical", width=8)),
        "data": {"replay": "ReplayBuffer"},
    },
    "policy": {"model": ppo(own("policy.Categorical", width=8))},
    "encoder": {"model": ppo(small("ActorCritic", encoder=own("encoder.Waves", frequencies=3)))},
    "env": {"model": ppo(), "data": {"env": own("env.Reach", max_episode_steps=6)}},
    "replay": {
        "model": off_policy("SAC", small("SquashedActorCritic")),
        "data": {"env": own("env.Reach"), "replay": own("replay.Ring", capacity=40)},
    },
    "collector": {"model": ppo(), "data": {"collector": own("collector.Thinned", every=3)}},
    "reader": {
        "model": {"class_path": "BehaviorCloning", "init_args": CLONING},
        "data": {"env": own("env.Reach"), "collector": DEMOS, "total_env_steps": 160},
    },
    "term": {"model": ppo(), "data": {"env": TERMS}},
    "head": {"model": ppo(VLA), "data": {"env": CHUNKS, "buffer_size": 4}},
}
"""A run for each file, `seeds.py` apart."""


def write_config(name, **settings):
    """Write `<name>.yaml` and what the run reads; dicts are merged."""
    run = RUNS[name]
    config = {"seed_everything": 1, "model": run["model"], "trainer": {"accelerator": "cpu"}}
    config["data"] = DATA | {"env": CART_POLE} | run.get("data", {})
    config["trainer"] |= {"enable_progress_bar": False}
    config = merged(deepcopy(config), settings)
    path = Path(f"{name}.yaml".replace("-", "_"))
    path.write_text(yaml.safe_dump(config))
    if name == "reader":
        write_demonstrations(Path("demos"))
    return str(path)


def merged(config, settings):
    for key, value in settings.items():
        both = isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = merged(config[key], value) if both else value
    return config


def write_demonstrations(folder):
    """Write five episodes of `my_lab.env.Reach`: position, goal, action, reward."""
    folder.mkdir(exist_ok=True)
    numbers = random.Random(1)
    for episode in range(5):
        position, goal = numbers.uniform(-2, 2), numbers.uniform(-2, 2)
        with (folder / f"{episode}.csv").open("w") as file:
            for _ in range(9):
                action = max(-1.0, min(1.0, 5 * (goal - position)))
                csv.writer(file).writerow([position, goal, action, -abs(goal - position)])
                position += 0.2 * action
