"""Be a trial of a sweep, as a process of its own: PARENT_PID LOG ARGUMENTS of `rl-cli`."""

import sys
from pathlib import Path

from lightning_rl.cli.app import run
from lightning_rl.sweeps.trials import be_trial

if __name__ == "__main__":
    be_trial(run, sys.argv[3:], None, Path(sys.argv[2]), int(sys.argv[1]))
