// The forward with a quantised result. Rows are walked as in the forward without, by the same plan, so that the y that
// is quantised has the same bits.
#pragma once

#include "cuda/ops/quantized_any.cuh"

namespace jaxnorm::cuda {

// What is done with a row of X, to which one of X may be added.
template <typename X, bool ADDS>
struct Quantized {
  static constexpr bool kAdds = ADDS, kGates = false, kFirst = false;
  template <typename>
  using Result = X;
};

// Teams whose rows do not come by way of a pipeline. ROWS: that a thread group has under way at once. Whether something
// is added is seen at run time: it only matters to how a row is read, and where no branch stands behind that the
// compiler has more under way than there are registers for.
template <Kind KIND, typename X, typename R, typename Tile, int ROWS, typename Epilogue>
__device__ __forceinline__ void quantized_rows(const Forward& p, const RowsLaunch& launch, const Epilogue& epilogue) {
  using Threads = ThreadGroup<R::kThreads, Part<KIND>, R::kCluster>;
  Threads group(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  UnderWay<std::conditional_t<Tile::KEPT, Floats<Tile>, Row<X, Tile>>, X, ROWS> rows;
  rows.block_rows = R::kThreads == kWholeBlock ? 1 : launch.rows_per_block;
  rows.first = group.index * ROWS * rows.block_rows + group.place;
  if (rows.first >= p.rows) return;

  const auto read = [&](auto read_row) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      // Past the last row, the first one again.
      const int64_t row = rows.row(r), start = (row < p.rows ? row : rows.first) * p.cols;
      rows.memory[r] = static_cast<const X*>(p.x.data) + start;
      read_row(rows.x[r], rows.memory[r], start, row < p.rows);
    }
  };
  if constexpr (!Tile::KEPT) {
    read([&](auto& x, const X* memory, int64_t, bool) { x.read(group, memory); });
  } else if (p.residual.data) {
    read([&](auto& x, const X* memory, int64_t start, bool wanted) {
      x.template read<X>(group, memory, static_cast<const X*>(p.residual.data) + start,
                         static_cast<X*>(p.sum.data) + start, wanted);
    });
  } else {
    read([&](auto& x, const X* memory, int64_t, bool) { x.template read<X>(group, memory); });
  }
  epilogue(group, rows, [&] {
    const float cols = warp_cols<Tile>(group);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      group.publish(warp_part<KIND, Tile>(rows.x[r], group, cols));
      rows.s[r] = statistics<KIND>(p, group, rows.row(r));
    }
  });
}

// Clusters whose rows come by way of pipelines. While the blocks exchange the largest magnitude of one row the sums of
// the next are under way, and the other way round.
template <Kind KIND, typename X, typename R, bool ADDS>
__device__ __forceinline__ void quantized_pipelined(const Forward& p, const RowsLaunch& launch, char* shared) {
  using Tile = Tiling<X, R, Access::pipelined>;
  using Threads = ThreadGroup<R::kThreads, Part<KIND>, R::kCluster>;
  Threads group(launch.threads_per_row, p.cols, launch.span, launch.reciprocal_cols);
  const Rows rows = launch.backwards(group.index, 1);
  const X* const x_data = static_cast<const X*>(p.x.data);
  const X* const residual_data = static_cast<const X*>(p.residual.data);
  auto pipeline = [&] {
    if constexpr (ADDS) {
      return PipelineOf<Tile, Threads, X, X>(group, launch.pipeline, shared, rows, x_data, residual_data);
    } else {
      return PipelineOf<Tile, Threads, X>(group, launch.pipeline, shared, rows, x_data);
    }
  }();
  // Beside more values than these, or sums on their way, there is no room for scale in registers.
  using Scale = std::conditional_t<Tile::VECTORS * Tile::N <= (ADDS ? 16 : 32), RegisterScale<X, Tile>,
                                   LoadedScale<X, Tile, Threads, false>>;
  Scale scale(group, p);
  // Loaded late, each row would wait for it.
  std::conditional_t<KIND == Kind::layer, SharedBias<X, Tile>, LateBias<Tile>> bias(
      group, p.bias, shared + launch.pipeline.bytes_of_pipeline<ADDS ? 2 : 1>());
  pipeline.acquire_rest();
  scale.arrive();
  bias.arrive();
  const float cols = warp_cols<Tile>(group);
  RowOf<X, Tile, Quantized<X, ADDS>> x;
  const auto sum_up = [&](int64_t row) {
    pipeline.wait();
    const int64_t start = row * p.cols + group.begin;
    if constexpr (ADDS) {
      x.read(group, pipeline.template newest<0>(x_data + start), pipeline.template newest<1>(residual_data + start));
    } else {
      x.read(group, pipeline.template newest<0>(x_data + start));
    }
    group.publish(warp_part<KIND, Tile>(x, group, cols));
    pipeline.synced();
  };

  const int64_t first_row = rows.start(0);
  if (first_row >= 0) sum_up(first_row);
  for (int64_t row = first_row; row >= 0; row += rows.step) {
    const auto number = [&](int) { return row; };
    const Statistics s = statistics<KIND>(p, group, row);
    Floats<Tile> floats[1];
    Values<Tile, 1> values{floats};
    for_each_vector<Tile>(group, [&](int slot, auto first, int left) {
      float (&v)[Tile::N] = floats[0].v[slot];
      x.get(slot, first, left, v);
      if constexpr (ADDS) store<true>(static_cast<X*>(p.sum.data) + row * p.cols + first, pack<X>(v), left);
#pragma unroll
      for (int i = 0; i < Tile::N; ++i) v[i] = x_hat<KIND>(v[i], s);
    });
    pipeline.release();
    values.template finish<KIND, X>(p, group, scale, bias);
    values.publish(p, group);
    if (row + rows.step >= 0) sum_up(row + rows.step);
    values.rescale(p, group, number);
    values.store(p, group, number);
  }
}

