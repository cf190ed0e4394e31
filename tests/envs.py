"""Envs whose answers a test writes as arguments: constants, or functions of the env."""

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

from lightning_rl import TorchEnv

NUMBER = Box(-np.inf, np.inf, (1,), np.float32)
UNIT = Box(-1.0, 1.0, (1,), np.float32)


def draw(env, space=None):
    """Draw an observation by the env's own generator: whole numbers of integers, -1 to 1 of others."""
    space = space or env.observation_space
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: draw(env, child) for key, child in space.items()}
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        return env.np_random.uniform(-1, 1, space.shape).astype(space.dtype)
    largest = int(space.high.max()) if isinstance(space, Box) else 1
    return env.np_random.integers(0, largest + 1, space.shape).astype(space.dtype)


def age(env):
    """Observe the age of the episode in each number."""
    return np.full(env.observation_space.shape, env.age, env.observation_space.dtype)


def zeros(env):
    """Observe nothing."""
    return np.zeros(env.observation_space.shape, env.observation_space.dtype)


class ScriptedEnv(gymnasium.Env):
    """A Gymnasium env that answers by its arguments; each is a constant or a function of the env.

    A function reads `age` (steps of this episode), `steps` (of all episodes), `episode` (from 0),
    `action` (the last one, zeros at a start) and `np_random`, and keeps in the env what it likes.

    Args:
        observation_space, action_space: default: a number without bounds, and two commands.
        observe: the observation; default: the age in each number.
        reward, terminated, truncated, info: of a step.
        length: truncate the episode after so many steps. Default: never.
        begin: called at each start, before it is observed; what it returns, if anything, is its info.
        act: called in each step, before the answers: it moves the env, raises, waits, ends the process.
        metadata: of the env.
        attributes: further attributes.
    """

    def __init__(
        self,
        observation_space=NUMBER,
        action_space=None,
        *,
        observe=age,
        reward=0.0,
        terminated=False,
        truncated=False,
        info=None,
        length=None,
        begin=lambda env: None,
        act=lambda env: None,
        metadata=None,
        **attributes,
    ):
        self.observation_space, self.action_space = observation_space, action_space or Discrete(2)
        self.metadata = {"render_modes": []} | (metadata or {})
        self._answers = observe, reward, terminated, truncated, info
        self._begin, self._act, self._length = begin, act, length
        self.steps, self.episode = 0, -1
        vars(self).update(attributes)

    def observe(self):
        """Observe (again) what the env is in."""
        return self._answer(0)

    def _answer(self, index):
        answer = self._answers[index]
        return answer(self) if callable(answer) else answer

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age, self.action, self.seed = 0, np.zeros(self.action_space.shape or ()), seed
        self.episode += 1
        info = self._begin(self)
        return self.observe(), info or {}

    def step(self, action):
        self.age += 1
        self.steps += 1
        self.action = action
        self._act(self)
        observation, reward, terminated, truncated, info = map(self._answer, range(5))
        truncated = truncated or self.age == self._length
        return observation, reward, terminated, truncated, dict(info or {})


class ScriptedVector(gymnasium.vector.VectorEnv):
    """Single envs as one batched Gymnasium env, which resets in the same step and masks its infos.

    Args:
        num_envs: N.
        make: makes one of the envs; called for env 0, 1, ... in turn.
        masks: whether each array of infos has its mask `_name`.
        change: called with the results (observation, reward, terminated, truncated, info) of a step;
            returns those that are handed out.
    """

    def __init__(
        self, num_envs, make, *, masks=True, change=lambda env, results: results, metadata=None
    ):
        self.num_envs, self.envs = num_envs, [make() for _ in range(num_envs)]
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP} | (metadata or {})
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.masks, self.change, self.steps = masks, change, 0

    def reset(self, *, seed=None, options=None):
        seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed
        seeds = [None] * self.num_envs if seeds is None else seeds
        pairs = zip(self.envs, seeds, strict=True)
        return np.stack([env.reset(seed=env_seed)[0] for env, env_seed in pairs]), {}

    def step(self, actions):
        self.steps += 1
        rows = [env.step(action) for env, action in zip(self.envs, actions, strict=True)]
        observation, reward, terminated, truncated, infos = (
            list(c) for c in zip(*rows, strict=True)
        )
        done = np.array(terminated) | np.array(truncated)
        info, observation = self._joined(infos), np.stack(observation)
        if done.any():
            final = observation.copy()
            info = {"final_info": info, "final_obs": final, "_final_obs": done}
            for i in done.nonzero()[0]:
                observation[i], _ = self.envs[i].reset()
        results = observation, np.array(reward), np.array(terminated), np.array(truncated), info
        return self.change(self, results)

    def _joined(self, infos):
        """Return the entries of N infos as arrays with masks; an env without an entry has zeros there."""
        joined = {}
        for key in dict.fromkeys(key for info in infos for key in info):
            like = next(info[key] for info in infos if key in info)
            if isinstance(like, dict):
                joined[key] = self._joined([info.get(key, {}) for info in infos])
            else:
                joined[key] = np.array([info.get(key, np.zeros_like(like)) for info in infos])
            if self.masks:
                joined[f"_{key}"] = np.array([key in info for info in infos])
        return joined

    def close(self, **kwargs):
        pass


