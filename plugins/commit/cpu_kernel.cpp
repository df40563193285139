// The second half of a commit on a CPU, for one instruction level: absorbs what fell below the line, quantizes and
// writes new blocks, merges into blocks that stay, moves protected tokens. A row is the work of one thread and touches
// nothing of another row, so results do not depend on the number of threads.
#include <cstdlib>

#include "../product.hpp"
#include "cpu_blocks.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {
namespace {

constexpr float FAR = __builtin_inff();

struct Row {
  const CommitArgs &a;
  int64_t index, kept, below, staying;
  RowRoom room;

  float *key(int64_t entry) const { return room.keys + entry * room.stride; }
  float *value(int64_t entry) const { return room.values + entry * room.stride; }
  uint8_t *block(int64_t id) const { return a.blocks + id * a.block_bytes; }
  // Entries below the line lie behind the kept ones.
  int64_t place(bool keep) { return keep ? kept++ : kept_total + below++; }
  int64_t kept_total;
};

// Counts what is kept, so that entries can be put in their places in one pass.
int64_t count_kept(const CommitArgs &a, int64_t row) {
  int64_t count = 0;
  for (int64_t b = a.old.starts[row]; b < a.old.starts[row + 1]; ++b) {
    if (!a.dissolve[b]) continue;
    for (int64_t e = 0; e < a.old.lens[b]; ++e) count += a.alive[b * a.block_entries + e];
  }
  for (int64_t i = 0; i < a.num_staged; ++i) count += a.marks[row * a.num_staged + i] == 1;
  return count;
}

void read_moving(Row &r) {
  const CommitArgs &a = r.a;
  for (int64_t b = a.old.starts[r.index]; b < a.old.starts[r.index + 1]; ++b) {
    if (!a.dissolve[b]) continue;
    const uint8_t *block = r.block(a.old.ids[b]);
    open_keys(a, block, r.room);
    for (int64_t e = 0; e < a.old.lens[b]; ++e) {
      const int64_t to = r.place(a.alive[b * a.block_entries + e]);
      read_key(a, block, e, r.room, r.key(to));
      read_value(a, block, e, r.value(to));
      r.room.bias[to] = f16_to_float(halves(block, a.bias)[e]);
      r.room.score[to] = f16_to_float(a.score[a.old.ids[b] * a.block_entries + e]);
    }
  }
  const int64_t head = r.index % a.kv_heads, row_bytes = a.head_dim * element_bytes(a.page_dtype);
  for (int64_t i = 0; i < a.num_staged; ++i) {
    const uint8_t mark = a.marks[r.index * a.num_staged + i];
    if (mark > 1) continue;
    const int64_t page = a.staged[i] / a.page_tokens, offset = a.staged[i] % a.page_tokens;
    const uint8_t *k = a.pages[r.index / a.kv_heads] +
                       ((page * a.kv_heads + head) * 2 * a.page_tokens + offset) * row_bytes;
    const int64_t to = r.place(mark);
    widen_any(a.page_dtype, k, a.head_dim, r.key(to));
    widen_any(a.page_dtype, k + a.page_tokens * row_bytes, a.head_dim, r.value(to));
    r.room.bias[to] = 0.0f;
    r.room.score[to] = a.staged_score[r.index * a.num_staged + i];
  }
}

void list_staying(Row &r) {
  const CommitArgs &a = r.a;
  for (int64_t b = a.old.starts[r.index]; b < a.old.starts[r.index + 1]; ++b) {
    for (int64_t e = 0; e < a.block_entries; ++e) {
      if (a.dissolve[b] || !a.alive[b * a.block_entries + e]) continue;
      r.room.block[r.staying] = a.old.ids[b], r.room.offset[r.staying++] = e;
    }
  }
}

COMMITKV_INLINE float score_of(const Row &r, int64_t candidate) {
  if (candidate < r.kept) return r.room.score[candidate];
  const int64_t i = candidate - r.kept;
  return f16_to_float(r.a.score[r.room.block[i] * r.a.block_entries + r.room.offset[i]]);
}

// The key of a candidate: kept entries first, then entries of blocks that stay. `open` is the block whose scales are.
const float *candidate_key(const Row &r, int64_t candidate, int64_t &open, float *to) {
  if (candidate < r.kept) return r.key(candidate);
  const int64_t i = candidate - r.kept, id = r.room.block[i];
  if (open != id) open_keys(r.a, r.block(id), r.room), open = id;
  read_key(r.a, r.block(id), r.room.offset[i], r.room, to);
  return to;
}

float square_of(const Row &r, const float *key) {
  vf sum = set1(0.0f);
  for (int64_t d = 0; d < r.a.head_dim; d += W) {
    const vf x = load_some<F32>(key, d, r.a.head_dim);
    sum = fma(x, x, sum);
  }
  return hsum(sum);
}

// room.tile[d][j] = key of candidate first + j, room.squares[j] = its square, infinite where it may not absorb.
void fill_tile(const Row &r, int64_t first, int64_t count, int64_t &open) {
  const int64_t stride = r.room.stride, padded = round_up(count, W);
  for (int64_t j = 0; j < padded; ++j) {
    float *row = r.room.rows + j % W * stride;
    if (j < count) {
      const float *key = candidate_key(r, first + j, open, row);
      if (key != row) std::memcpy(row, key, stride * 4);
      r.room.squares[j] = __builtin_isinf(score_of(r, first + j)) ? FAR : square_of(r, row);
    } else {
      std::memset(row, 0, stride * 4);
      r.room.squares[j] = FAR;
    }
    if (j % W < W - 1) continue;
    for (int64_t d = 0; d < stride; d += W) {
      vf rows[W];
      for (int i = 0; i < W; ++i) rows[i] = load(r.room.rows + i * stride + d);
      transpose(rows, r.room.tile + d * CANDIDATES + j - (W - 1), CANDIDATES);
    }
  }
}

// best and nearest of every entry below the line, over candidates [first, first + count).
void compare_tile(const Row &r, int64_t first, int64_t count) {
  const int64_t padded = round_up(count, W);
  product(Product{r.key(r.kept), r.room.stride, r.room.tile, CANDIDATES, r.room.products, CANDIDATES, r.below,
                  r.a.head_dim, nullptr},
          padded);
  for (int64_t i = 0; i < r.below; ++i) {
    float *products = r.room.products + i * CANDIDATES;
    vf most = set1(-FAR);
    for (int64_t j = 0; j < padded; j += W) {
      const vf negative = set1(2.0f) * load(products + j) - load(r.room.squares + j);
      store(products + j, negative);
      most = vmax(most, negative);
    }
    const float top = hmax(most);
    if (!(-top < r.room.best[i])) continue;
    r.room.best[i] = -top;
    int64_t j = 0;
    while (j < count - 1 && products[j] != top) ++j;
    r.room.nearest[i] = first + j;
  }
}

// nearest[i] = the candidate that absorbs entry i below the line, or -1. Returns how many are absorbed.
int64_t find_nearest(const Row &r) {
  const CommitArgs &a = r.a;
  const int64_t candidates = r.kept + r.staying;
  for (int64_t i = 0; i < r.below; ++i) r.room.best[i] = FAR, r.room.nearest[i] = -1;
  int64_t open = -1, absorbed = 0;
  for (int64_t first = 0; first < candidates; first += CANDIDATES) {
    const int64_t count = candidates - first < CANDIDATES ? candidates - first : CANDIDATES;
    fill_tile(r, first, count, open);
    compare_tile(r, first, count);
  }
  for (int64_t i = 0; i < r.below; ++i) {
    if (r.room.nearest[i] < 0) continue;
    const float *key = r.key(r.kept + i);
    const float *other = candidate_key(r, r.room.nearest[i], open, r.room.rows);
    float distance = 0.0f;  // exact, unlike `best`, which cancels
    for (int64_t d = 0; d < a.head_dim; ++d) distance += (key[d] - other[d]) * (key[d] - other[d]);
    const bool near = __builtin_sqrtf(distance) < a.gate * __builtin_sqrtf(square_of(r, key));
    if (!near) r.room.nearest[i] = -1;
    absorbed += near;
  }
  return absorbed;
}

COMMITKV_INLINE float weight_of(const Row &r, float score) { return clamp(score, r.a.tiny_weight, FP16_MAX); }

// v = sum p_j v_j, bias = sum p_j (b_j - ln p_j), p_j in proportion to the scores. Returns how many entries of blocks
// that stay absorbed something; theirs lie in room.merged.
int64_t merge(const Row &r) {
  const CommitArgs &a = r.a;
  int64_t merged = 0;
  for (int64_t c = 0; c < r.kept + r.staying; ++c) r.room.total[c] = 0.0f;
  for (int64_t i = 0; i < r.below; ++i) {
    const int64_t c = r.room.nearest[i];
    if (c < 0) continue;
    if (r.room.total[c] == 0.0f) r.room.total[c] = weight_of(r, score_of(r, c));
    r.room.total[c] += weight_of(r, r.room.score[r.kept + i]);
  }
  for (int64_t c = 0; c < r.kept + r.staying; ++c) {
    if (r.room.total[c] == 0.0f) continue;
    float *value = r.value(c), *bias = r.room.bias + c;
    if (c >= r.kept) {
      const int64_t s = c - r.kept;
      value = r.room.merged + merged * r.room.stride, bias = r.room.merged_bias + merged;
      r.room.merged_at[s] = merged++;
      read_value(a, r.block(r.room.block[s]), r.room.offset[s], value);
      *bias = f16_to_float(halves(r.block(r.room.block[s]), a.bias)[r.room.offset[s]]);
    }
    const float share = weight_of(r, score_of(r, c)) / r.room.total[c];
    for (int64_t d = 0; d < a.head_dim; ++d) value[d] *= share;
    *bias = share * (*bias - __builtin_logf(share));
  }
  for (int64_t i = 0; i < r.below; ++i) {
    const int64_t c = r.room.nearest[i];
    if (c < 0) continue;
    const int64_t at = c < r.kept ? c : r.room.merged_at[c - r.kept];
    float *value = c < r.kept ? r.value(at) : r.room.merged + at * r.room.stride;
    float *bias = c < r.kept ? r.room.bias + at : r.room.merged_bias + at;
    const float share = weight_of(r, r.room.score[r.kept + i]) / r.room.total[c];
    const float *absorbed = r.value(r.kept + i);
    for (int64_t d = 0; d < a.head_dim; ++d) value[d] += share * absorbed[d];
    *bias += share * (r.room.bias[r.kept + i] - __builtin_logf(share));
  }
  return merged;
}

void rewrite_staying(const Row &r) {
  const CommitArgs &a = r.a;
  for (int64_t s = 0; s < r.staying; ++s) {
    if (r.room.total[r.kept + s] == 0.0f) continue;
    uint8_t *block = r.block(r.room.block[s]);
    const int64_t at = r.room.merged_at[s];
    write_value(a, block, r.room.offset[s], r.room.merged + at * r.room.stride, r.room.rows);
    halves(block, a.bias)[r.room.offset[s]] = float_to_f16(r.room.merged_bias[at]);
  }
}

void write_new(const Row &r) {
  const CommitArgs &a = r.a;
  int64_t first = 0;
  for (int64_t b = a.made.starts[r.index]; b < a.made.starts[r.index + 1]; ++b) {
    if (!a.is_new[b]) continue;
    const int64_t count = a.made.lens[b], id = a.made.ids[b];
    uint8_t *block = r.block(id);
    std::memset(block, 0, a.block_bytes);
    write_keys(a, block, r.key(first), count, r.room);
    for (int64_t e = 0; e < a.block_entries; ++e) {
      a.score[id * a.block_entries + e] = e < count ? float_to_f16(r.room.score[first + e]) : 0;
      if (e >= count) continue;
      write_value(a, block, e, r.value(first + e), r.room.rows);
      halves(block, a.bias)[e] = float_to_f16(r.room.bias[first + e]);
    }
    first += count;
  }
}

void commit_row(CommitArgs &a, int64_t index, char *memory) {
  Row r = {a, index, 0, 0, 0, {}, count_kept(a, index)};
  r.room.lay_out(memory, a, row_size(a, index));
  read_moving(r);
  int64_t absorbed = 0;
  if (a.absorb && r.below) {
    list_staying(r);
    absorbed = find_nearest(r);
    if (absorbed && merge(r)) rewrite_staying(r);
  }
  write_new(r);
  __atomic_add_fetch(&a.absorbed, absorbed, __ATOMIC_RELAXED);
  __atomic_add_fetch(&a.dropped, r.below - absorbed, __ATOMIC_RELAXED);
}

// Copies K, V and seen of protected tokens of one layer from slot to slot.
void move_tokens(const CommitArgs &a, int64_t layer) {
  const int64_t row_bytes = a.head_dim * element_bytes(a.page_dtype), plane = a.page_tokens * row_bytes;
  for (int64_t i = 0; i < a.num_moves; ++i) {
    const int64_t from = a.move_from[i], to = a.move_to[i];
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      const int64_t source = from / a.page_tokens * a.kv_heads + h, target = to / a.page_tokens * a.kv_heads + h;
      for (int kv = 0; kv < 2; ++kv) {
        std::memcpy(a.pages[layer] + (target * 2 + kv) * plane + to % a.page_tokens * row_bytes,
                    a.pages[layer] + (source * 2 + kv) * plane + from % a.page_tokens * row_bytes, row_bytes);
      }
      a.seen[layer][target * a.page_tokens + to % a.page_tokens] =
          a.seen[layer][source * a.page_tokens + from % a.page_tokens];
    }
  }
}

