"""Name the numbers of an observation that leave the ranges of a recording."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl import read_episodes
from lightning_rl.extensions.transfer.trial import Trial

EPISODES, SECONDS = 8, 5.0
"""Episodes that are compared with the recording, and their seconds, without pushes."""

MARGIN = 0.1
"""Share of a recorded range by which a number may exceed it on either side."""

RARE = 0.005
"""Share of a term's numbers outside of their ranges that is not reported."""


class Outside(NamedTuple):
    """A term of the observation that leaves the recorded range.

    Attributes:
        term: name of the term.
        share: of its numbers, over all steps until the fall.
        number: name of the number that is outside most often.
        seen: lowest and highest value of that number.
        recorded: the same in the recording.
    """

    term: str
    share: float
    number: str
    seen: tuple[float, float]
    recorded: tuple[float, float]

    def __str__(self) -> str:
        (low, high), (first, last) = self.seen, self.recorded
        return (
            f"{self.term} leaves the recorded range in {self.share:.0%} of its numbers, most often "
            f"{self.number}: {low:.3g} to {high:.3g}, recorded {first:.3g} to {last:.3g}"
        )


def terms_outside(trial: Trial, recording: str) -> list[Outside]:
    """Return the terms whose numbers leave the range of a recording, the worst first.

    Args:
        trial: the policy in the other env.
        recording: directory of a dataset of the policy in its own env.

    Raises:
        ConfigurationError: the recording has other observations.
    """
    space = trial.policy.acting_space
    episodes = read_episodes(recording, observation_space=space)
    recorded = torch.cat([trial.flat(episode.observation) for episode in episodes])
    observed: list[Tensor] = []
    trial.watch(EPISODES, SECONDS, lambda rows, alive: observed.append(rows[alive]))
    seen = torch.cat(observed)
    ranges = torch.stack((recorded.amin(0), recorded.amax(0)))
    margin = MARGIN * (ranges[1] - ranges[0])
    outside = ((seen < ranges[0] - margin) | (seen > ranges[1] + margin)).float().mean(0)
    spans = torch.stack((seen.amin(0), seen.amax(0)))
    terms = []
    for term, columns in trial.columns.items():
        worst = max(columns, key=lambda column: float(outside[column]))
        limits = (tuple(pair[:, worst].tolist()) for pair in (spans, ranges))
        name = trial.number_name(term, columns.index(worst))
        terms.append(Outside(term, float(outside[columns].mean()), name, *limits))
    return sorted((term for term in terms if term.share > RARE), key=lambda term: -term.share)
