// Lists of one row: which entries are kept and which lie below the line, and who goes into whom. Indexes only; all of it
// is in the order of the tables, so that results do not depend on how threads run.
#pragma once

#include "commit/commit_rows.cuh"

namespace commit {

HW_DEVICE int count_bits(uint32_t x) {
  x -= x >> 1 & 0x55555555u;
  x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
  return static_cast<int>(((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24);
}

HW_DEVICE Row open_row(const CommitParams &p, int index) {
  Row row = {p, Workspace(p)};
  row.index = index, row.head = index % p.kv_heads;
  row.pages = reinterpret_cast<Half *>(load(p.layer_pages + index / p.kv_heads));
  row.first_old = load(p.old_starts + index);
  row.num_old = load(p.old_starts + index + 1) - row.first_old;
  row.first_new = load(p.new_starts + index);
  const int end = load(p.new_starts + index + 1);
  while (row.first_new < end && load(p.is_new + row.first_new) == 0) ++row.first_new;
  row.num_new = end - row.first_new;
  row.kept = row.below = row.kept_coded = row.below_coded = row.num_cached = 0;
  HW_CHECK(row.num_old <= p.max_old_blocks, "commit: more old blocks in a row than the workspace has room for");
  return row;
}

// Appends the sources of threads that keep theirs, or have it below, in thread order. All threads.
HW_DEVICE void append_sources(Row &row, int source, bool keep, bool below) {
  const Shared<int32_t> sums = shared<int32_t>(row.p.at_sums, WARPS);
  const uint32_t kept_lanes = hw::ballot(keep), below_lanes = hw::ballot(below), before = (1u << lane()) - 1;
  if (lane() == 0) sums.store(warp(), count_bits(kept_lanes) | count_bits(below_lanes) << 16);
  block_sync();
  int kept = 0, others = 0;  // of all warps; of those before this one they are where this warp's begin
  for (int w = 0; w < WARPS; ++w) {
    const int both = sums.load(w);
    if (w == warp()) {
      if (keep) store(row.work.kept + row.kept + kept + count_bits(kept_lanes & before), source);
      if (below) store(row.work.below + row.below + others + count_bits(below_lanes & before), source);
    }
    kept += both & 0xffff, others += both >> 16;
  }
  row.kept += kept, row.below += others;
  block_sync();
}

// Fills work.kept and work.below, and gives dissolved blocks a place for their key scales. All threads.
HW_DEVICE void list_moving(Row &row) {
  const CommitParams &p = row.p;
  for (int b = 0; b < row.num_old; ++b) {
    const bool goes = row.dissolves(b) && load(p.old_ids + row.first_old + b) >= 0;
    const bool fits = QUANTIZED && goes && row.num_cached < p.cached_blocks;
    if (thread() == 0) store(row.work.cached + b, fits ? row.num_cached : -1);
    row.num_cached += fits;
    if (!goes) continue;
    HW_CHECK(load(p.old_ids + row.first_old + b) < p.num_blocks, "commit: a block id outside the arena");
    const int filled = load(p.old_lens + row.first_old + b);
    for (int first = 0; first < filled; first += THREADS) {
      const int e = first + thread();
      const bool keep = e < filled && row.is_alive(b, e);
      append_sources(row, source_of(b, e), keep, e < filled && !keep);
    }
  }
  row.kept_coded = QUANTIZED ? row.kept : 0, row.below_coded = QUANTIZED ? row.below : 0;
  for (int first = 0; first < p.num_staged; first += THREADS) {
    const int i = first + thread();
    const bool is_token = i < p.num_staged && load(p.staged + i) >= 0;
    const bool keep = is_token && load(p.staged_keep + static_cast<int64_t>(row.index) * p.num_staged + i) != 0;
    append_sources(row, i, keep, is_token && !keep);
  }
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
  int total = 0;
  for (int first = 0; first < candidates; first += THREADS) {
    const int c = first + thread();
    const int mine = c < candidates ? load(row.work.cursor + c) : 0;
    int sum = mine;  // of the lanes up to this one
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = shuffle(sum, lane() >= distance ? lane() - distance : lane());
      if (lane() >= distance) sum += other;
    }
    if (lane() == 31) sums.store(warp(), sum);
    block_sync();
    int before = total;
    for (int w = 0; w < WARPS; ++w) {
      if (w < warp()) before += sums.load(w);
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
  if (lane() == 0) sums.store(warp(), absorbed);
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
