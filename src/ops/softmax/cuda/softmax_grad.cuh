// The gradients of softmax and log-softmax: one sum over a row of two arrays, both of which a thread has in registers
// between the sum and its results, and dx from both and the sum.
#pragma once

#include "engine/cuda/row_loop.cuh"
#include "ops/shared/cuda/logits.cuh"
#include "ops/shared/cuda/mask.cuh"
#include "ops/shared/logits.h"
#include "ops/softmax/call.h"
#include "ops/softmax/cuda/regimes.h"

namespace jaxnorm::cuda {

// A thread's vectors of one of the arrays. `mask` says how many columns of a vector are read.
template <typename T, typename Tile>
class HeldRow {
 public:
  // `row`: as of Row<T>. A pipeline may fill its place again once the thread group has met.
  template <typename Group, typename Mask>
  __device__ void read(const Group& group, const T* row, const Mask& mask) {
    row_ = row;
    if constexpr (Tile::UNALIGNED) {
      read_words<Tile>(group, row, packed_);
    } else if constexpr (Tile::KEPT) {
      if constexpr (Tile::PIPELINED) row += first_of_thread<Tile>(group);
      for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
        if constexpr (Tile::PIPELINED) {
          packed_[vec] = remaining > 0 ? load_shared<Tile::N>(row + vec * Tile::STRIDE) : Packed<T, Tile::N>{};
        } else if constexpr (Tile::ALIGNED && Tile::N > 1) {
          packed_[vec] = load_now<Tile::N>(row + col, mask.within(col, remaining));
        } else {
          packed_[vec] = load<Tile::ALIGNED, Tile::N>(row + col, mask.within(col, remaining));
        }
      });
    }
  }

  // Columns past the row's end are zero.
  template <typename Mask>
  __device__ void get(int vec, int64_t col, int remaining, const Mask& mask, float (&to)[Tile::N]) const {
    if constexpr (Tile::KEPT) {
      unpack(packed_[vec], to);
    } else {
      unpack(load<Tile::ALIGNED, Tile::N>(row_ + col, mask.within(col, remaining)), to);
    }
  }

  // `zero`: as of unpack_again.
  __device__ void unpack_again(uint32_t zero) {
    if constexpr (Tile::KEPT && Tile::N > 1 && sizeof(T) < 4)
#pragma unroll
      for (auto& packed : packed_)
#pragma unroll
        for (uint32_t& word : packed.word) word ^= zero;
  }

 private:
  const T* row_ = nullptr;
  Packed<T, Tile::N> packed_[Tile::KEPT ? Tile::VECTORS : 1];
};

// Of an array whose type is seen at run time: as floats. All of a thread's vectors stand behind one branch.
template <typename Tile>
class HeldRow<AnyElement, Tile> {
 public:
  template <typename Group, typename Mask>
  __device__ void read(const Group& group, const Input& row, const Mask& mask) {
    row_ = row;
    if constexpr (Tile::KEPT)
      with_type(row.dtype, [&](auto* type) {
        const auto* const data = static_cast<const std::remove_pointer_t<decltype(type)>*>(row.data);
        for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
          unpack(load<Tile::ALIGNED, Tile::N>(data + col, mask.within(col, remaining)), value_[vec]);
        });
      });
  }

  template <typename Mask>
  __device__ void get(int vec, int64_t col, int remaining, const Mask& mask, float (&to)[Tile::N]) const {
    if constexpr (Tile::KEPT) {
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) to[i] = value_[vec][i];
    } else {
      load_floats<Tile::ALIGNED>(row_, col, mask.within(col, remaining), to);
    }
  }

  __device__ void unpack_again(uint32_t) {}

 private:
  Input row_;
  float value_[Tile::KEPT ? Tile::VECTORS : 1][Tile::N];
};

// A call as the kernels see it. second: y of softmax, x of log-softmax.
struct SoftmaxGradCall {
  int64_t rows, cols;
  Input dy, second;
  const float *log_sum, *top;
  Output dx;
  Scale scale;
  MaskLaunch mask;
  uint32_t zero = 0;  // as the compiler does not know
  int window = 0;

