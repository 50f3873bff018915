// A pipeline of rows (sm_90): a thread group's share of its block's shared memory, in stages with a coming row of up to
// three arrays each. One thread keeps it full by bulk copies, so that the memory stays busy whatever the thread group
// waits for.
//
// A stage is refilled once the whole thread group has met after its last look at it. Every reduction is such a meeting,
// so nobody reports back; the thread groups of a warp share a pipeline and meet in the warp. A thread group may wait
// for a row before it releases the one before.
#pragma once

#include <climits>
#include <tuple>

#include "engine/cuda/ptx.cuh"
#include "engine/cuda/thread_group.cuh"

namespace jaxnorm::cuda {

constexpr int kMaxStages = 64;  // of all pipelines of a block
constexpr int kMaxArrays = 3;   // arrays that a stage has a row of

// Shared memory that is left for what kernels with pipelines declare themselves.
constexpr int kOwnBytes = 4 << 10;

// The shape of a launch's pipelines.
struct PipelineShape {
  int stages;              // of each pipeline
  int bytes[kMaxArrays];   // of a stage, for each array; 0: there are fewer arrays
  int stride[kMaxArrays];  // elements from a row of an array to the next; in a stage rows lie as they do in the array

  // How many bytes of a stage come before those of an array.
  __device__ int bytes_before(int array) const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < array; ++i) sum += bytes[i];
    return sum;
  }

  template <int ARRAYS>
  __device__ int bytes_of_pipeline() const {
    return stages * bytes_before(ARRAYS);
  }
};

// A grid-stride schedule of a block's rows. It takes blocks of neighbouring rows, and each of its thread groups has one
// row of each.
struct Rows {
  int64_t begin, step,
      end;         // the first row of the first block, rows from a block to the next, and how many rows there are
  int block_rows;  // rows of a block

  // The first row of the thread group with this place, or of several from this place on: the last block of rows may
  // have none for them.
  __device__ int64_t start(int place) const {
    const int64_t row = begin + place;
    return step < 0 && row >= end ? row + step : row;
  }

  __device__ bool has(int64_t row) const { return static_cast<uint64_t>(row) < static_cast<uint64_t>(end); }

  // Whether the thread group with this place has a row less than the first one.
  __device__ bool is_short(int place) const {
    return step < 0 ? start(place) - place < start(0) : (end - 1 - begin) % step < place;
  }
};

// A dynamic schedule, as some multiprocessors are served faster than others. A cluster has as many rows of its own as
// its pipeline has room for. For the row that takes the place of one of them its first block draws a ticket meanwhile,
// which the others get with the statistics of that one.
struct DynamicRows : Rows {
  int own;            // rows that are some cluster's own
  uint32_t* tickets;  // how many tickets were drawn for the others; null: there are no others

  // To be published with the next row's statistics: the number takes its time to come.
  template <typename ThreadGroup>
  __device__ float take_ticket(const ThreadGroup& group) const {
    return __uint_as_float(count_if(tickets && group.begin + group.rank == 0, tickets, INT_MAX));
  }

  // Negative: there is none.
  __device__ int64_t row_of_ticket(float ticket) const {
    return end - 1 - own - static_cast<int64_t>(__float_as_uint(ticket));
  }
};

// Where rows do not come by way of a pipeline.
struct NoPipeline {
  template <typename... Args>
  __device__ explicit NoPipeline(const Args&...) {}
  __device__ void acquire_rest() {}
  __device__ void wait() {}
  __device__ void synced() {}
  __device__ void release() {}
};

// UNEVEN: rows may begin and end anywhere. Then a stage has all 16-byte words in which its rows lie: memory is not
// allocated in smaller pieces. Source: Rows or DynamicRows.
template <typename ThreadGroup, bool UNEVEN, typename Source, typename... T>
class Pipeline {
 public:
  static constexpr int kArrays = sizeof...(T);
  template <int ARRAY>
  using Element = std::tuple_element_t<ARRAY, std::tuple<T...>>;

  // By all threads of the block. Begins to fill the first stage.
  __device__ Pipeline(const ThreadGroup& group, const PipelineShape& shape, char* shared, const Source& rows,
                      const T*... arrays)
      : shape_(shape),
        rows_(rows),
        arrays_{reinterpret_cast<const char*>(arrays)...},
        begin_(group.begin),
        width_(static_cast<int>(group.end - group.begin)),
        place_(group.place - group.place % kRows),
        row_(group.place % kRows),
        leads_(ThreadGroup::kSpansWarps ? group.rank == 0 : lane() == 0) {
    const int pipeline = group.place / kRows;
    full_ = barriers() + pipeline * shape.stages;
    shared_ = shared + pipeline * shape.bytes_of_pipeline<kArrays>();
    if (threadIdx.x < rows.block_rows / kRows * shape.stages) barriers()[threadIdx.x].init();
    if constexpr (kIsDynamic)
      if (threadIdx.x < shape.stages) dynamic_rows()[threadIdx.x] = to_int(rows.begin + threadIdx.x * rows.step);
    __syncthreads();
    next_row_ = rows.start(place_);
    if (leads_) acquire();
  }

  // Goes on with the other stages. What is loaded between the two arrives before these keep the memory busy.
  __device__ void acquire_rest() {
    if (!leads_) return;
#pragma unroll 1
    for (int i = 1; i < shape_.stages; ++i) acquire();
  }

  // Waits for the next row, or the next rows of the warp's thread groups.
  __device__ void wait() {
    newest_ = ready_;
    full_[ready_].wait(phase_);
    if (++ready_ == shape_.stages) {
      ready_ = 0;
      phase_ ^= 1;
    }
  }