// How many blocks a multiprocessor shall hold. A thread has up to 32 values in registers, of half types 64 where it has
// 8 vectors. Where many rows wait for their turn more warps help more than registers for what else there is, which a
// roomy kernel has: few rows want it, and a residual.
template <Kind KIND, typename X, typename R, bool ROOMY>
struct QuantizedOccupancy {
  static constexpr bool kHalf = sizeof(X) == 2, kRowsShare = R::kThreads > 0;
  static constexpr int kRows = R::template kRows<>, kValues = kRows * R::kVectors * kVector<X>;
  // Layer norm's sums would spill, but of one row a warp.
  static constexpr bool kManySums = KIND == Kind::layer && !(R::kThreads == kWarp && kRows == 1);
  static constexpr int kRegisters = kValues > 32            ? (R::kMost == kHalfTypeThreads ? 96 : 128)
                                    : !kRowsShare && !kHalf ? (kValues <= 16 ? 40 : 64)
                                    : ROOMY                 ? 64
                                    : !kHalf                ? 40
                                    : kRowsShare            ? (kManySums ? 64 : 56)
                                                            : 48;
  static constexpr int kBlocks = resident_blocks(kRegisters, R::kMost);
  // Whether there is room for the packed scale besides. The sums of layer norm leave none.
  static constexpr int kWithScale = R::kVectors * kVector<X> * (kRows + 1) * sizeof(X) / 4;
  static constexpr bool kHoldsScale =
      KIND == Kind::rms && ((kRegisters == 64 && kWithScale <= 32) || kRegisters == 128);
};

template <Kind KIND, typename X, typename R, bool ROOMY>
__global__ void __launch_bounds__(R::kMost, QuantizedOccupancy<KIND, X, R, ROOMY>::kBlocks)
    quantized_rows_kernel(const __grid_constant__ Forward p, const __grid_constant__ RowsLaunch launch) {
  using Tile = Tiling<X, R, Access::vectors>;
  using Occupancy = QuantizedOccupancy<KIND, X, R, ROOMY>;
  quantized_rows<KIND, X, R, Tile, Occupancy::kRows>(p, launch,
                                                     QuantizeSpecialised<KIND, X, Tile, Occupancy::kHoldsScale>{p});
}

template <Kind KIND, typename X, typename R, bool ADDS>
__global__ void __launch_bounds__(R::kMost)
    quantized_pipelined_kernel(const __grid_constant__ Forward p, const __grid_constant__ RowsLaunch launch) {
  if constexpr (kHasClusters) quantized_pipelined<KIND, X, R, ADDS>(p, launch, dynamic_shared());
}

// Everything else.
template <Kind KIND, typename X, typename R, Access ACCESS>
__global__ void __launch_bounds__(kMaxThreads)
    quantized_generic_kernel(const __grid_constant__ Forward p, const __grid_constant__ RowsLaunch launch) {
  if constexpr (R::kCluster == 1 || kHasClusters) {
    using Tile = RereadTiling<X, R, ACCESS>;
    quantized_rows<KIND, X, R, Tile, 1>(p, launch, QuantizeGeneric<KIND, Tile>{p});
  }
}

template <Kind KIND, typename X>
class QuantizedForward {
 public:
  QuantizedForward(const Forward& p, cudaStream_t stream)
      : p_(p),
        stream_(stream),
        plan_(make_plan(Op::forward, KIND, kDtype<X>, p.cols, current_device().max_cluster())),
        launch_(plan_, p.cols, N, p.weight_rows) {}

  cudaError_t run() {
    if (plan_.vectors != kStreamed && aligned_ && is_specialised()) {
      const cudaError_t error =
          with_forward_regime<X>(plan_, true, [&](auto regime) { return run_specialised<decltype(regime)>(); });
      if (error != cudaErrorNotSupported) return error;
    }
    if (p_.residual) return cudaErrorNotSupported;
    return with_forward_regime<X>(plan_, false, [&](auto regime) { return run_generic<decltype(regime)>(); });
  }

 private:
  static constexpr int N = kVector<X>;

  static bool is_aligned(const Input& array) { return aligned_for<N>(array.dtype, array.data); }

