// C entry of the native `attend` (called by native.py through ctypes): chooses the instruction level, cuts the work
// into items, shares them among threads. Built for the plain processor; the kernels lie in units of their own.
#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "../cpu_support.hpp"
#include "cpu_plan.hpp"

namespace commitkv {

// A level whose unit was not built has null addresses.
#define COMMITKV_DECLARE(level)                                                              \
  namespace level {                                                                          \
  __attribute__((weak)) void attend_item(const Plan &plan, const Item &item, char *scratch); \
  __attribute__((weak)) void attend_finish(const Plan &plan, const List &list);              \
  }
COMMITKV_DECLARE(portable)
COMMITKV_DECLARE(avx2)
COMMITKV_DECLARE(avx512)
COMMITKV_DECLARE(amx)

namespace {

struct Kernels {
  ItemKernel item;
  FinishKernel finish;
};

Kernels kernels_of(int32_t level) {
  switch (level) {
    case AVX2: return {avx2::attend_item, avx2::attend_finish};
    case AVX512: return {avx512::attend_item, avx512::attend_finish};
    case AMX: return {amx::attend_item, amx::attend_finish};
    default: return {portable::attend_item, portable::attend_finish};
  }
}

// Memory that grows and is kept for the next call of the same thread.
class Room {
 public:
  char *get(size_t num_bytes) {
    if (num_bytes > size_) {
      std::free(memory_);
      size_ = size_t(round_up(int64_t(num_bytes + num_bytes / 4), 4096));
      memory_ = static_cast<char *>(std::aligned_alloc(4096, size_));
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }
  ~Room() { std::free(memory_); }

 private:
  char *memory_ = nullptr;
  size_t size_ = 0;
};

// Lists and items of one call; kept per thread so that a call allocates nothing.
struct Planner {
  std::vector<Item> items;
  std::vector<List> lists;
  std::vector<int32_t> item_list;
  Room room;
  int64_t floats = 0;   // taken from room, in the order they are handed out
  int64_t work = 0;     // multiply-adds
  int64_t scratch = 0;  // bytes of the largest item

  void build(const Args &a);

