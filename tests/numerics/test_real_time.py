"""Real-time chunks: formulas, acting while the old chunk executes, and training with a delay."""

import math
import threading
import time
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_rl import (
    GRPO,
    PPO,
    ActionChunk,
    AsyncCollector,
    BehaviorCloning,
    ConditionedPolicy,
    DatasetCollector,
    FlowSettings,
    NoisePolicy,
    PerceptronBackbone,
    RealTime,
    ResidualActorCritic,
    SyncCollector,
    VLAPolicy,
    load_policy,
)
from lightning_rl.collectors.evaluation import run_episodes
from lightning_rl.extensions.datasets.ahead import ChunksAhead
from lightning_rl.extensions.export.graph import ActingGraph, ports_of, traced
from lightning_rl.extensions.tasks.probes import TwoDoors
from lightning_rl.extensions.vla.flow import normal_log_prob
from lightning_rl.extensions.vla.policy import RealTimeActor
from lightning_rl.extensions.vla.real_time import guidance_weight, pull, soft_mask
from lightning_rl.functional import flow_transition
from tests.algorithms import with_first_ratios
from tests.envs import ScriptedTask
from tests.helpers import assert_same, assert_same_run, fit_in, last, make_data
from tests.messages import refused

LEARNT = FlowSettings(steps=3, noise="learnt")
PROPRIO = gymnasium.spaces.Dict({"proprio": gymnasium.spaces.Box(-4, 4, (1,), np.float32)})
STEER = partial(
    ActionChunk,
    env=lambda n: ScriptedTask(
        n,
        lambda uniform: {"place": uniform * 2 - 1},
        lambda env, state, action: (
            {"place": state["place"] + action.clamp(-1, 1) / 2},
            -state["place"].squeeze(1).abs(),
        ),
        observe=lambda state: TensorDict({"proprio": state["place"]}, state.batch_size),
        observation_space=PROPRIO,
        steps=8,
    ),
    chunk_size=6,
    execute=2,
)
DOORS = partial(ActionChunk, env=TwoDoors, chunk_size=6, execute=2)
SETTINGS = RealTime(execution_horizon=2, delay_steps=1)


def flow_policy(*spaces, real_time=SETTINGS, **kwargs):
    return VLAPolicy(
        *spaces, PerceptronBackbone((32,), 4), **{"head": "flow"} | kwargs, real_time=real_time
    )


def make_policy(make=DOORS, **kwargs):
    torch.manual_seed(0)
    return flow_policy(*spaces_of(make), **kwargs)


def spaces_of(make=DOORS):
    env = make(1)
    return env.single_observation_space, env.single_action_space


def observed(num_envs, make=DOORS):
    return TensorDict({"observation": make(num_envs).reset(seed=0)[0]}, [num_envs])


def after_a_chunk(policy, num_envs=16):
    """Observations with the state after a drawn chunk."""
    first = policy(observed(num_envs), generator=torch.Generator().manual_seed(5))
    return observed(num_envs).set("state", first["next_state"])


def weight_of_action(i, overlap, delay, decay):
    """Equation 5 of the paper, with its H - s as `overlap`, case by case."""
    if i >= overlap:
        return 0.0
    if i < delay:
        return 1.0
    c = (overlap - i) / (overlap - delay + 1)
    return c if decay == "linear" else c * (math.exp(c) - 1) / (math.e - 1)


@pytest.mark.parametrize("decay", ["exponential", "linear"])
def test_the_mask_is_that_of_the_paper(decay):
    cases = [(o, d) for o in range(9) for d in range(o + 1)]
    mask = soft_mask(8, *(torch.tensor(column) for column in zip(*cases, strict=True)), decay)
    expected = [[weight_of_action(i, o, d, decay) for i in range(8)] for o, d in cases]
    np.testing.assert_allclose(mask.numpy(), expected, rtol=1e-6, atol=1e-7)
    assert mask[cases.index((5, 0)), 0] < 1  # without a delay nothing is fixed
    assert not mask[[o == 0 for o, _ in cases]].any()


def test_the_guidance_weight_is_bounded_at_both_ends():
    t = torch.tensor([0.0, 1e-30, 0.25, 0.5, 0.9, 1.0])
    weight = guidance_weight(t, 5.0)
    # The paper's time is 1 - t: (1 - tau) / tau / r^2 with r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2).
    tau = 1 - t.double().numpy()[2:-1]
    expected = (1 - tau) / tau * (tau**2 + (1 - tau) ** 2) / (1 - tau) ** 2
    np.testing.assert_allclose(weight[2:-1].numpy(), np.minimum(expected, 5.0), rtol=1e-6)
    assert weight[[0, 1, -1]].tolist() == [5.0] * 3
    assert guidance_weight(t, 0.0).tolist() == [0.0] * 6
    assert guidance_weight(t, 1e30).isfinite().all()


