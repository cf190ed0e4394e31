"""A recorded motion is read as it is, compared by definition, and a robot starts in it and tracks it."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tensordict import TensorDict

from lightning_rl import MotionRobot, RandomNetworkDistillation, TensorSimulator, TermWrapper
from lightning_rl.extend import ranks
from lightning_rl.extensions.managers.term import Reward, Termination
from lightning_rl.extensions.motions.motion import (
    read_motion,
    start_frames,
    start_probabilities,
    tracking_errors,
)
from lightning_rl.extensions.motions.robot import deviated
from lightning_rl.extensions.motions.style import Discriminator
from lightning_rl.rollout.allocation import allocate_rollout
from lightning_rl.rollout.contract import FinalObservationWriter
from lightning_rl.system.errors import EnvFaultError
from tests.core.numerics.test_sac import actor_layers
from tests.helpers import assert_same_run, last, train
from tests.messages import refused
from tests.numerics.test_tensor_simulator import IsaacLike
from tests.numerics.test_transfer import LAYOUT, MODEL
from tests.q_references import forward
from tests.references import numeric_gradient

NAMES = ["left_hip", "right_hip"]
FPS, LENGTH = 30, 61


def recording(times):
    """Joints, base and its velocities at times, in float64: the base walks in a circle, upright."""
    joints = np.stack((0.3 * np.sin(3 * times), 0.1 - 0.2 * np.sin(2 * times)), 1)
    angle = 2.0 * times  # beyond pi: the quaternions of a file may change their sign
    base = np.zeros((len(times), 7))
    base[:, 0], base[:, 1], base[:, 2] = np.cos(angle), np.sin(angle), 0.55
    base[:, 3], base[:, 6] = np.cos(angle / 2), np.sin(angle / 2)
    return joints, base


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leg = '<geom type="capsule" size=".03" fromto="0 0 0 0 0 -.4" mass="1"/>'
    foot = '<body name="foot" pos="0 0 -.4"><geom size=".03" mass=".1"/></body>'
    (tmp_path / "robot.xml").write_text(MODEL.replace(leg, leg + foot, 1))
    (tmp_path / "robot.yaml").write_text(LAYOUT)
    joints, base = recording(np.arange(LENGTH) / FPS)
    base[40:, 3:] *= -1.0
    content = {"joint_pos": np.concatenate((base, joints), 1), "fps": FPS, "joint_names": NAMES}
    np.savez(tmp_path / "walk.npz", **content)
    bodies = {"body_pos_w": base[:, None, :3], "body_quat_w": base[:, None, 3:]}
    np.savez(tmp_path / "bodies.npz", joint_pos=joints, fps=np.array([FPS]), **bodies)
    return content


def robot(num_envs, **settings):
    files = {"model": "robot.xml", "layout": "robot.yaml", "motion": "walk.npz"}
    return MotionRobot(num_envs, **files, **{"starts": "first"} | settings)


def test_a_motion_is_read_at_the_control_period(files):
    motion = read_motion("walk.npz", NAMES[::-1], 0.02)
    times = np.arange(len(motion)) * 0.02
    assert times[-1] == pytest.approx((LENGTH - 1) / FPS)
    joints, base = recording(times)
    # Lines between the file's frames are off by up to (acceleration / 8) / FPS^2.
    np.testing.assert_allclose(motion.joints, joints[:, ::-1], atol=4e-4)
    np.testing.assert_allclose(motion.root, base[:, :3], atol=6e-4)
    upright = np.sign((motion.rotation.numpy() * base[:, 3:]).sum(1))
    np.testing.assert_allclose(motion.rotation * upright[:, None], base[:, 3:], atol=2e-4)
    inner = slice(2, -2)
    velocity = np.stack((-2 * base[:, 1], 2 * base[:, 0]), 1)
    np.testing.assert_allclose(motion.velocity[inner, :2], velocity[inner], atol=0.06)
    turn = np.broadcast_to([0.0, 0.0, 2.0], (len(times), 3))
    np.testing.assert_allclose(motion.turn_rate[inner], turn[inner], atol=0.02)
    rates = np.stack((-0.4 * np.cos(2 * times), 0.9 * np.cos(3 * times)), 1)
    np.testing.assert_allclose(motion.joint_velocities[inner], rates[inner], atol=0.04)


def test_the_base_may_stand_with_the_bodies_and_the_names_in_the_setting(files):
    whole = read_motion("walk.npz", NAMES, 0.02)
    parts = read_motion("bodies.npz", NAMES, 0.02, NAMES)
    for name, value in vars(whole).items():
        torch.testing.assert_close(getattr(parts, name), value)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"joint_names": ["left_hip", "knee"]}, ("right_hip", "knee", "walk.npz")),
        ({"joint_names": None}, ("walk.npz", "joint_names")),
        ({"joint_pos": np.zeros((9, 5))}, ("walk.npz", "joint_pos", "[9, 5]", "[T, 9]")),
        ({"joint_pos": np.zeros((9, 9))}, ("walk.npz", "quaternion", "0.000")),
        ({"joint_pos": np.full((9, 9), np.nan)}, ("walk.npz", "not finite")),
        ({"fps": 4000}, ("walk.npz", "0.015")),
    ],
)
def test_a_file_that_is_no_motion_is_refused(change, names, files):
    content = {key: value for key, value in (files | change).items() if value is not None}
    np.savez("walk.npz", **content)
    with refused(names=names):
        read_motion("walk.npz", NAMES, 0.02)


def test_another_file_is_refused(files, tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    for name, part in (("text.npz", "npz"), ("none.npz", "there is no file")):
        with refused(names=(name, part)):
            read_motion(name, NAMES, 0.02)


def test_errors_equal_their_definition(files):
    motion = read_motion("walk.npz", NAMES, 0.02)
    draw = np.random.default_rng(1)
    frame = draw.integers(0, len(motion), 7)
    joints, speeds = draw.normal(size=(2, 7, 2))
    base = np.concatenate((draw.normal(size=(7, 3)), draw.normal(size=(7, 4))), 1)
    base[:, 3:] /= np.linalg.norm(base[:, 3:], axis=1, keepdims=True)
    tensors = [torch.from_numpy(part).float() for part in (joints, speeds, base)]
    errors = tracking_errors(motion, torch.from_numpy(frame), *tensors)
    for row, index in enumerate(frame):
        reference = {name: value[index].double().numpy() for name, value in vars(motion).items()}
        off = joints[row] - reference["joints"]
        cosine = abs(np.dot(reference["rotation"], base[row, 3:]))
        expected = {
            "joint_error": np.mean(np.abs(off)),
            "joints": np.dot(off, off),
            "joint_velocities": np.sum((speeds[row] - reference["joint_velocities"]) ** 2),
            "root": np.sum((base[row, :3] - reference["root"]) ** 2),
            "rotation": (2 * np.arccos(min(cosine, 1.0))) ** 2,
        }
        for name, value in expected.items():
            assert float(errors[name][row]) == pytest.approx(value, abs=1e-5), name


def test_starts_are_drawn_where_failures_were():
    failures = np.array([[0, 0, 4, 1, 0], [0, 0, 0, 0, 0]], np.float64)
    probabilities = start_probabilities(torch.from_numpy(failures), 0.1).numpy()
    blame = np.zeros(5)
    for part, count in enumerate(failures[0]):
        for before in range(3):
            if part - before >= 0:
                blame[part - before] += 0.8**before * count
    np.testing.assert_allclose(probabilities[0], 0.02 + 0.9 * blame / blame.sum(), atol=1e-12)
    np.testing.assert_allclose(probabilities[1], 0.2)
    uniform = torch.rand(200_000, 2)
    rows = torch.from_numpy(probabilities[:1]).expand(len(uniform), 5)
    frame = start_frames(rows, uniform, 50).numpy()
    assert (frame.min(), frame.max()) == (0, 48)
    shares = np.bincount(frame // 10, minlength=5) / len(frame)
    np.testing.assert_allclose(shares, probabilities[0], atol=0.005)
    inside = np.bincount(frame[frame // 10 == 2] - 20) / (frame // 10 == 2).sum()
    np.testing.assert_allclose(inside, 0.1, atol=0.005)


def test_an_episode_starts_in_a_frame_and_zero_follows_the_motion(files):
    env = robot(4, starts="uniform")
    env.reset(seed=3)
    frame = env.state["frame"]
    assert len(set(frame.tolist())) > 1
    columns = env.layout.columns("qpos", env.joints)
    torch.testing.assert_close(env.state["qpos"][:, columns], env.motion.joints[frame])
    torch.testing.assert_close(env.state["qpos"][:, :3], env.motion.root[frame])
    env.step(torch.zeros(4, 2))
    torch.testing.assert_close(env.final_state["ctrl"], env.motion.joints[frame + 1])
    env.step(torch.ones(4, 2))
    scale = torch.tensor([0.5, 0.25])  # of right_hip and left_hip, the layout's order
    torch.testing.assert_close(env.final_state["ctrl"], env.motion.joints[frame + 2] + scale)
    plain = robot(4, residual=False)
    plain.reset(seed=3)
    plain.step(torch.ones(4, 2))
    at_rest = torch.tensor([[-0.2, 0.1]])
    torch.testing.assert_close(plain.final_state["ctrl"], (at_rest + scale).expand(4, 2))


def test_a_failure_stays_counted_in_the_next_episodes(files):
    env = robot(2, terminations={"deviated": Termination(deviated, {"angle": 0.001}, ends="fail")})
    env.reset(seed=0)
    *_, terminated, _, info = env.step(torch.ones(2, 2))
    assert (terminated & info["fail"]).all()
    expected = torch.zeros(2, env.parts)
    expected[:, 0] = 1.0
    torch.testing.assert_close(env.state["failures"], expected)
    env.reset()
    torch.testing.assert_close(env.state["failures"], expected)
    env.reset(seed=0)
    assert env.state["failures"].sum() == 0


def test_training_on_a_motion_resumes_bit_for_bit(files, tmp_path):
    """Failures are part of the state: the next starts depend on them."""
    narrow = {"deviated": Termination(deviated, {"distance": 0.05}, ends="fail")}
    env = partial(robot, starts="adaptive", parts=5, terminations=narrow)
    train(tmp_path / "whole", env=env)
    train(tmp_path / "parts", env=env, trainer={"max_epochs": 1})
    train(tmp_path / "parts", env=env, ckpt_path=last(tmp_path / "parts"))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_terms_of_another_simulator_compare_with_a_motion(files):
    """A simulator that is no MujocoEnv gets the reward from its own positions, by the same functions."""
    motion = read_motion("walk.npz", NAMES, 0.02)

    def joints(env):
        frame = env.elapsed.clamp(max=len(motion) - 1)
        place = env.state["policy"].float().expand(-1, 2)
        base = torch.cat((motion.root[frame], motion.rotation[frame]), 1)
        errors = tracking_errors(motion, frame, place, torch.zeros_like(place), base)
        return (-2.0 * errors["joints"]).exp()

    simulator = partial(TensorSimulator, make=IsaacLike, missing_final="last_observation")
    env = TermWrapper(3, simulator, rewards={"env": None, "joints": Reward(joints)})
    env.reset(seed=1)
    _, reward, *_ = env.step(torch.zeros(3, 1))
    place = torch.linspace(-1, 1, 3)[:, None]
    expected = (-2.0 * (place - motion.joints[1]).square().sum(1)).exp()
    torch.testing.assert_close(reward, expected)


SPACE = Dict({"style": Box(-9, 9, (2,)), "motion": Box(-9, 9, (4,)), "policy": Box(-9, 9, (3,))})


def discriminator(**settings):
    torch.manual_seed(2)
    settings = {"hidden_sizes": [6], "activation": "tanh", "gradient_penalty": 3.0} | settings
    return Discriminator(SPACE, **settings)


def test_the_style_reward_is_that_of_the_reference():
    """With an episode that ends in the middle, whose final observation differs from the next start."""
    module = discriminator(activation="relu")
    rollout = allocate_rollout(SPACE, Box(-1, 1, (1,)), 3, 5)
    draw = np.random.default_rng(3)
    for key, size in (("style", 2), ("motion", 4)):
        values = draw.normal(1.0, 2.0, (3, 6, size))
        rollout["observation", key].copy_(torch.from_numpy(values))
    rollout["terminated"][1, 2] = rollout["done"][1, 2] = True
    final = {key: torch.full((3, *space.shape), 2.0) for key, space in SPACE.items()}
    FinalObservationWriter(rollout).write(2, TensorDict(final, [3]))
    reward, steps = module.reward(rollout)
    state = rollout["observation", "style"].double().numpy()
    following = state[:, 1:].copy()
    following[1, 2] = 2.0
    motion = rollout["observation", "motion"][:, :-1].double().numpy().reshape(-1, 4)
    mean, deviation = motion.mean(0), np.sqrt(motion.var(0) + 1e-8)
    pairs = np.concatenate((state[:, :-1], following), -1).reshape(-1, 4)
    pairs = np.clip((pairs - mean) / deviation, -5, 5)
    score = forward(actor_layers(module.network), pairs)[0][:, 0]
    expected = np.maximum(0.0, 1.0 - 0.25 * (score - 1.0) ** 2).reshape(3, 5)
    np.testing.assert_allclose(reward.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(steps["policy"].numpy(), pairs, atol=1e-5)
    np.testing.assert_allclose(
        steps["motion"].numpy(), np.clip((motion - mean) / deviation, -5, 5), atol=1e-5
    )


def test_steps_that_only_reset_are_no_style_and_no_curiosity():
    rollout = allocate_rollout(
        SPACE, Box(-1, 1, (1,)), 3, 5, extra_fields={"padding": ((), torch.bool)}
    )
    rollout["observation", "style"].normal_()
    rollout["padding"][1, 2] = True
    module, real = discriminator(), ~rollout["padding"][:, :-1]
    _, steps = module.reward(rollout)
    style = rollout["observation", "style"]
    pairs = module.normalized(torch.cat((style[:, :-1], style[:, 1:]), -1))
    assert torch.equal(steps["policy"], pairs[real])
    network = RandomNetworkDistillation(SPACE, keys=["style"])
    assert len(network.reward(rollout, 0)[1]) == real.sum()


@pytest.mark.parametrize("samples", [7, 8, 0])
def test_all_ranks_take_as_many_minibatches_of_style_and_curiosity(samples, monkeypatch):
    """One more than this rank needs, because another rank has more steps."""
    monkeypatch.setattr(ranks, "gather_over_ranks", lambda count: [count, count + 1])
    states = torch.arange(2.0 * samples).reshape(samples, 2)
    network = RandomNetworkDistillation(SPACE, keys=["style"], batch_size=4)
    curiosity = [minibatch["state"] for minibatch in network.minibatches(states)]
    steps = TensorDict({"policy": states}, [samples])
    style = [part["policy"] for part in discriminator(batch_size=4).minibatches(steps)]
    for parts in (curiosity, style):
        assert len(parts) == -(-samples // 4) + 1
        assert torch.equal(torch.cat(parts).sort(0).values, states)


def test_a_style_or_a_curiosity_without_the_state_after_a_termination_is_refused():
    rollout = allocate_rollout(SPACE, Box(-1, 1, (1,)), 3, 5)
    rollout["terminated"][1, 2] = rollout["done"][1, 2] = True
    cure = "missing_final: last_observation"
    novelty = RandomNetworkDistillation(SPACE)
    for reward in (discriminator().reward, partial(novelty.reward, env_steps=0)):
        with refused(EnvFaultError, names=("env 1", "step 2", "info['final_obs']", cure)):
            reward(rollout)


def test_the_loss_of_a_discriminator_has_the_gradient_of_its_reference():
    module = discriminator().double()
    policy, motion = torch.randn(2, 5, 4, dtype=torch.float64)
    loss, scalars = module.loss(TensorDict({"policy": policy, "motion": motion}, [5]))
    loss.backward()
    layers = actor_layers(module.network)

    def score(inputs):
        (inner, bias), (outer, shift) = layers
        return np.tanh(inputs @ inner + bias) @ outer[:, 0] + shift[0]

    def reference():
        real, width = motion.numpy(), 1e-5
        slopes = [
            (score(real + width * axis) - score(real - width * axis)) / (2 * width)
            for axis in np.eye(4)
        ]
        penalty = np.square(slopes).sum(0).mean()
        least_squares = (
            np.square(score(real) - 1).mean() + np.square(score(policy.numpy()) + 1).mean()
        )
        return least_squares + 1.5 * penalty

    assert loss.item() == pytest.approx(reference(), rel=1e-7)
    assert scalars["gradient_penalty"] > 0
    gradients = numeric_gradient(reference, [array for layer in layers for array in layer])
    for gradient, parameter in zip(gradients, module.network.parameters(), strict=True):
        np.testing.assert_allclose(gradient.T, parameter.grad.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"style_key": "stile"}, ("stile", "motion, policy, style")),
        ({"motion_key": "policy"}, ("policy", "style", "2", "3")),
        ({"gradient_penalty": -1.0}, ("gradient_penalty", "-1.0")),
    ],
)
def test_a_discriminator_without_its_observations_is_refused(settings, names):
    with refused(names=names):
        discriminator(**settings)


def test_a_robot_in_the_motion_has_the_style_of_the_motion(files):
    env = robot(200, style=True, starts="uniform")
    observation, _ = env.reset(seed=2)
    frame = env.state["frame"]
    size = env.single_observation_space["style"].shape[0]
    assert size == 2 * 2 + 10
    motion = observation["motion"].unflatten(1, (2, size))
    drawn = (motion[:, :1, :2] - env.motion.joints).abs().sum(-1).argmin(1)
    assert len(set(drawn.tolist())) > len(env.motion) // 2
    same = {int(index): row for row, index in enumerate(frame)}
    rows = [(row, same[int(index)]) for row, index in enumerate(drawn) if int(index) in same]
    assert len(rows) > 50
    of_motion, of_robot = (torch.tensor(part) for part in zip(*rows, strict=True))
    torch.testing.assert_close(motion[of_motion, 0], observation["style"][of_robot])
    following = (motion[:, 1:, :2] - env.motion.joints).abs().sum(-1).argmin(1)
    torch.testing.assert_close(following, drawn + 1)


def test_the_camera_stays_with_a_robot_that_walks_away_from_what_is_fixed(files, tmp_path):
    """A box at the start does not move the camera back."""
    text = (tmp_path / "robot.xml").read_text()
    box = '<worldbody><geom type="box" size=".1 .1 .1" pos="0 0 3"/>'
    (tmp_path / "robot.xml").write_text(text.replace("<worldbody>", box))
    env = robot(1)
    env.reset(seed=0)
    env.render([0])
    _, near = env._camera._around()
    env.state["qpos"][:, env.layout.columns("qpos", ("root",))[:2]] += 20.0
    env.render([0])
    middle, far = env._camera._around()
    assert middle[0] > 15.0
    assert far == pytest.approx(near, rel=1e-3)
