"""`load_policy` acts as `rl-cli validate` does: by its own checkpoint, alone, one observation or many."""

import re
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from tensordict import TensorDict

from lightning_rl import (
    GRU,
    LSTM,
    PPO,
    SAC,
    ActionChunk,
    ActorCritic,
    GymnasiumEnv,
    NatureCNN,
    ReplayBuffer,
    RLTrainer,
    load_policy,
)
from lightning_rl.checkpoints.building import SavedRun
from lightning_rl.checkpoints.format import CONFIG_KEY, SPACES_KEY, STATE_KEY
from lightning_rl.collectors.first_episodes import FirstEpisodes
from lightning_rl.deploy.acting import TrainedPolicy
from lightning_rl.rollout.spaces import space_data
from lightning_rl.system.construction import GIVEN_BY_THE_ENV, config_of
from lightning_rl.system.errors import ConfigurationError
from tests.envs import ScriptedEnv, draw
from tests.helpers import assert_same, fit_in, last, make_data, train
from tests.messages import assert_names, refused
from tests.variants import variant

BUDGET = {"total_env_steps": 64, "num_eval_episodes": 3}


def pictures():
    """Sees 3 pictures a step, and is over after five steps."""

    def check(env):
        assert env.action_space.contains(env.action)

    return ScriptedEnv(
        spaces.Box(0, 255, (40, 40, 3), np.uint8),
        spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 5.0]), dtype=np.float64),
        act=check,
        observe=draw,
        reward=lambda env: float(env.action.sum()),
        terminated=lambda env: env.age == 5,
    )


gymnasium.register("tests/Pictures-v0", pictures)

