"""Run `rl-cli collect`: collect on this machine, for a learner on another machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from lightning_rl import ConfigurationError
from lightning_rl.extend.cli import NEEDED, CommandLine, Option, handle_signals, parse_options
from lightning_rl.extend.files import tell
from lightning_rl.extensions.remote.ray import resource_of
from lightning_rl.extensions.remote.ray_cluster import (
    check_answers,
    hide_token,
    prepare_environment,
    refuse_without_ray,
    why_not_joined,
)

OPTIONS = {
    "address": Option(
        str, NEEDED, "host:port of the cluster's head, as `ray start --head` prints it"
    ),
    "run": Option(str, NEEDED, "name of the learner's data.collector.run"),
    "num_gpus": Option(float, 0.0, "number of GPUs that the collector may use"),
}
DESCRIPTION = "Join this machine to a Ray cluster, and collect for runs with this name."

STARTED = "Ray runtime started."
"""Line of `ray start` after the machine has joined."""


def collect(options: Sequence[str], command_line: CommandLine) -> None:
    """Join a Ray cluster, and stay until a signal arrives or the cluster ends."""
    settings = parse_options("collect", DESCRIPTION, OPTIONS, options)
    refuse_without_ray("rl-cli collect")
    check_answers(settings.address)
    _run_until_stopped(settings.address, settings.run, settings.num_gpus)


def _run_until_stopped(address: str, run: str, num_gpus: float) -> None:
    prepare_environment(alone=False)
    hide_token()
    # No CPUs, so that Ray places no other collectors here.
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}"]
    # --block: the process of `ray start` lives as long as the connection to the cluster.
    command += ["--num-cpus=0", f"--num-gpus={num_gpus:g}", "--block", "--disable-usage-stats"]
    command += [f"--resources={json.dumps({resource_of(run): 1})}"]
    # Like `rl-cli fit`, import the env's module from the working directory.
    places = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": places},
    )
    stopped = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        process.terminate()

    handle_signals((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), stop)
    assert process.stdout is not None
    joined, output = False, ""
    for line in process.stdout:
        if not joined:
            # Errors are part of this output: keep it for the message until the machine joins.
            output += line
        if STARTED in line:
            joined = True
            tell(f"Joined {address}: collects for runs with data.collector.run: {run}")
    process.wait()
    if stopped:
        return
    if not joined:
        raise ConfigurationError(why_not_joined(address, RuntimeError(output)))
    raise ConfigurationError(
        f"The cluster at {address} has ended, or the connection is lost. Start the cluster's head "
        "again, then this command."
    )
