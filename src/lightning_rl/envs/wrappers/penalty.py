"""Say what a part of an action costs, apart from the reward of the task."""

from typing import Any

import gymnasium

from lightning_rl.system.errors import ConfigurationError, EnvFaultError


class PenaltyTerms(gymnasium.Wrapper):
    """An env whose infos name penalties, which are weighed and added up as `info["penalty"]`.

    Rollouts and replays hold it beside the reward, and an algorithm counts it where it belongs: in
    the rewards of the critic that commands a gripper, see `GripperSAC`.

    Args:
        env: is stepped.
        terms: weights of what it says in the info of each step, by name; a term that is negative
            already has a positive weight.

    Raises:
        ConfigurationError: where no term is named.
    """

    def __init__(self, env: gymnasium.Env, terms: dict[str, float]) -> None:
        super().__init__(env)
        if not terms:
            raise ConfigurationError(
                "PenaltyTerms without terms reports nothing: name what the env says in its info, "
                "terms: {discrete_penalty: 1.0}, or leave the wrapper out."
            )
        self.metadata = {**env.metadata, "reports_penalty": True}
        self.terms = terms

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and add up the terms.

        Raises:
            EnvFaultError: where the env does not say one of them.
        """
        *result, info = self.env.step(action)
        for name in self.terms:
            if name not in info:
                raise EnvFaultError(
                    f"PenaltyTerms adds up '{name}', and the info of the step has "
                    f"{', '.join(map(repr, info)) or 'nothing'}: name in `terms` what the env says "
                    "at each step."
                )
        penalty = sum(weight * float(info[name]) for name, weight in self.terms.items())
        return *result, {**info, "penalty": penalty}
