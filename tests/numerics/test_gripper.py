"""A gripper beside an arm: one convention of commands, penalties from the env to each update, and its neighbours."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from tensordict import TensorDict

from lightning_rl import (
    ActionChunk,
    ConfigurationError,
    GripperActorCritic,
    GripperSAC,
    Intervention,
    ReplayBuffer,
    SquashedActorCritic,
)
from lightning_rl.extensions.algorithms.gripper import CLOSE, OPEN, STAY
from lightning_rl.extensions.tasks.gym_hil import PickCube, ScriptedHelp, smaller
from lightning_rl.extensions.wrappers.penalty import GripperPenalty, PenaltyTerms
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.system.errors import EnvFaultError
from tests import arms
from tests.core.numerics import test_sac as sac
from tests.envs import ScriptedEnv
from tests.helpers import last, train
from tests.messages import refused
from tests.q_references import DoubleQReference, SACReference


def policy():
    torch.manual_seed(0)
    return GripperActorCritic(arms.OBSERVATION, arms.ACTION, (16,))


def seen(count):
    return TensorDict({"observation": torch.randn(count, 4)}, [count])


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_best_command_is_acted_on_and_the_arm_is_squashed(deterministic):
    made = policy()
    td = made.get_action(seen(200), deterministic, torch.Generator().manual_seed(1))
    best = made.gripper_values(td).argmax(-1)
    assert torch.equal(td["action"][:, 2], best.float())  # 0 close, 1 stay, 2 open
    assert len(best.unique()) > 1
    assert td["action"][:, :2].abs().max() <= 1.0
    assert (CLOSE, STAY, OPEN) == (0, 1, 2)


def test_actions_without_a_gripper_are_refused():
    for space in (Discrete(3), Box(-1.0, 1.0, (1,))):
        with refused(names=("GripperActorCritic", "Box", space, "SAC", "SquashedActorCritic")):
            GripperActorCritic(arms.OBSERVATION, space)
    chunks = ActionChunk(1, arms.helped_arm, 2).single_action_space
    with refused(names=(chunks, "ActionChunk")):
        GripperActorCritic(arms.OBSERVATION, chunks)
    endless = Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, np.inf], np.float32))
    with refused(names=("0 and inf", "gymnasium.wrappers.TransformAction")):
        GripperActorCritic(arms.OBSERVATION, endless)
    plain = SquashedActorCritic(arms.OBSERVATION, arms.ACTION)
    with refused(names=("GripperSAC", "SquashedActorCritic", "class_path: GripperActorCritic")):
        GripperSAC(plain)


def test_terms_are_weighed_and_one_that_is_not_said_is_named():
    env = PenaltyTerms(arms.arm(helped=False), {"discrete_penalty": 2.0})
    env.reset(seed=0)
    close, stay = np.array([0, 0, 0.0], np.float32), np.array([0, 0, 1.0], np.float32)
    said = [env.step(action)[4]["penalty"] for action in (stay, close, close, stay)]
    assert said == [0.0, -1.0, 0.0, 0.0]  # where it is closed already nothing changes
    env = PenaltyTerms(arms.arm(helped=False), {"cost": 1.0})
    env.reset(seed=0)
    with refused(
        EnvFaultError, names=("PenaltyTerms", "'cost'", "'success', 'discrete_penalty'", "`terms`")
    ):
        env.step(stay)
    with refused(names=("PenaltyTerms", "terms: {discrete_penalty: 1.0}")):
        PenaltyTerms(env, {})


def test_penalties_of_each_step_are_in_the_rollout():
    env = arms.helped_arm(2, weight=2.0)
    rollout = allocate_rollout(arms.OBSERVATION, arms.ACTION, 2, 3, extra_fields=env.extra_fields)
    observation, _ = env.reset(seed=1)
    rollout["observation"][:, 0] = observation
    commands = torch.tensor([[0.0, 0.0, 2.0], [1.0, 2.0, 0.0]])  # the third step is helped: stay
    rollout["action"][:, :3, 2] = commands
    stepper = env.rollout_stepper(rollout)
    for t in range(3):
        stepper.step(t)
    assert rollout["penalty"][:, :3].tolist() == [[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert rollout["intervened"][:, :3].tolist() == [[False, False, True]] * 2
    assert rollout["executed_action"][:, 2].tolist() == [[0.5, -0.5, 1.0]] * 2
    env.close()


def test_they_are_summed_as_rewards_are():
    env = arms.helped_arm(1, env_kwargs={"helped": False})
    replay = ReplayBuffer(arms.OBSERVATION, arms.ACTION, 1, capacity=10)
    rollout = allocate_rollout(arms.OBSERVATION, arms.ACTION, 1, 3, extra_fields=env.extra_fields)
    rollout["observation"][0, :, 0] = torch.arange(4.0)
    rollout["penalty"][0, :3] = torch.tensor([-1.0, -2.0, -4.0])
    replay.extend(rollout)
    (batch,) = replay.batches(1, 60, n_steps=2, gamma=0.5)
    found = dict(zip(batch["observation"][:, 0].tolist(), batch["penalty"].tolist(), strict=True))
    assert found == {0.0: -2.0, 1.0: -4.0, 2.0: -4.0}
    assert not batch["reward"].any()


def test_it_begins_with_a_clone_and_its_targets_too(tmp_path):
    """The actor and the gripper act as the clone does; alpha, critics' targets and optimizers are new."""
    data = {"num_envs": 2, "buffer_size": 10, "total_env_steps": 40}
    before, *_ = train(
        tmp_path / "a",
        env=arms.helped_arm,
        data=data | {"replay": ReplayBuffer},
        model={"algorithm": GripperSAC},
        seed=5,
    )
    with torch.no_grad():
        for parameter in before.policy.parameters():
            parameter += 0.1
    before.trainer.save_checkpoint(tmp_path / "a" / "checkpoints" / "last.ckpt")
    settings = {"algorithm": GripperSAC, "learning_starts": 30, "learning_rate": 1e-12}
    after, *_ = train(
        tmp_path / "b", env=arms.helped_arm, data=data | {"replay": ReplayBuffer}, model=settings | {"tau": 1e-9}, seed=6,
        trainer={"init_from": str(last(tmp_path / "a"))},
    )  # fmt: skip
    td = seen(50)
    modes = [
        one.policy.get_action(td.clone(), deterministic=True)["action"] for one in (before, after)
    ]
    torch.testing.assert_close(*modes)
    for target, source in after.target_networks():
        torch.testing.assert_close(
            [*target.parameters()], [*source.parameters()], atol=1e-6, rtol=0
        )


