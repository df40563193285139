// One vector of floats, `vf`, of W lanes, per instruction level. Included by translation units that are compiled once
// per level with -DCOMMITKV_LEVEL=<name> and matching -m flags; everything lies in namespace commitkv::<name>, so that
// code built for a newer processor is never merged with code for an older one (for the same reason these units use no
// templates of the C++ library).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace commitkv {
namespace COMMITKV_LEVEL {

#define COMMITKV_INLINE static inline __attribute__((always_inline))

COMMITKV_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

COMMITKV_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

COMMITKV_INLINE float bf16_to_float(uint16_t half) { return bits_to_float(uint32_t(half) << 16); }

// Round to nearest even; a NaN stays a NaN.
COMMITKV_INLINE uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

COMMITKV_INLINE float f16_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // Scaling by 2^112 moves the exponent bias from 15 to 127 and makes subnormals normal.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * bits_to_float(0x77800000u)));
}

COMMITKV_INLINE uint16_t float_to_f16(float value) {
  const uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal in fp16: adding 0.5 rounds at 2^-24
    return uint16_t(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

#if defined(__AVX512F__)

constexpr int W = 16;
typedef __m512 vf;

COMMITKV_INLINE vf load(const float *p) { return _mm512_loadu_ps(p); }
COMMITKV_INLINE void store(float *p, vf x) { _mm512_storeu_ps(p, x); }
COMMITKV_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
COMMITKV_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
COMMITKV_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
COMMITKV_INLINE float hmax(vf x) { return _mm512_reduce_max_ps(x); }
COMMITKV_INLINE float hsum(vf x) { return _mm512_reduce_add_ps(x); }
COMMITKV_INLINE vf round_nearest(vf x) { return _mm512_roundscale_ps(x, 8); }
COMMITKV_INLINE vf scale_pow2(vf x, vf n) { return _mm512_scalef_ps(x, n); }
COMMITKV_INLINE vf load_bf16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
COMMITKV_INLINE vf load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
// Of W pairs of bf16 the first ones, and the second ones.
COMMITKV_INLINE vf load_bf16_first(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
COMMITKV_INLINE vf load_bf16_second(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int32_t(0xffff0000))));
}
COMMITKV_INLINE vf load_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
COMMITKV_INLINE vf load_u8(const uint8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
// The permutation looks at the low four bits of each index only: it masks and converts at once.
COMMITKV_INLINE vf nibble_values() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
COMMITKV_INLINE vf load_u4_low(const uint8_t *p) {
  return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), nibble_values());
}
COMMITKV_INLINE vf load_u4_high(const uint8_t *p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), nibble_values());
}
COMMITKV_INLINE void store_f16(uint16_t *p, vf x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, 8)); }
COMMITKV_INLINE void store_bf16(uint16_t *p, vf x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

COMMITKV_INLINE __m256 fold(vf x) {
  return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_castps512_ps256(_mm512_shuffle_f32x4(x, x, 0xee)));
}

// out[i] = sum of lanes i, i + 4, ...
COMMITKV_INLINE void fold4(vf x, float *out) {
  const __m256 half = fold(x);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// out[i] = sum of the lanes of x_i.
COMMITKV_INLINE void reduce4(vf a, vf b, vf c, vf d, float *out) {
  const vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  fold4(_mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)), out);
}

// out[j * stride + i] = rows[i][j] for i, j < W.
COMMITKV_INLINE void transpose(vf *r, float *out, int64_t stride) {
  vf t[16];
  for (int i = 0; i < 16; i += 4) {
    const vf a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    const vf c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    const vf a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    const vf c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    store(out + (i + 0) * stride, _mm512_shuffle_f32x4(a, c, 0x88));
    store(out + (i + 4) * stride, _mm512_shuffle_f32x4(b, d, 0x88));
    store(out + (i + 8) * stride, _mm512_shuffle_f32x4(a, c, 0xdd));
    store(out + (i + 12) * stride, _mm512_shuffle_f32x4(b, d, 0xdd));
  }
}

// 2 W integers of 16 bits, or W of 32.
typedef __m512i vi;

