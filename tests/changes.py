"""Every change that the package makes of torch and of Python, with its reason, its end and its test.

`python tests/readme.py` writes them into .github/CONTRIBUTING.md; the rule `changes_of_others` in architecture.py
finds those that are not here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OF_PYTHON", "OF_TORCH", "Change", "table"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of something that other code of the process uses, too.

    Args:
        what: is changed, as CONTRIBUTING shows it.
        where: the file, in the folder of the package.
        names: what `change_finder.changes_in` finds there; (): what it cannot see, such as entries of a `__dict__`.
        why: what would happen without it.
        lasts: when it ends.
        test: one that fails without it, as path::name; else "none: " and why there is none.
    """

    what: str
    where: str
    names: tuple[str, ...]
    why: str
    lasts: str
    test: str


OF_TORCH = (
    Change(
        what="`torch.autograd.backward`",
        where="torch_patches/backward.py",
        names=("torch.autograd.backward",),
        why="gradients are neither averaged nor scaled",
        lasts="a block",
        test="tests/unit/precision/test_loss_scaling.py::test_nested_blocks_use_one_scale",
    ),
    Change(
        what="hooks before the steps of all optimizers",
        where="torch_patches/step.py",
        names=("torch.optim.optimizer.register_optimizer_step_pre_hook",),
        why="steps are neither checked nor skipped",
        lasts="a run, or a block",
        test="tests/worlds/test_unsynced_training.py::test_unsynced_training_is_warned_of_once",
    ),
    Change(
        what="hooks after the steps of all optimizers",
        where="torch_patches/step.py",
        names=("torch.optim.optimizer.register_optimizer_step_post_hook",),
        why="`compare` records nothing",
        lasts="a run, or a block",
        test="tests/worlds/test_compare.py::test_each_step_of_several_optimizers_is_compared",
    ),
    Change(
        what="hooks on new submodules and parameters",
        where="torch_patches/forward.py",
        names=(
            "torch.nn.modules.module.register_module_module_registration_hook",
            "torch.nn.modules.module.register_module_parameter_registration_hook",
        ),
        why="the gradient of a parameter that is added in a block is not averaged",
        lasts="a block",
        test="tests/worlds/test_averaging.py::test_every_program_equals_one_process",
    ),
    Change(
        what="`forward`, other routed methods and `__getstate__` of the user's model, in its `__dict__`",
        where="torch_patches/forward.py",
        names=(),
        why="`model(x)` runs without its engine",
        lasts="a block",
        test="tests/worlds/test_model_in_place.py::test_forwards_of_the_user_stay",
    ),
    Change(
        what="`DistributedDataParallel._active_ddp_module`",
        where="torch_patches/forward.py",
        names=("torch.nn.parallel.DistributedDataParallel._active_ddp_module",),
        why="a compiled model sends all of its gradients at the end of backward",
        lasts="a forward",
        test="tests/worlds/test_torch_compile.py::test_graphs_are_split_at_buckets",
    ),
    Change(
        what="`torch._VF._pack_padded_sequence`",
        where="torch_patches/forward.py",
        names=("torch._VF._pack_padded_sequence",),
        why="lengths that a block has moved to a GPU are refused",
        lasts="a block on GPUs",
        test="tests/gpu/test_features.py::test_lengths_of_packed_sequences",
    ),
    Change(
        what="rules of `torch._dynamo`: this package is not compiled",
        where="torch_patches/compile.py",
        names=("torch._dynamo.trace_rules",),
        why="graphs of a compiled model have this package's code in them",
        lasts="the process",
        test="tests/worlds/test_torch_compile.py::test_a_compiled_model_is_one_graph",
    ),
    Change(
        what="`DataLoader.__iter__`, and `__next__` of its iterators",
        where="torch_patches/loaders.py",
        names=("torch.utils.data.DataLoader.__iter__", "torch.utils.data.dataloader._BaseDataLoaderIter.__next__"),
        why="a loader without `shard_loader` is not noticed",
        lasts="a block",
        test="tests/worlds/test_forgotten_loader.py::test_loops_of_training_are_told_once_at_their_line",
    ),
    Change(
        what="what `get_worker_info()` returns",
        where="torch_patches/loaders.py",
        names=("torch.utils.data._utils.worker._worker_info",),
        why="a dataset that shards itself reads the same on each rank",
        lasts="a batch; in a loader's worker, the process",
        test="tests/unit/data/test_streams.py::test_samples_of_iterable_datasets",
    ),
    Change(
        what="how torch pickles objects that it sends",
        where="torch_patches/objects.py",
        names=(
            "torch.distributed.distributed_c10d._object_to_tensor",
            "torch.distributed.distributed_c10d._tensor_to_object",
        ),
        why="a stranger on the network runs code on the ranks",
        lasts="a run",
        test="tests/worlds/test_gather.py::test_ranks_hear_each_other_and_nobody_else",
    ),
    Change(
        what="a function mode",
        where="torch_patches/operations.py",
        names=("class _BeforeOperations(TorchFunctionMode)",),
        why="balanced: an operation between two stages has operands on two devices",
        lasts="a micro-batch",
        test="tests/gpu/test_device_transfer.py::test_tensors_that_an_operation_changes",
    ),
    Change(
        what="a dispatch mode",
        where="torch_patches/operations.py",
        names=("class _BeforeWrites(TorchDispatchMode)",),
        why="balanced: what planning writes through `.data` stays",
        lasts="the first batch",
        test="tests/balanced/test_programs.py::test_parameters_that_forward_changes",
    ),
    Change(
        what="`init_process_group` and `destroy_process_group`, wherever they were imported",
        where="torch_patches/process_groups.py",
        names=(),
        why="a script for torchrun is refused in a run",
        lasts="a run",
        test="tests/worlds/test_ddp_scripts.py::test_a_function_initializes_the_group_itself",
    ),
    Change(
        what="default timeouts of new groups",
        where="torch_patches/process_groups.py",
        names=("torch.distributed.distributed_c10d.<name>",),
        why="the user's groups wait for torch's minutes, and not for those of `timeout=`",
        lasts="a run",
        test="tests/worlds/test_hangs.py::test_groups_of_the_user_have_the_timeout_of_the_run",
    ),
    Change(
        what="`torch.save`",
        where="torch_patches/save.py",
        names=("torch.save",),
        why="ranks that save one path leave a file of which each has written a part",
        lasts="a run",
        test="tests/unit/checkpoint/test_torch_save_in_a_run.py::test_ranks_that_meet_in_a_file",
    ),
    Change(
        what="`clip_grad_norm_`, `clip_grad_value_` of `torch.nn.utils`",
        where="torch_patches/clipping.py",
        names=("module.<name>",),
        why="Apex: gradients are clipped that its optimizers do not read",
        lasts="a block of Apex",
        test="tests/worlds/test_apex.py::test_a_block_trains_what_the_hand_written_loop_trains",
    ),
    Change(
        what="`Tensor.register_hook`, `retain_grad`, `register_post_accumulate_grad_hook`",
        where="torch_patches/scaled_gradients.py",
        names=("torch.Tensor.<name>",),
        why="fp16: a hook gets a scaled gradient, without a word",
        lasts="a block of fp16",
        test="tests/unit/precision/test_loss_scaling.py::test_what_cannot_be_scaled_is_refused",
    ),
    Change(
        what="`GradScaler.scale`",
        where="torch_patches/scaled_gradients.py",
        names=("torch.amp.GradScaler.scale",),
        why="fp16: a loop with a GradScaler is scaled twice",
        lasts="a block of fp16",
        test="tests/unit/precision/test_loss_scaling.py::test_any_schedule_equals_grad_scaler",
    ),
    Change(
        what="deterministic kernels, `cudnn.benchmark`, number of threads",
        where="torch_patches/arithmetic.py",
        names=(
            "torch.use_deterministic_algorithms",
            "torch.utils.deterministic.fill_uninitialized_memory",
            "torch.backends.cudnn.benchmark",
            "torch.set_num_threads",
        ),
        why="`logical=`: bits depend on the number of processes",
        lasts="a block of `logical=`",
        test="tests/worlds/test_logical.py::test_a_block_computes_by_deterministic_kernels",
    ),
    Change(
        what="TF32, and sums in half precision",
        where="torch_patches/arithmetic.py",
        names=(
            "torch.set_float32_matmul_precision",
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
            "torch.backends.cudnn.allow_tf32",
        ),
        why="`compare` finds differences that are rounding",
        lasts="the process, which only compares",
        test="tests/worlds/test_compare.py::test_runs_compute_in_full_fp32",
    ),
    Change(
        what="classes that optimizers and clipping take in lists",
        where="torch_patches/foreach.py",
        names=(),
        why="fsdp: each parameter is stepped and clipped by itself",
        lasts="the process",
        test="none: only its speed changes",
    ),
    Change(
        what="methods of fully_shard's records of parameters and units",
        where="backends/fsdp/stand_in.py",
        names=(),
        why="fsdp: the user's Parameter is not the one that the module has; the records are the engine's own",
        lasts="a block",
        test="tests/worlds/test_fsdp.py::test_a_check_holds_on_all_ranks",
    ),
    Change(
        what="hooks and marks of fully_shard on the user's modules",
        where="backends/fsdp/stand_in.py",
        names=("module.__class__", "torch.distributed._composable_state._module_state_mapping"),
        why="fsdp: a second block of the model is refused",
        lasts="a block",
        test="tests/worlds/test_fsdp.py::test_a_check_holds_on_all_ranks",
    ),
    Change(
        what="classes of sharded tensors",
        where="backends/fsdp/calls.py",
        names=("standing.__class__", "tensor.__class__"),
        why="fsdp: a gradient is this rank's rows, and not what the user's code sees; they are the engine's own",
        lasts="a block",
        test="tests/worlds/test_fsdp.py::test_a_check_holds_on_all_ranks",
    ),
    Change(
        what="classes of sharded parameters",
        where="backends/fsdp/full_tensors.py",
        names=("parameter.__class__",),
        why="fsdp: a parameter is this rank's rows, and not what the user's code sees",
        lasts="a block",
        test="tests/worlds/test_fsdp.py::test_a_check_holds_on_all_ranks",
    ),
    Change(
        what="classes of sharded tensors, at the end of a block",
        where="backends/fsdp/restore.py",
        names=("tensor.__class__",),
        why="fsdp: parameters stay this rank's rows",
        lasts="the tensor",
        test="tests/worlds/test_fsdp.py::test_a_check_holds_on_all_ranks",
    ),
    Change(
        what="classes of sharded tensors, in a step",
        where="backends/fsdp/optimizers.py",
        names=("parameter.__class__", "value.__class__"),
        why="fsdp: each step gathers full tensors",
        lasts="a step",
        test="tests/worlds/test_fsdp.py::test_a_check_holds_on_all_ranks",
    ),
    Change(
        what="`torch.compiler` runs eagerly",
        where="torch_patches/compile.py",
        names=("torch.compiler.set_stance",),
        why="auto and balanced: the model would not be compiled after what is measured of it",
        lasts="the first batch",
        test="tests/worlds/test_auto.py::test_compiled_programs_train",
    ),
    Change(
        what="parameters in the `__dict__` of a module; a module's `_parameters`",
        where="precision/weight_casting.py",
        names=(),
        why="O2: products are computed in fp32; entries of the user's own modules",
        lasts="a forward; a backward pass",
        test="tests/unit/precision/test_weight_casting.py::test_o2_casts_again_when_a_checkpoint_recomputes",
    ),
    Change(
        what="running statistics of batch norm",
        where="backends/balanced/batchnorm.py",
        names=(),
        why="balanced: each micro-batch counts as a batch; buffers of the user's own modules",
        lasts="a call of the module",
        test="tests/balanced/test_semantics.py::test_batch_norm_tracks_the_full_batch",
    ),
    Change(
        what="settings of torch, such as its default dtype; warning filters",
        where="call/settings.py",
        names=(
            "attrgetter(owner)(torch).<name>",
            "torch.set_default_device",
            "warnings.filterwarnings",
            "warnings.resetwarnings",
        ),
        why="a line of the script, such as `torch.set_default_dtype`, does not hold in workers",
        lasts="the worker",
        test="tests/unit/call/test_settings.py::test_a_line_of_the_script_holds_in_another_process",
    ),
)
"""In `torch_patches/`, except those of an object that is the subject of its room."""