def test_cloning_teaches_arm_and_gripper():
    made = policy()
    td = seen(64)
    td["action"] = torch.cat((torch.full((64, 2), 0.3), 2.0 * (td["observation"][:, :1] > 0)), 1)
    for key, value in made.fields_of(td["action"]).items():
        td[key] = value
    optimizer = torch.optim.Adam(made.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        (-made.evaluate_actions(td)["sample_log_prob"].mean()).backward()
        optimizer.step()
    found = made.get_action(td.clone(), deterministic=True)["action"]
    assert (found[:, 2] == td["action"][:, 2]).float().mean() > 0.95
    assert (found[:, :2] - 0.3).abs().mean() < 0.05
    assert made.gripper_values(td).abs().max() < 4.0  # of logits it would be some 20
    assert not any(p.grad is not None for p in made.critic.parameters())


def simulation(cameras=False):
    """Answer as gym-hil's env, which closes by 2 and draws from NumPy's global generator.

    With cameras there are pictures instead of the cube's position, which its simulator knows.
    """
    spaces = {"agent_pos": Box(-np.inf, np.inf, (18,))}
    if cameras:
        pictures = dict.fromkeys(("front", "wrist"), Box(0, 255, (8, 8, 3), np.uint8))
        spaces["pixels"] = Dict(pictures)
    else:
        spaces["environment_state"] = Box(-np.inf, np.inf, (3,))

    def begin(env):
        env.cube, env.command = np.array([*np.random.uniform(0.3, 0.5, 2), 0.02]), 0.0
        env.fingers = np.array([0.4, 0.0, 0.1])
        sensor = SimpleNamespace(data=env.cube)
        env.data = SimpleNamespace(sensor=lambda name: sensor)

    def act(env):
        env.command = float(np.clip(env.command + env.action[3] - 1.0, 0, 1))
        env.fingers = env.fingers + 0.025 * env.action[:3]

    def observe(env):
        agent = np.concatenate((np.zeros(14), [255.0 * env.command], env.fingers)).astype("f4")
        if not cameras:
            return {"agent_pos": agent, "environment_state": env.cube.astype("f4")}
        pixels = {key: np.full((8, 8, 3), i, np.uint8) for i, key in enumerate(pictures)}
        return {"agent_pos": agent, "pixels": pixels}

    low, high = np.array([[-1, -1, -1, 0], [1, 1, 1, 2]], np.float32)
    return ScriptedEnv(
        Dict(spaces),
        Box(low, high),
        begin=begin,
        act=act,
        observe=observe,
        info={"succeed": False, "discrete_penalty": 0.0},
    )


def test_gym_hils_sign_is_turned_in_its_adapter():
    inner = simulation()
    env = PickCube(inner)
    observation, _ = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    for command, theirs in ((CLOSE, 2.0), (STAY, 1.0), (OPEN, 0.0), (0.4, 2.0), (1.7, 0.0)):
        env.step(np.array([0.5, 0.0, 0.0, command], np.float32))
        assert inner.action.tolist() == [0.5, 0.0, 0.0, theirs]
    closed, *_, info = env.step(np.array([0, 0, 0, CLOSE], np.float32))
    assert closed[14] == 1.0
    assert info["success"] is False
    stayed, *_ = env.step(np.array([0, 0, 0, STAY], np.float32))
    assert stayed[14] == 1.0  # neutral: it stays closed


def test_the_cube_lies_where_the_seed_says_and_nobody_elses_numbers_move():
    env = PickCube(simulation())
    np.random.seed(0)
    wanted = np.random.RandomState(0).uniform(size=3)
    first, _ = env.reset(seed=3)
    second, _ = env.reset()
    again, _ = env.reset(seed=3)
    third, _ = env.reset()
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(second, third)
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(np.random.uniform(size=3), wanted)


def test_from_pictures_the_policy_does_not_know_the_cube_and_the_helper_does():
    helped = [Intervention(PickCube(simulation(cameras)), ScriptedHelp(40, 0.5)) for cameras in (False, True)]  # fmt: skip
    (known, _), (seen, _) = (env.reset(seed=4) for env in helped)
    taken = 0
    for _ in range(30):
        assert helped[1].observation_space.contains(seen)
        assert set(seen) == {"front", "wrist", "state"}
        np.testing.assert_array_equal(seen["state"], known[:18])
        action = np.array([0.1, 0.0, 0.0, STAY], np.float32)
        (known, *_, first), (seen, *_, second) = (env.step(action) for env in helped)
        np.testing.assert_array_equal(first["executed_action"], second["executed_action"])
        taken += second["intervened"]
    assert taken > 5


def test_smaller_pictures_are_means_of_blocks_of_pixels():
    env = PickCube(simulation(cameras=True), size=4)
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    assert (observation["wrist"] == 1).all()
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    planes = torch.from_numpy(picture).permute(2, 0, 1).double()
    wanted = torch.nn.functional.avg_pool2d(planes, 2).permute(1, 2, 0).round()
    np.testing.assert_array_equal(smaller(picture, 4), wanted)
    with refused(names=("size", "8", "3")):
        PickCube(simulation(cameras=True), size=3)
    with pytest.raises(ConfigurationError, match=r"size=4 .* has none: set image_obs: true"):
        PickCube(simulation(), size=4)


def test_who_helps_does_so_less_and_less_and_goes_on_where_they_were():
    observation = np.zeros(24, np.float32)

    def played(helper, steps, ends=60):
        taken = []
        for step in range(steps):
            if step % ends == 0:
                helper.reset(7 if step == 0 and helper.steps == 0 else None)
            taken.append(helper.poll(observation).action is not None)
        return taken

    helper = ScriptedHelp(last_step=2000, rate=0.05)
    taken = played(helper, 3000)
    assert 0.5 * sum(taken[:1000]) > sum(taken[1000:2000]) > 0
    assert not any(taken[2000:])
    one, other = ScriptedHelp(2000, 0.05), ScriptedHelp(2000, 0.05)
    played(one, 100)
    other.load_state_dict(one.state_dict())
    for _ in range(200):
        a, b = one.poll(observation), other.poll(observation)
        assert (a.action is None) == (b.action is None)
        assert a.action is None or np.array_equal(a.action, b.action)


def played(positions, as_dict=False):
    """A gripper that is at given positions, one after the other."""
    state = Box(-np.inf, np.inf, (2,), np.float32)

    def observe(env):
        seen = np.array([7.0, positions[env.age]], np.float32)
        return {"state": seen} if as_dict else seen

    return ScriptedEnv(
        Dict({"state": state}) if as_dict else state,
        Box(-1.0, 1.0, (1,), np.float32),
        observe=observe,
        info=lambda env: {"penalty": -1.0} if env.age == 1 else {},
    )


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_only_a_gripper_that_really_opens_or_closes_is_penalised(sign, as_dict):
    positions = [0.5, 0.9, 0.5, 0.79, 0.2, 0.5, 0.1, 0.8, 0.2]  # open from 0.8, closed from 0.2
    changes = [0, 0, 0, 1, 0, 0, 1, 1]
    env = played([sign * at for at in positions], as_dict)
    key = "state" if as_dict else None
    env = GripperPenalty(env, 1, sign * 0.8, sign * 0.2, weight=0.5, key=key)
    for _ in range(2):  # an episode remembers nothing of the one before
        env.reset()
        penalties = [env.step(np.zeros(1))[4]["penalty"] for _ in changes]
        assert penalties == [-1.0, *(-0.5 * change for change in changes[1:])]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"index": 2}, ("number 2", "None")),
        ({"key": "state"}, ("number 1", "state")),
    ],
)
def test_a_gripper_penalty_that_does_not_fit_is_refused(changed, message):
    with refused(names=message):
        GripperPenalty(played([0.0]), **{"index": 1, "open_at": 0.8, "closed_at": 0.2, **changed})


