"""Float64 references, written from the definitions and not from the code under test."""

import itertools
import math

import numpy as np


def gae_by_sum(reward, value, terminated, truncated, final_value, gamma, gae_lambda):
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, up to the end of the episode (Schulman et al. 2016, eq. 16)."""
    n_envs, n_steps = reward.shape
    advantage = np.zeros((n_envs, n_steps))
    for n in range(n_envs):
        for t in range(n_steps):
            for k in range(t, n_steps):
                if terminated[n, k]:
                    successor = 0.0
                elif truncated[n, k]:
                    successor = final_value[n, k]
                else:
                    successor = value[n, k + 1]
                delta = reward[n, k] + gamma * successor - value[n, k]
                advantage[n, t] += (gamma * gae_lambda) ** (k - t) * delta
                if terminated[n, k] or truncated[n, k]:
                    break
    return advantage


def forward_returns(reward, done, initial, gamma):
    """The running discounted return of each env, restarting after each end of an episode."""
    result = np.zeros_like(reward, dtype=np.float64)
    for n in range(reward.shape[0]):
        running = float(initial[n])
        for t in range(reward.shape[1]):
            running = running * gamma + reward[n, t]
            result[n, t] = running
            if done[n, t]:
                running = 0.0
    return result


def ppo_policy_loss(log_prob, sample_log_prob, advantage, low, high):
    """Schulman et al. 2017, equation 7, sample by sample."""
    total = 0.0
    for new, old, a in zip(log_prob, sample_log_prob, advantage, strict=True):
        r = math.exp(new - old)
        total += min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return -total / len(log_prob)


def vtrace_by_sum(
    log_ratio, reward, value, terminated, truncated, final_value, gamma, gae_lambda, rho_bar, c_bar
):
    """Espeholt et al. 2018, equation 1: v_s = V_s + sum over t >= s of gamma^(t-s) (prod of c_s .. c_{t-1}) rho_t delta_t.

    The sum ends with the episode. The advantage is rho_s (r_s + gamma q_s - V_s), where q_s is the value of the next state:
    0, V(final observation), V of the bootstrap slot, or else the mean of v and V there, weighted lambda to 1 - lambda.
    """
    n_envs, n_steps = reward.shape
    target, advantage = np.zeros((n_envs, n_steps)), np.zeros((n_envs, n_steps))
    for n in range(n_envs):
        for s in range(n_steps):
            v, trace = value[n, s], 1.0
            for t in range(s, n_steps):
                w = math.exp(log_ratio[n, t])
                ends = terminated[n, t] or truncated[n, t]
                if terminated[n, t]:
                    successor = 0.0
                else:
                    successor = final_value[n, t] if truncated[n, t] else value[n, t + 1]
                delta = min(rho_bar, w) * (reward[n, t] + gamma * successor - value[n, t])
                v += gamma ** (t - s) * trace * delta
                if ends:
                    break
                trace *= gae_lambda * min(c_bar, w)
            target[n, s] = v
        for s in range(n_steps):
            if terminated[n, s]:
                q = 0.0
            elif truncated[n, s]:
                q = final_value[n, s]
            elif s == n_steps - 1:
                q = value[n, n_steps]
            else:
                q = gae_lambda * target[n, s + 1] + (1 - gae_lambda) * value[n, s + 1]
            weight = min(rho_bar, math.exp(log_ratio[n, s]))
            advantage[n, s] = weight * (reward[n, s] + gamma * q - value[n, s])
    return advantage, target


def decoupled_policy_loss(log_prob, proximal, behavior, advantage, low, high, cap):
    """Hilton et al. 2021, sample by sample: the proximal policy is what is clipped around, the behaviour policy what sampled."""
    total = 0.0
    for i in range(len(log_prob)):
        weight = math.exp(proximal[i]) / math.exp(behavior[i])
        if weight > cap:
            continue
        r, a = math.exp(log_prob[i]) / math.exp(proximal[i]), advantage[i]
        total += weight * (min(r, 1 + high) if a >= 0 else max(r, 1 - low)) * a
    return -total / len(log_prob)  # also of those whose weight is over the cap


def gaussian_log_prob(action, mean, std):
    """Log of the product of univariate normal densities."""
    density = np.exp(-((action - mean) ** 2) / (2 * std**2)) / (std * math.sqrt(2 * math.pi))
    return np.log(density).sum(-1)


def group_advantage(reward, done, size, gamma, mode, floor, normalize, leave_one_out, first_only):
    """GRPO's advantage, one row and step at a time: what a row has earned beyond its peers."""
    n_rows, n_steps = reward.shape

    def last_step(n, t):
        """The step at which the episode that row n is in at step t ends, or the last one."""
        return next((k for k in range(t, n_steps) if done[n, k]), n_steps - 1)

    def to_go(n, t):
        return sum(gamma ** (k - t) * reward[n, k] for k in range(t, last_step(n, t) + 1))

    counts = np.array(
        [[not first_only or t <= last_step(n, 0) for t in range(n_steps)] for n in range(n_rows)]
    )
    advantage = np.zeros((n_rows, n_steps))
    for n in range(n_rows):
        group = range(n // size * size, n // size * size + size)
        for t in range(n_steps):
            if not counts[n, t]:
                continue
            moment = t if mode == "step" else 0
            peers = {m: to_go(m, moment) for m in group if counts[m, moment]}
            if len(peers) == 1:
                continue
            values = list(peers.values())
            others = [value for m, value in peers.items() if m != n]
            advantage[n, t] = peers[n] - np.mean(others if leave_one_out else values)
            if normalize:
                advantage[n, t] /= max(np.std(values), floor)
    return advantage, counts


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def gru_step(x, state, weights):
    """Cho et al. 2014, with the reset gate after the product, as torch.nn.GRU says it; one row [D], [H]."""
    w, b, u, c = (
        weights[name]
        for name in ("input.weight", "input.bias", "recurrent.weight", "recurrent.bias")
    )
    size = len(state)
    r, z, n = (slice(i * size, (i + 1) * size) for i in range(3))
    reset = sigmoid(w[r] @ x + b[r] + u[r] @ state + c[r])
    update = sigmoid(w[z] @ x + b[z] + u[z] @ state + c[z])
    new = np.tanh(w[n] @ x + b[n] + reset * (u[n] @ state + c[n]))
    following = (1.0 - update) * new + update * state
    return following, following


def lstm_step(x, state, weights):
    """Hochreiter and Schmidhuber 1997, Gers et al. 2000: gates i, f, g, o; one row [D], [h, c]."""
    w, b, u = (weights[name] for name in ("input.weight", "input.bias", "recurrent.weight"))
    size = len(state) // 2
    h, c = state[:size], state[size:]
    i, f, g, o = (
        w[k : k + size] @ x + b[k : k + size] + u[k : k + size] @ h
        for k in range(0, 4 * size, size)
    )
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return h, np.concatenate([h, c])


def recurrent_outputs(step, weights, observation, state, done, length):
    """What a memory gives at each step [N, T] of a rollout that is cut into sequences of so many steps.

    A sequence begins with the state [N, T, S] that was stored. Where the length does not divide T, the last one begins
    earlier, and counts from where the one before it has ended.
    """
    envs, steps = done.shape
    length = min(length, steps)
    rows = []
    for n in range(envs):
        outputs = {}
        for begin in range(0, steps, length):
            first = min(begin, steps - length)
            now = state[n, first]
            for t in range(first, first + length):
                if t > first and done[n, t - 1]:
                    now = np.zeros_like(now)
                output, now = step(observation[n, t], now, weights)
                if t >= begin:
                    outputs[t] = output
        rows.append(np.stack([outputs[t] for t in range(steps)]))
    return np.stack(rows)


def recurrent_ppo_loss(step, weights, rollout, length, mask, clip, vf_coef):
    """Schulman et al. 2017, equations 7 and 9, over the steps that count, of linear heads on a memory."""
    outputs = recurrent_outputs(
        step, weights, rollout["observation"], rollout["state"], rollout["done"], length
    )
    new, old, advantage, error = [], [], [], []
    for n, t in zip(*np.nonzero(mask), strict=True):
        logits = weights["actor.weight"] @ outputs[n, t] + weights["actor.bias"]
        log_z = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        new.append(logits[rollout["action"][n, t]] - log_z)
        old.append(rollout["sample_log_prob"][n, t])
        advantage.append(rollout["advantage"][n, t])
        value = (weights["critic.weight"] @ outputs[n, t] + weights["critic.bias"])[0]
        error.append((value - rollout["return"][n, t]) ** 2)
    return ppo_policy_loss(new, old, advantage, clip, clip) + vf_coef * float(np.mean(error))


def masked_categorical(logits, allowed):
    """Probabilities of a row of logits over what is allowed alone, by the definition of a softmax; their entropy."""
    weights = [
        math.exp(x - max(logits)) if ok else 0.0 for x, ok in zip(logits, allowed, strict=True)
    ]
    p = np.array(weights) / sum(weights)
    return p, -sum(x * math.log(x) for x in p if x > 0)


def iqm(tasks):
    """Mean of what is left of all scores when a quarter, rounded down, is cut off at either end."""
    ordered = sorted(score for task in tasks for score in task)
    cut = math.floor(0.25 * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def improvement(x_tasks, y_tasks):
    """Mean over tasks of the share of pairs (x, y) with x > y, and half of those with x = y."""
    shares = []
    for xs, ys in zip(x_tasks, y_tasks, strict=True):
        won = sum((x > y) + 0.5 * (x == y) for x in xs for y in ys)
        shares.append(won / (len(xs) * len(ys)))
    return sum(shares) / len(shares)


def percentile(values, percent):
    """The value at a rank of an ordered sample, on the line between its neighbours."""
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


def stratified_interval(statistic, samples, resamples, paired=False):
    """The 95 % percentile interval of a statistic, of runs drawn with replacement task by task.

    The numbers of the runs come from the generator seeded by 0, by task, and of two samples in turn.
    """
    generator = np.random.default_rng(0)
    tasks = list(zip(*samples, strict=True)) if paired else [(task,) for task in samples[0]]
    numbers = [
        [generator.integers(len(task), size=(resamples, len(task))) for task in pair]
        for pair in tasks
    ]
    found = []
    for draw in range(resamples):
        drawn = [
            [
                [pair[i][number] for number in index[i][draw]]
                for pair, index in zip(tasks, numbers, strict=True)
            ]
            for i in range(len(samples))
        ]
        found.append(statistic(*drawn))
    return percentile(found, 2.5), percentile(found, 97.5)


def exact_interval(scores):
    """The same of one task, of all samples that there are, each as often as another."""
    found = [iqm([list(drawn)]) for drawn in itertools.product(scores, repeat=len(scores))]
    return percentile(found, 2.5), percentile(found, 97.5)


def stochastic_flow_step(x, velocity, t, step, level):
    """One Euler-Maruyama step of dx = (v + sigma^2 / (2 t) (x + (1 - t) v)) dt + sigma dw, from t to t - step.

    sigma = level * sqrt(t / (1 - t)); at t = 1 with the next time in 1 - t (Liu et al. 2025, Flow-GRPO). Mean and deviation.
    """
    mean, std = np.empty_like(x), np.empty_like(t)
    for i, (row, v, time) in enumerate(zip(x, velocity, t, strict=True)):
        sigma = level * math.sqrt(time / (1.0 - (time if time < 1.0 else time - step)))
        end = row + (1.0 - time) * v  # the noise that this velocity comes from
        mean[i] = row - step * (v + sigma**2 / (2.0 * time) * end)
        std[i] = sigma * math.sqrt(step)
    return mean, std


def matrix_of(quaternion):
    """Rotation matrices [n, 3, 3] of unit quaternions [n, 4], w first, by Rodrigues' formula."""
    half = np.arccos(np.clip(quaternion[:, 0], -1.0, 1.0))
    axis = quaternion[:, 1:] / np.linalg.norm(quaternion[:, 1:], axis=1, keepdims=True)
    x, y, z = axis.T
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], 1).reshape(-1, 3, 3)
    sin, cos = np.sin(2 * half)[:, None, None], np.cos(2 * half)[:, None, None]
    return np.eye(3) + sin * cross + (1 - cos) * cross @ cross


