"""Recognise vector envs of other libraries, and name what replaces them here."""

from typing import Any

import gymnasium

# What replaces an env: parts of messages.
_SINGLE = "partial(GymnasiumEnv, id='...', vectorization='async') with the id of its single env"
_ADAPTER = (
    "partial(TensorSimulator, make=Adapter), where Adapter(num_envs) is a class of yours with "
    "num_envs, device, single_action_space, reset and step, which exchanges tensors [N, ...]"
)
_SIMULATOR = "partial(TensorSimulator, make=...), where make(num_envs) returns"

_KINDS = (
    ("a VecEnv of Stable-Baselines3", ("step_async", "step_wait", "env_is_wrapped"), _SINGLE),
    ("an env of Brax", ("observation_size", "action_size"), _ADAPTER),
    ("an env of TorchRL", ("observation_spec", "action_spec", "rollout"), _ADAPTER),
    ("a pool of EnvPool", ("async_reset", "recv", "send"), "partial(EnvPoolEnv, id='...')"),
    (
        "a VecEnv of rsl_rl",
        ("get_observations", "num_actions", "num_envs"),
        f"{_SIMULATOR} RslRlVecEnv(env), with missing_final='last_observation'",
    ),
    ("a batched env", ("num_envs", "single_action_space"), f"{_SIMULATOR} it"),
)
"""Kinds, the attributes that they have, and what replaces them; the last three may be
`gymnasium.Env`."""


def replacement(env: Any) -> str | None:
    """Return what replaces an env, or its class, that steps N envs; None for other objects."""
    cls = env if isinstance(env, type) else type(env)
    kind = cure = ""
    if issubclass(cls, gymnasium.vector.VectorEnv):
        kind, id = "a vector env of Gymnasium", f"'{cls.__name__}-v0'"
        cure = (
            f"partial(GymnasiumEnv, id={id}, vectorization='vector_entry_point'), after "
            f"gymnasium.register({id}, vector_entry_point={cls.__name__})"
        )
        if cls.__module__.startswith("gymnasium."):
            cure = _SINGLE
    for name, attributes, replaced_by in _KINDS[3:] if issubclass(cls, gymnasium.Env) else _KINDS:
        if not kind and all(hasattr(env, attribute) for attribute in attributes):
            kind, cure = name, replaced_by
    return f"{cls.__name__} is {kind}: pass {cure}." if kind else None
