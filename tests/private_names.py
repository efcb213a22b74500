"""Every private name of torch, multiprocessing, cloudpickle, Apex and the standard library that the package uses.

A private name may change in any release. `tests/unit/test_torch_private.py` fails if the code uses a name that is not
listed here, no longer uses a listed name, or if the installed release lacks a listed name.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NCCL_ONLY", "PRIVATE_NAMES", "SINCE"]

SINCE: Mapping[str, str] = {
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._sharding_spec_by_dtype": "2.15",
}
"""Path -> first torch release that has the name; only for names newer than 2.11, the oldest supported release."""

NCCL_ONLY = frozenset({"torch._C._cuda_synchronize", "torch._C._distributed_c10d._dump_nccl_trace"})
"""Paths of names that only builds of torch with CUDA and NCCL have."""

PRIVATE_NAMES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "torch.Tensor": {
        "_base": ("tell a view's base from a new tensor", 'backend="balanced" does not split some batches'),
        "_values": ("values of an uncoalesced sparse gradient", "sparse gradients fail under amp"),
        "_version": ("detect in-place writes to inputs and buffers", 'backend="balanced" and "fsdp" fail'),
        "_backward_hooks": ("refuse hooks under fp16; call them under fsdp", "hooks get scaled gradients"),
        "_post_accumulate_grad_hooks": ("refuse hooks under fp16; call them under fsdp", "hooks are not called"),
    },
    "torch.distributed.tensor.DTensor": {
        "_local_tensor": ("this rank's shard, without autograd", 'backend="fsdp" fails'),
        "_spec": ("give gradients the mesh of the user's parameter", 'backend="fsdp" fails'),
    },
    "torch": {
        "_conj_physical": ("tell functions that keep elements apart", "nothing"),
        "_foreach_addcdiv": ("tell functions that keep elements apart", "nothing"),
        "_foreach_copy_": ("copy each of a list", 'lists of parameters under backend="fsdp" cannot be copied'),
        "_foreach_max": ("tell functions that reduce", "nothing"),
        "_foreach_zero_": ("tell functions that keep elements apart", 'nothing: backend="fsdp" gathers more'),
        "_foreach_norm": ("clip many sharded gradients by one collective", "clipping is slower"),
        "_fused_adagrad_": ("run an optimizer's kernel on rows", 'fused=True trains nothing under backend="fsdp"'),
        "_fused_adam_": ("run an optimizer's kernel on rows", 'fused=True trains nothing under backend="fsdp"'),
        "_fused_adamw_": ("run an optimizer's kernel on rows", 'fused=True trains nothing under backend="fsdp"'),
        "_fused_sgd_": ("run an optimizer's kernel on rows", 'fused=True trains nothing under backend="fsdp"'),
        "_foreach_mul_": ("scale many gradients in one kernel", "fp16 fails"),
        "_amp_foreach_non_finite_check_and_unscale_": ("GradScaler's unscale kernel", "fp16 fails"),
        "_VF": ("bring lengths of packed sequences to the CPU", "blocks on GPUs fail"),
        "_utils": ("flatten the gradients of a bucket", "every backend with gradients fails"),
        "_dynamo": ("import it before workers are forked", "every rank starts a second later"),
    },
    "torch.cuda": {
        "_is_in_bad_fork": ("tell that a fork server has initialized CUDA", "forked workers cannot use GPUs then"),
        "_lazy_call": ("give back states of generators on GPUs", "a call from a caller that uses no GPU fails"),
        "_lazy_seed_tracker": ("find the states given back", "a second call draws the same numbers on GPUs"),
    },
    "torch._utils": {
        "_flatten_dense_tensors": ("flatten the gradients of a bucket", "every backend with gradients fails"),
        "_unflatten_dense_tensors": ("return the gradients of a bucket", "every backend with gradients fails"),
    },
    "torch._VF": {
        "_pack_padded_sequence": ("bring lengths of packed sequences to the CPU", "blocks on GPUs fail"),
    },
    "torch.amp.grad_scaler.GradScaler": {
        "_growth_tracker": ("key of GradScaler's state dict", "nothing: it is only a key"),
    },
    "torch.autograd.Variable": {
        "_execution_engine": ("queue a callback for the end of backward", "every backend with gradients fails"),
    },
    "torch.autograd.graph.Node": {
        "_input_metadata": ("read the shape of a loss or its operand", 'average="tokens" fails'),
    },
    "torch.autograd.forward_ad": {
        "_current_level": ("name forward-mode AD in an error of fsdp", 'backend="fsdp" fails'),
    },
    "torch._C._functions.AccumulateGrad": {
        "_sequence_nr": ("search no older nodes for the outputs of a loss", "every model under amp fails"),
        "_set_sequence_nr": ("run the backward of O2's casts early", 'amp="O2" fails'),
    },
    "torch.autograd.grad_mode": {
        "_unsafe_preserve_version_counter": (
            "rebuild DDP between a forward and its backward",
            "unfreezing parameters between the two fails",
        ),
    },
    "torch._C": {
        "_accelerator_synchronizeDevice": ("see that a rank waits for its GPU", "such a deadlock is found at timeout="),
        "_cuda_synchronize": ("see that a rank waits for its GPU", "such a deadlock is found at timeout="),
        "_functorch": ("tell a forward inside a transform of torch.func", "every forward fails"),
        "_will_engine_execute_node": ("refuse a backward after the block", "such a backward fails"),
        "_current_graph_task_id": ("identify the running backward, if any", "every backend with gradients fails"),
    },
    "torch.UntypedStorage": {
        "_cdata": ("find tensors that share memory under fsdp", 'backend="fsdp" fails'),
    },
    "torch.utils": {
        "_foreach_utils": ("let clipping take sharded gradients in lists", "clipping is slower"),
        "_python_dispatch": ("find the parameters that forward writes", 'backend="balanced" fails'),
    },
    "torch._ops.OpOverload": {
        "_schema": ("find the arguments that an operation writes", 'backend="balanced" fails'),
    },
    "torch._tensor_str": {
        "_tensor_str": ("copy the print options", "calls fail"),
        "PRINT_OPTS": ("copy the print options", "calls fail"),
    },
    "torch.utils._device": {
        "CURRENT_DEVICE": ("read the default device", "calls fail"),
    },
    "torch.utils._pytree": {
        "tree_leaves": ("find the tensors in a model's output", "ddp with static_graph fails"),
    },
    "torch.nn.Module": {
        "_state_dict_hooks": ("remove the hooks that Apex leaves", 'amp_engine="apex" fails'),
        "_parameters": ("replace a Parameter where it is registered", 'backend="fsdp" and amp="O2" fail'),
        "_buffers": ("replace a buffer where it is registered", 'backend="ddp" fails'),
        "_forward_hooks": ("refuse hooks that would see micro-batches", 'backend="balanced" fails'),
        "_forward_pre_hooks": ("refuse hooks that would see micro-batches", 'backend="balanced" fails'),
        "_backward_hooks": ("refuse hooks that would see micro-batches", 'backend="balanced" fails'),
        "_backward_pre_hooks": ("refuse hooks that would see micro-batches", 'backend="balanced" fails'),
        "_modules": ("reach a child without __getattr__", "calls of a model fail"),
        "_compiled_call_impl": ("detect Module.compile()", 'backend="balanced" splits compiled modules'),
        "_metadata": ("keep the version numbers in a state dict", "old state dicts load wrongly"),
        "_is_replica": ("distinguish DataParallel's replica from the model", 'backend="dp" fails'),
    },
    "torch.nn.Transformer": {
        "_reset_parameters": ("initialize modules on the meta device that have it", "their tensors are NaN, told so"),
    },
    "torch.nn.parallel.replicate": {
        "_former_parameters": ("get the parameters of a replica", 'amp="O2" with backend="dp" fails'),
    },
    "torch.nn.modules.batchnorm": {
        "_BatchNorm": ("recognize every kind of batch norm", 'backend="balanced" fails'),
        "_NormBase": ("recognize norms, which stay in fp32", 'amp="O2" and "O3" fail'),
    },
    "torch.optim.lr_scheduler": {
        "_opt_called": ("mark a loaded optimizer as already stepped", "schedulers warn"),
    },
    "torch.optim.Adam": {
        "_step_supports_amp_scaling": ("detect optimizers that read found_inf on the device", "a host sync per step"),
    },
    "torch._dynamo": {
        "trace_rules": ("exclude this package's frames from torch.compile", "compiled models fail"),
        "external_utils": ("compile a model whose class is torch's own", "models fail"),
    },
    "torch.distributed.checkpoint": {
        "_nested_dict": ("names of tensors in a folder of DCP", "sharded checkpoints fail"),
    },
    "torch.distributed.checkpoint.filesystem": {
        "_StorageInfo": ("allow it in the index of a folder of DCP", "sharded checkpoints fail"),
    },
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING": ("allow it in the index of a folder of DCP", "sharded checkpoints fail"),
    },
    "torch.distributed.distributed_c10d": {
        "_abort_process_group": ("remove the groups of a failed call", "a failed call waits for other ranks"),
        "_get_default_store": ("get the default group's store", "calls fail"),
        "_object_to_tensor": ("sign the pickles of torch's collectives of objects", "calls of several processes fail"),
        "_tensor_to_object": ("refuse pickles of strangers", "calls of several processes fail"),
        "_set_pg_timeout": (
            "give the run's group the timeout of a script",
            "such scripts fail",
        ),
        "_world": ("list the ranks of every process group", "hang detection fails"),
    },
    "torch.distributed.ProcessGroup": {
        "_device_types": ("list the backends of a group", "every call of several processes fails"),
        "_get_backend": ("give the user's timeout to the groups of gradients and comparisons", "blocks fail"),
        "_get_sequence_number_for_group": (
            "count the collectives of a group",
            "unsynchronized training is not detected",
        ),
    },
    "torch._C._distributed_c10d.Backend.Options": {
        "_timeout": ("read the timeout of a group", "hang detection does not know when a wait is over"),
    },
    "torch._C._distributed_c10d": {
        "_dump_fr_trace": ("read gloo's flight recorder", "hang reports name no collectives of gloo"),
        "_dump_nccl_trace": ("read NCCL's flight recorder", "hang reports name no collectives of NCCL"),
    },
    "torch.nn.parallel.distributed": {},
    "torch.nn.parallel.DistributedDataParallel": {
        "_active_ddp_module": ("split compiled models at the buckets", "compiled models send their gradients late"),
    },
    "torch.distributed.Reducer": {
        "_remove_autograd_hooks": ("remove the hooks of a DistributedDataParallel that wrap= returns", "hooks leak"),
    },
    "torch.distributed._composable_state": {
        "_module_state_mapping": ("unshard a module", 'backend="fsdp" fails at the end of a block'),
    },
    "torch.distributed.fsdp._fully_shard._fully_shard": {
        "_is_fsdp_managed_module": ("remove it from the user's modules", "copies pass for units"),
        "_fsdp_use_orig_params": ("remove it from the user's modules", "copies pass for units"),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": {
        "_fsdp_param_group": ("reach sharded parameters", 'backend="fsdp" fails'),
        "_root_post_backward_final_callback": (
            "make what other ranks reduce, at the end of a backward",
            'routed models fail under backend="fsdp"',
        ),
        "_state_ctx": ("reach the states of all units", 'backend="fsdp" fails'),
        "_lazy_init": ("let the model be the root before a part of it is called", "calls of parts fail"),
        "_mp_policy": ("refuse a cast of distributions", 'models that return one fail under backend="fsdp"'),
        "_pre_backward": ("prepare a backward from a distribution", "gradients of policies are lost"),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": {
        "_prefetch_unshard": ("gather the next unit of a backward ahead", 'backend="fsdp" fails'),
        "_sharded_state": ("gather a unit again for other ranks", 'routed models fail under backend="fsdp"'),
        "_to_sharded": ("free what was gathered for other ranks", 'routed models fail under backend="fsdp"'),
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": {
        "_module_info": ("find the user's parameter of a record", 'backend="fsdp" fails'),
        "_setattr_on_modules": ("register the user's parameter in place of the shard", 'backend="fsdp" fails'),
        "_sharding_spec": ("give gradients the mesh of the user's parameter", 'backend="fsdp" fails'),
        "_sharding_spec_by_dtype": ("the same, where torch caches it", 'backend="fsdp" fails'),
    },
    "torch.optim.Optimizer": {
        "_optimizer_step_pre_hooks": ("let fsdp's hook of a step run last", 'backend="fsdp" fails'),
        "_optimizer_step_post_hooks": ("let fsdp's hook of a step run first", 'backend="fsdp" fails'),
    },
    "torch.optim.optimizer": {
        "_foreach_supported_types": ("let optimizers take sharded parameters in lists", "steps are slower"),
    },
    "torch.utils._foreach_utils": {
        "_foreach_supported_types": ("let clipping take sharded gradients in lists", "clipping is slower"),
    },
    "torch.utils.data.DataLoader": {
        "_iterator": ("shut persistent workers down", "persistent workers outlive the block"),
        "_IterableDataset_len_called": (
            "know that len() of the user's loader sets it",
            "torch warns of more batches than that len()",
        ),
    },
    "torch.utils.data.dataloader": {
        "_BaseDataLoaderIter": ("see loops over loaders that are not sharded", "every block of several ranks fails"),
    },
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": {
        "_shutdown_workers": ("shut workers down immediately", "workers end when the iterator is garbage-collected"),
    },
    "torch.utils.data._utils.worker": {
        "_worker_info": ("shard a dataset over the workers of all ranks", "iterable datasets fail"),
    },
    "subprocess": {
        "_args_from_interpreter_flags": ("start the fork server with the caller's -O, -W, -X", "calls fail"),
    },
    "multiprocessing.process.BaseProcess": {
        "_Popen": ("keep the number of a worker that has ended", "calls fail"),
        "_popen": ("keep the number of a worker that has ended", "calls fail"),
        "_config": ("make sockets in the call's folder", "killed loaders leave folders in /tmp"),
    },
    "importlib._bootstrap": {
        "_initializing": ("check whether a module is being imported", "a call at import time runs once per process"),
    },
    "cloudpickle.cloudpickle": {
        "_DYNAMIC_CLASS_TRACKER_BY_CLASS": (
            "find the classes that this process has sent by value",
            "calls fail",
        ),
        "_class_setstate": (
            "leave those classes as they are when one of their instances comes back",
            "methods of a script's classes get the globals of a copy",
        ),
        "_DYNAMIC_CLASS_TRACKER_BY_ID": (
            "find classes of __main__ in a worker",
            "classes of notebooks cannot be pickled in a worker",
        ),
        "_extract_code_globals": ("find the variables that a function mentions", "calls fail"),
    },
    "threading": {
        "_shutdown": ("end the executors and threads of a worker as at the end of a program", "workers end later"),
    },
    "atexit": {
        "_clear": ("forget the functions of the fork server's imports", "a worker removes a folder of all workers"),
        "_run_exitfuncs": ("run the exit functions of a worker within its grace", "workers end later"),
    },
    "multiprocessing.util": {
        "_exit_function": ("end the children of a worker, as at the end of a program", "children are left"),
    },
    "threading.Condition": {
        "_lock": (
            "send a Condition with the lock that it shares with other objects",
            "a Condition of a script is refused",
        ),
    },
    "logging.FileHandler": {
        "_open": ("keep imports in a worker from truncating the caller's log files", "calls fail"),
    },
    "apex.amp": {
        "_amp_state": ("undo apex.amp after a block", "Apex stays active after the block"),
    },
}
"""Owner (class or module) -> private name -> (purpose in this package, effect of a release without the name).

An attribute that is set inside a function is listed under the class or module that contains the function.
"""
