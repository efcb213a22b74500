#include "durations.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

namespace fake_cuda {
namespace {

using at::Tensor;
using Arguments = c10::ArrayRef<c10::IValue>;

double the_launch_ms = 0.001, the_host_ms = 0;
double the_flops_per_ms = 0, the_bytes_per_ms = 0; // 0: infinite
std::map<int, double> the_speeds;
std::map<std::pair<int, int>, double> the_links; // source, target -> bytes per ms
constexpr double kDefaultLink = 25e6;            // PCIe

double numel(const c10::IValue& tensor) {
  return static_cast<double>(tensor.toTensor().numel());
}

Operations product(const c10::IValue& left) {
  return {0, 2.0 * left.toTensor().size(-1)};
}

// Each element of the output of a convolution, or of the input of a transposed one, meets the weights of one channel.
Operations convolution(const c10::IValue& met, const c10::IValue& weight, double times) {
  return {times * 2 * numel(met) * numel(weight) / weight.toTensor().size(0), 0};
}

Operations attention(const c10::IValue& query, const c10::IValue& key, double products) {
  return {products * 2 * numel(query) * key.toTensor().size(-2), 0};
}

// The kinds of operators that are limited by their operations; all others are limited by memory.
const std::map<std::string, std::function<Operations(Arguments)>>& table() {
  static const auto& made = *new std::map<std::string, std::function<Operations(Arguments)>>{
      {"aten::mm", [](Arguments a) { return product(a[0]); }},
      {"aten::bmm", [](Arguments a) { return product(a[0]); }},
      {"aten::addmm", [](Arguments a) { return product(a[1]); }},
      {"aten::addbmm", [](Arguments a) { return product(a[1]); }},
      {"aten::baddbmm", [](Arguments a) { return product(a[1]); }},
      {"aten::convolution",
       [](Arguments a) {
         auto weight = a[1].toTensor();
         if (a[6].toBool()) return convolution(a[0], a[1], 1);
         return Operations{0, 2.0 * weight.numel() / weight.size(0)};
       }},
      {"aten::convolution_backward",
       [](Arguments a) { return convolution(a[7].toBool() ? a[1] : a[0], a[2], 2); }},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", [](Arguments a) { return attention(a[0], a[1], 2); }},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       [](Arguments a) { return attention(a[1], a[2], 5); }},
  };
  return made;
}

} // namespace

void set_rates(double launch_us, double tera_flops, double memory_gb_per_s, double host_us) {
  the_launch_ms = launch_us / 1e3;
  the_flops_per_ms = tera_flops * 1e9;
  the_bytes_per_ms = memory_gb_per_s * 1e6;
  the_host_ms = host_us / 1e3;
}

void set_speed(int device, double speed) {
  the_speeds[device] = speed;
}

double speed(int device) {
  auto found = the_speeds.find(device);
  return found == the_speeds.end() ? 1.0 : found->second;
}

void set_link(int source, int target, double gb_per_s) {
  the_links[{source, target}] = gb_per_s * 1e6;
}

double launch_ms() {
  return the_launch_ms;
}

double host_ms() {
  return the_host_ms;
}

double transfer_ms(int source, int target, double bytes) {
  auto found = the_links.find({source, target});
  return bytes / (found == the_links.end() ? kDefaultLink : found->second);
}

Operations operations(const std::string& name, Arguments arguments) {
  auto found = table().find(name);
  return found == table().end() ? Operations{} : found->second(arguments);
}

double kernel_ms(int device, const Operations& operations, double elements, double bytes) {
  auto count = operations.fixed + operations.per_element * elements;
  auto computing = the_flops_per_ms > 0 ? count / the_flops_per_ms : 0;
  auto moving = the_bytes_per_ms > 0 ? bytes / the_bytes_per_ms : 0;
  return std::max(computing, moving) / speed(device);
}

} // namespace fake_cuda
