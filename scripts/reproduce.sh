#!/usr/bin/env bash
# Reproduce the tables of docs/results/, one row by one command. Needs pip install -e '.[sweep]', some families also
# '.[mujoco,box2d]', or the environment of constraints-robots.txt (fetch, adroit, pick_cube, aloha).
#
#   scripts/reproduce.sh classic|tasks|gradients|tuned|mujoco|reference|off_policy|demonstrations|fetch|adroit|pick_cube|aloha|vla|recap|robots|memory|offline|real_time|dog
#   scripts/reproduce.sh figures    # docs/figures/*.svg, from the curves that the other families keep
set -euo pipefail
cd "$(dirname "$0")/.."
curves=scripts/results/curves
RETURN=eval/avg_reward SUCCESS=eval/success_rate

# row FAMILY METRIC CONFIG EPISODES "SEEDS" SETTINGS...
row() {
  # shellcheck disable=SC2086
  python scripts/reproduce.py --curves "$curves/$1.json" --metric "$2" --config "$3" --episodes "$4" --seeds $5 "${@:6}"
}
# The same without a curve in a figure: run CONFIG EPISODES "SEEDS" SETTINGS...
run() {
  # shellcheck disable=SC2086
  python scripts/reproduce.py --config "$1" --episodes "$2" --seeds $3 "${@:4}"
}

case ${1:?Name a family, see the head of this file.} in
classic)
  for config in ppo ppo_acrobot ppo_pendulum; do row classic $RETURN $config.yaml 20 "1 2 3 4 5"; done
  run ppo.yaml 20 "1 2 3 4 5" --data.collector AsyncCollector
  run grpo.yaml 20 "1 2 3 4 5"
  ;;
tasks)
  for config in ppo_push_cube grpo_push_cube ppo_point_mass; do row tasks $SUCCESS $config.yaml 100 "11 12 13 14 15"; done
  for config in ppo_cart_pole_task grpo_cart_pole_task; do run $config.yaml 100 "1 2 3 4 5"; done
  for task in PushCube PointMass; do row tasks $SUCCESS sac_many_envs.yaml 64 "11 12 13 14 15" --data.env $task; done
  row tasks $SUCCESS sac_push_cube_pixels.yaml 500 "31 32 33" --env "PushCube, 48×48 pictures"
  row tasks $SUCCESS ppo_push_cube_pixels.yaml 500 "31 32" --env "PushCube, 48×48 pictures"
  ;;
gradients)
  row gradients $SUCCESS shac_point_mass.yaml 256 "11 12 13"
  for config in apg_point_mass shac_swing_up apg_swing_up ppo_swing_up; do row gradients $SUCCESS $config.yaml 256 "1 2 3"; done
  ;;
tuned)
  tuned() { row mujoco $RETURN "tuned/ppo_$1.yaml" 50 "$2"; }
  for task in half_cheetah swimmer bipedal_walker; do tuned $task "61 62 63 64 65 66 67 68 69 70"; done
  for task in hopper walker2d ant lunar_lander; do tuned $task "11 12 13 14 15"; done
  tuned humanoid "81 82 83 84 85 86 87 88 89 90"
  tuned inverted_double_pendulum "41 42 43 44 45"
  ;;
mujoco)
  for id in HalfCheetah-v5 Hopper-v5 Walker2d-v5; do run ppo_mujoco.yaml 20 "1 2 3" --data.env.id $id; done
  ;;
reference) # pip install stable-baselines3
  for id in HalfCheetah-v5 Hopper-v5 Walker2d-v5; do
    for seed in 1 2 3; do
      python scripts/reference_sb3.py --id $id --seed $seed --output outputs/reproduce/reference_sb3.jsonl
    done
  done
  ;;
off_policy) # with the interpreter of an environment of Stable-Baselines3 also its SAC: off_policy PYTHON
  sac() { # an evaluation every 10,000 env steps: sac NAME ID "SEEDS" SETTINGS...
    row off_policy $RETURN "${1%%,*}" 10 "$3" --name "$1" --data.env.id $2 --data.iterations_per_epoch 625 \
      --model.random_env_steps 5_000 --trainer.num_threads 1 --data.total_env_steps 100_000 "${@:4}"
  }
  for id in HalfCheetah-v5 Hopper-v5 Walker2d-v5; do
    sac sac.yaml $id "1 2 3"
    for seed in ${2:+1 2 3}; do
      "$2" scripts/reference_sb3.py --algorithm sac --id $id --seed $seed --total_env_steps 100_000 --curves $curves/off_policy.json
    done
  done
  for id in HalfCheetah-v5 Hopper-v5; do sac sac_best.yaml $id "1 2 3" --data.total_env_steps 500_000; done
  sac sac_best.yaml Walker2d-v5 "3 4 5"
  sac "sac_best.yaml, bf16" HalfCheetah-v5 "1 2 3" --trainer.precision bf16-mixed
  sac "sac_best.yaml, bf16" Humanoid-v5 "1 2 3" --trainer.precision bf16-mixed --data.total_env_steps 500_000
  run sac.yaml 10 "1 2 3 4 5" --data.total_env_steps 10_000
  run sac.yaml 10 "1 2 3 4 5" --data.total_env_steps 10_000 --data.collector AsyncCollector --model.compile true
  row off_policy $RETURN dqn_cart_pole.yaml 100 "11 12 13 14 15 16 17 18 19 20"
  row off_policy $RETURN dqn_lunar_lander.yaml 20 "1 2 3"
  run sac_cart_pole.yaml 20 "1 2 3"
  ;;
