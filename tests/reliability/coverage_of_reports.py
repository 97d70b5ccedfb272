"""Which test shows the right result of which public report, and what cannot be shown here?

The identifiers are letter and number of the collected reports. Each stands for a kind of
fault; the reports themselves are named beside the tests.
"""

from __future__ import annotations

A_B = "tests/reliability/test_scenarios_a_b.py"
C = "tests/reliability/test_scenarios_c.py"
D_E = "tests/reliability/test_scenarios_d_e.py"
F_L = "tests/reliability/test_scenarios_f_to_l.py"
GUARD = "tests/reliability/test_guard.py"
HOOKS = "tests/reliability/test_hooks.py"
THREADS = "tests/reliability/test_threads.py"
FORK = "tests/reliability/test_fork.py"
EXIT = "tests/reliability/test_exit.py"
SOAK = "tests/reliability/test_soak.py"
PLAN = "tests/reliability/test_plan_and_prepare.py"
MACHINE = "tests/reliability/test_state_machine.py::test_no_program_loses_a_byte"
TAGS = "tests/behaviour/test_tags.py"
CONTENTS = "tests/behaviour/test_tags_contents.py"
SCOPES = "tests/behaviour/test_scopes.py"
POOLS = "tests/behaviour/test_scope_pools.py"
FAILURES = "tests/behaviour/test_failures.py"
SHORTAGE_OF_DEVICE = "tests/behaviour/test_shortage_device.py"
SHORTAGE_OF_HOST = "tests/behaviour/test_shortage_host.py"
BUSY = "tests/behaviour/test_busy.py"
FREE = "tests/behaviour/test_free.py"
GPU = "tests/gpu/groups"

ENTRIES: dict[str, str] = {
    "A": "1 2 3 4 5 7 8 9 10 11 12 13 15",
    "B": "1 2 4 5 6",
    "C": "1 2 3 4 5 6 7 8 9 10 11 12 14 15 17 18",
    "D": "1 2 3 4 5 6 7 8 10 13",
    "E": "1 2 3 4 6",
    "F": "1 2 3 5 6 9 10 11 12 13 15 16",
    "G": "1 2 3 5 6 7",
    "H": "1 2 3",
    "I": "1 2 3 4 5 6",
    "J": "1 2 3 4 6",
    "K": "1 2 3 4",
    "L": "1 2 3",
}

