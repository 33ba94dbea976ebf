// The simulated devices: which there are, their memory, and the links between them.
#pragma once

#include <ATen/core/Tensor.h>

#include "faults.h"

namespace simulated {

constexpr auto kDeviceType = c10::DeviceType::CUDA;
constexpr int kMostDevices = 16;
constexpr int32_t kHost = -1;

// ---- devices.cpp
int device_count();
void set_device_count(int count);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);  // raises for one that is not there, as CUDA does

// ---- memory.cpp
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
c10::Device device_of_pointer(const void* pointer);
void set_memory_size(int64_t bytes);
void keep_freed_blocks(bool on);
void release_freed_blocks();
struct Memory {
  int64_t allocated = 0;
  int64_t peak = 0;
  int64_t total = 0;
};
Memory memory_of(int device);
void reset_peak(int device);

// ---- link.cpp
// Mirrored field by field by `CopyFields` in library.py.
struct Copy {
  int32_t source;       // a device, or kHost
  int32_t destination;  // a device, or kHost
  int32_t engine;       // an Engine
  int32_t dtype;        // a c10::ScalarType: what crosses the link
  int32_t fault;        // a Kind, or -1
  int32_t non_blocking;
  int64_t bytes;
};
// Makes the copy `destination.copy_(source)` where at least one of the two is on a simulated device. `dense`: one
// memcpy could do it (same type, same order of elements, no gaps).
void copy(const at::Tensor& source, const at::Tensor& destination, bool dense, bool non_blocking);
void set_fault(const Fault& fault);
void clear_faults();  // also ends hangs and revives lost devices; late copies arrive
void set_peer_access(int source, int destination, bool allowed);
bool peer_access(int source, int destination);
int64_t copy_count();
int64_t read_copies(Copy* into, int64_t most);
void clear_copies();
int64_t late_copies();        // those that have not arrived yet
void kernel_starts(int device);  // late copies come nearer; raises on a lost device
void synchronize(int device);    // late copies arrive; raises on a lost device; -1: every device
int64_t kernel_count();

// A CPU tensor over the same memory: what makes it possible to let the CPU's kernels do the work.
at::Tensor host_view(const at::Tensor& tensor);
// While one of these lives on this thread, copies between host and device are the emulation's own and not logged.
struct Emulating {
  Emulating();
  ~Emulating();
  Emulating(const Emulating&) = delete;
  Emulating& operator=(const Emulating&) = delete;
};

}  // namespace simulated
