// Every byte that goes from one simulated device to another passes `cross` below.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <set>

#include "devices.h"

namespace simulated {
namespace {

using at::Tensor;
using Pair = std::pair<int, int>;

// A copy that has been queued and has not arrived. It keeps the memory alive: a real one would write into memory
// that somebody else owns by then, and a test must not.
struct Late {
  c10::Storage storage;
  Tensor destination;  // a host view
  Tensor payload;
  int device;
  int64_t kernels_left;
};

struct State {
  std::mutex mutex;  // guards all of the following
  std::map<Pair, Fault> faults;
  std::map<Pair, Bytes> carried;  // the payload before this one, where a fault is set
  std::set<Pair> no_peer_access;
  std::vector<Copy> copies;
  std::list<Late> late;
  std::array<bool, kMostDevices> lost{};
  int64_t kernels = 0;
  int64_t clearings = 0;
  std::condition_variable cleared;
};
// Never destroyed: at the end of the process a thread may still hang in here, or a tensor be freed.
State& state = *new State;

thread_local int emulating = 0;

[[noreturn]] void raise(int32_t code, const std::string& message) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, "CUDA error: " + message + " (simulated)");
}

void check_alive(int device) {
  constexpr int32_t kAssertTriggered = 710;
  if (device >= 0 && state.lost[device]) raise(kAssertTriggered, "device-side assert triggered");
}

// Needs the lock. `arrived` outlives it: freeing a storage may need Python's own lock, which another thread may hold
// while it waits for ours.
void arrive(int device, bool all, std::list<Late>& arrived) {
  // A dispatch mode of Python that is active would be given these copies, and could come back here for the lock.
  const c10::impl::ExcludeDispatchKeyGuard unseen(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  for (auto item = state.late.begin(); item != state.late.end();) {
    const auto next = std::next(item);
    if ((device < 0 || item->device == device) && (all || --item->kernels_left <= 0)) {
      item->destination.copy_(item->payload);
      arrived.splice(arrived.end(), state.late, item);
    }
    item = next;
  }
}

Bytes bytes_of(const Tensor& dense) {
  const auto* first = static_cast<const char*>(dense.const_data_ptr());
  return Bytes(first, first + dense.nbytes());
}

Tensor tensor_of(const Bytes& bytes, const Tensor& like) {
  auto made = at::empty_like(like, at::MemoryFormat::Contiguous);
  std::memcpy(made.mutable_data_ptr(), bytes.data(), bytes.size());
  return made;
}

// What has to lie in the destination's memory after a copy, as far as the elements' values go. A tensor may be a
// conjugate or a negative of its memory; a host view is of the memory alone.
Tensor wanted_in_memory(const Tensor& source, const Tensor& destination) {
  auto values = source;
  if (source.device().type() == kDeviceType) {
    values = host_view(source);
    if (source.is_conj()) values = values.conj_physical();
    if (source.is_neg()) values = values.neg();
  }
  if (destination.device().type() == kDeviceType) {
    values = values.to(destination.scalar_type());
    if (destination.is_conj()) values = values.conj_physical();
    if (destination.is_neg()) values = values.neg();
  }
  return values;
}

void hang(std::unique_lock<std::mutex>& lock, double seconds) {
  const auto before = state.clearings;
  const auto over = [before] { return state.clearings != before; };
  if (seconds > 0) {
    state.cleared.wait_for(lock, std::chrono::duration<double>(seconds), over);
  } else {
    state.cleared.wait(lock, over);
  }
}

// `payload` holds the right elements in the destination's type, contiguous, in host memory.
void cross(const Tensor& payload, const Tensor& destination, Pair pair, Engine engine, bool non_blocking) {
  std::unique_lock<std::mutex> lock(state.mutex);
  check_alive(pair.first);
  check_alive(pair.second);
  const auto dtype = static_cast<int32_t>(payload.scalar_type());
  const auto size = static_cast<int64_t>(payload.nbytes());
  const auto found = state.faults.find(pair);
  const bool watched = found != state.faults.end();
  const bool hit = watched && hits(found->second, engine, dtype, size);
  const Fault fault = hit ? found->second : Fault{};
  state.copies.push_back(
      {pair.first, pair.second, static_cast<int32_t>(engine), dtype, hit ? fault.kind : -1, non_blocking, size});
  const auto kind = static_cast<Kind>(fault.kind);
  if (hit && kind == Kind::kHang) hang(lock, fault.seconds);
  if (hit && kind == Kind::kError) raise(/*cudaErrorIllegalAddress*/ 700, "an illegal memory access was encountered");
  if (hit && kind == Kind::kAssert) {
    state.lost[pair.second] = true;
    check_alive(pair.second);
  }
  auto target = host_view(destination);
  if (hit && kind == Kind::kLate) {
    state.late.push_back({destination.storage(), target, payload.clone(), pair.second, fault.kernels});
  } else if (hit) {
    target.copy_(tensor_of(damaged(fault, bytes_of(payload), bytes_of(target.contiguous()), state.carried[pair]), payload));
  } else {
    target.copy_(payload);
  }
  // A healthy link need not remember: 56 of them, with 64 MiB each, would take 3.5 GiB of the host.
  if (watched) state.carried[pair] = bytes_of(payload);
}

void copy_to_or_from_host(const Tensor& source, const Tensor& destination, bool non_blocking) {
  const bool from_device = source.device().type() == kDeviceType;
  const bool to_device = destination.device().type() == kDeviceType;
  std::list<Late> arrived;
  if (emulating == 0) {
    const std::lock_guard<std::mutex> lock(state.mutex);
    const int from = from_device ? source.device().index() : kHost;
    const int to = to_device ? destination.device().index() : kHost;
    check_alive(from);
    check_alive(to);
    // As on the real thing, what was queued on the device before a copy to the host is done before it.
    if (!to_device) arrive(from, /*all=*/true, arrived);
    if (from != to) {
      state.copies.push_back({from, to, static_cast<int32_t>(Engine::kMemcpy),
                              static_cast<int32_t>(destination.scalar_type()), -1, non_blocking,
                              static_cast<int64_t>(destination.nbytes())});
    }
  }
  (to_device ? host_view(destination) : destination).copy_(wanted_in_memory(source, destination));
}

}  // namespace

