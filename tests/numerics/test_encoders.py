"""Encoders turn pictures, numbers and choices into features; actor and critic read what they are given, and no more."""

import copy
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from tensordict import TensorDict
from torch import nn

from lightning_rl import (
    GRPO,
    PPO,
    SAC,
    TD3,
    ActionChunk,
    ActorCritic,
    ActorOnly,
    AsyncCollector,
    BehaviorCloning,
    DeterministicActorCritic,
    DictEncoder,
    EncodedObservations,
    FrozenEncoder,
    GripperSAC,
    GymnasiumEnv,
    ImpalaCNN,
    NatureCNN,
    OneHot,
    PerceptronEncoder,
    PointMass,
    PushCube,
    ReplayBuffer,
    SpatialSoftmaxCNN,
    SquashedActorCritic,
)
from lightning_rl.checkpoints.trust import checked_config
from lightning_rl.extensions.tasks.base import Pictures
from lightning_rl.functional import shift_pictures
from lightning_rl.policies.networks.encoders import picture_keys
from lightning_rl.rollout.allocation import allocate_rollout
from tests.arms import arm
from tests.core.equivalence.test_resume import assert_resumes
from tests.envs import ScriptedEnv
from tests.equivalence.features import MinimalInfo
from tests.equivalence.test_async import assert_same_training
from tests.helpers import last, load, scalars, train
from tests.messages import refused

POLICIES = [ActorCritic, SquashedActorCritic, DeterministicActorCritic]


PICTURE = Box(0, 255, (12, 10, 3), np.uint8)
ACTION = Box(-1.0, 1.0, (2,), np.float32)
SMALL = partial(NatureCNN, size=8, channels=(4, 6), kernels=(4, 2), strides=(2, 2))


def pictures(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


def test_grey_pictures_and_stacks_are_read_as_their_channels():
    grey, stack = pictures(5, 12, 10), pictures(5, 3, 12, 10)
    coloured = pictures(5, 2, 12, 10, 3)
    first = pictures(5, 4, 3, 12, 10)
    for batch, channels in ((grey, 1), (stack, 3), (coloured, 6), (first, 12)):
        encoder = SMALL(Box(0, 255, batch.shape[1:], np.uint8))
        assert encoder.input_shape == (channels, 12, 10)
    planes = first.reshape(5, 12, 12, 10) / 255.0
    torch.testing.assert_close(encoder(first), encoder.layers(planes))
    encoder = SMALL(Box(0, 255, (3, 12, 10), np.uint8))
    other = copy.deepcopy(encoder)
    other.__init__(Box(0, 255, (12, 10, 3), np.uint8), size=8, channels=(4, 6), kernels=(4, 2), strides=(2, 2))  # fmt: skip
    other.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(encoder(stack), other(stack.permute(0, 2, 3, 1)))
    encoder = SMALL(Box(0, 255, (2, 12, 10, 3), np.uint8))
    planes = coloured.permute(0, 1, 4, 2, 3).reshape(5, 6, 12, 10)
    torch.testing.assert_close(encoder(coloured), encoder.layers(planes / 255.0))


def test_floats_between_minus_one_and_one_are_taken_as_they_are_and_others_refused():
    encoder = SMALL(Box(0.0, 1.0, (12, 10, 3), np.float32))
    batch = pictures(5, 12, 10, 3)
    of_bytes = SMALL(PICTURE)
    of_bytes.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(encoder(batch / 255.0), of_bytes(batch))
    with refused(names=("NatureCNN", "-1 and 1", "(12, 10, 3), float32")):
        SMALL(Box(0.0, 255.0, (12, 10, 3), np.float32))


def test_a_point_is_the_mean_place_of_what_its_channel_sees():
    """Left and top are -1, right and bottom 1, x first; a channel that sees nothing is in the middle."""
    encoder = SpatialSoftmaxCNN(
        Box(0, 255, (9, 17, 3), np.uint8), points=3, channels=[3], kernels=[1], strides=[1]
    )
    convolution, _, last, _ = encoder.layers
    with torch.no_grad():
        convolution.weight.copy_(torch.eye(3)[:, :, None, None])
        last.weight.copy_(90.0 * torch.eye(3)[:, :, None, None])
    picture = torch.zeros(9, 17, 3, dtype=torch.uint8)
    picture[2, 16, 0] = 255
    picture[4, 0, 1] = picture[8, 2, 1] = 255  # two of them: between
    expected = [1.0, 2 / 8 * 2 - 1, (-1 + 2 / 16 * 2 - 1) / 2, (0 + 1) / 2, 0.0, 0.0]
    torch.testing.assert_close(encoder(picture), torch.tensor(expected))
    with refused(names=("SpatialSoftmaxCNN.points", "0")):
        SpatialSoftmaxCNN(PICTURE, points=0)
    with refused(names=("SpatialSoftmaxCNN", "12x3", "9x9")):
        SpatialSoftmaxCNN(Box(0, 255, (12, 3, 3), np.uint8))


def test_a_crop_is_what_a_slice_is_and_a_resize_keeps_the_mean():
    whole, cropped = SMALL(Box(0, 255, (8, 6, 3), np.uint8)), SMALL(PICTURE, crop=(2, 3, 8, 6))
    cropped.load_state_dict(whole.state_dict())
    batch = pictures(5, 12, 10, 3)
    torch.testing.assert_close(cropped(batch), whole(batch[:, 2:10, 3:9]))
    resized = SMALL(PICTURE, resize=(24, 20))
    assert resized.input_shape == (3, 24, 20)
    resized.layers = nn.Flatten()
    resized.size = 3 * 24 * 20
    level = torch.full((1, 12, 10, 3), 51, dtype=torch.uint8)
    torch.testing.assert_close(resized(level), torch.full((1, 1440), 0.2))
    with refused(names=("NatureCNN", "crop=[5, 0, 8, 6]", "12x10")):
        SMALL(PICTURE, crop=(5, 0, 8, 6))


@pytest.mark.parametrize("kind", ["group", "layer"])
@pytest.mark.parametrize(
    "make",
    [
        partial(NatureCNN, size=8, kernels=(4, 2, 2), strides=(2, 1, 1)),
        partial(ImpalaCNN, size=8),
        partial(SpatialSoftmaxCNN, kernels=(4, 2, 2), strides=(2, 1, 1)),
    ],
)
def test_channels_are_normalised_by_choice_and_alike_in_training_and_acting(make, kind):
    encoder = make(PICTURE, channels=(16, 16, 16), normalization=kind)
    groups = {layer.num_groups for layer in encoder.modules() if isinstance(layer, nn.GroupNorm)}
    assert groups == ({2} if kind == "group" else {1})
    assert not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in encoder.modules())  # fmt: skip
    batch = pictures(5, 12, 10, 3)
    assert torch.equal(encoder.train()(batch), encoder.eval()(batch))