demonstrations)
  python scripts/record_demonstrations.py demonstrations/push_cube_sparse --task PushCube --sparse --episodes 20
  row demonstrations $SUCCESS rlpd_push_cube.yaml 50 "1 2 3" --env "PushCube, sparse reward"
  row demonstrations $SUCCESS sac_residual_push_cube.yaml 1000 "11 12 13" --env "PushCube, from a clone" \
    --warm_start push_cube_bc.yaml --warm_as model.policy.checkpoint
  ;;
offline)
  # A SAC that solves half of its episodes: after how many env steps it does differs between machines.
  half=(--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor eval/success_rate --trainer.callbacks.mode max)
  half+=(--trainer.callbacks.stopping_threshold 0.5 --trainer.callbacks.patience 1_000)
  half+=(--data.iterations_per_epoch 10 --data.num_eval_episodes 256)
  rl-cli fit --config sac_push_cube.yaml --seed_everything 1 "${half[@]}" --trainer.run_dir outputs/half
  record() { python scripts/record_demonstrations.py demonstrations/push_cube_mixed --task PushCube --episodes "$@"; }
  record 200
  record 800 --run outputs/half
  for config in iql awac; do run ${config}_push_cube.yaml 200 "11 12 13 14 15 16 17 18 19 20"; done
  run fql_push_cube.yaml 200 "11 12 13" --data.eval_deterministic false
  run iql_push_cube.yaml 200 "11 12 13" --model BehaviorCloning --model.n_epochs 1 --model.batch_size 256 --model.policy.class_path ActorOnly
  # RECAP: a value, labels, and a clone that is asked for good steps.
  network="--model.policy.hidden_sizes [256,256] --model.policy.normalize_observation true"
  # shellcheck disable=SC2086
  rl-cli fit --model ValueFit --model.policy ActorOnly $network --model.learning_rate 2.0e-3 --model.lr_schedule linear --model.batch_size 256 \
    --data.env ReturnFramesEnv --data.env.path demonstrations/push_cube_mixed --data.num_envs 256 --data.buffer_size 10 \
    --data.total_env_steps 512_000 --trainer.accelerator cpu --trainer.run_dir outputs/value
  rl-cli label demonstrations/push_cube_mixed --value outputs/value --n_steps 10
  run iql_push_cube.yaml 200 "11 12 13" --model BehaviorCloning --model.n_epochs 1 --model.batch_size 256 \
    --model.policy.class_path ConditionedPolicy --model.policy.guidance 1.5 --model.policy.policy ActorOnly \
    --model.policy.policy.hidden_sizes "[256, 256]" --model.policy.policy.normalize_observation true \
    --data.collector.condition advantage_positive
  # SAC from nothing and from IQL: the curve says after how many env steps an evaluation has a success of .95.
  sac=(--data.iterations_per_epoch 20 --data.total_env_steps 120_000)
  sac+=(--model.policy.hidden_sizes "[256, 256]" --model.policy.critic_normalization layer)
  run sac_push_cube.yaml 200 "11 12 13" "${sac[@]}"
  run sac_push_cube.yaml 200 "11 12 13" "${sac[@]}" --warm_start iql_push_cube.yaml --model.random_env_steps 0 --model.learning_starts 5_000
  ;;
fetch)
  row demonstrations $SUCCESS sac_fetch_reach.yaml 200 "1 2 3 4 5 6 7 8 9 10" --env FetchReach-v4
  row demonstrations $SUCCESS sac_fetch_push.yaml 200 "1 2 4" --env FetchPush-v4 # the settings were chosen on 3
  ;;
adroit)
  export PYTHONPATH=docs/examples
  rl-cli fit --config docs/examples/adroit_door.yaml --data.replay ReplayBuffer --data.total_env_steps 200_000 --seed_everything 1 \
    --model.random_env_steps 5_000 --model.learning_starts null --model.lr_schedule constant --trainer.run_dir outputs/adroit_expert
  rl-cli record --path demonstrations/adroit_door --ckpt_path outputs/adroit_expert --episodes 30 --trust_code true
  run docs/examples/adroit_door.yaml 100 "42 43 44" --metric $SUCCESS
  ;;
pick_cube)
  python scripts/hil_pick_cube.py record demonstrations/pick_cube
  for seed in 1 2 3 4; do python scripts/hil_pick_cube.py train demonstrations/pick_cube --seed $seed; done
  python scripts/hil_pick_cube.py record demonstrations/pick_cube_pixels --pictures
  python scripts/hil_pick_cube.py train demonstrations/pick_cube_pixels --pictures --seed 1
  ;;
