// A thread group's share of its block's shared memory as a pipeline of stages, each a coming row of up to three arrays
// (sm_90). One thread keeps it full by bulk copies, so that the memory stays busy whatever the thread group waits for.
//
// A stage is refilled once the whole thread group has met after its last look at it. Every reduction is such a meeting,
// so nobody reports back; the thread groups of a warp share a pipeline and meet in the warp. A thread group may take a
// row before it leaves the one before.
#pragma once

#include <climits>
#include <tuple>

#include "cuda/engine/cluster.cuh"
#include "cuda/engine/thread_group.cuh"

namespace jaxnorm::cuda {

constexpr int kMaxStages = 64;  // of all pipelines of a block
constexpr int kMaxArrays = 3;   // of which a stage has a row

// What of the pipelines of a launch is decided there.
struct PipelineShape {
  int stages;              // of each pipeline
  int bytes[kMaxArrays];   // a stage, of each array; 0: there are fewer
  int stride[kMaxArrays];  // of the array, in elements, from a row to the next: in a stage they lie as they do there

  // Of a stage before those of an array.
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

// Which rows the thread groups of a block work on: of each of several groups of neighbouring rows one.
struct Rows {
  int64_t begin, step, end;  // where the first group to come begins, from one to the next, and how many rows there are
  int block_rows;            // rows of a group

  // The first row of a thread group with this place, or of several from this place on: the last group may have none of
  // theirs.
  __device__ int64_t start(int place) const {
    const int64_t row = begin + place;
    return step < 0 && row >= end ? row + step : row;
  }

  __device__ bool has(int64_t row) const { return static_cast<uint64_t>(row) < static_cast<uint64_t>(end); }
};

// The rows of a cluster that draws them, as some multiprocessors are served faster than others. As many as its pipeline
// has room for are its own. Which row takes the place of one of them, its first block draws meanwhile, and notes it to
// the others with the sums of that one.
struct DynamicRows : Rows {
  int own;            // rows that are some cluster's own
  uint32_t* tickets;  // how many of the others were drawn; null: there are no others

  // To be published with a row's sums, which is a turn later: a number takes its time to come.
  template <typename ThreadGroup>
  __device__ float take_ticket(const ThreadGroup& group) const {
    return __uint_as_float(count_if(tickets && group.begin + group.rank == 0, tickets, INT_MAX));
  }

  // Negative: there is none.
  __device__ int64_t row_of_ticket(float ticket) const {
    return end - 1 - own - static_cast<int64_t>(__float_as_uint(ticket));
  }
};

// Where rows are not fetched by way of a pipeline.
struct NoPipeline {
  template <typename... Args>
  __device__ explicit NoPipeline(const Args&...) {}
  __device__ void acquire_rest() {}
  __device__ void wait() {}
  __device__ void synced() {}
  __device__ void release() {}
};

// UNEVEN: rows may begin and end anywhere. Then a stage is all 16-byte words of 16 bytes in which its rows lie, whole:
// memory is not allocated in smaller pieces. Source: Rows or DynamicRows.
template <typename ThreadGroup, bool UNEVEN, typename Source, typename... T>
class Pipeline {
 public:
  static constexpr int kArrays = sizeof...(T);
  template <int ARRAY>
  using Element = std::tuple_element_t<ARRAY, std::tuple<T...>>;

  // By all threads of the block. Begins to fill the pipeline, with the first stage.
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

  // And goes on with the others. What is loaded between the two arrives before them, the memory being busy by then.
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

  // Of rows that are drawn, which one is to be taken next; negative: there are no more. The thread group has met since
  // it last left one.
  __device__ int64_t upcoming_row() const { return uniform(dynamic_rows()[ready_]); }

  // The thread group has met since it last left a row.
  __device__ void synced() {
    if (!ThreadGroup::kSpansWarps || left_ == 0) return;
    --left_;
    if (leads_) acquire();
  }

