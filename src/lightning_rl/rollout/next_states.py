"""The states after the steps of a rollout, for rewards of states."""

from typing import Any

from tensordict import TensorDict

from lightning_rl.rollout.contract import next_observations
from lightning_rl.system.errors import EnvFaultError


def next_states(rollout: TensorDict) -> Any:
    """Return the state after each step of [N, T+1]: `next_observations`, without its zeros.

    Envs need not return the final observation of a terminated episode, because it is not
    bootstrapped: zeros stand for it. As a state they would be wrong.

    Raises:
        EnvFaultError: an episode ended without its final observation.
    """
    missing = rollout["done"] & (rollout["final_index"] == 0)
    for row, step in missing[:, :-1].nonzero().tolist()[:1]:
        raise EnvFaultError(
            f"The env ended the episode of env {row} at step {step} of the rollout without "
            "info['final_obs'], but the algorithm rewards the state in which an episode ends. "
            "Return info['final_obs'] [N, ...] from step: the observation before the reset for "
            "every finished env. If a TensorSimulator gives none, set missing_final: "
            "last_observation."
        )
    return next_observations(rollout)
