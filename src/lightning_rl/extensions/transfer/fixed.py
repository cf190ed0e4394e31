"""Make a run of a policy that is not trained."""

from tensordict import TensorDict

from lightning_rl import Algorithm, Policy
from lightning_rl.extend.algorithms import Objective


class FixedPolicy(Algorithm):
    """Play a policy without training it.

    The run of one rollout has a checkpoint, which `rl-cli validate`, `record`, `load_policy`, the
    base of `ResidualActorCritic` and the teacher of `BehaviorCloning` read.

    Args:
        policy: see `OnnxPolicy`.
    """

    uses_replay = False

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, compile=False)

    def configure_objectives(self) -> list[Objective]:
        return []

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.finish_iteration(rollout)
