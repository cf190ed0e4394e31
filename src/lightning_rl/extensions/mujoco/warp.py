"""Step N copies of a MuJoCo model by MuJoCo Warp, on a GPU or, slowly, on a CPU."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_rl import ConfigurationError
from lightning_rl.extend.errors import EnvFaultError, import_extra
from lightning_rl.extensions.mujoco.model import RECOMPUTED, STATE, Layout, Physics, fields_in

DERIVED = ("body_subtreemass", "body_invweight0", "dof_invweight0", "tendon_invweight0")
"""Fields that `set_const` computes for each world."""

CHECK_EVERY = 32
"""Steps between two reads of the overflow flags, because a read synchronizes."""


class WarpPhysics(Physics):
    """Physics by `mujoco_warp`, in float32; on a GPU the substeps are a CUDA graph.

    For `max_contacts` and `max_constraints` see `MujocoEnv`.
    """

    def __init__(
        self,
        layout: Layout,
        num_envs: int,
        substeps: int,
        device: torch.device | str = "cpu",
        max_contacts: int | None = None,
        max_constraints: int | None = None,
    ) -> None:
        missing = "backend: warp needs MuJoCo Warp: pip install -e '.[warp]'."
        self._warp = import_extra("warp", missing)
        self._engine = import_extra("mujoco_warp", missing)
        self._device = torch.device(device)
        self._substeps = substeps
        self._layout, self._num_envs, self._host = layout, num_envs, None
        self._graph: Any = None
        self._buffers = {"nconmax": max_contacts, "njmax": max_constraints}
        self._warp.config.quiet = True  # it prints a line per kernel module
        self._warp.init()
        with self._on_device():
            try:
                self._adopt(())
            except (NotImplementedError, ValueError) as error:
                raise ConfigurationError(
                    f"MuJoCo Warp cannot simulate this model: {error} Use backend: c."
                ) from error
        self._steps = 0

    def step(self, state: Mapping[str, Tensor], ctrl: Tensor) -> dict[str, Tensor]:
        with self._on_device():
            self._load(state)
            self._ctrl.copy_(ctrl)
            # Without the forces of the last step, a restored state continues in the same way.
            self._warmstart.zero_()
            if self._device.type != "cuda":
                self._advance()
            elif self._graph is None:
                self._advance()  # compile the kernels before the capture
                self._load(state)
                self._warmstart.zero_()
                # CUDA cannot capture its default stream, which torch usually uses.
                stream = self._warp.Stream(str(self._device))
                with self._warp.ScopedStream(stream), self._warp.ScopedCapture() as capture:
                    self._advance()
                self._graph = capture.graph
                self._warp.capture_launch(self._graph)
            else:
                self._warp.capture_launch(self._graph)
        self._steps += 1
        if self._device.type == "cpu" or self._steps % CHECK_EVERY == 1:
            self._refuse_overflow()
        # Copies, because the next step writes into the views.
        entries = {name: view.clone() for name, view in self._views.items()}
        time = self._time.unsqueeze(1).clone()
        return {"time": time, **entries, "sensordata": self._sensors.clone()}

    def sense(self, state: Mapping[str, Tensor]) -> Tensor:
        with self._on_device():
            self._load(state)
            self._ctrl[: len(state["ctrl"])].copy_(state["ctrl"])
            self._engine.forward(self._model, self._data)
        return self._sensors[: len(state["qpos"])].clone()

    def _advance(self) -> None:
        for _ in range(self._substeps):
            self._engine.step(self._model, self._data)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        if (field_names := fields_in(state)) != tuple(self._fields):
            self._adopt(field_names)
        rows = slice(len(state["qpos"]))
        self._time[rows].copy_(state["time"][:, 0])
        for name, view in self._views.items():
            view[rows].copy_(state[name])
        # Compare although it synchronizes: recomputing takes longer than a step.
        stale = any(
            not torch.equal(self._fields[name][rows], state[name])
            for name in field_names
            if name in RECOMPUTED
        )
        for name, view in self._fields.items():
            view[rows].copy_(state[name])
        for name, view in self._mocap.items():
            view[rows] = self._fields[name][rows][:, self._mocap_bodies]
        if stale:
            self._engine.set_const(self._model, self._data)

    def _adopt(self, field_names: tuple[str, ...]) -> None:
        """Make the model and data of worlds that differ in `field_names`."""
        recomputed = any(name in RECOMPUTED for name in field_names)
        names = (*field_names, *(DERIVED if recomputed else ()))
        sizes = dict.fromkeys(names, self._num_envs)
        host = self._layout.model_for(field_names)
        self._model = self._engine.put_model(host, batch_sizes=sizes)
        if host is not self._host:
            self._data = self._engine.make_data(host, nworld=self._num_envs, **self._buffers)
            self._host = host
        # An overflow raises an error later, so hide the line of output per world and step.
        self._model.opt.warn_overflow = 0
        self._fields = {name: self._view(self._model, name) for name in field_names}
        self._views = {name: self._view(self._data, name) for name in STATE[1:]}
        # MuJoCo itself has the places of mocap bodies in the data, from the last reset.
        is_mocap = torch.as_tensor(host.body_mocapid >= 0, device=self._device)
        self._mocap_bodies = is_mocap.nonzero()[:, 0]
        self._mocap = {
            name: self._view(self._data, name.replace("body", "mocap"))
            for name in ("body_pos", "body_quat")
            if name in field_names and host.nmocap
        }
        self._time, self._ctrl, self._sensors, self._overflow, self._warmstart = (
            self._view(self._data, name)
            for name in ("time", "ctrl", "sensordata", "overflow", "qacc_warmstart")
        )
        self._graph = None

    def _refuse_overflow(self) -> None:
        if not self._overflow.any():
            return
        flags = 0
        for flag in self._overflow.unique().tolist():
            flags |= flag
        kind = self._engine.OverflowType
        names = ", ".join(flag.name for flag in kind if flag not in (0, kind.ALL) and flags & flag)
        raise EnvFaultError(
            f"A buffer of MuJoCo Warp overflowed ({names}) with max_contacts "
            f"{self._data.naconmax // self._data.nworld} per world and max_constraints "
            f"{self._data.njmax}: contacts were dropped. Raise both in the env's settings."
        )

    def _view(self, owner: Any, name: str) -> Tensor:
        view: Tensor = self._warp.to_torch(getattr(owner, name))
        return view

    def _on_device(self) -> Any:
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            return self._warp.ScopedStream(self._warp.stream_from_torch(stream))
        return self._warp.ScopedDevice("cpu")
