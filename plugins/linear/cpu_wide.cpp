// Products with bf16 or INT8 weights on vector registers, fp32 sums. A row's sums run over the inputs in their order,
// whatever rows, outputs or threads are beside it, so its bits depend on nothing else.
//
// Few rows read every weight once and little else: what counts is that weights come in the order of memory and take
// few instructions each. Many rows are bound by multiplication: four (AVX2) or twelve (AVX-512) rows share each weight.
//   bf16  [out / 16, in / 2, 16 outputs, 2 inputs]: 16 lanes of pairs; a shift gives the first, a mask the second.
//         The tiles of `cpu_kernel.cpp` in the order in which they lie there, so both kernels read one packed weight.
//   INT8  [out / 16, in, 16 outputs], one fp32 scale per output.
// The table of logits stays row by row, since the embedding reads it too: there tokens are summed over lanes of inputs.
#include "../cpu_support.hpp"
#include "../simd.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {
namespace {

constexpr int N = 16 / W;                 // vectors of a block of 16 outputs
constexpr int ROWS = W == 16 ? 12 : 4;    // rows that share a weight
constexpr int PANEL = 48;                 // rows of x that stay near while a piece of weights is read
constexpr int64_t PIECE_BYTES = 1 << 16;  // weights of one piece: a few microseconds

struct Wide {
  const float *x;      // [rows, in]
  const void *weight;  // packed
  const float *scale;  // [out], INT8 only
  const float *bias;   // [out] or null
  void *out;           // [rows, out]
  int64_t rows, in, outputs, piece_blocks;
  int32_t out_dtype;
  Pieces pieces;
};

COMMITKV_INLINE void write(const Wide &w, int64_t row, int64_t output, vf sum) {
  if (w.scale) sum = sum * load(w.scale + output);
  if (w.bias) sum = sum + load(w.bias + output);
  const int64_t at = row * w.outputs + output;
  if (w.out_dtype == BF16) {
    store_bf16(static_cast<uint16_t *>(w.out) + at, sum);
  } else {
    store(static_cast<float *>(w.out) + at, sum);
  }
}

struct Bf16 {
  static constexpr int64_t INPUTS = 2, BLOCK_BYTES = 32;  // inputs of one step; bytes of 16 outputs per input
  COMMITKV_INLINE vf weights(const char *at, int input, int n) {
    const uint16_t *pairs = reinterpret_cast<const uint16_t *>(at) + n * 2 * W;
    return input ? load_bf16_second(pairs) : load_bf16_first(pairs);
  }
};

struct Int8 {
  static constexpr int64_t INPUTS = 1, BLOCK_BYTES = 16;
  COMMITKV_INLINE vf weights(const char *at, int, int n) {
    return load_i8(reinterpret_cast<const int8_t *>(at) + n * W);
  }
};

// R rows against B blocks of 16 outputs. Meanwhile `ahead`, the block that comes next, is fetched: a core that
// multiplies several rows by a weight is too far behind to keep the memory busy by itself.
template <class Weight, int R, int B>
void multiply(const Wide &w, int64_t row, int64_t block, const char *ahead) {
  const int64_t block_bytes = w.in * Weight::BLOCK_BYTES;
  const char *weight = static_cast<const char *>(w.weight) + block * block_bytes;
  const float *x = w.x + row * w.in;
  vf sums[R][B * N];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < B * N; ++i) sums[r][i] = set1(0.0f);
  }
  for (int64_t k = 0; k < w.in; k += Weight::INPUTS) {
    if (ahead) __builtin_prefetch(ahead + k * Weight::BLOCK_BYTES, 0, 2);
#pragma GCC unroll 2
    for (int input = 0; input < Weight::INPUTS; ++input) {
#pragma GCC unroll 16
      for (int i = 0; i < B * N; ++i) {
        const vf y = Weight::weights(weight + i / N * block_bytes + k * Weight::BLOCK_BYTES, input, i % N);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) sums[r][i] = fma(set1(x[r * w.in + k + input]), y, sums[r][i]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < B * N; ++i) write(w, row + r, block * 16 + i * W, sums[r][i]);
  }
}

