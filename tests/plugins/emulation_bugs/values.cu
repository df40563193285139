// What single words compute, one warp: each lane writes its results to its row of `out` [32, WORDS] uint32.
#include "hw.cuh"

using namespace hw;

struct Params {
  const float *x;        // [32, 3]
  const uint32_t *bits;  // [32, 3]
  const Half *matrices;  // [4, 8, 8]
  uint32_t *out;
};

constexpr int WORDS = 33;

HW_KERNEL(values, Params, 32, 1) {
  const float x = load(p.x + 3 * lane()), y = load(p.x + 3 * lane() + 1), z = load(p.x + 3 * lane() + 2);
  const uint32_t a = load(p.bits + 3 * lane()), b = load(p.bits + 3 * lane() + 1), c = load(p.bits + 3 * lane() + 2);
  const Shared<Half> rows = shared<Half>(0, 256);
  for (int i = lane(); i < 32; i += 32)
    rows.store_as(8 * i, load_stream(reinterpret_cast<const Vec<uint32_t, 4> *>(p.matrices) + i));
  warp_sync();
  const Vec<uint32_t, 4> m = ldmatrix_x4(rows, 8 * lane()), t = ldmatrix_x4_trans(rows, 8 * lane());
  const Vec<uint32_t, 2> m2 = ldmatrix_x2(rows, 8 * lane() % 128), t2 = ldmatrix_x2_trans(rows, 8 * lane() % 128);
  const Vec<float, 2> pair = unpack2(pack2(x, y));
  const uint32_t results[WORDS] = {
      bit_cast<uint32_t>(to_float(from_float<Fp16>(x))),
      bit_cast<uint32_t>(to_float(from_float<Bf16>(x))),
      pack2(x, y),
      bit_cast<uint32_t>(pair[0]),
      bit_cast<uint32_t>(pair[1]),
      fma2(pack2(x, y), pack2(y, z), pack2(z, x)),
      byte_perm(a, b, c),
      bit_cast<uint32_t>(fast_exp2(x)),
      bit_cast<uint32_t>(fast_log2(x * x)),
      bit_cast<uint32_t>(fast_sqrt(x * x)),
      bit_cast<uint32_t>(inverse_sqrt(x * x)),
      bit_cast<uint32_t>(shuffle(x, 5)),
      bit_cast<uint32_t>(shuffle_xor(x, 3)),
      bit_cast<uint32_t>(shuffle_down(x, 7)),
      ballot(x > 0),
      any(x > 1e30f),
      any(lane() == 31),
      m[0],
      m[1],
      m[2],
      m[3],
      t[0],
      t[1],
      t[2],
      t[3],
      m2[0],
      m2[1],
      t2[0],
      t2[1],
      transpose_8x8(m[0]),
      bit_cast<uint32_t>(max_of(x, y)),
      bit_cast<uint32_t>(min_of(x, y)),
      bit_cast<uint32_t>(-infinity()),
  };
  for (int i = 0; i < WORDS; ++i) store(p.out + lane() * WORDS + i, results[i]);
}
