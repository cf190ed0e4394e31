"""Step N copies of a MuJoCo model by the C library, on several threads."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.envs.mujoco.model import STATE, RECOMPUTED, Physics


class ThreadedPhysics(Physics):
    """Physics by `mujoco.rollout`; every world has a model of its own if fields are randomised.

    A step is a function of state, control and fields alone: the solver starts without the forces of
    the step before, so a restored state continues bit for bit.

    Args:
        model: the compiled `mujoco.MjModel`.
        num_envs: N.
        substeps: simulation steps per env step.
        fields: names of the model's fields that differ between worlds.
        num_threads: threads; 1: the caller's.
    """

    def __init__(
        self,
        model: Any,
        num_envs: int,
        substeps: int,
        fields: Sequence[str] = (),
        num_threads: int = 1,
    ) -> None:
        import mujoco
        from mujoco import rollout

        self._mujoco, self.model, self.substeps = mujoco, model, substeps
        self.fields = {name: np.array(getattr(model, name)) for name in fields}
        self._recompute = any(name in RECOMPUTED for name in fields)
        # Without fields all worlds share one model.
        count = num_envs if fields else 1
        self._models = [copy.copy(model) for _ in range(count)] * (num_envs // count)
        self._written: dict[str, np.ndarray] = {
            name: np.repeat(value[None], num_envs, 0) for name, value in self.fields.items()
        }
        self._data = [mujoco.MjData(model) for _ in range(num_threads)]
        self._scratch = copy.copy(model), mujoco.MjData(model)
        self._sizes = {"time": 1, "qpos": model.nq, "qvel": model.nv, "act": model.na}
        size = sum(self._sizes.values())
        self._state = np.empty((num_envs, substeps, size))
        self._sensors = np.empty((num_envs, substeps, model.nsensordata))
        self._rollout = rollout.Rollout(nthread=num_threads if num_threads > 1 else 0)

    def step(self, state: Mapping[str, Tensor], ctrl: Tensor) -> dict[str, Tensor]:
        self._write(state)
        start = torch.cat([state[key] for key in STATE], 1).double().numpy()
        control = ctrl.double()[:, None].expand(-1, self.substeps, -1).contiguous().numpy()
        self._rollout.rollout(
            self._models,
            self._data,
            start,
            control,
            nstep=self.substeps,
            state=self._state,
            sensordata=self._sensors if self._sensors.size else None,
        )
        end = torch.from_numpy(self._state[:, -1]).float()
        moved = dict(zip(STATE, end.split(list(self._sizes.values()), 1), strict=True))
        return moved | {"sensordata": torch.from_numpy(self._sensors[:, -1]).float()}

    def sense(self, state: Mapping[str, Tensor]) -> Tensor:
        model, data = self._scratch
        rows = [state[key].double().numpy() for key in STATE]
        values = {name: state[name].double().numpy() for name in self.fields}
        sensors = np.empty((len(rows[0]), model.nsensordata))
        for i, (time, qpos, qvel, act) in enumerate(zip(*rows, strict=True)):
            for name, value in values.items():
                getattr(model, name)[:] = value[i]
            if self._recompute:
                self._mujoco.mj_setConst(model, data)
            self._mujoco.mj_resetData(model, data)
            data.time, data.qpos[:], data.qvel[:], data.act[:] = time[0], qpos, qvel, act
            self._mujoco.mj_forward(model, data)
            sensors[i] = data.sensordata
        return torch.from_numpy(sensors).float()

    def _write(self, state: Mapping[str, Tensor]) -> None:
        """Write the fields that changed since the last step into the worlds' models."""
        changed = set[int]()
        for name, written in self._written.items():
            wanted = state[name].double().numpy()
            differs = (wanted != written).reshape(len(written), -1).any(1)
            for i in differs.nonzero()[0].tolist():
                getattr(self._models[i], name)[:] = written[i] = wanted[i]
                changed.add(i)
        if self._recompute:
            for i in sorted(changed):
                self._mujoco.mj_setConst(self._models[i], self._scratch[1])

    def close(self) -> None:
        self._rollout.close()
