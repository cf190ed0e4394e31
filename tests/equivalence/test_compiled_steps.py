"""Steps of batched torch envs by graphs: what they take and leave is what eager steps do."""

import warnings
from functools import partial

import pytest
import torch
from gymnasium.spaces import Box

import lightning_rl as rl
from lightning_rl.collectors import EpisodeSettings
from lightning_rl.compiled.choice import StepsCompileDecision
from lightning_rl.compiled.steps import StepWriter
from lightning_rl.extensions.tasks.base import Pictures
from lightning_rl.policies.networks.encoders import DictEncoder, ImpalaCNN, SpatialSoftmaxCNN
from lightning_rl.policies.networks.memory import LSTM
from tests.envs import ScriptedTask, Walk
from tests.helpers import assert_same, last, make_collector, train
from tests.messages import refused
from tests.policies import ScriptedPolicy
from tests.probes import MaskProbe, RecallProbe, StructureProbe
from tests.variants import passing, variant


def acting_by(cls=rl.ActorCritic, **settings):
    """Return what makes a policy for an env."""
    own = {"hidden_sizes": (16,)} if cls is not ScriptedPolicy else {}
    return lambda env: cls(env.single_observation_space, env.single_action_space, **own, **settings)


def collector_of(
    make_env, compiled, steps, make_policy=None, episode_settings=None, cls=rl.SyncCollector, **more
):
    env = make_env()
    torch.manual_seed(1)
    policy = (make_policy or acting_by())(env)
    settings = {"episode_settings": episode_settings} if episode_settings else {}
    settings |= {"compilation": StepsCompileDecision(compiled, None)}
    return make_collector(cls, env, policy, steps, 1, **settings, **more)


def is_compiled(collector):
    return collector.code_paths == {"acting": "CompiledActor", "stepping": "CompiledStepper"}


def assert_alike(ours, theirs, tolerance=1e-5):
    """Two rollouts [N, T+1] hold the same ends, and numbers to a tolerance."""
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in ours.keys(True, True):
        if key == "final_observation":
            continue
        a, b = ours[key], theirs[key]
        if a.is_floating_point():
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
        else:
            assert torch.equal(a, b), key
    ours, theirs = ours["final_observation"], theirs["final_observation"]
    assert ours.count == theirs.count

    def compare(a, b):
        if isinstance(a, dict):
            for key in a:
                compare(a[key], b[key])
        else:
            kept = slice(0, ours.count + 1)
            torch.testing.assert_close(
                a[kept].float(), b[kept].float(), atol=tolerance, rtol=tolerance
            )

    compare(ours.rows, theirs.rows)


def assert_follows(make_env, steps, rollouts, make_policy=None, episode_settings=None):
    ours, theirs = (
        collector_of(make_env, compiled, steps, make_policy, episode_settings)
        for compiled in (True, False)
    )
    assert is_compiled(ours), ours.context.compilation.why
    ended = 0
    for _ in range(rollouts):
        a, b = ours.collect(), theirs.collect()
        assert_alike(a, b)
        ended += int(b["done"].sum())
        one, other = ours.metrics(), theirs.metrics()
        assert one.keys() == other.keys()
        assert list(one.values()) == pytest.approx(list(other.values()), rel=1e-4, abs=1e-5)
    assert ended, "no episode ended, so no start was made"
    for key in ("seed", "episode", "elapsed"):
        assert torch.equal(getattr(ours.env, key), getattr(theirs.env, key))
    assert_same(ours._loop._generator.get_state(), theirs._loop._generator.get_state())


def test_a_thousand_steps_of_cart_pole_compiled_by_inductor_are_those_of_eager_stepping():
    assert_follows(lambda: rl.CartPole(8), 125, 8)


def of_pictures(space):
    if isinstance(space, Box):
        return SpatialSoftmaxCNN(space, 4, (4,), (3,), (1,))
    pictures = next(key for key, child in space.items() if len(child.shape) == 3)
    return DictEncoder(space, {pictures: lambda space: ImpalaCNN(space, 8, (4,))})