COMMITKV_INLINE vi zero_i() { return _mm512_setzero_si512(); }
COMMITKV_INLINE vi load_i16(const int16_t *p) { return _mm512_loadu_si512(p); }
COMMITKV_INLINE vi load_i8_as_i16(const int8_t *p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
// The two integers at p, over and over.
COMMITKV_INLINE vi load_pair(const int16_t *p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
// sum + a b, products of two neighbours added up. Written out, since compilers that know it for an addition add up
// products first and then run out of registers.
COMMITKV_INLINE vi add_products(vi a, vi b, vi sum) {
  asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(_mm512_madd_epi16(a, b)));
  return sum;
}
COMMITKV_INLINE vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }
// In turn the sums of four lanes of a, b, c and d; `fold4` adds up those of each.
COMMITKV_INLINE vi add_neighbours(vi a, vi b, vi c, vi d) {
  const vi ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const vi cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
// Nearest integers of a, then of b; what 16 bits cannot hold becomes the nearest that they can.
COMMITKV_INLINE void store_i16(int16_t *p, vf a, vf b) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
  _mm256_storeu_si256((__m256i *)(p + W), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(b)));
}

#elif defined(__AVX2__)

constexpr int W = 8;
typedef __m256 vf;

COMMITKV_INLINE vf load(const float *p) { return _mm256_loadu_ps(p); }
COMMITKV_INLINE void store(float *p, vf x) { _mm256_storeu_ps(p, x); }
COMMITKV_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
COMMITKV_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
COMMITKV_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
COMMITKV_INLINE float hmax(vf x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
COMMITKV_INLINE float hsum(vf x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
COMMITKV_INLINE vf round_nearest(vf x) { return _mm256_round_ps(x, 8); }
COMMITKV_INLINE vf scale_pow2(vf x, vf n) {
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}
COMMITKV_INLINE vf load_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
COMMITKV_INLINE vf load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
COMMITKV_INLINE vf load_bf16_first(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 16));
}
COMMITKV_INLINE vf load_bf16_second(const uint16_t *p) {
  const __m256i high = _mm256_set1_epi32(int32_t(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), high));
}
COMMITKV_INLINE vf load_i8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
COMMITKV_INLINE __m256i load_bytes(const uint8_t *p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
COMMITKV_INLINE vf load_u8(const uint8_t *p) { return _mm256_cvtepi32_ps(load_bytes(p)); }
COMMITKV_INLINE vf load_u4_low(const uint8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(load_bytes(p), _mm256_set1_epi32(15)));
}
COMMITKV_INLINE vf load_u4_high(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_srli_epi32(load_bytes(p), 4)); }
COMMITKV_INLINE void store_f16(uint16_t *p, vf x) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, 0)); }
COMMITKV_INLINE void store_bf16(uint16_t *p, vf x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
  _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1)));
}

COMMITKV_INLINE void fold4(vf x, float *out) {
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

COMMITKV_INLINE void reduce4(vf a, vf b, vf c, vf d, float *out) {
  fold4(_mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d)), out);
}

COMMITKV_INLINE void transpose(vf *r, float *out, int64_t stride) {
  vf t[8];
  for (int i = 0; i < 8; i += 4) {
    const vf a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    const vf c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    store(out + i * stride, _mm256_permute2f128_ps(t[i], t[i + 4], 0x20));
    store(out + (i + 4) * stride, _mm256_permute2f128_ps(t[i], t[i + 4], 0x31));
  }
}

typedef __m256i vi;

COMMITKV_INLINE vi zero_i() { return _mm256_setzero_si256(); }
COMMITKV_INLINE vi load_i16(const int16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
COMMITKV_INLINE vi load_i8_as_i16(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
COMMITKV_INLINE vi load_pair(const int16_t *p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
COMMITKV_INLINE vi add_products(vi a, vi b, vi sum) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(a, b)));
  return sum;
}
COMMITKV_INLINE vf to_float(vi x) { return _mm256_cvtepi32_ps(x); }
COMMITKV_INLINE vi add_neighbours(vi a, vi b, vi c, vi d) {
  const vi ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const vi cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}
COMMITKV_INLINE void store_i16(int16_t *p, vf a, vf b) {
  const vi both = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));  // lanes of 128 bits in turn
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(both, 0xd8));
}

#else

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));

