"""The compiled update does what the eager one does, and so do chunks and the whole."""

import copy
from functools import partial

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from tensordict import TensorDict
from torch import nn

from lightning_rl import ActorCritic
from lightning_rl.compiled import graphs
from lightning_rl.compiled.adam import TracedAdam
from lightning_rl.optim import update as stepping
from lightning_rl.optim.gradients import FlatGradient
from tests.callbacks import callback
from tests.helpers import (
    count_graphs,
    make_data,
    make_ppo,
    make_update,
    scalars_of,
    train,
)
from tests.messages import refused
from tests.variants import after

MODELS = [
    ("CartPole-v1", {}, {"ent_coef": 0.01}),
    ("Pendulum-v1", {"normalize_observation": True}, {"clip_value_loss": True}),
    ("Pendulum-v1", {"squash": True}, {"normalize_advantage": "off", "max_grad_norm": None}),
]
COMPILED = [
    *(("trace", *model) for model in MODELS),
    *(pytest.param("Inductor", *model, marks=pytest.mark.slow) for model in MODELS),
]
"""Inductor's graphs, each of three to ten seconds: that of `update_repeatedly`, and that of the values of the run."""


@pytest.fixture
def by(request):
    """What runs the graphs: what Inductor makes of a trace, or the trace as it is."""
    if request.param == "trace":
        request.getfixturevalue("traced_only")


def minibatch_for(module, data, size):
    """A minibatch with log-probs a little off, so that some ratios are clipped."""
    generator = torch.Generator().manual_seed(3)
    observation = torch.randn(size, *data.observation_space.shape, generator=generator)
    td = TensorDict({"observation": observation}, [size])
    acted = module.policy.get_action(td, generator=generator)
    noise = torch.randn(4, size, generator=generator)
    acted["sample_log_prob"] = acted["sample_log_prob"] + 0.2 * noise[0]
    return acted.update({"value": noise[1], "advantage": noise[2] + 1, "return": 3 * noise[3]})


def differentiate(module, minibatch, *, compile):
    scalars = scalars_of(make_update(module, compile=compile), minibatch)
    return scalars, [parameter.grad.clone() for parameter in module.policy.parameters()]


@pytest.mark.parametrize(("by", "env", "policy", "model"), COMPILED, indirect=["by"])
def test_one_compiled_graph_gives_the_gradients_and_scalars_of_the_eager_update(
    by, env, policy, model
):
    data = make_data(env)
    module = make_ppo(data, policy, **model)
    minibatch = minibatch_for(module, data, 64)
    eager, eager_grads = differentiate(module, minibatch, compile=False)
    compiled, compiled_grads = differentiate(module, minibatch, compile=True)
    assert eager == pytest.approx(compiled, abs=1e-5, rel=1e-5)
    assert eager["clip_fraction"] > 0
    assert eager["grad_norm"] > 1e-3
    torch.testing.assert_close(eager_grads, compiled_grads, rtol=1e-5, atol=1e-6)


