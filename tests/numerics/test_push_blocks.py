"""The task of pictures and instructions: who is pushed where, and what is seen of it."""

import pytest
import torch

from lightning_rl import PushBlocks
from lightning_rl.extensions.tasks.push_blocks import BLOCK, PUSHER, push_blocks, text_of
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


def test_instructions_name_block_and_side_and_the_picture_does_not():
    env = PushBlocks(64)
    observation, _ = env.reset(seed=0)
    texts = {text_of(row) for row in observation["language"]}
    assert texts == {
        f"push the {c} block to the {s}" for c in ("red", "blue") for s in ("left", "right")
    }
    told = env.state.clone()
    told["task"] = (told["task"] + 1) % 4
    other = env.observe(told)
    assert torch.equal(other["rgb"], observation["rgb"])
    assert not torch.equal(other["language"], observation["language"])
    space = env.single_observation_space
    for row in range(3):
        assert space.contains({k: v[row].numpy() for k, v in observation.items()})


def test_only_the_chosen_instructions_are_drawn():
    env = PushBlocks(64, instructions=[1, 2])
    observation, _ = env.reset(seed=list(range(64)))
    drawn = {text_of(row) for row in observation["language"]}
    assert drawn == {"push the red block to the right", "push the blue block to the left"}
    for wrong in ([], [4]):
        with refused(names=("PushBlocks", "0 (push the red")):
            PushBlocks(1, instructions=wrong)


def test_the_picture_shows_the_blocks_where_they_are():
    env = PushBlocks(5)
    observation, _ = env.reset(seed=3)
    for n in range(5):
        for block, channel in (("red", 0), ("blue", 2)):
            x, y = env.state[block][n].tolist()
            column, line = int((x + 1) * 32), int((1 - y) * 32)
            assert observation["rgb"][n, line, column].argmax() == channel


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_a_block_gives_way_along_the_axis_of_least_overlap(side):
    red = torch.tensor([[0.0, 0.0]])
    blue = torch.tensor([[0.0, 0.8]])
    pusher = torch.tensor([[side * (BLOCK + PUSHER - 0.04), 0.05]])
    after, untouched = push_blocks(pusher, red, blue)
    torch.testing.assert_close(after, torch.tensor([[-side * 0.04, 0.0]]), atol=1e-6, rtol=0)
    assert torch.equal(untouched, blue)


def test_a_pushed_block_pushes_the_other_and_neither_leaves_the_table():
    red = torch.tensor([[0.3, 0.0]])
    blue = torch.tensor([[0.3 + 2 * BLOCK, 0.0]])
    pusher = torch.tensor([[0.3 - BLOCK - PUSHER + 0.1, 0.0]])
    red, blue = push_blocks(pusher, red, blue)
    torch.testing.assert_close(red[0, 0].item(), 0.4)
    torch.testing.assert_close(blue[0, 0].item(), 0.4 + 2 * BLOCK)
    _, blue = push_blocks(torch.tensor([[0.9, 0.0]]), red - 2, torch.tensor([[0.8, 0.0]]))
    assert blue.abs().max() <= 1.0 - BLOCK + 1e-6


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


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_doing_what_was_not_asked_for_ends_the_episode_without_success(shift):
    """Whoever acts on another instruction fails at once, and does not blunder into success."""
    env = PushBlocks(100)
    env.reset(seed=7)
    mistaken, succeeded = torch.zeros(2, 100, dtype=torch.bool)
    for _ in range(30):
        misled = env.state.clone()
        misled["task"] = (misled["task"] + shift) % 4
        running = ~(mistaken | succeeded)
        _, reward, terminated, _, info = env.step(env.expert(misled))
        mistake = info["metrics"]["mistake"].bool()
        assert torch.equal(terminated, mistake | info["success"])
        assert not (mistake & (reward > 0)).any()
        mistaken |= running & mistake
        succeeded |= running & info["success"]
    assert mistaken.all()
    assert not succeeded.any()
