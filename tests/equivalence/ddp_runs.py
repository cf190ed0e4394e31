"""Run on each of two ranks what test_ddp.py asks about, all in one launch, and leave the findings in files.

python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.equivalence.ddp_runs DIRECTORY all

does the same outside of the suite.
"""

import os
import shutil
import signal
import sys
from contextlib import chdir, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import lightning_rl as rl
from lightning_rl.algorithms.rollout_evaluation import states_of
from lightning_rl.cli.app import RLCLI
from lightning_rl.collectors import AsyncCollector, Collector, SyncCollector
from lightning_rl.compiled import graphs
from lightning_rl.extensions.tasks.base import Pictures
from lightning_rl.extensions.tasks.probes import TwoDoors
from lightning_rl.optim.update import Update
from lightning_rl.system import ranks
from lightning_rl.system.errors import ConfigurationError
from tests import (
    goal_envs,  # noqa: F401  # registers an env
    stranger,
)
from tests.arms import helped_arm, mixed
from tests.callbacks import callback, fail, signal_at
from tests.equivalence.features import ALL, OwnAlgorithm
from tests.equivalence.test_allowed import RUNS as ALLOWED
from tests.equivalence.test_exploring import MODELS as EXPLORING
from tests.equivalence.test_exploring import run_of as exploring
from tests.equivalence.test_mujoco_env import RUN as MUJOCO
from tests.equivalence.test_terms import RUN as TERMS
from tests.golden.make_lerobot import fill
from tests.helpers import (
    last,
    make_collector,
    make_data,
    make_ppo,
    tensors_of,
    train,
    uncompiled_traces,
)
from tests.variants import after, before, passing, variant

GOLDEN = Path(__file__).parents[1] / "golden"

FIVE = {"num_envs": 2, "total_env_steps": 2 * 2 * 16 * 5, "iterations_per_epoch": 10}
"""Five iterations, which are one epoch."""
PENDULUM = {
    "env": "Pendulum-v1",
    "policy": {"normalize_observation": True},
    "model": {"normalize_reward": True, "n_epochs": 2, "batch_size": 8},
    "data": FIVE,
}
OFF_POLICY = {
    "env": "Pendulum-v1",
    "policy": {"normalize_observation": True, "value_atoms": rl.ValueAtoms(11, 5.0)},
    "model": {"algorithm": rl.SAC, "updates_per_env_step": 0.1, "normalize_reward": True},
    "data": FIVE | {"replay": partial(rl.ReplayBuffer, capacity=100), "total_env_steps": 384},
}
HINDSIGHT = OFF_POLICY | {
    "env": "tests/Point-v0",
    "data": OFF_POLICY["data"] | {"replay": partial(rl.HindsightReplay, capacity=100)},
}
HELPED = {
    "PPO": {"model": {"n_epochs": 2, "batch_size": 8}},
    "SAC": {
        "policy": {"normalize_observation": True},
        "model": {"algorithm": rl.GripperSAC, "updates_per_env_step": 0.1},
        "data": {"replay": mixed},
    },
}
"""Of an arm that a script takes over, on each rank at steps of its own."""
SIX = {
    "num_envs": 2,
    "total_env_steps": 2 * 2 * 16 * 6,
    "num_eval_episodes": 10,
    "num_eval_envs": 3,
}


def rehearse(module, rollout, batch_idx):
    """Keep the rollouts in a replay, and report what it draws."""
    module.replay.extend(rollout)
    (drawn,) = module.replay.batches(1, 8, n_steps=2)
    module.statistics.set("drawn", drawn["reward"].mean())


