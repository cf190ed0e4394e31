"""What multiplies matrices is found once for each CPU and version of torch, by a fair test."""

import json
import math
from itertools import chain, repeat

import pytest
import torch

from lightning_rl.compiled import choice, products
from lightning_rl.compiled.products import (
    FASTER,
    SHAPES,
    Products,
    best_times,
    find_products,
    speed_ratio,
)
from lightning_rl.system import machine
from lightning_rl.system.machine import MachineSettings


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_RL_CACHE", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture
def vectors(monkeypatch):
    """A CPU with AVX-512, and an operator that is ready; how often it was asked for."""
    asked = []
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "cpu_name": "Z"})
    monkeypatch.setattr(products, "load_operator", lambda: asked.append(0) or True)
    return asked


def never():
    raise AssertionError("nothing is to be measured")


def why(ratio, source):
    return f"oneDNN multiplies {ratio} times as fast as MKL, {source}; it takes 1.25"


NOW = "as measured when this run began"


@pytest.mark.parametrize(
    ("ratio", "name", "told"),
    [(1.83, "onednn", "1.83"), (1.2, "mkl", "1.20"), (0.7, "mkl", "0.70")],
)
def test_it_is_measured_once_and_kept(ratio, name, told, cache, vectors):
    assert find_products(lambda: ratio) == Products(name, why(told, NOW))
    (file,) = cache.iterdir()
    assert (
        file.name
        == f"products_Z_{torch.backends.cpu.get_cpu_capability()}_{torch.__version__}.json"
    )
    content = json.loads(file.read_text())
    assert content == {
        "cpu": choice.cpu(),
        "torch": torch.__version__,
        "onednn_times_as_fast": ratio,
    }
    vectors.clear()
    kept = why(told, f"as an earlier run has measured, see {file}")
    assert find_products(never) == Products(name, kept)
    assert not vectors, "whoever keeps to MKL compiles no operator"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "null", '{"onednn_times_as_fast": "fast"}', "NaN", "other torch"]
)
def test_an_answer_that_says_nothing_is_found_anew(content, cache, vectors):
    find_products(lambda: 2.0)
    (file,) = cache.iterdir()
    whole = json.loads(file.read_text())
    if content == "NaN":
        content = json.dumps(whole | {"onednn_times_as_fast": math.nan})
    elif content == "other torch":
        content = json.dumps(whole | {"torch": "1.0"})
    file.write_text(content)
    assert find_products(lambda: 3.0) == Products("onednn", why("3.00", NOW))
    assert json.loads(file.read_text())["onednn_times_as_fast"] == 3.0


def test_where_nothing_can_be_kept_it_is_measured_each_time(cache, vectors):
    cache.write_text("a file, where the directory would be")
    for ratio in (2.0, 1.0):
        assert find_products(lambda ratio=ratio: ratio).why == why(f"{ratio:.2f}", NOW)


def test_without_avx512_nothing_is_compiled_and_nothing_measured(cache, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": False})
    monkeypatch.setattr(products, "load_operator", never)
    no_vectors = "the CPU has no AVX-512, without which oneDNN is not faster"
    assert find_products(never) == Products("mkl", no_vectors)
    assert not cache.exists()


def test_without_a_compiler_nothing_is_kept(cache, vectors, monkeypatch):
    monkeypatch.setattr(products, "load_operator", lambda: False)
    assert find_products(never) == Products("mkl", "oneDNN's operator cannot be compiled here")
    assert not cache.exists()


def test_who_asks_for_one_gets_it_without_a_test(vectors, monkeypatch):
    for name in ("mkl", "onednn"):
        monkeypatch.setattr(machine, "_in_force", MachineSettings(products=name))
        run = choice.Choice(True, None)
        products.choose_products(run, never)
        assert (run.products, run.products_why) == (name, f"trainer.machine.products: {name}")


def test_all_ranks_take_the_answer_of_the_first(vectors, monkeypatch):
    """Also one that would have found another, and does not ask."""
    first = Products("onednn", "as rank 0 has found")
    monkeypatch.setattr(products.ranks, "rank", lambda: 1)
    monkeypatch.setattr(products.ranks, "gather_over_ranks", lambda own: [first, own])
    run = choice.Choice(True, None)
    products.choose_products(run, never)
    assert (run.products, run.products_why) == first
    monkeypatch.setattr(products.ranks, "agree", lambda flag: True)  # one lacks a compiler
    products.choose_products(run, never)
    assert run.products == "mkl"


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        ("/o", "/b", "/o"),
        ("", "/b", "/b/lightning_rl"),
        ("", "", "/h/.cache/lightning_rl"),
    ],
)
def test_the_environment_says_where_answers_are_kept(own, base, expected, monkeypatch):
    monkeypatch.setenv("LIGHTNING_RL_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", "/h")
    assert str(products.cache_directory()) == expected


class Clock:
    """Time that passes where something takes some."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, seconds):
        def act():
            self.now += next(seconds)

        return act


def test_the_best_of_several_turns_counts():
    """What is slow for a while, as while another process works, is as fast as it is without."""
    clock = Clock()

    def slow_at_first(seconds):
        return chain(repeat(5 * seconds, 8), repeat(seconds))

    ways = [clock.takes(slow_at_first(3e-4)), clock.takes(slow_at_first(2e-4))]
    assert best_times(ways, clock) == pytest.approx([3e-4, 2e-4])


def test_the_ratio_is_of_all_shapes_and_leaves_threads_and_draws_alone(monkeypatch):
    """As a geometric mean: no shape counts for more because it takes longer."""
    times = iter([[4.0, 1.0], [1.0, 1.0], [9.0, 1.0], [1.0, 1.0]])
    assert len(SHAPES) == 4
    monkeypatch.setattr(products, "best_times", lambda ways: next(times))
    monkeypatch.setattr(torch.ops, "lightning_rl", Stand)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    assert speed_ratio() == pytest.approx(6**0.5)
    assert FASTER < 6**0.5
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


class Stand:
    class product:  # noqa: N801  # the operator's name
        default = torch.mm
