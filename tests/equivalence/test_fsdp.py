"""A policy whose parameters are sharded over processes trains as a whole one.

All quick runs on two ranks are made by one launch, `fsdp_runs.quick`; what one rank shows runs here.
"""

import os
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import distributed

import lightning_rl as rl
from lightning_rl.deploy.loading import load_trained
from tests.equivalence.fsdp_runs import Layers, found, run
from tests.equivalence.test_ddp import on_two_ranks
from tests.helpers import assert_same, last, load, train
from tests.messages import refused
from tests.numerics.test_vla_loading import CONFIGS
from tests.variants import after, variant

pytestmark = pytest.mark.timeout(900)
"""For the launch, as in test_ddp.py."""


def launch(directory, what, count=2, status=0):
    with on_two_ranks(directory, what, "fsdp_runs", count) as begun:
        for process in begun:
            process.wait(800)
        for process in begun:
            assert process.returncode == status, process.stdout[-4000:] + process.stderr[-8000:]
    files = sorted(directory.glob(f"{what}[0-9].pt"))
    return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def ranks(directory):
    return launch(directory, "quick")


@pytest.fixture(scope="module")
def slow_ranks(directory, ranks):
    launch(directory, "killed", status=-9)
    return launch(directory, "slow")


@pytest.fixture
def one_rank():
    """Leave no process group, and nothing of it in the environment."""
    before = dict(os.environ)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def assert_close(one, other, atol=1e-6):
    assert one.keys() == other.keys()
    torch.testing.assert_close(other, one, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["PPO", "GRPO", "resumed"])
def test_two_ranks_with_shards_train_as_two_with_whole_policies(name, ranks):
    for rank in ranks:
        one, other = rank[f"{name} ddp"], rank[f"{name} fsdp"]
        assert_close(one["state"], other["state"])
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-4, abs=1e-5)
    assert_same(ranks[0][f"{name} fsdp"]["state"], ranks[1][f"{name} fsdp"]["state"])
    torch.manual_seed(3)
    assert ranks[0][f"{name} fsdp"]["metrics"]["train/grad_norm"] > 0.1


def test_a_rank_has_little_more_than_half_of_the_bytes(ranks):
    for rank in ranks:
        assert rank["PPO fsdp"]["peak"] <= 0.6 * rank["PPO ddp"]["peak"]


def test_a_checkpoint_of_two_ranks_is_one_file_of_whole_tensors(directory, ranks):
    path = last(directory / "GRPO fsdp")
    saved, other = load(path), load(last(directory / "GRPO ddp"))
    assert saved.keys() == other.keys()
    assert_close(saved["state_dict"], other["state_dict"])
    one, other = saved["optimizer_states"][0], other["optimizer_states"][0]
    assert one["param_groups"] == other["param_groups"]
    for i, entries in one["state"].items():
        assert_close(entries, other["state"][i])
    policy = load_trained(path, trust_code=True).policy
    state = {f"policy.{name}": value for name, value in policy.state_dict().items()}
    assert_same(state, {k: v for k, v in saved["state_dict"].items() if k in state})


def test_one_rank_is_stopped_resumed_and_collected_from_in_the_background(tmp_path, one_rank):
    module, trainer = run(tmp_path / "whole", rl.GRPO, "fsdp", devices=1)
    whole = found(module, trainer)
    copied = module.policy.sharding.copy(torch.device("cpu"))
    flags = [[p.requires_grad for p in policy.parameters()] for policy in (copied, module.policy)]
    assert flags[0] == flags[1], "torch multiplies differently without"
    run(tmp_path / "cut", rl.GRPO, "fsdp", devices=1, trainer={"max_epochs": 2})
    checkpoint = last(tmp_path / "cut")
    again = found(*run(tmp_path / "cut", rl.GRPO, "fsdp", devices=1, ckpt_path=checkpoint))
    data = {"collector": partial(rl.AsyncCollector, max_staleness=0)}
    behind = found(*run(tmp_path / "behind", rl.GRPO, "fsdp", devices=1, data=data))
    for other in (again, behind):
        assert_same(whole["state"], other["state"])
        assert_same(whole["optimizer"], other["optimizer"])
        assert whole["metrics"] == pytest.approx(other["metrics"], rel=1e-6, nan_ok=True)
    plain = run(tmp_path / "plain", rl.GRPO, "auto", devices=1)[0]
    assert_close(whole["state"], {k: plain.state_dict()[k] for k in whole["state"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["uneven", "micro", "warm-up", "shown", "taught", "warm start", "lora"]
)
def test_with_shards_it_is_what_it_is_without(name, slow_ranks):
    for rank in slow_ranks:
        one, other = rank[f"{name} ddp"], rank[f"{name} fsdp"]
        assert_close(one["state"], other["state"])
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-3, abs=1e-4)
        for kind in ("returns", "lengths"):
            assert one["evaluation"].get(kind) == other["evaluation"].get(kind)
    assert_same(slow_ranks[0][f"{name} fsdp"]["state"], slow_ranks[1][f"{name} fsdp"]["state"])


@pytest.mark.slow
def test_killed_and_resumed_it_ends_as_uninterrupted(slow_ranks):
    for rank in slow_ranks:
        for part in ("state", "optimizer", "metrics"):
            assert_same(rank["whole"][part], rank["resumed"][part])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["async 0", "meta"])
