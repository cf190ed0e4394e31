"""Checkpoints of others whose states are of other types or sizes than a run would have saved."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lightning_rl.algorithms.checkpoint_checks import check_optimizer_state
from lightning_rl.buffers import ReplayBuffer
from lightning_rl.checkpoints.format import check_tensors, restoring
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.collectors import AsyncCollector
from lightning_rl.policies import ActorCritic, NatureCNN, SquashedActorCritic
from lightning_rl.policies.networks.memory import GRU
from lightning_rl.system.errors import ConfigurationError
from tests.core.faults.test_trust import settings
from tests.helpers import last, load, train
from tests.messages import refused

NONSENSE = ["a", None, [], {}, -1, 1e308, torch.zeros(3, dtype=torch.bool)]


def paths_in(tree, path=()):
    """Yield the path of each value in a tree of dicts and lists."""
    if path:
        yield path
    named = dict(enumerate(tree)) if isinstance(tree, list) else tree
    for key, child in named.items() if isinstance(named, dict) else ():
        yield from paths_in(child, (*path, key))


def forged(tree, path, value):
    """Return a copy of a tree with another value at a path."""
    if not path:
        return value
    key, *rest = path
    if isinstance(tree, dict):
        return tree | {key: forged(tree[key], rest, value)}
    return [forged(one, rest, value) if i == key else one for i, one in enumerate(tree)]


SCALED = {"normalize_reward": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    train(run_dir, data={"total_env_steps": 64}, model=SCALED)
    return load(last(run_dir))


LONGER = {"total_env_steps": 96}

PARTS = {
    "optimizer": ("optimizer_states", 0, "param_groups", 0, "lr"),
    "shape": ("optimizer_states", 0, "state", 0, "exp_avg"),
    "step": ("optimizer_states", 0, "state", 0, "step"),
    "counter": ("lightning_rl", "env_steps"),
    "guards": ("lightning_rl", "guards"),
    "ranks": ("lightning_rl", "ranks"),
    "collectors": ("RLDataModule", "collectors"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_state_of_another_type_ends_in_one_message(name, trained, tmp_path):
    value = torch.zeros(7) if name == "shape" else ["a"]
    torch.save(forged(trained, PARTS[name], value), tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError, match=r"cannot be restored|belongs to|holds"):
        train(tmp_path / "run", data=LONGER, model=SCALED, ckpt_path=tmp_path / "a.ckpt")


PROGRESS = ("loops", "fit_loop", "epoch_loop.manual_optimization.optim_step_progress", "total")
MOMENTS = ("optimizer_states", 0, "state", 0)
LOOP, STATISTICS = (("RLDataModule", "collectors", 0, name) for name in ("loop", "statistics"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("loops", "fit_loop"), torch.zeros(3)),
        (("loops", "fit_loop", "epoch_loop.scheduler_progress"), {}),
        ((*PROGRESS, "completed"), None),
        ((*PROGRESS, "ready"), {"a": 1}),
        (("callbacks",), ["a"]),
        (("callbacks", "MetricsWriter"), -1),
        (("callbacks", "MetricsWriter", "eval/avg_reward"), [1]),
        (("pytorch-lightning_version",), "a"),
        (("global_step",), 1e308),
        (("lightning_rl", "contents", "state_dict", 0), {"a": 1}),
        (("lightning_rl", "computing"), {"compiled": []}),
        (("lightning_rl", "guards", "", "passed"), {}),
        (("lightning_rl", "ranks", 0, "carry"), ["a"]),
        (("state_dict", "reward_normalizer._extra_state"), []),
        ((*MOMENTS, "exp_avg"), None),
        ((*MOMENTS, "exp_avg_sq"), torch.full((16, 4), torch.nan)),
        ((*MOMENTS, "step"), -1),
        ((*MOMENTS, "step"), torch.tensor(torch.nan)),
        (("RLDataModule", "collectors"), 10**30),
        ((*LOOP, "env_steps"), [1]),
        ((*LOOP, "rollouts"), {}),
        ((*LOOP, "env", "episodes", 0, "start"), {"seed": -1}),
        ((*STATISTICS, "episodes"), "a"),
        ((*STATISTICS, "returns"), [[]]),
        ((*STATISTICS, "lengths"), [None]),
    ],
)
def test_a_forged_entry_is_one_message(path, value, trained, tmp_path):
    content = forged(trained, path, value)
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(ConfigurationError) as caught:
        train(tmp_path / "run", data=LONGER, model=SCALED, ckpt_path=tmp_path / "a.ckpt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "purpose"),
    [
        ((*LOOP, "generator"), "noise of actions"),
        (("lightning_rl", "ranks", 0, "shuffle"), "order of minibatches"),
    ],
)
def test_a_stream_of_another_kind_of_device_starts_fresh(path, purpose, trained, tmp_path):
    """The state of a GPU's generator has 16 bytes."""
    content = forged(trained, path, torch.zeros(16, dtype=torch.uint8))
    torch.save(content, tmp_path / "a.ckpt")
    with refused(UserWarning, names=(purpose, "device", "cpu")):
        train(tmp_path / "run", data=LONGER, model=SCALED, ckpt_path=tmp_path / "a.ckpt")


