"""What is said of memory at the start: measured where it can be, and said where it matters."""

from lightning_rl import ActorOnly, AsyncCollector, GymnasiumEnv, RLTrainer, SyncCollector
from lightning_rl.training.callbacks import memory
from tests.helpers import make_collector, make_data, make_ppo


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
