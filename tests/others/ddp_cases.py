"""How torch's cases of DistributedDataParallel end on the adapter: the PASSING ones, and the ENDS of the others."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

TORCH = "2.13"
"""The release of torch whose cases these are."""


class Reason(enum.Enum):
    """Why a case does not pass."""

    SKIPS_ITSELF = "torch's suite skips it, or wants four devices"
    PRETENDED_DEVICE = (
        "the pretended CUDA lacks what the case needs, also with torch's own class; it has to pass on GPUs"
    )
    INSIDES = "it reads the insides of DDP: its reducer, buckets, collectives, log, or own warnings"
    IGNORED_PARAMETERS = "it hides parameters from DDP: parallel_model has no such list, a part of a model has a block"
    HOOKS = "it gives DDP a hook that reads buckets or buffers: parallel_model has `comm_hook=` and `buffers=` instead"
    JOIN = "its ranks have unequal numbers of batches: shard_loader makes them equal, by `tail=`"
    MIXED_PRECISION = "it casts parameters by `mixed_precision=`: parallel_model has `amp=`, with values of its own"
    STEP_IN_BACKWARD = "it steps inside backward, which parallel_model refuses: the gradients are not averaged yet"
    UNUSED_PARAMETERS = "it expects an error of unused parameters: under parallel_model they are no error"
    STATIC_GRAPH = "it expects an error of a graph that changes: parallel_model needs no `static_graph=`"


@dataclass(frozen=True)
class End:
    """How a case ends that does not pass.

    Args:
        reason: why.
        message: what is in the traceback, or in the reason for the skip.
    """

    reason: Reason
    message: str


PASSING = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_broadcast_buffer",
    "test_ddp_create_graph",
    "test_ddp_device",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_allreduce_process_group",
    "test_ddp_inference",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_zero_output_features",
    "test_grads_same_across_ranks_with_no_sync",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_stateless_api_with_ddp",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
    "test_verify_model_across_rank_with_logger",
    "test_verify_model_across_rank_without_logger",
)
"""The cases that pass. On gloo and the CPU, or on gloo and the pretended CUDA."""

SAMPLE = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_create_graph",
    "test_grads_same_across_ranks_with_no_sync",
)
"""Passing cases that need no device."""

_LOG = "no attribute '_get_ddp_logging_data'"
_IGNORED = "no attribute '_set_params_and_buffers_to_ignore_for_model'"
_BUFFER_HOOK = "no attribute '_register_buffer_comm_hook'"
_READS_BUCKETS = "parallel_model has no hooks that read buckets"

ENDS: Mapping[str, End] = {
    "test_DistributedDataParallel": End(Reason.SKIPS_ITSELF, "issues/77317"),
    "test_DistributedDataParallel_non_default_stream": End(Reason.SKIPS_ITSELF, "issues/76428"),
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": End(Reason.SKIPS_ITSELF, "issues/85012"),
    "test_ddp_has_finalized": End(Reason.SKIPS_ITSELF, "issues/102751"),
    "test_ddp_hook_pickling_powerSGD": End(Reason.SKIPS_ITSELF, "Skipped due to flakiness"),
    "test_ddp_model_diff_shape_across_ranks": End(Reason.SKIPS_ITSELF, "issues/162676"),
    "test_ddp_profiling_autograd_profiler": End(Reason.SKIPS_ITSELF, "issues/77342"),
    "test_ddp_profiling_execution_trace": End(Reason.SKIPS_ITSELF, "issues/137765"),
    "test_ddp_sync_bn_training_vs_eval": End(Reason.SKIPS_ITSELF, "pull/113620"),
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": End(
        Reason.SKIPS_ITSELF, "Need at least 4 CUDA devices"
    ),
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": End(
        Reason.SKIPS_ITSELF, "Need at least 4 CUDA devices"
    ),
    "test_DistributedDataParallel_with_amp_and_grad_is_view": End(
        Reason.PRETENDED_DEVICE, "softmax with half to float conversion is not supported on CPU"
    ),
    "test_ddp_compile_static_graph": End(Reason.PRETENDED_DEVICE, "Cannot find a working triton installation"),
    "test_ddp_profiling_torch_profiler": End(Reason.INSIDES, "Expected 6 but got 0"),
    "test_ddp_bucket_cap_mb_list": End(Reason.INSIDES, "no bucket_cap_mb_list="),
    "test_ddp_broadcast_buffers_deprecation_warning": End(Reason.INSIDES, "0 not greater than 0"),
    "test_ddp_build_debug_param_to_name_mapping": End(Reason.INSIDES, "no attribute '_build_params_for_reducer'"),
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": End(
        Reason.INSIDES, "no attribute '_build_params_for_reducer'"
    ),
    "test_ddp_comm_hook_logging": End(Reason.INSIDES, _LOG),
    "test_ddp_control_flow_different_across_ranks": End(Reason.INSIDES, "no attribute 'reducer'"),
    "test_ddp_control_flow_same_across_ranks": End(Reason.INSIDES, "no attribute 'reducer'"),
    "test_ddp_logging_data_cpu": End(Reason.INSIDES, "no attribute '_set_ddp_runtime_logging_sample_rate'"),
    "test_ddp_logging_data_gpu": End(Reason.INSIDES, "no attribute '_set_ddp_runtime_logging_sample_rate'"),
    "test_ddp_python_error_logged": End(Reason.INSIDES, _LOG),
    "test_ddp_sink_noclone": End(Reason.INSIDES, "no attribute '_set_ddp_sink_clone'"),
    "test_ddp_sync_module_states": End(Reason.INSIDES, "no attribute 'broadcast_bucket_size'"),
    "test_detect_ddp_is_actually_static": End(Reason.INSIDES, "no attribute 'reducer'"),
    "test_different_graph_across_ranks": End(Reason.INSIDES, _LOG),
    "test_skip_all_reduce_unused_parameters": End(Reason.INSIDES, _LOG),
    "test_sync_bn_logged": End(Reason.INSIDES, _LOG),
    "test_ddp_apply_optim_in_backward_ignored_params": End(Reason.IGNORED_PARAMETERS, _IGNORED),
    "test_ddp_ignore_params_arg": End(Reason.IGNORED_PARAMETERS, _IGNORED),
    "test_ddp_multiple_nested_unused_params_err_ignore_params": End(Reason.IGNORED_PARAMETERS, _IGNORED),
    "test_ddp_native_mixed_precision_ignored_params": End(Reason.IGNORED_PARAMETERS, _IGNORED),
    "test_get_data_parallel_params": End(Reason.IGNORED_PARAMETERS, _IGNORED),
    "test_accumulate_gradients_no_sync_allreduce_hook": End(Reason.HOOKS, _READS_BUCKETS),
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": End(Reason.HOOKS, _READS_BUCKETS),
    "test_ddp_broadcast_buffer_via_hook": End(Reason.HOOKS, _BUFFER_HOOK),
    "test_ddp_buffer_hook_allreduce": End(Reason.HOOKS, _BUFFER_HOOK),
    "test_ddp_buffer_hook_allreduce_return_future": End(Reason.HOOKS, _BUFFER_HOOK),
    "test_ddp_hook_parity_post_localSGD": End(Reason.HOOKS, _READS_BUCKETS),
    "test_ddp_hook_parity_powerSGD": End(Reason.HOOKS, _READS_BUCKETS),
    "test_ddp_grad_div_uneven_inputs": End(Reason.JOIN, "parallel_model has no join"),
    "test_ddp_join_model_equivalence": End(Reason.JOIN, "parallel_model has no join"),
    "test_ddp_join_respects_forward_sync_buffers_false": End(Reason.JOIN, "parallel_model has no join"),
    "test_ddp_uneven_input_exception": End(Reason.JOIN, "parallel_model has no join"),
    "test_ddp_uneven_inputs": End(Reason.JOIN, "parallel_model has no join"),
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": End(Reason.JOIN, "parallel_model has no join"),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": End(
        Reason.MIXED_PRECISION, "no mixed_precision="
    ),
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": End(
        Reason.MIXED_PRECISION, "no mixed_precision="
    ),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": End(
        Reason.MIXED_PRECISION, "no mixed_precision="
    ),
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": End(
        Reason.MIXED_PRECISION, "no mixed_precision="
    ),
    "test_ddp_apply_optim_in_backward": End(Reason.STEP_IN_BACKWARD, "SGD.step() inside backward"),
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": End(
        Reason.STEP_IN_BACKWARD, "SGD.step() inside backward"
    ),
    "test_ddp_multiple_nested_unused_params_error": End(Reason.UNUSED_PARAMETERS, "Expected error was not raised!"),
    "test_ddp_unused_params_rebuild_buckets_exception": End(
        Reason.UNUSED_PARAMETERS, "DDP unused parameters error not raised."
    ),
    "test_invalid_static_graph": End(Reason.STATIC_GRAPH, "RuntimeError not raised"),
    "test_static_graph_api_cpu": End(Reason.STATIC_GRAPH, "RuntimeError not raised"),
}
"""Name of a case that does not pass -> how it ends, on gloo and the pretended CUDA."""
