// Shares the rows of an operation among threads; included by per-level units. Pieces follow from lengths alone.
#pragma once

#include "cpu_support.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {
namespace {

constexpr int64_t PIECE_VALUES = 1 << 15;  // values of one piece: some 10 us, so that waking a thread pays

// Params has a member `rows`; the function handles rows [first, last).
template <typename Params>
struct RowJob {
  const Params *params;
  void (*rows)(const Params &params, int64_t first, int64_t last);
  int64_t piece_rows;
  Pieces pieces;
};

template <typename Params>
void work_on_rows(void *data) {
  RowJob<Params> &job = *static_cast<RowJob<Params> *>(data);
  for (int64_t piece; job.pieces.take(piece);) {
    const int64_t first = piece * job.piece_rows, end = first + job.piece_rows;
    job.rows(*job.params, first, end < job.params->rows ? end : job.params->rows);
  }
}

template <typename Params>
void share_rows(const Params &params, int64_t row_values, int32_t threads, decltype(RowJob<Params>::rows) rows) {
  const int64_t most = PIECE_VALUES / row_values, piece_rows = most > 1 ? most : 1;
  RowJob<Params> job = {&params, rows, piece_rows, {(params.rows + piece_rows - 1) / piece_rows, 0}};
  if (threads < 2 || job.pieces.count < 2) {
    rows(params, 0, params.rows);
  } else {
    run_parallel(work_on_rows<Params>, &job, threads);
  }
}

}  // namespace
}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
