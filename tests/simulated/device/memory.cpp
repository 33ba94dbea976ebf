// The memory of the simulated devices, and the pinned memory of the host. All of it is ordinary memory.
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "devices.h"

namespace simulated {
namespace {

constexpr size_t kAlignment = 512;  // as the CUDA caching allocator

struct Block {
  void* first;
  size_t size;  // rounded up
  int device;
};

struct State {
  std::mutex mutex;
  bool keeps_freed = false;
  std::map<std::pair<int, size_t>, std::vector<void*>> freed;  // by device and size
  std::map<const void*, Block*> blocks;                        // in use, by first address
  std::array<Memory, kMostDevices> memory{};
  int64_t total = int64_t{8} << 30;
};
// Never destroyed: Python frees its last tensors after the destructors of a library have run.
State& state = *new State;

void* fresh(size_t size) {
  void* first = nullptr;
  TORCH_CHECK(posix_memalign(&first, kAlignment, size) == 0, "the host has no memory for a simulated device");
  std::memset(first, kFreshByte, size);
  return first;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block == nullptr) return;
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.blocks.erase(block->first);
  state.memory[block->device].allocated -= static_cast<int64_t>(block->size);
  if (state.keeps_freed) {
    state.freed[{block->device, block->size}].push_back(block->first);
  } else {
    std::free(block->first);
  }
  delete block;
}

// Freed blocks may be kept and handed out again with their contents, as the CUDA caching allocator does: a destination
// that is never written then holds the right bytes of an earlier copy.
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device{kDeviceType, current_device()};
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    const int index = device.index();
    const std::lock_guard<std::mutex> lock(state.mutex);
    auto& memory = state.memory[index];
    TORCH_CHECK_WITH(OutOfMemoryError, memory.allocated + static_cast<int64_t>(rounded) <= state.total,
                     "CUDA out of memory. Tried to allocate ", rounded, " bytes on device ", index, ", which has ",
                     state.total, " and uses ", memory.allocated, " (simulated)");
    auto& freed = state.freed[{index, rounded}];
    void* first = nullptr;
    if (freed.empty()) {
      first = fresh(rounded);
    } else {
      first = freed.back();
      freed.pop_back();
    }
    memory.allocated += static_cast<int64_t>(rounded);
    memory.peak = std::max(memory.peak, memory.allocated);
    auto* block = new Block{first, rounded, index};
    state.blocks[first] = block;
    return {first, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { release_freed_blocks(); }
  // Streams run at once here, so memory is never in use on another one.
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto memory = memory_of(device);
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    for (auto* stat : {&stats.allocated_bytes[kAll], &stats.reserved_bytes[kAll]}) {
      stat->current = memory.allocated;
      stat->peak = memory.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto memory = memory_of(device);
    return {static_cast<size_t>(memory.total - memory.allocated), static_cast<size_t>(memory.total)};
  }
};

struct Pinned {
  std::mutex mutex;
  std::map<const void*, size_t> sizes;  // by first address
};
Pinned& pinned = *new Pinned;

void free_pinned(void* first) {
  const std::lock_guard<std::mutex> lock(pinned.mutex);
  pinned.sizes.erase(first);
  std::free(first);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* first = fresh(std::max<size_t>(size, 1));
    const std::lock_guard<std::mutex> lock(pinned.mutex);
    pinned.sizes[first] = std::max<size_t>(size, 1);
    return {first, first, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

DeviceMemory& device_memory = *new DeviceMemory;
PinnedMemory& pinned_memory = *new PinnedMemory;
REGISTER_ALLOCATOR(kDeviceType, &device_memory);

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }
c10::Allocator* pinned_allocator() { return &pinned_memory; }

bool is_pinned(const void* pointer) {
  const std::lock_guard<std::mutex> lock(pinned.mutex);
  auto after = pinned.sizes.upper_bound(pointer);
  if (after == pinned.sizes.begin()) return false;
  --after;
  return static_cast<const char*>(pointer) < static_cast<const char*>(after->first) + after->second;
}

c10::Device device_of_pointer(const void* pointer) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  auto after = state.blocks.upper_bound(pointer);
  TORCH_CHECK(after != state.blocks.begin(), "this address is on no simulated device");
  const auto* block = (--after)->second;
  const auto* end = static_cast<const char*>(block->first) + block->size;
  TORCH_CHECK(static_cast<const char*>(pointer) < end, "this address is on no simulated device");
  return {kDeviceType, static_cast<c10::DeviceIndex>(block->device)};
}

void set_memory_size(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.total = bytes;
}

void keep_freed_blocks(bool on) {
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.keeps_freed = on;
  }
  if (!on) release_freed_blocks();
}

void release_freed_blocks() {
  const std::lock_guard<std::mutex> lock(state.mutex);
  for (auto& [key, blocks] : state.freed) {
    for (void* first : blocks) std::free(first);
  }
  state.freed.clear();
}

Memory memory_of(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "no simulated device ", device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  auto memory = state.memory[device];
  memory.total = state.total;
  return memory;
}

void reset_peak(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "no simulated device ", device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.memory[device].peak = state.memory[device].allocated;
}

}  // namespace simulated
