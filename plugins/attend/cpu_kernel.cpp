// `attend` on a CPU, for one instruction level: compiled once per level with -DCOMMITKV_LEVEL=<name>.
// An item is one stretch of one list against some rows; the last item of a list combines the list's items, writes
// `out` and raises `seen` and `score`. Items and their order of combination follow from lengths alone, so results do
// not depend on the number of threads.
#include <cmath>

#include "cpu_wide.hpp"
#if defined(__AVX2__) && !defined(__AVX512F__)
#define COMMITKV_NARROW
#include "cpu_narrow.hpp"
#endif
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define COMMITKV_AMX
#include "cpu_amx.hpp"
#endif

namespace commitkv {
namespace COMMITKV_LEVEL {

template <typename T>
COMMITKV_INLINE T *take(char *&from, int64_t count) {
  T *taken = reinterpret_cast<T *>(from);
  from += round_up(count * int64_t(sizeof(T)), 64);
  return taken;
}

// to[0, dim) = row of q or any tensor of type `dtype`.
static void widen_any(int32_t dtype, const void *from, int64_t dim, float *to) {
  const uint8_t *row = static_cast<const uint8_t *>(from);
  if (dtype == F32) return widen_row<F32>(row, dim, to);
  if (dtype == BF16) return widen_row<BF16>(row, dim, to);
  widen_row<F16>(row, dim, to);
}

static void narrow_row(int32_t dtype, const float *from, int64_t dim, char *to) {
  if (dtype == F32) {
    std::memcpy(to, from, dim * 4);
    return;
  }
  uint16_t *halves = reinterpret_cast<uint16_t *>(to);
  int64_t d = 0;
  for (; d + W <= dim; d += W) {
    if (dtype == BF16) {
      store_bf16(halves + d, load(from + d));
    } else {
      store_f16(halves + d, load(from + d));
    }
  }
  for (; d < dim; ++d) halves[d] = dtype == BF16 ? float_to_bf16(from[d]) : float_to_f16(from[d]);
}

// Byte offset in q and out of query vector m of an item.
COMMITKV_INLINE int64_t vector_offset(const Args &a, const Item &item, int64_t m) {
  const int64_t row = item.row + m / a.group, head = item.head * a.group + m % a.group;
  return (row * a.kv_heads * a.group + head) * a.head_dim * element_bytes(a.q_dtype);
}

static Work make_work(const Plan &plan, const Item &item, bool dot, char *&scratch) {
  const Args &a = plan.args;
  Work w;
  w.vectors = int64_t(item.rows) * a.group;
  w.dim = a.head_dim;
  w.query_stride = dot ? a.head_dim : round_up(a.head_dim, 32);
  w.logit_stride = WIDE_TILE + 32;
  const int64_t padded = round_up(w.vectors, 16);
  w.query = take<float>(scratch, padded * w.query_stride);
  w.sums = take<float>(scratch, padded * w.query_stride);
  w.logits = take<float>(scratch, padded * w.logit_stride);
  w.maxima = take<float>(scratch, padded);
  w.totals = take<float>(scratch, padded);
  w.factors = take<float>(scratch, padded);
  w.kept_stride = round_up(item.tokens, 16);
  w.kept = !item.recorded_to ? nullptr
           : item.partial    ? item.recorded_to
                             : take<float>(scratch, item.recorded * w.kept_stride);
  std::memset(w.query, 0, padded * w.query_stride * 4);
  std::memset(w.sums, 0, padded * w.query_stride * 4);
  for (int64_t m = 0; m < padded; ++m) w.maxima[m] = LOWEST, w.totals[m] = 0.0f, w.factors[m] = 0.0f;
  for (int64_t m = 0; m < w.vectors; ++m) {
    const char *from = static_cast<const char *>(a.q) + vector_offset(a, item, m);
    widen_any(a.q_dtype, from, a.head_dim, w.query + m * w.query_stride);
  }
  return w;
}

// Calls f(tile, next) for each tile of the item, of which `next` may be empty: what comes is fetched meanwhile.
template <typename F>
COMMITKV_INLINE void by_tiles(const Plan &plan, const Item &item, Capacity most, const F &f) {
  Tile tiles[2];
  Cursor at = {item.first_segment, 0, item.position, 0};
  int now = 0;
  for (bool more = next_tile(plan, item, at, tiles[now], most); more; now ^= 1) {
    more = next_tile(plan, item, at, tiles[now ^ 1], most);
    f(tiles[now], tiles[now ^ 1]);
  }
}

static void run_dot(const Plan &plan, const Item &item, const List &list, Work &w, char *scratch) {
  DotRoom room = {};
  room.folded = take<float>(scratch, w.vectors * w.dim);
  room.scale = take<float>(scratch, w.dim);
  room.minimum = take<float>(scratch, w.dim);
  by_tiles(plan, item, DOT_CAPACITY,
           [&](const Tile &tile, const Tile &next) { dot_tile(plan, item, list, tile, next, w, room); });
}

#if defined(COMMITKV_NARROW)
static bool takes_narrow(const Args &a) {
  return a.q_dtype == BF16 && a.head_dim % 64 == 0 && narrow_takes(a.page_dtype) && narrow_takes(a.k_format) &&
         narrow_takes(a.v_format);
}

static void run_narrow(const Plan &plan, const Item &item, const List &list, Work &w, char *scratch) {
  NarrowRoom room = {};
  room.pairs = take<float>(scratch, w.vectors * w.dim);
  room.codes = take<int16_t>(scratch, w.vectors * w.dim);
  room.weights = take<int16_t>(scratch, w.vectors * WEIGHT_STRIDE + 2 * W);
  room.scale = take<float>(scratch, w.dim);
  room.minimum = take<float>(scratch, w.dim);
  pair_query(w, room);
  by_tiles(plan, item, NARROW_CAPACITY,
           [&](const Tile &tile, const Tile &next) { narrow_tile(plan, item, list, tile, next, w, room); });
}
#endif

static WideRoom make_wide_room(const Work &w, char *&scratch) {
  WideRoom room;
  room.k = take<float>(scratch, w.query_stride * WIDE_TILE);
  room.v = take<float>(scratch, w.query_stride * WIDE_TILE);
  room.rows = take<float>(scratch, w.query_stride * 32);
  room.scale = take<float>(scratch, w.dim);
  room.minimum = take<float>(scratch, w.dim);
  std::memset(room.rows, 0, w.query_stride * 32 * 4);
  std::memset(room.v, 0, w.query_stride * WIDE_TILE * 4);
  return room;
}

// Whether no row of the item sees this tile or, pages being in order, any later one; what is recorded of them is -inf.
static bool all_hidden(const Plan &plan, const Item &item, const List &list, const Tile &tile, const Work &w) {
  if (!tile.pages || visible(plan, item, list, tile, item.rows - 1) > 0) return false;
  for (int64_t m = 0; w.kept && m < item.recorded; ++m) {
    for (int64_t j = tile.offset; j < item.tokens; ++j) w.kept[m * w.kept_stride + j] = NEG_INF;
  }
  return true;
}

static void run_wide(const Plan &plan, const Item &item, const List &list, Work &w, char *scratch) {
  const WideRoom room = make_wide_room(w, scratch);
  Tile tile;
  Cursor at = {item.first_segment, 0, item.position, 0};
  while (next_tile(plan, item, at, tile, WIDE_CAPACITY)) {
    if (all_hidden(plan, item, list, tile, w)) break;
    wide_tile(plan, item, list, tile, w, room);
  }
}

#if defined(COMMITKV_AMX)
static AmxRoom make_amx_room(const Work &w, char *&scratch) {
  AmxRoom room;
  room.blocks = (w.vectors + 15) / 16;
  room.query = take<float>(scratch, room.blocks * w.dim * 16);
  room.head = take<uint32_t>(scratch, room.blocks * w.dim * 8);
  room.rest = take<uint32_t>(scratch, room.blocks * w.dim * 8);
  room.start = take<float>(scratch, room.blocks * 16);
  room.rows = take<uint16_t>(scratch, (WIDE_TILE + 16) * w.dim);
  room.v = take<uint32_t>(scratch, WIDE_TILE / 2 * w.dim);
  for (auto &weights : room.weights) {
    weights = take<uint16_t>(scratch, room.blocks * 16 * WIDE_TILE);
    std::memset(weights, 0, room.blocks * 16 * WIDE_TILE * 2);
  }
  room.square = take<float>(scratch, 256);
  room.scale = take<float>(scratch, w.dim);
  room.minimum = take<float>(scratch, w.dim);
  room.added = take<float>(scratch, room.blocks * 16);
  room.folded = true;  // nothing is packed yet
  std::memset(room.rows + WIDE_TILE * w.dim, 0, w.dim * 2);
  for (int64_t b = 0; b < room.blocks; ++b) {
    for (int64_t d = 0; d < w.dim; d += 16) {
      vf rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = load(w.query + (b * 16 + i) * w.query_stride + d);
      transpose(rows, room.query + (b * w.dim + d) * 16, 16);
    }
  }
  return room;
}

static void run_amx(const Plan &plan, const Item &item, const List &list, Work &w, char *scratch) {
  const Args &a = plan.args;
  AmxRoom room = make_amx_room(w, scratch);
  const WideRoom wide = make_wide_room(w, scratch);
  Tile tiles[2];
  tiles[1].pages = false;  // read even when there is no second tile
  Cursor at = {item.first_segment, 0, item.position, 0};
  configure_tiles(w.vectors);
  int now = 0;
  for (bool more = next_tile(plan, item, at, tiles[now], WIDE_CAPACITY); more; now ^= 1) {
    const Tile &tile = tiles[now], &next = tiles[now ^ 1];
    if (all_hidden(plan, item, list, tile, w)) break;
    more = next_tile(plan, item, at, tiles[now ^ 1], WIDE_CAPACITY);
    const int64_t k_bytes = code_row_bytes(k_format(a, next), w.dim);
    const int64_t v_bytes = code_row_bytes(v_format(a, next), w.dim);
    if (amx_takes(k_format(a, tile)) && amx_takes(v_format(a, tile))) {
      amx_tile(plan, item, list, tile, w, room, Ahead{next, {k_bytes, v_bytes}, 0, 0, 0});
    } else {
      wide_tile(plan, item, list, tile, w, wide);
    }
  }
  _tile_release();
}
#endif

// largest[j] = max(largest[j], weight), or largest[j] + weight^2, where weight = e^(logits[j] - shift) * factor
template <bool SQUARED>
static void raise_largest(const float *logits, int64_t tokens, float shift, float factor, float *largest) {
  const vf top = set1(shift), by = set1(factor);
  int64_t j = 0;
  for (; j + W <= tokens; j += W) {
    const vf weight = exp_nonpositive(load(logits + j) - top) * by, now = load(largest + j);
    store(largest + j, SQUARED ? fma(weight, weight, now) : vmax(now, weight));
  }
  float lanes[W] = {}, before[W] = {};
  for (int64_t i = j; i < tokens; ++i) lanes[i - j] = logits[i], before[i - j] = largest[i];
  const vf weight = exp_nonpositive(load(lanes) - top) * by, now = load(before);
  store(lanes, SQUARED ? fma(weight, weight, now) : vmax(now, weight));
  for (int64_t i = j; i < tokens; ++i) largest[i] = lanes[i - j];
}

static void record(const List &list, const float *logits, int64_t tokens, float shift, float factor, float *to) {
  (list.squares ? raise_largest<true> : raise_largest<false>)(logits, tokens, shift, factor, to);
}

static void write_out(const Plan &plan, const Item &item, int64_t m, const float *sums, float total, float *row) {
  const Args &a = plan.args;
  const float factor = total > 0.0f ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < a.head_dim; ++d) row[d] = sums[d] * factor;
  narrow_row(a.q_dtype, row, a.head_dim, static_cast<char *>(a.out) + vector_offset(a, item, m));
}

static void end_item(const Plan &plan, const Item &item, const List &list, const Work &w) {
  const Args &a = plan.args;
  if (item.partial) {
    for (int64_t m = 0; m < w.vectors; ++m) {
      float *to = item.partial + m * (a.head_dim + 2);
      std::memcpy(to, w.sums + m * w.query_stride, a.head_dim * 4);
      to[a.head_dim] = w.maxima[m], to[a.head_dim + 1] = w.totals[m];
    }
    return;
  }
  for (int64_t m = 0; m < w.vectors; ++m) {
    float *row = w.sums + m * w.query_stride;
    write_out(plan, item, m, row, w.totals[m], row);
  }
  if (!w.kept) return;
  std::memset(item.recorded_to, 0, item.tokens * 4);
  const float *kept = w.kept;
  for (int64_t m = 0; m < w.vectors; ++m) {
    if (!a.record[item.row + m / a.group]) continue;
    const float factor = w.totals[m] > 0.0f ? 1.0f / w.totals[m] : 0.0f;
    record(list, kept, item.tokens, w.maxima[m], factor, item.recorded_to);
    kept += w.kept_stride;
  }
}

void attend_item(const Plan &plan, const Item &item, char *scratch) {
  const Args &a = plan.args;
  const List &list = plan.lists[plan.item_list[&item - plan.items]];
  const int64_t vectors = int64_t(item.rows) * a.group;
  const bool halves = a.k_format == I4 || a.v_format == I4;
  const bool whole = a.head_dim % W == 0 && (!halves || a.head_dim / 2 % W == 0);
  const bool dot = whole && vectors <= DOT_VECTORS;  // so few do not fill the tiles of AMX either
#if defined(COMMITKV_AMX)
  const bool amx = a.q_dtype == BF16 && a.head_dim % 32 == 0;
#endif
  Work w = make_work(plan, item, dot, scratch);
  if (dot) {
#if defined(COMMITKV_NARROW)
    (takes_narrow(a) ? run_narrow : run_dot)(plan, item, list, w, scratch);
#else
    run_dot(plan, item, list, w, scratch);
#endif
#if defined(COMMITKV_AMX)
  } else if (amx) {
    run_amx(plan, item, list, w, scratch);
#endif
  } else {
    run_wide(plan, item, list, w, scratch);
  }
  end_item(plan, item, list, w);
}

// Joins the partial results of a split list (one row tile) and leaves what it recorded of each token in list.largest.
static void combine(const Plan &plan, const List &list) {
  const Args &a = plan.args;
  const Item *items = plan.items + list.first_item;
  const int64_t vectors = int64_t(items->rows) * a.group, stride = a.head_dim + 2;
  if (list.largest) std::memset(list.largest, 0, list.tokens * 4);
  int64_t recorded = 0;
  for (int64_t m = 0; m < vectors; ++m) {
    float top = LOWEST, total = 0.0f, sums[256] = {}, row[256];
    for (int32_t i = 0; i < list.num_items; ++i) {
      const float other = items[i].partial[m * stride + a.head_dim];
      top = other > top ? other : top;
    }
    for (int32_t i = 0; i < list.num_items; ++i) {
      const float *part = items[i].partial + m * stride;
      float lanes[W];
      store(lanes, exp_nonpositive(set1(part[a.head_dim] - top)));
      for (int64_t d = 0; d < a.head_dim; ++d) sums[d] += part[d] * lanes[0];
      total += part[a.head_dim + 1] * lanes[0];
    }
    write_out(plan, *items, m, sums, total, row);
    if (!list.largest || !a.record[items->row + m / a.group]) continue;
    for (int32_t i = 0; i < list.num_items; ++i) {
      const Item &item = items[i];
      const float *kept = item.recorded_to + recorded * round_up(item.tokens, 16);
      record(list, kept, item.tokens, top, total > 0.0f ? 1.0f / total : 0.0f, list.largest + item.offset);
    }
    ++recorded;
  }
}

// x = max(x, weight) in fp16. Weights are not negative, so their bits order as integers; other sequences that share
// the page may raise it at the same time.
static void raise_scores(uint16_t *scores, const float *weights, int64_t count) {
  for (int64_t first = 0; first < count; first += W) {
    const int64_t lanes = count - first < W ? count - first : W;
    float padded[W] = {};
    uint16_t halves[W];
    bool higher = false;
    for (int64_t i = 0; i < lanes; ++i) padded[i] = weights[first + i];
    store_f16(halves, load(padded));
    for (int64_t i = 0; i < lanes; ++i) higher |= __atomic_load_n(scores + first + i, __ATOMIC_RELAXED) < halves[i];
    for (int64_t i = 0; higher && i < lanes; ++i) {
      uint16_t now = __atomic_load_n(scores + first + i, __ATOMIC_RELAXED);
      while (now < halves[i] && !__atomic_compare_exchange_n(scores + first + i, &now, halves[i], true,
                                                             __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      }
    }
  }
}

// x = sqrt(x^2 + square) in fp16. Rounding makes the order matter, so no two lists of a step may share a page here; if
// they do, nothing is lost.
static void add_squares(uint16_t *scores, const float *squares, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (squares[i] == 0.0f) continue;
    uint16_t now = __atomic_load_n(scores + i, __ATOMIC_RELAXED), next;
    do {
      const float before = f16_to_float(now);
      next = float_to_f16(std::sqrt(before * before + squares[i]));
    } while (!__atomic_compare_exchange_n(scores + i, &now, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  }
}

void attend_finish(const Plan &plan, const List &list) {
  const Args &a = plan.args;
  const Item &first = plan.items[list.first_item];
  if (first.partial) combine(plan, list);
  if (!list.largest) return;
  if (!first.partial) {
    std::memset(list.largest, 0, list.tokens * 4);
    for (int32_t i = 0; i < list.num_items; ++i) {
      const float *more = plan.items[list.first_item + i].recorded_to;
      for (int64_t j = 0; more && j < list.tokens; ++j) {
        list.largest[j] = list.squares                ? list.largest[j] + more[j]
                          : more[j] > list.largest[j] ? more[j]
                                                      : list.largest[j];
      }
    }
  }
  const int64_t place = int64_t(first.seq) * a.kv_heads + first.head;
  const float *weights = list.largest;
  const auto raise = list.squares ? add_squares : raise_scores;
  for (int32_t b = a.block_starts[place]; b < a.block_starts[place + 1]; ++b) {
    raise(a.score + a.block_ids[b] * a.block_entries, weights, a.block_lens[b]);
    weights += a.block_lens[b];
  }
  for (int32_t p = a.page_starts[first.seq]; p < a.page_starts[first.seq + 1]; ++p) {
    raise(a.seen + (int64_t(a.page_ids[p]) * a.kv_heads + first.head) * a.page_tokens, weights, a.page_lens[p]);
    weights += a.page_lens[p];
  }
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
