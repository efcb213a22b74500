// How long work takes in the simulated time, by the kind of an operator and the sizes of its tensors.
#pragma once
#include <c10/util/ArrayRef.h>
#include <ATen/core/ivalue.h>

#include <string>

namespace fake_cuda {

constexpr int kHost = -1; // in place of a device

// A kernel takes launch_us and, on a device of speed 1, the longer of the times of its operations and of its memory.
// Rates of 0 are infinite. The host needs host_us to issue a kernel or a copy.
void set_rates(double launch_us, double tera_flops, double memory_gb_per_s, double host_us);
void set_speed(int device, double speed);
double speed(int device);
void set_link(int source, int target, double gb_per_s);

double launch_ms();
double host_ms();
double transfer_ms(int source, int target, double bytes);

// Operations of a kernel: `fixed`, and `per_element` of its first result.
struct Operations {
  double fixed = 0, per_element = 0;
};
Operations operations(const std::string& name, c10::ArrayRef<c10::IValue> arguments);
// What a kernel takes besides its launch.
double kernel_ms(int device, const Operations& operations, double elements, double bytes);

} // namespace fake_cuda