  // Writes zeros beside the window of a row; dx is of this type, or of any.
  template <typename T>
  __device__ void fill_outside(const Rounds& columns, int64_t row) const {
    const auto fill = [&](auto* type) {
      cuda::fill_outside(columns, static_cast<decltype(type)>(dx.data) + row * cols, cols, 0.0f);
    };
    if constexpr (std::is_same_v<T, AnyElement>) {
      with_type(dx.dtype, fill);
    } else {
      fill(static_cast<T*>(nullptr));
    }
  }
};

// dx = scale * y * (dy - sum(dy * y))
struct SoftmaxDx {
  struct Scalars {};
  __device__ static Scalars fetch(const SoftmaxGradCall&, int64_t) { return {}; }

  template <typename Tile>
  __device__ static void add(Sum<Tile>& sum, const float (&dy)[Tile::N], const float (&y)[Tile::N]) {
    sum.add_products(dy, y);
  }

  __device__ static constexpr bool has_most(Scalars) { return false; }
  template <typename, bool>
  __device__ static float dx(Scalars, const Scale& scale, float sum, float dy, float y) {
    return y * (scale.whole * (dy - sum));
  }
};

// dx = scale * (dy - exp(z - top - log_sum) * sum(dy)),  z = x * scale
struct LogSoftmaxDx {
  struct Scalars {
    float log_sum, origin;
  };
  __device__ static Scalars fetch(const SoftmaxGradCall& p, int64_t row) {
    return {__ldg(p.log_sum + row), p.top ? origin_of(__ldg(p.top + row)) : 0.0f};
  }

  template <typename Tile>
  __device__ static void add(Sum<Tile>& sum, const float (&dy)[Tile::N], const float (&)[Tile::N]) {
    sum.add(dy);
  }

  // Whether a share may be so large: none exceeds the top's.
  __device__ static bool has_most(Scalars s) { return s.log_sum < -kMostOfRow; }
  template <typename T, bool HAS_MOST>
  __device__ static float dx(Scalars s, const Scale& scale, float sum, float dy, float x) {
    const float difference = fmaf(x, scale.power, -s.origin), log_share = fmaf(difference, scale.unit, -s.log_sum);
    if constexpr (HAS_MOST)
      if (log_share > kMostOfRow) return scale.whole * fmaf(-exponential_less_1(log_share), sum, dy - sum);
    float share;
    if constexpr (sizeof(T) == 2) {
      // A multiplication less, for which the rounding of half types has room.
      share = exp2_estimate(fmaf(difference, scale.unit * kLog2e, -s.log_sum * kLog2e));
    } else {
      share = exponential(log_share);
    }
    return scale.whole * fmaf(-share, sum, dy);
  }
};

// What a thread has of a row of y or the logits, and of dy.
template <typename Op, typename Tile>
class BothRows {
  using Mask = typename Op::Mask;
  using T = typename Op::Element;

 public:
  typename Op::Dx::Scalars scalars;

  // From memory.
  template <typename Group>
  __device__ void read(const SoftmaxGradCall& p, const Group& group, int64_t row) {
    fetch(p, row);
    const auto& columns = this->columns(group);
    dy_.read(columns, row_at<T>(p.dy, row * p.cols), mask_);
    second_.read(columns, row_at<T>(p.second, row * p.cols), mask_);
    if constexpr (Mask::kHasWindow) p.fill_outside<T>(columns, row);  // while both are under way
  }

  // From a pipeline.
  template <typename Group>
  __device__ void read(const SoftmaxGradCall& p, const Group& group, int64_t row, const T* dy, const T* second) {
    fetch(p, row);
    dy_.read(group, dy, mask_);
    second_.read(group, second, mask_);
  }

  // Has the row unpacked once more for its results: the compiler would keep what was unpacked for the sum, for which
  // there are no registers. `zero` is not known before the sum is.
  __device__ void unpack_again(uint32_t zero) {
    dy_.unpack_again(zero);
    second_.unpack_again(zero);
    if constexpr (Mask::kMasks) mask_.length += zero;
  }