COLLECTOR = ("RLDataModule", "collectors", 0)
WINDOW = (*COLLECTOR, "buffer", "windows", 0)


@pytest.fixture(scope="module")
def collected_ahead(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    train(run_dir, data={"total_env_steps": 64, "collector": AsyncCollector})
    return load(last(run_dir))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*WINDOW, "notes"), True),
        ((*WINDOW, "notes"), {"number": 1}),
        ((*WINDOW, "notes", "number"), [1]),
        ((*WINDOW, "notes", "reports"), ["a"]),
        ((*WINDOW, "notes", "reports"), {"a": {}}),
        ((*WINDOW, "fields"), None),
        ((*COLLECTOR, "buffer", "windows"), "a"),
        ((*COLLECTOR, "buffer", "written_steps"), torch.zeros(3, dtype=torch.bool)),
        ((*COLLECTOR, "stale_steps"), []),
        ((*COLLECTOR, "read"), []),
    ],
)
def test_a_forged_window_is_one_message(path, value, collected_ahead, tmp_path):
    torch.save(forged(collected_ahead, path, value), tmp_path / "a.ckpt")
    data = LONGER | {"collector": AsyncCollector}
    with pytest.raises(ConfigurationError) as caught:
        train(tmp_path / "run", data=data, ckpt_path=tmp_path / "a.ckpt")
    assert "\n" not in str(caught.value)


def test_the_state_of_an_optimizer_is_taken_or_refused():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    state = optimizer.state_dict()
    check_optimizer_state(optimizer, state)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # adds an entry to the groups
    scheduled = optimizer.state_dict()
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    check_optimizer_state(optimizer, scheduled)
    check_optimizer_state(torch.optim.Adam([parameter], lr=torch.tensor(0.1), fused=True), state)
    refused = 0
    for path in paths_in(state):
        for value in NONSENSE:
            try:
                check_optimizer_state(optimizer, forged(state, path, value))
            except ConfigurationError:
                refused += 1
    assert refused > 40


def test_a_resumed_run_has_the_optimizer_settings_of_its_own(tmp_path):
    first = {"optimizer": partial(torch.optim.AdamW, weight_decay=0.0, betas=(0.8, 0.9))}
    second = {"optimizer": partial(torch.optim.AdamW, weight_decay=0.5)}
    train(tmp_path, data={"total_env_steps": 64}, model=first)
    before = load(last(tmp_path))["optimizer_states"][0]
    module, _, _ = train(tmp_path, data=LONGER, model=second, ckpt_path=last(tmp_path))
    (group,) = module.updates[""].optimizer.param_groups
    assert group["weight_decay"] == 0.5
    assert group["betas"] == (0.9, 0.999)
    assert group["lr"] > 0  # of the schedule
    steps = module.updates[""].optimizer.state[module.updates[""].parameters[0]]["step"]
    assert steps > before["state"][0]["step"]  # the moments were restored


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD, ("SGD", "dampening", "amsgrad", "--trainer.init_from")),
        (torch.optim.Adamax, ("Adamax", "amsgrad", "--trainer.init_from")),
    ],
)
def test_the_state_of_another_optimizer_is_refused(optimizer, message, trained, tmp_path):
    torch.save(trained, tmp_path / "a.ckpt")
    other = SCALED | {"optimizer": optimizer}
    with refused(names=message):
        train(tmp_path / "run", data=LONGER, model=other, ckpt_path=tmp_path / "a.ckpt")