def test_the_correction_is_a_product_with_the_jacobian():
    generator = torch.Generator().manual_seed(0)
    matrix, x, target = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((6, 6), (2, 6), (2, 6))
    )
    mask = torch.tensor([1.0, 1.0, 0.5, 0.2, 0.0, 0.0], dtype=torch.float64)

    def clean_of(x):
        return (x @ matrix.T).tanh()

    with torch.no_grad():
        output, correction = pull(lambda x: (2 * x, clean_of(x)), x, target, mask)
    for row in range(2):
        # The Jacobian by central differences, column by column.
        columns = [
            (clean_of(x[row] + step) - clean_of(x[row] - step)) / 2e-6
            for step in 1e-6 * torch.eye(6, dtype=torch.float64)
        ]
        expected = torch.stack(columns, 1).T @ (mask * (target[row] - clean_of(x[row])))
        torch.testing.assert_close(correction[row], expected, rtol=1e-7, atol=1e-8)
    assert torch.equal(output, 2 * x)
    assert not correction.requires_grad


@pytest.mark.parametrize("flow", [FlowSettings(), LEARNT])
@pytest.mark.parametrize("case", ["no earlier chunk", "no overlap"])
def test_where_there_is_nothing_to_continue_chunks_are_those_of_today(case, flow):
    make = partial(ActionChunk, env=TwoDoors, chunk_size=6) if case == "no overlap" else DOORS
    settings = RealTime(execution_horizon=6) if case == "no overlap" else SETTINGS
    policy, plain = (make_policy(make, real_time=each, flow=flow) for each in (settings, None))
    td = after_a_chunk(policy) if case == "no overlap" else observed(16)
    assert case != "no overlap" or td["state"][:, -2].eq(6).all()
    for seed in (None, 3):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        chunk = policy(td.clone(), deterministic=seed is None, generator=generator)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        expected = plain(observed(16), deterministic=seed is None, generator=generator)
        assert torch.equal(chunk["action"], expected["action"])
        if case == "no overlap" and seed is not None:
            assert torch.equal(chunk["sample_log_prob"], expected["sample_log_prob"])


def test_a_chunk_begins_with_the_old_one_and_is_pulled_towards_it():
    distances = {}
    for weight in (0.0, 5.0):
        policy = make_policy(real_time=RealTime(2, 1, max_guidance_weight=weight))
        td = after_a_chunk(policy)
        old = td["state"][:, :-2].view(-1, 6, 1)
        chunk = policy(td.clone(), deterministic=True)
        assert torch.equal(chunk["action"][:, 0], old[:, 2])
        assert chunk["next_state"][:, -2:].eq(torch.tensor([2.0, 1.0])).all()
        assert torch.equal(chunk["next_state"][:, :-2], chunk["action"].flatten(1))
        distances[weight] = (chunk["action"][:, 1:4] - old[:, 3:]).abs().mean(0).flatten()
    assert (distances[5.0] < distances[0.0]).all()
    assert distances[5.0][0] < 0.2 * distances[0.0][0]
    skipping = make_policy(real_time=RealTime(2, 1, method="skip"))
    chunk = skipping(td.clone(), deterministic=True)["action"]
    expected = make_policy(real_time=None)(observed(16), deterministic=True)["action"]
    assert torch.equal(chunk[:, 1:], expected[:, 1:])
    assert torch.equal(chunk[:, 0], old[:, 2])


@pytest.mark.parametrize("head", ["token", "gaussian"])
def test_heads_that_cannot_be_guided_skip(head):
    with refused(names=("real_time.method: guided", "skip")):
        make_policy(head=head)
    policy = make_policy(head=head, real_time=RealTime(2, 1, method="skip"))
    td = after_a_chunk(policy)
    chunk = policy(td.clone())
    assert torch.equal(chunk["action"][:, 0, 0], td["state"][:, 2])
    again = policy.evaluate_actions(chunk)["sample_log_prob"]
    assert torch.equal(again, chunk["sample_log_prob"])


