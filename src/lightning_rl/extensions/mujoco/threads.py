"""Step N copies of a MuJoCo model by the C library, on several threads."""

import copy
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.extend.envs import import_mujoco
from lightning_rl.extensions.mujoco.model import (
    STATE,
    Layout,
    Physics,
    fields_in,
    write_fields,
)


class ThreadedPhysics(Physics):
    """Physics by `mujoco.rollout`, with `num_threads` threads; 1: the caller's.

    The solver starts every step without the forces of the last step, so that a restored state
    continues bit for bit. Worlds share one model until a state has its own fields.
    """

    def __init__(self, layout: Layout, num_envs: int, substeps: int, num_threads: int = 1) -> None:
        self._mujoco = import_mujoco()
        self._layout, self._num_envs, self._num_threads = layout, num_envs, num_threads
        self._substeps, model = substeps, layout.model
        self._scratch: dict[tuple[str, ...], tuple[Any, Any]] = {}  # by fields, for `sense`
        self._adopt(())
        self._sizes = [1, model.nq, model.nv, model.na]
        self._state = np.empty((num_envs, substeps, sum(self._sizes)))
        self._sensors = np.empty((num_envs, substeps, model.nsensordata))
        # 0: without a pool, in the thread of the caller.
        threads = num_threads if num_threads > 1 else 0
        self._rollout = import_module("mujoco.rollout").Rollout(nthread=threads)

    def step(self, state: Mapping[str, Tensor], ctrl: Tensor) -> dict[str, Tensor]:
        self._write(state)
        start = torch.cat([state[key] for key in STATE], 1).double().numpy()
        control = ctrl.double()[:, None].expand(-1, self._substeps, -1).contiguous().numpy()
        self._rollout.rollout(
            self._models,
            self._data,
            start,
            control,
            nstep=self._substeps,
            state=self._state,
            sensordata=self._sensors if self._sensors.size else None,
        )
        # `float` copies: the next step writes into the same array.
        end = torch.from_numpy(self._state[:, -1]).float()
        entries = dict(zip(STATE, end.split(self._sizes, 1), strict=True))
        return entries | {"sensordata": torch.from_numpy(self._sensors[:, -1]).float()}

    def sense(self, state: Mapping[str, Tensor]) -> Tensor:
        names = fields_in(state)
        if names not in self._scratch:
            model = copy.copy(self._layout.model_for(names))
            self._scratch[names] = model, self._mujoco.MjData(model)
        model, data = self._scratch[names]
        rows = [state[key].double().numpy() for key in (*STATE, "ctrl")]
        fields = {name: state[name].double().numpy() for name in names}
        sensors = np.empty((len(rows[0]), model.nsensordata))
        for i, (time, qpos, qvel, act, ctrl) in enumerate(zip(*rows, strict=True)):
            write_fields(model, data, {name: value[i] for name, value in fields.items()})
            self._mujoco.mj_resetData(model, data)
            data.time, data.qpos[:], data.qvel[:], data.act[:] = time[0], qpos, qvel, act
            data.ctrl[:] = ctrl
            self._mujoco.mj_forward(model, data)
            sensors[i] = data.sensordata
        return torch.from_numpy(sensors).float()

    def _adopt(self, fields: tuple[str, ...]) -> None:
        """Make the models and data of worlds that differ in `fields`."""
        model = copy.copy(self._layout.model_for(fields))
        # Report a world that diverges instead of resetting it.
        model.opt.disableflags |= int(self._mujoco.mjtDisableBit.mjDSBL_AUTORESET)
        if "body_ipos" in fields:  # the mid-phase has the geoms' bounds in the frame of the inertia
            model.opt.disableflags |= int(self._mujoco.mjtDisableBit.mjDSBL_MIDPHASE)
        count = self._num_envs
        self._models = [copy.copy(model) for _ in range(count)] if fields else [model] * count
        self._data = [self._mujoco.MjData(model) for _ in range(self._num_threads)]
        self._constants = self._mujoco.MjData(model)
        self._written = {name: np.array(np.nan) for name in fields}

    def _write(self, state: Mapping[str, Tensor]) -> None:
        names = fields_in(state)
        if names != tuple(self._written):
            self._adopt(names)
        if not names:
            return
        fields = {name: state[name].double().numpy() for name in names}
        differs = np.zeros(self._num_envs, dtype=bool)
        for name, value in fields.items():
            differs |= (value != self._written[name]).reshape(self._num_envs, -1).any(1)
        for i in differs.nonzero()[0].tolist():
            world_fields = {name: value[i] for name, value in fields.items()}
            write_fields(self._models[i], self._constants, world_fields)
        self._written = fields

    def close(self) -> None:
        self._rollout.close()
