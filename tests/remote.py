"""A stand-in for Ray: the processes of remote collectors as threads, and all that is sent pickled."""

import pickle
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import cloudpickle

from lightning_rl.extensions.remote import ray, ray_cluster
from lightning_rl.extensions.remote.remote import Answer
from lightning_rl.system.process import flush_denormals


class Process:
    """A collector as a thread, which steps envs as its process would."""

    def __init__(self):
        self.actor = ray.RayActor()
        self.thread = ThreadPoolExecutor(1, "collector", lambda: flush_denormals(True))
        self.killed = False


class Threads:
    """In place of `RayCluster`; what is read of `made` are those that tests look at."""

    made = []  # noqa: RUF012

    def __init__(self, address, count, **room):
        self.connected, self.received_bytes, self.processes = False, 0, []
        self.sent, self.number = [], 0
        Threads.made.append(self)

    def connect(self, setup):
        self.connected = True
        self.setup = cloudpickle.dumps(setup)

    def put(self, weights):
        self.weights = pickle.dumps(ray._to_message(weights), protocol=5)
        self.number += 1
        self.sent.append(sorted(weights))

    def start(self, index, seed, state):
        process = Process()
        self.processes.append(process)
        return process, process.thread.submit(
            process.actor.start, self.setup, ray_cluster.versions(), seed, state
        )

    def collect(self, process, version):
        def work(number):
            assert not process.killed
            return pickle.loads(pickle.dumps(process.actor.collect(number)))

        request = process.thread.submit(work, self.number)
        self.publish(process, version)
        return request

    def publish(self, process, version):
        process.actor.publish(pickle.loads(self.weights), self.number)

    def wait_for_answers(self, requests, timeout_s):
        if not requests:
            time.sleep(min(timeout_s, 0.01))
            return []
        done = wait(requests, timeout_s, FIRST_COMPLETED).done
        return [
            (one, Answer(None, one.exception()) if one.exception() else Answer(one.result()))
            for one in done
        ]

    def fetch(self, state):
        return state

    def kill(self, process):
        process.killed = True
        process.actor.stop()

    def stop(self, processes):
        for process in processes:
            process.actor.stop()

    def disconnect(self):
        self.connected = False
        for process in self.processes:
            process.thread.shutdown(wait=True)
            process.actor.close()