def test_settings_that_do_not_fit_are_refused():
    for settings, names in {
        RealTime(7): ("real_time.execution_horizon", "7", "6"),
        RealTime(2, 3): ("real_time.delay_steps", "3", "2"),
        RealTime(5, 2): ("real_time.delay_steps", "2", "1"),
        RealTime(2, -1): ("real_time.delay_steps", "-1", "0"),
        RealTime(2, max_guidance_weight=-1.0): ("real_time.max_guidance_weight", "0"),
        RealTime(3): ("real_time.execution_horizon", "3", "2", "ActionChunk"),
        RealTime(2, method="conditioned"): None,
    }.items():
        if names is None:
            make_policy(real_time=settings)
            continue
        with refused(names=names):
            make_policy(real_time=settings)
    with refused(names="real_time.delay_steps"):
        make_policy(real_time=RealTime(2, []))


@pytest.mark.parametrize("delay", [1, 2])
def test_a_thread_computes_chunks_that_continue_the_old_one_after_the_measured_delay(delay):
    """Without a clock: the test lets each inference end after `delay` steps."""
    policy, gate, chunks, told = (
        make_policy(real_time=RealTime(2, 2)),
        threading.Semaphore(1),
        [],
        [],
    )
    actor, ahead = RealTimeActor(policy, None), ChunksAhead(6, 2)

    def choose(observation, running):
        gate.acquire()
        chunks.append(actor(observation, running))
        return chunks[-1]

    def continue_after(*told_now):
        told.append(told_now)
        actor.continue_after(*told_now)

    act = ahead.episode(choose, continue_after=continue_after)
    env, executed = TwoDoors(1), []
    observation, running = env.reset(seed=0)[0], torch.ones(1, dtype=torch.bool)
    requested = 0
    for step in range(16):
        if len(told) > len(chunks) and step - requested == delay:
            gate.release()
            while len(chunks) < len(told):  # a thread
                time.sleep(0.001)
            time.sleep(0.01)
        count = len(told)
        executed.append(act(observation, running))
        requested = step if len(told) > count else requested
    ahead.close()
    age = max(2, delay + 1)  # the next inference begins a step after the last one was taken
    assert told[0] == (0, None)
    assert told[1] == (2, None)
    assert set(told[2:]) == {(age, delay)}
    for old, new, (age, _) in zip(chunks[1:], chunks[2:], told[2:], strict=False):
        assert torch.equal(new[:, :delay], old[:, age : age + delay])
    assert ahead.waited == 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_it_acts_in_inference_mode_in_which_lightning_validates(deterministic):
    policy = make_policy()
    with torch.no_grad():
        td = after_a_chunk(policy)
        noise = policy.draw_noise((16,))
        expected = policy(td.clone().set("action_noise", noise), deterministic)["next_state"]
    with torch.inference_mode():
        td = td.clone().set("action_noise", noise.clone())
        assert torch.equal(policy(td, deterministic)["next_state"], expected)
        assert torch.is_inference_mode_enabled()


def test_what_a_person_did_is_not_continued():
    policy = make_policy()
    actor, td = RealTimeActor(policy, 3), observed(1)
    running = torch.ones(1, dtype=torch.bool)
    actor(td["observation"], running)
    actor.continue_after(0)
    chunk = actor(td["observation"], running)
    generator = torch.Generator().manual_seed(3)
    first, expected = (policy(observed(1), generator=generator)["action"] for _ in range(2))
    assert torch.equal(chunk, expected)
    assert not torch.equal(first, expected)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_loaded_policy_acts_as_validated_and_begins_anew_after_a_reset(deterministic, tmp_path):
    fit(tmp_path, fitting={"max_epochs": 1})
    acting = load_policy(tmp_path)
    acting.reset(seed=4)
    env = STEER(1)
    observation, total = env.reset(seed=4)[0], 0.0
    seen = []
    for _ in range(4):
        seen.append(observation["proprio"].numpy())
        action = acting.act({"proprio": seen[-1]}, deterministic)
        observation, reward, *_ = env.step(torch.as_tensor(action))
        total += float(reward)
    (episode,) = run_episodes(acting.module, STEER(1), [4], deterministic=deterministic)
    assert episode["return"] == pytest.approx(total, abs=1e-6)
    continued = acting.act({"proprio": seen[0]}, True)
    acting.reset()
    assert not np.array_equal(continued, acting.act({"proprio": seen[0]}, True))
    with refused(names=("reset()", "2 rows")):
        acting.act({"proprio": np.zeros((2, 1), np.float32)}, True)