template <class Weight>
void multiply_block(const Wide &w, int64_t row, int64_t end, int64_t block, const char *ahead) {
  for (; row + ROWS <= end; row += ROWS, ahead = nullptr) multiply<Weight, ROWS, 1>(w, row, block, ahead);
  for (; row + 2 <= end; row += 2, ahead = nullptr) multiply<Weight, 2, 1>(w, row, block, ahead);
  if (row < end) multiply<Weight, 1, 1>(w, row, block, ahead);
}

template <class Weight>
void work_on_blocks(void *data) {
  Wide &w = *static_cast<Wide *>(data);
  const int64_t blocks = w.outputs / 16;
  for (int64_t piece; w.pieces.take(piece);) {
    const int64_t first = piece * w.piece_blocks, end = first + w.piece_blocks, last = end < blocks ? end : blocks;
    int64_t block = first;
    // One or two rows alone would wait for each other's sums: more outputs at once keep the multipliers busy.
    if (w.rows == 1) {
      for (; block + 4 <= last; block += 4) multiply<Weight, 1, 4>(w, 0, block, nullptr);
    } else if (w.rows == 2) {
      for (; block + 2 <= last; block += 2) multiply<Weight, 2, 2>(w, 0, block, nullptr);
    }
    for (int64_t row = 0; row < w.rows; row += PANEL) {
      const int64_t stop = row + PANEL < w.rows ? row + PANEL : w.rows;
      for (int64_t b = block; b < last; ++b) {
        const char *ahead = static_cast<const char *>(w.weight) + (b + 1) * w.in * Weight::BLOCK_BYTES;
        multiply_block<Weight>(w, row, stop, b, row == 0 && b + 1 < blocks ? ahead : nullptr);
      }
    }
  }
}

struct Logits {
  const float *x;      // [rows, in]; for a bf16 table the even inputs of a row, then the odd ones
  const void *table;   // [vocab, in]
  const float *scale;  // [vocab], INT8 only
  float *out;          // [rows, vocab]
  int64_t rows, in, vocab;
  Pieces pieces;
};

constexpr int TOKENS = 4;
constexpr int LOGIT_ROWS = W == 16 ? 4 : 3;  // rows that share a part of the table, bounded by the registers
constexpr int64_t PIECE_TOKENS = 96;
// Tokens taken together lie so far apart: memory delivers four long streams faster than short ones in turn.
constexpr int64_t APART = PIECE_TOKENS / TOKENS;

// Adds W (INT8) or 2 W (bf16) inputs of R rows and TOKENS tokens, `apart` values from one to the next.
template <int R>
COMMITKV_INLINE void add_inputs(const Logits &l, const uint16_t *table, int64_t apart, const float *x, int64_t k,
                                vf sums[R][TOKENS]) {
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; ++t) {
    const vf first = load_bf16_first(table + t * apart + 2 * k), second = load_bf16_second(table + t * apart + 2 * k);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      sums[r][t] = fma(load(x + r * l.in + k), first, sums[r][t]);
      sums[r][t] = fma(load(x + r * l.in + l.in / 2 + k), second, sums[r][t]);
    }
  }
}

template <int R>
COMMITKV_INLINE void add_inputs(const Logits &l, const int8_t *table, int64_t apart, const float *x, int64_t k,
                                vf sums[R][TOKENS]) {
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; ++t) {
    const vf y = load_i8(table + t * apart + k);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r][t] = fma(load(x + r * l.in + k), y, sums[r][t]);
  }
}

