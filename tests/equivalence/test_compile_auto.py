"""`compile: auto` follows from the config alone, says so, and is kept by a run that is resumed."""

import json
import warnings

import pytest

from lightning_rl.compiled import choice, graphs
from lightning_rl.compiled.choice import CompileDecision
from tests.callbacks import fail
from tests.helpers import assert_same_run, last, load, train
from tests.messages import assert_names, refused

STEPS = 6 * 2 * 2
"""Minibatches of a run of `helpers.train`."""


def computing(run_dir):
    return json.loads((run_dir / "run.json").read_text())["computing"]


@pytest.fixture
def said(capsys):
    """What was printed of it, a line each."""

    def lines():
        return [s for s in capsys.readouterr().out.splitlines() if s.startswith("The update ")]

    return lines


@pytest.fixture
def pays(monkeypatch):
    monkeypatch.setattr(CompileDecision, "pays_from", STEPS)


def test_a_run_of_enough_minibatches_is_compiled_and_says_so(tmp_path, said, pays, traced_only):
    module, *_ = train(tmp_path)
    why = f"{STEPS} minibatches, and compiling pays from {STEPS}"
    assert said() == [f"The update is compiled (compile: auto): {why}."]
    assert module.learner.graphs.have_served
    found = computing(tmp_path)
    assert (found["compiled"], found["why"]) == (True, why)


no_compiler = fail(RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx"))


def test_where_it_cannot_be_compiled_it_runs_uncompiled_without_a_warning(
    tmp_path, said, pays, traced_only, monkeypatch
):
    monkeypatch.setattr(graphs, "standalone_compile", no_compiler)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module, *_ = train(tmp_path)
    assert not [w for w in seen if "ompile" in str(w.message)]
    assert module.optimizer_steps == STEPS
    (line,) = said()
    why = "No working C++ compiler found in torch._inductor.config.cpp.cxx"
    assert_names(line, "compile: auto", why)
    assert computing(tmp_path)["compiled"] is False
    assert computing(tmp_path)["why"].startswith(why)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_resumed_run_goes_on_as_it_began(compiled, tmp_path, monkeypatch, said, traced_only):
    """Also where its own config would have it otherwise."""
    monkeypatch.setattr(CompileDecision, "pays_from", 1 if compiled else 10**9)
    train(tmp_path / "whole")
    train(tmp_path / "parts", trainer={"max_epochs": 1})
    monkeypatch.setattr(CompileDecision, "pays_from", 10**9 if compiled else 1)
    module, *_ = train(tmp_path / "parts", ckpt_path=last(tmp_path / "parts"))
    assert (module.learner.graphs is not None) is compiled
    how = "is compiled" if compiled else "runs uncompiled"
    assert_names(said()[-1], "compile: auto", how)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_who_asks_for_another_way_when_resuming_gets_it_and_is_told(tmp_path, traced_only):
    train(tmp_path, model={"compile": True}, trainer={"max_epochs": 1})
    with refused(UserWarning, names=("compile: false", "compile: auto")):
        train(tmp_path, model={"compile": False}, ckpt_path=last(tmp_path))


def test_a_compiled_run_resumed_where_there_is_no_compiler_goes_on_and_says_what_that_means(
    tmp_path, monkeypatch, traced_only
):
    monkeypatch.setattr(CompileDecision, "pays_from", 1)
    train(tmp_path, trainer={"max_epochs": 1})
    monkeypatch.setattr(graphs, "standalone_compile", no_compiler)
    with refused(UserWarning, names=("uncompiled", "torch._inductor.config.cpp.cxx")):
        module, *_ = train(tmp_path, ckpt_path=last(tmp_path))
    assert module.optimizer_steps == STEPS
    state = load(last(tmp_path))["lightning_rl"]["computing"]
    plain = {"compiled": False, "cpu": choice.cpu()}
    assert state == plain | {"steps": plain}


def test_on_another_cpu_it_says_what_that_means():
    with refused(UserWarning, names=("Z80, no vectors", choice.cpu())):
        assert CompileDecision("auto", 0, {"compiled": True, "cpu": "Z80, no vectors"}).compiled