@pytest.mark.parametrize(("dtype", "compile"), sac.EXACT_AND_TRACED)
@pytest.mark.parametrize("delay", [1, 2])
def test_twenty_updates_of_an_arm_with_a_gripper_are_those_of_the_reference(
    delay, dtype, compile, traced_only
):
    """The arm is SAC's; the gripper's critic is fitted at each update, and its penalty counts in every one."""
    module = sac.built(
        GripperSAC,
        GripperActorCritic,
        dtype,
        compile,
        space=Box(np.array([-2, 0, -1], np.float32), np.array([2, 1, 3], np.float32)),
        init_alpha=0.3,
        policy_delay=delay,
        max_grad_norm=0.5,
    )
    arm = SACReference(
        sac.actor_layers(module.policy.actor),
        sac.critic_layers(module.policy.critic),
        alpha=float(module.log_alpha.detach().exp()),
        rate=1e-2,
        tau=0.1,
        target_entropy=-sac.ACTIONS,
        limit=0.5,
    )
    gripper = DoubleQReference(
        sac.actor_layers(module.policy.gripper), rate=1e-2, tau=0.1, limit=0.5
    )
    rng = np.random.default_rng(2)
    for i in range(20):
        batch = sac.drawn(rng)
        command = rng.integers(0, 3, sac.BATCH)
        penalty = -0.5 * rng.integers(0, 2, sac.BATCH)
        with_actor = (i + 1) % delay == 0
        td = sac.tensors(batch, dtype)
        near = rng.uniform(-0.9, 0.9, sac.BATCH) * (command == 1)  # the nearest command counts
        last = torch.as_tensor(2.0 * command - 1.0 + near).to(dtype)
        td["action"] = torch.cat((td["action"], last[:, None]), -1)
        td["penalty"] = torch.as_tensor(penalty).to(dtype)
        sac.update(module, td, with_actor)
        arm.update(batch, with_actor)
        gripper.update(batch, command, penalty)
    sac.assert_follows(module, arm, sac.TOLERANCE[dtype])
    for network, wanted in (
        (module.policy.gripper, gripper.layers),
        (module.target_gripper, gripper.target),
    ):
        for mine, theirs in zip(sac.actor_layers(network), wanted, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=sac.TOLERANCE[dtype])
    reported = module.objectives["gripper"].statistics
    assert len(reported) == 20
    assert reported.close()["gripper_penalty"] < -0.1


def test_the_critics_of_an_arm_take_no_batch_normalization():
    with refused(names=("critic_normalization", "batch", "none, layer or rms")):
        GripperActorCritic(Box(-1, 1, (3,)), Box(-1, 1, (3,)), critic_normalization="batch")
