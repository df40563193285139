// Products with bf16 or INT8 weights on vector registers. A row's sums run over the inputs in their order, whatever
// rows, outputs or threads are beside it, so its bits depend on nothing else.
//
// Few rows read every weight once and little else: what counts is that weights come in the order of memory and take
// few instructions each. Many rows are bound by multiplication: four (AVX2) or twelve (AVX-512) rows share each weight.
// Weights lie as [out / 16, in / 2, 16 outputs, 2 inputs], so that a lane reads a pair of inputs of its output:
//   bf16  multiplied as fp32; a shift gives the first of a pair, a mask the second. The tiles of `cpu_kernel.cpp` in
//         the order in which they lie there, so both kernels read one packed weight.
//   INT8  with one fp32 scale per output; `cpu_int8.hpp` says how they are multiplied.
// The table of logits stays row by row, since the embedding reads it too: there tokens are summed over lanes of inputs.
#include "../row_pieces.hpp"
#include "cpu_int8.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {
namespace {

constexpr int N = 16 / W;                 // vectors of a block of 16 outputs
constexpr int ROWS = W == 16 ? 12 : 4;    // rows that share a weight
constexpr int PANEL = 48;                 // rows of x that stay near while a piece of weights is read
constexpr int64_t LINE = 64;              // bytes that memory delivers at once
constexpr int64_t PIECE_BYTES = 1 << 16;  // weights of one piece: a few microseconds

// Rows of x for products with packed bf16 weights.
struct Bf16Rows {
  static constexpr int64_t BLOCK_BYTES = 32;  // of 16 outputs per input

  int64_t in;
  float *values;  // [rows, in]

  Bf16Rows(int64_t inputs, int64_t, float *room) : in(inputs), values(room) {}

  template <int T>
  void take(const void *x, int64_t row) const {
    for (int64_t i = row * in; i < (row + 1) * in; i += W) store(values + i, load_some<T>(x, i, (row + 1) * in));
  }

  // sums += R rows from `row` on times B blocks of 16 outputs.
  template <int R, int B>
  COMMITKV_INLINE void add_blocks(const Bf16Rows &x, int64_t row, const char *weight, int64_t apart, BlocksAhead ahead,
                                  vf sums[R][B * N]) {
    const float *values = x.values + row * x.in;
    for (int64_t k = 0; k < x.in; k += 2) {
      ahead.fetch<B>();
#pragma GCC unroll 2
      for (int input = 0; input < 2; ++input) {
#pragma GCC unroll 16
        for (int i = 0; i < B * N; ++i) {
          const char *at = weight + i / N * apart + k * BLOCK_BYTES;
          const uint16_t *pairs = reinterpret_cast<const uint16_t *>(at) + i % N * 2 * W;
          const vf y = input ? load_bf16_second(pairs) : load_bf16_first(pairs);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) sums[r][i] = fma(set1(values[r * x.in + k + input]), y, sums[r][i]);
        }
      }
    }
  }
};

// Rows of x for logits of a bf16 table.
struct Bf16TableRows {
  int64_t in;
  float *values;  // [rows, in], a row's even inputs before its odd ones

  Bf16TableRows(int64_t inputs, int64_t, float *room) : in(inputs), values(room) {}

  template <int T>
  void take(const void *x, int64_t row) const {
    for (int64_t k = 0; k < in; ++k) values[row * in + k % 2 * (in / 2) + k / 2] = get<T>(x, row * in + k);
  }

  // totals: products of R rows from `row` on with four rows of the table, `apart` bytes from one to the next.
  template <int R>
  COMMITKV_INLINE void multiply_tokens(const Bf16TableRows &x, int64_t row, const char *table, int64_t apart,
                                       TokensAhead ahead, float totals[R][4]) {
    const float *values = x.values + row * x.in;
    vf sums[R][4];
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < 4; ++t) sums[r][t] = set1(0.0f);
    }
    for (int64_t k = 0; k < x.in / 2; k += W) {
      if (k % 16 == 0) ahead.fetch<64>(k * 4);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        const uint16_t *pairs = reinterpret_cast<const uint16_t *>(table + t * apart) + 2 * k;
        const vf first = load_bf16_first(pairs), second = load_bf16_second(pairs);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sums[r][t] = fma(load(values + r * x.in + k), first, sums[r][t]);
          sums[r][t] = fma(load(values + r * x.in + x.in / 2 + k), second, sums[r][t]);
        }
      }
    }
    for (int r = 0; r < R; ++r) reduce4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], totals[r]);
  }
};

// Rows as they come, of type T, and where X holds them.
template <class X>
struct Given {
  const X &to;
  const void *x;  // [rows, in]
  int64_t rows;

  template <int T>
  static void take(const Given &given, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) given.to.template take<T>(given.x, row);
  }
};

template <class X>
void take_rows(const X &to, const void *x, int32_t dtype, int64_t rows, int32_t threads) {
  const Given<X> given = {to, x, rows};
  share_rows(given, to.in, threads, dtype == BF16 ? Given<X>::template take<BF16> : Given<X>::template take<F32>);
}

