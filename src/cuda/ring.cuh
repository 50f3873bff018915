// A team's share of its block's shared memory as a ring of chunks, each a coming row of up to three arrays (sm_90). One
// thread keeps it full by bulk copies, so that the memory stays busy whatever the team waits for.
//
// A chunk is refilled once the whole team has met after its last look at it. Every reduction is such a meeting, so
// nobody reports back; the teams of a warp share a ring and meet in the warp. A team may take a row before it leaves
// the one before.
#pragma once

#include <climits>
#include <tuple>

#include "cuda/cluster.cuh"
#include "cuda/team.cuh"

namespace jaxnorm::cuda {

constexpr int kMaxChunks = 64;  // of all rings of a block
constexpr int kMaxArrays = 3;   // of which a chunk has a row

// What of the rings of a launch is decided there.
struct RingShape {
  int chunks;              // of each ring
  int bytes[kMaxArrays];   // a chunk, of each array; 0: there are fewer
  int stride[kMaxArrays];  // of the array, in elements, from a row to the next: in a chunk they lie as they do there

  // Of a chunk before those of an array.
  __device__ int bytes_before(int array) const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < array; ++i) sum += bytes[i];
    return sum;
  }

  template <int ARRAYS>
  __device__ int bytes_of_ring() const {
    return chunks * bytes_before(ARRAYS);
  }
};

// Which rows the teams of a block work on: of each of several groups of neighbouring rows one.
struct Rows {
  int64_t begin, step, end;  // where the first group to come begins, from one to the next, and how many rows there are
  int group;                 // rows of a group

  // The first row of a team with this place, or of several from this place on: the last group may have none of theirs.
  __device__ int64_t start(int place) const {
    const int64_t row = begin + place;
    return step < 0 && row >= end ? row + step : row;
  }

  __device__ bool has(int64_t row) const { return static_cast<uint64_t>(row) < static_cast<uint64_t>(end); }
};

// The rows of a cluster that draws them, as some multiprocessors are served faster than others. As many as its ring has
// room for are its own. Which row takes the place of one of them, its first block draws meanwhile, and notes it to the
// others with the sums of that one.
struct DrawnRows : Rows {
  int own;          // rows that are some cluster's own
  uint32_t* drawn;  // how many of the others were drawn; null: there are no others

  // To be published with a row's sums, which is a turn later: a number takes its time to come.
  template <typename Team>
  __device__ float draw(const Team& team) const {
    return __uint_as_float(count_if(drawn && team.begin + team.rank == 0, drawn, INT_MAX));
  }

  // Negative: there is none.
  __device__ int64_t noted(float note) const { return end - 1 - own - static_cast<int64_t>(__float_as_uint(note)); }
};

// Where rows are not fetched by way of a ring.
struct NoRing {
  template <typename... Args>
  __device__ explicit NoRing(const Args&...) {}
  __device__ void fill_up() {}
  __device__ void take() {}
  __device__ void met() {}
  __device__ void leave() {}
};

// UNEVEN: rows may begin and end anywhere. Then a chunk is all granules of 16 bytes in which its rows lie, whole:
// memory is not allocated in smaller pieces. Source: Rows or DrawnRows.
template <typename Team, bool UNEVEN, typename Source, typename... T>
class Ring {
 public:
  static constexpr int kArrays = sizeof...(T);
  template <int ARRAY>
  using Element = std::tuple_element_t<ARRAY, std::tuple<T...>>;

  // By all threads of the block. Begins to fill the ring, with the first chunk.
  __device__ Ring(const Team& team, const RingShape& shape, char* shared, const Source& rows, const T*... arrays)
      : shape_(shape),
        rows_(rows),
        arrays_{reinterpret_cast<const char*>(arrays)...},
        begin_(team.begin),
        width_(static_cast<int>(team.end - team.begin)),
        place_(team.place - team.place % kRows),
        row_(team.place % kRows),
        leads_(Team::kSpansWarps ? team.rank == 0 : lane() == 0) {
    const int ring = team.place / kRows;
    full_ = barriers() + ring * shape.chunks;
    shared_ = shared + ring * shape.bytes_of_ring<kArrays>();
    if (threadIdx.x < rows.group / kRows * shape.chunks) barriers()[threadIdx.x].init();
    if constexpr (kDraws)
      if (threadIdx.x < shape.chunks) drawn_rows()[threadIdx.x] = to_int(rows.begin + threadIdx.x * rows.step);
    __syncthreads();
    next_row_ = rows.start(place_);
    if (leads_) fill();
  }

