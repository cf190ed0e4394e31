#!/usr/bin/env bash
# Reproduce the learning results of docs/results.md: about half an hour of one core for classic control, two hours for MuJoCo
# with ours alone, five with the reference beside it (pip install 'lightning-rl[mujoco]' stable-baselines3).
#
# Ten minutes to three quarters of an hour of one core for each of the tuned tasks: pip install 'lightning-rl[mujoco,box2d]'.
#
#   scripts/reproduce.sh [classic|tasks|off_policy|ablation|memory|mujoco|reference|tuned|all]
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
  for config in apg_point_mass shac_point_mass shac_swing_up apg_swing_up ppo_swing_up; do
    python scripts/reproduce.py --config "$config.yaml" --seeds 1 2 3 --episodes 256
  done
fi
if [[ $what == off_policy || $what == all ]]; then
  python scripts/sac_curves.py --ids Pendulum-v1 --seeds 1 2 3 4 5 --total_env_steps 10_000 --random_env_steps 1_000 \
    --evaluate_every 1_000 --curves outputs/sac_pendulum.json
  python scripts/reproduce.py --config sac_push_cube.yaml --seeds 1 2 3 --episodes 100
  python scripts/reproduce.py --config sac_cart_pole.yaml --seeds 1 2 3
  python scripts/reproduce.py --config dqn_cart_pole.yaml --seeds 1 2 3
  python scripts/reproduce.py --config dqn_lunar_lander.yaml --seeds 1 2 3   # hours on a busy machine
  python scripts/offline_push_cube.py outputs/offline
  for task in PushCube PointMass; do
    python scripts/reproduce.py --config sac_many_envs.yaml --seeds 11 12 13 14 15 --data.env "$task"
  done
  # MuJoCo; with --peer PYTHON also Stable-Baselines3's. The curves reported are in scripts/results/sac_curves.json.
  mujoco=(python scripts/sac_curves.py --curves outputs/sac_curves.json)
  "${mujoco[@]}" --configs sac.yaml sac_best.yaml --ids HalfCheetah-v5 Hopper-v5 Walker2d-v5
  "${mujoco[@]}" --configs sac_best.yaml --ids HalfCheetah-v5 --seeds 2 3 --total_env_steps 1_000_000
  python scripts/reproduce.py --config sac_push_cube_pixels.yaml --seeds 1 2 3 --episodes 100 --data.total_env_steps 300_000
fi
# What the parts of sac_best.yaml are worth, and what else was tried: --label, config, settings.
part() {
  python scripts/sac_curves.py --curves outputs/sac_curves.json --ids Walker2d-v5 --seeds 1 2 --label "$1" --configs "${@:2}"
}
if [[ $what == ablation || $what == all ]]; then
  part "policy_delay 1" sac_best.yaml --model.policy_delay 1
  part "rate 3e-4, default betas" sac_best.yaml --model.learning_rate 3e-4 --model.optimizer.init_args.betas '[0.9,0.999]'
  part "layer for batch, targets kept" sac_best.yaml --model.policy.init_args.critic_normalization layer --model.tau 0.005
  part "residual, categorical" sac.yaml --model.policy.init_args.network residual --model.policy.init_args.hidden_sizes '[128]' \
    --model.policy.init_args.critic_hidden_sizes '[128,128]' --model.policy.init_args.actor_normalization layer \
    --model.policy.init_args.critic_normalization layer --model.policy.init_args.initialization orthogonal \
    --model.policy.init_args.value_atoms '{num_atoms: 101, limit: 5.0}' --model.policy.init_args.normalize_observation true \
    --model.normalize_reward true --model.policy_delay 2 --model.init_alpha 0.01
  part "ensemble, 4 updates" sac.yaml --model.policy.init_args.num_critics 4 --model.num_target_critics 2 \
    --model.policy.init_args.critic_normalization layer --model.updates_per_env_step 4 --model.policy_delay 4
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
