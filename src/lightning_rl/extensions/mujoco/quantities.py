"""Physical quantities of a model: fields that belong together change together."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_rl.extend.errors import require

INSTEAD = {
    "body_inertia": "mass",
    "actuator_biasprm": "stiffness or damping",
    "actuator_gear": "stiffness",
}
"""Fields that `randomize` refuses to change alone, and the quantities to change."""


Servos = Mapping[int, Sequence[int]]
"""Actuators by the column of the bias that is their negative stiffness (1) or damping (2)."""


def nominal_of(name: str, nominal: Mapping[str, Tensor], servos: Servos) -> Tensor | None:
    """Return the nominal value [...] of a quantity or field; None if there is none.

    Raises:
        ConfigurationError: the field belongs to a quantity, or no actuator has the quantity.
    """
    actuators = {"stiffness": servos[1], "damping": [*servos[1], *servos[2]]}
    require(
        name not in INSTEAD or (name != "body_inertia" and not actuators["damping"]),
        f"randomize cannot change {name} alone: other fields of the model would no longer fit. "
        f"Name the quantity {INSTEAD.get(name)}, or return the field from a function of yours.",
    )
    require(
        bool(actuators.get(name, [0])),
        f"randomize cannot change the {name} of actuators: no actuator of the model is a servo "
        "with it. For joints use jnt_stiffness and dof_damping.",
    )
    if name in actuators:
        return -nominal["actuator_biasprm"][:, 1 if name == "stiffness" else 2]
    return nominal.get("body_mass" if name == "mass" else name)


def fields_of(
    name: str,
    value: Tensor,
    nominal: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    servos: Servos,
) -> dict[str, Tensor]:
    """Return the fields [M, ...] for a value [M, ...] of a quantity or field.

    A body's inertia follows its mass. The gain and the bias of a servo change by the same factor,
    so that it still goes to its control. `nominal` has the model's fields, and `state`
    those that differ between worlds.
    """
    if name in ("mass", "body_mass"):
        mass = nominal["body_mass"]
        # The world has no mass, and 0 / 0 is no factor.
        factor = torch.where(mass > 0, value / mass, 1.0)
        return {"body_mass": value, "body_inertia": nominal["body_inertia"] * factor[..., None]}
    if name not in ("stiffness", "damping", "actuator_gainprm") or not any(servos.values()):
        return {name: value}
    gain, bias = (
        (
            # An earlier event may have changed the fields: start from its values.
            state[field] if field in state.keys() else nominal[field].expand(len(value), -1, -1)
        ).clone()
        for field in ("actuator_gainprm", "actuator_biasprm")
    )
    gain = value.clone() if name == "actuator_gainprm" else gain
    for column, rows in servos.items():
        gain_of, bias_of = nominal["actuator_gainprm"][rows], nominal["actuator_biasprm"][rows]
        if name == "actuator_gainprm":
            factor = value[:, rows, 0] / gain_of[:, 0]
        elif name == ("stiffness", "damping")[column - 1]:
            factor = value[:, rows] / -bias_of[:, column]
        else:
            if name == "damping":  # of position servos: the gain is their stiffness
                bias[:, rows, 2] = -value[:, rows]
            continue
        # The same factor for gain and bias keeps the position at which the servo rests.
        gain[:, rows, 0] = gain_of[:, 0] * factor
        for part in (0, column):
            bias[:, rows, part] = bias_of[:, part] * factor
    return {"actuator_gainprm": gain, "actuator_biasprm": bias}
