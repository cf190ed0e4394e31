"""Running statistics know what minibatches are drawn from, and take in rollouts in which nothing happened."""

import threading
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from lightning_rl import (
    GRPO,
    PPO,
    SAC,
    ActorCritic,
    ActorOnly,
    EpisodeWriter,
    MixedReplay,
    ReplayBuffer,
    RLDataModule,
    SquashedActorCritic,
    TensorSimulator,
)
from lightning_rl.algorithms.base import IterationScalars
from lightning_rl.extensions.datasets.episode import Episode
from lightning_rl.policies.networks.encoders import NatureCNN
from lightning_rl.policies.networks.q_networks import ValueAtoms
from lightning_rl.policies.normalization import ObservationNormalizer, ReturnNormalizer
from lightning_rl.system import ranks
from tests.envs import ScriptedEnv, draw
from tests.helpers import fit_in, last, load
from tests.messages import refused
from tests.variants import after, variant

# --- demonstrations in a mixed replay ---


STATE, FORCE = Box(-1, 1, (2,), np.float32), Box(-1, 1, (1,), np.float32)


def sparse():
    """Nothing is earned but in the demonstrations."""
    return ScriptedEnv(STATE, FORCE, observe=draw, length=10)


gymnasium.register("reports/Sparse-v0", sparse)


def demonstrate(path, episodes=3, steps=10, reward=1.0):
    """Write episodes whose last step earns a reward; return the running returns G of all steps."""
    env = sparse()
    writer = EpisodeWriter(path, env.observation_space, env.action_space, 30.0, "", "png")
    no = torch.zeros(steps, dtype=torch.bool)
    end = no.clone()
    end[-1] = True
    earned = torch.where(end, reward, 0.0)
    for _ in range(episodes):
        seen, action = torch.rand(steps + 1, 2), torch.rand(steps, 1)
        writer.write(Episode(seen, action, earned, end, no, True, no, "", {}))
    writer.finalise()
    return earned.repeat(episodes).numpy()


def run(run_dir, demonstrations, *, total=160, policy=None, trainer=None, **replay):
    settings = {"online": partial(ReplayBuffer, capacity=500)}
    settings |= {"offline": partial(ReplayBuffer, capacity=100)} | replay
    data = RLDataModule(
        "reports/Sparse-v0",
        num_envs=2,
        buffer_size=16,
        total_env_steps=total,
        replay=partial(MixedReplay, demonstrations=str(demonstrations), **settings),
        num_eval_episodes=1,
        seed=3,
    )
    torch.manual_seed(1)
    spaces = data.observation_space, data.action_space
    made = SquashedActorCritic(*spaces, (8,), **(policy or {}))
    settings = {"batch_size": 16, "random_env_steps": 32, "updates_per_env_step": 0.1}
    model = SAC(made, normalize_reward=True, compile=False, **settings)
    fit_in(run_dir, model, data, limit_val_batches=0, **(trainer or {}))
    return model


@pytest.mark.parametrize("ratio", [0.5, 0.25, 1.0])
def test_rewards_are_scaled_by_the_variance_of_what_minibatches_are_drawn_from(tmp_path, ratio):
    returns = demonstrate(tmp_path / "demonstrations", reward=5.0)
    model = run(tmp_path / "run", tmp_path / "demonstrations", online_ratio=ratio)
    mixture = np.concatenate((returns, np.zeros_like(returns)))
    weights = np.repeat([1 - ratio, ratio], len(returns)) / len(returns)
    variance = np.average((mixture - np.average(mixture, weights=weights)) ** 2, weights=weights)
    expected = 1 / np.sqrt(variance + 1e-8) if variance > 0 else 1.0
    assert float(model.normalized_reward(torch.tensor(1.0))) == pytest.approx(expected, rel=1e-4)


def test_categorical_critics_span_what_demonstrations_earn(tmp_path):
    demonstrate(tmp_path / "demonstrations", reward=400.0)
    atoms = {"value_atoms": ValueAtoms(11, 2.0)}
    model = run(tmp_path / "run", tmp_path / "demonstrations", policy=atoms)
    assert float(model.normalized_reward(torch.tensor(400.0))) == pytest.approx(2.0)


def test_resumed_without_its_replay_or_with_it_the_scale_is_the_same(tmp_path):
    demonstrate(tmp_path / "demonstrations")
    for name, trainer in (("kept", {}), ("read again", {"save_replay": False})):
        run_dir = tmp_path / name
        run(run_dir, tmp_path / "demonstrations", total=64, trainer=trainer)
        resumed = trainer | {"ckpt_path": last(run_dir)}
        model = run(run_dir, tmp_path / "demonstrations", trainer=resumed)
        assert float(model.normalized_reward(torch.tensor(1.0))) == pytest.approx(4.5883, rel=1e-3)
        assert (
            load(last(run_dir))["state_dict"]["reward_normalizer._extra_state"]["given"][0] == 0.5
        )


def test_a_replay_that_does_not_tell_its_rewards_is_refused_beside_it(tmp_path):

    demonstrate(tmp_path / "demonstrations")
    run(
        tmp_path / "own",
        tmp_path / "demonstrations",
        offline=partial(variant(ReplayBuffer), capacity=100),
    )
    replay = MixedReplay(STATE, FORCE, 1)
    replay.offline = [None]
    with refused(names=("data.replay.offline", "ReplayBuffer", "model.normalize_reward: false")):
        replay.take_offline_rewards()


# --- rollouts of padding alone ---