template <class Code, int R>
void logits_of(const Logits &l, int64_t row, int64_t token, int64_t apart) {
  const Code *table = static_cast<const Code *>(l.table) + token * l.in;
  const float *x = l.x + row * l.in;
  vf sums[R][TOKENS];
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < TOKENS; ++t) sums[r][t] = set1(0.0f);
  }
  const int64_t steps = sizeof(Code) == 2 ? l.in / 2 : l.in;
  for (int64_t k = 0; k < steps; k += W) add_inputs<R>(l, table, apart * l.in, x, k, sums);
  for (int r = 0; r < R; ++r) {
    float lanes[TOKENS], *out = l.out + (row + r) * l.vocab + token;
    reduce4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], lanes);
    for (int t = 0; t < TOKENS; ++t) out[t * apart] = l.scale ? lanes[t] * l.scale[token + t * apart] : lanes[t];
  }
}

template <class Code>
void logits_of_all(const Logits &l, int64_t token, int64_t apart) {
  int64_t row = 0;
  for (; row + LOGIT_ROWS <= l.rows; row += LOGIT_ROWS) logits_of<Code, LOGIT_ROWS>(l, row, token, apart);
  for (; row + 2 <= l.rows; row += 2) logits_of<Code, 2>(l, row, token, apart);
  if (row < l.rows) logits_of<Code, 1>(l, row, token, apart);
}

template <class Code>
void work_on_tokens(void *data) {
  Logits &l = *static_cast<Logits *>(data);
  for (int64_t piece; l.pieces.take(piece);) {
    const int64_t first = piece * PIECE_TOKENS, end = first + PIECE_TOKENS;
    if (end <= l.vocab) {
      for (int64_t token = first; token < first + APART; ++token) logits_of_all<Code>(l, token, APART);
      continue;
    }
    // The last tokens of an odd vocabulary are computed twice, with the same results.
    for (int64_t at = first; at < l.vocab; at += TOKENS) {
      logits_of_all<Code>(l, at + TOKENS <= l.vocab ? at : l.vocab - TOKENS, 1);
    }
  }
}

}  // namespace
}  // namespace COMMITKV_LEVEL
}  // namespace commitkv

// out [rows, outputs] fp32 or bf16 = x [rows, in] fp32 . weight^T (* scale) (+ bias); scale null: bf16 weights, else
// INT8. in is a multiple of 32, outputs of 16.
COMMITKV_ENTRY(commitkv_wide_linear)
(const float *x, const void *weight, const float *scale, const float *bias, void *out, int32_t out_dtype, int64_t rows,
 int64_t in, int64_t outputs, int32_t threads) {
  using namespace commitkv;
  using namespace commitkv::COMMITKV_LEVEL;
  int64_t piece_blocks = PIECE_BYTES / (in * (scale ? Int8::BLOCK_BYTES : Bf16::BLOCK_BYTES)) / 4 * 4;
  piece_blocks = piece_blocks < 4 ? 4 : piece_blocks;
  const int64_t pieces = (outputs / 16 + piece_blocks - 1) / piece_blocks;
  Wide w = {x, weight, scale, bias, out, rows, in, outputs, piece_blocks, out_dtype, {pieces, 0}};
  run_parallel(scale ? work_on_blocks<Int8> : work_on_blocks<Bf16>, &w, threads);
}

// out [rows, vocab] fp32 = x . table^T (* scale); scale null: a bf16 table and x with a row's even inputs first, else
// INT8 and x as it is. in is a multiple of 32, vocab at least 4.
COMMITKV_ENTRY(commitkv_wide_logits)
(const float *x, const void *table, const float *scale, float *out, int64_t rows, int64_t in, int64_t vocab,
 int32_t threads) {
  using namespace commitkv;
  using namespace commitkv::COMMITKV_LEVEL;
  Logits l = {x, table, scale, out, rows, in, vocab, {(vocab + PIECE_TOKENS - 1) / PIECE_TOKENS, 0}};
  run_parallel(scale ? work_on_tokens<int8_t> : work_on_tokens<uint16_t>, &l, threads);
}