 private:
  int32_t recorded_vectors(const Args &a, int32_t row, int32_t rows) const {
    int32_t count = 0;
    for (int32_t i = row; i < row + rows; ++i) count += a.record[i] ? 1 : 0;
    return count * int32_t(a.group);
  }
  void add_list(const Args &a, int32_t seq, int32_t head);
  void add_item(const Args &a, const Item &item);
  void hand_out(const Args &a);
};

int32_t segment_tokens(const Args &a, int64_t place, int32_t num_blocks, int32_t seq, int32_t segment) {
  return segment < num_blocks ? a.block_lens[a.block_starts[place] + segment]
                              : a.page_lens[a.page_starts[seq] + segment - num_blocks];
}

void Planner::add_item(const Args &a, const Item &item) {
  items.push_back(item);
  item_list.push_back(int32_t(lists.size()) - 1);
  work += item.tokens * item.rows * a.group * a.head_dim * 2;
}

void Planner::add_list(const Args &a, int32_t seq, int32_t head) {
  const int64_t place = int64_t(seq) * a.kv_heads + head;
  const int32_t num_blocks = a.block_starts[place + 1] - a.block_starts[place];
  const int32_t num_segments = num_blocks + a.page_starts[seq + 1] - a.page_starts[seq];
  const int32_t row = a.row_starts[seq], rows = a.row_starts[seq + 1] - row;
  const int32_t most = a.group < MAX_VECTORS ? int32_t(MAX_VECTORS / a.group) : 1;
  List list = {int32_t(items.size()), 0, 0, 0, 0, num_blocks, nullptr, false};
  for (int32_t i = row; i < row + rows; ++i) list.squares |= a.record[i] == SQUARES;
  for (int32_t s = 0; s < num_segments; ++s) {
    const int32_t tokens = segment_tokens(a, place, num_blocks, seq, s);
    list.tokens += tokens;
    if (s >= num_blocks) list.page_tokens += tokens;
  }
  lists.push_back(list);
  if (rows > most) {  // enough rows to go round: one item per row tile
    for (int32_t i = 0; i < rows; i += most) {
      const int32_t count = rows - i < most ? rows - i : most;
      add_item(a, Item{seq, head, row + i, count, 0, num_segments, 0, recorded_vectors(a, row + i, count), list.tokens,
                       0, nullptr, nullptr});
    }
  } else {
    Item item = {seq, head, row, rows, 0, 0, 0, recorded_vectors(a, row, rows), 0, 0, nullptr, nullptr};
    int32_t position = 0;
    for (int32_t s = 0; s < num_segments; ++s) {
      const int32_t tokens = segment_tokens(a, place, num_blocks, seq, s);
      item.tokens += tokens;
      if (s >= num_blocks) position += tokens;
      if (item.tokens < SPLIT_TOKENS && s + 1 < num_segments) continue;
      item.last_segment = s + 1;
      add_item(a, item);
      item.first_segment = s + 1, item.position = position, item.offset += item.tokens, item.tokens = 0;
    }
    if (num_segments == 0) add_item(a, item);
  }
  List &made = lists.back();
  made.num_items = made.remaining = int32_t(items.size()) - made.first_item;
}

// Places partial results and recorded logits in the room: one pass to add up, one to hand out.
void Planner::hand_out(const Args &a) {
  for (int pass = 0; pass < 2; ++pass) {
    float *base = pass ? reinterpret_cast<float *>(room.get(size_t(floats) * 4 + 64)) : nullptr;
    floats = 0;
    const auto take = [&](int64_t count) {
      float *taken = pass ? base + floats : nullptr;
      floats += round_up(count, 16);
      return taken;
    };
    for (List &list : lists) {
      Item *first = items.data() + list.first_item;
      const bool partial = list.num_items > 1 && first[0].row == first[1].row;
      bool recorded = false;
      for (Item *item = first; item < first + list.num_items; ++item) {
        if (partial) item->partial = take(item->rows * a.group * (a.head_dim + 2));
        if (!item->recorded) continue;
        recorded = true;
        item->recorded_to = take(partial ? item->recorded * round_up(item->tokens, 16) : item->tokens);
      }
      if (recorded) list.largest = take(list.tokens);
    }
  }
}

void Planner::build(const Args &a) {
  items.clear(), lists.clear(), item_list.clear();
  floats = work = scratch = 0;
  for (int32_t seq = 0; seq < a.num_seqs; ++seq) {
    if (a.row_starts[seq + 1] == a.row_starts[seq]) continue;
    for (int32_t head = 0; head < a.kv_heads; ++head) add_list(a, seq, head);
  }
  hand_out(a);
  for (const Item &item : items) {
    const int64_t needed = item_scratch_bytes(a, item);
    scratch = needed > scratch ? needed : scratch;
  }
}

struct Job {
  Plan plan;
  Kernels kernels;
  int64_t scratch_bytes;
  int32_t num_items;
  std::atomic<int32_t> next;
  std::atomic<bool> failed;
};

void work_on(void *data) {
  static thread_local Room room;
  Job &job = *static_cast<Job *>(data);
  char *scratch = nullptr;
  for (int32_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.num_items;) {
    try {
      if (!scratch) scratch = room.get(size_t(job.scratch_bytes));
    } catch (const std::bad_alloc &) {
      job.failed = true;
      return;
    }
    job.kernels.item(job.plan, job.plan.items[i], scratch);
    List &list = job.plan.lists[job.plan.item_list[i]];
    if (__atomic_sub_fetch(&list.remaining, 1, __ATOMIC_ACQ_REL) == 0) job.kernels.finish(job.plan, list);
  }
}

constexpr int64_t ALONE = 200000;  // multiply-adds (some 20 us) below which waking others does not pay

}  // namespace
}  // namespace commitkv

extern "C" {

// 1 if this processor and this build have the level (see commitkv::Level).
COMMITKV_EXPORT int32_t commitkv_attend_has(int32_t level) {
  return commitkv::kernels_of(level).item != nullptr && commitkv::processor_has(level) ? 1 : 0;
}

// 0, or 1 when memory ran out (then `out` is incomplete).
COMMITKV_EXPORT int32_t commitkv_attend(const commitkv::Args *args) {
  using namespace commitkv;
  static thread_local Planner planner;
  try {
    planner.build(*args);
  } catch (const std::bad_alloc &) {
    return 1;
  }
  Job job = {{*args, planner.items.data(), planner.lists.data(), planner.item_list.data()},
             kernels_of(args->level),
             planner.scratch,
             int32_t(planner.items.size()),
             {0},
             {false}};
  int32_t threads = planner.work < ALONE ? 1 : args->num_threads;
  if (threads > job.num_items) threads = job.num_items;
  if (threads < 2) {
    work_on(&job);
  } else if (args->parallel) {
    args->parallel(work_on, &job, unsigned(threads), 0);
  } else {
    run_parallel(work_on, &job, threads);
  }
  return job.failed ? 1 : 0;
}

}  // extern "C"