def test_a_compiled_run_follows_the_eager_one(tmp_path):
    """By the graph of `update_repeatedly`, which is compiled once."""
    model = {"batch_size": 64}  # 12 optimizer steps, the normaliser moving between them
    policy = {"normalize_observation": True}
    runs = [
        train(tmp_path / str(c), env="Pendulum-v1", policy=policy, model=model | {"compile": c})[0]
        for c in (False, True)
    ]
    for eager, compiled in zip(*(run.policy.state_dict().values() for run in runs), strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


def update_repeatedly(*, compile, optimizer=None):
    """Five updates by one minibatch; return the module, its optimizer, what did the update, and the minibatch."""
    torch.manual_seed(0)
    data = make_data("Pendulum-v1")
    module = make_ppo(data, {"normalize_observation": True}, optimizer=optimizer)
    minibatch = minibatch_for(module, data, 64)
    (optimizer,) = module.configure_optimizers()
    update = make_update(module, compile=compile, optimizer=optimizer)
    for i in range(5):
        optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
        update(minibatch.clone())
    return module, optimizer, update, minibatch


def test_adam_in_the_graph_leaves_weights_state_and_scalars_as_adam_itself_does():
    eager, eager_optimizer, eager_update, _ = update_repeatedly(compile=False)
    compiled, compiled_optimizer, update, _ = update_repeatedly(compile=True)
    assert count_graphs(update, "loss") == 1
    said, expected = update.objective.statistics.close(), eager_update.objective.statistics.close()
    for name in ("loss", "grad_norm", "entropy"):
        assert said[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)
    assert expected["grad_norm"] > 1e-3
    torch.testing.assert_close(
        list(eager.policy.parameters()), list(compiled.policy.parameters()), rtol=1e-5, atol=1e-6
    )
    states = [o.state_dict()["state"] for o in (eager_optimizer, compiled_optimizer)]
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-7)
    eager_optimizer.load_state_dict(compiled_optimizer.state_dict())
    compiled_optimizer.load_state_dict(eager_optimizer.state_dict())


def test_adam_in_the_graph_counts_the_steps_of_each_parameter():
    """A parameter that a loss did not reach has made fewer steps, also for who loads the state."""
    own, traced = ([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))] for _ in range(2))
    expected, optimizer = (torch.optim.Adam(parameters, lr=0.1) for parameters in (own, traced))
    adam = TracedAdam(optimizer, traced)
    for reached in ([True, True], [True, False], [True, True], [True, True]):
        gradient = torch.randn(7)
        parts = gradient.split([3, 4])
        for parameter, part, is_reached in zip(own, parts, reached, strict=True):
            parameter.grad = part.view_as(parameter) if is_reached else None
        expected.step()
        with torch.no_grad():
            adam.update(traced, gradient, adam.tensors(), torch.tensor(True), reached)
        torch.testing.assert_close(own, traced)
    assert adam.settings[-1] is TracedAdam(optimizer, traced).settings[-1] is False


@pytest.mark.parametrize("way", ["compiled", "eager", "gated by a fused optimizer"])
def test_a_step_that_is_not_finite_leaves_weights_and_state_alone(way, traced_only):
    fused = partial(torch.optim.Adam, fused=True)
    compile = way == "compiled"
    module, optimizer, update, minibatch = update_repeatedly(compile=compile, optimizer=fused)
    update._gated = way.startswith("gated")  # as on an accelerator
    before = copy.deepcopy((module.policy.state_dict(), optimizer.state_dict()))
    minibatch["return"][0] = torch.nan
    update(minibatch)
    update.objective.statistics.close()
    assert (module.optimizer_steps, module.skipped_steps) == (5, 1)
    torch.testing.assert_close(
        (module.policy.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0
    )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.Adam, amsgrad=True)])
