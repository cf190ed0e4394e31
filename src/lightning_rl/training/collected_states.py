"""Save and restore the states of the collectors and replays of all processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_rl.buffers import Replay
from lightning_rl.checkpoints.format import check_types, restoring
from lightning_rl.collectors import Collector
from lightning_rl.system import ranks


class CollectedStates:
    """The states of a run's collectors and replays: of a checkpoint, until the objects exist."""

    def __init__(self) -> None:
        self._loaded: dict[str, list[dict[str, Any]]] = {}
        self._loaded_from = Path()  # next to the resumed checkpoint
        self._saved_to: Path | None = None  # next to the checkpoint being saved

    def state_dict(self, collector: Collector | None, replay: Replay | None) -> dict[str, Any]:
        """Return the states of all ranks, with replays only within `replay_saved_to`."""
        states: dict[str, Any] = {}
        if collector is not None:
            states["collectors"] = ranks.gather_over_ranks(collector.state_dict())
        if replay is not None and self._saved_to is not None:
            # The gather is a barrier: all ranks write their files before the checkpoint is saved.
            state = replay.state_dict(self._saved_to)
            states["replays"] = ranks.gather_over_ranks(state)
        return states

    @contextmanager
    def replay_saved_to(self, folder: Path) -> Iterator[None]:
        """Include the replay in states within this context; its files go to `folder`."""
        self._saved_to = folder
        try:
            yield
        finally:
            self._saved_to = None

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Keep a saved state, whose files are in `folder`, for `restore`."""
        self._loaded, self._loaded_from = dict(state), folder

    def restore(
        self,
        collector: Collector | None,
        replay: Replay | None,
        restores_replay: bool,
        is_resumed: bool,
    ) -> None:
        """Restore the loaded states, once collector and replay exist.

        `is_resumed` says that the algorithm has been trained before, with or without a checkpoint.
        """
        saved, self._loaded = self._loaded, {}
        rank = ranks.rank()
        states = saved.get("collectors", [])
        if collector is not None and len(states) == ranks.world_size():
            # With another number of ranks, the algorithm warns.
            with restoring("state of collector and envs"):
                check_types(states[rank], collector.state_dict(), "The collector's state")
                collector.load_state_dict(states[rank])
        if replay is None or not (saved or is_resumed):
            return
        states = saved.get("replays", [])
        if not saved:
            reason = "fit got no ckpt_path, or a checkpoint of closed envs"
        elif not states:
            reason = "the checkpoint was saved without it"
        elif not restores_replay:
            reason = "restore_replay is false"
        elif len(states) != ranks.world_size():
            reason = f"the checkpoint has one for each of {len(states)} processes"
        else:
            with restoring("replay"):
                replay.load_state_dict(states[rank], self._loaded_from)
            return
        rank_zero_warn(
            f"The resumed run starts with an empty replay, because {reason}: performance may drop "
            "until it is filled, and the run will differ from an uninterrupted one."
        )
