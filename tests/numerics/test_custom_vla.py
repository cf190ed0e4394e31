"""A model of a user's own, named in YAML by its class and its weights, trains, resumes and is evaluated."""

import json
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
import yaml

from lightning_rl import CustomVLA
from lightning_rl.cli.app import run
from lightning_rl.cli.config_files import shipped_configs
from lightning_rl.extensions.remote import ray
from lightning_rl.extensions.vla.loading import fill_with_weights
from tests.helpers import assert_same, assert_same_run, last, load, newest, scalars
from tests.messages import assert_names, refused
from tests.remote import Threads

MODULE = '''
"""A vision-language-action model as a user would write it, who knows nothing of this package."""

import torch
from tensordict import TensorDict
from torch import nn


class MyVLA(nn.Module):
    def __init__(self, action_space, width=16, deviation=0.3, critic=True):
        super().__init__()
        chunk, size = action_space.shape
        self.shape, self.deviation = action_space.shape, deviation
        self.extra_fields = {"sample_log_prob": ((chunk,), torch.float32)}
        self.vision = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(256, width))
        self.words = nn.EmbeddingBag(64, width)
        self.action_head = nn.Linear(width, chunk * size)
        if critic:
            self.value_head = nn.Linear(width, 1)

    def seen(self, td):
        rgb = td["observation", "rgb"].permute(0, 3, 1, 2).float() / 255
        return torch.tanh(self.vision(rgb) + self.words(td["observation", "language"]))

    def distribution(self, td):
        mean = self.action_head(self.seen(td)).unflatten(-1, self.shape)
        return torch.distributions.Normal(mean, self.deviation, validate_args=False)

    def forward(self, td, deterministic=False, generator=None):
        drawn = self.distribution(td)
        noise = torch.randn(drawn.mean.shape, generator=generator)
        td["action"] = drawn.mean if deterministic else drawn.mean + self.deviation * noise
        return td.set("sample_log_prob", drawn.log_prob(td["action"]).sum(-1))

    def evaluate_actions(self, td):
        drawn = self.distribution(td)
        result = {"sample_log_prob": drawn.log_prob(td["action"]).sum(-1), "entropy": drawn.entropy().sum(-1)}
        if hasattr(self, "value_head"):
            result["value"] = self.value_head(self.seen(td)).squeeze(-1)
        return TensorDict(result, td.batch_size)


class WithCritic(MyVLA):
    def get_value(self, td):
        return td.set("value", self.value_head(self.seen(td)).squeeze(-1))


class NoEvaluation(nn.Identity):
    def forward(self, td, deterministic=False, generator=None):
        return td


class OneArgument(MyVLA):
    def forward(self, td):
        return td


class Forgetful(WithCritic):
    def evaluate_actions(self, td):
        return super().evaluate_actions(td).exclude("entropy")


def not_a_module():
    pass
'''

CHUNKS = gymnasium.spaces.Box(-1, 1, (4, 2))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A working directory with the module, and weights that the model was trained to elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_vla", None)  # another test's
    Path("my_vla.py").write_text(MODULE)
    import my_vla

    torch.manual_seed(7)
    model = my_vla.WithCritic(CHUNKS)
    weights = model.state_dict()
    actor = {key: value for key, value in weights.items() if "value_head" not in key}
    for file, content in {"weights/model.pt": weights, "actor/model.bin": actor}.items():
        Path(file).parent.mkdir()
        torch.save({"state_dict": content}, file)
    yield model
    sys.modules.pop("my_vla")


def write_config(name="vla_ppo.yaml", collector=None, **settings):
    """Write `mine.yaml`: a shipped config with `MyVLA` in place of its policy."""
    config = yaml.safe_load(shipped_configs()[name].read_text())
    named = {"model_path": "weights", "model_class": "my_vla.WithCritic"} | settings
    named = {key: value for key, value in named.items() if value is not None}
    arguments = config["model"]["init_args"]
    arguments |= {"policy": {"class_path": "CustomVLA", "init_args": named}}
    arguments |= {"batch_size": 8, "n_epochs": 1}
    arguments.pop("critic_warmup_iterations", None)
    config["data"] |= {"num_envs": 4, "buffer_size": 4, "total_env_steps": 256}
    config["data"] |= {"iterations_per_epoch": 2, "num_eval_episodes": 2}
    if collector:
        config["data"]["collector"] = collector
    Path("mine.yaml").write_text(yaml.safe_dump(config))