  // And goes on with the others. What is loaded between the two arrives before them, the memory being busy by then.
  __device__ void fill_up() {
    if (!leads_) return;
#pragma unroll 1
    for (int i = 1; i < shape_.chunks; ++i) fill();
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

  // Of rows that are drawn, which one is to be taken next; negative: there are no more. The team has met since it last
  // left one.
  __device__ int64_t upcoming_row() const { return uniform(drawn_rows()[ready_]); }

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

  // Which row is to take the place of the one that is left next.
  __device__ void note(float note) {
    if (!leads_) return;
    next_row_ = rows_.noted(note);
    drawn_rows()[oldest_] = to_int(next_row_);
  }

  // Where the team's columns of a row are that was taken last, or first of those not left yet. `row`: where they are in
  // the array.
  template <int ARRAY>
  __device__ auto newest(const Element<ARRAY>* row) const {
    return copy_of<ARRAY>(row, newest_);
  }
  template <int ARRAY>
  __device__ auto oldest(const Element<ARRAY>* row) const {
    return copy_of<ARRAY>(row, oldest_);
  }

 private:
  static constexpr int kRows = Team::kTeamsOfWarp;  // of a chunk
  static constexpr bool kDraws = std::is_same_v<Source, DrawnRows>;
  static_assert(!kDraws || kRows == 1);

  __device__ int to_int(int64_t row) const { return rows_.has(row) ? static_cast<int>(row) : -1; }

  // Of each chunk, that is in it or will be.
  __device__ static volatile int* drawn_rows() {
    __shared__ volatile int rows[kMaxChunks];
    return rows;
  }

  __device__ static Arrival* barriers() {
    __shared__ Arrival barriers[kMaxChunks];
    return barriers;
  }

  __device__ static constexpr int size(int array) {
    constexpr int sizes[] = {sizeof(T)...};
    return sizes[array];
  }

  // Bytes of the granule in which an array's part begins before it does.
  __device__ static int granule_before(const void* part) {
    return UNEVEN ? static_cast<int>(reinterpret_cast<uintptr_t>(part) % 16) : 0;
  }

  // Of a chunk's rows, the first is where the copy begins.
  template <int ARRAY>
  __device__ const Element<ARRAY>* copy_of(const Element<ARRAY>* row, int chunk) const {
    const int before = kRows > 1 ? row_ * shape_.stride[ARRAY] : 0;
    const char* rows =
        shared_ + chunk * shape_.bytes_before(kArrays) + shape_.bytes_before(ARRAY) + granule_before(row - before);
    return reinterpret_cast<const Element<ARRAY>*>(rows) + before;
  }

  // What a copy takes of a part.
  __device__ static int whole_granules(const char* part, int bytes) {
    return UNEVEN ? (granule_before(part) + bytes + 15) / 16 * 16 : bytes;
  }

  // Starts the copy of the next rows, if there are any.
  __device__ void fill() {
    if (!rows_.has(next_row_)) return;
    const int more = static_cast<int>(min(static_cast<int64_t>(kRows), rows_.end - next_row_)) - 1;
    const auto part_of = [&](int i) { return arrays_[i] + (next_row_ * shape_.stride[i] + begin_) * size(i); };
    const auto bytes_of = [&](int i) {
      return whole_granules(part_of(i), (more * shape_.stride[i] + width_) * size(i));
    };
    Arrival& full = full_[next_];
    char* const to = shared_ + next_ * shape_.bytes_before(kArrays);
    int expected = 0;
#pragma unroll
    for (int i = 0; i < kArrays; ++i) expected += width_ > 0 ? bytes_of(i) : 0;
    full.expect(expected);
#pragma unroll
    for (int i = 0; i < kArrays; ++i)
      if (width_ > 0) full.copy(to + shape_.bytes_before(i), part_of(i) - granule_before(part_of(i)), bytes_of(i));
    if (++next_ == shape_.chunks) next_ = 0;
    next_row_ += rows_.step;
  }

  const RingShape shape_;
  const Source rows_;
  const char* const arrays_[kArrays];
  const int64_t begin_;  // of this block's columns
  const int width_;      // and how many they are
  const int place_;      // of its rows in each group of rows: of the first,
  const int row_;        // and the team's after it
  const bool leads_;     // whether this thread keeps the ring full
  int64_t next_row_ = 0;
  Arrival* full_;
  char* shared_;
  int next_ = 0;               // chunk to fill
  int ready_ = 0, phase_ = 0;  // and to wait for
  int newest_ = 0, oldest_ = 0;
  int left_ = 0;  // how many rows were left and their chunks not refilled
};

template <typename W, typename Team, typename... T>
using RingOf = std::conditional_t<W::RING, Ring<Team, W::N == 1, Rows, T...>, NoRing>;

}  // namespace jaxnorm::cuda