OF_PYTHON = (
    Change(
        what="`multiprocessing.reduction.dump`",
        where="call/main_module.py",
        names=("multiprocessing.reduction.ForkingPickler.reducer_override", "multiprocessing.reduction.dump"),
        why="a loader's spawned worker does not find classes of the user's `__main__`",
        lasts="the worker",
        test="tests/worlds/test_launch_anywhere.py::test_children_of_a_rank_that_are_not_forked",
    ),
    Change(
        what="`logging.FileHandler._open`",
        where="call/logs.py",
        names=("logging.FileHandler._open",),
        why="imports in a worker truncate the caller's log files",
        lasts="the import of modules",
        test="tests/worlds/test_launch_logging.py::test_records_reach_the_callers_handlers",
    ),
    Change(
        what="`sys.excepthook`, which torch has set",
        where="run/process_group.py",
        names=("sys.excepthook",),
        why='each line of an error has "[rank0]: " before it, in a run of one process',
        lasts="the process",
        test="none: only the look of an error changes",
    ),
    Change(
        what="`pdb.Pdb`",
        where="worker/keyboard.py",
        names=("pdb.Pdb",),
        why="`breakpoint()` in a rank reads from nowhere",
        lasts="the worker",
        test="tests/worlds/test_debugger.py::test_quit_ends_the_call",
    ),
    Change(
        what="`sys.stdin`, `sys.stdout`, `sys.stderr`",
        where="worker/keyboard.py",
        names=("sys.stdin", "sys.stdout", "sys.stderr"),
        why="`interact` reads from nowhere, and its errors are in the log of the rank",
        lasts="a command of pdb",
        test="tests/worlds/test_debugger.py::test_the_prompt_has_the_names_of_the_script",
    ),
    Change(
        what="`sys.unraisablehook`",
        where="worker/shutdown.py",
        names=("sys.unraisablehook",),
        why="a stop signal in a finalizer is ignored",
        lasts="the worker",
        test="tests/worlds/test_launch_stopping.py::test_finally_blocks_run_on_ranks_that_wait_in_compiled_code",
    ),
    Change(
        what="handlers of SIGTERM and SIGINT in a worker, and its wakeup descriptor",
        where="worker/shutdown.py",
        names=("signal.signal", "signal.set_wakeup_fd", "os.register_at_fork"),
        why="`finally` blocks do not run in a rank that waits in C++",
        lasts="the worker",
        test="tests/worlds/test_launch_stopping.py::test_finally_blocks_run_on_ranks_that_wait_in_compiled_code",
    ),
    Change(
        what="handler of SIGINT in the first rank of a node, when the function has returned",
        where="worker/share_outcome.py",
        names=("signal.signal",),
        why="Ctrl-C ends a rank that brings the value to its node",
        lasts="the worker",
        test="tests/worlds/test_nodes.py::test_ctrl_c_on_a_node_interrupts_all",
    ),
    Change(
        what="streams, path, arguments, threads, warnings and signals of a worker",
        where="worker/process_setup.py",
        names=(
            "faulthandler.enable",
            "linecache.cache",
            "multiprocessing.set_start_method",
            "signal.signal",
            "sys.argv",
            "sys.path",
            "sys.stderr",
            "sys.stdin",
            "sys.stdout",
            "torch.set_num_threads",
            "warnings.showwarning",
        ),
        why="a worker is not what the caller's process is; each rank shows each warning",
        lasts="the worker",
        test="tests/worlds/test_launch_output.py::test_bars_and_warnings",
    ),
    Change(
        what="a warning of torch's schedulers",
        where="worker/main.py",
        names=("signal.signal", "warnings.filterwarnings"),
        why="each call warns that `optimizer.step` was overridden; SIGTERM is back to its default when a rank leaves",
        lasts="the worker",
        test="tests/worlds/test_launch_output.py::test_bars_and_warnings",
    ),
    Change(
        what="the end of a worker: Python's traceback after a timeout, functions of `atexit`",
        where="worker/leaving.py",
        names=("atexit.register", "faulthandler.dump_traceback_later"),
        why="what the function has left keeps the process; the fork server's exit functions run in each worker",
        lasts="the end of the worker",
        test="tests/worlds/test_leaving.py::test_what_is_idle_ends_with_the_rank",
    ),
    Change(
        what="handlers of SIGUSR1 and SIGUSR2 in a job",
        where="worker/preemption.py",
        names=("signal.signal",),
        why="`should_stop()` does not see the warning of Slurm",
        lasts="a call",
        test="tests/unit/worker/test_preemption.py::test_a_signal_makes_should_stop_true",
    ),
    Change(
        what="handlers of SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 in the caller",
        where="launchers/stop_signals.py",
        names=("signal.signal",),
        why="workers outlive a caller that is stopped; their handlers of SIGUSR1 do not run",
        lasts="a call",
        test="tests/worlds/test_launch_stopping.py::test_handlers_are_as_before_after_a_call",
    ),
    Change(
        what="handler of SIGINT at a prompt of pdb",
        where="launchers/local/keyboard.py",
        names=("signal.signal",),
        why="Ctrl-C at the prompt ends the call",
        lasts="a prompt",
        test="none: a terminal's keyboard",
    ),
    Change(
        what="an exit function of a caller",
        where="launchers/local/calling_process.py",
        names=("atexit.register",),
        why="its fork servers outlive it",
        lasts="the process",
        test="tests/worlds/test_launch_stopping.py::test_a_killed_caller_and_server_leave_no_worker",
    ),
    Change(
        what="SIGCHLD and frozen objects in the fork server",
        where="launchers/local/fork_server.py",
        names=("gc.freeze", "signal.signal"),
        why="ended workers are not seen; collections in workers copy the pages of imported modules",
        lasts="the process",
        test="tests/worlds/test_launch_stopping.py::test_a_killed_caller_and_server_leave_no_worker",
    ),
    Change(
        what="an exit function",
        where="block/context.py",
        names=("atexit.register",),
        why="a block that `start()` has begun in a plain script does not end",
        lasts="the process",
        test="tests/worlds/test_model_start.py::test_a_plain_script_may_start_one",
    ),
    Change(
        what='`sys.modules["__main__"]` of a step of Slurm',
        where="launchers/slurm/step.py",
        names=("sys.modules",),
        why="names of the user's script get in the way of the step's own",
        lasts="the process, which is this package's",
        test="none: a program of this package",
    ),
    Change(
        what="`sys.stdout`, `sys.stderr` and `sys.path` of an agent",
        where="launchers/ssh.py",
        names=("sys.path", "sys.stderr", "sys.stdout"),
        why="output of ranks does not reach the caller",
        lasts="the process, which is this package's",
        test="none: a program of this package",
    ),
    Change(
        what="`sys.argv` and `sys.path` of `parallelize replay`",
        where="cli/replay.py",
        names=("sys.argv", "sys.path"),
        why="the script does not find its modules",
        lasts="the process, which is this package's",
        test="tests/worlds/test_logical.py::test_a_step_of_a_run_is_replayed_in_one_process",
    ),
    Change(
        what="warning filters",
        where="checkpoint/shards.py",
        names=("warnings.filterwarnings",),
        why="torch.distributed.checkpoint warns in one process",
        lasts="a save or load",
        test="none: a warning of torch",
    ),
    Change(
        what="`f_trace` of the main thread's frame",
        where="hang_detection/main_thread.py",
        names=("innermost.f_trace",),
        why="a call that ended and began again at one address looks like one that waits",
        lasts="the frame",
        test="none: Python rarely gives an address again so soon",
    ),
)
"""Where the process, the call or the signal is the subject."""


def table(changes: tuple[Change, ...]) -> str:
    """Return a Markdown table of changes."""
    lines = ["| what is changed | in | without it | until the end of | test |", "|---|---|---|---|---|"]
    for change in changes:
        test = change.test if change.test.startswith("none: ") else f"`{change.test}`"
        lines.append(f"| {change.what} | `{change.where}` | {change.why} | {change.lasts} | {test} |")
    return "\n".join(lines)