class Late:
    """All envs reset a step late, at once: with a buffer_size of 1 that is a rollout of padding."""

    single_action_space, device, max_episode_length = Box(-1, 1, (1,), np.float32), "cpu", 5

    def __init__(self, num_envs, shape=(2,)):
        self.num_envs, self.unwrapped, self.shape = num_envs, self, shape
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.steps, self.late = 0, False

    def seen(self):
        dtype = torch.float32 if len(self.shape) == 1 else torch.uint8
        return torch.full((self.num_envs, *self.shape), self.steps, dtype=dtype)

    def reset(self, *, seed=None, options=None):
        self.steps, self.late = 0, False
        return self.seen(), {}

    def step(self, action):
        self.steps = 0 if self.late else self.steps + 1
        self.late = not self.late and self.steps >= 5
        no = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.seen(), torch.ones(self.num_envs), no, no | self.late, {}

    def close(self):
        pass


PICTURES = partial(NatureCNN, size=4, channels=(4,), kernels=(4,), strides=(2,), normalize=True)
OFF_POLICY = {"batch_size": 8, "random_env_steps": 8, "updates_per_env_step": 0.2}
ON_POLICY = {"batch_size": 4, "n_epochs": 1}


@pytest.mark.parametrize(
    ("algorithm", "shape", "policy", "model"),
    [
        (SAC, (2,), {}, {"normalize_reward": True}),
        (SAC, (2,), {"normalize_observation": True}, {}),
        (SAC, (8, 8, 3), {"encoder": PICTURES}, {}),
        (PPO, (2,), {"normalize_observation": True}, {"normalize_reward": True}),
        (PPO, (8, 8, 3), {"encoder": PICTURES}, {"normalize_advantage": "rollout"}),
        (
            GRPO,
            (2,),
            {},
            {"group_size": 2, "reset_every_rollout": False, "truncate_at_first_done": False},
        ),
    ],
)
def test_a_rollout_without_steps_moves_no_statistics(tmp_path, algorithm, shape, policy, model):
    simulator = partial(
        TensorSimulator, make=partial(Late, shape=shape), resets="a_step_late", seeds="each"
    )
    off_policy = issubclass(algorithm, SAC)
    replay = {"replay": partial(ReplayBuffer, capacity=60)} if off_policy else {}
    data = RLDataModule(
        simulator, num_envs=4, buffer_size=1, total_env_steps=80, num_eval_episodes=1, **replay
    )
    kind = {GRPO: ActorOnly, PPO: ActorCritic, SAC: SquashedActorCritic}[algorithm]
    made = kind(data.observation_space, data.action_space, (8,), **policy)
    metrics = []

    noting = after(algorithm, finish_iteration=lambda module, *_: metrics.append(module.metrics))
    module = noting(made, compile=False, **(OFF_POLICY if off_policy else ON_POLICY), **model)
    fit_in(tmp_path, module, data, limit_val_batches=0)
    assert module.env_steps < 4 * len(metrics)
    assert all(value == value for one in metrics for value in one.values())
    assert all(
        tensor.isfinite().all()
        for tensor in module.state_dict().values()
        if isinstance(tensor, torch.Tensor)
    )


class TwoRanks:
    """Two threads that take part in collectives as two ranks do."""

    def __init__(self, monkeypatch):
        self.numbers, self.barrier = threading.local(), threading.Barrier(2)
        self.given = [None, None]
        monkeypatch.setattr(ranks, "world_size", lambda: 2)
        monkeypatch.setattr(ranks, "rank", lambda: self.numbers.rank)
        monkeypatch.setattr(ranks, "sum_over_ranks", lambda x: sum(self.exchange(x)))
        monkeypatch.setattr(ranks, "gather_over_ranks", lambda x: list(self.exchange(x)))

    def exchange(self, value):
        self.given[self.numbers.rank] = value
        self.barrier.wait(timeout=60)
        both = tuple(self.given)
        self.barrier.wait(timeout=60)
        return both

    def run(self, *works):
        results, threads = [None, None], []

        def work(rank):
            self.numbers.rank = rank
            results[rank] = works[rank]()

        for rank in (0, 1):
            threads.append(threading.Thread(target=work, args=(rank,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return results


@pytest.mark.parametrize("make", [ObservationNormalizer, lambda size: ReturnNormalizer(5.0)])
def test_over_ranks_one_without_steps_or_both_leave_no_nan(monkeypatch, make):
    batches = [torch.randn(6, 1) * 3, torch.zeros(0, 1)]
    alone = make(1)
    alone.update(batches[0])
    both = TwoRanks(monkeypatch)
    made = [make(1), make(1)]
    for first, second in (
        (batches[1], batches[1]),
        (batches[0], batches[1]),
        (batches[1], batches[1]),
    ):
        both.run(lambda b=first: made[0].update(b), lambda b=second: made[1].update(b))
    for one in made:
        for name, buffer in one.named_buffers():
            torch.testing.assert_close(buffer, alone.get_buffer(name))


def test_over_ranks_a_number_that_one_has_not_is_that_of_the_other(monkeypatch):
    scalars = [IterationScalars(), IterationScalars()]
    for one, value in zip(scalars, (0.5, torch.nan), strict=True):
        one.set("explained", torch.tensor(value))
        one.set("nobody", torch.tensor(torch.nan))
        one.set("both", torch.tensor(2.0))
    means = TwoRanks(monkeypatch).run(scalars[0].means, scalars[1].means)
    assert means == [{"explained": 0.5, "both": 2.0}] * 2


def test_while_all_returns_are_equal_the_scale_of_rewards_is_one():
    """Relabelled rewards of 1 became 10,000 before the first success."""
    normalizer = ReturnNormalizer()
    normalizer.observe(torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.bool), discount=0.9)
    assert normalizer(torch.ones(3)).tolist() == [1.0] * 3