SEEING = acting_by(encoder=of_pictures)
SAC_ACTOR = acting_by(rl.SquashedActorCritic, num_critics=2)
CUBES = partial(rl.PushCube, 6, max_episode_steps=9)
PAIRS = {
    "PushCube": (partial(rl.PushCube, 96, max_episode_steps=20), None),
    "PointMass": (partial(rl.PointMass, 8, max_episode_steps=20), None),
    "CartPoleSwingUp": (partial(rl.CartPoleSwingUp, 8, max_episode_steps=20), None),
    "PushBlocks": (partial(rl.PushBlocks, 3, max_episode_steps=7, size=8), SEEING),
    "pictures": (
        partial(rl.PushCube, 3, max_episode_steps=7, pictures=Pictures(8, 2, True)),
        SEEING,
    ),
    "memory": (partial(RecallProbe, 6), acting_by(memory=lambda size: LSTM(size, 8))),
    "noise": (CUBES, acting_by(noise_correlation=0.9)),
    "masks": (partial(MaskProbe, 6), None),
    "parts": (partial(StructureProbe, 6), None),
    "SAC's actor": (CUBES, SAC_ACTOR),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_task_and_policy_is_stepped_as_eagerly(name, traced_only):
    make_env, make_policy = PAIRS[name]
    assert_follows(make_env, 16, 4, make_policy)


@pytest.mark.parametrize("name", PAIRS)
def test_starts_of_many_numbers_are_made_of_the_rows_that_need_one(name, traced_only):
    make_env, make_policy = PAIRS[name]
    collector = collector_of(make_env, True, 16, make_policy)
    steps = collector._loop._writers[0].actor._writer.steps
    assert (steps.reset_mode.name == "LATER") == (name in {"PointMass", "pictures", "PushBlocks"})


SHORT_CUBES = partial(rl.PushCube, 8, max_episode_steps=5)
OF_GROUPS = EpisodeSettings(group_size=4, reset_every_rollout=True, first_episode_only=True)


def test_groups_that_end_early_are_stepped_as_eagerly(traced_only):
    assert_follows(SHORT_CUBES, 12, 3, episode_settings=OF_GROUPS)


def test_in_the_background_without_lag_it_collects_the_same(traced_only):
    ours = collector_of(CUBES, True, 16, cls=rl.AsyncCollector, max_staleness=0, timeout_s=60)
    theirs = collector_of(CUBES, False, 16)
    assert is_compiled(ours)
    try:
        for _ in range(3):
            a, b = ours.collect(), theirs.collect()
            for key in ("observation", "action", "reward", "done", "policy_version"):
                torch.testing.assert_close(a[key], b[key], atol=1e-5, rtol=1e-5)
            for one in (ours, theirs):
                with torch.no_grad():
                    one.policy.actor[0].bias.add_(0.1)
                one.policy.version += 1
                one.publish()
    finally:
        ours.close()


def test_all_rollout_buffers_share_what_a_cuda_graph_writes(traced_only):
    """Otherwise each rollout in the background would capture the graph again."""
    collector = collector_of(lambda: rl.PushCube(6), True, 4)
    (writer,) = (one.actor._writer for one in collector._loop._writers)
    writer.steps._device = torch.device("cuda")
    rollouts = [collector.collect().clone() for _ in range(2)]
    first, second = (StepWriter(writer.steps, rollout, None, None) for rollout in rollouts)
    slots = first._slots[0] + second._slots[0]
    assert [id(place) for place in first.places] == [id(place) for place in second.places]
    assert not {slot.data_ptr() for slot in slots} & {p.data_ptr() for p in first.places}


def run(tmp_path, name, iterations, **more):
    data = {"num_envs": 6, "buffer_size": 16, "total_env_steps": 96 * 8, "iterations_per_epoch": 2}
    return train(
        tmp_path / name,
        env=lambda n: rl.PushCube(n, max_episode_steps=9),
        data=data | {"num_eval_episodes": 2},
        model={"compile": True, "batch_size": 48, "n_epochs": 2},
        trainer={"max_steps": iterations},
        **more,
    )


def test_a_compiled_run_that_is_resumed_equals_the_uninterrupted_one_to_the_bit(
    tmp_path, traced_only
):
    whole, data, _ = run(tmp_path, "whole", 8)
    assert data.collector is None
    run(tmp_path, "first", 4)
    again, *_ = run(tmp_path, "second", 8, ckpt_path=last(tmp_path / "first"))
    assert again.step_compilation.compiled
    assert_same(dict(whole.state_dict()), dict(again.state_dict()))


def test_sac_warms_up_plainly_and_goes_on_compiled(tmp_path, traced_only):
    warm_up = EpisodeSettings(random_env_steps=200)
    ours, theirs = (
        collector_of(CUBES, compiled, 16, SAC_ACTOR, warm_up) for compiled in (True, False)
    )
    for _ in range(5):
        assert_alike(ours.collect(), theirs.collect())


def test_a_setting_of_the_env_that_changes_is_taken_up(traced_only):
    collector, plain = (collector_of(Walk, compiled, 8) for compiled in (True, False))
    for pace in (1.0, 2.0, 2.5):
        collector.env.pace = plain.env.pace = pace
        assert_alike(collector.collect(), plain.collect())


def decides(env, state, action):
    if (state["x"] > 1).any():
        action = action * 0.5
    return state, action


def lists(env, state, action):
    env.past.append(state["x"])
    return state, action - 0.1 * len(env.past[-3:])


def writes(env, state, action):
    env.sum += action
    return state, action - 0.1 * env.sum


def grows():
    def move(env, state, action):
        return (
            {"x": state["x"] + action, "past": torch.cat((state["past"], state["x"][:, None]), 1)},
        )

    def start(uniform):
        return {"x": uniform - 0.5, "past": uniform[:, :0].unsqueeze(2)}

    return ScriptedTask(4, start, move, observe=lambda state: state["x"])


def walk(name, change, **attributes):
    """Make a walk whose actions are changed before they act."""

    def make():
        env = passing(Walk, name, transition=change)()
        vars(env).update({key: made() for key, made in attributes.items()})
        return env

    return make


def by_its_memory(policy, td, generator):
    policy.past.append(len(td))
    policy.steps += 1
    return torch.full((len(td), 1), float(len(policy.past)) + 10 * float(policy.steps))


def remembering(env):
    """A policy that keeps its state in the module, a list, and a buffer that it writes."""
    spaces = env.single_observation_space, env.single_action_space
    policy = variant(ScriptedPolicy, "Remembers")(*spaces, by_its_memory)
    policy.past = []
    policy.register_buffer("steps", torch.zeros(()))
    return policy


REFUSED = {
    "a decision": (walk("Decides", decides), None, "test_compiled_steps.py, line "),
    "a list": (walk("Lists", lists, past=list), None, "Lists.past"),
    "a tensor written": (walk("Writes", writes, sum=lambda: torch.zeros(4, 1)), None, "Writes.sum"),
    "global draws": (
        walk("Draws", lambda env, state, action: (state, action + torch.randn(4, 1))),
        None,
        "aten.randn.default",
    ),
    "a step of its own": (
        passing(Walk, "StepsItself", step=lambda env, action: (action * 2,)),
        None,
        "StepsItself",
    ),
    "a policy's own state": (Walk, remembering, "Remembers.past"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_graph_runs_eagerly_and_says_why(name, traced_only):
    make_env, make_policy, why = REFUSED[name]
    with refused(UserWarning, names=why) as said:
        ours = collector_of(make_env, True, 8, make_policy)
    assert sum(why in str(one.message) for one in said) == 1, [str(one.message) for one in said]
    assert not is_compiled(ours)
    assert why in ours.context.compilation.why
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs = collector_of(make_env, False, 8, make_policy)
    for _ in range(3):
        torch.manual_seed(5)
        a = ours.collect()
        torch.manual_seed(5)
        assert_alike(a, theirs.collect(), 0)


def test_a_state_of_another_shape_in_each_step_is_refused(traced_only):
    with refused(UserWarning, names=("ScriptedTask", "shape", "dtype")):
        ours = collector_of(grows, True, 2)
    assert_alike(ours.collect(), collector_of(grows, False, 2).collect(), 0)


def test_auto_compiles_the_steps_of_a_run_of_many_and_says_so(
    tmp_path, capsys, traced_only, monkeypatch
):
    monkeypatch.setattr(StepsCompileDecision, "pays_from", 30)
    for count, way in ((96 * 2, "CompiledActor"), (96, "NumpyActor")):
        data = {"num_envs": 6, "buffer_size": 16, "total_env_steps": count, "num_eval_episodes": 1}
        module, *_ = train(tmp_path / way, env=rl.PushCube, data=data, model={"compile": "auto"})
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("The env")]
        compiled = way == "CompiledActor"
        assert module.step_compilation.compiled is compiled
        why = "32 steps of all envs, and compiling pays from 30."
        assert said == [f"The env is stepped compiled (compile: auto): {why}"] * compiled