  // Those through which a thread group goes.
  template <typename Group>
  __device__ decltype(auto) columns(const Group& group) const {
    return mask_.template columns<Tile::N>(group);
  }

  // Columns past the row's end are zero. Returns which columns count.
  __device__ auto get(int vec, int64_t col, int remaining, float (&dy)[Tile::N], float (&second)[Tile::N]) const {
    dy_.get(vec, col, remaining, mask_, dy);
    second_.get(vec, col, remaining, mask_, second);
    return mask_.template counted<Tile::ALIGNED, Tile::N>(col, remaining);
  }

 private:
  __device__ void fetch(const SoftmaxGradCall& p, int64_t row) {
    scalars = Op::Dx::fetch(p, row);
    if constexpr (Mask::kMasks) mask_ = Mask::of(p.mask, row, p.cols, p.window);
  }

  Mask mask_;
  HeldRow<T, Tile> dy_, second_;
};

template <typename Op, typename Tile>
struct LoadPair {
  using Fragment = BothRows<Op, Tile>;
  using T = typename Op::Element;

  template <typename Group, typename Batch>
  __device__ static void read(const SoftmaxGradCall& p, const Group& group, Batch& rows) {
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) rows.x[r].read(p, group, rows.row_to_read(r));
  }

  template <typename Group>
  __device__ static auto pipeline(const SoftmaxGradCall& p, const Group& group, const PipelineShape& shape,
                                  char* shared, const Rows& rows) {
    return Pipeline<Group, Tile::N == 1, Rows, T, T>(group, shape, shared, rows, row_at<T>(p.dy, 0),
                                                     row_at<T>(p.second, 0));
  }

  template <typename Group, typename Pipeline>
  __device__ static void newest(Fragment& x, const SoftmaxGradCall& p, const Group& group, const Pipeline& pipeline,
                                int64_t row) {
    const int64_t at = row * p.cols + group.begin;
    x.read(p, group, row, pipeline.template newest<0>(row_at<T>(p.dy, at)),
           pipeline.template newest<1>(row_at<T>(p.second, at)));
  }

  template <typename Launch>
  static int shared_bytes(Launch& launch, const Plan& plan, const SoftmaxGradCall& p, int held, int besides) {
    const PipelineArray array{sizeof(T), p.cols};
    return launch.with_pipelines(plan, p.cols, {array, array}, held, besides);
  }
};

template <typename Dx>
struct PairSum {
  using Part = Sums<1>;
  struct Statistics {
    float sum;
  };

  template <typename Tile, typename Row, typename Group>
  __device__ static Part warp_part(const Row& row, const Group& group, float) {
    Sum<Tile> sum;
    for_each_vector<Tile>(row.columns(group), [&](int vec, auto col, int remaining) {
      float dy[Tile::N], second[Tile::N];
      const auto counted = row.get(vec, col, remaining, dy, second);
#pragma unroll
      for (int i = 0; i < Tile::N; ++i)
        if (!counted[i]) dy[i] = second[i] = 0;
      Dx::template add<Tile>(sum, dy, second);
    });
    return {{static_cast<float>(group.warp_sum(sum.value()))}};
  }

  template <typename Whole>
  __device__ static Statistics finish(const SoftmaxGradCall&, const Whole& whole, float) {
    return {whole.value[0]};
  }
  __device__ static void write(const SoftmaxGradCall&, const Statistics&, int64_t) {}
};

// For both loops.
template <typename Op, typename Tile>
struct WriteDx : RowEpilogue {
  template <typename... Args>
  __device__ explicit WriteDx(const Args&...) {}

  template <typename Group, typename Rows>
  __device__ __forceinline__ void finish(const SoftmaxGradCall& p, const RowsLaunch&, const Group& group,
                                         Rows& rows) const {
#pragma unroll
    for (int r = 0; r < Rows::kRows; ++r) {
      if (!rows.is_written(r)) break;
      write(p, rows.x[r].columns(group), rows.s[r].sum, rows.row(r), rows.x[r]);
    }
  }
  template <typename Load, typename Group, typename Statistics, typename Row>
  __device__ __forceinline__ void finish(const SoftmaxGradCall& p, const RowsLaunch&, const Group& group,
                                         const Statistics& s, int64_t row, Row& x) const {
    write(p, group, s.sum, row, x);
  }

