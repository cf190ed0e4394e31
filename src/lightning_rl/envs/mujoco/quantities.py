"""Physical quantities of a model: fields that belong together change together."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_rl.system.errors import require

QUANTITIES = ("mass", "stiffness", "damping")
"""Names of quantities for the event `randomize`: one number per body, or one per actuator."""

GAINS = ("actuator_gainprm", "actuator_biasprm")
"""The fields of a servo: force = gain * control - stiffness * position - damping * velocity."""

INSTEAD = {
    "body_inertia": "mass",
    "actuator_biasprm": "stiffness or damping",
    "actuator_gear": "stiffness",
}
"""Fields that `randomize` refuses to change alone, and the quantities to change."""


def nominal_of(name: str, parameters: Mapping[str, Tensor], kinds: Sequence[str]) -> Tensor | None:
    """Return the nominal value of a quantity or field; None if there is none.

    Args:
        name: the quantity or field.
        parameters: nominal fields of the model, by name.
        kinds: kind of each actuator's control; see `Layout`.

    Raises:
        ConfigurationError: the field belongs to a quantity.
    """
    servos = [kind for kind in kinds if kind in ("position", "velocity")]
    require(
        name not in INSTEAD or (name != "body_inertia" and not servos),
        f"randomize cannot change {name} alone: other fields of the model would no longer fit. "
        f"Name the quantity {INSTEAD.get(name)}, or return the field from a function of yours.",
    )
    needed = {"stiffness": ["position"], "damping": ["position", "velocity"]}.get(name)
    require(
        needed is None or any(kind in needed for kind in servos),
        f"randomize cannot change the {name} of servos: no actuator of the model is a servo for "
        f"{' or '.join(needed or ())}. For joints use jnt_stiffness and dof_damping.",
    )
    if name in ("stiffness", "damping"):
        return -parameters["actuator_biasprm"][:, 1 if name == "stiffness" else 2]
    return parameters.get("body_mass" if name == "mass" else name)


def fields_of(
    name: str, value: Tensor, fields: Mapping[str, Tensor], kinds: Sequence[str]
) -> dict[str, Tensor]:
    """Return the fields [M, ...] for a value [M, ...] of a quantity or field.

    A body's inertia follows its mass. The gain of a servo stays equal to its stiffness (`position`)
    or damping (`velocity`), so that the servo still goes to its control.

    Args:
        name: the quantity or field.
        value: its value, [M, ...].
        fields: present values [M, ...] of the model's fields, by name.
        kinds: kind of each actuator's control.
    """
    if name in ("mass", "body_mass"):
        mass = fields["body_mass"]
        factor = torch.where(mass > 0, value / mass, 1.0)
        return {"body_mass": value, "body_inertia": fields["body_inertia"] * factor[..., None]}
    servos = {
        1: [i for i, kind in enumerate(kinds) if kind == "position"],
        2: [i for i, kind in enumerate(kinds) if kind == "velocity"],
    }
    if name not in ("stiffness", "damping", GAINS[0]) or not (servos[1] or servos[2]):
        return {name: value}
    gain, bias = (fields[field].clone() for field in GAINS)
    gain = value if name == GAINS[0] else gain
    if name == "damping":
        bias[:, servos[1], 2] = -value[:, servos[1]]
    for column, rows in servos.items():  # of the bias: -stiffness, -damping
        if name == ("stiffness", "damping")[column - 1]:
            gain[:, rows, 0] = value[:, rows]
        bias[:, rows, column] = -gain[:, rows, 0]
    return dict(zip(GAINS, (gain, bias), strict=True))