def test_channels_are_scaled_by_their_running_mean_and_variance():
    """Without that a bright ground is the largest signal there is."""
    encoder = SMALL(PICTURE, normalize=True, crop=(2, 3, 8, 6))
    bright = (200 + pictures(100, 12, 10, 3) % 32 * torch.tensor([0, 1, 1])).to(torch.uint8)
    seen_by_layers = []
    encoder.layers.register_forward_pre_hook(
        lambda module, inputs: seen_by_layers.append(inputs[0])
    )
    encoder(bright)
    encoder.update_normalization(bright)
    encoder(bright)
    before, after = seen_by_layers
    assert before.mean() > 0.7
    assert after.mean((0, 2, 3)).abs().max() < 0.1
    assert after.isfinite().all()
    assert int(encoder.normalizer.count) == 50 * 8 * 6  # every second picture


def test_what_is_no_picture_is_refused_with_the_encoder_that_would_do():
    with refused(names=("NatureCNN", "DictEncoder")):
        NatureCNN(Dict({"camera": PICTURE}))
    with refused(names=("ImpalaCNN", "PerceptronEncoder")):
        ImpalaCNN(ACTION)
    with refused(names="policy.init_args.encoder: {class_path: NatureCNN}"):
        ActorCritic(PICTURE, ACTION)


def test_a_choice_is_one_number_among_as_many_as_there_are():
    encoder = OneHot(Discrete(3, start=5))
    assert encoder(torch.tensor([5, 7])).tolist() == [[1, 0, 0], [0, 0, 1]]
    encoder = OneHot(MultiDiscrete([2, 3]))
    assert encoder(torch.tensor([[[1, 2]]])).tolist() == [[[0, 1, 0, 0, 1]]]
    with refused(names=("OneHot", "Discrete", "PerceptronEncoder")):
        OneHot(PICTURE)


