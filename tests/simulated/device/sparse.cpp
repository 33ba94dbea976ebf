// Sparse (COO) tensors: what is needed to make them, look into them and move them. Their indices and values are
// ordinary tensors of the device, so a copy of one is two copies through link.cpp. There is no arithmetic.
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <torch/library.h>

#include "devices.h"

namespace native = at::native;

namespace simulated {
namespace {

using at::Tensor;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Flag = std::optional<bool>;

// The parts of a new sparse tensor are made on the current device, whatever device it is to be on.
Tensor empty(c10::SymIntArrayRef size, Dtype dtype, Layout layout, Device device, Flag pinned,
             std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return native::empty_sparse_symint(size, dtype, layout, device, pinned, format);
}

Tensor empty_like(const Tensor& self, Dtype dtype, Layout layout, Device device, Flag pinned,
                  std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device.value_or(self.device()));
  return native::empty_like_sparse_coo(self, dtype, layout, device, pinned, format);
}

Tensor with_dims(int64_t sparse, int64_t dense, c10::IntArrayRef size, Dtype dtype, Layout layout, Device device,
                 Flag pinned) {
  const c10::OptionalDeviceGuard guard(device);
  return native::new_with_dims_sparse(sparse, dense, size, dtype, layout, device, pinned);
}

Tensor with_tensors(int64_t sparse, int64_t dense, c10::SymIntArrayRef size, const Tensor& indices,
                    const Tensor& values, Dtype dtype, Layout layout, Device device, Flag pinned, Flag coalesced) {
  const c10::DeviceGuard guard(values.device());
  return native::new_with_dims_and_tensor_sparse_symint(sparse, dense, size, indices, values, dtype, layout, device,
                                                        pinned, coalesced);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_like", empty_like);
  library.impl("_sparse_coo_tensor_with_dims", with_dims);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", with_tensors);
  library.impl("sparse_resize_", native::sparse_resize_);
  library.impl("sparse_resize_and_clear_", native::sparse_resize_and_clear_);
  library.impl("sparse_dim", native::sparse_dim_sparse);
  library.impl("dense_dim", native::dense_dim_sparse);
  library.impl("_indices", native::_indices_sparse);
  library.impl("_values", native::_values_sparse);
  library.impl("_nnz", native::_nnz_sparse);
  library.impl("is_coalesced", native::is_coalesced_sparse);
  library.impl("_coalesced_", native::_coalesced_sparse_);
  library.impl("copy_", native::copy_sparse_wrapper_);
  library.impl("copy_sparse_to_sparse_", native::copy_sparse_);
}

}  // namespace simulated