RUNS = {
    "CartPole": {},
    "MuJoCo, normalised": {"env": "InvertedPendulum-v5", "policy": {"normalize_observation": True}},
    "squashed SAC": {
        "env": "Pendulum-v1",
        "data": {"replay": partial(ReplayBuffer, capacity=60)},
        "model": {"algorithm": SAC},
    },
    "GRU": {"policy": {"memory": partial(GRU, size=8), "normalize_observation": True}},
    "LSTM, noise": {
        "env": "Pendulum-v1",
        "policy": {"memory": partial(LSTM, size=8), "noise_correlation": 0.9},
    },
    "CNN": {
        "env": "tests/Pictures-v0",
        "policy": {"encoder": partial(NatureCNN, size=16, channels=(4, 4, 4))},
    },
    "chunks": {
        "env": partial(ActionChunk, env=partial(GymnasiumEnv, id="Pendulum-v1"), chunk_size=4)
    },
    "bfloat16": {"trainer": {"precision": "bf16-mixed"}},
    "bfloat16, in short": {"trainer": {"precision": "bf16"}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return what trains each of these once: (its module, its data module, its run directory)."""
    made = {}

    def give(name):
        settings = RUNS[name]
        if settings.get("env") == "InvertedPendulum-v5":
            pytest.importorskip("mujoco")
        if name not in made:
            run_dir = tmp_path_factory.mktemp("run")
            data = BUDGET | settings.get("data", {})
            module, datamodule, _ = train(run_dir, **{**settings, "data": data})
            made[name] = module, datamodule, run_dir
        return made[name]

    return give


def validated(run_dir, data, module):
    """Return what `validate` observes in each step, and what the env executes."""
    observed, executed = [], []
    env = getattr(data.eval_env, "env", data.eval_env)._env
    step, advance = env.step, FirstEpisodes.act

    def note_action(actions):
        executed.append(np.array(actions))
        return step(actions)

    def note_observation(self, t):
        observed.append(self.observation.clone())
        advance(self, t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "step", note_action)
        patch.setattr(FirstEpisodes, "act", note_observation)
        trainer = RLTrainer(run_dir=str(run_dir), enable_progress_bar=False, accelerator="cpu")
        trainer.validate(module, data, ckpt_path=last(run_dir))
    return observed, executed


@pytest.mark.parametrize("name", [name for name in RUNS if "bfloat16" not in name])
def test_it_executes_what_validate_does_bit_for_bit(name, runs):
    module, data, run_dir = runs(name)
    observed, executed = validated(run_dir, data, module)
    policy, alone = load_policy(last(run_dir)), load_policy(last(run_dir))
    assert len(observed) >= 5
    for observation, theirs in zip(observed[:60], executed, strict=False):
        ours = policy.act(observation.numpy())
        assert_same(torch.as_tensor(ours).double(), torch.as_tensor(theirs).double())
        one = alone.act(observation[0].numpy())
        np.testing.assert_allclose(one, ours[0], rtol=1e-6, atol=1e-6)
        space = data.action_space
        assert space.contains(one if space.shape else np.int64(one)), one


@pytest.mark.parametrize("name", ["LSTM, noise", "CNN"])
def test_defaults_of_torch_that_a_script_has_set_change_no_action(name, runs):
    """A float64 default built a policy of float64, or failed; a device failed."""
    *_, run_dir = runs(name)

    def acts():
        policy = load_policy(last(run_dir))
        policy.observation_space.seed(0)
        seen = [policy.observation_space.sample() for _ in range(4)]
        actions = [policy.act(x, deterministic=i < 2).tolist() for i, x in enumerate(seen)]
        return actions, policy.module.state_dict()

    expected = acts()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        assert_same(expected, acts())
        assert torch.get_default_dtype() is torch.float64
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("name", ["CartPole", "LSTM, noise"])
def test_drawn_actions_are_those_of_an_evaluation_of_the_same_seeds(name, runs):
    module, data, run_dir = runs(name)
    data.eval_deterministic = False
    try:
        observed, executed = validated(run_dir, data, module)
    finally:
        data.eval_deterministic = True
    policy = load_policy(last(run_dir))
    for _ in range(2):  # and again, from the same seed
        policy.reset(seed=data.eval_seed)
        for observation, theirs in list(zip(observed, executed, strict=True))[:5]:
            ours = policy.act(observation.numpy(), deterministic=False)
            assert_same(torch.as_tensor(ours), torch.as_tensor(theirs))
    again = policy.act(observed[0].numpy(), deterministic=False)
    policy.reset(seed=7)
    other = policy.act(observed[0].numpy(), deterministic=False)
    assert name == "CartPole" or (again != other).all()


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16, in short"])
def test_it_computes_in_the_precision_of_its_run(name, runs):
    module, _, run_dir = runs(name)
    policy = load_policy(run_dir)
    assert policy.module.autocast_dtype is torch.bfloat16
    features = []
    policy.module.actor.register_forward_hook(lambda *hook: features.append(hook[2].dtype))
    policy.act(np.zeros(4, np.float32))
    assert features == [torch.bfloat16]
    assert_same(policy.module.state_dict(), module.policy.state_dict())


def test_by_each_of_its_names(runs, tmp_path, monkeypatch):
    _, _, run_dir = runs("CartPole")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "run_20260101_000000").symlink_to(run_dir)
    monkeypatch.chdir(tmp_path)
    for name in ("last", "best", str(run_dir), last(run_dir)):
        assert load_policy(name).act(np.zeros(4, np.float32)) in (0, 1)
    policy = load_policy("best", device="cpu")
    observation = gymnasium.make("CartPole-v1").reset(seed=1)[0]
    assert type(policy.act(observation)) is np.int64
    assert type(policy.act(torch.as_tensor(observation))) is torch.Tensor
    assert policy.act([0.0, 0.0, 0.0, 0.0]).shape == ()
    assert re.fullmatch(
        r"TrainedPolicy\(ActorCritic of version \d+, Box.* -> Discrete.*\)", repr(policy)
    )


def of(observation_space, action_space, cls=ActorCritic, **settings):
    torch.manual_seed(0)
    return TrainedPolicy(cls(observation_space, action_space, **settings))


NUMBERS = spaces.Box(-np.inf, np.inf, (3,), np.float64)
BOX = spaces.Box(-0.1, 0.1, (2,), np.float64)


def test_tensors_come_back_as_tensors_and_batches_as_batches():
    policy = of(NUMBERS, BOX)
    many = np.random.default_rng(0).normal(size=(7, 3)) * 50
    actions = policy.act(many)
    assert (actions.shape, actions.dtype) == ((7, 2), np.float64)
    tensors = policy.act(torch.as_tensor(many))
    assert (tensors.shape, tensors.dtype) == ((7, 2), torch.float32)
    np.testing.assert_allclose(tensors, actions, atol=1e-7)
    for one, action, drawn in zip(
        many, actions, policy.act(many * 100, deterministic=False), strict=True
    ):
        np.testing.assert_allclose(policy.act(one), action, atol=1e-6)
        assert BOX.contains(action)
        assert BOX.contains(drawn), "clipped"
    assert bool((tensors.double() <= 0.1).all())


def test_choices_count_as_the_env_does():
    assert of(NUMBERS, spaces.Discrete(3, start=5)).act(np.zeros(3)) in (5, 6, 7)
    assert of(NUMBERS, spaces.Discrete(3, start=5)).act(torch.zeros(2, 3)).min() >= 5


STRUCTURE = spaces.Dict(
    arm=spaces.Box(-0.5, 0.5, (2, 2), np.float32),
    rest=spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)]),
)


def test_an_action_of_several_parts_has_the_structure_of_the_env():
    policy = of(NUMBERS, STRUCTURE)
    assert policy.action_space == STRUCTURE
    one, many = policy.act(np.zeros(3)), policy.act(np.zeros((4, 3)), deterministic=False)
    assert STRUCTURE.contains(one)
    assert many["arm"].shape == (4, 2, 2)
    assert many["rest"][0].shape == (4,)
    assert abs(many["arm"]).max() <= 0.5
    tensors = policy.act(torch.zeros(4, 3))
    assert [part.shape for part in (tensors["arm"], *tensors["rest"])] == [(4, 2, 2), (4,), (4, 2)]
    torch.testing.assert_close(tensors["arm"][0], torch.as_tensor(one["arm"]))


TWO_ARMS = spaces.Dict(right=BOX, left=BOX)  # unlike a dict, whose keys Gymnasium sorts
gymnasium.register("tests/TwoArms-v0", partial(ScriptedEnv, BOX, TWO_ARMS, length=5))


def test_each_arm_gets_the_command_that_was_learnt_for_it(tmp_path):
    module, *_ = train(tmp_path, env="tests/TwoArms-v0", data=BUDGET)
    trained, loaded = TrainedPolicy(module.policy), load_policy(tmp_path)
    assert list(loaded.action_space) == ["right", "left"]
    expected, actual = trained.act(np.full(2, 0.1)), loaded.act(np.full(2, 0.1))
    assert (expected["right"] != expected["left"]).all()
    for arm in TWO_ARMS:
        np.testing.assert_array_equal(actual[arm], expected[arm])
    module.policy.actor[-1].bias.data.fill_(50.0)
    assert (trained.act(torch.zeros(1, 2))["left"].double() <= 0.1).all(), "as arrays"


SEEN = spaces.Dict({"joints": NUMBERS, "secret": NUMBERS, "action_mask": spaces.MultiBinary(3)})


def test_what_a_critic_alone_reads_may_be_missing_and_a_mask_is_held_to():
    policy = of(SEEN, spaces.Discrete(3), actor_keys=["joints"], critic_keys=["secret"])
    assert list(policy.observation_space) == ["action_mask", "joints"]
    for allowed in range(3):
        mask = np.eye(3, dtype=np.int8)[allowed]
        seen = {"joints": np.zeros(3), "action_mask": mask}
        assert policy.act(seen) == policy.act({**seen, "secret": np.ones(3)}) == allowed
        assert policy.act(TensorDict({k: torch.as_tensor(v) for k, v in seen.items()})) == allowed
    with refused(names="action_mask"):
        policy.act({"joints": np.zeros(3), "action_mask": np.zeros(3, np.int8)})


def test_an_observation_that_is_none_is_refused():
    policy = of(SEEN, spaces.Discrete(3), actor_keys=["joints"], critic_keys=["secret"])
    mask, three = np.ones(3, np.int8), np.zeros(3)
    wrong = {
        "The observation is ndarray, but the policy reads a dict with action_mask, joints.": three,
        "The observation has no 'joints', which the policy reads; it has action_mask.": {
            "action_mask": mask
        },
        "The observation's 'joints' has the shape [2], but the policy was trained with [3]: give that shape, or a "
        "batch [N, ...].": {"joints": three[:2], "action_mask": mask},
        "The observation's 'joints' is of one env, but 'action_mask' is of 2 envs: give all parts for the same "
        "number of envs.": {"joints": three, "action_mask": np.stack([mask] * 2)},
        "The observation's 'action_mask' has the dtype torch.float64, but the policy was trained with torch.int8, "
        "which cannot hold its numbers.": {"joints": three, "action_mask": np.ones(3)},
    }
    for message, observation in wrong.items():
        with pytest.raises(ConfigurationError) as error:
            policy.act(observation)
        assert str(error.value) == message
    with refused(names=("'joints'", "['a', 'b', 'c']", "[3]")):
        policy.act({"joints": ["a", "b", "c"], "action_mask": mask})


def test_a_picture_in_another_unit_is_refused_and_a_state_may_leave_its_box():
    """Pictures of 0 to 255 were taken for a policy of pictures in [0, 1], in silence."""
    policy = of(spaces.Box(0, 1, (36, 36, 3), np.float32), BOX, encoder=NatureCNN)
    picture = np.random.default_rng(0).integers(0, 256, (36, 36, 3), dtype=np.uint8)
    policy.act(picture / 255 * 1.1)  # as after a resampling
    for wrong in (picture, picture.astype(np.float32), torch.tensor(picture)[None], picture / -255):
        with refused(names=("'observation'", "0", "1", "255")):
            policy.act(wrong)
    of(spaces.Box(-1, 1, (3,), np.float32), BOX).act(np.full(3, 9.0))


def test_it_remembers_until_it_is_told_of_another_episode():
    policy = of(NUMBERS, BOX, memory=partial(GRU, size=8))
    policy.reset(rows=[True, True])
    seen = np.random.default_rng(1).normal(size=(3, 2, 3)) * 5

    def run(batches):
        return [policy.act(batch) for batch in batches]

    third = run(seen)[2]
    policy.reset()
    assert_same(torch.as_tensor(run(seen)[2]), torch.as_tensor(third))
    policy.reset()
    run(seen[:2])
    policy.reset(rows=[False, True])
    after = policy.act(seen[2])
    policy.reset()
    fresh = policy.act(seen[2])
    np.testing.assert_array_equal(after[0], third[0])
    np.testing.assert_array_equal(after[1], fresh[1])
    assert (after[1] != third[1]).any()
    with refused(names=("ActorCritic", "2 episodes", "1 rows", "reset()")):
        policy.act(seen[0][0])
    with refused(names=("reset(rows)", "[3]")):
        policy.reset(rows=[True] * 3)


class Mine(ActorCritic):
    """A policy of one's own."""


def trained_by(tmp_path, policy):
    data = make_data(**BUDGET)
    module = PPO(policy(data.observation_space, data.action_space), batch_size=32)
    fit_in(tmp_path, module, data)
    return last(tmp_path)


def test_a_class_of_the_users_own_needs_trust(tmp_path):
    path = trained_by(tmp_path, Mine)
    with pytest.raises(ConfigurationError) as error:
        load_policy(path)
    assert "names 'tests.core.equivalence.test_load_policy.Mine' as model.init_args.policy" in str(
        error.value
    )
    assert_names(str(error.value), "trust_code=True", "policy=...")
    assert type(load_policy(path, trust_code=True).module) is Mine
    given = Mine(spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    assert load_policy(path, policy=given).module is given


def test_what_a_run_in_python_could_not_say_is_named(tmp_path):
    path = trained_by(tmp_path, variant(ActorCritic, "Local"))
    with refused(names=(path, "Local", "load_policy(path, policy=...)")):
        load_policy(path)
    narrow = ActorCritic(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), (8,))
    with refused(names="actor.0.weight") as error:
        load_policy(path, policy=narrow)
    assert_names(str(error.value), "policy")


class Head(Enum):
    PLAIN, SHARP = 1, 2


@dataclass
class Net:
    width: int = 8


@dataclass
class OtherNet(Net):
    """Would come back as a `Net`."""


class OfManyTypes(ActorCritic):
    """Has settings of types that YAML does not have."""

    def __init__(
        self,
        *args,
        head: Head | None = None,
        heads: dict[str, Head] | None = None,
        names: set[str] = frozenset(),
        pause: timedelta | None = None,
        folder: Path | None = None,
        place: torch.device | str | None = None,
        columns: np.ndarray | None = None,
        net: Net | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.settings = [head, heads, names, pause, folder, place, net]
        self.columns = columns


BOXES = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)


def rebuilt(config):
    """Return the policy of a checkpoint with this configuration."""
    saved = {name: space_data(space) for name, space in zip(GIVEN_BY_THE_ENV, BOXES, strict=True)}
    text = yaml.safe_dump({"model": {"init_args": {"policy": config}}})
    content = {CONFIG_KEY: text, STATE_KEY: {SPACES_KEY: saved}}
    return SavedRun(Path("some.ckpt"), content, trust_code=True).policy(ActorCritic)


def test_settings_come_back_with_the_types_that_training_had():
    texts = {"head": "SHARP", "heads": {"a": "PLAIN"}, "names": ["a", "b"], "pause": "1:00:00"}
    own = OfManyTypes(
        *BOXES,
        (5,),
        folder=Path("/a"),
        place=torch.device("cpu"),
        columns=np.array([2, 0]),
        net=Net(4),
    )
    config = config_of(own)
    policy = rebuilt({**config, "init_args": config["init_args"] | texts})
    enums, names, pause = (Head.SHARP, {"a": Head.PLAIN}), {"a", "b"}, timedelta(hours=1)
    assert policy.settings == [*enums, names, pause, *own.settings[4:]]
    assert (policy.columns == own.columns).all()
    assert policy.columns.dtype == own.columns.dtype
    assert policy.actor[0].out_features == 5, "which had no name in the call"


def test_a_subclass_of_a_declared_dataclass_is_what_a_checkpoint_cannot_hold():
    with refused(names=("policy.net", "OtherNet", "Net", "policy=")):
        rebuilt(config_of(OfManyTypes(*BOXES, net=OtherNet())))
