"""Products that oneDNN computes in a compiled graph are those of torch."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_rl.compiled import onednn
from tests.helpers import compile_function


@pytest.fixture
def product():
    if not onednn.load_operator():
        pytest.skip("the operator cannot be compiled here")
    return torch.ops.lightning_rl.product.default


def transposed(*shape):
    return torch.randn(shape[::-1]).t()


def padded(rows, columns):
    return torch.randn(rows + 1, columns + 3)[1:, 2:-1]


def scattered(rows, columns):
    return torch.randn(2 * rows, 3 * columns)[::2, ::3]


def repeated(rows, columns):
    return torch.randn(rows, 1).expand(rows, columns)


LAYOUTS = [torch.randn, transposed, padded, scattered, repeated]


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(1, 1, 1), (5, 7, 3), (64, 17, 64), (64, 300, 17), (17, 300, 64), (700, 20, 33)],
)
def test_matrices_of_any_layout_are_multiplied(product, rows, inner, columns):
    for left in LAYOUTS:
        for right in LAYOUTS:
            a, b = left(rows, inner), right(inner, columns)
            expected = a.double() @ b.double()
            torch.testing.assert_close(
                product(a, b).double(), expected, rtol=0, atol=1e-4,
                msg=lambda m, pair=(left, right): f"{[x.__name__ for x in pair]}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(2500, 70, 40), (40, 9000, 70), (70, 9000, 20), (3, 200_000, 2), (300, 260, 270)],
    ids=["many rows", "a long sum", "swapped", "the longest sum", "wide"],
)
def test_threads_share_large_products_and_give_the_same_bits(product, rows, inner, columns):
    a, b = transposed(rows, inner), torch.randn(inner, columns)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(product(a, b))
    finally:
        torch.set_num_threads(threads)
    exact = (a.double() @ b.double()).float()
    torch.testing.assert_close(results[0], exact, rtol=1e-4, atol=1e-4 * inner**0.5)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(2, 3), torch.ones(2, 3)),
        (torch.ones(2, 3).double(), torch.ones(3, 2).double()),
        (torch.ones(3), torch.ones(3, 2)),
    ],
)
def test_what_is_no_product_of_float32_matrices_is_refused(product, a, b):
    with pytest.raises(RuntimeError, match="lightning_rl::product"):
        product(a, b)


def gradients_of(network):
    """Return a function of parameters and samples that gives a loss and its gradients."""
    names = [name for name, _ in network.named_parameters()]

    def function(*inputs):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:-1]]
        with torch.enable_grad():
            output = functional_call(network, dict(zip(names, leaves, strict=True)), (inputs[-1],))
            loss = output.square().mean()
            return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return function


@pytest.mark.parametrize(
    "samples",
    [512, *(pytest.param(number, marks=pytest.mark.slow) for number in (2048, 64))],
)
def test_the_products_of_a_graph_go_to_onednn_and_give_the_same(product, samples):
    """Three layers forward, their weights, and the inputs of two; but none with a vector."""
    network = nn.Sequential(nn.Linear(3, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU())
    network.append(nn.Linear(128, 1))
    function = gradients_of(network)
    inputs = [*(p.detach() for p in network.parameters()), torch.randn(samples, 3)]
    expected = function(*inputs)
    traced = make_fx(function)(*inputs)
    assert onednn.route_products(traced) == 5
    for way in ("onednn", "mkl"):
        compiled = compile_function(function, inputs, way)(*inputs)
        for found, value in zip(compiled, expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    for found, value in zip(traced(*inputs), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def test_other_products_stay_where_they_are():
    a, b, bias = torch.randn(512, 128), torch.randn(128, 128), torch.randn(512, 1)
    for function, inputs in {
        "double": (torch.mm, (a.double(), b.double())),
        "scaled": (lambda x, y, z: torch.addmm(x, y, z, beta=0.5), (bias[:128, 0], a, b)),
        "a vector": (torch.mm, (a, b[:, :1])),
    }.values():
        assert onednn.route_products(make_fx(function)(*inputs)) == 0


def test_without_a_compiler_the_products_stay_with_mkl(monkeypatch, caplog):
    monkeypatch.setattr(onednn, "SOURCE", onednn.SOURCE.with_suffix(".missing"))
    assert not onednn.load_operator.__wrapped__()
    assert "stay with MKL" in caplog.text