struct Job {
  CommitArgs *args;
  char *memory;  // [threads, memory_bytes]
  int64_t memory_bytes, next_memory;
  Pieces rows;
};

void work_on_rows(void *data) {
  Job &job = *static_cast<Job *>(data);
  char *memory = job.memory + __atomic_fetch_add(&job.next_memory, 1, __ATOMIC_RELAXED) * job.memory_bytes;
  for (int64_t row; job.rows.take(row);) commit_row(*job.args, row, memory);
}

}  // namespace
}  // namespace COMMITKV_LEVEL
}  // namespace commitkv

// Returns 0, or 1 when there is no working memory; nothing is written then.
extern "C" COMMITKV_EXPORT int32_t COMMITKV_JOIN(commitkv_publish, COMMITKV_LEVEL)(commitkv::CommitArgs *args) {
  using namespace commitkv;
  using namespace commitkv::COMMITKV_LEVEL;
  CommitArgs &a = *args;
  int64_t most = 64;
  for (int64_t row = 0; row < a.num_rows; ++row) {
    RowRoom room;
    const int64_t needed = room.lay_out(nullptr, a, row_size(a, row));
    most = needed > most ? needed : most;
  }
  most = round_up(most, 4096);
  const int64_t threads = a.threads < 1 ? 1 : a.threads;
  char *memory = static_cast<char *>(std::aligned_alloc(4096, size_t(most * threads)));
  if (!memory) return 1;
  Job job = {args, memory, most, 0, {a.num_rows, 0}};
  run_parallel(work_on_rows, &job, int32_t(threads));
  for (int64_t layer = 0; layer < a.num_rows / a.kv_heads; ++layer) move_tokens(a, layer);
  std::free(memory);
  return 0;
}
