"""Whole updates of SAC and TD3 in float64 NumPy, with derivatives by hand: written from the papers, not from the code under test."""

import numpy as np


def forward(layers, x):
    """A ReLU perceptron; return its output and the inputs of each layer."""
    inputs = []
    for i, (weight, bias) in enumerate(layers):
        inputs.append(x)
        x = x @ weight + bias
        if i < len(layers) - 1:
            x = np.maximum(x, 0.0)
    return x, inputs


def backward(layers, inputs, gradient):
    """Return the gradients of weights and biases, and that of the input."""
    found = []
    for i in reversed(range(len(layers))):
        weight, _ = layers[i]
        found.insert(0, (inputs[i].T @ gradient, gradient.sum(0)))
        gradient = gradient @ weight.T
        if i > 0:
            gradient = gradient * (inputs[i] > 0)
    return found, gradient


class Adam:
    def __init__(self, rate, eps=1e-8, betas=(0.9, 0.999)):
        self.rate, self.eps, self.count, self.state = rate, eps, 0, None
        self.betas = betas

    def step(self, arrays, gradients, limit=None):
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        if limit is not None:
            gradients = [g * min(1.0, limit / (norm + 1e-6)) for g in gradients]
        self.state = self.state or [(np.zeros_like(a), np.zeros_like(a)) for a in arrays]
        self.count += 1
        for array, gradient, (mean, square) in zip(arrays, gradients, self.state, strict=True):
            mean += (1 - self.betas[0]) * (gradient - mean)
            square += (1 - self.betas[1]) * (gradient**2 - square)
            unbiased = [
                moment / (1 - beta**self.count)
                for moment, beta in zip((mean, square), self.betas, strict=True)
            ]
            array -= self.rate * unbiased[0] / (np.sqrt(unbiased[1]) + self.eps)


def flat(layers):
    return [array for layer in layers for array in layer]


def copied(layers):
    return [(weight.copy(), bias.copy()) for weight, bias in layers]


def follow(targets, networks, tau):
    """Move the slow copies of networks towards them."""
    for target, network in zip(targets, networks, strict=True):
        for slow, fast in zip(flat(target), flat(network), strict=True):
            slow += tau * (fast - slow)


def step_critics(adam, critics, batch, target, limit=None):
    """Regress each critic of observations and actions on the targets [B]."""
    arrays, gradients = [], []
    for critic in critics:
        q, inputs = forward(critic, np.hstack([batch["observation"], batch["unit_action"]]))
        by_layer, _ = backward(critic, inputs, (q - target[:, None]) / len(target))
        arrays, gradients = arrays + flat(critic), gradients + flat(by_layer)
    adam.step(arrays, gradients, limit)