  // Weights of x's type or f32, a bias only in layer norm, and beside a scale of its type.
  bool is_specialised() const {
    const auto is_of = [](const Input& weight) {
      return !weight || weight.dtype == kDtype<X> || weight.dtype == Dtype::f32;
    };
    const bool bias = !p_.bias || (KIND == Kind::layer && p_.scale && p_.bias.dtype == p_.scale.dtype);
    return bias && is_of(p_.scale) && is_of(p_.quantized.smooth) &&
           (!p_.residual || (p_.x.dtype == kDtype<X> && p_.residual.dtype == kDtype<X>));
  }

  // Whether the forward without quantisation goes by elements, as it does where vectors do not divide a row of a call
  // known to the compiler. Its sums are then of another order.
  bool goes_by_elements() const {
    Forward f = p_;
    f.y = {nullptr, Dtype::f32};
    if (p_.cols % N == 0 || plan_.vectors == kStreamed) return false;
    if (!cuda::is_specialised<KIND, X>(f)) return false;
    RowsLaunch launch = launch_;
    return plan_.blocks_per_row == 1 || launch.with_pipelines(plan_, p_.cols, {{sizeof(X), p_.cols}}, 2) > 0;
  }

  // `at_once`: rows that a thread group has under way.
  int64_t thread_groups(int at_once) const { return plan_.blocks_of(p_.rows, at_once); }

  template <typename R>
  cudaError_t run_specialised() {
    if constexpr (R::kVectors == kStreamed) {
      return cudaErrorNotSupported;
    } else if constexpr (R::kCluster == 1) {
      const int64_t blocks = thread_groups(R::template kRows<>);
      constexpr int roomy = QuantizedOccupancy<KIND, X, R, true>::kRegisters;
      if constexpr (roomy > QuantizedOccupancy<KIND, X, R, false>::kRegisters) {
        const int64_t at_once = resident_blocks(roomy, plan_.block_threads()) * current_device().multiprocessors;
        if (p_.residual || blocks <= at_once) return launch_rows<R, true>(blocks);
      }
      return launch_rows<R, false>(blocks);
    } else {
      return p_.residual ? launch_pipelined<R, true>() : launch_pipelined<R, false>();
    }
  }

  template <typename R, bool ROOMY>
  cudaError_t launch_rows(int64_t blocks) {
    return launch_groups(quantized_rows_kernel<KIND, X, R, ROOMY>, plan_, blocks, 0, stream_, p_, launch_);
  }

  template <typename R, bool ADDS>
  cudaError_t launch_pipelined() {
    const int bias = plan_.block_threads() * SharedBias<X, Tiling<X, R, Access::pipelined>>::bytes(p_.bias);
    const int bytes =
        ADDS ? launch_.with_pipelines(plan_, p_.cols, {{sizeof(X), p_.cols}, {sizeof(X), p_.cols}}, 1, bias)
             : launch_.with_pipelines(plan_, p_.cols, {{sizeof(X), p_.cols}}, 1, bias);
    if (bytes == 0) return cudaErrorNotSupported;
    const int64_t at_once = std::min<int64_t>(thread_groups(1), current_device().groups_at_once(plan_.blocks_per_row));
    launch_.take_turns(at_once, p_.rows);
    return launch_groups(quantized_pipelined_kernel<KIND, X, R, ADDS>, plan_, at_once, bytes, stream_, p_, launch_);
  }

  template <typename R>
  cudaError_t run_generic() {
    const auto launch_as = [&](auto access) {
      using Any = Regime<R::kThreads, R::kVectors, R::kCluster>;  // of however many threads
      return launch_groups(quantized_generic_kernel<KIND, X, Any, decltype(access)::value>, plan_, thread_groups(1), 0,
                           stream_, p_, launch_);
    };
    if constexpr (R::kVectors == kStreamed) {
      if (aligned_) return launch_as(AccessAs<Access::vectors>{});
    } else if constexpr (std::is_same_v<X, float>) {  // of half types f32 is not a type that calls are known for
      if (goes_by_elements()) return launch_as(AccessAs<Access::scalar>{});
    }
    return launch_as(AccessAs<Access::elementwise>{});
  }

  const Forward& p_;
  const cudaStream_t stream_;
  const Plan plan_;
  RowsLaunch launch_;
  const bool aligned_ = p_.cols % N == 0 && is_aligned(p_.x) && is_aligned(p_.residual) && is_aligned(p_.scale) &&
                        is_aligned(p_.bias) && is_aligned(p_.quantized.smooth) &&
                        aligned_for<N>(p_.sum.dtype, p_.sum.data) &&
                        aligned_for<N>(p_.quantized.values.dtype, p_.quantized.values.data);
};

template <typename X>
cudaError_t forward_quantized_of(const Forward& p, cudaStream_t stream) {
  return p.kind == Kind::rms ? QuantizedForward<Kind::rms, X>(p, stream).run()
                             : QuantizedForward<Kind::layer, X>(p, stream).run();
}

}  // namespace jaxnorm::cuda
