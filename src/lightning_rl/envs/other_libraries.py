"""Recognise vector envs of other libraries, and name what replaces them here."""

from typing import Any

import gymnasium

_SINGLE = "partial(GymnasiumEnv, id='...', vectorization='async') with the id of its single env"
_ADAPTER = (
    "partial(TensorSimulator, make=Adapter), where Adapter(num_envs) is a class of yours with "
    "num_envs, device, single_action_space, reset and step, which exchanges tensors [N, ...]"
)
_SIMULATOR = "partial(TensorSimulator, make=...), where make(num_envs) returns"
_POOL = ("a pool of EnvPool", ("async_reset", "recv", "send"), "partial(EnvPoolEnv, id='...')")
# Kinds, the attributes that they have, and what replaces them; these may be `gymnasium.Env`, too.
_BATCHED = (
    _POOL,
    (
        "a VecEnv of rsl_rl",
        ("get_observations", "num_actions", "num_envs"),
        f"{_SIMULATOR} RslRlVecEnv(env), with missing_final='last_observation'",
    ),
    ("a batched env", ("num_envs", "single_action_space"), f"{_SIMULATOR} it"),
)
_KINDS = (
    ("a VecEnv of Stable-Baselines3", ("step_async", "step_wait", "env_is_wrapped"), _SINGLE),
    ("an env of Brax", ("observation_size", "action_size"), _ADAPTER),
    ("an env of TorchRL", ("observation_spec", "action_spec", "rollout"), _ADAPTER),
    *_BATCHED,
)


def replacement(env: Any) -> str | None:
    """Return what replaces an env, or its class, that steps N envs; None for other objects."""
    cls = env if isinstance(env, type) else type(env)
    id = f"'{cls.__name__}-v0'"
    by_id = (
        _SINGLE
        if cls.__module__.startswith("gymnasium.")
        else (
            f"partial(GymnasiumEnv, id={id}, vectorization='vector_entry_point'), after "
            f"gymnasium.register({id}, vector_entry_point={cls.__name__})"
        )
    )
    kinds: tuple[tuple[str, tuple[str, ...], str], ...] = _KINDS
    if issubclass(cls, gymnasium.vector.VectorEnv):
        kinds = (_POOL, ("a vector env of Gymnasium", (), by_id))
    elif issubclass(cls, gymnasium.Env):
        kinds = _BATCHED
    for kind, attributes, cure in kinds:
        if all(hasattr(env, attribute) for attribute in attributes):
            return f"{cls.__name__} is {kind}: pass {cure}."
    return None
