"""A chunked env must be the plain one in all that counts: returns, lengths, advantages."""

from functools import partial

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import ActionChunk, ActorCritic, GymnasiumEnv, SyncCollector
from lightning_rl.algorithms.action_parts import add_part_weights, weigh_parts, whole_action
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.functional import gae
from lightning_rl.rollout.contract import discount_of, env_steps
from tests.algorithms import Reinforce
from tests.envs import NUMBER, ScriptedTask
from tests.helpers import make_collector
from tests.messages import refused
from tests.numerics.test_ends import Limited
from tests.variants import variant

K, GAMMA = 4, 0.9


def walk(num_envs, fails=True, limit=1000):
    """Add the action to a position; fail, or run out of time, after a number of steps of its own.

    Row i fails after i + 1 steps where `fails`, so that episodes end at every offset of a chunk.
    """

    def move(env, state, action):
        left, x = state["left"] - 1, state["x"] + action
        ended = (left.squeeze(-1) <= 0) & fails
        reward = x.squeeze(-1) * 0.3 + action.squeeze(-1) ** 2
        return {"x": x, "left": left}, reward, ended, {"success": ended, "metrics": {"x": x[:, 0]}}

    return ScriptedTask(
        num_envs,
        lambda uniform: {"x": uniform, "left": 3 + (uniform * 1000).floor() % 7},
        move,
        observe=lambda state: state["x"],
        action_space=NUMBER,
        steps=limit,
    )


def play_chunked(fails, limit):
    """Return the chunked fields [N, T, ...], and the actions that each row executed, in order."""
    torch.manual_seed(0)
    env = ActionChunk(16, lambda n: walk(n, fails, limit), K)
    observations, steps, executed = [env.reset(seed=5)[0]], [], [[] for _ in range(16)]
    for _ in range(9):
        action = torch.randn(16, K, 1)
        observation, reward, terminated, truncated, info = env.step(action)
        for row, mask in enumerate(info["executed"]):
            executed[row] += action[row][mask].flatten().tolist()
        observations.append(observation)
        ends = {"terminated": terminated, "truncated": truncated, "final": info["final_obs"]}
        numbers = {"reward": reward, "step_reward": info["step_reward"]}
        steps.append(numbers | ends | {"executed": info["executed"]})
    fields = {key: torch.stack([step[key] for step in steps], 1) for key in steps[0]}
    return fields | {"observation": torch.stack(observations, 1)}, executed


def play_plain(row, actions, fails, limit):
    """Play the same actions one by one, alone: observation, reward, terminated, truncated, final."""
    env = walk(1, fails, limit)
    observation, _ = env.reset(seed=[5 + row])
    rows = []
    for action in actions:
        before = observation
        observation, reward, terminated, truncated, info = env.step(torch.tensor([[action]]))
        results = (before, reward, terminated, truncated, info["final_obs"])
        rows.append([x.flatten()[0].item() for x in results])
    return rows, observation.item()


@pytest.mark.parametrize(("fails", "limit"), [(True, 1000), (False, 6), (True, 5)])
def test_advantages_and_returns_are_those_of_the_plain_env(fails, limit):
    chunked, actions = play_chunked(fails, limit)
    value = lambda x: torch.sin(3.0 * x.double())  # noqa: E731  # any critic will do
    steps = chunked["executed"].sum(-1)
    discounts = GAMMA ** torch.arange(K).double()
    advantage, target = gae(
        chunked["step_reward"].double() @ discounts,
        value(chunked["observation"].squeeze(-1)),
        chunked["terminated"],
        chunked["truncated"],
        value(chunked["final"].squeeze(-1)),
        gamma=GAMMA ** steps.double(),
        gae_lambda=1.0,
    )
    ends = set()
    for row, taken in enumerate(actions):
        plain, last = play_plain(row, taken, fails, limit)
        obs, reward, terminated, truncated, final = (
            torch.tensor([column], dtype=torch.float32) for column in zip(*plain, strict=True)
        )
        plain_advantage, plain_target = gae(
            reward.double(),
            value(torch.cat([obs, torch.tensor([[last]])], 1)),
            terminated.bool(),
            truncated.bool(),
            value(final),
            gamma=GAMMA,
            gae_lambda=1.0,
        )
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), steps[row].cumsum(0)[:-1]])
        torch.testing.assert_close(chunked["observation"][row, :-1, 0], obs[0, starts])
        torch.testing.assert_close(advantage[row], plain_advantage[0, starts], rtol=0, atol=1e-6)
        torch.testing.assert_close(target[row], plain_target[0, starts], rtol=0, atol=1e-6)
        ends |= set(steps[row][(chunked["terminated"] | chunked["truncated"])[row]].tolist())
    if limit == 1000:
        assert ends == {1, 2, 3, 4}, "episodes end at every offset of a chunk"