def fit(name, *options):
    run(["fit", "--config", "mine.yaml", "--exp_name", name, *options])
    return newest()


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        run(list(arguments))
    assert stop.value.code == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_it_trains_checkpoints_resumes_and_is_validated_from_yaml_alone(directory, capsys):
    write_config(model_config={"width": 16, "deviation": 0.4})
    whole = fit("whole")
    part = fit("part", "--trainer.max_epochs", "1")
    begun = load(last(part))["state_dict"]
    assert begun.keys() >= {f"policy.model.{key}" for key in directory.state_dict()}
    error = error_of(capsys, "fit", "--ckpt_path", "last")
    assert_names(
        error,
        last(part),
        "my_vla.WithCritic",
        "model_class",
        "model.init_args.policy.init_args",
        "--trust_code true",
        "--config",
    )
    sys.modules.pop("my_vla")  # as in a process of its own
    rest = ["--trust_code", "true", "--trainer.max_epochs", "-1"]
    run(["fit", "--ckpt_path", "last", *rest])
    assert_same_run(whole, part)
    run(["validate", "--ckpt_path", "last", "--trust_code", "true"])
    assert json.loads((part / "evaluation.json").read_text())["episodes"] == 2
    run(["validate", "--ckpt_path", str(part), "--config", "mine.yaml"])  # the user's own


def test_weights_that_the_model_does_not_have_are_refused(directory, tmp_path):
    torch.save({**directory.state_dict(), "extra.weight": torch.zeros(2)}, tmp_path / "more.pt")
    with refused(names=(tmp_path / "more.pt", "1 unexpected", "extra.weight", "strict: false")):
        fill_with_weights(directory, str(tmp_path / "more.pt"))


@pytest.mark.parametrize("suffix", [".safetensors", "directory", "shards"])
def test_weights_come_from_a_file_a_directory_or_shards(suffix, directory):
    save = pytest.importorskip("safetensors.torch").save_file
    weights = directory.state_dict()
    if suffix.startswith("."):
        path = f"other{suffix}"
        save(weights, path)
    else:
        path = "other"
        Path(path).mkdir()
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        halves = list(weights)[:3], list(weights)[3:]
        for name, keys in zip(names, halves, strict=True):
            save({key: weights[key] for key in keys}, Path(path, name))
        if suffix == "directory":
            save(weights, Path(path, "model.safetensors"))
    policy = CustomVLA(
        gymnasium.spaces.Discrete(2), CHUNKS, model_path=path, model_class="my_vla.WithCritic"
    )
    assert_same(weights, policy.model.state_dict())


def test_without_a_critic_it_learns_by_grpo_and_ppo_says_what_is_missing(directory, capsys):
    no_critic = {"model_class": "my_vla.MyVLA", "model_config": {"critic": False}}
    write_config("vla_grpo.yaml", model_path="actor", **no_critic)
    run_dir = fit("run", "--model.group_size", "2")
    assert "train/policy_loss" in scalars(run_dir)
    write_config(model_path="actor", **no_critic)
    error = error_of(capsys, "fit", "--config", "mine.yaml")
    assert_names(error, "PPO", "CustomVLA", "ActorCritic", "GRPO", "get_value")


def test_in_the_background_without_staleness_it_is_what_it_is_in_the_foreground(
    directory, monkeypatch
):
    monkeypatch.setattr(ray, "RayCluster", Threads)
    monkeypatch.setattr(Threads, "made", [])
    write_config()
    one = load(last(fit("foreground")))["state_dict"]
    for name in ("AsyncCollector", "RayCollector"):
        write_config(collector={"class_path": name, "init_args": {"max_staleness": 0}})
        other = load(last(fit(name)))["state_dict"]
        assert one.keys() == other.keys()
        assert_same(one, other)
    (cluster,) = Threads.made
    assert not any("value_head" in name for sent in cluster.sent for name in sent)
    write_config(
        "vla_grpo.yaml",
        {"class_path": "AsyncCollector", "init_args": {"max_staleness": 1}},
        model_path="actor",
        model_class="my_vla.MyVLA",
        model_config={"critic": False},
    )
    assert "async/staleness_mean" in scalars(fit("grpo", "--model.group_size", "2"))


REFUSED = {
    "no method": ({"model_class": "my_vla.NoEvaluation"}, ("my_vla.NoEvaluation", "evaluate_actions", "get_value(td)")),
    "another forward": ({"model_class": "my_vla.OneArgument"}, ("my_vla.OneArgument", "forward(self, td)", "deterministic", "generator")),
    "incomplete answer": ({"model_class": "my_vla.Forgetful"}, ("my_vla.Forgetful.evaluate_actions", "'entropy'", "sample_log_prob, entropy, value")),
    "no such class": ({"model_class": "my_vla.MyVLAA"}, ("model_class", "'my_vla.MyVLAA'", "my_vla.MyVLA")),
    "wrong key": ({"model_config": {"widht": 16}}, ("model_config", "'widht'", "WithCritic", "close matches: width")),
    "no module": ({"model_class": "my_vla.not_a_module"}, ("model_class", "'my_vla.not_a_module'", "function", "torch.nn.Module")),
    "nothing there": ({"model_path": "gone"}, ("gone", "model_path", "(.safetensors, .pt, .pth, .bin)")),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_refused_with_a_cure(settings, message, directory, capsys):
    write_config(**settings)
    error = error_of(capsys, "fit", "--config", "mine.yaml")
    assert_names(error, *message)
    assert not Path("outputs").exists() or "evaluate_actions returned" in error, (
        "before a run begins"
    )
