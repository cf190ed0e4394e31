"""`check_env` finds what is wrong with an env, each fault alone, and nothing where nothing is."""

import time
from functools import partial
from itertools import count

import gymnasium
import numpy as np
import pytest

from lightning_rl import ActionChunk, GymnasiumEnv, PushCube, TorchEnv, check_env
from lightning_rl.extensions.checks import check_env as check
from tests.messages import assert_names, refused
from tests.probes import TimeLimitProbe
from tests.variants import after, before, variant


class Healthy(gymnasium.Env):
    """Draws near a goal; an episode takes 30 steps, or ends at the goal."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.goal = self.draw().astype(np.float32)
        return self.observe(), {}

    def step(self, action):
        self.position = np.clip(self.position + 0.2 * action, -1, 1).astype(np.float32)
        distance = float(np.linalg.norm(self.position - self.goal))
        return self.observe(), -distance, distance < 0.05, False, {}

    def draw(self):
        return self.np_random.uniform(-1, 1, (2, 2))

    def observe(self):
        return np.concatenate([self.position, self.goal])


def shared_seed(env, *, seed=None, options=None):
    return Healthy.reset(env, seed=None if seed is None else seed // 1000)


def ignores_its_seed(env):
    if not hasattr(env, "number"):
        env.number = next(NUMBERS) % 4
    return np.random.default_rng(env.number).uniform(-1, 1, (2, 2))


NUMBERS = count()


def seeds_a_generator_of_its_own(env, *, seed=None, options=None):
    """Repeatable from a seed, but no replay brings its second episode back."""
    if seed is not None or not hasattr(env, "own"):
        env.own = np.random.default_rng(seed)


def counts_and_forgets_to_save_it(env, result, action):
    env.count = getattr(env, "count", 0) + 1
    observation, reward, *rest = result
    return observation, reward + env.count % 7, *rest


def is_reset(env, seed=None, options=None):
    if seed is not None:
        env.count = 0


def with_nan(env, observation):
    observation[2] = np.nan


def without_final(env, result, action):
    result[-1].pop("final_obs", None)


def raises(env, action):
    raise KeyError("gripper")


def step_gives(*row):
    """After a healthy step, other results; None leaves one."""

    def change(env, result, action):
        return tuple(old if new is None else new for old, new in zip(result, row, strict=True))

    return change


FAULTY = {
    "OutsideOfItsBounds": after(Healthy, observe=lambda env, seen: seen * np.float32(3)),
    "NotANumber": after(Healthy, observe=with_nan),
    "WrongShape": after(Healthy, observe=lambda env, seen: seen[:3]),
    "SharedSeed": variant(Healthy, reset=shared_seed),
    "IgnoresItsSeed": variant(Healthy, draw=ignores_its_seed),
    "GeneratorOfItsOwn": before(
        variant(Healthy, draw=lambda env: env.own.uniform(-1, 1, (2, 2))),
        reset=seeds_a_generator_of_its_own,
    ),
    "ConstantReward": after(Healthy, step=step_gives(None, 0.0, False, None, None)),
    "HugeReward": after(
        Healthy, step=lambda env, result, action: (result[0], 1000 * result[1], *result[2:])
    ),
    "NeverEnds": after(Healthy, step=step_gives(None, None, False, None, None)),
    "Raises": before(Healthy, step=raises),
    "Hangs": before(Healthy, step=lambda env, action: time.sleep(60)),
    "WithoutFinal": after(TimeLimitProbe, "WithoutFinal", step=without_final),
    "FinalOfTheNext": after(
        PushCube, step=lambda env, result, action: result[-1].update(final_obs=result[0])
    ),
    "NoState": variant(PushCube, state_dict=lambda env: None),
    "HalfAState": before(after(PushCube, step=counts_and_forgets_to_save_it), reset=is_reset),
    "Arrays": after(
        PushCube, state_dict=lambda env, state: state | {"generator": np.random.default_rng(1)}
    ),
    "NeverTruncates": before(TimeLimitProbe, step=lambda env, action: env.elapsed.zero_()),
}


def factory(fault, limit=30):
    cls = FAULTY.get(fault, Healthy)
    if issubclass(cls, PushCube):
        return partial(cls, max_episode_steps=10)
    if issubclass(cls, TorchEnv):
        return cls
    id = f"Check{fault}-v0"
    gymnasium.registry.pop(id, None)
    gymnasium.register(id, cls, max_episode_steps=limit)
    return partial(GymnasiumEnv, id=id)


@pytest.fixture(autouse=True)
def short_check(monkeypatch):
    """Play so many steps, not as many as a busy machine takes in a time; register envs for a test alone."""
    monkeypatch.setattr(check, "PLAYED", 65)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)


def found(env, level="warning", **settings):
    """What `check_env` finds of at least a level."""
    findings = check_env(env, **{"seconds": 20.0} | settings)
    return [one for one in findings if check.LEVELS.index(one.level) >= check.LEVELS.index(level)]


@pytest.mark.parametrize(
    "env",
    [
        "Healthy",
        partial(PushCube, max_episode_steps=20),
        partial(ActionChunk, env=partial(GymnasiumEnv, id="Pendulum-v1")),
    ],
    ids=["own", "PushCube", "chunks"],
)
def test_of_a_healthy_env_nothing_is_said(env):
    assert found(factory(env) if env == "Healthy" else env, "note") == []


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (
            "NotANumber",
            ("observation", "error", "nan in observation[2] is not finite: an update would fail"),
        ),
        (
            "SharedSeed",
            ("seeds", "warning", "all 4 envs begin with the same observation: they share a seed"),
        ),
        (
            "IgnoresItsSeed",
            ("seeds", "warning", "different seeds gave the same starts: reset ignores its seed"),
        ),
        (
            "GeneratorOfItsOwn",
            (
                "resume",
                "warning",
                "the env could not be restored (",  # it differs, or ends too soon: by chance
            ),
        ),
        (
            "NoState",
            (
                "resume",
                "warning",
                "the env does not save its state: a resumed run begins new episodes",
            ),
        ),
        (
            "HalfAState",
            ("resume", "error", "the restored env gave a different reward after 1 steps"),
        ),
        (
            "FinalOfTheNext",
            (
                "episodes",
                "error",
                "info['final_obs'] is the first observation of the next episode, at each of {} ends: value targets "
                "would use the wrong state",
            ),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_found(env, expected):
    faults = [(one.topic, one.level, one.text) for one in found(factory(env))]
    topic, level, text = expected
    matching = [told for told in faults if told[:2] == (topic, level)]
    assert matching
    begin, _, end = text.partition("{}")
    assert matching[0][2].startswith(begin)
    assert matching[0][2].endswith(end)
    others = {told[0] for told in faults} - {topic}
    assert others <= {"resume", "gymnasium"}


def test_a_value_outside_of_its_bounds_is_named_with_its_place():
    fault, gymnasium_says = found(factory("OutsideOfItsBounds"))
    assert gymnasium_says.topic == "gymnasium"
    assert (fault.topic, fault.level) == ("observation", "warning")
    assert fault.text.startswith("observation[")
    assert fault.text.endswith((" below its low of -1", " above its high of 1"))
    assert_names(fault.cure, "observation_space")


def test_a_reward_that_never_changes_or_is_huge_is_told():
    (constant,) = found(factory("ConstantReward"))
    assert_names(constant.text, "0", "reward")
    (huge,) = found(factory("HugeReward"))
    assert huge.text.startswith("it is as large as ")
    assert_names(huge.cure, "model.normalize_reward: true")


def test_episodes_that_never_end_are_told():
    (endless,) = found(factory("NeverEnds", limit=None))
    assert endless.text.startswith("none ended within ")
    assert endless.text.endswith("no time limit is known: an evaluation may never end")
    assert found(factory("NeverEnds", limit=25)) == []
    texts = [one.text for one in found(FAULTY["NeverTruncates"], "error")]
    assert any(text.endswith("; the time limit is 5 env steps") for text in texts)


def test_a_truncation_without_its_final_observation_is_an_error():
    texts = [one.text for one in found(FAULTY["WithoutFinal"], "error")]
    assert len(texts) == 1
    assert_names(texts[0], "WithoutFinal", "env 0", "step 4", "info['final_obs']", "[N, ...]")


def test_a_state_that_no_checkpoint_can_hold_is_an_error():
    (fault,) = found(factory("Arrays"), "error")
    assert fault.topic == "resume"
    assert_names(fault.text, "state_dict.generator", "Generator", "tensors")


def test_what_an_env_raises_is_a_finding_with_its_place():
    (fault,) = found(factory("Raises"))
    assert (fault.topic, fault.level) == ("env", "error")
    assert fault.text.startswith(f"it raised KeyError: 'gripper', at {__file__}, line ")
    (refused,) = found(factory("WrongShape"))
    assert_names(refused.text, "'CheckWrongShape-v0'", "[3]", "[4]")


def test_a_step_that_hangs_is_a_finding_with_its_stack():
    (fault,) = found(factory("Hangs"), timeout_s=0.5)
    assert fault.level == "error"
    assert_names(fault.text, "The 4 envs", "check", "step", "data.env_timeout_s: 0.5")
    assert "time.sleep(60)" in fault.text


def test_a_fault_of_the_check_itself_is_not_blamed_on_the_env(monkeypatch):
    def fails(*args):
        raise KeyError("ours")

    monkeypatch.setattr(check.EnvCheck, "_check_starts", fails)
    with pytest.raises(KeyError, match="ours"):
        check_env("CartPole-v1")


def test_what_makes_no_envs_is_refused():
    with refused(names=("CartPoleEnv", "'CartPole-v1'")):
        check_env(gymnasium.make("CartPole-v1"))
