// The pretend accelerator: what its parts tell each other.
#pragma once
#include <ATen/ATen.h>
#include <array>
#include <atomic>
#include <string>

namespace sim {
constexpr int kMost = 16;
int count();                 // devices, by SIM_DEVICES
int current();               // of this thread
void set_current(int index);

struct Stats {
  std::atomic<int64_t> now{0}, peak{0}, allocations{0};
};
extern std::array<Stats, kMost> stats;
extern std::atomic<int64_t> capacity;  // bytes per device; 0: no limit

// Called where a real device would make the host wait. `what`: the operator, or "copy to cpu".
using SyncHook = void (*)(const char* what);
extern std::atomic<SyncHook> sync_hook;
extern std::atomic<bool> stalled;  // nothing that is asked for now is ever done, as events say
void note_sync(const char* what);

// The same memory as a CPU tensor (for kernels and for gloo). The memory must outlive it.
at::Tensor on_host(const at::Tensor& tensor);
}  // namespace sim
