"""MuJoCo models as batched envs, by MuJoCo's C library or by MuJoCo Warp."""
