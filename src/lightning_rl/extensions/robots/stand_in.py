"""A stand-in for a robot with two joints and a camera: for tests, and to try a config without one.

Like `bus`, it uses nothing of this package, so that its process starts quickly.
"""

import json
import time
from typing import Any

import numpy as np

JOINTS = ("shoulder.pos", "elbow.pos")
"""Names of the joints."""


class StandInArm:
    """An arm with the methods of LeRobot's `Robot`, which reaches each target immediately.

    Positions are in degrees and begin at 0.

    Args:
        picture: height and width of the camera's picture; 0: no camera.
        journal: file to which each call is appended as a line of JSON with its time.
        fails: {call number: what happens} for calls of `get_observation`, from 0: `drop` loses the
            frame, `lost` loses the connection for good, a number sleeps so many seconds.
    """

    def __init__(
        self, picture: int = 0, journal: str | None = None, fails: dict[int, Any] | None = None
    ) -> None:
        self._picture, self._journal = picture, journal
        # Keys that come from JSON are texts.
        self._fails = {int(number): failure for number, failure in (fails or {}).items()}
        self._at = dict.fromkeys(JOINTS, 0.0)
        self._reads = 0
        self._lost = False
        self.is_connected = False
        self.is_calibrated = True

    @property
    def action_features(self) -> dict[str, Any]:
        """Types of the actions."""
        return dict.fromkeys(JOINTS, float)

    @property
    def observation_features(self) -> dict[str, Any]:
        """Types of the numbers, and the shape of the picture."""
        camera = {"front": (self._picture, self._picture, 3)} if self._picture else {}
        return {**self.action_features, **camera}

    def connect(self, calibrate: bool = True) -> None:
        """Connect."""
        self.is_connected = True
        self._note("connect")

    def get_observation(self) -> dict[str, Any]:
        """Return the positions and the picture.

        Raises:
            ConnectionError: as `fails` says.
        """
        number, self._reads = self._reads, self._reads + 1
        failure = self._fails.get(number)
        # A lost connection stays lost.
        self._lost |= failure == "lost"
        if self._lost or failure == "drop":
            raise ConnectionError("no status packet")
        if failure is not None:
            time.sleep(float(failure))
        pixels = {}
        if self._picture:
            # The frame's number is its brightness, so that a repeated frame shows.
            pixels["front"] = np.full((self._picture,) * 2 + (3,), number % 256, np.uint8)
        return {**self._at, **pixels}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        """Move, and return the action.

        Raises:
            ConnectionError: the connection is lost.
        """
        if self._lost:
            raise ConnectionError("no status packet")
        self._at = {name: float(action[name]) for name in JOINTS}
        self._note("send", **self._at)
        return action

    def disconnect(self) -> None:
        """Switch the motors off."""
        self.is_connected = False
        self._note("disconnect")

    def _note(self, call: str, **values: float) -> None:
        if self._journal is not None:
            # Open and close for each line: the process may be killed at any time.
            with open(self._journal, "a") as file:
                file.write(json.dumps({"call": call, "at": time.time(), **values}) + "\n")


class StandInLeader:
    """A leader arm with the methods of LeRobot's `Teleoperator`.

    Args:
        at: position of both joints, in degrees.
        events: whether it has `get_teleop_events`, and takes over.
        ends: {call number: event} of calls of `get_teleop_events`, from 1.
    """

    def __init__(
        self, at: float = 5.0, events: bool = False, ends: dict[int, str] | None = None
    ) -> None:
        self._at, self._reads = at, 0
        # Keys that come from JSON are texts.
        self._ends = {int(number): event for number, event in (ends or {}).items()}
        # Only then, because `bus.Leader` asks whether the method exists.
        if events:
            self.get_teleop_events = self._events

    @property
    def action_features(self) -> dict[str, Any]:
        """Types of the actions."""
        return dict.fromkeys(JOINTS, float)

    def connect(self, calibrate: bool = True) -> None:
        """Connect."""

    def get_action(self) -> dict[str, float]:
        """Return the positions."""
        return dict.fromkeys(JOINTS, self._at)

    def disconnect(self) -> None:
        """Disconnect."""

    def _events(self) -> dict[str, bool]:
        self._reads += 1
        final_event = {self._ends[self._reads]: True} if self._reads in self._ends else {}
        return {"is_intervention": True, "success": False, **final_event}


def point_up(observation: Any) -> Any:
    """Help, as a script: move a distant shoulder towards 30 degrees.

    `observation` [2] are the positions; the action is a move.
    """
    distance = 30.0 - float(observation[0])
    # Within 20 degrees the policy acts.
    return [np.clip(distance / 5.0, -1.0, 1.0), 0.0] if abs(distance) > 20.0 else None