def test_graphs_carry_the_old_chunk_unless_they_would_need_gradients():
    with refused(names=("real_time.method: guided", "--format safetensors")):
        policy = make_policy()
        traced(ActingGraph(policy, ports_of(policy)))
    for method in ("skip", "conditioned"):
        policy = make_policy(real_time=RealTime(2, 1, method))
        td = after_a_chunk(policy)
        graph = ActingGraph(policy, ports_of(policy))
        inputs = {"observation.proprio": td["observation", "proprio"], "state": td["state"]}
        outputs = traced(graph).module()(inputs)
        expected = policy(td, deterministic=True)
        assert torch.equal(outputs["next_state"], expected["next_state"])


NEIGHBOURS = {
    "steered noise": (NoisePolicy, "base", ("VLAPolicy", "real_time")),
    "residual": (ResidualActorCritic, "base", "memory"),
    "conditions": (ConditionedPolicy, "policy", "memory"),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_policies_around_one_that_acts_in_real_time_are_refused(name):
    cls, argument, names = NEIGHBOURS[name]
    with refused(names=names):
        cls(*spaces_of(), **{argument: flow_policy})


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
@pytest.mark.parametrize("flow", [FlowSettings(), LEARNT])
def test_the_log_prob_of_the_guided_chain_is_recomputed(flow, level):
    policy = make_policy(real_time=RealTime(2, [0, 1, 2]), flow=flow, log_prob_level=level)
    with torch.no_grad():
        chunk = policy(after_a_chunk(policy))
    again = policy.evaluate_actions(chunk)
    torch.testing.assert_close(
        again["sample_log_prob"], chunk["sample_log_prob"], rtol=0, atol=1e-6
    )
    assert again["sample_log_prob"].requires_grad


def test_a_log_prob_counts_what_the_env_executes_of_the_new_chunk():
    """By moving the end of the stored transition of one action after the other."""
    policy = make_policy(real_time=RealTime(2, [0, 1, 2]))
    td = policy(after_a_chunk(policy, 64))
    first, stop = td["state"][:, -1].long(), 2 + td["next_delay"]
    assert len(set(zip(first.tolist(), stop.tolist(), strict=True))) == 9
    whole = policy.evaluate_actions(td)["sample_log_prob"]
    assert (whole[:, 2:] == 0).all()  # only two actions are executed in an interval
    for i in range(6):
        moved = td.clone()
        moved["chain_to"][:, i] += 1.0
        differs = policy.evaluate_actions(moved)["sample_log_prob"] != whole
        assert torch.equal(differs.any(1), (first <= i) & (i < stop))
        # The place is that of the step in which it acts, as far as this interval has one.
        place = (i - first).clamp(0, 1)
        rows = differs.any(1)
        assert differs[rows].gather(1, place[rows, None]).all()


def guided_log_prob(matrix, x, next_x, target, mask):
    """The log-prob of a transition of a small guided flow, at t = 3/4 of four steps."""

    def predict(x):
        velocity = (x @ matrix.T).tanh()
        return velocity, x - 0.75 * velocity

    velocity, correction = pull(predict, x, target, mask)
    t = torch.full((len(x),), 0.75, dtype=x.dtype)
    velocity = velocity - guidance_weight(t, 5.0)[:, None] * correction
    mean, std = flow_transition(x, velocity, t, step_size=0.25, noise_level=0.5)
    return normal_log_prob(next_x, mean, std.log()).sum()


def test_the_gradient_of_a_log_prob_passes_through_the_guidance():
    """By finite differences, in float64."""
    generator = torch.Generator().manual_seed(0)
    matrix, x, next_x, target, direction = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((6, 6), (3, 6), (3, 6), (3, 6), (6, 6))
    )
    inputs = x, next_x, target, torch.tensor([1, 1, 0.5, 0.2, 0, 0], dtype=torch.float64)
    matrix.requires_grad_()
    guided_log_prob(matrix, *inputs).backward()
    step = 1e-6 * direction
    with torch.no_grad():
        difference = guided_log_prob(matrix + step, *inputs) - guided_log_prob(
            matrix - step, *inputs
        )
    expected = (matrix.grad * direction).sum()
    assert (difference / 2e-6).item() == pytest.approx(expected.item(), rel=1e-7)


def fit(run_dir, algorithm=PPO, real_time=SETTINGS, data=None, policy=None, fitting=None, **model):
    module = algorithm(
        make_policy(STEER, real_time=real_time, **(policy or {})), n_epochs=2, batch_size=8, **model
    )
    # Rollouts of three chunks end within an episode of four.
    own = {"num_envs": 8, "buffer_size": 3, "iterations_per_epoch": 2, "total_env_steps": 10**6}
    data = make_data(STEER, **own | (data or {}))
    fit_in(run_dir, module, data, **{"max_epochs": 2} | (fitting or {}))
    return module


