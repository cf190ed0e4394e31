"""Two processes do what one would: gradients, statistics, decisions, checkpoints and evaluation.

All runs on two ranks are made by `ddp_runs`, begun once for each rank, which leaves what that found.
"""

from contextlib import contextmanager

import pytest
import torch
from lightning.pytorch import seed_everything

from tests import stranger
from tests.commands import Command, free_port
from tests.equivalence import ddp_runs
from tests.equivalence.ddp_runs import RESUMED, SAME_BATCHES, SAME_ROLLOUTS, SAME_SEGMENTS
from tests.equivalence.test_exploring import MODELS as EXPLORING
from tests.helpers import (
    assert_same,
    assert_same_run,
    last,
    load,
    make_data,
    make_ppo,
    saved_replay,
    tensors_of,
    train,
)
from tests.messages import assert_names, refused

pytestmark = pytest.mark.timeout(900)
"""The launch takes half a minute; beside ten busy processes, ten times as long."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("ddp")
    ddp_runs.record_rollouts(path / "rollouts.pt")
    for head in ("token", "flow", "smolvla", "in real time"):
        ddp_runs.record_chunks(path, head)
    ddp_runs.record_transitions(path)
    ddp_runs.record_frames(path)
    with on_two_ranks(path, "all") as begun:
        for process in begun:
            process.wait(800)
            assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-8000:]
    return path


@contextmanager
def on_two_ranks(path, what, program="ddp_runs", count=2):
    """Begin on each rank what `ddp_runs` calls so; nothing of it is left in the end."""
    program, port = f"tests.equivalence.{program}", free_port()
    ranks = [of_rank(rank, port, count) for rank in range(count)]
    begun = [Command(path, what, program=program, env=rank) for rank in ranks]
    try:
        yield begun
    finally:
        for process in begun:
            process.kill()


def of_rank(rank, port, count=2):
    """Return what torchrun would set; `faults/test_ddp_faults.py` starts processes by torchrun itself."""
    settings = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "OMP_NUM_THREADS": 1}
    settings |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "suite"}
    return {name: str(value) for name, value in settings.items()}


@pytest.fixture(scope="module")
def ranks(directory):
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def both(ranks, name, key):
    return [found[name][key] for found in ranks]


def column(ranks, name, key):
    return [[row[key] for row in rows] for rows in both(ranks, name, "rows")]


def test_parameters_stay_equal_and_gradients_are_the_mean_of_the_local_ones(ranks):
    assert_same(*both(ranks, "reduced", "state"))
    local, reduced = both(ranks, "reduced", "local_gradients"), both(ranks, "reduced", "gradients")
    assert len(local[0]) == 5 * 2 * 4  # iterations, epochs, minibatches
    for step in range(len(local[0])):
        assert_same(reduced[0][step], reduced[1][step])
        for one, other, mean in zip(local[0][step], local[1][step], reduced[0][step], strict=True):
            torch.testing.assert_close(mean, (one + other) / 2, rtol=1e-5, atol=1e-7)
    assert not torch.equal(local[0][0][0], local[1][0][0]), "ranks have data of their own"


@pytest.mark.parametrize("name", ddp_runs.CHUNKS)
def test_each_executed_part_of_a_chunk_weighs_the_same_on_whichever_rank(name, directory, ranks):
    alone = ddp_runs.same_chunks(directory, name, 1).policy.state_dict()
    found = [rank[f"chunks {name}"] for rank in ranks]
    assert_same(*found)
    torch.testing.assert_close(alone, found[0], rtol=1e-4, atol=2e-5)


def test_two_ranks_fit_and_evaluate_the_value_of_one_process(directory, ranks):
    alone = ddp_runs.same_value(directory, 1)
    one, other = both(ranks, "value", "state")
    assert_same(one, other)
    for key, value in one.items():
        expected = alone.state_dict()[key]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    for found in both(ranks, "value", "evaluation"):
        assert found["metrics"] == pytest.approx(alone.evaluation["metrics"], rel=1e-4)
        assert found["returns"] == pytest.approx(alone.evaluation["returns"], rel=1e-4)


@pytest.mark.parametrize("name", SAME_ROLLOUTS)
def test_two_ranks_give_the_update_of_one_process_with_all_envs(
    name, directory, ranks, traced_only
):
    alone = ddp_runs.same_rollouts(directory, name, 1).state_dict()
    assert_same(ranks[0][name], ranks[1][name])
    tensors = {key: alone[key] for key in ranks[0][name]}
    torch.testing.assert_close(tensors, ranks[0][name], rtol=1e-6, atol=1e-6)
    seed_everything(3)
    settings = SAME_ROLLOUTS[name]
    start = tensors_of(make_ppo(make_data(), settings.get("policy"), **settings["model"]))
    moved = max((start[k] - alone[k]).abs().max() for k in start if "actor" in k)
    assert moved > 1e-4


def test_every_env_step_and_every_episode_counts_once(ranks):
    for name in ("reduced", "uneven", "async 1"):
        steps = torch.tensor(column(ranks, name, "own_steps")).sum(0).cumsum(0).tolist()
        assert column(ranks, name, "env_steps") == [steps, steps]
        returns = column(ranks, name, "returns")
        assert returns[0] == returns[1]
    episodes = torch.tensor(column(ranks, "async 1", "own_episodes")).sum(0).cumsum(0).tolist()
    assert column(ranks, "async 1", "episodes") == [episodes, episodes]
    lengths = column(ranks, "uneven", "own_steps")
    assert lengths[0] != lengths[1]


def test_early_stops_and_adaptive_rates_agree(ranks):
    steps = column(ranks, "kl", "optimizer_steps")
    assert steps[0] == steps[1]
    assert steps[0][-1] < 5 * 8 * 4
    rates = column(ranks, "kl", "rate")
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1
    assert_same(*both(ranks, "kl", "state"))


def test_a_nan_on_one_rank_skips_the_steps_of_both(ranks):
    skipped = column(ranks, "one nan", "skipped")
    assert skipped[0] == skipped[1]
    assert skipped[0][-1] == 8
    assert_same(*both(ranks, "one nan", "state"))
    assert all(value.isfinite().all() for value in ranks[0]["one nan"]["state"].values())


def test_a_signal_to_a_rank_that_is_not_the_first_stops_both_and_resume_is_exact(directory, ranks):
    """To rank 0, and slow to all at once: `faults/test_ddp_faults.py`."""
    assert both(ranks, "to rank 1", "stop_signal") == [15, 15]
    assert [len(rows) for rows in both(ranks, "to rank 1", "rows")] == [4, 4]
    assert_same(*both(ranks, "resumed", "state"))
    assert_same_run(directory / "whole", directory / "to rank 1")


def test_each_rank_has_random_streams_and_envs_of_its_own(directory):
    checkpoint = load(last(directory / "whole"))
    one, other = checkpoint["lightning_rl"]["ranks"]
    assert not torch.equal(one["shuffle"], other["shuffle"])
    assert not torch.equal(one["carry"], other["carry"])
    one, other = (c["loop"]["generator"] for c in checkpoint["RLDataModule"]["collectors"])
    assert not torch.equal(one, other)


def test_another_number_of_processes_may_go_on(directory, tmp_path):
    checkpoint = last(directory / "whole")
    data = RESUMED["data"] | {"total_env_steps": 2 * 2 * 16 * 6 + 64, "num_eval_episodes": 1}
    with (
        refused(UserWarning, names="2 processes"),
        refused(UserWarning, names=("replay", "2 processes")),
    ):
        module, _, _ = train(tmp_path, ckpt_path=checkpoint, **RESUMED | {"data": data})
    assert module.env_steps == data["total_env_steps"]
    # Observations of all iterations of both ranks, and of two more of one.
    assert module.policy.normalizer.count == data["total_env_steps"]


def test_asynchronous_collection_without_staleness_equals_synchronous(ranks):
    assert_same(*both(ranks, "async 0", "state"))
    assert_same(ranks[0]["async 0"]["state"], ranks[0]["reduced"]["state"])


def test_asynchronous_collection_keeps_ranks_equal(ranks):
    assert_same(*both(ranks, "async 1", "state"))
    assert max(m["async/staleness_max"] for m in column(ranks, "async 1", "metrics")[0]) == 1


def test_a_compiled_update_follows_the_eager_one(ranks):
    assert_same(*both(ranks, "compiled", "state"))
    torch.testing.assert_close(
        ranks[0]["reduced"]["state"], ranks[0]["compiled"]["state"], rtol=1e-3, atol=1e-4
    )


def test_an_algorithm_and_a_policy_of_ones_own_keep_ranks_equal(ranks):
    """With chunks, partial infos, normalisers and critic warm-up; see features.py."""
    assert_same(*both(ranks, "own", "state"))
    assert_same(*both(ranks, "own", "evaluation"))
    assert column(ranks, "own", "env_steps")[0] == column(ranks, "own", "env_steps")[1]


def test_a_users_terms_and_events_keep_ranks_equal_and_draw_for_each_rank_its_own(ranks, directory):
    assert_same(*both(ranks, "terms", "state"))
    collectors = load(last(directory / "terms"))["RLDataModule"]["collectors"]
    frictions = [one["loop"]["env"]["state"]["friction"] for one in collectors]
    assert torch.cat(frictions).unique().numel() == 4


@pytest.mark.parametrize("name", ["mujoco", "taught", *EXPLORING])
def test_worlds_of_mujoco_a_student_mirrors_and_curiosity_keep_ranks_equal(name, ranks):
    assert both(ranks, name, "error") == [None, None]
    assert_same(*both(ranks, name, "state"))


@pytest.mark.parametrize("name", stranger.RUNS)
def test_extensions_of_a_stranger_keep_ranks_equal(name, ranks):
    one, other = (found[f"stranger {name}"] for found in ranks)
    assert not isinstance(one, str), one
    assert_same(one, other)


def test_a_first_ratio_that_is_not_one_on_one_rank_ends_both_and_both_say_why(ranks):
    for error in both(ranks, "refused", "error"):
        assert_names(error, "OwnPolicy.forward", "log-probs")


def test_in_bfloat16_ranks_stay_equal(ranks):
    for name, full in {"bf16": "reduced", "bf16 off-policy": "float32 off-policy"}.items():
        assert_same(*both(ranks, name, "state"))
        found = ranks[0][name]["state"]
        assert all(t.dtype in (torch.float32, torch.int64, torch.float64) for t in found.values())
        one, other = (state["policy.actor.0.weight"] for state in (found, ranks[0][full]["state"]))
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.02)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("name", SAME_BATCHES)
def test_two_ranks_give_the_off_policy_updates_of_one_process_of_the_same_batches(
    name, directory, ranks
):
    module = ddp_runs.same_batches(directory, name, 1)
    assert module.updates_done == 35  # of the env steps of all, from learning_starts on
    alone = module.state_dict()
    assert_same(ranks[0][name], ranks[1][name])
    assert ("log_alpha" in ranks[0][name]) == ("sac" in name)
    torch.testing.assert_close(alone, ranks[0][name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SAME_SEGMENTS)
def test_two_ranks_give_the_updates_of_one_process_through_the_same_steps(name, directory, ranks):
    alone = ddp_runs.same_segments(directory, name, 1).state_dict()
    assert_same(ranks[0][name], ranks[1][name])
    torch.testing.assert_close(alone, ranks[0][name], rtol=1e-5, atol=1e-6)


def test_off_policy_ranks_stay_equal_and_count_all_env_steps(ranks):
    assert_same(*both(ranks, "off-policy", "state"))
    assert column(ranks, "off-policy", "env_steps")[0][-1] == 384
    updates = (384 - 32) // 10
    assert column(ranks, "off-policy", "optimizer_steps")[0][-1] == 3 * updates


def test_off_policy_ranks_that_were_stopped_end_as_uninterrupted_with_a_replay_each(
    directory, ranks
):
    assert both(ranks, "off-policy, stopped", "stop_signal") == [15, 15]
    assert_same(*both(ranks, "off-policy, resumed", "state"))
    assert_same_run(directory / "off-policy", directory / "off-policy, stopped")
    replays = load(last(directory / "off-policy"))["RLDataModule"]["replays"]
    assert [{name[:5] for name in replay["files"]} for replay in replays] == [{"rank0"}, {"rank1"}]
    one, other = (saved_replay(directory / "off-policy", replay) for replay in replays)
    assert not torch.equal(one["reward",], other["reward",]), "each has what its own envs did"


@pytest.mark.parametrize("name", ["masks", "parts, noise"])
def test_what_may_be_chosen_and_how_is_explored_keeps_ranks_equal(name, ranks):
    assert both(ranks, name, "error") == [None, None]
    assert_same(*both(ranks, name, "state"))
    assert column(ranks, name, "optimizer_steps")[0][-1] == 4 * 2  # epochs of one minibatch


@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_where_somebody_takes_over_at_other_steps_on_each_rank_ranks_stay_equal(name, ranks):
    """PPO leaves those steps out, so that each has another number of samples; SAC keeps them twice."""
    assert_same(*both(ranks, f"helped {name}", "state"))
    one, other = both(ranks, f"helped {name}", "taken")
    assert any(len(x) != len(y) or not torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert all(rollout.any() for rollout in one + other)
    assert column(ranks, f"helped {name}", "env_steps")[0][-1] == 256
    assert column(ranks, f"helped {name}", "optimizer_steps")[0][-1] > 10