 private:
  using T = typename Op::Element;
  static constexpr bool kAny = std::is_same_v<T, AnyElement>;

  template <typename Group, typename Row>
  __device__ __forceinline__ static void write(const SoftmaxGradCall& p, const Group& group, float sum, int64_t row,
                                               Row& x) {
    x.unpack_again(min(p.zero, __float_as_uint(sum)));
    if (Op::Dx::has_most(x.scalars)) {
      write_as<true>(p, group, sum, row, x);
    } else {
      write_as<false>(p, group, sum, row, x);
    }
  }

  template <bool HAS_MOST, typename Group, typename Row>
  __device__ __forceinline__ static void write_as(const SoftmaxGradCall& p, const Group& group, float sum, int64_t row,
                                                  const Row& x) {
    const int64_t at = row * p.cols;
    const auto values_of = [&](int vec, auto col, int remaining, float (&dx)[Tile::N]) {
      float dy[Tile::N], second[Tile::N];
      const auto counted = x.get(vec, col, remaining, dy, second);
#pragma unroll
      for (int i = 0; i < Tile::N; ++i)
        dx[i] = counted[i] ? Op::Dx::template dx<T, HAS_MOST>(x.scalars, p.scale, sum, dy[i], second[i]) : 0.0f;
    };
    if constexpr (kAny) {
      with_type(p.dx.dtype, [&](auto* type) { store_row(group, p, at, type, values_of); });
    } else {
      store_row(group, p, at, static_cast<T*>(nullptr), values_of);
    }
  }

  template <typename Group, typename Y, typename F>
  __device__ __forceinline__ static void store_row(const Group& group, const SoftmaxGradCall& p, int64_t at, Y*,
                                                   const F& values_of) {
    Y* dx = static_cast<Y*>(p.dx.data) + at;
    // Or the compiler would keep its distance from the rows that were read, for every vector.
    hide(dx);
    [[maybe_unused]] UnalignedWriter<Y, Tile> writer;
    if constexpr (Tile::UNALIGNED) writer = {group, dx};
    for_each_vector<Tile>(group, [&](int vec, auto col, int remaining) {
      float values[Tile::N];
      values_of(vec, col, remaining, values);
      if constexpr (Tile::UNALIGNED) {
        writer.write(vec, col, remaining, pack<Y>(values), true);
      } else {
        store<Tile::ALIGNED>(dx + col, pack<Y>(values), remaining);
      }
    });
  }
};

// T: of both arrays and of dx; AnyElement: each has a type of its own, in vectors of f32. Of masked rows only columns
// that come before their length are read, which pipelines do not do.
template <typename Dx_, typename T, typename MASK>
struct SoftmaxGradOp : RowOp<std::conditional_t<std::is_same_v<T, AnyElement>, float, T>, PairSum<Dx_>, 2> {
  using Params = SoftmaxGradCall;
  using Dx = Dx_;
  using Element = T;
  using Mask = MASK;
  static constexpr bool kHolds = true, kOneType = !std::is_same_v<T, AnyElement>;

  using Base = RowOp<std::conditional_t<kOneType, T, float>, PairSum<Dx_>, 2>;
  template <typename R, Access ACCESS>
  static constexpr int kRegisters = R::kCluster > 1 && R::kVectors == 8 ? 128 : Base::template kRegisters<R, ACCESS>;

  template <typename Tile>
  using Load = LoadPair<SoftmaxGradOp, Tile>;
  template <typename R, typename Tile>
  using Epilogue = WriteDx<SoftmaxGradOp, Tile>;
  template <typename R, typename Tile>
  using PipelinedEpilogue = WriteDx<SoftmaxGradOp, Tile>;
};

