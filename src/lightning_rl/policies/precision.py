"""Act in bfloat16, as updates do under autocast; otherwise the first ratios would differ from 1."""

import torch


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a reusable autocast context, without a cache of weights; `dtype` None disables it."""
    return torch.autocast(
        device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False
    )