Emulating::Emulating() { ++emulating; }
Emulating::~Emulating() { --emulating; }

Tensor host_view(const Tensor& tensor) {
  auto* first = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(first + tensor.storage_offset() * tensor.element_size(), tensor.sizes(), tensor.strides(),
                       options);
}

void copy(const Tensor& source, const Tensor& destination, bool dense, bool non_blocking) {
  const bool between_devices = source.device().type() == kDeviceType &&
                               destination.device().type() == kDeviceType &&
                               source.device() != destination.device();
  if (!between_devices) return copy_to_or_from_host(source, destination, non_blocking);
  const Pair pair{source.device().index(), destination.device().index()};
  // CUDA converts and gathers on the source device, in the same kernel that writes to the peer; without peer access
  // that kernel fills a dense buffer and a memcpy carries it.
  const auto engine = dense || !peer_access(pair.first, pair.second) ? Engine::kMemcpy : Engine::kKernel;
  // A source that is broadcast is repeated by the kernel that writes: the link carries every element.
  const auto payload = wanted_in_memory(source, destination).expand(destination.sizes()).contiguous();
  cross(payload, destination, pair, engine, non_blocking);
}

void set_fault(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.faults[{fault.source, fault.destination}] = fault;
}

void clear_faults() {
  std::list<Late> arrived;
  const std::lock_guard<std::mutex> lock(state.mutex);
  arrive(-1, /*all=*/true, arrived);
  state.faults.clear();
  state.carried.clear();
  state.no_peer_access.clear();
  state.lost.fill(false);
  ++state.clearings;
  state.cleared.notify_all();
}

void set_peer_access(int source, int destination, bool allowed) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (allowed) {
    state.no_peer_access.erase({source, destination});
  } else {
    state.no_peer_access.insert({source, destination});
  }
}

bool peer_access(int source, int destination) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.no_peer_access.count({source, destination}) == 0;
}

int64_t copy_count() {
  const std::lock_guard<std::mutex> lock(state.mutex);
  return static_cast<int64_t>(state.copies.size());
}

int64_t read_copies(Copy* into, int64_t most) {
  const std::lock_guard<std::mutex> lock(state.mutex);
  const auto count = std::min(most, static_cast<int64_t>(state.copies.size()));
  std::copy(state.copies.begin(), state.copies.begin() + count, into);
  return count;
}

void clear_copies() {
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.copies.clear();
}

int64_t late_copies() {
  const std::lock_guard<std::mutex> lock(state.mutex);
  return static_cast<int64_t>(state.late.size());
}

void kernel_starts(int device) {
  std::list<Late> arrived;
  const std::lock_guard<std::mutex> lock(state.mutex);
  check_alive(device);
  ++state.kernels;
  arrive(device, /*all=*/false, arrived);
}

void synchronize(int device) {
  std::list<Late> arrived;
  const std::lock_guard<std::mutex> lock(state.mutex);
  check_alive(device);
  arrive(device, /*all=*/true, arrived);
}

int64_t kernel_count() {
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.kernels;
}

}  // namespace simulated
