"""A policy whose weights are not numbers says so wherever it would act or be written."""

import shutil

import pytest
import torch

from lightning_rl import ActorCritic, RLTrainer, load_policy
from lightning_rl.cli.app import run
from lightning_rl.extensions.export.formats import export_policy
from lightning_rl.extensions.export.graph import ports_of
from tests.helpers import last, make_data, make_ppo, train
from tests.messages import assert_names, refused
from tests.variants import after

CONFIG = """
model:
  class_path: PPO
  init_args: {policy: {class_path: ActorCritic, init_args: {hidden_sizes: [8]}}, batch_size: 32, compile: false}
data:
  env: {class_path: GymnasiumEnv, init_args: {id: CartPole-v1}}
  num_envs: 4
  buffer_size: 16
  total_env_steps: 64
  num_eval_episodes: 1
trainer: {accelerator: cpu, enable_progress_bar: false, limit_val_batches: 0}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run directory of a short run."""
    directory = tmp_path_factory.mktemp("whole")
    (directory / "small.yaml").write_text(CONFIG)
    places = ["--output_dir", str(directory), "--trainer.run_dir", str(directory / "run")]
    run(["fit", "--config", str(directory / "small.yaml"), *places])
    return directory / "run"


@pytest.fixture
def broken(whole, tmp_path):
    """A checkpoint of it with one NaN among its weights."""
    shutil.copytree(whole, tmp_path / "run")
    path = last(tmp_path / "run")
    content = torch.load(path, weights_only=True)
    content["state_dict"]["policy.actor.0.weight"][0, 0] = torch.nan
    torch.save(content, path)
    return path


def failure(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        run([*arguments])
    assert exit.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("subcommand", ["validate", "test", "play", "export", "fit"])
def test_no_subcommand_takes_it_for_a_policy(broken, capsys, subcommand):
    options = {"export": ["--format", "safetensors"], "play": ["--trainer.video", "true"]}
    more = ["--data.total_env_steps", "128"] if subcommand == "fit" else []
    error = failure(
        capsys, subcommand, "--ckpt_path", str(broken), *options.get(subcommand, []), *more
    )
    assert_names(error, "actor.0.weight", "1 tensors", "checkpoint", "earlier checkpoint")


def test_it_begins_no_other_run(broken, tmp_path, capsys):
    config = tmp_path / "other.yaml"
    config.write_text(CONFIG)
    error = failure(
        capsys,
        "fit",
        "--config",
        str(config),
        "--trainer.init_from",
        str(broken),
        "--output_dir",
        str(tmp_path / "out"),
    )
    assert_names(error, "actor.0.weight")


def test_load_policy_and_load_from_checkpoint_name_it(broken):
    from lightning_rl import PPO

    for load in (load_policy, PPO.load_from_checkpoint):
        with refused(names="actor.0.weight"):
            load(broken)


def test_in_python_it_is_neither_evaluated_nor_exported_nor_trained(tmp_path):
    data = make_data("CartPole-v1", total_env_steps=4 * 16)
    module = make_ppo(data, compile=False)
    trainer = RLTrainer(run_dir=str(tmp_path), enable_progress_bar=False, accelerator="cpu")
    with torch.no_grad():
        module.policy.actor[0].bias[1] = torch.inf
    told = "actor.0.bias"
    with refused(names=told):
        trainer.validate(module, datamodule=data)
    with refused(names=told):
        trainer.fit(module, data)
    with refused(names=told):
        export_policy(
            module.policy,
            ports_of(module.policy),
            "torch",
            tmp_path / "x.pt2",
            {},
            {},
            lambda file: module.policy,
        )
    assert not (tmp_path / "x.pt2").exists()


def test_running_statistics_count_and_an_infinite_buffer_does_not():
    data = make_data("CartPole-v1", total_env_steps=4 * 16)
    policy = make_ppo(data, {"normalize_observation": True}).policy
    from lightning_rl.deploy.acting import TrainedPolicy

    policy.register_buffer("mask", torch.full((2,), -torch.inf))
    TrainedPolicy(policy)
    policy.normalizer.mean[0] = torch.nan
    with refused(names="normalizer.mean"):
        TrainedPolicy(policy)


def test_layers_without_a_size_are_named_with_the_cure(tmp_path):
    def make_lazy(policy, *args, **kwargs):
        policy.actor[0] = torch.nn.LazyLinear(16)

    with refused(names=("actor.0.weight", "nn.LazyLinear", "nn.Linear")):
        train(tmp_path, policy={"policy_class": after(ActorCritic, __init__=make_lazy)})
