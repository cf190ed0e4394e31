"""What is around a CUDA graph, with a stand-in for the GPU: a recording that the CPU plays."""

import torch

from lightning_rl.compiled import cuda_graphs, graphs
from lightning_rl.compiled.cuda_graphs import CapturedGraph, is_worth_capturing
from lightning_rl.system import machine
from lightning_rl.system.machine import MachineSettings
from tests.helpers import assert_same, last, train
from tests.messages import refused


class Recorder:
    """Does as `torch.cuda.graph`: recording runs nothing, and replaying reads and writes in place."""

    def __init__(self, monkeypatch, fails=False):
        self.replays = 0
        self.fails = fails
        monkeypatch.setattr(cuda_graphs, "capture", self.capture)
        monkeypatch.setattr(cuda_graphs, "run_on_side_stream", lambda function: function())

    def capture(self, function):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        # What it computes while it is recorded means nothing on a GPU; here it is undone.
        inputs = [cell.cell_contents for cell in function.__closure__]
        tensors = [t for item in inputs if isinstance(item, list) for t in item]
        before = [tensor.clone() for tensor in tensors]
        outputs = [torch.full_like(output, float("nan")) for output in function()]
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)

        def replay():
            self.replays += 1
            for output, value in zip(outputs, function(), strict=True):
                output.copy_(value)

        return replay, outputs


def add_up(total, addend, factor):
    """Add in place to the first, read the second, and return two."""
    total += addend * factor
    return [total.sum(), addend.clone()]


def test_where_it_cannot_be_captured_the_graph_runs_as_it_is(monkeypatch):
    recorder = Recorder(monkeypatch, fails=True)
    graph = CapturedGraph(add_up, slice(1, 2))
    total, factor = torch.zeros(3), torch.tensor(2.0)
    graph(total, torch.ones(3), factor)
    with refused(UserWarning, names="CUDA graph"):
        graph(total, torch.ones(3), factor)
    graph(total, torch.ones(3), factor)
    assert total.tolist() == [6.0] * 3
    assert recorder.replays == 0


def test_only_small_graphs_on_a_gpu_are_captured(monkeypatch):
    class OnGPU(torch.Tensor):
        is_cuda = True

    small = torch.zeros(10).as_subclass(OnGPU)
    large = torch.empty(cuda_graphs.LARGEST // 4, device="meta").as_subclass(OnGPU)
    assert is_worth_capturing([small])
    assert not is_worth_capturing([small, large])
    assert not is_worth_capturing([small, torch.zeros(1)])
    monkeypatch.setattr(machine, "_in_force", MachineSettings(cuda_graphs=False))
    assert not is_worth_capturing([small])


def test_a_run_is_the_same_with_captured_graphs_also_after_a_resume(
    tmp_path, monkeypatch, traced_only
):
    """Loss, step and values; the resumed optimizer has its state elsewhere."""
    model = {"compile": True, "n_epochs": 2, "lr_schedule": "constant"}
    policy = {"normalize_observation": True}
    plain = train(tmp_path / "plain", env="Pendulum-v1", policy=policy, model=model)[0]
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(graphs, "is_worth_capturing", lambda tensors: True)
    half = {"total_env_steps": 4 * 16 * 3}
    train(tmp_path / "half", env="Pendulum-v1", policy=policy, model=model, data=half)
    assert recorder.replays > 0
    checkpoint = str(last(tmp_path / "half"))
    rest = train(
        tmp_path / "rest", env="Pendulum-v1", policy=policy, model=model, ckpt_path=checkpoint
    )[0]
    assert_same(plain.policy.state_dict(), rest.policy.state_dict())