RESUMED = PENDULUM | {
    "model": PENDULUM["model"]
    | {"algorithm": variant(before(rl.PPO, training_step=rehearse), uses_replay=True)},
    "data": SIX | {"replay": partial(rl.ReplayBuffer, capacity=60)},
}
N = 4
"""Envs of each rank where two ranks are compared with one process, which has twice as many."""
GROUPS = {"algorithm": rl.GRPO, "group_size": 2}
SAME_ROLLOUTS = {
    "ppo": {
        "policy": {"normalize_observation": True},
        "model": {"normalize_reward": True, "vf_coef": 0.5},
    },
    "ppo rollout": {"model": {"normalize_advantage": "rollout"}},
    "grpo": {"policy": {"normalize_observation": True}, "model": GROUPS},
    "grpo trajectory": {"model": GROUPS | {"aggregation": "trajectory"}},
    "ppo recurrent": {
        "policy": {"memory": partial(rl.LSTM, size=8)},
        "model": {"sequence_length": 8, "burn_in": 3},
    },
    "grpo recurrent": {
        "policy": {"memory": partial(rl.GRU, size=8)},
        "model": GROUPS | {"sequence_length": 4, "filter_groups": True},
    },
    "ppo warm-up": {
        "model": {
            "critic_warmup_iterations": 2,
            "optimizer": partial(torch.optim.AdamW, weight_decay=0.1),
        }
    },
    "ppo with an encoder": {
        "policy": {"encoder": partial(rl.PerceptronEncoder, hidden_sizes=(8,), normalize=True)},
        "model": {},
    },
    "ppo warm-up, compiled": {"model": {"critic_warmup_iterations": 2, "compile": True}},
    "grpo, one rank without samples or compiler": {
        "model": GROUPS | {"filter_groups": True, "compile": True}
    },
    "grpo, one rank without samples": {"model": GROUPS | {"filter_groups": True}},
}


class Replayed(Collector):
    """Hand out rollouts from a file: to each rank its rows."""

    acted_by_policy = False  # but another one's

    def __init__(self, path, context):
        super().__init__(context)
        env, policy = context.env, context.policy
        rows = slice(ranks.rank() * env.num_envs, (ranks.rank() + 1) * env.num_envs)
        self.rollouts = [rollout[rows] for rollout in torch.load(path, weights_only=False)]
        if "state" in policy.extra_fields:
            shape, dtype = policy.extra_fields["state"]
            for rollout in self.rollouts:
                rollout["state"] = torch.zeros(*rollout.shape, *shape, dtype=dtype)  # of starts
                rollout["state"] = states_of(policy, rollout)
        self.reports_success = True

    def collect(self):
        return self.count_rollout(self.rollouts.pop(0).clone(), envs_were_reset=False, reports={})


def collected(env, policy, steps=16, count=3):
    """Collect rollouts of an env as if the policy was updated after each."""
    collector = make_collector(SyncCollector, env, policy, steps, seed=5)
    rollouts = [collector.collect().clone() for _ in range(count)]
    for version, rollout in enumerate(rollouts):
        rollout["policy_version"].fill_(version)
    return rollouts


def record_rollouts(path):
    """Collect rollouts of 2N envs with some policy, and invent what became of them."""
    torch.manual_seed(1)
    data = make_data("CartPole-v1", num_envs=2 * N)
    rollouts = collected(data._env, make_ppo(data).policy, count=4)
    for rollout in rollouts:
        done = torch.rand(rollout.shape) < 0.1
        done[N:, -2] = True  # a group that has not ended is no group that agrees
        rollout["terminated"], rollout["truncated"] = done, torch.zeros_like(done)
        rollout["done"] = done
        rollout["reward"] = torch.rand_like(rollout["reward"])
        # Of the groups of two, each on rank 0 has one success, and none of those on rank 1.
        succeeds = torch.arange(2 * N) % 2 * (torch.arange(2 * N) < N)
        rollout["success"] = done & succeeds[:, None].bool()
    data.close()
    torch.save(rollouts, path)


