#!/usr/bin/env bash
# Reproduce the learning results of docs/results.md: about half an hour of one core for classic control, two hours for MuJoCo
# with ours alone, five with the reference beside it (pip install 'lightning-rl[mujoco]' stable-baselines3).
#
# Ten minutes to three quarters of an hour of one core for each of the tuned tasks: pip install 'lightning-rl[mujoco,box2d]'.
#
#   scripts/reproduce.sh [classic|tasks|off_policy|memory|mujoco|reference|tuned|all]
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-all}

if [[ $what == classic || $what == all ]]; then
  for config in ppo.yaml ppo_acrobot.yaml ppo_pendulum.yaml; do
    python scripts/reproduce.py --config "$config" --seeds 1 2 3 4 5
  done
fi
if [[ $what == tasks || $what == all ]]; then
  for config in ppo_cart_pole_task grpo_cart_pole_task ppo_push_cube grpo_push_cube ppo_point_mass grpo; do
    python scripts/reproduce.py --config "$config.yaml" --seeds 1 2 3 4 5 --episodes 100
  done
fi
if [[ $what == off_policy || $what == all ]]; then
  python scripts/sac_curves.py --ids Pendulum-v1 --seeds 1 2 3 4 5 --total_env_steps 10_000 --random_env_steps 1_000 \
    --evaluate_every 1_000 --curves outputs/sac_pendulum.json
  python scripts/reproduce.py --config sac_push_cube.yaml --seeds 1 2 3 --episodes 100
  python scripts/reproduce.py --config sac_cart_pole.yaml --seeds 1 2 3
  for task in PushCube PointMass; do
    python scripts/reproduce.py --config sac_many_envs.yaml --seeds 11 12 13 14 15 --data.env "$task"
  done
  # MuJoCo; with --peer PYTHON also Stable-Baselines3's, where its curves are not kept yet.
  python scripts/sac_curves.py --configs sac.yaml sac_best.yaml --ids HalfCheetah-v5 Hopper-v5 Walker2d-v5
  python scripts/reproduce.py --config sac_push_cube_pixels.yaml --seeds 1 2 3 --episodes 100 --data.total_env_steps 300_000
fi
if [[ $what == memory || $what == all ]]; then
  python scripts/reproduce.py --config ppo_lstm_cart_pole.yaml --seeds 11 12 13 14 15
  python scripts/reproduce.py --config ppo_gru_pendulum.yaml --seeds 1 2 3 4 5
fi
for id in HalfCheetah-v5 Hopper-v5 Walker2d-v5; do
  if [[ $what == mujoco || $what == all ]]; then
    python scripts/reproduce.py --config ppo_mujoco.yaml --seeds 1 2 3 --data.env.id "$id"
  fi
  if [[ $what == reference || $what == all ]]; then
    mkdir -p outputs/reproduce
    for seed in 1 2 3; do
      python scripts/reference_sb3.py --id "$id" --seed "$seed" --output outputs/reproduce/reference_sb3.jsonl
    done
  fi
done
tuned() {
  python scripts/reproduce.py --config "tuned/ppo_$1.yaml" --seeds "${@:2}" --episodes 50
}
if [[ $what == tuned || $what == all ]]; then
  tuned half_cheetah 31 32 33 34 35
  tuned inverted_double_pendulum 41 42 43 44 45
  tuned swimmer 21 22 23 24 25
  for task in hopper walker2d ant humanoid lunar_lander bipedal_walker; do
    tuned "$task" 11 12 13 14 15
  done
fi
