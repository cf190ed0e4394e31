"""Shipped configs say only what differs from the defaults; `ppo.yaml` and `sac.yaml` teach, and say more."""

from importlib import import_module
from inspect import Parameter, signature

import yaml

import lightning_rl
from lightning_rl.cli.config_files import shipped_configs, shipped_parts

TEACHING = {"ppo.yaml", "sac.yaml"}


def class_at(path):
    module, _, name = path.rpartition(".")
    return getattr(import_module(module or "lightning_rl"), name)


def restated(settings, parameters, place):
    """Yield the places of settings whose values equal the defaults of their parameters."""
    for name, value in settings.items():
        default = parameters[name].default if name in parameters else Parameter.empty
        if isinstance(default, tuple):
            default = list(default)
        if type(value) is bool or type(default) is bool:
            equal = value is default
        else:
            equal = value == default
        if equal:
            yield f"{place}.{name}"
        yield from restated_in(value, f"{place}.{name}")


def restated_in(value, place):
    """Search the classes that a value names, at any depth."""
    if isinstance(value, dict) and "class_path" in value:
        parameters = signature(class_at(value["class_path"])).parameters
        yield from restated(value.get("init_args", {}), parameters, place)
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from restated_in(item, f"{place}.{key}")


def restated_defaults(text):
    config = yaml.safe_load(text)
    sections = {"data": lightning_rl.RLDataModule, "trainer": lightning_rl.RLTrainer}
    places = [*restated_in(config.get("model"), "model")]
    for section, cls in sections.items():
        places += restated(config.get(section, {}), signature(cls).parameters, section)
    return places + ["seed_everything"] * (config.get("seed_everything") == 1)


def test_what_equals_a_default_is_found():
    text = """
seed_everything: 1
model:
  class_path: PPO
  init_args:
    policy: {class_path: ActorCritic, init_args: {hidden_sizes: [64, 64], activation: elu}}
    gamma: 0.99
    normalize_reward: true
data:
  env: {class_path: ActionChunk, init_args: {env: {class_path: PushBlocks}, chunk_size: 4}}
trainer: {accelerator: auto, max_steps: 3}
"""
    assert {place.rpartition(".")[2] for place in restated_defaults(text)} == {
        *("seed_everything", "hidden_sizes", "gamma", "chunk_size", "accelerator")
    }


def test_configs_restate_few_defaults():
    configs = shipped_configs() | shipped_parts()
    places = [
        f"{name}: {place}"
        for name, path in configs.items()
        if name not in TEACHING
        for place in restated_defaults(path.read_text())
    ]
    assert len(places) < 40, "\n".join(places)