def log_density(u, mean, std):
    """log of the density of tanh(u), u normal: the change of variables, 1 - tanh(u)^2 = 1 / cosh(u)^2, term by term."""
    normal = -0.5 * ((u - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    return (normal + 2 * (np.logaddexp(u, -u) - np.log(2.0))).sum(-1)


class SACReference:
    def __init__(
        self,
        actor,
        critics,
        *,
        alpha,
        rate,
        tau,
        target_entropy,
        in_target=True,
        limit=None,
        mean_of_all=False,
        log_std_bounds=(-20.0, 2.0),
    ):
        self.actor, self.critics, self.bounds = actor, critics, log_std_bounds
        self.targets = [copied(critic) for critic in critics]
        self.log_alpha = np.array(np.log(alpha))
        self.adams = [Adam(rate) for _ in range(3)]
        self.tau, self.target_entropy = tau, target_entropy
        self.in_target, self.limit, self.mean_of_all = in_target, limit, mean_of_all

    def act(self, observation, noise):
        output, inputs = forward(self.actor, observation)
        mean, free = np.split(output, 2, axis=-1)
        std = np.exp(np.clip(free, *self.bounds))
        u = mean + std * noise
        return u, mean, free, std, inputs

    def target(self, batch):
        u, mean, _, std, _ = self.act(batch["next_observation"], batch["next_noise"])
        inputs = np.hstack([batch["next_observation"], np.tanh(u)])
        q = np.stack([forward(target, inputs)[0][:, 0] for target in self.targets])
        if "target_critics" in batch:
            q = np.take_along_axis(q, batch["target_critics"].T, 0)
        entropy = np.exp(self.log_alpha) * log_density(u, mean, std) if self.in_target else 0.0
        return batch["reward"] + batch["discount"] * (q.min(0) - entropy)

    def update(self, batch, with_actor=True):
        size = len(batch["reward"])
        target = self.target(batch)
        step_critics(self.adams[0], self.critics, batch, target, self.limit)
        if with_actor:
            self.step_actor(batch, size)
        follow(self.targets, self.critics, self.tau)

    def step_actor(self, batch, size):
        alpha = np.exp(self.log_alpha)
        u, mean, free, std, inputs = self.act(batch["observation"], batch["noise"])
        action, passes = np.tanh(u), []
        for critic in self.critics:
            q, seen = forward(critic, np.hstack([batch["observation"], action]))
            passes.append((q[:, 0], seen))
        values = np.stack([q for q, _ in passes])
        weight = (values == values.min(0)) * 1.0
        if self.mean_of_all:
            weight = np.full(values.shape, 1.0 / len(values))
        by_action = np.zeros_like(action)
        for critic, (_, seen), own in zip(self.critics, passes, weight, strict=True):
            by_action += backward(critic, seen, -own[:, None] / size)[1][
                :, batch["observation"].shape[1] :
            ]
        # d/du: -Q through tanh, and alpha log pi, of which the noise is given: -log std + 2 tanh(u) per dimension.
        by_u = by_action * (1 - action**2) + alpha / size * 2 * action
        by_log_std = by_u * std * batch["noise"] - alpha / size
        # Beyond a bound, only a gradient whose descent leads back counts.
        leads_back = (free >= self.bounds[0]) | (by_log_std < 0)
        by_free = by_log_std * (leads_back & ((free <= self.bounds[1]) | (by_log_std > 0)))
        found, _ = backward(self.actor, inputs, np.hstack([by_u, by_free]))
        log_prob = log_density(u, mean, std)
        self.adams[1].step(flat(self.actor), flat(found), self.limit)
        by_log_alpha = np.array(-(log_prob + self.target_entropy).mean())
        self.adams[2].step([self.log_alpha], [by_log_alpha], self.limit)


class DoubleQReference:
    """Of three commands: the network says which is the best next one, the slow copy what it is worth."""

    def __init__(self, layers, *, rate, tau, limit=None):
        self.layers, self.target = layers, copied(layers)
        self.adam, self.tau, self.limit = Adam(rate), tau, limit

    def update(self, batch, command, penalty):
        rows = np.arange(len(command))
        best = forward(self.layers, batch["next_observation"])[0].argmax(1)
        worth = forward(self.target, batch["next_observation"])[0][rows, best]
        wanted = batch["reward"] + penalty + batch["discount"] * worth
        q, inputs = forward(self.layers, batch["observation"])
        gradient = np.zeros_like(q)
        gradient[rows, command] = (q[rows, command] - wanted) / len(command)
        found, _ = backward(self.layers, inputs, gradient)
        self.adam.step(flat(self.layers), flat(found), self.limit)
        follow([self.target], [self.layers], self.tau)


class TD3Reference:
    def __init__(self, actor, critics, *, rate, tau):
        self.actor, self.critics, self.tau = actor, critics, tau
        self.targets = [copied(critic) for critic in critics]
        self.target_actor = copied(actor)
        self.adams = [Adam(rate), Adam(rate)]

    def update(self, batch, with_actor):
        size, following = len(batch["reward"]), batch["next_observation"]
        action = np.clip(
            np.tanh(forward(self.target_actor, following)[0]) + batch["next_noise"], -1, 1
        )
        q = np.stack([forward(c, np.hstack([following, action]))[0][:, 0] for c in self.targets])
        target = batch["reward"] + batch["discount"] * q.min(0)
        step_critics(self.adams[0], self.critics, batch, target)
        if not with_actor:
            return
        output, inputs = forward(self.actor, batch["observation"])
        _, seen = forward(self.critics[0], np.hstack([batch["observation"], np.tanh(output)]))
        by_action = backward(self.critics[0], seen, np.full((size, 1), -1.0 / size))[1][
            :, batch["observation"].shape[1] :
        ]
        found, _ = backward(self.actor, inputs, by_action * (1 - np.tanh(output) ** 2))
        self.adams[1].step(flat(self.actor), flat(found))
        follow([self.target_actor, *self.targets], [self.actor, *self.critics], self.tau)


def projected(values, probs, atoms):
    """Share the probability of each value among its two neighbours, by its distance: one at a time, from Bellemare et al. 2017."""
    found = np.zeros(len(atoms))
    for value, prob in zip(values, probs, strict=True):
        value = min(max(value, atoms[0]), atoms[-1])
        for i, atom in enumerate(atoms):
            nearness = 1 - abs(value - atom) / (atoms[1] - atoms[0])
            found[i] += prob * max(nearness, 0.0)
    return found


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class DiscreteSACReference:
    """All actions at once, and only those that are allowed."""

    def __init__(self, actor, critics, *, alpha, rate, tau, share, mean_of_all=False):
        self.actor, self.critics, self.tau, self.share = actor, critics, tau, share
        self.targets = [copied(critic) for critic in critics]
        self.log_alpha, self.mean_of_all = np.array(np.log(alpha)), mean_of_all
        self.adams = [Adam(rate) for _ in range(3)]

    def chances(self, observation, mask):
        logits, inputs = forward(self.actor, observation)
        probs = np.exp(log_softmax(np.where(mask, logits, -np.inf)))
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = np.where(mask, -np.log(probs), 0.0)
        return probs, surprise, inputs

    def update(self, batch):
        size, rows = len(batch["reward"]), np.arange(len(batch["reward"]))
        alpha = np.exp(self.log_alpha)
        probs, surprise, _ = self.chances(batch["next_observation"], batch["next_mask"])
        q = np.stack([forward(c, batch["next_observation"])[0] for c in self.targets])
        if "target_critics" in batch:
            q = np.stack([q[batch["target_critics"][i], i] for i in rows], 1)
        value = (probs * (q.min(0) + alpha * surprise)).sum(-1)
        target = batch["reward"] + batch["discount"] * value
        arrays, gradients = [], []
        for critic in self.critics:
            q, inputs = forward(critic, batch["observation"])
            gradient = np.zeros_like(q)
            gradient[rows, batch["action"]] = (q[rows, batch["action"]] - target) / size
            found, _ = backward(critic, inputs, gradient)
            arrays, gradients = arrays + flat(critic), gradients + flat(found)
        self.adams[0].step(arrays, gradients)

        probs, surprise, inputs = self.chances(batch["observation"], batch["mask"])
        q = np.stack([forward(c, batch["observation"])[0] for c in self.critics])
        q = q.mean(0) if self.mean_of_all else q.min(0)
        # d/dlogit_k of -sum_a p_a (q_a + alpha s_a): with V that sum, -p_k (q_k + alpha s_k - V).
        each = q + alpha * surprise
        by_logits = -probs * (each - (probs * each).sum(-1, keepdims=True)) / size
        found, _ = backward(self.actor, inputs, by_logits)
        entropy = (probs * surprise).sum(-1)
        self.adams[1].step(flat(self.actor), flat(found))
        wanted = self.share * np.log(batch["mask"].sum(-1))
        self.adams[2].step([self.log_alpha], [np.array((entropy - wanted).mean())])
        follow(self.targets, self.critics, self.tau)


class DQNReference:
    """A Q network, or a value and an advantage; the networks are lists of layers."""

    def __init__(self, networks, *, rate, tau, interval, double, limit=None):
        self.networks = networks
        self.targets = [copied(network) for network in networks]
        self.adam, self.tau, self.interval, self.double = Adam(rate), tau, interval, double
        self.limit, self.count = limit, 0

    @staticmethod
    def values(networks, x):
        passes = [forward(one, x) for one in networks]
        if len(passes) == 1:
            return passes[0][0], [seen for _, seen in passes]
        (value, _), (advantage, _) = passes
        mean = advantage.sum(1, keepdims=True) / advantage.shape[1]
        return value + advantage - mean, [seen for _, seen in passes]

    def update(self, batch):
        rows, size = np.arange(len(batch["reward"])), len(batch["reward"])
        target_q, _ = self.values(self.targets, batch["next_observation"])
        chooser = target_q
        if self.double:
            chooser = self.values(self.networks, batch["next_observation"])[0]
        best = np.where(batch["next_mask"], chooser, -np.inf).argmax(1)
        wanted = batch["reward"] + batch["discount"] * target_q[rows, best]
        q, seen = self.values(self.networks, batch["observation"])
        by_q = np.zeros_like(q)
        # The Huber loss has the slope of the error, and no more than 1.
        by_q[rows, batch["action"]] = np.clip(q[rows, batch["action"]] - wanted, -1, 1) / size
        total = by_q.sum(1, keepdims=True)
        by_output = [by_q] if len(self.networks) == 1 else [total, by_q - total / q.shape[1]]
        arrays, gradients = [], []
        for one, inputs, gradient in zip(self.networks, seen, by_output, strict=True):
            arrays += flat(one)
            gradients += flat(backward(one, inputs, gradient)[0])
        self.adam.step(arrays, gradients, self.limit)
        self.count += 1
        if self.count % self.interval == 0:
            follow(self.targets, self.networks, self.tau)
