"""Settings of the whole suite."""

import torch

# Two threads that wait for each other on a busy machine of two cores are slower than one.
torch.set_num_threads(1)
