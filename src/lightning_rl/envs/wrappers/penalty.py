"""Report the penalty of part of an action, separate from the task's reward."""

from typing import Any

import gymnasium

from lightning_rl.system.errors import ConfigurationError, EnvFaultError


class PenaltyTerms(gymnasium.Wrapper):
    """An env whose infos name penalties; reports their weighted sum as `info["penalty"]`.

    Rollouts and replays store it next to the reward. `GripperSAC` adds it only to the rewards of
    the gripper's critic.

    Args:
        env: the wrapped env.
        terms: weights by info key; a term that is already negative needs a positive weight.

    Raises:
        ConfigurationError: no term is named.
    """

    def __init__(self, env: gymnasium.Env, terms: dict[str, float]) -> None:
        super().__init__(env)
        if not terms:
            raise ConfigurationError(
                "PenaltyTerms has no terms: name entries of the env's info, terms: "
                "{discrete_penalty: 1.0}, or remove the wrapper."
            )
        self.metadata = {**env.metadata, "reports_penalty": True}
        self.terms = terms

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *result, info = self.env.step(action)
        for name in self.terms:
            if name not in info:
                raise EnvFaultError(
                    f"PenaltyTerms adds up '{name}', but the info of the step has "
                    f"{', '.join(map(repr, info)) or 'nothing'}: name in `terms` entries that the "
                    "env reports at each step."
                )
        penalty = sum(weight * float(info[name]) for name, weight in self.terms.items())
        return *result, {**info, "penalty": penalty}