class ScriptedTask(TorchEnv):
    """A batched env in torch of three functions, as short as a test can have them.

    Args:
        num_envs: N.
        start: makes fields of M starts, {name: [M, K]}, from random numbers [M, start_size].
        move: returns from (env, state, action) the fields that change, and the reward [N] (None: 1), `terminated` [N]
            (None: never) and info (None: empty) as far as the tuple goes.
        observe: makes the observation of a state. Default: all fields beside each other.
        observation_space, action_space: default: as many numbers without bounds as a start has, and one in [-1, 1].
        steps: time limit.
        start_size: random numbers of a start.
        attributes: further attributes.
    """

    def __init__(
        self,
        num_envs,
        start,
        move,
        *,
        observe=lambda state: torch.cat([state[key] for key in sorted(state.keys())], 1),
        observation_space=None,
        action_space=UNIT,
        steps=5,
        start_size=1,
        **attributes,
    ):
        self.script, self.start_size = (start, observe, move), start_size
        if observation_space is None:
            size = observe(self.initial_state(torch.zeros(1, start_size))).shape[1]
            observation_space = Box(-np.inf, np.inf, (size,), np.float32)
        super().__init__(num_envs, observation_space, action_space, steps)
        vars(self).update(attributes)

    def initial_state(self, uniform):
        return TensorDict(self.script[0](uniform), [len(uniform)])

    def observe(self, state):
        return self.script[1](state)

    def transition(self, state, action):
        changes, *rest = self.script[2](self, state, action)
        reward, terminated, info = (*rest, None, None, None)[:3]
        ones = torch.ones(len(state))
        moved = TensorDict(dict(state.items()) | changes, state.batch_size)
        return (
            moved,
            ones if reward is None else reward,
            ones == 0 if terminated is None else terminated,
            info or {},
        )


class Walk(TorchEnv):
    """A position that each action is added to; it is the reward, and an end beyond an edge.

    Args:
        num_envs: N.
        steps: time limit.
        edge: the episode ends where the position is farther from 0. Default: never.
        size: numbers of the position.
        width: numbers [M, size] that a start begins with are of this range around 0.
        action_space: default: one number in [-1, 1] for each of the position.
    """

    def __init__(self, num_envs=4, steps=6, edge=3.0, size=1, width=1.0, action_space=None):
        box = Box(-9.0, 9.0, (size,), np.float32)
        action_space = action_space or Box(-1.0, 1.0, (size,), np.float32)
        self.start_size, self.edge, self.width, self.pace = size, edge, width, 1.0
        super().__init__(num_envs, box, action_space, steps)

    def initial_state(self, uniform):
        return TensorDict({"x": self.width * (uniform - 0.5)}, [len(uniform)])

    def observe(self, state):
        return state["x"]

    def transition(self, state, action):
        x = state["x"] + action * self.pace
        info = {"metrics": {"x": x[:, 0]}}
        return TensorDict({"x": x}, [len(x)]), x.sum(-1), (x.abs() > self.edge).any(-1), info


def reports_action_mask(empty_at=None, silent_at=None, key="action_mask"):
    """Of five actions only two are allowed, drawn at each step; another is an error. Its infos say which."""

    def allow(env):
        env.allowed = np.zeros(5, np.int8)
        if env.age != empty_at:
            env.allowed[env.np_random.choice(5, 2, replace=False)] = 1
        env.mask_info = {} if env.age == silent_at else {key: env.allowed}
        return env.mask_info

    def act(env):
        assert env.allowed[env.action] == 1, f"{env.action} is not allowed by {env.allowed}"
        allow(env)

    return ScriptedEnv(
        Box(-1.0, 1.0, (3,)),
        Discrete(5),
        begin=allow,
        act=act,
        observe=draw,
        reward=lambda env: float(env.action) / 5,
        terminated=lambda env: env.age == 7,
        info=lambda env: env.mask_info if env.age < 7 else {},
    )


PARTS = Dict(
    {
        "arm": Dict({"left": Box(-2.0, 2.0, (2,), np.float64), "right": Box(0.0, 1.0, (1,))}),
        "bits": MultiBinary(3),
        "modes": MultiDiscrete([2, 4], start=[0, 5]),
        "pair": Tuple((Discrete(3, start=-1), Box(-1.0, 1.0, (2, 2)))),
    }
)


def takes_parts():
    """Take an action in its own structure, and observe its numbers."""

    def observe(env):
        if env.age == 0:
            return env.np_random.uniform(-1, 1, 13).astype(np.float32)
        arm, bits, modes, (choice, grid) = (env.action[key] for key in PARTS)
        parts = (arm["left"], arm["right"], bits, modes, [choice], grid.ravel())
        return np.concatenate(parts).astype(np.float32)

    def check(env):
        assert PARTS.contains(env.action), env.action

    return ScriptedEnv(
        Box(-10.0, 10.0, (13,)),
        PARTS,
        act=check,
        observe=observe,
        reward=lambda env: float(env.action["bits"].sum()),
        terminated=lambda env: env.age == 7,
    )


gymnasium.register("tests/ReportsActionMask-v0", entry_point=reports_action_mask)
gymnasium.register("tests/StructuredActionEnv-v0", entry_point=takes_parts)