TRAINED = {
    "ppo": (with_first_ratios(PPO), {}),
    "drawn delays": (with_first_ratios(PPO), {"real_time": RealTime(2, [0, 1, 1, 2])}),
    "learnt": (with_first_ratios(PPO), {"policy": {"flow": LEARNT}}),
    "grpo": (partial(with_first_ratios(GRPO), group_size=4, kl_coef=0.1), {}),
    "skip": (with_first_ratios(PPO), {"real_time": RealTime(2, 1, "skip")}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_the_first_ratio_is_one_and_without_lag_the_background_is_the_foreground(name, tmp_path):
    algorithm, settings = TRAINED[name]
    runs = {}
    for kind, collector in {
        "here": SyncCollector,
        "background": partial(AsyncCollector, max_staleness=0),
    }.items():
        module = fit(tmp_path / kind, algorithm, data={"collector": collector}, **settings)
        assert len(module.firsts) == 4
        assert max(first.abs().max() for first in module.firsts) < 5e-6
        runs[kind] = module.state_dict()
    assert_same(runs["here"], runs["background"])
    start = make_policy(STEER, **settings.get("policy", {})).state_dict()
    assert any(
        not torch.equal(value, runs["here"][f"policy.{name}"])
        for name, value in start.items()
        if "expert" in name
    )


@pytest.mark.parametrize("delays", [1, [0, 1, 2]])
def test_a_run_that_is_stopped_between_two_chunks_of_an_episode_ends_as_uninterrupted(
    delays, tmp_path
):
    settings = {"real_time": RealTime(2, delays), "data": {"iterations_per_epoch": 1}}
    fit(tmp_path / "whole", **settings)
    fit(tmp_path / "cut", fitting={"max_epochs": 1}, **settings)
    fit(tmp_path / "cut", fitting={"ckpt_path": last(tmp_path / "cut")}, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_compiled_it_follows_the_eager_run(tmp_path, traced_only):
    eager, compiled = (
        fit(tmp_path / str(compile), fitting={"max_epochs": 1}, compile=compile)
        for compile in (False, True)
    )
    assert compiled.learner.compilation.compiled
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)


def test_the_given_actions_are_the_input_and_not_the_goal():
    policy = make_policy(real_time=RealTime(2, 1, "conditioned"))
    td = observed(64)
    td["action"] = torch.rand(64, 6, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    td["clone_noise"] = policy.draw_clone_noise((64,))
    td["prefix_steps"] = torch.arange(64) % 6
    given = torch.arange(6) < td["prefix_steps"][:, None]
    loss = policy.clone_loss(td)["clone_loss"]
    assert torch.equal(loss == 0, given)
    # The noise of given actions is replaced by the actions themselves.
    noise = td["clone_noise"].clone()
    noise[:, :-1] += given.float()
    assert torch.equal(policy.clone_loss(td.clone().set("clone_noise", noise))["clone_loss"], loss)
    other = td.clone()
    other["action"] += 0.3 * given[..., None]
    changed = (policy.clone_loss(other)["clone_loss"] != loss).any(1)
    assert torch.equal(changed, td["prefix_steps"] > 0)


def clone(run_dir, **fitting):
    policy = make_policy(real_time=RealTime(2, 2, "conditioned"))
    module = BehaviorCloning(policy, batch_size=64, n_epochs=2, prefix_steps=3)
    data = {"num_envs": 16, "buffer_size": 4, "iterations_per_epoch": 2, "total_env_steps": 10**6}
    collector = partial(DatasetCollector, episodes=16)
    fit_in(run_dir, module, make_data(DOORS, **data, collector=collector), **fitting)


def test_a_conditioned_clone_resumes_exactly(tmp_path):
    clone(tmp_path / "whole", max_epochs=2)
    clone(tmp_path / "cut", max_epochs=1)
    clone(tmp_path / "cut", max_epochs=2, ckpt_path=last(tmp_path / "cut"))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_conditioned_policy_and_its_flag_belong_together():
    for real_time, prefix_steps in ((SETTINGS, 2), (None, 2), (RealTime(2, 1, "conditioned"), 0)):
        with refused(names=("prefix_steps", "real_time.method: conditioned")):
            BehaviorCloning(make_policy(real_time=real_time), prefix_steps=prefix_steps)
    with refused(names=("prefix_steps", "6", "5")):
        BehaviorCloning(make_policy(real_time=RealTime(2, 1, "conditioned")), prefix_steps=6)