COMMITKV_INLINE vf load(const float *p) {
  vf x;
  std::memcpy(&x, p, 16);
  return x;
}
COMMITKV_INLINE void store(float *p, vf x) { std::memcpy(p, &x, 16); }
COMMITKV_INLINE vf set1(float x) { return vf{x, x, x, x}; }
COMMITKV_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
COMMITKV_INLINE vf vmax(vf a, vf b) {
  for (int i = 0; i < 4; ++i) a[i] = a[i] > b[i] ? a[i] : b[i];
  return a;
}
COMMITKV_INLINE float hmax(vf x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
COMMITKV_INLINE float hsum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
// Adding and taking away 1.5 * 2^23 leaves the nearest integer, for |x| < 2^22.
COMMITKV_INLINE vf round_nearest(vf x) {
  volatile vf shifted = x + 12582912.0f;
  return shifted - 12582912.0f;
}
COMMITKV_INLINE vf scale_pow2(vf x, vf n) {
  for (int i = 0; i < 4; ++i) x[i] *= bits_to_float(uint32_t(int32_t(n[i]) + 127) << 23);
  return x;
}
COMMITKV_INLINE vf load_bf16(const uint16_t *p) {
  return vf{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
COMMITKV_INLINE vf load_f16(const uint16_t *p) {
  return vf{f16_to_float(p[0]), f16_to_float(p[1]), f16_to_float(p[2]), f16_to_float(p[3])};
}
COMMITKV_INLINE vf load_bf16_first(const uint16_t *p) {
  return vf{bf16_to_float(p[0]), bf16_to_float(p[2]), bf16_to_float(p[4]), bf16_to_float(p[6])};
}
COMMITKV_INLINE vf load_bf16_second(const uint16_t *p) { return load_bf16_first(p + 1); }
COMMITKV_INLINE vf load_i8(const int8_t *p) { return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
COMMITKV_INLINE vf load_u8(const uint8_t *p) { return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
COMMITKV_INLINE vf load_u4_low(const uint8_t *p) {
  return vf{float(p[0] & 15), float(p[1] & 15), float(p[2] & 15), float(p[3] & 15)};
}
COMMITKV_INLINE vf load_u4_high(const uint8_t *p) {
  return vf{float(p[0] >> 4), float(p[1] >> 4), float(p[2] >> 4), float(p[3] >> 4)};
}
COMMITKV_INLINE void store_f16(uint16_t *p, vf x) {
  for (int i = 0; i < 4; ++i) p[i] = float_to_f16(x[i]);
}
COMMITKV_INLINE void store_bf16(uint16_t *p, vf x) {
  for (int i = 0; i < 4; ++i) p[i] = float_to_bf16(x[i]);
}
COMMITKV_INLINE void reduce4(vf a, vf b, vf c, vf d, float *out) {
  out[0] = hsum(a), out[1] = hsum(b), out[2] = hsum(c), out[3] = hsum(d);
}
COMMITKV_INLINE void transpose(vf *r, float *out, int64_t stride) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 4; ++i) out[j * stride + i] = r[i][j];
  }
}

#endif

// e^x for x <= 0 within 2 units in the last place; 0 below -87 (and for -inf). Cody-Waite reduction by ln 2 in two
// parts, then the degree-6 Taylor polynomial on [-ln2/2, ln2/2], whose remainder there is below 2^-23.
COMMITKV_INLINE vf exp_nonpositive(vf x) {
  const vf floor = set1(-87.0f), clamped = vmax(x, floor);
  const vf n = round_nearest(clamped * set1(1.44269504f));
  vf r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  // Pairs of terms beside each other (Estrin): one after the other they would wait for each other's results.
  const vf r2 = r * r;
  const vf low = fma(fma(set1(1.0f / 6), r, set1(0.5f)), r2, set1(1.0f) + r);
  const vf high = fma(fma(set1(1.0f / 5040), r, set1(1.0f / 720)), r2, fma(set1(1.0f / 120), r, set1(1.0f / 24)));
  vf y = fma(high, r2 * r2, low);
  y = scale_pow2(y, n);
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, floor, _CMP_GE_OQ), y);
#elif defined(__AVX2__)
  return _mm256_and_ps(_mm256_cmp_ps(x, floor, _CMP_GE_OQ), y);
#else
  for (int i = 0; i < 4; ++i) y[i] = x[i] >= -87.0f ? y[i] : 0.0f;
  return y;
#endif
}

}  // namespace COMMITKV_LEVEL
}  // namespace commitkv
