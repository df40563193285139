// The first half of a commit on a CPU: one line over everything a conversation has committed or staged, found by
// selection. Built for the plain processor: the work is counting and comparing.
#define COMMITKV_LEVEL portable
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "../simd.hpp"
#include "cpu_plan.hpp"

namespace commitkv {

// Mirrored field by field by `_LineArgs` in native.py.
struct LineArgs {
  uint16_t *const *seen;      // [num_layers] of [num_pages, G, page_tokens] fp16
  const uint16_t *score;      // [num_blocks, E] fp16
  const int64_t *staged;      // [num_staged] slots
  RowTable old;
  const float *layer_scale;   // [num_layers]
  uint8_t *staged_keep;       // [rows, num_staged] out
  float *staged_score;        // [rows, num_staged] out
  uint8_t *alive;             // [blocks of old, E] out
  int64_t num_staged, num_rows, kv_heads, page_tokens, block_entries, keep_entries, floor_entries;
  int32_t outliers;           // whether outlier_z holds
  float outlier_z;
  float line;                 // out
};

namespace {

constexpr float NONE = std::numeric_limits<float>::infinity();

// All scores, row by row: old entries in table order, then staged tokens.
struct Scores {
  std::vector<float> scaled;    // times the layer's factor; infinite: protected
  std::vector<uint8_t> kept;
  std::vector<int64_t> starts;  // [rows + 1]
};

void read_row(const LineArgs &a, int64_t row, std::vector<float> &scores) {
  for (int64_t b = a.old.starts[row]; b < a.old.starts[row + 1]; ++b) {
    const uint16_t *score = a.score + a.old.ids[b] * a.block_entries;
    for (int64_t e = 0; e < a.old.lens[b]; ++e) scores.push_back(portable::f16_to_float(score[e]));
  }
  const int64_t head = row % a.kv_heads;
  const uint16_t *seen = a.seen[row / a.kv_heads];
  for (int64_t i = 0; i < a.num_staged; ++i) {
    const int64_t page = a.staged[i] / a.page_tokens, offset = a.staged[i] % a.page_tokens;
    scores.push_back(portable::f16_to_float(seen[(page * a.kv_heads + head) * a.page_tokens + offset]));
  }
}

// Staged scores far over the mean of the row's finite ones become infinite.
void protect_outliers(const LineArgs &a, float *scores, int64_t count) {
  double sum = 0.0, squares = 0.0;
  int64_t number = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isinf(scores[i])) sum += scores[i], ++number;
  }
  const double mean = sum / double(number ? number : 1);
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isinf(scores[i])) squares += (scores[i] - mean) * (scores[i] - mean);
  }
  const double limit = mean + double(a.outlier_z) * std::sqrt(squares / double(number ? number : 1));
  for (int64_t i = count - a.num_staged; i < count; ++i) {
    if (double(scores[i]) > limit) scores[i] = NONE;
  }
}

Scores read_scores(const LineArgs &a) {
  Scores s;
  s.starts.push_back(0);
  for (int64_t row = 0; row < a.num_rows; ++row) {
    read_row(a, row, s.scaled);
    float *scores = s.scaled.data() + s.starts[row];
    const int64_t count = int64_t(s.scaled.size()) - s.starts[row];
    if (a.outliers) protect_outliers(a, scores, count);
    std::copy(scores + count - a.num_staged, scores + count, a.staged_score + row * a.num_staged);
    const float factor = a.layer_scale[row / a.kv_heads];
    for (int64_t i = 0; i < count; ++i) {
      if (!std::isinf(scores[i])) scores[i] *= factor;
    }
    s.starts.push_back(int64_t(s.scaled.size()));
  }
  s.kept.assign(s.scaled.size(), 0);
  return s;
}

// The count-th largest of values, which it reorders; 1 <= count <= size. Values are >= 0, so their bits order as they
// do: a histogram of the upper half of the bits leaves few to select from.
float select(std::vector<float> &values, int64_t count) {
  if (values.size() > 4096) {
    std::vector<int64_t> numbers(65536, 0);
    for (float value : values) ++numbers[portable::float_to_bits(value) >> 16];
    uint32_t bin = 65535;
    for (; numbers[bin] < count; --bin) count -= numbers[bin];
    const auto other = [bin](float value) { return portable::float_to_bits(value) >> 16 != bin; };
    values.erase(std::remove_if(values.begin(), values.end(), other), values.end());
  }
  const auto place = values.begin() + (count - 1);
  std::nth_element(values.begin(), place, values.end(), std::greater<float>());
  return *place;
}

// Keeps the best `count` of entries [first, last) that are not kept yet, the first ones where they tie. Returns the
// lowest score let in.
float keep_best(Scores &s, int64_t first, int64_t last, int64_t count) {
  std::vector<float> rest;
  rest.reserve(size_t(last - first));
  for (int64_t i = first; i < last; ++i) {
    if (!s.kept[i]) rest.push_back(s.scaled[i]);
  }
  count = std::min(count, int64_t(rest.size()));
  if (count <= 0) return NONE;
  const float line = select(rest, count);
  int64_t ties = count;
  for (int64_t i = first; i < last; ++i) ties -= !s.kept[i] && s.scaled[i] > line;
  for (int64_t i = first; i < last; ++i) {
    if (s.kept[i] || s.scaled[i] < line) continue;
    if (s.scaled[i] > line || ties-- > 0) s.kept[i] = 1;
  }
  return line;
}

void write_decision(const LineArgs &a, const Scores &s) {
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const uint8_t *kept = s.kept.data() + s.starts[row];
    for (int64_t b = a.old.starts[row]; b < a.old.starts[row + 1]; ++b) {
      uint8_t *alive = a.alive + b * a.block_entries;
      for (int64_t e = 0; e < a.block_entries; ++e) alive[e] = e < a.old.lens[b] ? *kept++ : 0;
    }
    std::copy(kept, kept + a.num_staged, a.staged_keep + row * a.num_staged);
  }
}

void draw_line(LineArgs &a) {
  Scores s = read_scores(a);
  int64_t kept = 0;
  for (int64_t row = 0; row < a.num_rows; ++row) {
    keep_best(s, s.starts[row], s.starts[row + 1], a.floor_entries);
    for (int64_t i = s.starts[row]; i < s.starts[row + 1]; ++i) {
      if (std::isinf(s.scaled[i])) s.kept[i] = 1;
      kept += s.kept[i];
    }
  }
  a.line = keep_best(s, 0, int64_t(s.scaled.size()), a.keep_entries - kept);
  write_decision(a, s);
}

}  // namespace
}  // namespace commitkv

// Returns 0, or 1 when memory ran out.
extern "C" COMMITKV_EXPORT int32_t commitkv_draw_line(commitkv::LineArgs *args) {
  try {
    commitkv::draw_line(*args);
  } catch (const std::bad_alloc &) {
    return 1;
  }
  return 0;
}
