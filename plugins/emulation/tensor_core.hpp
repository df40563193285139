// Tensor cores on the CPU: one lane carries ldmatrix and mma out for its warp. Part of hw_emulated.hpp.
#pragma once

namespace hw {

struct FragmentA {
  uint32_t r[4];
};
struct FragmentB {
  uint32_t r[2];
};
struct FragmentC {
  float r[4];
};

namespace emulation {

template <int MATRICES>
struct MatrixLoad {
  int row;  // byte offset of this lane's row; lanes beyond 8 * MATRICES give none
  Vec<uint32_t, MATRICES> result;
};

template <int MATRICES, bool TRANSPOSED>
void load_matrices(void **slots) {
  for (int m = 0; m < MATRICES; ++m) {
    uint16_t rows[8][8];
    for (int r = 0; r < 8; ++r) {
      machine->shared_read(static_cast<MatrixLoad<MATRICES> *>(slots[8 * m + r])->row, rows[r], 16, 8 * m + r);
    }
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = 2 * (i % 4);
      const uint32_t lo = TRANSPOSED ? rows[t][g] : rows[g][t], hi = TRANSPOSED ? rows[t + 1][g] : rows[g][t + 1];
      static_cast<MatrixLoad<MATRICES> *>(slots[i])->result[m] = lo | hi << 16;
    }
  }
}

template <int MATRICES, bool TRANSPOSED, typename T>
Vec<uint32_t, MATRICES> ldmatrix(const char *word, Shared<T> rows, int i) {
  MatrixLoad<MATRICES> mine{};
  if (lane() < 8 * MATRICES) mine.row = rows.byte_of(i, 16);
  machine->converge(word, &mine, load_matrices<MATRICES, TRANSPOSED>);
  return mine.result;
}

}  // namespace emulation

template <typename T>
Vec<uint32_t, 4> ldmatrix_x4(Shared<T> rows, int i) {
  return emulation::ldmatrix<4, false>("ldmatrix_x4", rows, i);
}
template <typename T>
Vec<uint32_t, 4> ldmatrix_x4_trans(Shared<T> rows, int i) {
  return emulation::ldmatrix<4, true>("ldmatrix_x4_trans", rows, i);
}
template <typename T>
Vec<uint32_t, 2> ldmatrix_x2(Shared<T> rows, int i) {
  return emulation::ldmatrix<2, false>("ldmatrix_x2", rows, i);
}
template <typename T>
Vec<uint32_t, 2> ldmatrix_x2_trans(Shared<T> rows, int i) {
  return emulation::ldmatrix<2, true>("ldmatrix_x2_trans", rows, i);
}

namespace emulation {

template <typename T>
uint32_t pack_as(float lo, float hi) {
  return from_float<T>(lo).bits | static_cast<uint32_t>(from_float<T>(hi).bits) << 16;
}
template <typename T>
Vec<float, 2> unpack_as(uint32_t bits) {
  return {to_float(T{static_cast<uint16_t>(bits)}), to_float(T{static_cast<uint16_t>(bits >> 16)})};
}
// The product of two halves is exact in fp64, so that only the sum is rounded, as the hardware does.
template <typename T>
uint32_t fma_as(uint32_t a, uint32_t b, uint32_t c) {
  const Vec<float, 2> x = unpack_as<T>(a), y = unpack_as<T>(b), z = unpack_as<T>(c);
  return pack_as<T>(static_cast<float>(static_cast<double>(x[0]) * y[0] + z[0]),
                    static_cast<float>(static_cast<double>(x[1]) * y[1] + z[1]));
}

inline void transpose(void **slots) {
  uint16_t rows[8][8];
  for (int i = 0; i < 32; ++i) std::memcpy(&rows[i / 4][2 * (i % 4)], slots[i], 4);
  for (int i = 0; i < 32; ++i) {
    const int g = i / 4, t = 2 * (i % 4);
    *static_cast<uint32_t *>(slots[i]) = rows[t][g] | static_cast<uint32_t>(rows[t + 1][g]) << 16;
  }
}

struct Multiply {
  FragmentC *c;
  const FragmentA *a;
  const FragmentB *b;
};

template <typename T>
void multiply(void **slots) {
  float a[16][16], b[16][8], c[16][8];
  for (int i = 0; i < 32; ++i) {
    const auto *slot = static_cast<const Multiply *>(slots[i]);
    const int g = i / 4, t = 2 * (i % 4);
    for (int r = 0; r < 4; ++r) {
      const Vec<float, 2> pair = unpack_as<T>(slot->a->r[r]);
      float *to = &a[g + 8 * (r & 1)][t + 8 * (r >> 1)];
      to[0] = pair[0], to[1] = pair[1];
      c[g + 8 * (r >> 1)][t + (r & 1)] = slot->c->r[r];
    }
    for (int r = 0; r < 2; ++r) {
      const Vec<float, 2> pair = unpack_as<T>(slot->b->r[r]);
      b[t + 8 * r][g] = pair[0], b[t + 8 * r + 1][g] = pair[1];
    }
  }
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 8; ++n) c[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int i = 0; i < 32; ++i) {
    const auto *slot = static_cast<const Multiply *>(slots[i]);
    const int g = i / 4, t = 2 * (i % 4);
    for (int r = 0; r < 4; ++r) slot->c->r[r] = c[g + 8 * (r >> 1)][t + (r & 1)];
  }
}

}  // namespace emulation

inline uint32_t transpose_8x8(uint32_t row) {
  machine->converge("transpose_8x8", &row, emulation::transpose);
  return row;
}
inline uint32_t pack2_fp16(float lo, float hi) { return emulation::pack_as<Fp16>(lo, hi); }
inline uint32_t fma2_fp16(uint32_t a, uint32_t b, uint32_t c) { return emulation::fma_as<Fp16>(a, b, c); }
inline void mma_fp16(FragmentC &c, const FragmentA &a, const FragmentB &b) {
  emulation::Multiply mine{&c, &a, &b};
  machine->converge("mma_fp16", &mine, emulation::multiply<Fp16>);
}

#ifdef ELEMENT
#if ELEMENT == 0
using Half = Fp16;
#else
using Half = Bf16;
#endif

inline uint32_t pack2(float lo, float hi) { return emulation::pack_as<Half>(lo, hi); }
inline Vec<float, 2> unpack2(uint32_t bits) { return emulation::unpack_as<Half>(bits); }
inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) { return emulation::fma_as<Half>(a, b, c); }
inline void mma(FragmentC &c, const FragmentA &a, const FragmentB &b) {
  emulation::Multiply mine{&c, &a, &b};
  machine->converge("mma", &mine, emulation::multiply<Half>);
}
#endif

}  // namespace hw
