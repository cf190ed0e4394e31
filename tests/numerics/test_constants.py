"""A compiled loss notices what it reads of its algorithm, and of all that hangs on it."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rl import PPO
from lightning_rl.compiled.graphs import MOST_GRAPHS, Graphs, NoGraphError
from lightning_rl.extensions.algorithms.behavior_cloning import BehaviorCloning
from tests.algorithms import Reinforce
from tests.core.numerics.test_gradients import minibatch_for
from tests.helpers import (
    assert_same,
    count_graphs,
    make_data,
    make_ppo,
    make_update,
    scalars_of,
    train,
)
from tests.messages import refused
from tests.variants import after, before, variant


class Settings:
    __slots__ = ("weight",)


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.number, term = 0.5, Settings()
        term.weight = 0.5
        self.inner = SimpleNamespace(weight=0.5, weights={"a": 0.5}, terms=[term])
        self.array, self.count, self.seen = np.array([0.5]), 0, []
        self.tensor = torch.tensor([0.5])
        self.register_buffer("version", torch.tensor(1))
        self.layer = nn.Dropout(0.5)


READERS_AND_CHANGES = {
    "number": (lambda m: m.number, lambda m: setattr(m, "number", 2.0)),
    "number of an object": (lambda m: m.inner.weight, lambda m: setattr(m.inner, "weight", 2.0)),
    "slot in a list": (
        lambda m: m.inner.terms[0].weight,
        lambda m: setattr(m.inner.terms[0], "weight", 2.0),
    ),
    "item of a dict": (lambda m: m.inner.weights["a"], lambda m: m.inner.weights.update(a=2.0)),
    "array": (lambda m: float(m.array[0]), lambda m: m.array.fill(2.0)),
    "number of a module": (lambda m: m.layer.p, lambda m: setattr(m.layer, "p", 2.0)),
    "item of a buffer": (lambda m: 0.5 * m.version.item(), lambda m: m.version.fill_(4)),
    "tensor": (lambda m: m.tensor, lambda m: setattr(m, "tensor", torch.zeros(3))),
    "tensor of the same layout": (
        lambda m: m.tensor,
        lambda m: setattr(m, "tensor", torch.tensor([3.0])),
    ),
}


def graphs_of(module, read):
    """Return what calls the graph of `x * read(module)` in a new iteration, and the graphs that there are."""
    made = Graphs(module, torch.device("cpu"))

    def multiply():
        made.recheck()
        make = lambda: (lambda x: [x * read(module)], {})  # noqa: E731
        return made.call(("product",), make, [torch.ones(1)], slice(0))[0]

    return multiply, made._compiled


@pytest.mark.parametrize("name", READERS_AND_CHANGES)
def test_a_change_of_what_is_read_is_taken_up_and_no_other_makes_a_graph(name, traced_only):
    module, (read, change) = Loss(), READERS_AND_CHANGES[name]
    multiply, graphs = graphs_of(module, read)
    for _ in range(3):
        assert torch.equal(multiply(), torch.ones(1) * read(module))
        module.unrelated, module.inner.unrelated = 1.0, object()
        module.seen.append(torch.ones(1))
        module.number = float(str(module.number))  # equal, but another object
    assert len(graphs["product",]) == 1
    change(module)
    for _ in range(2):
        assert torch.equal(multiply(), torch.ones(1) * read(module))
    assert len(graphs["product",]) == 1 + (name != "tensor of the same layout")


def test_a_decision_by_a_number_has_a_graph_for_each_value_beside_one_that_varies(traced_only):
    module = Loss()
    read = lambda m: m.number * (1.0 if m.count < 3 else 2.0)  # noqa: E731
    multiply, graphs = graphs_of(module, read)
    for module.count in range(6):
        module.number = module.count + 0.25
        assert multiply().item() == read(module)
    assert len(graphs["product",]) == 6


class MyAlgorithm(Reinforce):
    """Its coefficient goes to 0."""

    def training_step(self, rollout, batch_idx):
        self.my_coef = 1.0 - self.iterations_done / 4
        super().training_step(rollout, batch_idx)
        vars(self).setdefault("losses", []).append(self.metrics["train/loss"])

    def loss(self, minibatch):
        loss, scalars = super().loss(minibatch)
        return self.my_coef * loss, scalars


class HoldsItsCoefficient(MyAlgorithm):
    """Its coefficient lies in an object that the algorithm holds."""

    @property
    def my_coef(self):
        return self.holder.value

    @my_coef.setter
    def my_coef(self, value):
        vars(self).setdefault("holder", SimpleNamespace()).value = value


@pytest.mark.parametrize("algorithm", [MyAlgorithm, HoldsItsCoefficient])
def test_an_annealed_coefficient_anneals_compiled_too_and_compiles_once_more(
    algorithm, tmp_path, traced_only
):
    kwargs = {
        "data": {"total_env_steps": 4 * 16 * 5},
        "model": {"algorithm": algorithm, "n_epochs": 1, "batch_size": 64},
        "trainer": {"limit_val_batches": 0, "enable_checkpointing": False, "logger": False},
    }
    eager, _, _ = train(tmp_path / "eager", **kwargs)
    kwargs["model"]["compile"] = True
    compiled, _, _ = train(tmp_path / "compiled", **kwargs)
    assert eager.losses == pytest.approx(compiled.losses, abs=1e-5)
    assert compiled.losses[-1] == 0.0 != compiled.losses[0]
    graphs = compiled.learner.graphs._compiled.items()
    assert [len(made) for key, made in graphs if key[1] == "loss"] == [2]


def reads_the_trainer(module, result, minibatch):
    """Ask Lightning, in the loss itself, how far the run is."""
    return result[0] * (1.0 + module.current_epoch + module.iterations_done), result[1]


def reads_a_counter(module, result, minibatch):
    return result[0] * (1.0 + module.env_steps), result[1]


@pytest.mark.parametrize("loss", [reads_the_trainer, reads_a_counter])
def test_a_loss_that_asks_how_far_the_run_is_goes_with_it(loss, tmp_path, traced_only):
    kwargs = {
        "data": {"total_env_steps": 4 * 16 * 3, "iterations_per_epoch": 1},
        "model": {"algorithm": after(MyAlgorithm, loss=loss), "n_epochs": 1, "batch_size": 64},
        "trainer": {"limit_val_batches": 0, "enable_checkpointing": False, "logger": False},
    }
    eager, _, _ = train(tmp_path / "eager", **kwargs)
    kwargs["model"]["compile"] = True
    if loss is reads_the_trainer:
        with refused(UserWarning, names=("trainer", "training_step")):
            compiled, _, _ = train(tmp_path / "compiled", **kwargs)
    else:
        compiled, _, _ = train(tmp_path / "compiled", **kwargs)
        assert compiled.learner.compilation.compiled
    assert eager.losses == pytest.approx(compiled.losses, rel=1e-4)


@pytest.mark.parametrize("held_by", ["partial", "closure"])
def test_what_only_the_function_of_a_loss_holds_may_change_too(held_by, tmp_path, traced_only):
    weight, losses = SimpleNamespace(), []

    def weigh(weight, module, minibatch):
        loss, scalars = module.loss(minibatch)
        return weight.value * loss, scalars

    def list_objectives(module):
        by_partial = partial(weigh, weight, module)
        by_closure = lambda minibatch: weigh(weight, module, minibatch)  # noqa: E731
        return [module.objective(by_partial if held_by == "partial" else by_closure)]

    def anneal(module, *args):
        weight.value = 1.0 / (1.0 + module.iterations_done)

    own = variant(Reinforce, configure_objectives=list_objectives)
    for compile in (False, True):
        model = {"algorithm": before(own, training_step=anneal), "compile": compile}
        module, *_ = train(
            tmp_path / str(compile),
            data={"total_env_steps": 4 * 16 * 3},
            model=model | {"n_epochs": 1, "batch_size": 64},
            trainer={"limit_val_batches": 0, "enable_checkpointing": False, "logger": False},
        )
        losses.append(module.metrics["train/loss"])
    assert module.learner.compilation.compiled
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def sets_a_number(module):
    module.number += 1
    return module.number


def sets_a_tensor(module):
    module.tensor = 0.5 * module.tensor
    return module.tensor


def fills_a_list(module):
    module.seen.append(1.0)
    return len(module.seen)


def fills_an_array(module):
    module.array += 1
    return float(module.array[0])


def draws_by_an_attribute(module):
    return module.inner.draws.random()


def draws_by_python(module):
    return random.random() + np.random.rand()


WRITES = {
    sets_a_number: ("Loss.number", "training_step", "register_buffer"),
    sets_a_tensor: ("Loss.tensor", "training_step", "register_buffer"),
    fills_a_list: ("Loss.seen", "training_step", "register_buffer"),
    fills_an_array: ("Loss.array", "training_step", "register_buffer"),
    draws_by_an_attribute: ("SimpleNamespace.draws", "training_step"),
    draws_by_python: ("Python", "NumPy", "torch.rand"),
}


@pytest.mark.parametrize("read", WRITES)
def test_what_a_graph_would_write_or_draw_once_is_named_and_nothing_is_written(read, traced_only):
    module, expected = Loss(), Loss()
    for each in (module, expected):
        each.inner.draws = np.random.default_rng(0)
    multiply, _ = graphs_of(module, read)
    streams = random.getstate(), np.random.get_state()[2]
    with refused(NoGraphError, names=WRITES[read]):
        multiply()
    assert (random.getstate(), np.random.get_state()[2]) == streams
    if read is not draws_by_python:  # goes on uncompiled as it would have begun
        assert read(module) == read(expected)


def test_a_tensor_that_a_graph_writes_in_place_is_written_once_for_each_call(traced_only):
    module = Loss()
    multiply, _ = graphs_of(module, lambda module: module.tensor.add_(1).clone())
    assert [multiply().item() for _ in range(3)] == [1.5, 2.5, 3.5]


def decide(module, result, minibatch):
    return (2.0 if module.step % 2 else float(module.step)) * result[0], result[1]


def test_what_changes_at_each_call_and_cannot_vary_ends_compiling_with_a_message(traced_only):
    """It decides by the number, so each value has a graph of its own, and there are ever more of them."""
    data = make_data()
    module = make_ppo(data, algorithm=after(PPO, "Deciding", loss=decide))
    module.step = 0
    minibatch = minibatch_for(module, data, 8)
    update = make_update(module, compile=True)
    expected = make_update(module, compile=False)

    def update_with_changing_steps():
        for module.step in range(1, 4 + MOST_GRAPHS):
            found, eager = (scalars_of(each, minibatch) for each in (update, expected))
            assert found == pytest.approx(eager, rel=1e-5, abs=1e-5)

    with refused(UserWarning, names=("Deciding.step", "8 graphs")):
        update_with_changing_steps()


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW, "in pieces"])
@pytest.mark.parametrize("algorithm", [PPO, BehaviorCloning])
def test_what_a_loss_does_not_reach_is_left_alone_compiled_too(
    algorithm, optimizer, monkeypatch, traced_only
):
    """In critic warm-up the actor, in cloning the critic: no step, no decay, no state."""
    if optimizer == "in pieces":
        monkeypatch.setattr("lightning_rl.optim.update.CPU_MICRO_BATCH", 16)
    data = make_data()
    states = []
    for compile in (False, True):
        torch.manual_seed(0)
        module = make_ppo(data, algorithm=algorithm)
        module.warms_up = True
        make = partial(optimizer, weight_decay=0.1) if callable(optimizer) else torch.optim.Adam
        adam = make(module.policy.parameters(), lr=1e-2)
        update = make_update(module, compile=compile, optimizer=adam)
        minibatch = minibatch_for(module, data, 32).set("weight", torch.ones(32))
        untouched = module.policy.critic if algorithm is BehaviorCloning else module.policy.actor
        before = [p.clone() for p in untouched.parameters()]
        for _ in range(3):
            update(minibatch.clone())
        if compile:
            assert count_graphs(update, "loss") > 0
            assert count_graphs(update, "step") == (optimizer == "in pieces")
        assert_same([*before], [*untouched.parameters()])
        steps = {n: int(adam.state[p].get("step", 0)) for n, p in module.policy.named_parameters()}
        left, trained = ("critic", "actor") if algorithm is BehaviorCloning else ("actor", "critic")
        assert steps[f"{left}.0.weight"] == 0
        assert steps[f"{trained}.0.weight"] == 3
        states.append([p.clone() for p in module.policy.parameters()])
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
