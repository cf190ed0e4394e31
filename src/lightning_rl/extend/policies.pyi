"""Parts of policies: actors, distributions, networks, noise."""

from lightning_rl.policies.actors import RolloutActor as RolloutActor
from lightning_rl.policies.base import ABSENT as ABSENT
from lightning_rl.policies.base import GUIDANCE as GUIDANCE
from lightning_rl.policies.base import NOISE as NOISE
from lightning_rl.policies.base import RNG as RNG
from lightning_rl.policies.base import noise_for as noise_for
from lightning_rl.policies.distributions.base import summed as summed
from lightning_rl.policies.distributions.base import widened as widened
from lightning_rl.policies.distributions.unit_actions import NoisyTanh as NoisyTanh
from lightning_rl.policies.networks.encoders import PictureEncoder as PictureEncoder
from lightning_rl.policies.networks.encoders import picture_keys as picture_keys
from lightning_rl.policies.networks.perceptron import mlp as mlp
from lightning_rl.policies.normalization import RunningMoments as RunningMoments
from lightning_rl.policies.perceptron_policy import PerceptronPolicy as PerceptronPolicy
from lightning_rl.policies.precision import autocast as autocast
from lightning_rl.policies.slow import PolicyFactory as PolicyFactory
from lightning_rl.policies.weights import check_weights_are_numbers as check_weights_are_numbers

__all__: list[str]
