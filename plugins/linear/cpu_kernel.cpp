// Products with bf16 weights on AMX tiles, fp32 sums. Few rows or many, the same tiles are multiplied in the same
// order, so a row's result depends neither on the rows beside it nor on the number of threads.
//
// Weights lie as tiles of 1 KiB in the order in which they are read: [out / 16, in / 32, 16 pairs, 16 outputs, 2],
// because the instruction wants two consecutive inputs of an output side by side. The table of logits stays row by row,
// since the embedding reads it too: there x is brought into pairs instead, and tokens are the rows of the tiles.
#include "../cpu_support.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include "../simd.hpp"

namespace commitkv {
namespace COMMITKV_LEVEL {
namespace {

constexpr int64_t TILE_VALUES = 512;      // one tile of weights: 32 inputs of 16 outputs
constexpr int64_t PIECE_BYTES = 1 << 16;  // weights of one piece: a few microseconds

struct Linear {
  const uint16_t *x, *weight;  // [rows, in], tiles
  const float *bias;           // [out] or null
  uint16_t *out;               // [rows, out]
  int64_t rows, in, outputs;
  int64_t piece_blocks;  // blocks of 16 outputs in one piece
  Pieces pieces;
};

COMMITKV_INLINE void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// Tiles 0-3: sums, 4-5: x, both with `rows` rows; 6-7: weights.
void configure(int64_t rows) {
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = tile < 6 ? uint8_t(rows) : 16;
  }
  memory_barrier();
  _tile_loadconfig(config);
}

// Rows [row, row + rows) of block `block`: sum + bias as bf16.
void write_block(const Linear &l, const float *sums, int64_t row, int64_t rows, int64_t block) {
  memory_barrier();
  const vf bias = l.bias ? load(l.bias + block * 16) : set1(0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    store_bf16(l.out + (row + i) * l.outputs + block * 16, load(sums + i * 16) + bias);
  }
}

// M row tiles of `rows` rows each against N blocks.
template <int M, int N>
void multiply(const Linear &l, int64_t row, int64_t rows, int64_t block) {
  _tile_zero(0);
  if (N > 1) _tile_zero(1);
  if (M > 1) _tile_zero(2);
  if (M > 1 && N > 1) _tile_zero(3);
  const int64_t steps = l.in / 32, stride = l.in * 2;
  const uint16_t *x = l.x + row * l.in, *w = l.weight + block * steps * TILE_VALUES;
  for (int64_t k = 0; k < steps; ++k) {
    _tile_loadd(4, x + k * 32, stride);
    _tile_loadd(6, w + k * TILE_VALUES, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (N > 1) {
      _tile_loadd(7, w + (steps + k) * TILE_VALUES, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (M > 1) {
      _tile_loadd(5, x + 16 * l.in + k * 32, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (N > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[4][256];
  _tile_stored(0, sums[0], 64);
  write_block(l, sums[0], row, rows, block);
  if (N > 1) {
    _tile_stored(1, sums[1], 64);
    write_block(l, sums[1], row, rows, block + 1);
  }
  if (M > 1) {
    _tile_stored(2, sums[2], 64);
    write_block(l, sums[2], row + 16, rows, block);
  }
  if (M > 1 && N > 1) {
    _tile_stored(3, sums[3], 64);
    write_block(l, sums[3], row + 16, rows, block + 1);
  }
}

// All blocks of a piece for row tiles from `row` on.
template <int M>
void multiply_blocks(const Linear &l, int64_t row, int64_t rows, int64_t first, int64_t last) {
  int64_t block = first;
  for (; block + 2 <= last; block += 2) multiply<M, 2>(l, row, rows, block);
  if (block < last) multiply<M, 1>(l, row, rows, block);
}

void work_on_blocks(void *data) {
  Linear &l = *static_cast<Linear *>(data);
  const int64_t whole = l.rows / 16 * 16, rest = l.rows - whole, blocks = l.outputs / 16;
  int64_t configured = 0;
  for (int64_t piece; l.pieces.take(piece);) {
    const int64_t first = piece * l.piece_blocks, end = first + l.piece_blocks, last = end < blocks ? end : blocks;
    if (whole && configured != 16) configure(16), configured = 16;
    int64_t row = 0;
    for (; row + 32 <= whole; row += 32) multiply_blocks<2>(l, row, 16, first, last);
    if (row < whole) multiply_blocks<1>(l, row, 16, first, last);
    if (!rest) continue;
    if (configured != rest) configure(rest), configured = rest;
    multiply_blocks<1>(l, whole, rest, first, last);
  }
  if (configured) _tile_release();
}

struct Logits {
  const uint16_t *pairs, *table;  // [in / 2, rows, 2], [vocab, in]
  float *out;                     // [rows, vocab]
  int64_t rows, in, vocab;        // at most 16 rows
  Pieces pieces;
};

constexpr int64_t PIECE_TOKENS = 96;

// Tiles 0-2: sums [16 tokens, rows], 3-5: 16 rows of the table, 6: pairs of x.
void configure_logits(int64_t rows) {
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 7; ++tile) {
    config[16 + 2 * tile] = tile >= 3 && tile < 6 ? 64 : uint8_t(rows * 4);
    config[48 + tile] = 16;
  }
  memory_barrier();
  _tile_loadconfig(config);
}

void write_logits(const Logits &l, const float *sums, int64_t token) {
  memory_barrier();
  for (int64_t row = 0; row < l.rows; ++row) {
    float *out = l.out + row * l.vocab + token;
    for (int i = 0; i < 16; ++i) out[i] = sums[i * l.rows + row];
  }
}

// Logits of tokens [token, token + 16 * N).
template <int N>
void logits_of(const Logits &l, int64_t token) {
  _tile_zero(0);
  if (N > 1) _tile_zero(1);
  if (N > 2) _tile_zero(2);
  const int64_t stride = l.in * 2;
  const uint16_t *table = l.table + token * l.in;
  for (int64_t k = 0; k < l.in; k += 32) {
    _tile_loadd(6, l.pairs + k * l.rows, l.rows * 4);
    _tile_loadd(3, table + k, stride);
    _tile_dpbf16ps(0, 3, 6);
    if (N < 3) continue;
    _tile_loadd(4, table + 16 * l.in + k, stride);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, table + 32 * l.in + k, stride);
    _tile_dpbf16ps(2, 5, 6);
  }
  alignas(64) float sums[256];
  _tile_stored(0, sums, l.rows * 4);
  write_logits(l, sums, token);
  if (N < 3) return;
  _tile_stored(1, sums, l.rows * 4);
  write_logits(l, sums, token + 16);
  _tile_stored(2, sums, l.rows * 4);
  write_logits(l, sums, token + 32);
}

void work_on_tokens(void *data) {
  Logits &l = *static_cast<Logits *>(data);
  bool configured = false;
  for (int64_t piece; l.pieces.take(piece);) {
    if (!configured) configure_logits(l.rows), configured = true;
    int64_t token = piece * PIECE_TOKENS;
    const int64_t end = token + PIECE_TOKENS, last = end < l.vocab ? end : l.vocab;
    for (; token + 48 <= last; token += 48) logits_of<3>(l, token);
    // The last block of an odd vocabulary overlaps the one before it, with the same results.
    for (; token < last; token += 16) logits_of<1>(l, token + 16 <= l.vocab ? token : l.vocab - 16);
  }
  if (configured) _tile_release();
}

}  // namespace
}  // namespace COMMITKV_LEVEL
}  // namespace commitkv

// out [rows, outputs] bf16 = x [rows, in] bf16 . weight^T + bias; in is a multiple of 32, outputs of 16.
COMMITKV_ENTRY(commitkv_linear)
(const uint16_t *x, const uint16_t *weight, const float *bias, uint16_t *out, int64_t rows, int64_t in, int64_t outputs,
 int32_t threads) {
  using namespace commitkv;
  using namespace commitkv::COMMITKV_LEVEL;
  int64_t piece_blocks = PIECE_BYTES / (in * 32) / 2 * 2;
  piece_blocks = piece_blocks < 2 ? 2 : piece_blocks;
  const int64_t blocks = outputs / 16;
  Linear l = {x, weight, bias, out, rows, in, outputs, piece_blocks, {(blocks + piece_blocks - 1) / piece_blocks, 0}};
  run_parallel(work_on_blocks, &l, threads);
}

// out [rows, vocab] fp32 = x . table^T of up to 16 rows; x as pairs [in / 2, rows, 2]; in is a multiple of 32,
// vocab at least 16.
COMMITKV_ENTRY(commitkv_logits)
(const uint16_t *pairs, const uint16_t *table, float *out, int64_t rows, int64_t in, int64_t vocab, int32_t threads) {
  using namespace commitkv;
  using namespace commitkv::COMMITKV_LEVEL;
  if (rows == 0) return;  // tiles cannot be empty
  Logits l = {pairs, table, out, rows, in, vocab, {(vocab + PIECE_TOKENS - 1) / PIECE_TOKENS, 0}};
  run_parallel(work_on_tokens, &l, threads);
}
#endif
