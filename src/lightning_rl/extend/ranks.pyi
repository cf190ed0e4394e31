"""The processes of a distributed run."""

from lightning_rl.system.ranks import gather_over_ranks as gather_over_ranks
from lightning_rl.system.ranks import rank as rank
from lightning_rl.system.ranks import sum_over_ranks as sum_over_ranks
from lightning_rl.system.ranks import world_size as world_size

__all__: list[str]