  // Leaves the row that was taken first of those not left yet.
  __device__ void release() {
    if constexpr (ThreadGroup::kSpansWarps) {
      ++left_;
    } else {
      __syncwarp();
      if (leads_) acquire();
    }
    if (++oldest_ == shape_.stages) oldest_ = 0;
  }

  // Which row is to take the place of the one that is left next.
  __device__ void ticket(float ticket) {
    if (!leads_) return;
    next_row_ = rows_.row_of_ticket(ticket);
    dynamic_rows()[oldest_] = to_int(next_row_);
  }

  // Where the thread group's columns of a row are that was taken last, or first of those not left yet. `row`: where
  // they are in the array.
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

  __device__ int to_int(int64_t row) const { return rows_.has(row) ? static_cast<int>(row) : -1; }

  // Of each stage, that is in it or will be.
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

  // Bytes of the 16-byte word in which an array's part begins before it does.
  __device__ static int word_before(const void* part) {
    return UNEVEN ? static_cast<int>(reinterpret_cast<uintptr_t>(part) % 16) : 0;
  }

  // Of a stage's rows, the first is where the copy begins.
  template <int ARRAY>
  __device__ const Element<ARRAY>* copy_of(const Element<ARRAY>* row, int stage) const {
    const int before = kRows > 1 ? row_ * shape_.stride[ARRAY] : 0;
    const char* rows =
        shared_ + stage * shape_.bytes_before(kArrays) + shape_.bytes_before(ARRAY) + word_before(row - before);
    return reinterpret_cast<const Element<ARRAY>*>(rows) + before;
  }

  // What a copy takes of a part.
  __device__ static int whole_words(const char* part, int bytes) {
    return UNEVEN ? (word_before(part) + bytes + 15) / 16 * 16 : bytes;
  }

  // Starts the copy of the next rows, if there are any.
  __device__ void acquire() {
    if (!rows_.has(next_row_)) return;
    const int more = static_cast<int>(min(static_cast<int64_t>(kRows), rows_.end - next_row_)) - 1;
    const auto part_of = [&](int i) { return arrays_[i] + (next_row_ * shape_.stride[i] + begin_) * size(i); };
    const auto bytes_of = [&](int i) { return whole_words(part_of(i), (more * shape_.stride[i] + width_) * size(i)); };
    TransactionBarrier& full = full_[next_];
    char* const to = shared_ + next_ * shape_.bytes_before(kArrays);
    int expected = 0;
#pragma unroll
    for (int i = 0; i < kArrays; ++i) expected += width_ > 0 ? bytes_of(i) : 0;
    full.expect(expected);
#pragma unroll
    for (int i = 0; i < kArrays; ++i)
      if (width_ > 0) full.copy(to + shape_.bytes_before(i), part_of(i) - word_before(part_of(i)), bytes_of(i));
    if (++next_ == shape_.stages) next_ = 0;
    next_row_ += rows_.step;
  }

  const PipelineShape shape_;
  const Source rows_;
  const char* const arrays_[kArrays];
  const int64_t begin_;  // of this block's columns
  const int width_;      // and how many they are
  const int place_;      // of its rows in each group of rows: of the first,
  const int row_;        // and the thread group's after it
  const bool leads_;     // whether this thread keeps the pipeline full
  int64_t next_row_ = 0;
  TransactionBarrier* full_;
  char* shared_;
  int next_ = 0;               // stage to fill
  int ready_ = 0, phase_ = 0;  // and to wait for
  int newest_ = 0, oldest_ = 0;
  int left_ = 0;  // how many rows were left and their stages not refilled
};

template <typename Tile, typename ThreadGroup, typename... T>
using PipelineOf = std::conditional_t<Tile::PIPELINED, Pipeline<ThreadGroup, Tile::N == 1, Rows, T...>, NoPipeline>;

}  // namespace jaxnorm::cuda
