"""Products that oneDNN computes in a compiled graph are those of torch."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_rl.algorithms import graphs, products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


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


@pytest.mark.parametrize(("samples", "large"), [(2048, 3), (512, 2), (64, 0)])
def test_large_products_of_a_graph_go_to_onednn_and_give_the_same(samples, large, monkeypatch):
    """The middle layer of 128 x 128: forward, gradient of its input, and that of its weights."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 128), nn.ELU(), nn.Linear(128, 128), nn.ELU())
    network.append(nn.Linear(128, 1))
    function = gradients_of(network)
    inputs = [*(p.detach() for p in network.parameters()), torch.randn(samples, 3)]
    expected = function(*inputs)
    traced = make_fx(function)(*inputs)
    assert products.route_products(traced) == large
    for name in (True, False):
        monkeypatch.setattr(graphs, "onednn_is_faster", lambda name=name: name)
        compiled = graphs.compile_graph(function, inputs)(*inputs)
        for found, value in zip(compiled, expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    for found, value in zip(traced(*inputs), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def test_other_products_stay_where_they_are():
    a, b, bias = torch.randn(512, 128), torch.randn(128, 128), torch.randn(512, 1)
    for function, inputs in {
        "double": (torch.mm, (a.double(), b.double())),
        "a bias that is no row": (torch.addmm, (bias, a, b)),
        "scaled": (lambda x, y, z: torch.addmm(x, y, z, beta=0.5), (bias[:128, 0], a, b)),
    }.values():
        assert products.route_products(make_fx(function)(*inputs)) == 0
