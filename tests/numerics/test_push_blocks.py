"""The task of pictures and instructions: who is pushed where, and what is seen of it."""

import torch

from lightning_rl import PushBlocks
from lightning_rl.extensions.tasks.push_blocks import text_of
from tests.messages import refused


def test_the_expert_succeeds_at_every_instruction():
    env = PushBlocks(200)
    env.reset(seed=list(range(200)))
    success, length = torch.zeros(200, dtype=torch.bool), torch.zeros(200, dtype=torch.int64)
    for step in range(1, 49):
        _, _, terminated, truncated, info = env.step(env.expert(env.state))
        first = (terminated | truncated) & (length == 0)
        success |= first & info["success"]
        length = torch.where(first, step, length)
    assert success.all()
    assert 8 < length.float().mean() < 20


def test_only_the_chosen_instructions_are_drawn():
    env = PushBlocks(64, instructions=[1, 2])
    observation, _ = env.reset(seed=list(range(64)))
    drawn = {text_of(row) for row in observation["language"]}
    assert drawn == {"push the red block to the right", "push the blue block to the left"}
    for wrong in ([], [4]):
        with refused(names=("PushBlocks", "0 (push the red")):
            PushBlocks(1, instructions=wrong)


def test_reward_terms_add_up_and_can_be_switched_on():
    env = PushBlocks(32, rewards={"progress": 2.0})
    env.reset(seed=1)
    total = torch.zeros(32)
    finished = torch.zeros(32, dtype=torch.bool)
    for _ in range(48):
        _, reward, terminated, truncated, info = env.step(env.expert(env.state))
        torch.testing.assert_close(reward, sum(info["rewards"].values()))
        total += torch.where(finished, 0.0, reward)
        finished |= terminated | truncated
    assert (total > 1.0 + 2.0 * 0.25 - 1e-4).all()


def test_doing_what_was_not_asked_for_ends_the_episode_without_success():
    """Whoever acts on another instruction fails at once, and does not blunder into success."""
    env = PushBlocks(100)
    env.reset(seed=7)
    mistaken, succeeded = torch.zeros(2, 100, dtype=torch.bool)
    for _ in range(30):
        misled = env.state.clone()
        misled["task"] = (misled["task"] + 1) % 4
        running = ~(mistaken | succeeded)
        _, reward, terminated, _, info = env.step(env.expert(misled))
        mistake = info["metrics"]["mistake"].bool()
        assert torch.equal(terminated, mistake | info["success"])
        assert not (mistake & (reward > 0)).any()
        mistaken |= running & mistake
        succeeded |= running & info["success"]
    assert mistaken.all()
    assert not succeeded.any()