def test_lambda_below_one_decays_once_a_chunk():
    torch.manual_seed(1)
    reward, value, final = torch.randn(3, 6), torch.randn(3, 7), torch.randn(3, 6)
    terminated, truncated = torch.rand(3, 6) < 0.2, torch.rand(3, 6) < 0.2
    discount = GAMMA ** torch.randint(1, K + 1, (3, 6))
    got, _ = gae(reward, value, terminated, truncated, final, gamma=discount, gae_lambda=0.8)
    for n in range(3):
        trace = 0.0
        for t in reversed(range(6)):
            done = terminated[n, t] or truncated[n, t]
            following = value[n, t + 1] if not done else final[n, t] * (~terminated[n, t])
            delta = reward[n, t] + discount[n, t] * following - value[n, t]
            trace = delta + (0.0 if done else discount[n, t] * 0.8 * trace)
            torch.testing.assert_close(got[n, t], trace, rtol=1e-5, atol=1e-5)


def passing(num_envs, says=lambda age, info: info):
    """Stand at the goal at odd steps alone; end after as many steps as the start draws, 3 to 10.

    Says what is of the step only where `says` says so.
    """

    def start(uniform):
        return {"age": uniform * 0, "length": 3 + (uniform * 8).floor()}

    def move(env, state, action):
        age = (state["age"] + 1)[:, 0]
        reward = torch.ones_like(age)
        info = {"success": age % 2 == 1, "metrics": {"age": age}, "rewards": {"one": reward}}
        env.now += 1
        ended = age >= state["length"][:, 0]
        return {"age": age[:, None]}, age, ended, says(env.now, info)

    action = gymnasium.spaces.Discrete(2)
    return ScriptedTask(num_envs, start, move, action_space=action, steps=100, now=0)


def test_what_is_not_said_of_the_last_action_of_a_chunk_is_not_said():
    """As in the plain env: said of the first action alone, then of none, then of the last."""
    env = ActionChunk(2, lambda n: passing(n, lambda now, info: info if now in (1, 9) else {}), 3)
    starts, _ = passing(50).reset(seed=0)
    env.reset(seed=(starts[:, 1] > 9).nonzero().flatten()[:2].tolist())
    first, silent, last = (env.step(torch.zeros(2, 3, dtype=torch.int64))[4] for _ in range(3))
    assert first["success"].tolist() == [False, False]
    assert first["metrics"]["age"].isnan().all()
    assert first["rewards"]["one"].tolist() == [1.0, 1.0]
    assert not {"success", "metrics", "rewards"} & silent.keys()
    assert last["success"].tolist() == [True, True]
    assert last["metrics"]["age"].tolist() == [9.0, 9.0]


def test_metrics_of_ended_episodes_and_logs_are_those_of_the_last_action():
    def final(now, info):
        age = info["metrics"]["age"]
        last = torch.where(age == 9, age, torch.nan)
        return {"final_metrics": {"age": last}, "log": {"now": age}}

    env = ActionChunk(1, lambda n: passing(n, final), 3)
    starts, _ = passing(50).reset(seed=0)
    env.reset(seed=(starts[:, 1] == 9).nonzero().flatten()[:1].tolist())
    infos = [env.step(torch.zeros(1, 3, dtype=torch.int64))[4] for _ in range(3)]
    assert infos[-1]["final_metrics"]["age"].tolist() == [9.0]
    assert infos[-1]["log"]["now"].tolist() == [9.0]


