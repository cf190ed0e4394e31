"""Cases that only `pytest -m slow` runs, beside the quick tests that protect the same.

A quick run takes one case for each thing that a test protects. The keys are cases, the values name
the quick test or case that notices the same defects (`[...]`: another case of the same test).
"""

SLOW_CASES = {
    # --- graphs: each feature is compiled once ---
    "equivalence/test_compile_auto.py::test_a_resumed_run_goes_on_as_it_began": {
        "False": "[True]",
    },
    "equivalence/test_compile_auto.py::test_who_asks_for_another_way_when_resuming_gets_it_and_is_told": {
        "False": "[True]",
    },
    "equivalence/test_compiled_steps.py::test_every_task_and_policy_is_stepped_as_eagerly": {
        "CartPoleSwingUp": "[PushCube]",
        "PointMass": "[PushCube]",
    },
    "equivalence/test_off_policy.py::test_compiled_it_follows_the_eager_run": {
        "SAC that remembers": "[TD3 that remembers, in chunks]",
        "SAC on a torch task": "[SAC, all at once]",
        "goals in hindsight": "[SAC, all at once]",
        "goals in hindsight, by DQN": "[DQN of pictures]",
        "CrossQ": "test_renormalised_critics_are_compiled_and_resumed_alike[CrossQ]",
        "CrossQ that remembers": "[TD3 that remembers, in chunks]",
        "SAC, categorical and residual": "[TD3 that remembers, in chunks]",
        "a policy of one's own, told little": "core/equivalence/test_own_algorithms.py::test_compiled_it_does_what_it_does_uncompiled",
        "DQN that remembers what is allowed": "[DQN of pictures]",
        "discrete SAC, of what is allowed": "core/numerics/test_critics.py::test_twenty_updates_of_discrete_actions_are_those_of_the_reference[True-4-True]",
        "an arm with a gripper, and help": "numerics/test_encoders.py::test_an_arm_with_a_gripper_that_sees_resumes_and_is_compiled[False]",
    },
    "core/equivalence/test_own_algorithms.py::test_compiled_it_does_what_it_does_uncompiled": {
        "encoder": "numerics/test_encoders.py::test_compiled_it_follows_the_eager_run[PPO, two encoders]",
        "on": "equivalence/test_features.py::test_compiled_they_follow_the_eager_run",
    },
    "equivalence/test_compiled_steps.py::test_starts_of_many_numbers_are_made_of_the_rows_that_need_one": {
        "CartPoleSwingUp": "[PushCube]",
        "PointMass": "[PushCube]",
        "pictures": "[PushBlocks]",
    },
    "equivalence/test_allowed.py::test_compiled_it_follows_the_eager_run": {
        "noise, SAC": "[parts, noise]",
    },
    "core/numerics/test_sac.py::test_twenty_updates_of_sac_are_those_of_the_reference": {
        "clamped-dtype1-True": "[four critics, two of them-dtype1-True]",
        "plain-dtype1-True": "[four critics, two of them-dtype1-True]",
    },
    "numerics/test_gripper.py::test_twenty_updates_of_an_arm_with_a_gripper_are_those_of_the_reference": {
        "1-dtype1-True": "[2-dtype1-True]",
    },
    "core/numerics/test_critics.py::test_twenty_updates_of_discrete_actions_are_those_of_the_reference": {
        "False-2-True": "[True-4-True]",
    },
    "numerics/test_flows.py::test_compiled_it_follows_the_eager_run": {
        "noise, sac": "[ppo]",
        "noise of actions, with help": "[ppo]",
    },
    # --- resume, background: settings that another case has ---
    "numerics/test_apg.py::test_a_run_that_is_stopped_and_resumed_ends_as_uninterrupted": {
        "APG": "[SHAC]",
    },
    "equivalence/test_allowed.py::test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground": {
        "noise, SAC": "[parts, noise]",
    },
    "equivalence/test_terms.py::test_collected_elsewhere_without_lag_they_do_what_they_do_in_the_foreground": {
        "in the background": "[by a remote collector]",
    },
    "core/equivalence/test_load_policy.py::test_it_executes_what_validate_does_bit_for_bit": {
        "GRU": "[LSTM, noise]",
    },
    "core/numerics/test_replay.py::test_each_index_gives_what_single_transitions_give": {
        "more ends than there is room for-cpu": "[more ends than there is room for-disk]",
    },
    "numerics/test_taking_over.py::test_a_run_resumes_exactly_in_the_middle_of_an_intervention": {
        "in turn": "[in workers]",
    },
    "core/numerics/test_interventions.py::test_a_run_with_it_resumes_exactly": {
        "make0": "[make1]",
    },
    "numerics/test_flows.py::test_resume_is_exact": {
        "noise, sac": "[noise of actions, with help]",
    },
    "numerics/test_reward_classifier.py::test_stopped_and_resumed_it_ends_as_uninterrupted": {
        "eager": "[compiled]",
    },
    "numerics/test_encoders.py::test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground": {
        "PPO": "[PPO, a critic that knows more]",
    },
    "equivalence/test_ray.py::test_a_run_that_is_resumed_ends_as_uninterrupted": {
        "GRPO": "[PPO]",
    },
    "equivalence/test_off_policy.py::test_another_pace_of_a_resumed_run_counts_from_there": {
        "0.25": "[2.0]",
    },
    "equivalence/test_off_policy.py::test_a_run_that_is_stopped_and_resumed_ends_as_uninterrupted": {
        "SAC": "[SAC, all at once]",
        "SAC on a torch task": "[SAC, all at once]",
        "SAC in chunks": "[TD3 that remembers, in chunks]",
        "SAC, categorical and residual": "[TD3 that remembers, in chunks]",
        "TD3": "[TD3 that remembers, in chunks]",
        "CrossQ": "[CrossQ that remembers]",
        "DQN that remembers what is allowed": "[DQN of pictures]",
        "TD3, categorical, in chunks": "[TD3 that remembers, in chunks]",
        "goals in hindsight, by DQN": "[goals in hindsight]",
    },
    "numerics/test_iql.py::test_it_is_resumed_bit_for_bit_and_sac_goes_on_from_it": {
        "IQL": "[AWAC]",
    },
    "equivalence/test_off_policy.py::test_in_the_background_without_lag_it_is_what_it_is_in_the_foreground": {
        "SAC": "[SAC that remembers]",
        "CrossQ": "[SAC that remembers]",
        "discrete SAC, of what is allowed": "[DQN that remembers what is allowed]",
    },
    "core/equivalence/test_own_algorithms.py::test_it_trains_is_saved_and_resumes_bit_for_bit": {
        "off-true": "equivalence/test_off_policy.py::test_renormalised_critics_are_compiled_and_resumed_alike[CrossQ]",
        "on-true": "equivalence/test_compiled_steps.py::test_a_compiled_run_that_is_resumed_equals_the_uninterrupted_one_to_the_bit",
        "on-false": "equivalence/test_features.py::test_stopped_within_warm_up_or_after_it_they_resume_exactly",
    },
    "core/equivalence/test_resume.py::test_resume_is_exact_for": {
        "Acrobot": "[CartPole]",
        "MountainCar": "[CartPole]",
        "torch-native discrete": "[torch-native]",
    },
    "core/equivalence/test_resume.py::test_resume_is_exact_for_mujoco": {
        "HalfCheetah-v5": "[Hopper-v5]"
    },
    "equivalence/test_async.py::test_without_lag_background_is_foreground_bit_for_bit": {
        "PPO torch": "[GRPO torch]",
        "PPO Pendulum-v1": "[PPO CartPole-v1]",
        "GRPO CartPole-v1": "[GRPO torch]",
    },
    "equivalence/test_async.py::test_resume_without_lag_is_exact": {
        "PPO torch-1": "[PPO torch-0]",
        "GRPO CartPole-v1-1": "[PPO CartPole-v1-1]",
        "GRPO CartPole-v1-0": "[PPO CartPole-v1-0]",
    },
    "core/equivalence/test_resume.py::test_resume_is_exact_from_every_iteration": {
        "1": "[4]",
        "3": "[0]",
        "2": "[4]",
    },
    "equivalence/test_async.py::test_a_signal_while_the_learner_waits_is_honoured_at_once_and_loses_nothing": {
        "1": "[4]",
        "3": "[0]",
        "5": "[4]",
        "2": "[0]",
    },
    "equivalence/test_allowed.py::test_resume_is_exact_for": {
        "noise, SAC": "[parts, noise]",
        "noise": "[parts, noise]",
        "masks": "[masks, workers]",
        "masks of a torch env, GRPO": "[masks, workers]",
    },
    "equivalence/test_ray.py::test_one_collector_without_lag_is_the_foreground_bit_for_bit": {
        "PPO torch": "[PPO]",
        "PPO recurrent": "[chunks, partial info, warm-up, normalisers, policy and algorithm of one's own]",
    },
    "numerics/test_encoders.py::test_a_run_that_is_stopped_and_resumed_ends_as_uninterrupted": {
        "SAC": "[SAC, critics that know more]",
        "PPO": "[PPO, a critic that knows more]",
        "TD3, two encoders": "[PPO, two encoders]",
    },
    "numerics/test_gripper.py::test_penalties_reach_the_loss_of_each_update": {
        "0.5": "[2.0]",
        "1.0": "[2.0]",
    },
    "numerics/test_teacher.py::test_stopped_while_both_act_it_ends_as_uninterrupted": {
        "in the foreground": "[in the background]",
        "from a replay, in the background": "[from a replay, two memories]",
        "from a replay, two memories, compiled": "[from a replay, two memories]",
        "compiled": "numerics/test_flows.py::test_compiled_it_follows_the_eager_run[clone]",
    },
    "numerics/test_reward_classifier.py::test_a_policy_learns_by_it_and_resumes_exactly": {
        "SAC": "[PPO]",
    },
    "numerics/test_datasets.py::test_a_replay_written_out_and_back_gives_the_same_transitions_bit_for_bit": {
        "vector, padding": "[tree]",
    },
    "core/numerics/test_ppo.py::test_the_adaptive_rate_stands_still_while_the_actor_does": {
        "True": "[False]",
    },
    "numerics/test_flows.py::test_the_first_ratio_is_one_in_the_background_too": {
        "sde per chunk": "[sde]",
        "noise, grpo": "[noise]",
        "grpo": "[sde]",
    },
    "numerics/test_vla.py::test_the_first_ratio_is_one_and_the_policy_moves": {
        "GRPO-token-action": "[PPO-token-action]",
        "GRPO-token-chunk": "[PPO-token-chunk]",
        "GRPO-gaussian-token": "[PPO-gaussian-token]",
        "GRPO-gaussian-action": "[PPO-gaussian-action]",
    },
    "numerics/test_vla_loading.py::test_every_family_takes_steps_from_a_first_ratio_of_one": {
        "GRPO-llava": "[PPO-llava]",
        "GRPO-paligemma": "[PPO-paligemma]",
        "GRPO-smolvlm": "[PPO-smolvlm]",
    },
    # --- export ---
    "equivalence/test_export.py::test_without_torch_it_does_what_validate_does": {
        "InvertedPendulum-v5-settings1": "[CartPole-v1-settings0]",
    },
    "equivalence/test_export.py::test_each_policy_acts_as_in_torch": {
        "SAC, residual, noise, GRU": "[LSTM, noise, chunks]",
        "points in pictures": "[pictures, choices and numbers]",
        "discrete SAC": "[normalised choices, masked; a privileged critic]",
        "a Q network": "[normalised choices, masked; a privileged critic]",
        "in a wrapper": "[a correction of another]",
    },
    # --- kills and schedules at random: as many as find the defects of scripts/mutations.py ---
    "core/faults/test_async_faults.py::test_a_signal_during_a_rollout_that_takes_long_is_honoured_soon": {
        "15-async": "[2-async]",
        "2-sync": "[15-sync]",
    },
    "core/faults/test_hangs.py::test_a_learner_that_waits_for_another_thread_gets_the_error": {
        "reset-async": "test_processes_that_hang_are_killed_and_the_run_ends[reset]",
        "reset-vector_entry_point": "test_an_env_in_the_learners_thread_ends_the_process[vector_entry_point-reset]",
        "reset-task": "[reset-sync]",
    },
    "numerics/test_robots.py::test_a_learner_that_is_killed_or_stopped_leaves_a_safe_arm": {
        "9-relax": "[19-relax]",
        "19-hold": "[9-hold]",
    },
    "numerics/test_recap.py::test_rounds_that_are_killed_in_every_phase_end_as_uninterrupted": {
        ".": "[collection|round_1/value]",
    },
    "numerics/test_labels.py::test_a_kill_leaves_the_old_dataset_or_the_new_one": {
        "rmdir-5": "[replace-5]",
        "unlink-7": "[replace-5]",
        "fsync-17": "[replace-5]",
    },
    "faults/test_recording.py::test_killed_at_any_moment_all_finished_episodes_open_and_recording_goes_on": {
        "copyfile-3-3": "test_a_rewrite_counts_once_it_is_whole",
        "fsync-19-4": "[unlink-17-3]",
    },
    "core/faults/test_replay_files.py::test_killed_at_any_moment_of_a_save_it_goes_on_bit_for_bit": {
        "fsync": "[replace]",
    },
    "faults/test_remote_collectors.py::test_a_thousand_schedules_never_exceed_the_bound_and_account_for_every_rollout": {
        "overwrite": "[block]",
    },
    "numerics/test_mixed_replay.py::test_over_random_schedules_the_counts_add_up_and_both_hold_the_same": {
        "space0": "[space1]",
    },
    "reports/test_env_returns.py::test_a_spawned_worker_does_what_one_in_line_does": {
        "": "test_every_kind_of_return_is_taken_or_refused_alike_in_line_and_in_workers",
    },
    # --- learning: one learner for each kind of answer; the formulas have references ---
    "core/learning/test_action_bounds.py::test_the_unit_box_is_learnt_so": {
        "": "test_any_bounds_are_learnt_as_well_as_minus_one_and_one[plain]",
    },
    "core/learning/test_probes.py::test_the_actor_learns_three_bits": {
        "": "test_the_actor_learns_an_action_of_two_parts_that_is_paid_for_both",
    },
    "learning/test_off_policy.py::test_each_env_step_is_followed_by_as_many_updates": {
        "2.5-250": "[1.0-100]",
    },
    "core/learning/test_probes.py::test_with_a_mask_a_corridor_is_learnt_five_times_sooner": {
        "2": "[1]",
        "3": "[1]",
    },
    "core/learning/test_spaces.py::test_it_trains_and_resumes": {
        "double-discrete": "reports/test_env_returns.py::test_an_observed_space_is_checked_evaluated_resumed_and_loaded[box float64]",
        "matrix-discrete": "[tree-discrete]",
        "bits-discrete": "reports/test_env_returns.py::test_an_observed_space_is_checked_evaluated_resumed_and_loaded[binary]",
    },
    "learning/test_off_policy.py::test_the_actor_learns_a_continuous_action": {
        "CrossQ": "[SAC]",
        "TD3": "core/numerics/test_sac.py::test_twenty_updates_of_td3_are_those_of_the_reference",
    },
    "learning/test_off_policy.py::test_q_under_a_time_limit_is_that_of_the_endless_task": {
        "ReplayBuffer": "core/numerics/test_replay.py::test_each_index_gives_what_single_transitions_give",
    },
    "learning/test_off_policy.py::test_it_learns_which_of_the_allowed_actions_leads_on": {
        "DiscreteSAC": "core/numerics/test_critics.py::test_twenty_updates_of_discrete_actions_are_those_of_the_reference",
        "DQN": "core/numerics/test_dqn.py::test_twenty_updates_are_those_of_the_reference",
    },
    "core/learning/test_probes.py::test_the_value_under_a_time_limit_is_that_of_the_endless_task": {
        "LimitIsFailure-2.7": "[PPO-10.0]",
    },
    "learning/test_tasks.py::test_grpo_balances_cart_pole_within_a_fifth_of_its_budget": {
        "": "core/learning/test_action_bounds.py::test_grpo_learns_them",
    },
    "core/learning/test_probes.py::test_the_critic_learns_the_value_of_an_observation": {
        "3": "[1]"
    },
    "core/learning/test_probes.py::test_the_actor_learns_a_continuous_action": {
        "True": "core/learning/test_action_bounds.py::test_any_bounds_are_learnt_as_well_as_minus_one_and_one",
    },
    "core/learning/test_probes.py::test_the_actor_learns_from_pictures_which_action_is_asked_for": {
        "encoder1": "[encoder0]",
    },
    "core/learning/test_probes.py::test_sac_learns_from_pictures_which_action_is_asked_for": {
        "False": "test_the_actor_learns_from_pictures_which_action_is_asked_for[encoder0]",
        "True": "test_the_actor_learns_from_pictures_which_action_is_asked_for[encoder0]",
    },
    "numerics/test_recurrence.py::test_a_cue_is_recalled_twenty_steps_later_by_those_who_remember": {
        "None": "[GRU]",
    },
    "core/learning/test_action_bounds.py::test_any_bounds_are_learnt_as_well_as_minus_one_and_one": {
        "bf16": "numerics/test_precision.py::test_it_learns",
        "torch": "[plain]",
        "async": "[plain]",
    },
    # --- the command line: what differs is a class or a file, and not a mechanism ---
    "cli/test_check.py::test_of_a_shipped_config_it_warns_of_nothing_and_leaves_nothing": {
        "grpo.yaml-ways2": "[ppo.yaml-ways0]",
    },
    "core/learning/test_spaces.py::test_wrappers_and_env_kwargs_come_from_yaml": {
        "async": "[sync]",
    },
    "cli/test_bench_peers.py::test_our_runner_trains_in_envs_of_the_framework": {
        "W4-pendulum": "[W4-8]",
    },
    "core/cli/test_wrappers.py::test_a_wrapper_with_arguments_trains_and_resumes": {
        "ClipReward": "[FrameStackObservation]",
        "DiscretizeAction": "[RescaleAction of each entry]",
        "TimeLimit": "[FrameStackObservation]",
        "RescaleAction": "[RescaleAction of each entry]",
        "RescaleObservation": "[RescaleAction of each entry]",
    },
    "cli/test_commands.py::test_every_shipped_config_of_gradients_through_steps_trains": {
        "apg_swing_up.yaml": "[apg_point_mass.yaml]",
        "shac_point_mass.yaml": "[shac_swing_up.yaml]",
    },
    "cli/test_commands.py::test_the_shipped_config_of_a_dataset_alone_trains": {
        "iql_push_cube.yaml": "[awac_push_cube.yaml]",
    },
    "cli/test_commands.py::test_every_shipped_config_trains_two_iterations_with_a_first_ratio_of_one": {
        "ppo_swing_up.yaml": "[ppo_point_mass.yaml]",
        "tuned/ppo_ant.yaml": "[tuned/ppo_hopper.yaml]",
        "tuned/ppo_humanoid.yaml": "[tuned/ppo_hopper.yaml]",
        "tuned/ppo_half_cheetah.yaml": "[ppo_mujoco.yaml]",
        "tuned/ppo_walker2d.yaml": "[tuned/ppo_hopper.yaml]",
        "tuned/ppo_swimmer.yaml": "[tuned/ppo_hopper.yaml]",
        "tuned/ppo_inverted_double_pendulum.yaml": "[tuned/ppo_hopper.yaml]",
    },
    "cli/test_commands.py::test_a_signalled_process_saves_exits_and_resumes_exactly": {
        "2": "core/faults/test_async_faults.py::test_what_a_terminal_sends_to_all_saves_and_leaves_no_process",
    },
    "cli/test_gpu_check.py::test_it_runs_small_on_a_cpu": {
        "": "test_compiled_steps_are_compared_with_eager_ones_over_ends_and_new_starts",
    },
    "cli/test_pages.py::test_the_algorithm_that_is_shown_solves_cartpole": {
        "": "test_a_page_can_be_followed[docs/extending.md]",
    },
    "cli/test_sweep.py::test_a_trial_of_two_processes_is_one_trial": {
        "": "test_a_trial_has_the_threads_that_it_was_given",
    },
    "cli/test_sweep.py::test_a_search_behind_a_tuned_config_can_be_run_as_it_says": {
        "ppo_ant": "[ppo_hopper]",
        "ppo_humanoid": "[ppo_hopper]",
        "ppo_half_cheetah": "[ppo_hopper]",
        "ppo_swimmer": "[ppo_hopper]",
        "ppo_walker2d": "[ppo_hopper]",
    },
}


def is_slow(nodeid):
    """Whether a test, `tests/room/file.py::name[case]`, runs with the slow ones only."""
    name, _, case = nodeid.removeprefix("tests/").partition("[")
    return case.removesuffix("]") in SLOW_CASES.get(name, {})
