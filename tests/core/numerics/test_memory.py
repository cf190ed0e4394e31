"""What is said of memory at the start: measured where it can be, and said where it matters."""

import torch

from lightning_rl import ActorOnly, AsyncCollector, GymnasiumEnv, RLTrainer, SyncCollector
from lightning_rl.collectors.weights import PublishedWeights, acting_copy
from lightning_rl.training.callbacks import memory
from tests.helpers import assert_same, make_collector, make_data, make_ppo


def rollout_of(policy, steps=5):
    env = GymnasiumEnv(4, "CartPole-v1")
    return make_collector(SyncCollector, env, policy, steps, seed=1).collect()


def test_activations_are_those_of_the_layers_and_not_the_weights():
    env = GymnasiumEnv(4, "CartPole-v1")
    spaces = env.single_observation_space, env.single_action_space
    sizes = {}
    for width in (64, 128, 1024):
        policy = ActorOnly(*spaces, (width, width), activation="relu")
        sizes[width] = memory.activation_bytes(policy, rollout_of(policy))
    # a ReLU keeps its output, float32, which is the next layer's input: two layers
    assert sizes[128] - sizes[64] == 2 * 64 * 4
    assert sizes[1024] - sizes[128] == 2 * 896 * 4


def test_measuring_draws_no_random_numbers():
    env = GymnasiumEnv(4, "CartPole-v1")
    policy = ActorOnly(env.single_observation_space, env.single_action_space, (8,))
    policy.actor.insert(1, torch.nn.Dropout(0.5))
    rollout = make_collector(SyncCollector, env, policy.eval(), 5, seed=1).collect()
    before = torch.get_rng_state()
    memory.activation_bytes(policy.train(), rollout)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_parts_are_printed_where_they_matter(tmp_path, monkeypatch, capsys):
    def printed(name):
        data = make_data()
        RLTrainer(run_dir=str(tmp_path / name), accelerator="cpu").fit(make_ppo(data), data)
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if line.startswith("Memory, estimated: ")]

    assert printed("small") == []
    monkeypatch.setattr(memory, "WORTH_SAYING", 0)
    (line,) = printed("large")
    for part in ("weights", "gradients", "optimizer", "rollouts", "activations of"):
        assert part in line


def test_what_is_frozen_is_neither_copied_nor_published():
    env = GymnasiumEnv(4, "CartPole-v1")
    policy = ActorOnly(env.single_observation_space, env.single_action_space, (8,))
    frozen = policy.actor[0].requires_grad_(False)
    acting = acting_copy(policy, torch.device("cpu"))
    assert acting.actor[0].weight.data_ptr() == frozen.weight.data_ptr()
    assert acting.actor[2].weight.data_ptr() != policy.actor[2].weight.data_ptr()
    weights = PublishedWeights(policy, torch.device("cpu"))
    with torch.no_grad():
        policy.actor[2].weight.add_(1.0)
        policy.version += 1
    weights.publish(policy)
    weights.load_into(acting)
    assert_same(policy.state_dict(), acting.state_dict())
    changing = [*(p for p in policy.parameters() if p.requires_grad), *policy.buffers()]
    assert sum(t.numel() for t in weights._tensors) == sum(t.numel() for t in changing)
    # The flag stays, because torch multiplies differently without it.
    flags = [p.requires_grad for p in acting.parameters()]
    assert flags == [p.requires_grad for p in policy.parameters()]


def test_there_is_memory_for_as_many_rollouts_as_a_collector_says():
    env = GymnasiumEnv(4, "CartPole-v1")
    policy = ActorOnly(env.single_observation_space, env.single_action_space, (8,))
    collectors = [make_collector(SyncCollector, env, policy, 5, seed=1)]
    collectors += [
        make_collector(AsyncCollector, env, policy, 5, seed=1, max_staleness=lag) for lag in (0, 2)
    ]
    assert [collector.num_rollouts for collector in collectors] == [1, 2, 4]  # the lag and 2
    for collector in collectors:
        collector.close()