def test_the_parts_that_were_not_executed_count_for_nothing_however_a_minibatch_is_cut():
    torch.manual_seed(3)
    steps = torch.randint(1, K + 1, (6,))
    executed = torch.arange(K) < steps[:, None]
    log_prob = torch.randn(6, 2 * K)
    whole = TensorDict({"executed": executed, "sample_log_prob": log_prob}, [6])
    term = torch.randn(6, 2 * K)
    counted = executed.repeat_interleave(2, -1)
    expected = term[counted].mean()
    weighted = add_part_weights(whole.clone())
    ones = torch.ones(6)
    parts = [
        (weigh_parts(ones[:n], part, piece) * part).mean() * len(piece) / 6
        for piece, part in zip(weighted.split(4), term.split(4), strict=True)
        for n in [len(piece)]
    ]
    torch.testing.assert_close(sum(parts), expected)
    alone = torch.stack([log_prob[i, : 2 * int(steps[i])].sum() for i in range(6)])
    torch.testing.assert_close(whole_action(log_prob, whole), alone)


def test_rewards_within_a_chunk_are_discounted_by_the_algorithms_own_gamma():
    env = ActionChunk(2, lambda n: walk(n), K)
    policy = ActorCritic(env.single_observation_space, env.single_action_space, (8,))
    algorithm = Reinforce(policy, gamma=0.5)
    rollout = make_collector(SyncCollector, env, policy, 3, seed=1).collect()
    by_hand = (rollout["step_reward"][:, :-1] * torch.tensor([1.0, 0.5, 0.25, 0.125])).sum(-1)
    torch.testing.assert_close(algorithm.rewards(rollout), by_hand)
    torch.testing.assert_close(
        discount_of(rollout, 0.5), 0.5 ** rollout["executed"][:, :-1].sum(-1)
    )


def test_what_cannot_be_chunked_is_refused():
    with refused(names=("ActionChunk", "Batched", "advance(action, active)")):
        ActionChunk(2, variant(Limited, "Batched"))
    with refused(names=("wrappers", "vectorization")):
        ActionChunk(
            2, lambda n: GymnasiumEnv(n, "lightning_rl/CartPole-v0", None, "vector_entry_point")
        )
    with refused(names=("execute", "[1, chunk_size=4]", "5")):
        ActionChunk(2, walk, 4, execute=5)


def test_a_chunked_gymnasium_env_resumes_and_is_evaluated_in_env_steps():
    make = partial(GymnasiumEnv, id="Pendulum-v1", env_kwargs={"max_episode_steps": 7})
    env = ActionChunk(3, make, K)
    policy = ActorCritic(env.single_observation_space, env.single_action_space, (8,))
    assert [e["length"] for e in run_episodes(policy, env, [1, 2, 3])] == [7, 7, 7]
    collector = make_collector(SyncCollector, env, policy, 5, seed=1)
    rollout = collector.collect()
    assert env_steps(rollout).tolist() == [[4, 3, 4, 3, 4]] * 3
    assert collector.env_steps == 3 * 18
    assert set(collector.statistics.lengths) == {7}
    first = rollout["reward"][:, :2].sum(1, dtype=torch.float64)  # two chunks are an episode
    assert list(collector.statistics.returns)[:3] == pytest.approx(first.tolist(), rel=1e-5)
    resumed = ActionChunk(3, make, K)
    assert torch.equal(resumed.load_state_dict(env.state_dict()), rollout["observation"][:, -1])
    action = torch.rand(3, K, 1)
    assert torch.equal(resumed.step(action)[0], env.step(action)[0])
    env.make_renderable()
    env.reset(seed=1)
    assert env.render([0, 2]).shape[0] == 2
    assert env.render_fps == 30
