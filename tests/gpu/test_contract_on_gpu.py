"""The contract of all backends, for ONNX Runtime on CUDA. What the provider adds is in test_onnxruntime_gpu.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract import test_backend as contract
from tests.contract.backend_cases import ONNXRUNTIME, Case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture
def case() -> Case:
    return replace(ONNXRUNTIME, device="cuda:0")


test_datatypes = contract.test_a_datatype_comes_back_as_it_went_in_or_is_refused
test_arrays = contract.test_arrays_that_are_read_only_or_not_in_order_are_taken
test_outputs = contract.test_outputs_share_no_memory_with_inputs_or_with_the_next_run
test_batches = contract.test_batches_of_changing_size_run
test_wrong_inputs = contract.test_wrong_inputs_are_a_failure_of_the_model_and_the_next_run_works
test_missing = contract.test_a_missing_input_is_named_so
test_deleted = contract.test_a_file_that_was_deleted_meanwhile_is_a_failure_of_the_model
test_no_model = contract.test_a_file_that_is_no_model_is_refused
test_target = contract.test_what_a_backend_compiles_for_a_device_does_not_change
test_not_lost = contract.test_a_loaded_instance_is_not_lost
test_closed = contract.test_a_closed_instance_refuses_to_run_and_closing_twice_is_harmless
test_rebuilt = contract.test_a_rebuilt_instance_runs
test_options = contract.test_an_option_that_a_backend_does_not_know_is_refused
test_ended_load = contract.test_a_load_ends_if_its_end_was_requested


# These are parametrized with the backends of the ordinary environment.
def test_a_run_is_terminated_from_another_thread_and_the_next_one_works(case: Case, tmp_path: Path) -> None:
    contract.test_a_run_is_terminated_from_another_thread_and_the_next_one_works(case, tmp_path)


def test_a_device_that_it_cannot_use_is_refused(case: Case, tmp_path: Path) -> None:
    contract.test_a_device_that_it_cannot_use_is_refused(case, tmp_path)


def test_loading_and_closing_gives_memory_back(case: Case, tmp_path: Path) -> None:
    contract.test_loading_and_closing_gives_memory_back(case, tmp_path)
