// Tensor cores and pairs of halves for NVIDIA GPUs. Part of hw_cuda.cuh.
// Instructions of a whole warp are volatile: a compiler may not move them into a branch that only some lanes take.
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

template <typename T>
HW_DEVICE Vec<uint32_t, 4> ldmatrix_x4(Shared<T> rows, int i) {
  Vec<uint32_t, 4> m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(rows.data + i))
               : "memory");
  return m;
}
template <typename T>
HW_DEVICE Vec<uint32_t, 4> ldmatrix_x4_trans(Shared<T> rows, int i) {
  Vec<uint32_t, 4> m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(shared_address(rows.data + i))
               : "memory");
  return m;
}
template <typename T>
HW_DEVICE Vec<uint32_t, 2> ldmatrix_x2(Shared<T> rows, int i) {
  Vec<uint32_t, 2> m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(shared_address(rows.data + i))
               : "memory");
  return m;
}
template <typename T>
HW_DEVICE Vec<uint32_t, 2> ldmatrix_x2_trans(Shared<T> rows, int i) {
  Vec<uint32_t, 2> m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(m[0]), "=r"(m[1])
               : "r"(shared_address(rows.data + i))
               : "memory");
  return m;
}

// The 8x8 matrix of 16-bit items whose row g lane (g, t) holds columns 2t and 2t + 1 of, transposed.
HW_DEVICE uint32_t transpose_8x8(uint32_t row) {
  uint32_t column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(row));
  return column;
}

HW_DEVICE uint32_t pack2_fp16(float lo, float hi) { return bit_cast<uint32_t>(__floats2half2_rn(lo, hi)); }
HW_DEVICE uint32_t fma2_fp16(uint32_t a, uint32_t b, uint32_t c) {
  return bit_cast<uint32_t>(__hfma2(bit_cast<__half2>(a), bit_cast<__half2>(b), bit_cast<__half2>(c)));
}
HW_DEVICE void mma_fp16(FragmentC &c, const FragmentA &a, const FragmentB &b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c.r[0]), "+f"(c.r[1]), "+f"(c.r[2]), "+f"(c.r[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
}

#ifdef ELEMENT
#if ELEMENT == 0

using Half = Fp16;
#define HW_MMA_TYPE "f16"

HW_DEVICE uint32_t pack2(float lo, float hi) { return bit_cast<uint32_t>(__floats2half2_rn(lo, hi)); }
HW_DEVICE Vec<float, 2> unpack2(uint32_t bits) {
  const float2 x = __half22float2(bit_cast<__half2>(bits));
  return {x.x, x.y};
}
HW_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  return bit_cast<uint32_t>(__hfma2(bit_cast<__half2>(a), bit_cast<__half2>(b), bit_cast<__half2>(c)));
}

#else

using Half = Bf16;
#define HW_MMA_TYPE "bf16"

HW_DEVICE uint32_t pack2(float lo, float hi) { return bit_cast<uint32_t>(__floats2bfloat162_rn(lo, hi)); }
HW_DEVICE Vec<float, 2> unpack2(uint32_t bits) {
  const float2 x = __bfloat1622float2(bit_cast<__nv_bfloat162>(bits));
  return {x.x, x.y};
}
HW_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  return bit_cast<uint32_t>(
      __hfma2(bit_cast<__nv_bfloat162>(a), bit_cast<__nv_bfloat162>(b), bit_cast<__nv_bfloat162>(c)));
}

#endif

HW_DEVICE void mma(FragmentC &c, const FragmentA &a, const FragmentB &b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32." HW_MMA_TYPE "." HW_MMA_TYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.r[0]), "+f"(c.r[1]), "+f"(c.r[2]), "+f"(c.r[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
}
#endif

}  // namespace hw