def angle_of(first, second):
    """Angle [n] between rotation matrices [n, 3, 3], by the trace of the rotation between them."""
    trace = np.einsum("nij,nij->n", first, second)
    return np.arccos(np.clip((trace - 1) / 2, -1.0, 1.0))


def numeric_gradient(function, arrays, step=1e-5):
    """The derivatives of a function of arrays that are changed in place, by central differences."""
    found = [np.zeros_like(array) for array in arrays]
    for array, gradient in zip(arrays, found, strict=True):
        for place in np.ndindex(array.shape):
            kept = array[place]
            array[place] = kept + step
            above = function()
            array[place] = kept - step
            gradient[place] = (above - function()) / (2 * step)
            array[place] = kept
    return found


def segment_gain(act, move, value, rollout, gamma):
    """The mean over envs of the discounted rewards of the steps of a rollout, played again.

    `act(observation, noise)`, `move(observation, action)` -> (next, reward) and `value(observation)`
    are of one env; how episodes ended, and where the next ones began, is as recorded.
    """
    gains = []
    for row in range(len(rollout["noise"])):
        at, gain, weight = rollout["observation"][row][0], 0.0, 1.0
        steps = len(rollout["noise"][row])
        for t in range(steps):
            following, reward = move(at, act(at, rollout["noise"][row][t]))
            gain += weight * reward
            weight *= gamma
            terminated, truncated = rollout["terminated"][row][t], rollout["truncated"][row][t]
            if not terminated and (truncated or t == steps - 1):
                gain += weight * value(following)
            at = following
            if terminated or truncated:
                at, weight = rollout["observation"][row][t + 1], 1.0
        gains.append(gain)
    return np.mean(gains)
