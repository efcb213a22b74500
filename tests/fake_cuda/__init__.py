"""A pretended CUDA for tests: two devices on the CPU build of torch, which report what a real device would not order.

Run any command on it with `python tests/fake_cuda COMMAND`, such as `pytest -m "gpu or gpu2"`. The environment variable
FAKE_CUDA_DEVICES is another number of devices, at most 8; `python tests/fake_cuda --devices=4 COMMAND` sets it.

Nearly all work is computed at once, on the CPU. Vector clocks of streams, events and the host record which access to
device memory is ordered after which, as CUDA defines it: by the stream, by events, by waits of the host, and by the
caching allocator. What else happens at the same time on a real device, and fails there now and then, is reported here
each time. New memory is full of NaN; copies between pinned and device memory run as late as they may, so that the host
sees NaN, or copies the wrong values, where it did not wait. Operators refuse tensors of two devices. With
FAKE_CUDA_NO_PEERS=1, no device has access to another's memory; with FAKE_CUDA_ONE_CONTEXT=1, a process that gets a
context on a second device is reported, also by a stream or an event of a thread whose device was never set. Workers
that a test starts have the device too, and report to the same file.

Groups of NCCL (csrc/groups.h) are as strict as NCCL, and stricter. The default group is bound to its device. A
collective refuses tensors with gaps, and dtypes and reductions that NCCL has not. It does not hold the host: it is work
of a stream of the group, kernels that need its result are queued behind it (csrc/pending.h), and `item`, `synchronize`
and copies to the host wait. Ranks that pass other sizes, dtypes or operations get an error, where NCCL would hang or
compute garbage. A rank that has ended is waited for; an aborted group lets the host go, without values.

`fake_cuda.counters` counts, in one process, waits of the host, groups, pinned bytes and launches of kernels; the
fixture `host_waits` is the first of them. The first product of matrices on a stream takes cuBLAS's workspace, of 32 MiB
or of CUBLAS_WORKSPACE_CONFIG, which deterministic algorithms ask for, as in torch.

It cannot show:

- NCCL's own code: the values go over gloo, and its protocols, topologies and CUDA IPC are not there. An operator that
  draws random numbers, or whose sizes torch cannot tell from those of its arguments, waits for the collective whose
  result it needs, and so does a copy from memory that is not pinned. Groups of gloo hold the host, as gloo does.
- cuDNN, cuBLAS and their precisions (TF32, the accumulation of fp16), Triton and `torch.compile` for CUDA: the numbers
  are those of the CPU's kernels, products of 16 bits in fp32, and parts of a batch have the same bits at any address.
- CUDA graphs.
- Fragmentation: memory runs out when the allocated bytes reach `torch.cuda.set_per_process_memory_fraction` of 8 GiB.
- Speed: events measure a simulated time, in which copies run at 25 GB/s, `torch.cuda._sleep` at 1 GHz, kernels take
  a microsecond, and the host no time at all; or what `fake_cuda.durations.Durations` says, by the kind of a kernel and
  the sizes of its tensors, per device and link. A device has an engine for kernels, which fill it, and one for each
  direction of copies; it knows no caches. Collectives take no time.
- The memory of the host: what a rank holds there before its model is on the device.
- Sparse and quantized tensors, CUDA IPC (`torch.multiprocessing`), and an order between threads of the host: they share
  one clock.
"""