def test_a_key_that_is_not_there_is_refused_with_those_that_are():
    space = Dict({"camera": PICTURE, "goal": Discrete(3), "force": Box(-9, 9, (2,))})
    names = ("DictEncoder.encoders", "'camra'", "camera, force, goal", "close matches: camera")
    with refused(names=names):
        DictEncoder(space, {"camra": SMALL})
    with refused(names=("'camera'", "NatureCNN", "36x36")):
        DictEncoder(space)
    with refused(names=("DictEncoder", "Dict", "Box")):
        DictEncoder(PICTURE)


def test_a_frozen_encoder_reads_safetensors_and_part_of_a_checkpoint(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    trained = SMALL(PICTURE)
    safetensors.save_file(trained.state_dict(), tmp_path / "a.safetensors")
    state = {f"policy.encoder.{key}": value for key, value in trained.state_dict().items()}
    torch.save({"state_dict": state | {"log_alpha": torch.zeros(1)}}, tmp_path / "a.ckpt")
    batch = pictures(5, 12, 10, 3)
    for name, prefix in (("a.safetensors", ""), ("a.ckpt", "policy.encoder.")):
        frozen = FrozenEncoder(PICTURE, SMALL, tmp_path / name, prefix)
        frozen.train()
        assert torch.equal(frozen(batch), trained(batch))
        assert not frozen(batch).requires_grad
        assert not any(module.training for module in frozen.modules())


def test_weights_that_are_not_there_or_of_another_encoder_are_refused(tmp_path):
    with refused(names=("none.pt", "FrozenEncoder.weights")):
        FrozenEncoder(PICTURE, SMALL, tmp_path / "none.pt")
    torch.save(SMALL(PICTURE).state_dict(), tmp_path / "weights.pt")
    with refused(names=("FrozenEncoder", "weights.pt", "NatureCNN", "layers.5.weight", "prefix")):
        FrozenEncoder(PICTURE, partial(SMALL, size=9), tmp_path / "weights.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with refused(names=("list.pt", "state_dict")):
        FrozenEncoder(PICTURE, SMALL, tmp_path / "list.pt")


def test_settings_that_would_be_ignored_are_refused():
    with refused(names="share_encoder: false"):
        ActorCritic(Box(-1, 1, (3,)), ACTION, share_encoder=False)
    with refused(names=("normalize_observation", "normalize: true", "PerceptronEncoder")):
        ActorCritic(PICTURE, ACTION, encoder=SMALL, normalize_observation=True)
    with refused(names=("actor_keys=['a']", "Dict", "Box")):
        ActorCritic(PICTURE, ACTION, encoder=SMALL, actor_keys=["a"])


@pytest.mark.parametrize("cls", POLICIES)
@pytest.mark.parametrize("encoder", [None, partial(DictEncoder, normalize=True)])
def test_the_actor_needs_no_key_that_only_the_critic_reads(cls, encoder):
    settings = {"normalize_observation": True} if encoder is None else {"encoder": encoder}
    policy = cls(
        PRIVILEGED, ACTION, actor_keys=["seen"], critic_keys=["seen", "hidden"], **settings
    )
    both = TensorDict({"seen": torch.randn(6, 3), "hidden": 5 + torch.randn(6, 2)}, [6])
    full = TensorDict({"observation": both}, [6])
    blind = TensorDict({"observation": both.select("seen")}, [6])
    acted = policy.get_action(full.copy(), deterministic=True)["action"]
    assert torch.equal(policy.get_action(blind.copy(), deterministic=True)["action"], acted)
    assert policy.critic_features(full).shape[-1] == 5
    assert policy.actor_features(full).shape[-1] == 3
    names = set(policy.acting_state())
    assert not [name for name in names if name.startswith("critic")]
    rollout = allocate_rollout(PRIVILEGED, ACTION, 6, 2)
    rollout["observation", "hidden"][:] = both["hidden"][:, None]
    before = policy.actor_features(full)
    policy.update_normalization(rollout)
    parts = [policy.critic_normalizer] if encoder is None else [policy.critic_encoder.encoders["hidden"].normalizer]  # fmt: skip
    assert [int(one.count) for one in parts] == [12]
    assert not torch.equal(policy.actor_features(full), before)  # zeros were seen


PRIVILEGED = Dict({"seen": Box(-9, 9, (3,)), "hidden": Box(-9, 9, (2,))})


def test_unknown_keys_are_refused_with_those_that_there_are():
    with refused(names=("critic_keys", "'hiden'", "close matches: hidden")):
        ActorCritic(PRIVILEGED, ACTION, critic_keys=["hiden"])
    with refused(names=("actor_keys", "'b'", "hidden, seen")):
        ActorOnly(PRIVILEGED, ACTION, actor_keys=["b"])


def test_a_mask_of_actions_is_no_input_unless_it_is_asked_for():
    space = Dict({"position": Box(-1, 1, (3,)), "action_mask": Box(0, 1, (4,), np.int8)})
    policy = ActorCritic(space, Discrete(4))
    assert policy.actor[0].in_features == policy.critic[0].in_features == 3
    assert ActorCritic(space, Discrete(4), actor_keys=["position", "action_mask"]).actor[0].in_features == 7  # fmt: skip
    encoded = ActorCritic(space, Discrete(4), encoder=DictEncoder)
    assert list(encoded.encoder.encoders) == ["position"]
    with refused(names=("action_mask", "actor_keys")):
        ActorCritic(Dict({"action_mask": space["action_mask"]}), Discrete(4))


def test_a_critics_encoder_that_cannot_take_its_keys_is_refused_and_the_cure_named():
    space = Dict({"camera": PICTURE, "state": Box(-1, 1, (3,))})
    make = partial(DictEncoder, encoders={"camera": SMALL})
    keys = {"actor_keys": ["camera"], "critic_keys": ["state"]}
    with refused(names=("DictEncoder.encoders", "'camera'", "state", "critic_encoder")):
        ActorCritic(space, ACTION, encoder=make, **keys)
    policy = ActorCritic(space, ACTION, encoder=make, critic_encoder=PerceptronEncoder, **keys)
    assert isinstance(policy.critic_encoder, PerceptronEncoder)


def off_policy(cls, algorithm, **settings):
    torch.manual_seed(0)
    policy = cls(PICTURE, ACTION, (8,), encoder=SMALL, **settings)
    return algorithm(policy, batch_size=4, tau=0.25)


def minibatch_for(module):
    seen = {key: pictures(4, 12, 10, 3) for key in ("observation", "next_observation")}
    seen |= {key: torch.rand(4) for key in ("reward", "discount")}
    module.generator = torch.Generator().manual_seed(0)
    return TensorDict(seen | {"action": torch.rand(4, 2)} | module.noise_fields(4), [4])


def stepped(module, name):
    """What a step down one of its losses moves."""
    minibatch = minibatch_for(module)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    objective = module.objectives[name]
    loss, _ = objective.loss(minibatch)
    loss.backward(inputs=objective.parameters)
    torch.optim.SGD(objective.parameters, lr=0.1).step()
    return {
        key.split(".")[1] for key, value in module.state_dict().items()
        if not torch.equal(value, before[key])
    }  # fmt: skip


@pytest.mark.parametrize(("cls", "algorithm"), [(SquashedActorCritic, SAC), (DeterministicActorCritic, TD3)])  # fmt: skip
def test_the_critics_loss_trains_a_shared_encoder_and_the_actors_leaves_it_alone(cls, algorithm):
    module = off_policy(cls, algorithm)
    nn.init.normal_(module.policy.actor[-1].weight)
    assert stepped(module, "critic") == {"encoder", "critic"}
    assert stepped(module, "actor") == {"actor"}
    apart = off_policy(cls, algorithm, share_encoder=False)
    nn.init.normal_(apart.policy.actor[-1].weight)
    assert stepped(apart, "critic") == {"critic_encoder", "critic"}
    assert stepped(apart, "actor") == {"encoder", "actor"}


@pytest.mark.parametrize(("cls", "algorithm"), [(SquashedActorCritic, SAC), (DeterministicActorCritic, TD3)])  # fmt: skip
@pytest.mark.parametrize("share", [True, False])
def test_targets_are_read_by_slow_copies_of_the_encoders(cls, algorithm, share):
    module = off_policy(cls, algorithm, share_encoder=share)
    minibatch = minibatch_for(module)
    target = lambda: module.critic_loss(minibatch)[1]["q_target"]  # noqa: E731
    before = target()
    encoder = module.policy.encoder_of_critic
    with torch.no_grad():
        for parameter in module.policy.critic.parameters():
            parameter.add_(1.0)
    assert torch.equal(target(), before)  # neither critics nor what they read
    old = module.target_encoder.layers[0].bias.clone()
    with torch.no_grad():
        encoder.layers[0].bias.add_(1.0)
    if algorithm is TD3 or not share:
        assert torch.equal(target(), before)
    module.update_targets()
    torch.testing.assert_close(module.target_encoder.layers[0].bias, old + 0.25)
    assert not torch.equal(target(), before)


def test_what_is_frozen_needs_no_slow_copy(tmp_path):
    make = frozen(tmp_path / "weights.pt", PICTURE)
    module = SAC(SquashedActorCritic(PICTURE, ACTION, (8,), encoder=make), batch_size=4)
    assert module.target_encoder is None
    assert stepped(module, "critic") == {"critic"}


def test_a_shift_is_a_crop_of_the_picture_padded_by_its_edges():
    batch, most = pictures(40, 12, 10, 3), 4
    shift = torch.randint(-most, most + 1, (40, 2), generator=torch.Generator().manual_seed(0))
    padded = np.pad(batch.numpy(), ((0, 0), (most, most), (most, most), (0, 0)), mode="edge")
    expected = [one[most + y : most + y + 12, most + x : most + x + 10] for one, (y, x) in zip(padded, shift.tolist(), strict=True)]  # fmt: skip
    shifted = shift_pictures(batch, shift)
    assert shifted.dtype == torch.uint8
    assert torch.equal(shifted, torch.from_numpy(np.stack(expected)))
    stacks = batch.permute(0, 3, 1, 2)
    assert torch.equal(shift_pictures(stacks, shift, (2, 3)), shifted.permute(0, 3, 1, 2))


def test_only_pictures_are_shifted_and_where_there_are_none_it_is_refused():
    with refused(names=("random_shift=4", "Box")):
        SAC(SquashedActorCritic(Box(-1, 1, (3,)), ACTION), random_shift=4)
    camera, cells = Box(0, 255, (4, 3, 24, 20), np.uint8), Box(0, 10, (7, 7, 3), np.uint8)
    assert picture_keys(Dict(camera=camera, cells=cells)) == {("camera",): (2, 3)}
    grid = Box(0, 255, (7, 7, 3), np.uint8)
    with refused(names=("random_shift=4", "7", "random_shift: 1")):
        SAC(SquashedActorCritic(grid, ACTION, encoder=SMALL), random_shift=4)


SEEN = partial(PointMass, max_episode_steps=9, pictures=Pictures(12, 2))
WITH_STATE = partial(SEEN, pictures=Pictures(12, 2, with_state=True))
EVERY = {
    "PPO": {},
    "PPO, two encoders": {"policy": {"share_encoder": False}},
    "GRPO": {"model": {"algorithm": GRPO, "group_size": 2}},
    "SAC": {"model": {"algorithm": SAC, "random_shift": 2}},
    "TD3, two encoders": {"model": {"algorithm": TD3}, "policy": {"share_encoder": False}},
    "PPO, a critic that knows more": {
        "env": WITH_STATE,
        "policy": {
            "encoder": partial(DictEncoder, encoders={"pictures": SMALL}),
            "critic_encoder": partial(PerceptronEncoder, hidden_sizes=[8], normalize=True),
            "actor_keys": ["pictures"], "critic_keys": ["state"],
        },
    },
    "SAC, critics that know more": {
        "env": WITH_STATE,
        "model": {"algorithm": SAC, "random_shift": 1},
        "policy": {
            "encoder": partial(DictEncoder, encoders={"pictures": SMALL}, normalize=True),
            "actor_keys": ["pictures"], "critic_keys": ["state", "pictures"],
        },
    },
}  # fmt: skip


def settings(name, **model):
    run = copy.deepcopy(EVERY[name])
    model = run.get("model", {}) | model
    policy = {"encoder": SMALL} | run.get("policy", {})
    data = {"num_envs": 4, "buffer_size": 8, "total_env_steps": 4 * 8 * 4}
    if model.get("algorithm") in (SAC, TD3):
        data["replay"] = partial(ReplayBuffer, capacity=60)
        model["updates_per_env_step"] = 0.2
    return {"env": run.get("env", SEEN), "data": data, "policy": policy, "model": model}


@pytest.mark.parametrize("name", EVERY)
def test_a_run_that_is_stopped_and_resumed_ends_as_uninterrupted(name, tmp_path):
    run = settings(name)
    module = assert_resumes(tmp_path, 2, **run)
    assert module.metrics["train/skipped_steps"] == 0


@pytest.mark.parametrize("name", ["PPO, two encoders", "SAC"])
def test_compiled_it_follows_the_eager_run(name, tmp_path, traced_only):
    eager, *_ = train(tmp_path / "eager", **settings(name))
    compiled, *_ = train(tmp_path / "compiled", **settings(name, compile=True))
    assert compiled.learner.compilation.compiled
    torch.testing.assert_close(compiled.state_dict(), eager.state_dict(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["PPO, a critic that knows more", "SAC"])
def test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground(name, tmp_path):
    background = partial(AsyncCollector, max_staleness=0, timeout_s=30)
    run = settings(name)
    train(tmp_path / "sync", **run)
    train(tmp_path / "async", **run | {"data": run["data"] | {"collector": background}})
    if name == "SAC":
        a, b = (load(last(tmp_path / kind))["state_dict"] for kind in ("sync", "async"))
        assert all(torch.equal(a[key], b[key]) for key in a if torch.is_tensor(a[key]))
    else:
        assert_same_training(tmp_path / "sync", tmp_path / "async")


def test_a_warm_start_takes_the_encoder_and_may_leave_that_of_the_critic(tmp_path):
    train(tmp_path / "first", **settings("PPO"))
    begin = {"init_from": str(last(tmp_path / "first"))}
    stays = {"learning_rate": 1e-12}
    module, *_ = train(tmp_path / "second", **settings("PPO, two encoders", **stays), trainer=begin)
    first = load(last(tmp_path / "first"))["state_dict"]
    own = module.state_dict()["policy.encoder.layers.0.weight"]
    torch.testing.assert_close(own, first["policy.encoder.layers.0.weight"])
    other = settings("PPO") | {"policy": {"encoder": partial(SMALL, size=9)}}
    with refused(names=("encoder.layers.5.weight", "[8, 24]", "[9, 24]")):
        train(tmp_path / "third", **other, trainer=begin)


def pictured():
    """A picture that is dark or bright says which of two actions pays; an episode ends well or otherwise, at random."""

    def act(env):
        env.pays = float(env.action == env.bright)

    def observe(env):
        env.bright = int(env.np_random.integers(2))
        dark = env.np_random.integers(128, size=PICTURE.shape).astype(np.uint8)
        return dark + np.uint8(127 * env.bright)

    return ScriptedEnv(
        PICTURE,
        act=act,
        observe=observe,
        reward=lambda env: env.pays,
        terminated=lambda env: bool(env.np_random.random() < 0.2),
    )


gymnasium.register("tests/Pictured-v0", pictured, max_episode_steps=12)


class SeesTwice(ActorCritic):
    """A policy of one's own, whose entropy is that of a second look at what its encoder makes."""

    def __init__(self, *spaces, **settings):
        super().__init__(*spaces, (8,), encoder=SMALL, **settings)
        self.second = nn.Linear(self.encoder.size, 1)

    def evaluate_actions(self, td):
        result = super().evaluate_actions(td)
        return result.set("entropy", result["entropy"] + self.second(self.actor_features(td))[:, 0])


class Cautious(PPO):
    """An algorithm of one's own: it has a policy made, warms its critic up, and anneals a bonus."""

    def __init__(self, policy, share_encoder, **settings):
        torch.manual_seed(7)
        own = SeesTwice(policy.observation_space, policy.action_space, share_encoder=share_encoder)
        super().__init__(own, critic_warmup_iterations=2, normalize_reward=True, **settings)

    def loss(self, minibatch):
        loss, scalars = super().loss(minibatch)
        return loss - self.bonus * scalars["entropy"] * self.trains_actor, scalars

    def training_step(self, rollout, batch_idx):
        self.bonus = 0.1 / (1 + self.iterations_done)
        super().training_step(rollout, batch_idx)


def meeting(share_encoder, **model):
    model = {"algorithm": Cautious, "share_encoder": share_encoder, "learning_rate": 1e-3} | model
    data = {"buffer_size": 8, "total_env_steps": 200, "iterations_per_epoch": 4}
    data["num_eval_episodes"] = 8
    inner = partial(GymnasiumEnv, id="tests/Pictured-v0", wrappers=[MinimalInfo])
    env = partial(ActionChunk, env=inner, chunk_size=2)
    return {"env": env, "data": data, "policy": {"encoder": SMALL}, "model": model}


def test_seen_in_chunks_with_a_warm_up_and_partial_infos_by_a_policy_and_an_algorithm_of_ones_own(
    tmp_path, traced_only
):
    module = assert_resumes(tmp_path, 1, **meeting(False))
    assert 0 < module.evaluation["success_rate"] < 1, "of whom nothing is said have failed"
    assert "metrics/steps" in scalars(tmp_path / "whole")
    compiled, *_ = train(tmp_path / "compiled", **meeting(False, compile=True))
    assert compiled.learner.compilation.compiled
    torch.testing.assert_close(
        compiled.policy.state_dict(), module.policy.state_dict(), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("share", [False, True])
def test_in_its_warm_up_the_actor_and_an_encoder_of_its_own_stand_still(share, tmp_path):
    """What actor and critic share moves, as the warm-up says."""
    run = meeting(share)
    module, *_ = train(tmp_path, **run, trainer={"limit_val_batches": 0, "max_steps": 2})
    begun = Cautious(module.policy, share).policy.state_dict()
    moved = {k.split(".")[0] for k, v in module.policy.state_dict().items() if not torch.equal(v, begun[k])}  # fmt: skip
    assert moved == {"version", "critic", "encoder" if share else "critic_encoder"}


def picture_of(seen):
    """Show what an arm knows of itself as bright or dark."""
    return np.broadcast_to(127.5 + 100 * seen, (12, 10, 4)).clip(0, 255).astype(np.uint8)


gymnasium.register(
    "tests/SeenArm-v0",
    partial(arm, False, Box(0, 255, (12, 10, 4), np.uint8), picture_of),
    max_episode_steps=12,
)


@pytest.mark.parametrize("share", [True, False])
def test_an_arm_with_a_gripper_that_sees_resumes_and_is_compiled(share, tmp_path, traced_only):
    run = {
        "env": "tests/SeenArm-v0",
        "data": {"num_envs": 2, "buffer_size": 8, "total_env_steps": 64, "replay": partial(ReplayBuffer, capacity=40)},
        "policy": {"encoder": SMALL, "share_encoder": share},
        "model": {"algorithm": GripperSAC, "updates_per_env_step": 0.25, "random_shift": 1},
    }  # fmt: skip
    module = assert_resumes(tmp_path, 2, **run)
    assert module.metrics["train/skipped_steps"] == 0
    if share:
        return  # one graph is enough
    run["model"]["compile"] = True
    compiled, *_ = train(tmp_path / "compiled", **run)
    assert compiled.learner.compilation.compiled
    torch.testing.assert_close(
        compiled.policy.state_dict(), module.policy.state_dict(), rtol=1e-3, atol=1e-4
    )


def test_what_a_teacher_does_by_pictures_is_cloned_by_an_encoder(tmp_path):
    """The teacher of a run of PPO sees pictures too; the student has another encoder."""
    train(tmp_path / "teacher", **settings("PPO"))
    run = settings("PPO", algorithm=BehaviorCloning, teacher=str(tmp_path / "teacher"))
    run["policy"] = {"encoder": partial(SMALL, size=5)}
    module = assert_resumes(tmp_path, 2, **run)
    begun, *_ = train(tmp_path / "begun", **run | {"data": run["data"] | {"total_env_steps": 32}})
    assert module.metrics["train/negative_log_prob"] < begun.metrics["train/negative_log_prob"]
    weight = "encoder.layers.0.weight"
    assert not torch.equal(module.policy.state_dict()[weight], begun.policy.state_dict()[weight])


def frozen(path, space):
    """Return what makes an encoder with the weights that it saves: positive, so no unit is silent."""
    torch.save({name: value.abs() for name, value in SMALL(space).state_dict().items()}, path)
    return partial(FrozenEncoder, encoder=SMALL, weights=str(path))


@pytest.mark.parametrize("key", [None, "pictures"])
def test_a_replay_holds_what_a_frozen_encoder_made_of_pictures(key, tmp_path):
    encoder = frozen(tmp_path / "weights.pt", Pictures(12, 2).space(None))
    task = partial(PointMass, max_episode_steps=4, pictures=Pictures(12, 2, with_state=key is not None))  # fmt: skip
    env, plain = EncodedObservations(3, task, encoder, key), task(3)
    made = encoder(Pictures(12, 2).space(None))

    def expected(observation):
        return made(observation) if key is None else made(observation["pictures"])

    def found(observation):
        return observation if key is None else observation["pictures"]

    assert torch.equal(found(env.reset(seed=0)[0]), expected(plain.reset(seed=0)[0]))
    for t in range(5):
        action = torch.rand(3, 2)
        observation, *_, info = env.step(action)
        other, *_, told = plain.step(action)
        assert torch.equal(found(observation), expected(other))
        if t == 3:
            torch.testing.assert_close(found(info["final_obs"]), expected(told["final_obs"]))
            assert not torch.equal(found(info["final_obs"]), found(observation))
    run = settings("SAC", random_shift=0) | {"policy": {} if key is None else {"critic_keys": ["pictures", "state"]}}  # fmt: skip
    run["env"] = lambda n: EncodedObservations(n, task, encoder, key)
    module = assert_resumes(tmp_path, 2, **run)
    assert module.policy.encoder is None


def test_features_of_weights_that_are_trained_are_not_kept():
    with refused(names=("EncodedObservations", "NatureCNN", "FrozenEncoder")):
        EncodedObservations(2, SEEN, SMALL)
    with refused(names=("EncodedObservations", "key='camera'")):
        EncodedObservations(2, SEEN, SMALL, "camera")


ENCODERS = """
model:
  class_path: lightning_rl.PPO
  init_args:
    policy:
      class_path: lightning_rl.ActorCritic
      init_args:
        encoder:
          class_path: lightning_rl.DictEncoder
          init_args:
            encoders:
              camera: {class_path: lightning_rl.NatureCNN, init_args: {size: 64}}
              wrist: {class_path: %s, init_args: {encoder: {class_path: lightning_rl.ImpalaCNN}, weights: a.b}}
"""


def test_a_checkpoint_may_name_encoders_of_ours_by_key_and_no_others(tmp_path):
    trusted = checked_config(ENCODERS % "lightning_rl.FrozenEncoder", tmp_path)
    assert "a.b" in trusted.reads.values()
    with refused(names=("'os.system'", "encoder", "Encoder", "--trust_code true")):
        checked_config(ENCODERS % "os.system", tmp_path)


@pytest.mark.parametrize("task", [PointMass, PushCube])
def test_a_task_is_seen_in_its_last_pictures_the_newest_last(task):
    env = task(3, max_episode_steps=4, pictures=Pictures(16, 2, with_state=True))
    plain = task(3, max_episode_steps=4)
    observation, _ = env.reset(seed=0)
    state, _ = plain.reset(seed=0)
    frame = env.draw(env.state, 16, 16)
    assert torch.equal(observation["pictures"], frame.repeat(1, 1, 1, 2))
    assert torch.equal(observation["state"], state)
    for t in range(9):
        action = torch.rand(3, 2)
        observation, reward, *_, info = env.step(action)
        state, expected, *_ = plain.step(action)
        assert torch.equal(reward, expected)
        assert torch.equal(observation["state"], state)
        assert torch.equal(observation["pictures"][..., 3:], env.draw(env.state, 16, 16))
        final = info["final_obs"]["pictures"]
        assert torch.equal(final[..., :3], frame)
        assert torch.equal(final[..., 3:], env.draw(env.final_state, 16, 16))
        frame = env.draw(env.state, 16, 16)
        if t in (3, 7):  # the time is out: the next episode's first picture stands twice
            assert torch.equal(observation["pictures"][..., :3], frame)
    saved = env.state_dict()
    other = task(3, max_episode_steps=4, pictures=Pictures(16, 2, with_state=True))
    assert torch.equal(other.load_state_dict(saved)["pictures"], observation["pictures"])


def test_pictures_without_pixels_are_refused():
    with refused(names=("pictures.size", "at least 1", "0")):
        Pictures(size=0)
    assert isinstance(PushCube(2, pictures=Pictures(8, 1)).single_observation_space, gymnasium.spaces.Box)  # fmt: skip


@pytest.mark.parametrize("encoders", [None, {"camera": NatureCNN}])
def test_a_picture_of_floats_without_bounds_is_refused_by_its_bounds(encoders):
    space = Dict({"camera": Box(-np.inf, np.inf, (48, 48, 3))})
    with refused(names=("'camera'", "bounds within -1 and 1", "clip: [0.0, 1.0]")):
        DictEncoder(space, encoders)
