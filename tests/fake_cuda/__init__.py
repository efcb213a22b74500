"""A pretended CUDA for tests: two devices on the CPU build of torch, which report what a real device would not order.

Run any command on it with `python tests/fake_cuda COMMAND`, such as `pytest -m "gpu or gpu2"`. The environment variable
FAKE_CUDA_DEVICES is another number of devices, at most 8; `python tests/fake_cuda --devices=4 COMMAND` sets it.

All work is computed at once, on the CPU. Vector clocks of streams, events and the host record which access to device
memory is ordered after which, as CUDA defines it: by the stream, by events, by waits of the host, and by the caching
allocator. What else happens at the same time on a real device, and fails there now and then, is reported here each
time. New memory is full of NaN; copies between pinned and device memory run as late as they may, so that the host sees
NaN, or copies the wrong values, where it did not wait. Operators refuse tensors of two devices. With
FAKE_CUDA_NO_PEERS=1, no device has access to another's memory; with FAKE_CUDA_ONE_CONTEXT=1, a process that gets a
context on a second device is reported. Workers that a test starts have the device too, and report to the same file.

It cannot show:

- NCCL's own code. `dist.is_nccl_available()` is False, and `init_process_group("nccl")` raises torch's own error. CUDA
  tensors go over gloo, in the order of NCCL: a collective runs on a stream of its own, so that a missing `Work.wait()`
  is reported. Unlike NCCL, gloo blocks the host until the values have arrived. The default process group of CUDA
  devices is gloo's.
- cuDNN, cuBLAS and their precisions (TF32, the accumulation of fp16), Triton and `torch.compile` for CUDA: the numbers
  are those of the CPU's kernels.
- CUDA graphs.
- Fragmentation: memory runs out when the allocated bytes reach `torch.cuda.set_per_process_memory_fraction` of 8 GiB.
- Speed: events measure a simulated time, in which copies run at 25 GB/s, `torch.cuda._sleep` at 1 GHz, kernels take
  a microsecond, and the host no time at all; or what `fake_cuda.durations.Durations` says, by the kind of a kernel and
  the sizes of its tensors, per device and link. It knows no caches, and no kernels that fill a part of a device.
- Sparse and quantized tensors, CUDA IPC (`torch.multiprocessing`), and an order between threads of the host: they share
  one clock.
"""
