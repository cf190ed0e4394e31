"""Train in bf16-mixed: act and update alike, keep float32 weights, learn, and have no NaN."""

from collections.abc import Iterator
from typing import Any

import torch
from findings import Findings
from lightning.pytorch import seed_everything
from tensordict import TensorDict
from tests.probes import ActionProbe
from torch import Tensor
from training import train

from lightning_rl import GRPO, PPO, Algorithm

FIRST_RATIO = 1e-5
"""README: by how much the first ratio of an update may differ from 1."""

BF16 = {"precision": "bf16-mixed"}


class Watching:
    """Keep by how much log-probs of acting differ from those of the update, before its steps.

    Attributes:
        same_batch: the most over all rollouts, of as many samples at once as envs act at once.
        minibatch: the same of the first minibatch of each update, which is of another size.
        plain: the same of float32, which is to be something else.
    """

    same_batch = minibatch = plain = 0.0
    begins = False

    def correct_staleness(self, rollout: TensorDict) -> None:
        self.begins = True
        with torch.no_grad():
            for step in rollout[:, :-1].transpose(0, 1):
                self.same_batch = max(self.same_batch, self._gap(step))
                with torch.autocast(self.device.type, enabled=False):  # type: ignore[attr-defined]
                    self.plain = max(self.plain, self._gap(step))
        super().correct_staleness(rollout)  # type: ignore[misc]

    def minibatches(self, *args: Any) -> Iterator[TensorDict]:
        for minibatch in super().minibatches(*args):  # type: ignore[misc]
            if self.begins:
                with torch.no_grad():
                    self.minibatch = max(self.minibatch, self._gap(minibatch))
                self.begins = False
            yield minibatch

    def _gap(self, samples: TensorDict) -> float:
        """Return the largest |ratio - 1|."""
        log_prob: Tensor = self.policy.evaluate_actions(samples)["sample_log_prob"]  # type: ignore[attr-defined]
        return float((log_prob - samples["sample_log_prob"]).expm1().abs().max())


class WatchedPPO(Watching, PPO):
    pass


class WatchedGRPO(Watching, GRPO):
    pass


def bf16(findings: Findings) -> None:
    for algorithm in (WatchedPPO, WatchedGRPO):
        _ratios(findings, algorithm)
    _learns(findings)


def _ratios(findings: Findings, algorithm: type[Algorithm]) -> None:
    name = "PPO" if issubclass(algorithm, PPO) else "GRPO"
    run = train(findings, f"{name} bf16", algorithm=algorithm, trainer=BF16)
    module = run.module
    numbers = {key: getattr(module, key) for key in ("same_batch", "minibatch", "plain")}
    most = max(module.same_batch, module.minibatch)
    findings.add(
        f"{name} bf16-mixed: first ratio",
        most <= FIRST_RATIO < module.plain,
        f"off by {module.same_batch:.2g}, in minibatches {module.minibatch:.2g}; "
        f"float32 would be off by {module.plain:.2g}",
        f"off by at most {FIRST_RATIO:g}",
        **numbers,
    )
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    finite = all(p.isfinite().all() for p in module.parameters())
    findings.add(
        f"{name} bf16-mixed: weights",
        dtypes == {"float32"} and finite and module.skipped_steps == 0,
        f"{', '.join(sorted(dtypes))}, {'all finite' if finite else 'NaN'}, "
        f"{module.skipped_steps} of {module.optimizer_steps} steps skipped",
        "float32, all finite, 0 skipped",
    )


def _learns(findings: Findings) -> None:
    """Learn to name the sign that it is shown, eagerly and, on a GPU, compiled too."""
    for compile in (False, True) if findings.device == "cuda" else (False,):
        seed_everything(1, verbose=False)
        run = train(
            findings,
            f"ActionProbe bf16{' compiled' if compile else ''}",
            env=ActionProbe,
            policy={"hidden_sizes": (16,), "normalize_observation": False},
            model={"learning_rate": 3e-3, "n_epochs": 4, "batch_size": 128, "compile": compile}
            | {"normalize_reward": False},
            data={"num_envs": 16, "buffer_size": 32},
            trainer=BF16,
            iterations=40,
        )
        policy = run.module.policy
        asked = torch.tensor([[1.0], [-1.0]], device=policy.version.device)
        acted = policy.get_action(TensorDict({"observation": asked}, [2]), deterministic=True)
        sure = policy.evaluate_actions(acted)["sample_log_prob"].exp().min().item()
        right = acted["action"].tolist() == [1, 0]
        findings.add(
            f"bf16-mixed learns{', compiled' if compile else ''}",
            right and sure > 0.95,
            f"{'right' if right else 'wrong'}, with probability {sure:.3f}",
            "right, with probability above 0.95",
            probability=sure,
        )
