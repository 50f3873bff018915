// A team's share of its block's shared memory as a ring of chunks, each a coming row of one or two arrays (sm_90). One
// thread keeps it full by bulk copies, so that the memory stays busy whatever the team waits for.
//
// A chunk is refilled once the whole team has met after its last look at it. Every reduction is such a meeting, so
// nobody reports back; the teams of a warp share a ring and meet in the warp. A team may take a row before it leaves
// the one before.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/team.cuh"

namespace jaxnorm::cuda {

constexpr int kMaxChunks = 64;  // of all rings of a block

// What of the rings of a launch is decided there.
struct RingShape {
  int chunks;    // of each ring
  int bytes[2];  // a chunk, of each array
};

// Which rows a team works on: `row` of every group of rows that its block comes by.
struct Rows {
  int64_t rows, cols;
  int group;       // rows of a group, one for each team of the block
  int64_t stride;  // in groups
};

// Where rows are not fetched by way of a ring.
struct NoRing {
  template <typename... Args>
  __device__ explicit NoRing(const Args&...) {}
  template <typename... Args>
  __device__ void start(const Args&...) {}
  __device__ void take() {}
  __device__ void met() {}
  __device__ void leave() {}
};

// UNEVEN: rows may begin and end anywhere. Then a chunk is all granules of 16 bytes in which its rows lie, whole:
// memory is not allocated in smaller pieces.
template <typename A, typename B, typename Team, bool UNEVEN>
class Ring {
 public:
  // By all threads of the block.
  __device__ Ring(const Team& team, const RingShape& shape, char* shared, const Rows& rows)
      : shape_(shape),
        width_(static_cast<int>(team.end - team.begin)),
        row_(team.place % kRows),
        leads_(Team::kSpansWarps ? team.rank == 0 : lane() == 0),
        row_step_(rows.stride * rows.group),
        step_(rows.stride * rows.group * rows.cols) {
    const int ring = team.place / kRows;
    full_ = barriers() + ring * shape.chunks;
    shared_ = shared + ring * shape.chunks * chunk_bytes();
    if (threadIdx.x < rows.group / kRows * shape.chunks) barriers()[threadIdx.x].init();
    __syncthreads();
  }

  // Fills the ring with every stride-th group of `rows` from `group` on, of arrays a and, if it is not null, b. The
  // block has met since the last row, if there was one.
  __device__ void start(const Team& team, const Rows& rows, int64_t group, const A* a, const B* b) {
    const int64_t row = group * rows.group + team.place - row_;
    rows_ahead_ = rows.rows - row;
    a_ = a + row * rows.cols + team.begin;
    b_ = b ? b + row * rows.cols + team.begin : nullptr;
    left_ = 0;
    if (!leads_) return;
#pragma unroll 1
    for (int i = 0; i < shape_.chunks; ++i) fill();
  }

  // Waits for the next row, or the next rows of the warp's teams.
  __device__ void take() {
    newest_ = ready_;
    full_[ready_].wait(phase_);
    if (++ready_ == shape_.chunks) {
      ready_ = 0;
      phase_ ^= 1;
    }
  }

  // The team has met since it last left a row.
  __device__ void met() {
    if (!Team::kSpansWarps || left_ == 0) return;
    --left_;
    if (leads_) fill();
  }

  // Leaves the row that was taken first of those not left yet.
  __device__ void leave() {
    if constexpr (Team::kSpansWarps) {
      ++left_;
    } else {
      __syncwarp();
      if (leads_) fill();
    }
    if (++oldest_ == shape_.chunks) oldest_ = 0;
  }

  // Where the team's columns of a row are that was taken last, or first of those not left yet. `row`: where they are in
  // the array.
  __device__ const A* newest_a(const A* row) const { return copy_of(row, chunk(newest_)); }
  __device__ const B* newest_b(const B* row) const { return copy_of(row, chunk(newest_) + shape_.bytes[0]); }
  __device__ const A* oldest_a(const A* row) const { return copy_of(row, chunk(oldest_)); }
  __device__ const B* oldest_b(const B* row) const { return copy_of(row, chunk(oldest_) + shape_.bytes[0]); }

 private:
  static constexpr int kRows = Team::kTeamsOfWarp;  // of a chunk

  __device__ static Arrival* barriers() {
    __shared__ Arrival barriers[kMaxChunks];
    return barriers;
  }

  __device__ const char* chunk(int i) const { return shared_ + i * chunk_bytes(); }

  __device__ int chunk_bytes() const { return shape_.bytes[0] + shape_.bytes[1]; }

  // Bytes of the granule in which the array's part begins before it does.
  template <typename T>
  __device__ static int bytes_before(const T* part) {
    return UNEVEN ? static_cast<int>(reinterpret_cast<uintptr_t>(part) % 16) : 0;
  }

  // Of a chunk's rows, the first is where the copy begins.
  template <typename T>
  __device__ const T* copy_of(const T* row, const char* rows) const {
    return reinterpret_cast<const T*>(rows + bytes_before(row - row_ * width_)) + row_ * width_;
  }

  template <typename T>
  __device__ static int bytes_of(const T* part, int elements) {
    const int bytes = elements * static_cast<int>(sizeof(T));
    return UNEVEN ? (bytes_before(part) + bytes + 15) / 16 * 16 : bytes;
  }

  template <typename T>
  __device__ static void copy(Arrival& full, char* to, const T* part, int elements) {
    full.copy(to, reinterpret_cast<const char*>(part) - bytes_before(part), bytes_of(part, elements));
  }

  // Starts the copy of the next rows, if there are any.
  __device__ void fill() {
    if (rows_ahead_ <= 0) return;
    const int elements = static_cast<int>(min(static_cast<int64_t>(kRows), rows_ahead_)) * width_;
    Arrival& full = full_[next_];
    char* to = shared_ + next_ * chunk_bytes();
    if (elements > 0) {
      full.expect(bytes_of(a_, elements) + (b_ ? bytes_of(b_, elements) : 0));
      copy(full, to, a_, elements);
      if (b_) copy(full, to + shape_.bytes[0], b_, elements);
    } else {
      full.expect(0);
    }
    if (++next_ == shape_.chunks) next_ = 0;
    a_ += step_;
    if (b_) b_ += step_;
    rows_ahead_ -= row_step_;
  }

  const RingShape shape_;
  const int width_;                // columns of this block
  const int row_;                  // the team's in its chunks
  const bool leads_;               // whether this thread keeps the ring full
  const int64_t row_step_, step_;  // from one chunk to the next, in rows and in elements
  int64_t rows_ahead_ = 0;         // of the arrays, from the next chunk's first row on
  const A* a_ = nullptr;           // the next chunk
  const B* b_ = nullptr;
  Arrival* full_;
  char* shared_;
  int next_ = 0;               // chunk to fill
  int ready_ = 0, phase_ = 0;  // and to wait for
  int newest_ = 0, oldest_ = 0;
  int left_ = 0;  // how many rows were left and their chunks not refilled
};

template <typename W, typename A, typename B, typename Team>
using RingOf = std::conditional_t<W::RING, Ring<A, B, Team, W::N == 1>, NoRing>;

}  // namespace jaxnorm::cuda