aloha)
  python scripts/aloha.py demonstrations/transfer_cube --episodes 50
  export PYTHONPATH=scripts
  aloha=(--data.env GymnasiumEnv --data.env.id aloha:TransferCube-v0 --data.num_eval_episodes 50 --data.num_eval_envs 1)
  clone=(--data.collector.path demonstrations/transfer_cube --data.collector.episodes 10 --data.num_envs 10 --data.buffer_size 140)
  rl-cli fit --config push_cube_bc.yaml "${aloha[@]}" "${clone[@]}" --data.total_env_steps 70_000 --data.iterations_per_epoch 50 \
    --model.policy.hidden_sizes "[256, 256]" --model.lr_schedule linear --seed_everything 1 --trainer.run_dir outputs/transfer_cube
  mixed=(--data.replay MixedReplay --data.replay.demonstrations demonstrations/transfer_cube --data.replay.online ReplayBuffer --data.replay.online.capacity 200_000)
  mixed+=(--data.replay.offline ReplayBuffer --data.replay.offline.capacity 10_000 --data.buffer_size 16 --data.total_env_steps 60_000)
  run sac_residual_push_cube.yaml 100 "1 2 3" "${aloha[@]}" "${mixed[@]}" --model.policy.checkpoint outputs/transfer_cube \
    --model.policy.scale 0.2 --model.policy.log_std_bounds "[-5.0, -1.5]" --model.policy.hidden_sizes "[256, 256]" \
    --model.learning_rate 3.0e-4 --model.critic_learning_rate 1.0e-3 --model.gamma 0.99 --model.init_alpha 0.001 --model.learning_starts 5_000
  ;;
vla)
  row vla $SUCCESS vla_ppo.yaml 400 "11 12 13 14 15 16 17 18 19 20" --warm_start vla_bc.yaml --env PushBlocks
  run vla_grpo.yaml 400 "11 12 13" --warm_start vla_bc.yaml
  row vla $SUCCESS vla_flow_ppo.yaml 200 "1 2 3" --warm_start vla_flow_bc.yaml --env PushBlocks
  python scripts/probe_vla.py outputs/reproduce/vla_ppo_*_sweep_*/trial_000_seed1[123]_2* --episodes 400
  python scripts/two_doors.py --seeds 1 2 3
  ;;
recap)
  python scripts/recap.py doors outputs/doors --seeds 1 2 3 4 5 6 7 8 9 10
  python scripts/recap.py blocks outputs/blocks --seeds 1 2 3
  ;;
real_time)
  python scripts/real_time.py --seeds 1 2 3
  python scripts/real_time.py --seeds 1 2 3 --task catch --delays 4 --place outputs/catch
  ;;
robots)
  row robots $RETURN ppo_quadruped.yaml 20 "1 2 3"
  for seed in 1 2 3; do
    teacher=$(ls -d outputs/reproduce/ppo_quadruped_*_sweep_*/trial_*_seed${seed}_2* | tail -1)
    rl-cli fit --config quadruped_student_bc.yaml --seed_everything $seed --model.teacher "$teacher" \
      --trainer.run_dir outputs/student_$seed
    rl-cli fit --config quadruped_student_ppo.yaml --seed_everything $seed --trainer.init_from outputs/student_$seed \
      --trainer.run_dir outputs/robot_$seed
  done
  python scripts/quadruped_velocity.py outputs/reproduce/ppo_quadruped_*_sweep_*/trial_*_2* outputs/{student,robot}_?
  run ppo_reach.yaml 128 "11 12 13"
  run ppo_quadruped.yaml 100 "11 12 13 14 15"
  run ppo_quadruped_symmetric.yaml 100 "11 12 13 14 15"
  ;;
dog) # pip install -e '.[envpool,mujoco]'
  run docs/examples/dog_run.yaml 50 "1 2 3"
  ;;
memory)
  run ppo_lstm_cart_pole.yaml 20 "11 12 13 14 15"
  run ppo_lstm_cart_pole.yaml 20 "11 12 13 14 15" --model.policy.memory null --model.sequence_length null
  run ppo_gru_pendulum.yaml 20 "1 2 3 4 5"
  for config in sac_mountain_car ppo_mountain_car; do
    run $config.yaml 10 "1 2 3 4 5"
    run $config.yaml 10 "1 2 3" --data.total_env_steps 100_000 --model.policy.noise_correlation 0
  done
  export PYTHONPATH=docs/examples
  run docs/examples/door_maze.yaml 10 "11 12 13 14 15"
  run docs/examples/door_maze.yaml 10 "11 12 13 14 15" --model PPO
  pytest -m slow -s tests/numerics/test_recurrence.py tests/core/learning/test_privileged.py
  ;;
figures)
  for family in classic mujoco off_policy robots motions; do
    python scripts/figure.py $curves/$family.json --output docs/figures/$family.svg --metric $RETURN
  done
  python scripts/figure.py $curves/humanoid.json --output docs/figures/humanoid.svg --metric $RETURN --minutes
  for family in tasks gradients demonstrations vla; do
    python scripts/figure.py $curves/$family.json --output docs/figures/$family.svg --metric $SUCCESS
  done
  ;;
*)
  sed -n 2,7p "$0" >&2
  exit 2
  ;;
esac
