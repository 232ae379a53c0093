"""Every fault that users of this kind of tool report in public, and the test that shows that ours has it not.

Numbers are of issue trackers: hydra, LHT (lightning-hydra-template), lightning, submitit, tensorboard, pandas, pytorch.
"""

import ast
import functools
from pathlib import Path

import pytest

TESTED_BY = {
    "hydra 3328, 1407; LHT 535: a sweep run again starts from job 0": (
        "test_pool::test_a_signal_to_all_leaves_interrupted_runs_and_no_process_and_the_next_command_goes_on",
        "test_faults::test_nothing_is_lost_and_nothing_done_twice",
    ),
    "hydra 3078: sys.exit, Ctrl-C or a kill in one job ends the sweep": (
        "test_faults::test_every_kind_of_fault_inside_a_run_is_mended_by_the_same_command",
    ),
    "hydra 2284: errors appear at the end, and only the first": (
        "test_faults::test_runs_that_fail_every_time_each_say_why_at_once_and_the_others_are_done",
    ),
    "hydra basic sweeper: a failed batch stops later ones": (
        "test_faults::test_runs_that_fail_every_time_each_say_why_at_once_and_the_others_are_done",
        "test_pool::test_a_pool_that_is_to_fail_fast_starts_nothing_after_a_failure",
    ),
    "hydra 2631, 2187: jobs in one process share memory, caches, seeds": (
        "test_pool::test_each_run_has_a_process_of_its_own",
        "test_model::test_weights_do_not_depend_on_the_global_generator",
    ),
    "hydra 1344, 1832, 1314: characters of overrides break folder names": (
        "test_plan::test_lists_as_values_and_forty_overrides_make_a_name",
        "test_plan::test_a_path_as_a_swept_value_makes_a_safe_name",
    ),
    "LHT 511: two launches in one second overwrite each other": (
        "test_cli::test_two_launches_at_once_run_each_cell_once",
        "test_faults::test_nothing_is_lost_and_nothing_done_twice",
    ),
    "hydra 1942: glob(*) over a group ignores the search path": (
        "test_bad_input::test_a_wrong_request_is_refused_in_one_line",
    ),
    "lightning 11300, 18175: a DDP child runs the command line again": (
        "test_scale::test_two_ranks_train_as_one_process_does",
    ),
    "hydra 1928; submitit 1641: a failed Slurm job shows COMPLETED": (
        "test_slurm::test_a_killed_run_is_submitted_again_and_a_failing_one_shows_failed",
    ),
    "hydra submitit launcher: one dead job loses all results": (
        "test_slurm::test_a_killed_run_is_submitted_again_and_a_failing_one_shows_failed",
    ),
    "submitit 1720: without accounting a dead job is waited for for ever": (
        "test_slurm::test_a_killed_run_is_submitted_again_and_a_failing_one_shows_failed",
    ),
    "submitit 1709; lightning 14610, 21406, 20542: preemption twice or never; a save inside the handler": (
        "test_slurm::test_a_warned_job_saves_is_requeued_and_ends_with_the_same_bits",
        "test_slurm::test_a_preempted_job_saves_and_comes_back",
        "test_resume::test_a_signal_saves_at_the_steps_end_and_the_run_goes_on_from_there",
    ),
    "hydra 3058: the SSH session drops": ("test_slurm::test_jobs_outlive_the_command_that_submitted_them",),
    "submitit 1624: an array above the limit is refused": (
        "test_slurm::test_more_runs_than_an_array_holds_give_the_bits_and_the_table_of_one_machine",
    ),
    "hydra 2757, 3002, 1331: parallel jobs all take GPU 0": ("test_pool::test_each_gpu_slot_has_gpus_of_its_own",),
    "hydra 2893: connecting to a running Ray breaks on a default": ("test_ray::test_a_running_cluster_takes_the_runs",),
    "lightning 20550: total steps from the loader lose its state on resume": (
        "test_resume::test_a_run_in_parts_ends_bit_for_bit_as_one_in_one_piece",
    ),
    "lightning 19764, 17543: a resumed run replays another order": (
        "test_resume::test_a_run_in_parts_ends_bit_for_bit_as_one_in_one_piece",
    ),
    "lightning 19970, 688, 21800: torn checkpoints, silent failures to save": (
        "test_resume::test_a_spoilt_checkpoint_is_passed_over",
        "test_faults::test_a_disk_that_takes_nothing_more_loses_nothing",
    ),
    "stable-pretraining 388; pytorch_tabular 621: config objects in checkpoints": (
        "test_resume::test_a_checkpoint_holds_plain_containers_and_tensors",
    ),
    "lightning 1462, 11471: per-parameter norms flood the log": ("test_training::test_gradient_norms_by_group",),
    "lightning 1476, 17972: the scheduler counts epochs": ("test_training::test_learning_rate_of_every_step",),
    "lightning 1008, 2636: NaN freezes or crashes a sweep": (
        "test_training::test_a_learning_rate_beyond_reason_ends_as_non_finite",
        "test_table::test_divergence_is_counted_never_averaged",
    ),
    "lightning 10248, 18669: norms before or after clipping": ("test_training::test_clip_coefficient",),
    "lightning 12205: validation intervals count batches": ("test_training::test_which_steps_are_logged",),
    "torchtitan 1720: the same config, another loss": ("test_training::test_the_same_run_twice_gives_the_same_bits",),
    "tensorboard 5488, 6796, 4047: readers keep a sample": ("test_records::test_every_one_of_10050_steps_comes_back",),
    "tensorboard 1272; lightning 12991, 5403; tbparse: resume overlaps steps": (
        "test_resume::test_tensorboard_shows_each_step_once",
        "test_records::test_of_a_step_logged_twice_the_last_line_counts",
    ),
    "tensorboard-reducer 10: aggregation dies on unequal steps": (
        "test_figures::test_losses_that_are_not_finite_are_left_out_and_huge_ones_leave_the_axis",
    ),
    "pandas 3729, 61113: groupby and pivot drop null keys": ("test_table::test_every_column_value_keeps_its_runs",),
    "pandas 3: dtypes": ("test_table::test_load_metrics_keeps_every_value_and_null_becomes_nan",),
    "pytorch 88718: the number of threads changes bits": (
        "test_pool::test_the_threads_a_run_was_given_are_recorded",
        "test_resume::test_a_signal_saves_at_the_steps_end_and_the_run_goes_on_from_there",
    ),
    "lightning 21691: malicious releases": ("test_install::test_malicious_releases_are_not_installed",),
    "lightning 1629, 4143: metrics on alternating, half-empty rows": (
        "test_table::test_load_metrics_keeps_every_value_and_null_becomes_nan",
    ),
}
# lightning 4151, 9694 (gradient norms with fp16's loss scale in them) needs a GPU: there is no fp16-mixed on CPUs.


@functools.cache
def functions(module: str) -> set[str]:
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", TESTED_BY)
def test_a_public_fault_has_its_test(fault: str) -> None:
    for place in TESTED_BY[fault]:
        module, _, name = place.partition("::")
        assert name in functions(module), place
