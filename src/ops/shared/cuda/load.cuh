// How rows reach a thread group: x, or its sum with an addend. A Load has
//
//   Fragment                          what a thread has of a row (fragment.cuh)
//   read(p, group, rows)              reads the rows that a thread group has under way in the direct loop
//   Pipeline, pipeline(...)           the pipeline of its arrays in the pipelined loop, and
//   newest, oldest(x, ...)            the fragment of the row that was waited for last, or first of those not released
//   pass_on(p, row, col, values, remaining)   stores what else comes of the values of a row that was pipelined
//   shared_bytes(launch, ...)         on the host: prepares the launch of pipelines (RowsLaunch::with_pipelines)
#pragma once

#include "engine/cuda/row_loop.cuh"

namespace jaxnorm::cuda {

// x alone. HIDES: whether the compiler is kept from computing each vector's address from the array's beginning.
template <typename X, typename Tile, bool HIDES = (Tile::N > 1)>
struct LoadRow {
  using Fragment = Row<X, Tile>;
  template <typename Group, typename Source>
  using Pipeline = cuda::Pipeline<Group, Tile::N == 1, Source, X>;

  template <typename P, typename Group, typename Batch>
  __device__ static void read(const P& p, const Group& group, Batch& rows) {
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) {
      const X* row = static_cast<const X*>(p.x.data) + rows.row_to_read(r) * p.cols;
      if constexpr (HIDES) hide(row);
      rows.x[r].read(group, row);
    }
  }

  template <typename P, typename Group, typename Source>
  __device__ static auto pipeline(const P& p, const Group& group, const PipelineShape& shape, char* shared,
                                  const Source& rows) {
    return Pipeline<Group, Source>(group, shape, shared, rows, static_cast<const X*>(p.x.data));
  }

  template <typename P, typename Group, typename Pipeline>
  __device__ static void newest(Fragment& x, const P& p, const Group& group, const Pipeline& pipeline, int64_t row) {
    x.read(group, pipeline.template newest<0>(at(p, group, row)));
  }
  template <typename P, typename Group, typename Pipeline>
  __device__ static void oldest(Fragment& x, const P& p, const Group& group, const Pipeline& pipeline, int64_t row) {
    x.read(group, pipeline.template oldest<0>(at(p, group, row)));
  }

  template <typename P, int N>
  __device__ static void pass_on(const P&, int64_t, int64_t, const float (&)[N], int) {}

  template <typename Launch, typename P>
  static int shared_bytes(Launch& launch, const Plan& plan, const P& p, int held, int besides) {
    const PipelineArray x{sizeof(X), p.cols};
    return launch.with_pipelines(plan, p.cols, {x}, held, besides);
  }

 private:
  template <typename P, typename Group>
  __device__ static const X* at(const P& p, const Group& group, int64_t row) {
    return static_cast<const X*>(p.x.data) + (row * p.cols + group.begin);
  }
};

// x + addend, rounded to the addend's type S. The sum is stored where it is wanted, and may take the addend's place.
template <typename X, typename S, typename Tile>
struct LoadSum {
  using Fragment = SumRow<X, S, Tile>;
  template <typename Group, typename Source>
  using Pipeline = cuda::Pipeline<Group, Tile::N == 1, Source, X, S>;

  template <typename P, typename Group, typename Batch>
  __device__ static void read(const P& p, const Group& group, Batch& rows) {
#pragma unroll
    for (int r = 0; r < Batch::kRows; ++r) {
      const int64_t start = rows.row_to_read(r) * p.cols;
      const X* x = static_cast<const X*>(p.x.data) + start;
      hide(x);
      rows.x[r].read(group, x, static_cast<const S*>(p.addend.data) + start, static_cast<S*>(p.sum.data) + start,
                     p.sum.data && rows.is_there(r));
    }
  }

  template <typename P, typename Group, typename Source>
  __device__ static auto pipeline(const P& p, const Group& group, const PipelineShape& shape, char* shared,
                                  const Source& rows) {
    return Pipeline<Group, Source>(group, shape, shared, rows, static_cast<const X*>(p.x.data),
                                   static_cast<const S*>(p.addend.data));
  }

  template <typename P, typename Group, typename Pipeline>
  __device__ static void newest(Fragment& sum, const P& p, const Group& group, const Pipeline& pipeline, int64_t row) {
    const int64_t start = row * p.cols + group.begin;
    sum.read(group, pipeline.template newest<0>(static_cast<const X*>(p.x.data) + start),
             pipeline.template newest<1>(static_cast<const S*>(p.addend.data) + start));
  }
  template <typename P, typename Group, typename Pipeline>
  __device__ static void oldest(Fragment& sum, const P& p, const Group& group, const Pipeline& pipeline, int64_t row) {
    const int64_t start = row * p.cols + group.begin;
    sum.read(group, pipeline.template oldest<0>(static_cast<const X*>(p.x.data) + start),
             pipeline.template oldest<1>(static_cast<const S*>(p.addend.data) + start));
  }

  template <typename P, int N>
  __device__ static void pass_on(const P& p, int64_t row, int64_t col, const float (&values)[N], int remaining) {
    if (p.sum.data) store<true>(static_cast<S*>(p.sum.data) + row * p.cols + col, pack<S>(values), remaining);
  }

  template <typename Launch, typename P>
  static int shared_bytes(Launch& launch, const Plan& plan, const P& p, int held, int besides) {
    const PipelineArray x{sizeof(X), p.cols}, addend{sizeof(S), p.cols};
    return launch.with_pipelines(plan, p.cols, {x, addend}, held, besides);
  }
};

// x, or x + addend, as FLOATS, which read either and hold it unpacked. Which it is is seen at run time: it only
// matters to how a row is read, where no branch stands behind which the compiler has more under way than there are
// registers for.
template <typename X, typename FLOATS>
struct LoadFloats {
  using Fragment = FLOATS;

  template <typename P, typename Group, typename Batch>
  __device__ static void read(const P& p, const Group& group, Batch& rows) {
    const auto each = [&](auto read_row) {
#pragma unroll
      for (int r = 0; r < Batch::kRows; ++r) read_row(rows.x[r], rows.row_to_read(r) * p.cols, rows.is_there(r));
    };
    const X* const x_data = static_cast<const X*>(p.x.data);
    if (p.addend.data) {
      each([&](Fragment& x, int64_t start, bool is_there) {
        x.template read<X>(group, x_data + start, static_cast<const X*>(p.addend.data) + start,
                           static_cast<X*>(p.sum.data) + start, is_there);
      });
    } else {
      each([&](Fragment& x, int64_t start, bool) { x.template read<X>(group, x_data + start); });
    }
  }
};

}  // namespace jaxnorm::cuda
