// The operators of the simulated devices. Those that make memory or views are here; copies go through link.cpp; all
// others run on the CPU and have their results carried back, after the check of devices that a GPU's kernel would make.
#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "devices.h"

namespace simulated {
namespace {

using at::Tensor;
using Sizes = c10::IntArrayRef;
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

c10::Device chosen(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kDeviceType, current_device());
}

Tensor empty(Sizes size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(Sizes size, Sizes stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize(const Tensor& self, Sizes size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, Sizes size, Sizes stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {length}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  const at::Storage storage(at::Storage::use_byte_size_t{}, 0, device_allocator()->allocate(0), device_allocator(),
                            /*resizable=*/true);
  return set_storage(self, storage, 0, {0}, {1});
}

bool crosses_without_peer_access(const Tensor& source, const Tensor& destination) {
  return source.device().type() == kDeviceType && destination.device().type() == kDeviceType &&
         source.device() != destination.device() &&
         !peer_access(source.device().index(), destination.device().index());
}

bool is_lazy(const Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

// What `aten::copy_` calls for every copy from or to a device. The rule for one memcpy is that of torch's own
// copy_device_to_device (aten/src/ATen/native/cuda/Copy.cu).
void copy_kernel(at::TensorIterator& iterator, bool non_blocking) {
  const auto& destination = iterator.tensor(0);
  const auto& source = iterator.tensor(1);
  const bool dense = destination.scalar_type() == source.scalar_type() &&
                     destination.is_conj() == source.is_conj() && destination.is_neg() == source.is_neg() &&
                     iterator.is_contiguous();
  if (!dense && crosses_without_peer_access(source, destination) && !is_lazy(source) && !is_lazy(destination)) {
    // As torch does it: gathered and converted on the source, sent by a second `aten::copy_`, laid out at the end.
    const auto sent = source.to(destination.scalar_type()).expand_as(destination).contiguous();
    const auto arrived = destination.is_contiguous() ? destination : at::empty_like(destination, at::MemoryFormat::Contiguous);
    arrived.copy_(sent, non_blocking);
    if (!arrived.is_same(destination)) destination.copy_(arrived, non_blocking);
    return;
  }
  copy(source, destination, dense, non_blocking);
}
const bool copy_kernel_installed = [] {
  at::native::copy_stub.set_cuda_dispatch_ptr(&copy_kernel);
  return true;
}();

// The CPU fallback writes results back with these two, and only between host and device.
Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  TORCH_INTERNAL_ASSERT(source.device().type() != destination.device().type());
  copy(source, destination, /*dense=*/true, non_blocking);
  return destination;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, /*non_blocking=*/false);
}

at::Scalar item(const Tensor& self) {
  synchronize(self.device().index());
  return host_view(self).item();
}

// Streams run at once, so memory is never in use on another one.
void record_stream(Tensor&, c10::Stream) {}

bool may_index_from_the_host(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
         name == "aten::_index_put_impl_";
}

// The device that all tensors among the arguments are on. Raises in CUDA's words when there are several.
std::optional<c10::Device> only_device(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  const auto meet = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().is_cpu() && (tensor.dim() == 0 || may_index_from_the_host(name))) return;
    if (!found) found = tensor.device();
    TORCH_CHECK(*found == tensor.device(), "Expected all tensors to be on the same device, but found at least two ",
                "devices, ", *found, " and ", tensor.device(), "! (", name, ")");
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) meet(argument.toTensor());
    if (argument.isTensorList()) {
      for (const Tensor& tensor : argument.toTensorVector()) meet(tensor);
    }
    if (argument.isOptionalTensorList()) {
      for (const auto& tensor : argument.toOptionalTensorVector()) {
        if (tensor) meet(*tensor);
      }
    }
  }
  return found;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto device = only_device(schema.name(), torch::jit::last(*stack, schema.arguments().size()));
  const bool simulated = device && device->type() == kDeviceType;
  c10::OptionalDeviceGuard guard;
  if (simulated) {
    guard.reset_device(*device);
    kernel_starts(device->index());
  }
  {
    const Emulating emulating;
    at::native::cpu_fallback(op, stack);
  }
  // A number in the result (`torch.equal`, say) makes the host wait for the device.
  for (const auto& result : torch::jit::last(*stack, schema.returns().size())) {
    if (simulated && (result.isBool() || result.isScalar())) synchronize(device->index());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("record_stream", record_stream);
}

// Pending conjugations and negations must reach `_copy_from` as they are: doing them first would be a clone, which is
// a copy, which comes back here.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace simulated
