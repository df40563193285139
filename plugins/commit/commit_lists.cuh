// Lists of one row: which blocks dissolve, which entries are kept and which lie below the line, who goes into whom.
// Indexes only; all of it is in the order of the tables, so that results do not depend on how threads run.
#pragma once

#include "commit/commit_rows.cuh"

namespace commit {

HW_DEVICE int count_bits(uint32_t x) {
  x -= x >> 1 & 0x55555555u;
  x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
  return static_cast<int>(((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24);
}

// Index of the lowest bit of x > 0.
HW_DEVICE int lowest_bit(uint32_t x) { return count_bits((x & (0u - x)) - 1); }

HW_DEVICE Row open_row(const CommitParams &p, int index) {
  Row row = {p, Workspace(p)};
  row.index = index, row.head = index % p.kv_heads;
  row.pages = reinterpret_cast<Half *>(load(p.layer_pages + index / p.kv_heads));
  row.first_old = load(p.old_starts + index);
  row.num_old = load(p.old_starts + index + 1) - row.first_old;
  const int first = load(p.new_starts + index), end = load(p.new_starts + index + 1);
  int fresh = 0;
  for (int i = first + lane(); i < end; i += 32) fresh += load(p.is_new + i) != 0;
  row.num_new = warp_sum(fresh), row.first_new = end - row.num_new;
  row.kept = row.below = row.kept_coded = row.below_coded = 0;
  row.num_dissolved = row.num_searched = row.num_cached = 0;
  HW_CHECK(row.num_old <= p.max_old_blocks, "commit: more old blocks in a row than the workspace has room for");
  return row;
}

// Two lists that grow together, in thread order.
struct Lists {
  int32_t *a, *b;
  int num_a, num_b;
};

// Appends `value` of the threads that name list a or b. All threads.
HW_DEVICE void append(const Row &row, Lists &lists, int value, bool to_a, bool to_b) {
  const Shared<int32_t> sums = shared<int32_t>(row.p.at_sums, WARPS);
  const uint32_t lanes_a = hw::ballot(to_a), lanes_b = hw::ballot(to_b), before = (1u << lane()) - 1;
  const int own = warp();  // collective: not for branches that lanes take apart
  if (lane() == 0) sums.store(own, count_bits(lanes_a) | count_bits(lanes_b) << 16);
  block_sync();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const int both = sums.load(w);
    if (w == own) {
      if (to_a) store(lists.a + lists.num_a + count_bits(lanes_a & before), value);
      if (to_b) store(lists.b + lists.num_b + count_bits(lanes_b & before), value);
    }
    lists.num_a += both & 0xffff, lists.num_b += both >> 16;
  }
  block_sync();
}

HW_DEVICE bool any_alive(const Row &row, int b) {
  const uint64_t *flags = reinterpret_cast<const uint64_t *>(
      row.p.alive + static_cast<int64_t>(row.first_old + b) * BLOCK_ENTRIES);  // a multiple of 8 bytes apart
  uint64_t alive = 0;
#pragma unroll
  for (int i = 0; i < BLOCK_ENTRIES / 8; ++i) alive |= load(flags + i);
  return alive != 0;
}

// Fills work.dissolved, work.searched and work.cached. All threads.
HW_DEVICE void list_blocks(Row &row) {
  Lists lists = {row.work.dissolved, row.work.searched, 0, 0};
  for (int first = 0; first < row.num_old; first += THREADS) {
    const int b = first + thread();
    bool goes = false, is_searched = false;
    if (b < row.num_old) {
      const int id = load(row.p.old_ids + row.first_old + b);
      HW_CHECK(id < row.p.num_blocks, "commit: a block id outside the arena");
      goes = id >= 0 && row.dissolves(b);
      is_searched = id >= 0 && !goes && row.p.absorb != 0 && any_alive(row, b);
    }
    append(row, lists, b, goes, is_searched);
  }
  row.num_dissolved = lists.num_a, row.num_searched = lists.num_b;
  row.num_cached = QUANTIZED ? min_of(row.num_dissolved, row.p.cached_blocks) : 0;
  for (int i = thread(); i < row.num_dissolved; i += THREADS) {
    store(row.work.cached + load(row.work.dissolved + i), i < row.num_cached ? i : -1);
  }
}

// Fills work.kept and work.below. All threads.
HW_DEVICE void list_moving(Row &row) {
  const CommitParams &p = row.p;
  list_blocks(row);
  Lists lists = {row.work.kept, row.work.below, 0, 0};
  for (int i = 0; i < row.num_dissolved; ++i) {
    const int b = load(row.work.dissolved + i), filled = load(p.old_lens + row.first_old + b);
    for (int first = 0; first < filled; first += THREADS) {
      const int e = first + thread();
      const bool keep = e < filled && row.is_alive(b, e);
      append(row, lists, source_of(b, e), keep, e < filled && !keep);
    }
  }
  row.kept_coded = QUANTIZED ? lists.num_a : 0, row.below_coded = QUANTIZED ? lists.num_b : 0;
  for (int first = 0; first < p.num_staged; first += THREADS) {
    const int i = first + thread();
    const bool is_token = i < p.num_staged && load(p.staged + i) >= 0;
    const int mark = is_token ? load(p.marks + static_cast<int64_t>(row.index) * p.num_staged + i) : 2;
    append(row, lists, i, mark == 1, mark == 0);
  }
  row.kept = lists.num_a, row.below = lists.num_b;
  HW_CHECK(row.kept + row.below <= p.max_moving, "commit: more moving entries than the workspace has room for");
  for (int i = thread(); i < (row.below + 3) / 4 * 4; i += THREADS) store(row.work.nearest + i, -1);
  block_sync();
}

// ---- who goes into whom

HW_DEVICE int num_candidates(const Row &row) { return row.kept + row.num_old * BLOCK_ENTRIES; }

// Calls take(i, c) for the entries i below the line, in order, whose candidate c is one of this thread's: those with
// c % THREADS = thread(). Every thread looks at all of them, which needs no atomics and keeps their order.
template <typename Take>
HW_DEVICE void for_absorbed(const Row &row, const Take &take) {
  const Vec<int32_t, 4> *nearest = reinterpret_cast<const Vec<int32_t, 4> *>(row.work.nearest);
  for (int i = 0; i < row.below; i += 4) {
    const Vec<int32_t, 4> four = load(nearest + i / 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (four[j] % THREADS == thread() && four[j] >= 0) take(i + j, four[j]);
    }
  }
}

// work.cursor[c] = number of members of candidate c. A kept entry is its own first member; an entry of a block that
// stays has members only if it absorbs. Thread t counts for candidates c with c % num_threads = t.
HW_DEVICE void count_members(const Row &row, bool absorbs) {
  int32_t *count = row.work.cursor;
  for (int c = thread(); c < num_candidates(row); c += THREADS) store(count + c, c < row.kept ? 1 : 0);
  if (!absorbs) return;
  for_absorbed(row, [&](int, int c) {
    const int members = load(count + c);
    store(count + c, members == 0 ? 2 : members + 1);
  });
}

// work.offset = exclusive sums of work.cursor, work.cursor = the same. All threads.
HW_DEVICE void place_members(const Row &row) {
  const Shared<int32_t> sums = shared<int32_t>(row.p.at_sums, WARPS);
  const int candidates = num_candidates(row);
  const int own = warp();
  int total = 0;
  for (int first = 0; first < candidates; first += THREADS) {
    const int c = first + thread();
    const int mine = c < candidates ? load(row.work.cursor + c) : 0;
    int sum = mine;  // of the lanes up to this one
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = shuffle(sum, lane() >= distance ? lane() - distance : lane());
      if (lane() >= distance) sum += other;
    }
    if (lane() == 31) sums.store(own, sum);
    block_sync();
    int before = total;
    for (int w = 0; w < WARPS; ++w) {
      if (w < own) before += sums.load(w);
      total += sums.load(w);
    }
    if (c < candidates) {
      store(row.work.offset + c, before + sum - mine);
      store(row.work.cursor + c, before + sum - mine);
    }
    block_sync();
  }
  if (thread() == 0) store(row.work.offset + candidates, total);
  block_sync();
}

HW_DEVICE void add_member(const Row &row, int candidate, int source) {
  const int at = load(row.work.cursor + candidate);
  store(row.work.cursor + candidate, at + 1);
  store(row.work.members + at, Member{source, candidate, 0.0f, 0.0f});
}

HW_DEVICE void fill_members(const Row &row, bool absorbs) {
  for (int c = thread(); c < row.kept; c += THREADS) add_member(row, c, load(row.work.kept + c));
  if (!absorbs) return;
  for_absorbed(row, [&](int i, int c) {
    if (c >= row.kept && load(row.work.cursor + c) == load(row.work.offset + c)) {
      add_member(row, c, -1 - (c - row.kept));
    }
    add_member(row, c, load(row.work.below + i));
  });
}

// Shares p_j in proportion to the scores, and p_j (b_j - ln p_j), of which the merged bias is the sum.
HW_DEVICE void weigh_members(const Row &row) {
  const float ln2 = 0.693147180559945f;
  for (int c = thread(); c < num_candidates(row); c += THREADS) {
    const int first = load(row.work.offset + c), last = load(row.work.offset + c + 1);
    float total = 0.0f;
    for (int m = first; m < last; ++m) {
      Member member = load(row.work.members + m);
      member.share = clamp(score_of(row, member.source), row.p.tiny_weight, FP16_MAX);
      total += member.share;
      store(row.work.members + m, member);
    }
    for (int m = first; m < last; ++m) {
      Member member = load(row.work.members + m);
      member.share /= total;
      member.bias = member.share * (bias_of(row, member.source) - ln2 * fast_log2(member.share));
      store(row.work.members + m, member);
    }
  }
}

// After the search: adds up what was absorbed and dropped and lists the members of all candidates. All threads.
HW_DEVICE void list_members(const Row &row) {
  int absorbed = 0;
  for (int i = thread(); i < row.below; i += THREADS) absorbed += load(row.work.nearest + i) >= 0;
  absorbed = warp_sum(absorbed);
  const Shared<int32_t> sums = shared<int32_t>(row.p.at_sums, WARPS);
  const int own = warp();
  if (lane() == 0) sums.store(own, absorbed);
  block_sync();
  absorbed = 0;
  for (int w = 0; w < WARPS; ++w) absorbed += sums.load(w);
  if (thread() == 0 && row.below > 0) {
    if (absorbed > 0) atomic_add(row.p.counts, absorbed);
    if (absorbed < row.below) atomic_add(row.p.counts + 1, row.below - absorbed);
  }
  count_members(row, absorbed > 0);
  block_sync();
  place_members(row);
  fill_members(row, absorbed > 0);
  block_sync();
  weigh_members(row);
  block_sync();
}

}  // namespace commit
