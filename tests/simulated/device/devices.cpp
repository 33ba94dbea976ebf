// What torch asks of a device type: which device is current, streams, events, and the hooks of CUDA.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

#include "devices.h"

namespace simulated {
namespace {

std::atomic<int> devices{1};
thread_local c10::DeviceIndex current = 0;
thread_local std::array<int64_t, kMostDevices> current_stream{};  // ids; 0 is the default stream

using Moment = std::chrono::steady_clock::time_point;

c10::DeviceIndex count() { return static_cast<c10::DeviceIndex>(devices.load()); }

// Streams are names only: work is done at once, in the order in which Python asks for it. So events are always past,
// and what they order cannot go wrong here.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}  // the registration below calls this one

  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return count(); }
  c10::Device getDevice() const override { return {kDeviceType, current}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { 
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> made{0};
    return c10::Stream(c10::Stream::UNSAFE, device, ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(c10::Stream stream) const { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.device_index()); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize(device); }

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment;
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto passed = *static_cast<Moment*>(to) - *static_cast<Moment*>(from);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return count(); }
  int getNumGPUs() const override { return count(); }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current;
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Device getDeviceFromPtr(void* pointer) const override { return device_of_pointer(pointer); }
  // Random numbers are the CPU's: the kernels are, too.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize(device); }
};

// torch looks for CUDA's hooks once, while it is imported, which is before this library can be there, and keeps what
// it found: an object without fields whose every method raises. Give that object our methods.
const bool hooks_installed = [] {
  static_assert(sizeof(Hooks) == sizeof(void*) && sizeof(at::CUDAHooksInterface) == sizeof(void*));
  static const Hooks& ours = *new Hooks;
  const void* cached = &at::detail::getCUDAHooks();
  std::memcpy(const_cast<void*>(cached), static_cast<const void*>(&ours), sizeof(void*));
  return true;
}();

}  // namespace

int device_count() { return devices.load(); }
void set_device_count(int count) { devices = count; }
c10::DeviceIndex current_device() { return current; }

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index < device_count(), "CUDA error: invalid device ordinal ", static_cast<int>(index), " (simulated)");
  if (index >= 0) current = index;
}

}  // namespace simulated
