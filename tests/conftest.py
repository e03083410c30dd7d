"""Fixed seeds, samples of the long tables, and the device path of every kernel run on the CPU."""

import gc
import os
import sys
from collections import defaultdict
from pathlib import Path
from zlib import crc32

if sys.platform == "linux":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine need not be able to resolve its own name

import pytest
import torch
from hypothesis import HealthCheck, settings

from gradguard import native
from gradguard.tensors import layout

settings.register_profile(  # however slow the machine is
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("repeatable")

SAMPLED = {
    "clip/test_thresholds.py": 3,
    "distributed/test_adaptive_on_shards.py": 6,
    "distributed/test_collectives.py": 3,
    "distributed/test_disagreement.py": 2,
    "distributed/test_faults.py": 3,
    "distributed/test_fsdp2_buffers.py": 3,
    "distributed/test_guard_on_shards.py": 3,
    "distributed/test_lists_that_change.py": 2,
    "distributed/test_norm_on_shards.py": 3,
    "distributed/test_other_arguments.py": 2,
    "distributed/test_random_layouts.py": 3,
    "distributed/test_rule_table.py": 8,
    "distributed/test_rules_on_shards.py": 6,
    "distributed/test_edges_of_stages.py": 2,
    "backward_clip/test_compiled.py": 12,
    "backward_clip/test_compiled_code.py": 12,
    "backward_clip/test_compiled_statistics.py": 4,
    "backward_clip/test_distributed_training.py": 4,
    "backward_clip/test_pruning.py": 3,
    "gradient_check/test_gradcheck.py": 2,
    "gradient_check/test_gradcheck_options.py": 3,
    "gradient_check/test_low_precision.py": 4,
    "gradient_check/test_operators.py": 3,
    "gradient_check/test_sets.py": 6,
    "gradient_check/test_missed_and_false_alarms.py": 3,
    "integrations/test_deepspeed_engine.py": 8,
    "integrations/test_keras_optimizer.py": 2,
    "integrations/test_lightning_per_sample.py": 2,
    "integrations/test_lightning_private.py": 2,
    "integrations/test_own_clips_of_engines.py": 4,
    "integrations/test_per_sample_processes.py": 2,
    "integrations/test_transformers_per_sample.py": 2,
    "integrations/test_transformers_private.py": 2,
    "integrations/test_transformers_trainer.py": 2,
    "per_sample/test_attention_recurrent_rules.py": 4,
    "per_sample/test_bounds.py": 3,
    "per_sample/test_compiled_modules.py": 3,
    "per_sample/test_exact_or_refused.py": 2,
    "per_sample/test_layer_rules.py": 4,
    "per_sample/test_loss_terms.py": 2,
    "per_sample/test_oracle.py": 9,
    "private/test_accounting.py": 4,
    "private/test_private_training.py": 2,
    "test_cli.py::test_observing_leaves_the_weights_bit_identical": 6,
    "test_cli.py::test_sigterm_ends_a_script_as_ctrl_c_does_unless_it_has_a_handler": 2,
    "monitoring/test_findings_page.py::test_the_sick_run_has_the_finding_and_the_healthy_one_has_none": 3,
    "monitoring/test_observer_processes.py": 6,
    "monitoring/test_observer_recording.py": 4,
    "monitoring/test_observer_sharded.py": 3,
    "monitoring/test_replay.py": 2,
    "monitoring/test_report.py": 2,
    "monitoring/test_report_browser.py": 12,
}
"""``make test`` runs one row in so many of the tables there, the same ones every time; ``make exhaustive`` runs all."""


LONG = {
    "distributed/test_adaptive_on_shards.py::test_every_unit_on_every_layout",
    "backward_clip/test_distributed_training.py::test_threads_do_not_disturb_one_another",
    "backward_clip/test_distributed_training.py::test_two_processes_train_as_one_does",
    "gradient_check/test_operators.py::test_no_operator_is_flagged_without_a_reason",
    "gradient_check/test_operators.py::test_planted_errors_are_caught",
    "gradient_check/test_missed_and_false_alarms.py::test_found[one of a thousand kinks]",
    "integrations/test_ray.py::test_the_example_clips_and_skips_alike_and_goes_on_from_its_checkpoint",
    "per_sample/test_per_sample_distributed.py::test_two_processes_measure_the_noise_scale_that_one_measures",
    "private/test_private_digits.py::test_it_learns_within_its_budget_and_prints_both",
    "private/test_private_distributed.py::test_two_processes_give_what_one_gives",
    "private/test_private_training.py::test_an_audit_finds_the_promised_noise_and_catches_sabotage",
    "test_exploding_rnn.py::test_over_800_steps_only_the_error_clip_survives",
    "test_noisy_labels.py::test_per_sample_clipping_does_not_learn_wrong_labels_by_heart",
    "monitoring/test_observer_processes.py::test_accelerate_s_own_clip_is_learnt",
    "monitoring/test_observer_processes.py::test_executors_that_a_script_leaves_open_do_not_keep_it",
    "monitoring/test_observer_processes.py::test_fsdp1_gives_the_norm_that_its_own_clip_tells",
    "monitoring/test_observer_processes.py::test_a_signal_leaves_an_end_in_a_record_that_the_variable_asked_for",
    "monitoring/test_observer_processes.py::test_spawned_children_write_files_of_their_own",
    "monitoring/test_observer_processes.py::test_threads_that_train_at_once_have_each_their_own_clips",
    "monitoring/test_observer_processes.py::test_workers_of_a_data_loader_and_a_compiled_model",
    "monitoring/test_observer_sharded.py::test_torchrun_with_and_without_gradguard_run",
    "monitoring/test_report_browser.py::test_a_focused_chart_zooms_by_key_and_the_others_follow",
    "monitoring/test_report_browser.py::test_a_page_prints_in_light_without_its_controls",
    "monitoring/test_report_browser.py::test_the_heat_map_toggles_by_click",
    "monitoring/test_report_browser.py::test_the_heat_map_toggles_by_key",
    "monitoring/test_report_browser.py::test_the_page_follows_the_system_and_the_switch",
    "monitoring/test_report_browser.py::test_what_was_not_recorded_cannot_be_chosen",
    "monitoring/test_report_browser.py::test_zero_and_non_finite_cells_are_marked",
    "monitoring/test_sinks.py::test_wandb_by_name",
    "backward_clip/test_compiled_statistics.py::test_compiled_counts_are_those_of_eager_code[lstm-inductor]",
    "backward_clip/test_compiled_statistics.py::test_compiled_for_several_sizes",
    "monitoring/test_observer_processes.py::test_a_second_run_at_the_same_path_keeps_the_first",
    "monitoring/test_observer_processes.py::test_the_wheel_holds_all_that_the_package_imports",
    "monitoring/test_report_browser.py::test_names_are_told_apart_on_a_telephone",
    "monitoring/test_report_browser.py::test_a_link_to_a_part_goes_there",
    "monitoring/test_report_browser.py::test_the_sizes_of_elements_are_drawn_step_by_step",
    "test_gpu.py::test_error_clip_in_compiled_code",
    "test_docs.py::test_the_script_that_is_tuned_ends_as_the_page_says",
}
"""Tests of half a minute and more, or beside one that sees nearly the same: in ``make exhaustive`` alone."""


def pytest_collection_modifyitems(items):
    assert all((Path(__file__).parent / key.partition("::")[0]).exists() for key in [*SAMPLED, *LONG])
    tables = defaultdict(list)
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        if LONG & {f"{file}::{item.name}", f"{file}::{getattr(item, 'originalname', item.name)}"}:
            item.add_marker(pytest.mark.exhaustive)
        if hasattr(item, "callspec"):
            tables[file, f"{file}::{item.originalname}"].append(item)
    for keys, rows in tables.items():
        one_in = max(SAMPLED.get(key, 1) for key in keys)
        kept = [row for row in rows if crc32(row.name.encode()) % one_in == 0] or rows[:1]
        for row in rows:
            if row not in kept:
                row.add_marker(pytest.mark.exhaustive)


def put_aside():
    """Hide what is alive from the collector, and from whoever asks it for what is alive: millions of objects."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    put_aside()


@pytest.fixture(scope="module", autouse=True)
def _what_other_files_have_imported():
    put_aside()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_program(monkeypatch):
    """Scripts that a test runs leave their module, which processes that are spawned later would run once more."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)


@pytest.fixture(autouse=True)
def _same_terminal(monkeypatch):
    """80 columns without colours, whatever the tests are started from."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["native", "host", "device"])
def path(request, monkeypatch) -> str:
    """Run a test thrice: by the compiled kernels, by torch's on the CPU, and as on an accelerator, without a look."""
    if request.param == "native":
        if not native.status().in_use:
            pytest.skip(str(native.status()))
        return "host"
    monkeypatch.setattr(native, "library", lambda: None)
    if request.param == "device":
        blind = lambda *tensors: False  # noqa: E731
        for name in ("norms", "scaling", "units", "nonfinite"):
            monkeypatch.setattr(f"gradguard.tensors.{name}.are_readable", blind)
        monkeypatch.setattr("gradguard.arguments.are_readable", blind)
    assert layout.are_readable(torch.zeros(1))
    return request.param


@pytest.fixture
def without_kernels(monkeypatch) -> None:
    """Run a test without the compiled kernels."""
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture(params=["native", "torch"])
def kernels(request) -> str:
    """Run a test twice: with the compiled kernels, where there are some, and without."""
    if request.param == "torch":
        request.getfixturevalue("without_kernels")
    return request.param


@pytest.fixture
def others_unseen():
    """Let a watch see none of what other tests have left alive: compiled code, for one, keeps its globals for ever."""
    put_aside()