def data_of(processes, iterations, collector, **more):
    """Settings of the data of one of some processes, which share 2N envs."""
    settings = {"num_envs": 2 * N // processes, "total_env_steps": 2 * N * 16 * iterations}
    return settings | {"collector": collector} | more


def trainer_of(processes, **more):
    return {"limit_val_batches": 0} | (TWO if processes == 2 else {}) | more


def same_rollouts(directory, name, processes):
    """Train on the recorded rollouts: `batch_size` is that of each process."""
    settings, rollouts = SAME_ROLLOUTS[name], partial(Replayed, directory / "rollouts.pt")
    return train(
        directory / f"{name} {processes}",
        data=data_of(processes, 4, rollouts, iterations_per_epoch=4),
        policy=settings.get("policy"),
        model=settings["model"] | {"n_epochs": 3, "batch_size": 2 * N * 16 // processes},
        trainer=trainer_of(processes),
    )[0]


SAME_BATCHES = {
    "sac": {
        "env": "Pendulum-v1",
        "policy": {"num_critics": 3, "normalize_observation": True},
        "model": {"num_target_critics": 2, "policy_delay": 2, "n_steps": 2, "max_grad_norm": 1.0},
    },
    "td3": {"env": "Pendulum-v1", "algorithm": rl.TD3},
    "sac of pictures": {
        "env": partial(rl.PointMass, max_episode_steps=9, pictures=Pictures(12, 2)),
        "policy": {"encoder": partial(rl.NatureCNN, size=8, channels=(4,), kernels=(4,), strides=(2,))},
        "model": {"random_shift": 2},
    },
    "fql": {"env": "Pendulum-v1", "algorithm": rl.FQL, "policy": {"chunk_size": 3}},
    "qc": {"env": "Pendulum-v1", "algorithm": rl.QC, "policy": {"num_samples": 3}, "model": {"target_samples": 2}},
    "dqn": {
        "env": "CartPole-v1",
        "algorithm": rl.DQN,
        "policy": {"dueling": True},
        "model": {"target_update_interval": 2, "n_steps": 2},
    },
    "sac that steers a flow": {
        "env": lambda num_envs: rl.ActionChunk(num_envs, TwoDoors, 1),
        "policy": {
            "policy_class": rl.NoiseActorCritic,
            "base": lambda *spaces: rl.VLAPolicy(*spaces, rl.PerceptronBackbone((8,), 2), head="flow"),
        },
        "model": {"random_env_steps": 0, "learning_starts": 32},
    },
}  # fmt: skip
"""What is drawn from the replay, and for it, is drawn once for all ranks, and each has its part."""


class OfAll(rl.ReplayBuffer):
    """Holds the rollouts of all ranks, from a file, and gives this one its part of each minibatch."""

    def __init__(self, path, *spaces, **settings):
        observation_space, action_space, num_envs, device, _ = spaces
        num_envs *= ranks.world_size()
        super().__init__(observation_space, action_space, num_envs, device, 5, **settings)
        self.rollouts = torch.load(path, weights_only=False)

    def extend(self, rollout):
        super().extend(self.rollouts.pop(0))

    def batches(self, count, batch_size, **settings):
        for batch in super().batches(count, batch_size * ranks.world_size(), **settings):
            yield batch.chunk(ranks.world_size())[ranks.rank()]

    def chunks(self, count, batch_size, **settings):
        for batch in super().chunks(count, batch_size * ranks.world_size(), **settings):
            yield batch.chunk(ranks.world_size())[ranks.rank()]


def drawn_for_all(algorithm):
    """An algorithm that draws noise and shifts for all ranks, alike on each, and keeps this one's part."""

    def noise_fields(module, count):
        fields = algorithm.noise_fields(module, count * ranks.world_size())
        size = (-1, ranks.world_size(), module.batch_size)
        return {k: v.unflatten(0, size)[:, ranks.rank()].flatten(0, 1) for k, v in fields.items()}

    def _drawn_shifts(module, count):
        rank_size = module.batch_size
        module.batch_size *= ranks.world_size()
        drawn = algorithm._drawn_shifts(module, count)
        module.batch_size = rank_size
        return [(path, sides, v.split(rank_size, 1)[ranks.rank()]) for path, sides, v in drawn]

    def minibatch_noise(module, count):
        fields = algorithm.minibatch_noise(module, count * ranks.world_size())
        return {
            name: field.chunk(ranks.world_size())[ranks.rank()] for name, field in fields.items()
        }

    own = {"minibatch_noise": minibatch_noise} if hasattr(algorithm, "minibatch_noise") else {}
    same = variant(algorithm, noise_fields=noise_fields, _drawn_shifts=_drawn_shifts, **own)
    return after(same, on_fit_start=lambda module, _: module.generator.manual_seed(5))


def record_transitions(directory):
    """Collect rollouts of 2N envs with untrained actors."""
    for name, settings in SAME_BATCHES.items():
        torch.manual_seed(1)
        data = make_data(settings["env"], num_envs=2 * N)
        algorithm = settings.get("algorithm", rl.SAC)
        model = settings.get("model", {})
        policy = make_ppo(data, settings.get("policy"), algorithm, **model).policy
        rollouts = collected(data._env, policy)
        data.close()
        kept = [policy.rollout_for_replay(rollout) for rollout in rollouts]
        torch.save(kept, directory / f"{name}.pt")


def same_batches(directory, name, processes):
    """Train off-policy on the recorded rollouts, by minibatches of 32 of all processes."""
    settings = SAME_BATCHES[name]
    path = directory / f"{name}.pt"
    same = drawn_for_all(settings.get("algorithm", rl.SAC))
    model = {"algorithm": same, "batch_size": 32 // processes, "updates_per_env_step": 0.1}
    return train(
        directory / f"{name} {processes}",
        env=settings["env"],
        data=data_of(
            processes, 3, partial(Replayed, path), replay=partial(OfAll, path, capacity=300)
        ),
        policy=settings.get("policy"),
        model=model | settings.get("model", {}),
        trainer=trainer_of(processes),
    )[0]


SAME_SEGMENTS = {
    "apg": {"model": {"algorithm": rl.APG}, "policy": {"normalize_observation": True}},
    "shac": {"model": {"algorithm": rl.SHAC, "n_epochs": 3}},
}
"""Algorithms that step the env themselves: rank r has the episodes and the noise of rows rN to rN + N."""


def rows_of_all(env, seed=None, options=None):
    """Begin on each rank the episodes of its rows of all envs."""
    return (seed + ranks.rank() * env.num_envs if isinstance(seed, int) else seed,)


def rows_of_noise(policy):
    """A policy that draws the noise of all ranks, and keeps this rank's rows."""

    def of_all(policy, batch, generator=None):
        return [ranks.world_size() * batch[0]], generator

    def of_this_rank(policy, drawn, *args):
        return drawn.chunk(ranks.world_size())[ranks.rank()]

    return after(passing(policy, draw_noise=of_all), draw_noise=of_this_rank)


def same_segments(directory, name, processes):
    """Train through segments that are the same in all, by whole rollouts of all processes."""
    settings = SAME_SEGMENTS[name]
    own = {"policy_class": rows_of_noise(rl.ActorCritic if name == "shac" else rl.ActorOnly)}
    whole = {"batch_size": 2 * N * 16 // processes} if name == "shac" else {}
    return train(
        directory / f"{name} {processes}",
        env=partial(passing(rl.PointMass, reset=rows_of_all), max_episode_steps=11),
        data=data_of(processes, 3, lambda context: SyncCollector(replace(context, seed=5))),
        policy=own | settings.get("policy", {}),
        model=settings["model"] | whole,
        trainer=trainer_of(processes),
    )[0]


def record_frames(directory):
    """Record episodes of 3 to 6 steps, and collect rollouts of their frames by 2N envs."""
    box = Box(-1, 1, (3,))
    writer = rl.EpisodeWriter(directory / "steps", box, Discrete(2), 10)
    drawn = np.random.default_rng(0)
    for number in range(6):
        length = 3 + number % 4
        for t in range(length):
            writer.add(drawn.uniform(-1, 1, 3), 0, 0.0, t == length - 1, False)
        writer.end_episode(np.zeros(3), number % 3 > 0)
    writer.finalise()
    torch.manual_seed(1)
    env = frames_in(directory)(2 * N)
    policy = rl.ActorOnly(env.single_observation_space, env.single_action_space, (8,))
    torch.save(collected(env, policy), directory / "frames.pt")


def frames_in(directory):
    return partial(rl.ReturnFramesEnv, path=str(directory / "steps"), bins=7, folds=2)


def same_value(directory, processes):
    """Fit a value to the recorded frames, by whole rollouts of all processes, and evaluate it."""
    return train(
        directory / f"value {processes}",
        env=frames_in(directory),
        data=data_of(processes, 3, partial(Replayed, directory / "frames.pt")),
        policy={"policy_class": rl.ActorOnly, "normalize_observation": True},
        model={"algorithm": rl.ValueFit, "folds": 2, "batch_size": 2 * N * 16 // processes},
        trainer=trainer_of(processes, **EVALUATED),
    )[0]


CHUNKS = {
    "PPO": (rl.PPO, "token"),
    "GRPO": (rl.GRPO, "token"),
    "PPO, flow": (rl.PPO, "flow"),
    "GRPO, LeRobot": (rl.GRPO, "smolvla"),
    "PPO, in real time": (rl.PPO, "in real time"),
}
"""Algorithms and heads that are trained on chunks."""


def record_chunks(directory, head):
    """Collect rollouts of chunks, and invent how many actions were executed: few in the last rows."""
    if head == "smolvla":
        shutil.copytree(GOLDEN / "tiny_smolvlm", directory / "tiny_smolvlm")
        fill(GOLDEN / head, directory / head)
    torch.manual_seed(1)
    env = chunked(head)(2 * N)
    spaces = env.single_observation_space, env.single_action_space
    rollouts = collected(env, vla(head, directory, *spaces), steps=5)
    for rollout in rollouts:
        most = torch.where(torch.arange(2 * N) < N, 4.0, 2.0)[:, None]
        steps = 1 + (torch.rand(rollout.shape) * most).floor()
        rollout["executed"] = torch.arange(4) < steps[..., None]
    torch.save(rollouts, directory / f"chunks {head}.pt")


def same_chunks(directory, name, processes):
    """Train a VLA on the recorded chunks."""
    algorithm, head = CHUNKS[name]
    model = GROUPS if algorithm is rl.GRPO else {}
    return train(
        directory / f"chunks {name} {processes}",
        env=chunked(head),
        data=data_of(
            processes, 99, partial(Replayed, directory / f"chunks {head}.pt"), buffer_size=5
        ),
        policy={"policy_class": lambda *spaces, hidden_sizes: vla(head, directory, *spaces)},
        model=model | {"batch_size": 2 * N * 5 // processes, "lr_schedule": "constant"},
        trainer=trainer_of(processes, max_epochs=1),
    )[0]


def chunked(head):
    execute = 2 if head == "in real time" else None
    return partial(
        rl.ActionChunk, env=lambda n: rl.PushBlocks(n, size=16), chunk_size=4, execute=execute
    )


def vla(head, directory, *spaces):
    if head == "smolvla":
        return rl.LeRobotPolicy(*spaces, path=str(directory / head), gradient_checkpointing=True)
    if head == "in real time":
        return rl.VLAPolicy(*spaces, head="flow", real_time=rl.RealTime(2, [0, 1, 2]))
    return rl.VLAPolicy(*spaces, head=head, num_bins=5)


TWO = {"devices": 2, "strategy": "ddp"}


def note(rows):
    """Make a callback that keeps what became of each iteration."""

    def look(trainer, module, outputs, batch, index):
        statistics = trainer.datamodule.collector.statistics
        rows.append(
            {
                "own_steps": batch.shape[0] * (batch.shape[1] - 1),
                "own_episodes": int(batch["done"][:, :-1].sum()),
                "env_steps": module.env_steps,
                "episodes": statistics.episodes,
                "returns": list(statistics.returns),
                "optimizer_steps": module.optimizer_steps,
                "skipped": module.skipped_steps,
                "rate": trainer.optimizers[0].param_groups[0]["lr"],
                "metrics": dict(module.metrics),
            }
        )

    return callback(on_train_batch_end=look)


def stops_rank_1():
    """Make a callback that sends this process a signal, on rank 1."""
    return signal_at(3 if ranks.rank() == 1 else -1)


def spoil(collector, rollout):
    """On rank 1, log-probs of the second rollout are no numbers."""
    collector.count = getattr(collector, "count", 0) + 1
    if ranks.rank() == 1 and collector.count == 2:
        rollout["sample_log_prob"][:, :-1] = torch.nan


EVALUATED = {"limit_val_batches": 1.0}
"""Of runs whose evaluations or best checkpoints are asked for."""


def run_on_two(
    directory, findings, name, *callbacks, into=None, trainer=None, apart=False, **kwargs
):
    """Train on two ranks, without evaluations, and keep what this one found.

    If `apart`, each has chosen a directory of its own, as those that Lightning starts do.
    """
    rows = []
    run_dir = (
        directory / (into or name) / ("of rank 1" if apart and os.environ["RANK"] == "1" else "")
    )
    setup = trainer_of(2, callbacks=[note(rows), *callbacks]) | (trainer or {})
    try:
        module, _, runner = train(run_dir, trainer=setup, **kwargs)
    except (FloatingPointError, ConfigurationError) as caught:
        findings[name] = {"rows": rows, "error": str(caught)}
        return
    findings[name] = {
        "rows": rows,
        "error": None,
        "state": tensors_of(module),
        "evaluation": module.evaluation,
        "stop_signal": runner.stop_signal,
    }


@contextmanager
def spied(local_gradients, gradients):
    """Record the gradient of this rank and the one that is stepped by."""

    def gradient(self, sums):
        return [sums[len(self.names) - 1 : -1] / sums[-1]]

    def recorded_sums(self, minibatch):
        sums = local_sums(self, minibatch)
        local_gradients.append(gradient(self, sums))
        return sums

    def recorded_step(self, total):
        gradients.append(gradient(self, total))
        step_by(self, total)

    local_sums, step_by = Update.local_sums, Update.step_by
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Update, "local_sums", recorded_sums)
        patch.setattr(Update, "step_by", recorded_step)
        yield


def forget(module, result):
    """On rank 1 its policy gives its own actions another log-prob when it is asked again."""
    if ranks.rank() == 1:
        evaluate = module.policy.evaluate_actions
        module.policy.evaluate_actions = lambda td: shifted(evaluate(td))


def shifted(result):
    return result.set("sample_log_prob", result["sample_log_prob"] + 0.1)


def main(directory):
    findings = {}
    run = partial(run_on_two, directory, findings)

    ins, outs = [], []
    with spied(ins, outs):
        run("reduced", **PENDULUM, trainer=EVALUATED)  # a teacher below
    findings["reduced"] |= {"local_gradients": ins, "gradients": outs}

    for name in SAME_ROLLOUTS:
        with uncompiled_traces():
            if "compiler" in name and ranks.rank() == 1:
                graphs.standalone_compile = fail(RuntimeError("no compiler"))
            module = same_rollouts(directory, name, 2)
        findings[name] = tensors_of(module)

    for name in [*SAME_BATCHES, *SAME_SEGMENTS]:
        same = same_batches if name in SAME_BATCHES else same_segments
        findings[name] = tensors_of(same(directory, name, 2))

    value = same_value(directory, 2)
    findings["value"] = {"state": tensors_of(value), "evaluation": value.evaluation}

    for name in CHUNKS:
        findings[f"chunks {name}"] = same_chunks(directory, name, 2).policy.state_dict()

    run("whole", **RESUMED, trainer=EVALUATED)
    run("to rank 1", stops_rank_1(), **RESUMED, trainer=EVALUATED)
    checkpoint = last(directory / "to rank 1")
    run("resumed", into="to rank 1", ckpt_path=checkpoint, **RESUMED, trainer=EVALUATED)

    quick = {"target_kl": 2e-4, "lr_schedule": "adaptive", "desired_kl": 1e-4, "n_epochs": 8}
    run("kl", **PENDULUM | {"model": {"batch_size": 8} | quick})
    data = FIVE | {"collector": after(SyncCollector, collect=spoil)}
    run(
        "one nan", **PENDULUM | {"model": {"max_nonfinite_steps": 9, "batch_size": 8}, "data": data}
    )
    for lag in (0, 1):
        data = FIVE | {"collector": partial(AsyncCollector, max_staleness=lag)}
        run(f"async {lag}", **PENDULUM | {"data": data})
    own = {"data": ALL["data"] | {"num_envs": 2}, "model": ALL["model"] | {"batch_size": 16}}
    run("own", **ALL | own, trainer=EVALUATED)
    for name, settings in {"terms": TERMS, "mujoco": MUJOCO}.items():
        data = FIVE | {"total_env_steps": 256, "random_first_episode_length": True}
        run(name, **settings | {"data": settings["data"] | data})
    for curve in EXPLORING:
        settings = exploring(curve)
        run(curve, **settings | {"data": settings["data"] | FIVE | {"buffer_size": 16}})
    teacher = str(directory / "reduced")
    run(
        "taught",
        env="Pendulum-v1",
        policy={"policy_class": rl.ActorOnly},
        model={"algorithm": rl.BehaviorCloning, "teacher": teacher, "batch_size": 8},
        data=OFF_POLICY["data"] | {"total_env_steps": 256},
    )
    run("off-policy", apart=True, **HINDSIGHT)
    run("off-policy, stopped", stops_rank_1(), **HINDSIGHT)
    checkpoint = last(directory / "off-policy, stopped")
    run("off-policy, resumed", into="off-policy, stopped", ckpt_path=checkpoint, **HINDSIGHT)
    for name in ("masks", "parts, noise"):
        run(name, **ALLOWED[name] | {"data": FIVE | {"total_env_steps": 256}})
    for name, settings in HELPED.items():
        taken = []
        look = callback(
            on_train_batch_end=lambda *args, taken=taken: taken.append(
                args[3]["intervened"][:, :-1].clone()
            )
        )
        data = FIVE | {"total_env_steps": 256} | settings.get("data", {})
        run(f"helped {name}", look, **settings | {"env": helped_arm, "data": data})
        findings[f"helped {name}"]["taken"] = taken
    forgetful = {"algorithm": after(OwnAlgorithm, on_train_start=forget)}
    run("refused", **ALL | own | {"model": own["model"] | forgetful})
    bf16 = {"precision": "bf16-mixed"}
    run("bf16", trainer=bf16, **PENDULUM)
    run("bf16 off-policy", trainer=bf16, **OFF_POLICY)
    run("float32 off-policy", **OFF_POLICY)
    with uncompiled_traces():
        run("compiled", **PENDULUM | {"model": PENDULUM["model"] | {"compile": True}})
    run(
        "uneven",
        env="CartPole-v1",
        data=FIVE | {"num_envs": 4, "total_env_steps": 10_000, "buffer_size": 40},
        model=GROUPS | {"batch_size": 8},
        trainer={"max_steps": 4},
    )
    for name in stranger.RUNS:
        findings[f"stranger {name}"] = strangers_run(directory, name)
    torch.save(findings, directory / f"rank{ranks.rank()}.pt")


def strangers_run(directory, name):
    """Train an extension of docs/examples; return its state, or the message that refuses it."""
    sys.path.append(str(stranger.FOLDER))
    (directory / f"stranger{ranks.rank()}").mkdir(exist_ok=True)
    with chdir(directory / f"stranger{ranks.rank()}"):
        config = stranger.write_config(name, trainer=trainer_of(2))
        try:
            run_dir = f"--trainer.run_dir={directory}/stranger-{name}"
            run = RLCLI(["fit", f"--config={config}", run_dir])
        except ConfigurationError as refusal:
            return str(refusal)
    return tensors_of(run.model)


SAVED = OFF_POLICY | {"data": OFF_POLICY["data"] | {"iterations_per_epoch": 2}}
"""A run that is saved three times."""


def killed(directory):
    """Train until rank 1 is killed in its second save, its replay written and the checkpoint not."""
    if os.environ["RANK"] == "1":
        replace, saves = os.replace, count(1)

        def replaced(source, target):
            replace(source, target)
            if Path(target).name.startswith("rank1-") and next(saves) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replaced
    train(directory / "killed", trainer=trainer_of(2), **SAVED)


def resumed(directory):
    """Go on with that run, and train another to its end."""
    train(directory / "whole", trainer=trainer_of(2), **SAVED)
    checkpoint = last(directory / "killed")
    train(directory / "killed", trainer=trainer_of(2), ckpt_path=checkpoint, **SAVED)


if __name__ == "__main__":
    {"all": main, "killed": killed, "resumed": resumed}[sys.argv[2]](Path(sys.argv[1]))