# Reports whose right result runs on the emulator.
COVERED: dict[str, tuple[str, ...]] = {
    "A1": (
        f"{TAGS}::test_repeats_change_nothing",
        f"{A_B}::test_the_pool_works_on_after_repeated_calls",
    ),
    "A2": (f"{A_B}::test_three_sleeps_in_a_row_and_work_outside_harm_nothing",),
    "A3": (f"{A_B}::test_incomplete_tags_leave_an_exact_state",),
    "A4": (
        f"{TAGS}::test_an_awake_tag_beside_a_sleeping_one_is_passed_over",
        "tests/behaviour/test_bad_input.py::test_one_unknown_tag_among_known_ones_changes_nothing",
    ),
    "A5": (f"{A_B}::test_new_weights_may_be_written_between_two_tagged_wakes",),
    "A7": (f"{TAGS}::test_a_backup_is_held_until_its_own_tag_is_awake",),
    "A8": (
        f"{A_B}::test_hundreds_of_segments_that_die_asleep_leave_nothing",
        f"{FREE}::test_a_tensor_that_dies_asleep_leaves_the_others_whole",
    ),
    "A9": (
        f"{SHORTAGE_OF_DEVICE}::test_a_wake_without_room_leaves_everything_asleep_and_can_be_repeated",
    ),
    "A10": (
        f"{A_B}::test_out_of_memory_at_a_wake_names_what_is_missing_and_where",
        f"{A_B}::test_a_process_lives_on_after_out_of_memory_at_a_wake",
    ),
    "A11": (f"{FAILURES}::test_a_sleep_that_is_refused_half_way_continues",),
    "A12": (f"{FAILURES}::test_an_attribute_the_driver_does_not_know_is_a_feature_that_is_absent",),
    "A13": (f"{FAILURES}::test_an_allocation_that_fails_leaves_nothing", MACHINE),
    "A15": (f"{GUARD}::test_a_call_of_a_sleeping_module_is_an_error_that_names_tag_and_parameter",),
    "B1": (
        f"{A_B}::test_dropped_results_of_a_tight_loop_are_not_unmapped_under_their_kernels",
        f"{FREE}::test_a_free_waits_for_work_that_still_writes",
    ),
    "B2": (
        f"{BUSY}::test_pending_work_on_any_stream_is_in_the_backup",
        f"{A_B}::test_contents_are_valid_on_any_stream_when_a_wake_returns",
    ),
    "B4": (f"{A_B}::test_a_sleep_waits_once_for_the_device_and_not_for_each_segment",),
    "B5": (f"{A_B}::test_every_byte_is_there_for_others_as_soon_as_a_sleep_returns",),
    "C1": (
        f"{CONTENTS}::test_a_module_reloads_after_level_2_around_what_it_keeps",
        f"{C}::test_kept_tables_scales_and_adapters_survive_a_full_discard",
    ),
    "C2": (
        f"{C}::test_a_reload_after_a_full_discard_restores_all_but_what_is_listed",
        f"{CONTENTS}::test_a_wake_says_in_words_what_is_undefined",
    ),
    "C3": (f"{C}::test_what_a_reload_does_not_bring_is_listed_before_it_is_lost",),
    "C4": (f"{C}::test_a_scale_of_four_bytes_comes_back_exactly",),
    "C5": (
        f"{C}::test_discarded_memory_is_filled_as_asked_every_time",
        f"{CONTENTS}::test_poison_is_not_a_number_in_floating_point",
    ),
    "C6": (f"{TAGS}::test_a_cached_block_of_one_tag_is_never_given_to_another",),
    "C7": (f"{C}::test_small_tensors_of_two_policies_never_share_a_segment",),
    "C8": (f"{C}::test_a_small_tensor_made_in_a_scope_that_is_discarded_can_be_seen_there",),
    "C9": (f"{C}::test_what_a_reload_does_not_bring_is_listed_before_it_is_lost",),
    "C10": (f"{C}::test_kept_tables_scales_and_adapters_survive_a_full_discard",),
    "C11": (f"{C}::test_what_a_reload_does_not_bring_is_listed_before_it_is_lost",),
    "C12": (f"{SOAK}::test_memory_that_others_dirtied_never_shows", MACHINE),
    "C14": (f"{CONTENTS}::test_kept_contents_survive_every_sleep",),
    "C15": (
        f"{HOOKS}::test_hooks_are_called_once_a_call_in_the_order_of_their_registration",
        f"{HOOKS}::test_contents_are_valid_for_every_tag_when_the_after_hooks_run",
    ),
    "C17": (
        "tests/test_loading.py::test_everything_that_does_not_fit_is_said_at_once_and_nothing_is_written",
    ),
    "C18": (f"{C}::test_level_1_needs_no_list_at_all",),
    "D2": (f"{D_E}::test_every_way_of_entering_a_scope_captures",),
    "D3": (f"{POOLS}::test_the_whole_segment_of_a_pool_entered_inside_a_capture_is_live",),
    "D4": (f"{D_E}::test_memory_of_others_is_told_apart_from_ours",),
    "D5": (
        f"{D_E}::test_cycles_lose_no_granule_and_no_handle",
        f"{SOAK}::test_cycles_of_random_sizes_end_where_they_began",
    ),
    "D6": (
        f"{D_E}::test_host_memory_goes_with_the_tensors_that_die_asleep",
        f"{PLAN}::test_preparing_again_takes_nothing_while_the_backups_are_kept",
        f"{SHORTAGE_OF_HOST}::test_host_memory_goes_back_at_wake_when_it_is_not_retained",
    ),
    "D7": (f"{D_E}::test_host_memory_is_not_rounded_up_to_a_power_of_two",),
    "D8": (f"{D_E}::test_host_memory_of_one_tag_is_back_before_another_tag_wakes",),
    "D10": (f"{D_E}::test_counters_of_torch_are_left_alone_and_ours_say_where_memory_is",),
    "D13": (f"{D_E}::test_memory_of_others_is_told_apart_from_ours",),
    "E1": (f"{D_E}::test_memory_of_a_dead_tensor_serves_a_larger_one_after_the_scope",),
    "E2": (f"{D_E}::test_replaced_weights_leave_no_second_copy_behind",),
    "E3": (f"{D_E}::test_replaced_weights_leave_no_second_copy_behind",),
    "E4": (f"{D_E}::test_dead_blocks_cost_no_host_memory",),
    "E6": (
        f"{D_E}::test_exactly_the_rounded_size_is_reserved",
        f"{SOAK}::test_rounds_of_allocation_and_death_leave_no_addresses",
    ),
    "F1": (f"{F_L}::test_hundreds_of_cycles_leave_the_counts_of_python_alone",),
    "F2": (
        "tests/behaviour/test_process.py::test_a_process_ends_well_in_every_state",
        f"{EXIT}::test_a_process_ends_well_and_silently",
    ),
    "F3": (
        f"{F_L}::test_memory_returns_to_the_driver_when_tensors_and_their_pool_go",
        f"{SOAK}::test_hundreds_of_pools_made_and_dropped_leave_nothing",
    ),
    "F5": ("tests/behaviour/test_devices.py::test_a_pool_is_of_one_device",),
    "F6": (
        f"{F_L}::test_a_scope_belongs_to_its_thread",
        f"{THREADS}::test_two_threads_enter_a_tag_at_once_again_and_again",
        f"{SCOPES}::test_a_scope_left_on_another_thread_is_an_error_and_is_closed",
    ),
    "F9": (f"{F_L}::test_a_pool_works_on_after_torchs_out_of_memory",),
    "F11": (
        f"{THREADS}::test_allocation_and_death_on_four_threads_beside_sleep_wake_and_collection",
        f"{THREADS}::test_another_thread_ticks_during_a_long_call",
    ),
    "F13": (
        f"{THREADS}::test_allocation_and_death_on_four_threads_beside_sleep_wake_and_collection",
    ),
    "F15": (
        f"{A_B}::test_a_free_goes_by_what_was_recorded_and_not_by_what_the_caller_says",
        "tests/behaviour/test_devices.py::test_memory_of_a_device_belongs_to_the_innermost_scope_of_that_device",
    ),
    "F16": (
        f"{FORK}::test_a_call_in_a_forked_child_says_what_to_do",
        f"{FORK}::test_a_forked_child_frees_nothing_of_its_parents",
        f"{FORK}::test_a_spawned_child_uses_memory_of_its_own",
    ),
    "G3": (f"{F_L}::test_a_device_that_is_full_says_nothing_about_its_features",),
    "G5": (f"{F_L}::test_a_kind_of_handle_that_is_offered_and_refused_is_done_without",),
    "G6": (f"{F_L}::test_an_allocation_registers_nothing_and_waits_for_nothing",),
    "H3": (f"{POOLS}::test_the_whole_segment_of_a_pool_entered_inside_a_capture_is_live",),
    "I1": (f"{A_B}::test_every_byte_is_there_for_others_as_soon_as_a_sleep_returns",),
    "I2": (f"{F_L}::test_every_cycle_works_with_memory_that_cannot_be_pinned",),
    "I3": (f"{F_L}::test_no_sleep_and_no_wake_asks_nvml",),
    "I4": ("tests/test_cli.py::test_info_says_why_a_sleep_cannot_work",),
    "J1": (f"{F_L}::test_a_second_sleep_of_what_has_not_changed_copies_nothing",),
    "J2": (f"{F_L}::test_a_report_says_where_the_time_went",),
    "K1": (f"{F_L}::test_nothing_listens_unless_it_is_asked_for",),
    "K2": (
        "tests/test_security.py::test_the_cache_of_kernels_is_private_from_its_first_instant",
        "tests/test_report_command.py::test_only_this_user_can_reach_the_socket",
    ),
    "K3": ("tests/test_security.py::test_no_module_reads_pickles_or_runs_text",),
    "K4": (
        "tests/behaviour/test_disk.py::test_the_file_has_no_name_and_is_its_owners_alone",
        "tests/behaviour/test_disk.py::test_a_folder_taken_away_is_refused_first",
    ),
    "L1": (
        "tests/test_layout.py::test_nothing_links_to_the_driver",
        "tests/test_layout.py::test_the_built_files_need_no_driver",
    ),
    "L2": (f"{F_L}::test_a_sleep_says_what_it_did_of_what_was_asked",),
    "L3": (f"{F_L}::test_a_pool_that_is_kept_is_an_allocator_without_sleep",),
}

