"""Drive a robot of LeRobot from this package, in LeRobot's own virtual environment.

    python scripts/lerobot_arm.py PYTHON_OF_LEROBOT

The robot is a subclass of LeRobot's `Robot` without motors, and the leader one of its
`Teleoperator`, made and run by that interpreter as an SO-101 would be. Prints what was done.
"""

import os
import sys
import tempfile
from pathlib import Path

import gymnasium
import numpy as np

import lightning_rl  # noqa: F401  # registers the env
from lightning_rl import Intervention, Teleoperator

DRIVER = """
import dataclasses
from lerobot.robots import Robot, RobotConfig
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig

NAMES = [f"motor_{i}.pos" for i in range(6)]


@RobotConfig.register_subclass("without_motors")
@dataclasses.dataclass
class ArmConfig(RobotConfig):
    pass


@TeleoperatorConfig.register_subclass("without_motors")
@dataclasses.dataclass
class LeaderConfig(TeleoperatorConfig):
    pass


class Shared:
    is_connected = False
    is_calibrated = True
    action_features = observation_features = dict.fromkeys(NAMES, float)
    feedback_features = {}

    def connect(self, calibrate=True):
        self.is_connected = True

    def disconnect(self):
        self.is_connected = False

    def get_action(self):
        return dict.fromkeys(NAMES, 9.0)

    def calibrate(self): ...

    def configure(self): ...

    def send_feedback(self, feedback): ...


class Arm(Shared, Robot):
    config_class, name = ArmConfig, "without_motors"
    at = dict.fromkeys(NAMES, 0.0)

    def get_observation(self):
        assert self.is_connected
        return dict(self.at)

    def send_action(self, action):
        self.at = dict(action)
        return action


class Leader(Shared, Teleoperator):
    config_class, name = LeaderConfig, "without_motors"


def arm(directory):
    return Arm(ArmConfig(id="arm", calibration_dir=__import__("pathlib").Path(directory)))


def leader(directory):
    return Leader(LeaderConfig(id="leader", calibration_dir=__import__("pathlib").Path(directory)))
"""


def main() -> None:
    """Make 30 steps with the leader in charge."""
    python = str(Path(sys.argv[1]).absolute())
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        Path("driver_of_lerobot.py").write_text(DRIVER)
        given = {"kwargs": {"directory": directory}, "python": python}
        source = Teleoperator("driver_of_lerobot.leader", **given)
        source.take_charge()
        limits = {f"motor_{i}.pos": (-50.0, 50.0) for i in range(6)}
        env = gymnasium.make(
            "lightning_rl/Robot-v0",
            robot="driver_of_lerobot.arm",
            robot_kwargs={"directory": directory},
            python=python,
            limits=limits,
            max_speed=15.0,
        )
        env = Intervention(env, source)
        try:
            positions = [env.reset(seed=0)[0]]
            for _ in range(30):
                positions.append(env.step(np.zeros(6, np.float32))[0])
        finally:
            env.close()
    steps = np.diff(np.stack(positions), axis=0)
    print(f"from {positions[0]} to {positions[-1]}, at most {steps.max():.3f} per step")
    assert np.allclose(positions[-1], 9.0)
    assert np.allclose(steps.max(), 0.5)


if __name__ == "__main__":
    main()