def test_in_the_background_without_lag_or_begun_on_meta_it_is_the_same_bit_for_bit(
    name, slow_ranks
):
    for rank in slow_ranks:
        for part in ("state", "optimizer"):
            assert_same(rank["whole"][part], rank[name][part])


@pytest.mark.slow
def test_acting_with_shards_is_acting_with_a_whole_policy(slow_ranks, ranks):
    for slow, quick in zip(slow_ranks, ranks, strict=True):
        assert_same(slow["shown sharded"]["state"], slow["shown fsdp"]["state"])
        assert slow["shown sharded"]["evaluation"] == slow["shown fsdp"]["evaluation"]
        assert_same(slow["acts whole"]["state"], quick["PPO fsdp"]["state"])
        assert slow["acts whole"]["peak"] <= 0.65 * quick["PPO ddp"]["peak"]


@pytest.mark.slow
def test_wrapped_or_behind_or_in_bfloat16_ranks_stay_equal(slow_ranks):
    for name in ("wrapped", "async 1", "bf16 fsdp"):
        assert_same(*(rank[name]["state"] for rank in slow_ranks))
    for rank in slow_ranks:
        inner = {k.replace(".inner.", "."): v for k, v in rank["wrapped"]["state"].items()}
        assert_same(inner, rank["whole"]["state"])
        assert_close(rank["bf16 ddp"]["state"], rank["bf16 fsdp"]["state"], atol=5e-3)
        assert rank["async 1"]["metrics"]["async/staleness_max"] == 1


@pytest.mark.slow
def test_only_adapters_are_sent_to_the_background(slow_ranks):
    sent = slow_ranks[0]["lora fsdp"]["sent"]
    assert sent == slow_ranks[0]["lora ddp"]["sent"]
    assert len(sent) > 20
    assert all("lora" in name for name in sent if name.startswith("backbone.model."))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_resumed_by_four(directory, slow_ranks):
    found = launch(directory, "four", 4)
    for other in found[1:]:
        assert_same(found[0]["resumed"]["state"], other["resumed"]["state"])
    moved = found[0]["resumed"]["state"]["policy.version"]
    assert moved == 4


def add_a_scalar(backbone, result, observation, num_slots):
    backbone.bias = torch.nn.Parameter(torch.zeros(()))


def two_objectives(module):
    return [module.objective(module.loss, name="one"), module.objective(module.loss, name="two")]


class OwnParameter(rl.PPO):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.temperature = torch.nn.Parameter(torch.zeros(1))

    def configure_objectives(self):
        groups = [{"params": [p for p in self.parameters() if p.requires_grad]}]
        return [self.objective(self.loss, groups=groups)]


REFUSED = {
    "compile": ({"compile": True}, ("trainer.strategy fsdp", "model.compile", "true")),
    "pattern": (
        {"backbone": variant(Layers, blocks=("layers",))},
        ("'backbone.layers'", "VLAPolicy", "ModuleList", "'backbone.layers.*'"),
    ),
    "scalar": ({"backbone": after(Layers, build=add_a_scalar)}, ("VLAPolicy", "backbone.bias")),
    "objectives": (
        {"algorithm": variant(rl.PPO, "TwoObjectives", configure_objectives=two_objectives)},
        ("trainer.strategy fsdp", "TwoObjectives", "'one', 'two'"),
    ),
    "outside": (
        {"algorithm": OwnParameter},
        ("fsdp", "OwnParameter", "temperature", "--trainer.strategy"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_shards_is_refused_by_name(name, tmp_path, one_rank):
    settings, message = REFUSED[name]
    settings = {"algorithm": rl.PPO} | settings
    with refused(names=message):
        run(tmp_path, settings.pop("algorithm"), "fsdp", devices=1, **settings)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({}, ("blocks", "ActorCritic")),
        ({"memory": partial(rl.GRU, size=4)}, ("memory", "ActorCritic")),
    ],
)
def test_policies_without_blocks_or_with_a_memory_are_refused(policy, message, tmp_path, one_rank):
    with refused(names=message):
        train(tmp_path, policy=policy, trainer={"strategy": "fsdp", "devices": 1})


def test_a_policy_on_meta_is_refused_without_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with refused(names=("meta", "--trainer.strategy fsdp")):
        run(tmp_path, rl.PPO, "auto", devices=1, backbone=partial(Layers, meta=True))


def test_the_blocks_of_a_vla_are_the_modules_in_its_lists(tmp_path):
    pytest.importorskip("transformers")
    backbone = rl.TransformersBackbone("hf_config", config=CONFIGS["llava"], lora={"r": 2})
    names = {name.rpartition(".layers.")[2] for name in backbone.blocks}
    assert names == {"0", "1"}
    assert len(backbone.blocks) == 4, "two of the vision model, two of the language model"
