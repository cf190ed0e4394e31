// Products of float32 matrices by oneDNN's kernels (at::native::cpublas::brgemm, which Inductor's
// own code calls too), entered in a microsecond; see onednn.py. The order of every sum depends
// on the sizes alone, and not on the number of threads.

#include <ATen/native/CPUBlas.h>
#include <fbgemm/Utils.h>
#include <torch/csrc/inductor/aoti_runtime/utils.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

namespace {

using Handle = torch::aot_inductor::RAIIAtenTensorHandle;

constexpr int64_t kWide = 256;     // a matrix of more rows and columns needs a library's blocking
constexpr int64_t kRows = 512;     // of the result, that one thread computes at a time
constexpr int64_t kInner = 256;    // of what is summed over, that is transposed at a time
constexpr int64_t kShare = 2048;   // of what is summed over, that one thread sums up at least
constexpr int64_t kMaxShares = 64;

struct Matrix {
  const float* data;
  int64_t rows, columns, row_stride, column_stride;
};

// The matrices of a batch, at equal distances; one without a batch is a batch of one.
struct Batch {
  Matrix first;
  int64_t dimensions, count, stride;

  Matrix at(int64_t i) const {
    Matrix m = first;
    m.data += i * stride;
    return m;
  }
};

Batch batch_of(AtenTensorHandle tensor) {
  int64_t dimensions, *sizes, *strides;
  int32_t dtype;
  void* data;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dimensions));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  STD_TORCH_CHECK(
      (dimensions == 2 || dimensions == 3) && dtype == aoti_torch_dtype_float32(),
      "lightning_rl::product takes float32 matrices, or batches of them");
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
  const int64_t d = dimensions - 2;
  const Matrix m = {static_cast<const float*>(data), sizes[d], sizes[d + 1], strides[d],
                    strides[d + 1]};
  return {m, dimensions, d ? sizes[0] : 1, d ? strides[0] : 0};
}

// Columns [start, stop) of a matrix with its rows laid out one after the other; copied to `scratch`
// where they are not already.
Matrix columns_of(const Matrix& m, int64_t start, int64_t stop, std::vector<float>& scratch) {
  const int64_t columns = stop - start;
  const float* source = m.data + start * m.column_stride;
  if ((m.column_stride == 1 || columns == 1) && m.row_stride >= columns) {
    return {source, m.rows, columns, m.row_stride, 1};
  }
  scratch.resize(std::max<size_t>(scratch.size(), m.rows * columns));
  float* target = scratch.data();
  if (m.row_stride == 1 && m.column_stride >= m.rows) {
    fbgemm::transpose_simd<float>(columns, m.rows, source, m.column_stride, target, columns);
  } else {
    for (int64_t i = 0; i < m.rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        target[i * columns + j] = source[i * m.row_stride + j * m.column_stride];
      }
    }
  }
  return {target, m.rows, columns, columns, 1};
}

// out = a b, b with its rows one after the other. What is summed over goes by in blocks, so that a
// transposed block of a stays in the cache.
void multiply(const Matrix& a, const Matrix& b, float* out, int64_t start, int64_t stop) {
  static thread_local std::vector<float> scratch;
  const int64_t block = a.column_stride == 1 ? stop - start : kInner;
  for (int64_t k = start; k < stop; k += block) {
    const Matrix left = columns_of(a, k, std::min(k + block, stop), scratch);
    at::native::cpublas::brgemm(
        a.rows, b.columns, left.columns, left.row_stride, b.row_stride, b.columns, k > start,
        left.data, b.data + k * b.row_stride, out, /*is_vnni=*/false);
  }
}

