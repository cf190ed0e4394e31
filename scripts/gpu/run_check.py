"""Run one check in a process of its own; `scripts/gpu_check.py` starts it.

    python scripts/gpu/run_check.py MODULE:FUNCTION DEVICE DIRECTORY [--small]

The function gets the check's `Findings`. Exit code 1 where it raises; the traceback is the last
that it prints to stderr.
"""

import argparse
import faulthandler
import importlib
import signal
from pathlib import Path

from findings import Findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    faulthandler.register(signal.SIGQUIT)  # sent where it hangs: prints where all threads are
    module, _, function = args.target.partition(":")
    findings = Findings(args.device, args.small, args.directory)
    try:
        getattr(importlib.import_module(module), function)(findings)
    except SystemExit as left:  # how rl-cli ends a run that fails; its message is on stderr
        raise RuntimeError(f"rl-cli left with status {left.code}") from left
    finally:
        findings.save()


if __name__ == "__main__":
    main()