def test_the_state_of_a_replay_is_taken_or_refused(tmp_path):
    replay = partial(ReplayBuffer, Box(-1, 1, (3,)), Box(-1, 1, (2,)), 2, "cpu", 5, capacity=20)
    state = replay().state_dict(tmp_path)
    replay().load_state_dict(state, tmp_path)
    for path in paths_in(state):
        for value in NONSENSE:
            with suppress(ConfigurationError), restoring("replay"):
                replay().load_state_dict(forged(state, path, value), tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(10**12),
        torch.zeros(1, 1).expand(10**6, 10**6),
        torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (10**12,)),
    ],
    ids=["expanded", "expanded twice", "sparse"],
)
def test_a_tensor_that_is_not_whole_in_the_file_is_refused(tensor):
    with refused(names=("tensor", "shape")):
        check_tensors({"a": [torch.zeros(3), {"b": tensor}]}, "It")


def test_whole_tensors_and_small_views_are_taken():
    check_tensors([torch.zeros(4)[::2], torch.zeros(1).expand(100), torch.tensor(1)], "It")


VECTOR, IMAGE = Box(-1, 1, (3,)), Box(0, 255, (64, 64, 3), np.uint8)
HUGE = {
    "layers": lambda: ActorCritic(VECTOR, VECTOR, hidden_sizes=[10**6, 10**6]),
    "one layer": lambda: ActorCritic(VECTOR, VECTOR, hidden_sizes=[10**12]),
    "critic": lambda: ActorCritic(VECTOR, VECTOR, critic_hidden_sizes=[10**6, 10**6]),
    "many layers": lambda: ActorCritic(VECTOR, VECTOR, hidden_sizes=[10**4] * 100),
    "residual": lambda: SquashedActorCritic(
        VECTOR, VECTOR, hidden_sizes=[20_000], network="residual"
    ),
    "critics": lambda: SquashedActorCritic(VECTOR, VECTOR, num_critics=10**12),
    "layers of critics": lambda: SquashedActorCritic(
        VECTOR, VECTOR, hidden_sizes=[8], critic_hidden_sizes=[10**6, 10**6]
    ),
    "encoder": lambda: NatureCNN(IMAGE, size=10**9),
    "memory": lambda: GRU(3, 10**6),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_network_of_no_size_is_refused_before_it_is_made(name):
    with refused(names=("1,000,000,000", "hidden_sizes")):
        HUGE[name]()


def cart_pole(**init_args):
    return {
        "class_path": "lightning_rl.GymnasiumEnv",
        "init_args": {"id": "CartPole-v1"} | init_args,
    }


@pytest.mark.parametrize("key", ["env", "eval_env"])
@pytest.mark.parametrize(
    "env",
    [
        cart_pole(render_mode="human"),
        cart_pole(env_kwargs={"render_mode": "human"}),
        cart_pole(wrappers=[{"class_path": "gymnasium.wrappers.HumanRendering"}]),
    ],
)
def test_a_checkpoint_opens_no_window(env, key):
    with refused(names=("policy.ckpt", "window", "--trust_code true")):
        checked_config(settings({f"data.{key}": env}), Path("policy.ckpt"))


def test_pictures_are_allowed():
    drawn = cart_pole(env_kwargs={"render_mode": "rgb_array"})
    checked_config(settings({"data.env": drawn}), Path("policy.ckpt"))
    assert "CartPole-v1" in gymnasium.registry