def test_another_optimizer_than_plain_adam_steps_by_itself(optimizer, traced_only):
    compiled, _, update, _ = update_repeatedly(compile=True, optimizer=optimizer)
    assert count_graphs(update, "loss") == 1
    eager, _, _, _ = update_repeatedly(compile=False, optimizer=optimizer)
    torch.testing.assert_close(
        list(eager.policy.parameters()), list(compiled.policy.parameters()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("compile", [False, True])
def test_a_large_minibatch_in_chunks_gives_what_the_whole_gives(compile, monkeypatch, traced_only):
    data = make_data()
    module = make_ppo(data, ent_coef=0.01, clip_value_loss=True)
    minibatch = minibatch_for(module, data, 100)
    whole, whole_grads = differentiate(module, minibatch, compile=False)
    monkeypatch.setattr(stepping, "CPU_MICRO_BATCH", 32)  # 32 + 32 + 32 + 4
    seen = []
    loss = module.loss
    monkeypatch.setattr(
        module.objectives[""], "loss", lambda part: seen.append(len(part)) or loss(part)
    )
    parts, part_grads = differentiate(module, minibatch, compile=compile)
    assert seen == ([32, 4] if compile else [32, 32, 32, 4])
    assert whole == pytest.approx(parts, abs=1e-5, rel=1e-5)
    torch.testing.assert_close(whole_grads, part_grads, rtol=1e-5, atol=1e-6)


def test_without_a_compiler_the_update_runs_uncompiled_and_names_the_cure(tmp_path, monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx")

    monkeypatch.setattr(graphs, "standalone_compile", no_compiler)
    with refused(UserWarning, names=("compile: true", "torch._inductor.config.cpp.cxx", "g++")):
        module, _, _ = train(tmp_path, model={"compile": True})
    assert module.optimizer_steps == 6 * 2 * 2


def test_where_a_callback_wants_the_hooks_of_each_minibatch_nothing_is_compiled(tmp_path):

    seen = []
    listener = callback(on_after_backward=lambda *args: seen.append(args))
    with refused(UserWarning, names=("compile: true", "on_before_backward")):
        train(tmp_path, model={"compile": True}, trainer={"callbacks": [listener]})
    assert len(seen) == 6 * 2 * 2


def test_where_a_hook_changes_a_gradient_nothing_is_compiled(tmp_path):
    def freeze_columns(policy, *args, **kwargs):
        policy.actor[0].weight.register_hook(lambda gradient: gradient * torch.eye(4)[0])
        policy.first = policy.actor[0].weight.detach().clone()

    own = {"policy_class": after(ActorCritic, __init__=freeze_columns)}
    with refused(UserWarning, names=("compile: true", "policy.actor.0.weight", "register_hook")):
        module, *_ = train(tmp_path, policy=own, model={"compile": True})
    moved = (module.policy.actor[0].weight != module.policy.first).any(0)
    assert moved.tolist() == [True, False, False, False]


def test_the_profiler_tells_the_phases_of_an_iteration_apart(tmp_path):
    profiler = SimpleProfiler()
    train(tmp_path, trainer={"profiler": profiler})
    times = {name: len(seconds) for name, seconds in profiler.recorded_durations.items()}
    assert times["env"] == 6 * 16
    assert times["inference"] == 6 * (16 + 2)
    assert times["values"] == times["advantage"] == 6
    assert times["loss"] == times["backward"] == times["optimizer"] == 6 * 2 * 2
    assert times["logging"] > 0


def test_a_gradient_in_one_tensor_holds_those_of_all_dtypes():
    """What backward passes add up is laid out, averaged over 7 samples of two ranks, and clipped."""
    own, half, unused = torch.randn(3, 2), torch.randn(4).bfloat16(), torch.randn(2)
    parameters = [nn.Parameter(tensor) for tensor in (own, half, unused)]
    flat = FlatGradient(parameters)
    flat.clear()
    for _ in range(2):
        (parameters[0].square().sum() + parameters[1].sum().float()).backward()
    expected = [4 * parameters[0].detach(), torch.full((4,), 2.0), torch.zeros(2)]
    laid_out = flat.with_scalars(torch.tensor([0.5]), 3)
    reached = torch.tensor([1.0, 1.0, 0.0, 1.0])  # the last parameter is not; then the count
    whole = torch.cat([torch.tensor([0.5]), *(g.flatten() for g in expected), reached])
    torch.testing.assert_close(laid_out, 3 * whole)

    row = flat.set_clipped(laid_out + 4 * whole, 0.25)
    norm = torch.cat([g.flatten() for g in expected]).norm()
    torch.testing.assert_close(row, torch.stack([torch.tensor(0.5), norm]))
    for parameter, gradient in zip(parameters[:2], expected[:2], strict=True):
        clipped = (gradient * 0.25 / norm).to(parameter.dtype)
        torch.testing.assert_close(parameter.grad, clipped)
    assert parameters[2].grad is None
