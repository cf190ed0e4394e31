"""Compare each task's first states in LIBERO's simulation with its file, right after they are set.

    python scripts/libero_states.py                           # all 130 tasks
    python scripts/libero_states.py --suites libero_object    # some

In the environment of `constraints-libero.txt`. Also measures steps per CPU second.
"""

import argparse
import os
import time

import numpy as np

from lightning_rl.extensions.libero.env import STILL, LiberoTask, listed_task

SUITES = {
    "libero_spatial": 10,
    "libero_object": 10,
    "libero_goal": 10,
    "libero_10": 10,
    "libero_90": 90,
}
STATES = 2
STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", default=list(SUITES))
    worst, tasks = 0.0, 0
    for suite in parser.parse_args().suites:
        for task_id in range(SUITES[suite]):
            states = listed_task(suite, task_id).states
            env = LiberoTask(suite, task_id, cameras=(), size=64, objects=True, relative=True)
            simulation = env.simulation()
            for state in states[:STATES]:
                simulation.reset()
                simulation.set_init_state(state)
                difference = np.abs(simulation.get_sim_state() - state).max()
                assert difference <= 1e-9, f"{suite} {task_id}: {difference}"
                worst = max(worst, float(difference))
            env.close()
            tasks += 1
            print(f"{suite} {task_id}: {len(states)} states", flush=True)
    print(f"{tasks} tasks: largest difference {worst:.1e}")
    for cameras in ((), ("image",)):
        env = LiberoTask("libero_object", 0, cameras=cameras, size=64, objects=True, relative=True)
        env.reset(seed=0)
        began = time.process_time()
        for _ in range(STEPS):
            env.step(STILL)
        seconds = time.process_time() - began
        print(f"cameras {cameras}: {STEPS / seconds:.1f} steps per CPU second")
        env.close()
    # robosuite's contexts of EGL raise errors at the end of the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