// By which access a call goes in a regime. What is rare has no pipelines, and goes by elements where it is not aligned:
// by the kernel for masked rows, which adds up in the same order.
template <typename Op, typename R>
cudaError_t launch_rows(const RowLauncher<Op, R>& rows, bool is_aligned, bool is_divided) {
  constexpr bool kUsual = !Op::Mask::kMasks && Op::kOneType, kHalf = sizeof(typename Op::Stream) == 2;
  if constexpr (kUsual && R::kVectors != kStreamed) {
    if constexpr (R::kCluster > 1) {
      cudaError_t error = cudaErrorNotSupported;
      if (is_aligned) error = rows.template pipelined<Access::pipelined>({});
      // Elements take a register each: there is room for so many.
      if constexpr (R::kVectors * kVector<typename Op::Stream> <= 32)
        if (!is_divided) error = rows.template pipelined<Access::pipelined_scalar>({});
      if (error != cudaErrorNotSupported) return error;
    } else if constexpr (kHalf) {
      if (!is_aligned) return rows.template direct<Access::unaligned>();
    } else {
      if (!is_divided) return rows.template direct<Access::scalar>();
    }
  }
  if (is_aligned) return rows.template direct<Access::vectors>();
  using Any = std::conditional_t<Op::Mask::kMasks, Op, SoftmaxGradOp<typename Op::Dx, typename Op::Element, RowMask>>;
  if constexpr (!kUsual || R::kVectors == kStreamed || R::kCluster > 1 || !kHalf)
    return RowLauncher<Any, R>{rows.p, rows.plan, rows.launch, rows.stream}.template direct<Access::elementwise>();
  return cudaErrorInvalidValue;  // not reached: it went by unaligned vectors
}

template <typename Op>
cudaError_t launch_softmax_grad(const SoftmaxGradCall& p, const Mask& mask, cudaStream_t stream) {
  constexpr int N = kVector<typename Op::Stream>;
  constexpr Dtype kStream = kDtype<typename Op::Stream>;
  constexpr bool kHasWindow = Op::Mask::kHasWindow;
  using Regimes = std::conditional_t<kHasWindow, WindowRegimes, PairRegimes<size_of(kStream)>>;
  const Plan plan =
      kHasWindow ? make_window_plan(kStream, p.cols) : make_pair_plan(kStream, p.cols, current_device().max_cluster());
  const bool is_divided = p.cols % N == 0;
  const bool is_aligned = is_divided && are_aligned<N>(p.dy, p.second, p.dx) && is_aligned_for<N>(mask);
  return with_regime<Regimes>(plan, [&](auto regime) {
    RowsLaunch launch(plan, p.cols, N, {});
    return launch_rows(RowLauncher<Op, decltype(regime)>{p, plan, launch, stream}, is_aligned, is_divided);
  });
}

template <typename Dx, typename T>
cudaError_t softmax_grad_as(const SoftmaxGradCall& p, const Mask& mask, cudaStream_t stream) {
  if (mask.has_window()) return launch_softmax_grad<SoftmaxGradOp<Dx, T, WindowMask>>(p, mask, stream);
  if constexpr (!std::is_same_v<T, AnyElement>)
    if (!mask) return launch_softmax_grad<SoftmaxGradOp<Dx, T, NoMask>>(p, mask, stream);
  return launch_softmax_grad<SoftmaxGradOp<Dx, T, RowMask>>(p, mask, stream);
}

template <typename T>
cudaError_t softmax_grad_of(const SoftmaxBackward& p, cudaStream_t stream) {
  return softmax_grad_as<SoftmaxDx, T>(
      {p.rows, p.cols, p.dy, p.y, nullptr, nullptr, p.dx, p.scale, MaskLaunch(p.mask), 0, p.mask.window}, p.mask,
      stream);
}

template <typename T>
cudaError_t log_softmax_grad_of(const LogSoftmaxBackward& p, cudaStream_t stream) {
  return softmax_grad_as<LogSoftmaxDx, T>(
      {p.rows, p.cols, p.dy, p.x, p.log_sum, p.top, p.dx, p.scale, MaskLaunch(p.mask), 0, p.mask.window}, p.mask,
      stream);
}

}  // namespace jaxnorm::cuda
