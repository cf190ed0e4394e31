"""What a checkpoint holds of a run besides weights and optimizers."""

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl.algorithms.checkpoint_checks import check_checkpoint
from lightning_rl.algorithms.own_numbers import PACKAGE, OwnNumbers, PolicyNumbers
from lightning_rl.checkpoints.format import DESCRIPTION_KEY, SPACES_KEY, WEIGHTS, header, restoring
from lightning_rl.policies.description import describe
from lightning_rl.rollout.spaces import space_data
from lightning_rl.system import ranks
from lightning_rl.system.construction import GIVEN_BY_THE_ENV


class RunState:
    """Counters, random streams and decisions of an algorithm's run.

    Attributes:
        resumed: what this call of the trainer has loaded, until training starts.
        observed: whether the policy's statistics include the rollout of the iteration already.
        policy_numbers: the numbers of a user's policy, in training.
    """

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        self.resumed: dict[str, Any] = {}
        self.observed = False
        self._own_numbers: OwnNumbers | None = None  # of a user's algorithm, in training
        self.policy_numbers: PolicyNumbers | None = None

    def save(self) -> dict[str, Any]:
        """Return the state of all ranks."""
        algorithm = self._algorithm
        guards = {key: loss.statistics.state_dict() for key, loss in algorithm.objectives.items()}
        state = header() | {
            DESCRIPTION_KEY: describe(algorithm.policy),
            SPACES_KEY: {n: space_data(getattr(algorithm.policy, n)) for n in GIVEN_BY_THE_ENV},
            "env_steps": algorithm.env_steps,
            "guards": guards,
            "ranks": ranks.gather_over_ranks(algorithm.rank_state()),
            "computing": algorithm.compilation_state(),
        }
        if self._own_numbers is not None:
            state["numbers"] = ranks.gather_over_ranks(self._own_numbers.state_dict())
        return state

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Restore the counters; `start` restores the rest."""
        algorithm = self._algorithm
        with restoring("weights and counters"):
            saved = check_checkpoint(algorithm, algorithm.policy, checkpoint)
            algorithm.env_steps = int(saved["env_steps"])
            if saved["kind"] == WEIGHTS:
                return
            for name, objective in algorithm.objectives.items():
                objective.statistics.load_state_dict(saved["guards"][name])
            self.resumed = {key: saved.get(key) for key in ("ranks", "computing", "numbers")}

    def start(self) -> None:
        """Restore the numbers of a user's algorithm and the random streams."""
        if self._own_numbers is None and _is_users(self._algorithm):
            self._own_numbers = OwnNumbers(self._algorithm)
        policy = self._algorithm.policy
        self.policy_numbers = PolicyNumbers(policy) if _is_users(policy) else None
        if self._own_numbers is not None and (numbers := self.resumed.get("numbers")):
            with restoring("numbers"):
                self._own_numbers.load_state_dicts(numbers)
        # Restore random streams last, because other setup code may draw from them.
        if "ranks" in self.resumed:
            with restoring("random streams"):
                self._load_rank_states(list(self.resumed["ranks"]))
        self.resumed = {}

    def _load_rank_states(self, states: list[Any]) -> None:
        alike = len(states) == ranks.world_size()
        self._algorithm.load_rank_state(states[ranks.rank()] if alike else None)
        if not alike:
            rank_zero_warn(
                f"The checkpoint has the state of {len(states)} processes, but this run has "
                f"{ranks.world_size()}: weights, optimizer, counters and normalizers are restored; "
                "random streams, episodes and levels of a curriculum start fresh."
            )


def _is_users(part: Any) -> bool:
    return type(part).__module__.partition(".")[0] != PACKAGE