  // Of a dynamic schedule, the row that comes next; negative: there are no more. The thread group has met since it last
  // released one.
  __device__ int64_t upcoming_row() const { return uniform(dynamic_rows()[ready_]); }

  // The thread group has met since it last released a row.
  __device__ void synced() {
    if (!ThreadGroup::kSpansWarps || released_ == 0) return;
    --released_;
    if (leads_) acquire();
  }

  // Releases the row that was waited for first of those not released yet.
  __device__ void release() {
    if constexpr (ThreadGroup::kSpansWarps) {
      ++released_;
    } else {
      __syncwarp();
      if (leads_) acquire();
    }
    if (++oldest_ == shape_.stages) oldest_ = 0;
  }

  // Takes the row of a ticket for the place of the one that is released next.
  __device__ void ticket(float ticket) {
    if (!leads_) return;
    next_row_ = rows_.row_of_ticket(ticket);
    dynamic_rows()[oldest_] = to_int(next_row_);
  }

  // Where the thread group's columns are, of the row that was waited for last, or first of those not released yet.
  // `row`: where they are in the array.
  template <int ARRAY>
  __device__ auto newest(const Element<ARRAY>* row) const {
    return copy_of<ARRAY>(row, newest_);
  }
  template <int ARRAY>
  __device__ auto oldest(const Element<ARRAY>* row) const {
    return copy_of<ARRAY>(row, oldest_);
  }

 private:
  static constexpr int kRows = ThreadGroup::kGroupsOfWarp;  // of a stage
  static constexpr bool kIsDynamic = std::is_same_v<Source, DynamicRows>;
  static_assert(!kIsDynamic || kRows == 1);
  static_assert(ThreadGroup::kSharedBytes +
                    kMaxStages * (sizeof(TransactionBarrier) + (kIsDynamic ? sizeof(int) : 0)) <=
                kOwnBytes);

  __device__ int to_int(int64_t row) const { return rows_.has(row) ? static_cast<int>(row) : -1; }

  // The row that is in each stage, or will be.
  __device__ static volatile int* dynamic_rows() {
    __shared__ volatile int rows[kMaxStages];
    return rows;
  }

  __device__ static TransactionBarrier* barriers() {
    __shared__ TransactionBarrier barriers[kMaxStages];
    return barriers;
  }

  __device__ static constexpr int size(int array) {
    constexpr int sizes[] = {sizeof(T)...};
    return sizes[array];
  }

  // How many bytes of the 16-byte word in which a piece of an array begins come before it.
  __device__ static int word_before(const void* piece) {
    return UNEVEN ? static_cast<int>(reinterpret_cast<uintptr_t>(piece) % 16) : 0;
  }

  // The copy of a row; it begins with that of the stage's first row.
  template <int ARRAY>
  __device__ const Element<ARRAY>* copy_of(const Element<ARRAY>* row, int stage) const {
    const int before = kRows > 1 ? row_ * shape_.stride[ARRAY] : 0;
    const char* rows =
        shared_ + stage * shape_.bytes_before(kArrays) + shape_.bytes_before(ARRAY) + word_before(row - before);
    return reinterpret_cast<const Element<ARRAY>*>(rows) + before;
  }

  // How many bytes a copy of a piece takes.
  __device__ static int whole_words(const char* piece, int bytes) {
    return UNEVEN ? (word_before(piece) + bytes + 15) / 16 * 16 : bytes;
  }

  // Starts the copy of the next rows, if there are any.
  __device__ void acquire() {
    if (!rows_.has(next_row_)) return;
    const int more = static_cast<int>(min(static_cast<int64_t>(kRows), rows_.end - next_row_)) - 1;
    const auto piece_of = [&](int i) { return arrays_[i] + (next_row_ * shape_.stride[i] + begin_) * size(i); };
    const auto bytes_of = [&](int i) { return whole_words(piece_of(i), (more * shape_.stride[i] + width_) * size(i)); };
    TransactionBarrier& full = full_[next_];
    char* const to = shared_ + next_ * shape_.bytes_before(kArrays);
    int expected = 0;
#pragma unroll
    for (int i = 0; i < kArrays; ++i) expected += width_ > 0 ? bytes_of(i) : 0;
    full.expect(expected);
#pragma unroll
    for (int i = 0; i < kArrays; ++i)
      if (width_ > 0) full.copy(to + shape_.bytes_before(i), piece_of(i) - word_before(piece_of(i)), bytes_of(i));
    if (++next_ == shape_.stages) next_ = 0;
    next_row_ += rows_.step;
  }

  const PipelineShape shape_;
  const Source rows_;
  const char* const arrays_[kArrays];
  const int64_t begin_;  // of this block's columns
  const int width_;      // and how many they are
  const int place_;      // in each block of rows: of the stage's first row,
  const int row_;        // and of the thread group's row after it
  const bool leads_;     // whether this thread keeps the pipeline full
  int64_t next_row_ = 0;
  TransactionBarrier* full_;
  char* shared_;
  int next_ = 0;               // stage to fill
  int ready_ = 0, phase_ = 0;  // and to wait for
  int newest_ = 0, oldest_ = 0;
  int released_ = 0;  // how many rows were released and their stages not refilled
};

template <typename Tile, typename ThreadGroup, typename... T>
using PipelineOf = std::conditional_t<Tile::PIPELINED, Pipeline<ThreadGroup, Tile::N == 1, Rows, T...>, NoPipeline>;

}  // namespace jaxnorm::cuda
