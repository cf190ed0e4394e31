"""PPO for robots with a left and a right side: mirrored samples, and a loss on asymmetry."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_rl import PPO, ConfigurationError, Policy
from lightning_rl.extend.errors import check_range, closest, require
from lightning_rl.extend.spaces import names_of
from lightning_rl.kwargs import SymmetricPPOKwargs, Unpack

SIDES = {"left": "right", "l": "r", "fl": "fr", "hl": "hr", "rl": "rr"}
"""Parts of joint names: on the left, and on the right."""

TURNING = ("roll", "yaw")
"""Parts of the names of joints that turn the other way in a mirror."""

UNIT = "unit_action"
"""Field of a rollout: the action before a policy scales it to its bounds."""

Source = tuple[int, float]
"""Index and sign of the number that a mirrored vector has in one place."""


class SymmetricPPO(PPO):
    """PPO that also trains on each sample as a mirror shows it.

    A mirror exchanges the numbers of observations and actions, and changes the signs of some. A
    mirrored sample keeps its log-prob, advantage and return. `approx_kl` and `clip_fraction` count
    the samples of the rollout only, as in rsl_rl.

    Source: Mittal et al. 2024, "Symmetry Considerations for Learning Task Symmetric Robot
    Policies": data augmentation and mirror loss. Differs from rsl_rl: the entropy bonus is the mean
    over samples and mirrored samples.

    Args:
        policy: a policy without a memory that acts on vectors, in a Box.
        joints: {name: partner} of actions, such as `{left_hip: -right_hip}`; a minus changes the
            sign. One direction is enough; a joint in the middle is its own partner. Actions without
            names are called `0`, `1`, ...
        observation: {term: rule}, or {key: {term: rule}} for a Dict. A rule is a list with 1, -1 or
            `joints` (all joints, in the order of the actions) for the numbers of the term, or
            `joints` alone. A term with a history repeats its rule. Terms of managers go by their
            names; terms of other observations by their order.
        augmentation: train on mirrored samples.
        mirror_loss_coef: weight of the mirror loss.
        kwargs: see `PPO`.

    Raises:
        ConfigurationError: a joint, key or term is missing or unknown, a vector has another size,
            or mirroring a vector twice changes it.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        joints: Mapping[str, str],
        observation: Mapping[str, Any],
        augmentation: bool = True,
        mirror_loss_coef: float = 0.0,
        **kwargs: Unpack[SymmetricPPOKwargs],
    ) -> None:
        super().__init__(policy, **kwargs)
        check_range("mirror_loss_coef", mirror_loss_coef, minimum=0)
        require(
            augmentation or mirror_loss_coef > 0,
            "SymmetricPPO has augmentation: false and mirror_loss_coef: 0: set one, or use PPO.",
        )
        fields = ("sample_log_prob", "state", UNIT)
        unknown = [key for key in policy.extra_fields if key not in fields]
        require(
            not policy.is_recurrent and not unknown,
            f"SymmetricPPO cannot mirror {', '.join(unknown) or 'the memory'} of "
            f"{type(policy).__name__}: use a policy without, such as ActorCritic.",
        )
        self.augmentation = augmentation
        self.mirror_loss_coef = mirror_loss_coef
        self.mirror = Mirror(policy, joints, observation)

    def loss(self, minibatch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        loss, scalars = super().loss(minibatch)
        mirrored = self.mirror(minibatch)
        if self.augmentation:
            # A second pass: the logged scalars then describe the samples of the rollout alone.
            loss = 0.5 * (loss + super().loss(mirrored)[0])
        if self.mirror_loss_coef and not self.warms_up:
            action, action_in_mirror = self._mean_action(minibatch), self._mean_action(mirrored)
            asymmetry = mirror_loss(self.mirror.action(action), action_in_mirror)
            loss = loss + self.mirror_loss_coef * asymmetry
            scalars = {**scalars, "mirror_loss": asymmetry}
        return loss, scalars

    def _mean_action(self, minibatch: TensorDict) -> Tensor:
        td = minibatch.select("observation", "state", strict=False)
        action: Tensor = self.policy(td, deterministic=True)["action"]
        return action


def mirror_loss(mirrored_action: Tensor, action_in_mirror: Tensor) -> Tensor:
    """Return the mean squared difference [] of two actions; gradients reach the second alone.

    Args:
        mirrored_action: [B, *A], mirrored mean actions for observations.
        action_in_mirror: [B, *A], mean actions for mirrored observations.
    """
    return (action_in_mirror - mirrored_action.detach()).square().mean()


class Mirror(nn.Module):
    """Mirror the observations and actions of a policy.

    Args:
        policy: its spaces have the sizes and names.
        joints, observation: see `SymmetricPPO`.

    Raises:
        ConfigurationError: see `SymmetricPPO`.
    """

    def __init__(
        self, policy: Policy, joints: Mapping[str, str], observation: Mapping[str, Any]
    ) -> None:
        super().__init__()
        actions, space = policy.action_space, policy.observation_space
        size = _size(actions, "the action")
        joint_sources = _joint_sources(joints, names_of(actions) or [*map(str, range(size))])
        self.action = SignedPermutation(joint_sources, "joints")
        low, high = (torch.as_tensor(bound) for bound in (actions.low, actions.high))  # type: ignore[attr-defined]  # a Box
        mirrored = self.action(torch.stack((low, high)))
        require(
            torch.equal(mirrored.amin(0), low) and torch.equal(mirrored.amax(0), high),
            f"The bounds of mirrored actions differ from those of {actions}: scale the actions so "
            "that partners have the same bounds.",
        )
        self.has_keys = isinstance(space, gymnasium.spaces.Dict)
        spaces = {"": space}
        if isinstance(space, gymnasium.spaces.Dict):
            spaces = {key: part for key, part in space.items() if key not in policy.ignore_keys}
        rules = observation if self.has_keys else {"": observation}
        _check_names("observation", rules, spaces)
        self.observation = nn.ModuleDict()
        for key, part in spaces.items():
            place = f"observation {key}".strip()
            sources = _sources(place, rules[key], part, joint_sources)
            self.observation[key or "vector"] = SignedPermutation(sources, place)

    def forward(self, td: TensorDict) -> TensorDict:
        """Return `td` [B] with mirrored observations and actions; it shares the other fields."""
        if self.has_keys:
            parts = {
                key: mirror(td["observation", key]) for key, mirror in self.observation.items()
            }
            observation: Any = TensorDict(parts, td.batch_size)
        else:
            observation = self.observation["vector"](td["observation"])
        actions = {key: self.action(td[key]) for key in ("action", UNIT) if key in td.keys()}
        return td.exclude("observation", *actions).update({"observation": observation, **actions})


class SignedPermutation(nn.Module):
    """Exchange the numbers of the last axis, and change the sign of some: y_i = s_i x_p(i).

    Args:
        sources: p(i) and s_i for each number.
        place: names the vector in messages.

    Raises:
        ConfigurationError: twice is not the identity.
    """

    index: Tensor
    sign: Tensor

    def __init__(self, sources: Sequence[Source], place: str) -> None:
        super().__init__()
        for i, (j, sign) in enumerate(sources):
            require(
                sources[j] == (i, sign),
                f"{place}: mirrored twice, number {i} is not itself: it comes from {j} with the "
                f"sign {sign:+g}, and {j} from {sources[j][0]} with {sources[j][1]:+g}.",
            )
        index, signs = zip(*sources, strict=True)
        # Not in checkpoints: the config says it.
        self.register_buffer("index", torch.tensor(index), persistent=False)
        self.register_buffer("sign", torch.tensor(signs), persistent=False)

    def forward(self, vector: Tensor) -> Tensor:
        """Return the mirrored vectors [..., D]."""
        return vector.index_select(-1, self.index) * self.sign


def _size(space: gymnasium.Space[Any], place: str) -> int:
    shape = space.shape if isinstance(space, gymnasium.spaces.Box) else None
    require(
        shape is not None and len(shape) == 1 and space.dtype != "uint8",
        f"SymmetricPPO mirrors vectors, but {place} is {space}: ignore the key, or use PPO.",
    )
    assert shape is not None
    return int(shape[0])


def _joint_sources(joints: Mapping[str, str], names: Sequence[str]) -> list[Source]:
    partners: dict[str, tuple[str, float]] = {}
    for joint_name, signed_name in joints.items():
        pair = (joint_name, signed_name)
        texts = all(isinstance(name, str) for name in pair)
        require(texts, f"joints has the pair {pair}: write it as texts, such as '0': '-1'.")
        sign = -1.0 if signed_name.startswith("-") else 1.0
        name = signed_name.removeprefix("-")
        for joint, partner in ((joint_name, name), (name, joint_name)):
            require(
                joint in names,
                f"joints names {joint}; the actions are {', '.join(names)}{closest(joint, names)}.",
            )
            require(
                partners.setdefault(joint, (partner, sign)) == (partner, sign),
                f"joints gives {joint} two partners: {partners[joint][0]} and {partner}.",
            )
    missing = [name for name in names if name not in partners]
    proposal = ", ".join(
        f"{joint}: {partner}" for joint, partner in proposed_joints(missing).items()
    )
    require(
        not missing,
        f"joints says nothing of {', '.join(missing)}: give each its partner"
        f"{f', by their names {{{proposal}}}' if proposal else ''}. A joint that turns the other "
        "way in a mirror needs a minus.",
    )
    return [(list(names).index(partners[name][0]), partners[name][1]) for name in names]


def proposed_joints(names: Sequence[str]) -> dict[str, str]:
    """Propose `joints` of `SymmetricPPO` for names with words for left and right, such as FL or R.

    Joints that roll or yaw get a minus, as in most robots. Names without a side are their own
    partners; {} if no name has a side.
    """
    pairs: dict[str, str] = {}
    for name in names:
        # Words end at signs, digits and small letters before capitals: `leftKnee`, `LKnee`.
        words = re.split(r"([^a-zA-Z]|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]))", name)
        partner = "".join(map(_other_side, words))
        if partner not in pairs:
            pairs[name] = partner if partner in names else name
    if all(name == partner for name, partner in pairs.items()):
        return {}
    turns = {name: any(word in name.lower() for word in TURNING) for name in pairs}
    return {name: f"-{pairs[name]}" if turns[name] else pairs[name] for name in pairs}


def _other_side(word: str) -> str:
    sides = SIDES | {on_right: on_left for on_left, on_right in SIDES.items()}
    other = sides.get(word.lower(), word)
    if word.isupper():
        return other.upper()
    return other.capitalize() if word[:1].isupper() else other


def _sources(
    place: str, rules: Any, space: gymnasium.Space[Any], joints: Sequence[Source]
) -> list[Source]:
    size = _size(space, place)
    require(isinstance(rules, Mapping), f"{place} is {rules}: give {{term: rule}}.")
    # Terms of managers have names such as `joint_speeds/3`.
    sizes: dict[str, int] = {}
    for name in names_of(space):
        term = name.partition("/")[0]
        sizes[term] = sizes.get(term, 0) + 1
    if sizes:
        _check_names(place, rules, sizes)
    sources: list[Source] = []
    for term in sizes or rules:
        rule = _term_sources(f"{place}, {term}", rules[term], joints)
        repeats = sizes.get(term, len(rule)) / len(rule)
        require(
            repeats == int(repeats),
            f"{place}, {term}: the rule has {len(rule)} numbers, the term {sizes.get(term)}.",
        )
        for _ in range(int(repeats)):
            first = len(sources)
            sources += [(first + index, sign) for index, sign in rule]
    require(
        len(sources) == size,
        f"{place}: the terms have {len(sources)} numbers together, the vector {size}.",
    )
    return sources


def _term_sources(place: str, rule: Any, joints: Sequence[Source]) -> list[Source]:
    sources: list[Source] = []
    for entry in [rule] if isinstance(rule, str | int) else rule:
        if entry == "joints":
            first = len(sources)
            sources += [(first + index, sign) for index, sign in joints]
            continue
        if entry not in (1, -1):
            raise ConfigurationError(f"{place}: {entry!r} is not 1, -1 or joints.")
        sources.append((len(sources), float(entry)))
    return sources


def _check_names(place: str, rules: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    missing = [name for name in names if name not in rules]
    unknown = [name for name in rules if name not in names]
    require(
        not missing and not unknown,
        f"{place} must have the keys {', '.join(names)}; missing: {', '.join(missing) or 'none'}, "
        f"unknown: {', '.join(unknown) or 'none'}.",
    )