template <class X>
struct Wide {
  X x;
  const char *weight;  // packed
  const float *scale;  // [out], INT8 only
  const float *bias;   // [out] or null
  void *out;           // [rows, out]
  int64_t rows, outputs;
  int32_t dtype;  // of x before it was taken, and of out
  // A block is 16 outputs. Threads take pieces of units: one block each, or with few rows several.
  int64_t block_bytes, units, piece_units;
  Pieces pieces;
};

template <class X>
COMMITKV_INLINE void write(const Wide<X> &w, int64_t row, int64_t output, vf sum) {
  if (w.scale) sum = sum * load(w.scale + output);
  if (w.bias) sum = sum + load(w.bias + output);
  const int64_t at = row * w.outputs + output;
  if (w.dtype == BF16) {
    store_bf16(static_cast<uint16_t *>(w.out) + at, sum);
  } else {
    store(static_cast<float *>(w.out) + at, sum);
  }
}

// R rows against B blocks of 16 outputs, `apart` blocks from one to the next.
template <int R, int B, class X>
void multiply(const Wide<X> &w, int64_t row, int64_t block, int64_t apart, BlocksAhead ahead) {
  vf sums[R][B * N];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < B * N; ++i) sums[r][i] = set1(0.0f);
  }
  X::template add_blocks<R, B>(w.x, row, w.weight + block * w.block_bytes, apart * w.block_bytes, ahead, sums);
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < B * N; ++i) write(w, row + r, (block + i / N * apart) * 16 + i % N * W, sums[r][i]);
  }
}

// One or two rows against a unit of B blocks, far apart. More outputs at once keep the multipliers busy, where sums of
// few would wait for each other, and memory delivers several long streams faster than one.
template <int R, int B, class X>
void multiply_unit(const Wide<X> &w, int64_t unit) {
  const int64_t apart = w.outputs / 16 / B, bytes = w.block_bytes, next = unit + 1 < apart ? unit + 1 : unit;
  if (unit < apart) {
    multiply<R, B>(w, 0, unit, apart, {w.weight + next * bytes, apart * bytes, LINE});
  } else {  // blocks left over are units of their own
    multiply<R, 1>(w, 0, unit + (B - 1) * apart, 0, {w.weight, 0, 0});
  }
}

// Rows [row, end) against a block. Each pass over it fetches a part of the next.
template <class X>
void multiply_block(const Wide<X> &w, int64_t row, int64_t end, int64_t block) {
  const int64_t passes = (end - row) / ROWS + ((end - row) % ROWS + 2) / 3;
  BlocksAhead ahead = {w.weight + (block + 1 < w.units ? block + 1 : block) * w.block_bytes, 0, LINE / passes};
  const int64_t part = w.block_bytes / passes;
  for (; row + ROWS <= end; row += ROWS, ahead.at += part) multiply<ROWS, 1>(w, row, block, 0, ahead);
  for (; row + 3 <= end; row += 3, ahead.at += part) multiply<3, 1>(w, row, block, 0, ahead);
  if (row + 2 == end) multiply<2, 1>(w, row, block, 0, ahead);
  if (row + 1 == end) multiply<1, 1>(w, row, block, 0, ahead);
}

template <class X>
void work_on_units(void *data) {
  Wide<X> &w = *static_cast<Wide<X> *>(data);
  for (int64_t piece; w.pieces.take(piece);) {
    const int64_t first = piece * w.piece_units, end = first + w.piece_units, last = end < w.units ? end : w.units;
    if (w.rows == 1) {
      for (int64_t unit = first; unit < last; ++unit) multiply_unit<1, 4>(w, unit);
    } else if (w.rows == 2) {
      for (int64_t unit = first; unit < last; ++unit) multiply_unit<2, 2>(w, unit);
    } else {
      for (int64_t row = 0; row < w.rows; row += PANEL) {
        const int64_t stop = row + PANEL < w.rows ? row + PANEL : w.rows;
        for (int64_t block = first; block < last; ++block) multiply_block(w, row, stop, block);
      }
    }
  }
}

template <class X>
void multiply_all(Wide<X> w, const void *x, int32_t threads) {
  take_rows(w.x, x, w.dtype, w.rows, threads);
  const int64_t blocks = w.outputs / 16, together = w.rows == 1 ? 4 : w.rows == 2 ? 2 : 1;
  w.block_bytes = w.x.in * X::BLOCK_BYTES;
  const int64_t most = PIECE_BYTES / w.block_bytes / together;
  w.units = blocks / together + blocks % together;
  w.piece_units = most > 1 ? most : 1;
  w.pieces = {(w.units + w.piece_units - 1) / w.piece_units, 0};
  run_parallel(work_on_units<X>, &w, threads);
}

template <class X>
struct Logits {
  X x;
  const char *table;   // [vocab, in]
  const float *scale;  // [vocab], INT8 only
  float *out;          // [rows, vocab]
  int64_t rows, vocab, token_bytes;
  Pieces pieces;
};