# Reports that a real GPU shows, by checks of tests/gpu; some of them are above as well.
ON_A_GPU: dict[str, tuple[str, ...]] = {
    "B1": (
        f"{GPU}/streams.py::short_lived_tensors_of_a_tight_loop",
        f"{GPU}/streams.py::memory_is_freed_only_after_the_kernel_that_uses_it",
    ),
    "B2": (
        f"{GPU}/streams.py::pending_work_of_a_foreign_stream_is_in_the_backup",
        f"{GPU}/streams.py::contents_are_valid_on_every_stream_after_wake",
    ),
    "B4": (f"{GPU}/other_process.py::memory_is_back_for_others",),
    "B5": (f"{GPU}/other_process.py::another_process_uses_the_memory_in_every_round",),
    "C12": (f"{GPU}/other_process.py::random_sets_survive_a_dirty_neighbour",),
    "D1": (
        f"{GPU}/expandable.py::set_by_the_newer_name",
        f"{GPU}/expandable.py::set_by_the_older_name",
        f"{GPU}/expandable.py::set_at_run_time",
        f"{GPU}/expandable.py::restored_after_an_exception",
    ),
    "D3": (f"{GPU}/graphs.py::private_memory_of_a_graph_sleeps",),
    "D5": (f"{GPU}/soak.py::many_cycles_of_one_set",),
    "E6": (
        f"{GPU}/oracle.py::reservations_are_torch_segments",
        f"{GPU}/soak.py::rounds_of_allocation_and_death_leave_no_addresses",
    ),
    "F3": (f"{GPU}/pools.py::trim_gives_memory_back_to_others",),
    "F5": (f"{GPU}/two_gpus.py::a_scope_captures_on_its_device_only",),
    "F9": (f"{GPU}/oom.py::too_large_an_allocation_is_torchs_error",),
    "F10": (
        f"{GPU}/compiled.py::compiled_to_graphs",
        f"{GPU}/compiled.py::compiled_by_default",
    ),
    "G3": (f"{GPU}/oracle.py::rdma_capability_is_that_of_the_device",),
    "H1": (
        f"{GPU}/graphs.py::graph_replays_after_wake",
        f"{GPU}/graphs.py::graph_sees_new_input_and_new_weights_after_wake",
    ),
    "H3": (f"{GPU}/graphs.py::two_graphs_share_a_sleeping_pool",),
    "I1": (f"{GPU}/other_process.py::memory_is_back_for_others",),
}

# Reports that no test of ours can express, and why.
NOT_EXPRESSED: dict[str, str] = {
    "B6": "needs two ranks with NCCL on two GPUs",
    "F12": "needs an interpreter without a GIL",
    "G1": "needs the CUDA runtime's IPC calls and a second process on a GPU",
    "G2": "needs torch.multiprocessing with tensors of a GPU",
    "G7": "needs NCCL inside a captured graph on two GPUs",
    "H2": "is about the cost of capturing a graph again; nothing is captured again here",
    "I5": "needs a device whose memory is the host's (GB10, GH200)",
    "I6": "is about another vendor's devices",
    "J3": "is about the optimizer's master copies, not about memory",
    "J4": "is a ratio of speeds: the benchmarks measure it",
    "J6": "is a question: addresses are each process's own",
}