// Threads share the rows of the result, or, where there are few and a long sum, the sum.
void multiply_in_parallel(const Matrix& a, const Matrix& b, float* out) {
  const int64_t inner = a.columns, size = a.rows * b.columns;
  if (a.rows <= kRows && inner <= kShare) return multiply(a, b, out, 0, inner);
  const int64_t share = std::max(kShare, (inner + kMaxShares - 1) / kMaxShares);
  const int64_t shares = (inner + share - 1) / share;
  if (a.rows <= kRows) {
    std::vector<float> partial(size * (shares - 1));
    torch::stable::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        float* target = i == 0 ? out : partial.data() + (i - 1) * size;
        multiply(a, b, target, i * share, std::min((i + 1) * share, inner));
      }
    });
    for (int64_t i = 0; i < shares - 1; ++i) {
      for (int64_t j = 0; j < size; ++j) out[j] += partial[i * size + j];
    }
    return;
  }
  torch::stable::parallel_for(0, (a.rows + kRows - 1) / kRows, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first * kRows; i < std::min(last * kRows, a.rows); i += kRows) {
      Matrix rows = a;
      rows.data += i * a.row_stride;
      rows.rows = std::min(kRows, a.rows - i);
      multiply(rows, b, out + i * b.columns, 0, inner);
    }
  });
}

bool is_wide(const Matrix& a, const Matrix& b) {
  int64_t sizes[] = {a.rows, a.columns, b.columns};
  std::sort(sizes, sizes + 3);
  return sizes[1] > kWide;
}

// a b by oneDNN as torch enters it: it blocks large products better, which hides that it takes
// ten microseconds to begin.
AtenTensorHandle wide_product(AtenTensorHandle first, AtenTensorHandle second, const Matrix& b) {
  const int64_t sizes[] = {b.columns, b.rows}, strides[] = {b.column_stride, b.row_stride};
  int64_t offset;
  AtenTensorHandle transposed, out;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(second, &offset));
  AOTI_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(second, 2, sizes, strides, offset, &transposed));
  const Handle owner(transposed);
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__linear_pointwise(
      first, transposed, nullptr, "none", nullptr, 0, nullptr, &out));
  return out;
}

Matrix transposed(const Matrix& m) {
  return {m.data, m.columns, m.rows, m.column_stride, m.row_stride};
}

void narrow_product(const Matrix& a, const Matrix& b, float* out) {
  static thread_local std::vector<float> for_b, for_out;
  if (a.column_stride == 1 || a.rows <= b.columns) {
    multiply_in_parallel(a, columns_of(b, 0, b.columns, for_b), out);
    return;
  }
  // The transposed product, since the smaller matrix is then the one to transpose.
  for_out.resize(std::max<size_t>(for_out.size(), a.rows * b.columns));
  const Matrix left = transposed(b), right = transposed(a);
  multiply_in_parallel(left, columns_of(right, 0, right.columns, for_b), for_out.data());
  fbgemm::transpose_simd<float>(left.rows, a.rows, for_out.data(), a.rows, out, left.rows);
}

// product(a, b), as torch's dispatcher calls it through its stable interface.
void product(StableIValue* stack, uint64_t, uint64_t) {
  using torch::stable::detail::to;
  const Handle first(to<AtenTensorHandle>(stack[0])), second(to<AtenTensorHandle>(stack[1]));
  const Batch left = batch_of(first), right = batch_of(second);
  const Matrix &a = left.first, &b = right.first;
  STD_TORCH_CHECK(
      a.columns == b.rows && left.dimensions == right.dimensions && left.count == right.count,
      "lightning_rl::product: ", left.count, " x ", a.columns, " columns by ", right.count, " x ",
      b.rows, " rows");
  AtenTensorHandle out;
  if (left.dimensions == 2 && is_wide(a, b)) {
    out = wide_product(first, second, b);
  } else {
    const int64_t size = a.rows * b.columns, skip = 3 - left.dimensions;
    const int64_t sizes[] = {left.count, a.rows, b.columns}, strides[] = {size, b.columns, 1};
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        left.dimensions, sizes + skip, strides + skip, aoti_torch_dtype_float32(),
        aoti_torch_device_type_cpu(), 0, &out));
    float* target = const_cast<float*>(batch_of(out).first.data);
    if (left.count == 1) {
      narrow_product(a, b, target);
    } else {
      torch::stable::parallel_for(0, left.count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          narrow_product(left.at(i), right.at(i), target + i * size);
        }
      });
    }
  }
  stack[0] = torch::stable::detail::from(out);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(lightning_rl, library) {
  library.def("product(Tensor a, Tensor b) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lightning_rl, CPU, library) {
  library.impl("product", &product);
}