constexpr int TOKENS = 4;
constexpr int LOGIT_ROWS = W == 16 ? 4 : 3;  // rows that share a part of the table, bounded by the registers
constexpr int64_t PIECE_TOKENS = 96;
// Tokens taken together lie so far apart: memory delivers four long streams faster than short ones in turn.
constexpr int64_t APART = PIECE_TOKENS / TOKENS;

template <int R, class X>
void logits_of(const Logits<X> &l, int64_t row, int64_t token, int64_t apart, const TokensAhead &ahead) {
  float totals[R][TOKENS];
  X::template multiply_tokens<R>(l.x, row, l.table + token * l.token_bytes, apart * l.token_bytes, ahead, totals);
  for (int r = 0; r < R; ++r) {
    float *out = l.out + (row + r) * l.vocab + token;
    for (int t = 0; t < TOKENS; ++t) {
      out[t * apart] = l.scale ? totals[r][t] * l.scale[token + t * apart] : totals[r][t];
    }
  }
}

// Meanwhile the tokens from `next` on are fetched.
template <class X>
void logits_of_all(const Logits<X> &l, int64_t token, int64_t apart, int64_t next) {
  const int64_t passes = l.rows / LOGIT_ROWS + (l.rows % LOGIT_ROWS + 1) / 2;
  TokensAhead ahead = {l.table + next * l.token_bytes, apart * l.token_bytes, 0, passes};
  int64_t row = 0;
  for (; row + LOGIT_ROWS <= l.rows; row += LOGIT_ROWS, ++ahead.wait) {
    logits_of<LOGIT_ROWS>(l, row, token, apart, ahead);
  }
  for (; row + 2 <= l.rows; row += 2, ++ahead.wait) logits_of<2>(l, row, token, apart, ahead);
  if (row < l.rows) logits_of<1>(l, row, token, apart, ahead);
}

template <class X>
void work_on_tokens(void *data) {
  Logits<X> &l = *static_cast<Logits<X> *>(data);
  for (int64_t piece; l.pieces.take(piece);) {
    const int64_t first = piece * PIECE_TOKENS, end = first + PIECE_TOKENS;
    if (end <= l.vocab) {
      const int64_t after = end + PIECE_TOKENS <= l.vocab ? end : first;
      for (int64_t token = first; token < first + APART; ++token) {
        logits_of_all(l, token, APART, token + 1 < first + APART ? token + 1 : after);
      }
      continue;
    }
    // The last tokens of an odd vocabulary are computed twice, with the same results.
    for (int64_t at = first; at < l.vocab; at += TOKENS) {
      const int64_t token = at + TOKENS <= l.vocab ? at : l.vocab - TOKENS;
      logits_of_all(l, token, 1, token);
    }
  }
}

template <class X>
void logits_of_rows(Logits<X> l, const void *x, int32_t dtype, int32_t threads) {
  take_rows(l.x, x, dtype, l.rows, threads);
  l.pieces = {(l.vocab + PIECE_TOKENS - 1) / PIECE_TOKENS, 0};
  run_parallel(work_on_tokens<X>, &l, threads);
}

}  // namespace
}  // namespace COMMITKV_LEVEL
}  // namespace commitkv

// out [rows, outputs] = x [rows, in] . weight^T (* scale) (+ bias), x and out fp32 or bf16; scale null: bf16 weights,
// else INT8. in is a multiple of 32, outputs of 16; room holds rows * in floats.
COMMITKV_ENTRY(commitkv_wide_linear)
(const void *x, const char *weight, const float *scale, const float *bias, void *out, float *room, int32_t dtype,
 int64_t rows, int64_t in, int64_t outputs, int32_t threads) {
  using namespace commitkv::COMMITKV_LEVEL;
  if (scale) {
    multiply_all<Int8Rows>({{in, rows, room}, weight, scale, bias, out, rows, outputs, dtype, 0, 0, 0, {}}, x, threads);
  } else {
    multiply_all<Bf16Rows>({{in, rows, room}, weight, scale, bias, out, rows, outputs, dtype, 0, 0, 0, {}}, x, threads);
  }
}

// out [rows, vocab] fp32 = x [rows, in] . table^T (* scale), x fp32 or bf16; scale null: a bf16 table, else INT8. in is
// a multiple of 32, vocab at least 4; room holds rows * in floats.
COMMITKV_ENTRY(commitkv_wide_logits)
(const void *x, const char *table, const float *scale, float *out, float *room, int32_t dtype, int64_t rows, int64_t in,
 int64_t vocab, int32_t threads) {
  using namespace commitkv::COMMITKV_LEVEL;
  if (scale) {
    logits_of_rows<Int8Rows>({{in, rows, room}, table, scale, out, rows, vocab, in, {}}, x, dtype, threads);
  } else {
    logits_of_rows<Bf16TableRows>({{in, rows, room}, table, scale, out, rows, vocab, in * 2, {}}, x, dtype, threads);
  }
}
