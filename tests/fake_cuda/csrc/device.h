// The devices, their current streams and generators, as seen by torch.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "order.h"

namespace fake_cuda {

// The physical devices that CUDA_VISIBLE_DEVICES shows to this process, in its order.
int device_count();
int physical_device(int device);

// Of the calling thread.
int current_device();
void set_current_device(int device);
int maybe_exchange_device(int device);
StreamKey current_stream(int device);

constexpr size_t kMemory = size_t{8} << 30;
// torch.cuda.set_per_process_memory_fraction: the allocator raises OutOfMemoryError beyond it.
void set_memory_fraction(int device, double fraction);
double memory_fraction(int device);
void check_memory(int device, size_t bytes);

c10::Allocator* device_allocator();
const at::Generator& default_generator(int device);

// torch.cuda.set_sync_debug_mode: 1 warns, 2 raises. Called before the lock is taken: a warning needs the GIL.
void set_sync_debug_mode(int mode);
int sync_debug_mode();
void check_sync(const char* what);
// How often the host has waited for a device in this process, whatever the mode.
int64_t host_wait_count();

// Called by products of matrices on the current stream, before they launch their kernel.
void use_cublas();

// Replaces the answers "torch was built without CUDA".
void install_hooks();

} // namespace fake_cuda
