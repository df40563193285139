// fp16 and bf16 on the CPU, converted as IEEE 754 rounding to nearest even says. Part of hw_emulated.hpp.
#pragma once

#include <cstdint>
#include <cstring>

namespace hw {

struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

namespace emulation {

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float widen_fp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) {
    const float tiny = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t narrow_fp16(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7fff);   // NaN
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more round to infinity
  if (magnitude < 0x38800000) {
    // Below the smallest normal: adding 0.5 leaves the value, rounded to multiples of 2^-24, in the low bits.
    const float shifted = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

inline uint16_t narrow_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulation

inline float to_float(Fp16 x) { return emulation::widen_fp16(x.bits); }
inline float to_float(Bf16 x) { return emulation::float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(float x) { return x; }

template <typename T>
T from_float(float x);
template <>
inline Fp16 from_float<Fp16>(float x) {
  return {emulation::narrow_fp16(x)};
}
template <>
inline Bf16 from_float<Bf16>(float x) {
  return {emulation::narrow_bf16(x)};
}
template <>
inline float from_float<float>(float x) {
  return x;
}

}  // namespace hw
