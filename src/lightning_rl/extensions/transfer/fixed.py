"""Make a run of a policy that is not trained."""

from tensordict import TensorDict

from lightning_rl import Algorithm, Policy
from lightning_rl.extend.algorithms import Objective
from lightning_rl.extend.errors import require


class FixedPolicy(Algorithm):
    """Play a policy without training it.

    The run of one rollout has a checkpoint, which `rl-cli validate`, `record`, `load_policy`, the
    base of `ResidualActorCritic` and the teacher of `BehaviorCloning` read.

    Args:
        policy: see `OnnxPolicy`.

    Raises:
        ConfigurationError: in `fit`, with several processes.
    """

    uses_replay = False

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, compile=False)

    def configure_objectives(self) -> list[Objective]:
        return []

    def setup(self, stage: str) -> None:
        super().setup(stage)
        require(
            stage != "fit" or self.trainer.world_size == 1,
            f"FixedPolicy trains nothing, but has {self.trainer.world_size} processes: set "
            "trainer.devices: 1.",
        )

    def training_step(self, rollout: TensorDict, batch_idx: int) -> None:
        self.finish_iteration(rollout)
