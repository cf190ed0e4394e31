"""Classes of users with hooks of earlier versions: refused with the present name, never ignored."""

import pytest

from lightning_rl import PPO, SAC, ActorCritic, SquashedActorCritic, TorchEnv, VectorEnv
from lightning_rl.extend.envs import make_env
from tests.envs import ScriptedTask
from tests.messages import refused

HOOKS = [
    (PPO, "drawn_fields", "prepared_fields"),
    (SAC, "drawn_fields", "noise_fields"),
    (SAC, "actor_passes", "actor_forwarded_scalars"),
    (SAC, "reduce_q", "aggregate_q"),
    (SquashedActorCritic, "replayed", "rollout_for_replay"),
    (ActorCritic, "replayed_space", "replay_action_space"),
    (TorchEnv, "moved", "full_transition"),
    (VectorEnv, "keep_info", "record_info"),
]


@pytest.mark.parametrize(("base", "earlier", "present"), HOOKS)
def test_a_subclass_learns_the_present_name(base, earlier, present):
    for bases in ((base,), (type("Mixin", (), {earlier: None}), base)):
        members = {} if len(bases) > 1 else {earlier: None}
        with refused(names=("Mine", f"'{earlier}'", f"'{present}'")):
            type("Mine", bases, members)


@pytest.mark.parametrize(("base", "earlier", "present"), HOOKS)
def test_the_present_name_is_a_member_of_the_base_class(base, earlier, present):
    assert hasattr(base, present)
    type("Mine", (base,), {present: getattr(base, present)})


def test_an_attribute_that_the_constructor_of_an_env_sets_is_refused_too():
    def make(num_envs):
        return ScriptedTask(num_envs, lambda u: {"x": u}, lambda *_: ({},), keeps=("x",))

    with refused(names=("ScriptedTask", "'keeps'", "'persistent_state'")):
        make_env(make, 2, "data.env")
