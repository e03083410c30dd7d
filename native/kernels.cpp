// The kernels of one instruction set: compiled several times with different -march and -DISA, chosen in gradguard.cpp.
//
// The code uses GCC's vector extensions, in 64 lanes whatever the width of a register, without fused multiply-add
// (-ffp-contract=off). Every processor therefore adds the same numbers in the same order and gets the same bits.
#include "kernels.h"

#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int W = BYTES / 4;             // floats in a register
constexpr int LANES = 64;                // partial sums in float32
constexpr int WIDE = 16;                 // partial sums in float64
constexpr int BLOCK = 2048;              // elements between tests: 32 additions a lane; a second pass finds it in L1
constexpr int64_t CHUNK = 1 << 15;       // elements that are summed again in float64 if float32 was too narrow

typedef float VF __attribute__((vector_size(BYTES)));
typedef int32_t VI __attribute__((vector_size(BYTES)));
typedef uint32_t VU __attribute__((vector_size(BYTES)));
typedef int16_t VS __attribute__((vector_size(BYTES)));
typedef int64_t VL __attribute__((vector_size(BYTES)));
typedef uint16_t VH __attribute__((vector_size(BYTES / 2)));

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };

template <class V, class T> INLINE V raw(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> INLINE bool any(V mask) {
  VL m = (VL)mask;
  int64_t bits = 0;
  for (int k = 0; k < BYTES / 8; ++k) bits |= m[k];
  return bits != 0;
}

// ---- W elements as float32, and back, rounded to nearest even ----
INLINE VF load(const float* p) { return raw<VF>(p); }
INLINE void store(float* p, VF v) { memcpy(p, &v, sizeof v); }

INLINE VF load(const Bf16* p) { return (VF)(__builtin_convertvector(raw<VH>(p), VU) << 16); }
INLINE VU rounded(VF v) {  // to bfloat16, in the upper halves of the words
  VU bits = (VU)v;
  VI nan = v != v;
  return nan ? (VU){} + 0x7fc00000u : bits + 0x7fff + ((bits >> 16) & 1);
}
INLINE void store(Bf16* p, VF v) {
  VH h = __builtin_convertvector(rounded(v) >> 16, VH);
  memcpy(p, &h, sizeof h);
}

#if defined(__AVX512F__)
INLINE VF load(const Fp16* p) { return (VF)_mm512_cvtph_ps(raw<__m256i>(p)); }
INLINE void store(Fp16* p, VF v) {
  __m256i h = _mm512_cvtps_ph((__m512)v, 0);
  memcpy(p, &h, sizeof h);
}
#elif defined(__F16C__) && defined(__AVX2__)
INLINE VF load(const Fp16* p) { return (VF)_mm256_cvtph_ps(raw<__m128i>(p)); }
INLINE void store(Fp16* p, VF v) {
  __m128i h = _mm256_cvtps_ph((__m256)v, 0);
  memcpy(p, &h, sizeof h);
}
#elif defined(__aarch64__)
typedef __fp16 VP __attribute__((vector_size(BYTES / 2)));
INLINE VF load(const Fp16* p) { return __builtin_convertvector(raw<VP>(p), VF); }
INLINE void store(Fp16* p, VF v) {
  VP h = __builtin_convertvector(v, VP);
  memcpy(p, &h, sizeof h);
}
#else  // the same conversions with integers
INLINE VF load(const Fp16* p) {
  VU h = __builtin_convertvector(raw<VH>(p), VU);
  VU magnitude = (h & 0x7fff) << 13, sign = (h & 0x8000) << 16;
  VF scaled = (VF)magnitude * 0x1p112f;     // exact for subnormal numbers too
  VI special = (VI)(h & 0x7c00) == 0x7c00;  // inf or NaN, which get the largest exponent
  VU bits = ((VU)scaled & ~(VU)special) | ((magnitude | 0x7f800000u) & (VU)special);
  return (VF)(bits | sign);
}
INLINE void store(Fp16* p, VF v) {
  VU bits = (VU)v, sign = bits & 0x80000000u, a = bits ^ sign;
  VU normal = (a + 0xc8000fffu + ((a >> 13) & 1)) >> 13;  // subtracts 112 from the exponent, and rounds
  VU small = (VU)((VF)a + 0.5f) - 0x3f000000u;            // subnormal result: the addition rounds
  VI is_small = (VI)a < 0x38800000, is_over = (VI)a >= 0x477ff000, is_nan = (VI)a > 0x7f800000;
  VU out = (small & (VU)is_small) | (normal & ~(VU)is_small);
  out = (out & ~(VU)is_over) | ((VU)is_over & 0x7c00);
  out = (out & ~(VU)is_nan) | ((VU)is_nan & 0x7e00);
  VH h = __builtin_convertvector(out | (sign >> 16), VH);
  memcpy(p, &h, sizeof h);
}
#endif

// ---- sums of squares and of magnitudes ----
struct Square {
  static VF of(VF v) { return v * v; }
  static double of(double v) { return v * v; }
};
struct Magnitude {
  static VF of(VF v) { return (VF)((VU)v & 0x7fffffffu); }
  static double of(double v) { return __builtin_fabs(v); }
};

// Add the powers of 64 elements to 64 lanes.
template <class Power, class T> INLINE void add_lanes(const T* x, VF (&lanes)[LANES / W]) {
  for (int k = 0; k < LANES / W; ++k) lanes[k] += Power::of(load(x + k * W));
}
// A shift and a mask separate pairs of bfloat16: of each 32 elements the even ones go to 16 lanes, then the odd ones.
template <class Power> INLINE void add_lanes(const Bf16* x, VF (&lanes)[LANES / W]) {
  constexpr int R = 16 / W;
  for (int half = 0; half < 2; ++half)
    for (int r = 0; r < R; ++r) {
      VU pairs = raw<VU>(x + half * 32 + r * 2 * W);
      lanes[half * 2 * R + r] += Power::of((VF)(pairs << 16));
      lanes[half * 2 * R + R + r] += Power::of((VF)(pairs & 0xffff0000u));
    }
}
INLINE double total(double (&wide)[WIDE]) {
  for (int width = WIDE / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) wide[i] += wide[i + width];
  return wide[0];
}

// The sum of powers: each block in 64 float32 lanes, folded to 16, which are then summed in float64.
template <class Power, class T> INLINE double narrow_sum(const T* x, int64_t n) {
  double wide[WIDE] = {};
  for (int64_t at = 0; at < n; at += BLOCK) {
    const T* p = x + at;
    int64_t count = n - at < BLOCK ? n - at : BLOCK, i = 0;
    VF lanes[LANES / W] = {};
    for (; i + LANES <= count; i += LANES) add_lanes<Power>(p + i, lanes);
    if (i < count) {
      T rest[LANES] = {};
      memcpy(rest, p + i, (count - i) * sizeof(T));
      add_lanes<Power>(rest, lanes);
    }
    for (int width = LANES / 2; width >= WIDE; width /= 2)
      for (int k = 0; k < width / W; ++k) lanes[k] += lanes[k + width / W];
    float lane[WIDE];
    memcpy(lane, lanes, sizeof lane);
    for (int j = 0; j < WIDE; ++j) wide[j] += lane[j];
  }
  return total(wide);
}

// The sum of powers in float64, which holds the square of every float32 without loss.
template <class Power, class T> __attribute__((noinline)) double wide_sum(const T* x, int64_t n) {
  double wide[WIDE] = {};
  T rest[WIDE] = {};
  for (int64_t i = 0; i < n; i += WIDE) {
    const T* at = x + i;
    if (i + WIDE > n) {
      memset(rest, 0, sizeof rest);
      memcpy(rest, at, (n - i) * sizeof(T));
      at = rest;
    }
    float f[WIDE];
    for (int k = 0; k < WIDE; k += W) {
      VF v = load(at + k);
      memcpy(f + k, &v, sizeof v);
    }
    for (int k = 0; k < WIDE; ++k) wide[k] += Power::of((double)f[k]);
  }
  return total(wide);
}

// ---- the largest magnitude: without the sign, bits have the order of the numbers, with NaN above infinity ----
INLINE uint32_t largest_bits(const float* x, int64_t n) {
  VI most = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    VI v = raw<VI>(x + i) & 0x7fffffff;
    most = v > most ? v : most;
  }
  int32_t found = 0;
  for (int k = 0; k < W; ++k) found = most[k] > found ? most[k] : found;
  for (; i < n; ++i) {
    int32_t v = raw<int32_t>(x + i) & 0x7fffffff;
    found = v > found ? v : found;
  }
  return found;
}
template <class T> INLINE uint16_t largest_bits(const T* x, int64_t n) {
  VS most = {};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    VS v = raw<VS>(x + i) & (int16_t)0x7fff;
    most = v > most ? v : most;
  }
  int16_t found = 0;
  for (int k = 0; k < 2 * W; ++k) found = most[k] > found ? most[k] : found;
  for (; i < n; ++i) {
    int16_t v = (int16_t)(x[i].bits & 0x7fff);
    found = v > found ? v : found;
  }
  return found;
}
INLINE uint64_t largest_bits(const double* x, int64_t n) {
  int64_t most[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int k = 0; k < 8; ++k) {
      int64_t v = raw<int64_t>(x + i + k) & INT64_MAX;
      most[k] = v > most[k] ? v : most[k];
    }
  for (; i < n; ++i) {
    int64_t v = raw<int64_t>(x + i) & INT64_MAX;
    most[0] = v > most[0] ? v : most[0];
  }
  for (int k = 1; k < 8; ++k) most[0] = most[k] > most[0] ? most[k] : most[0];
  return most[0];
}
INLINE double value_of(uint32_t bits, const float*) { return raw<float>(&bits); }
INLINE double value_of(uint64_t bits, const double*) { return raw<double>(&bits); }
template <class T> INLINE double value_of(uint16_t bits, const T*) {
  T one[W] = {};
  one[0].bits = bits;
  return load(one)[0];
}

// A chunk whose float32 sum left the range is summed again in float64, while it is in the cache. Above the lower limit,
// underflowed squares are less than 1e-7 of the sum.
template <class T> INLINE void add_squares(const T* x, int64_t n, Sum& sum) {
  for (int64_t at = 0; at < n; at += CHUNK) {
    int64_t count = n - at < CHUNK ? n - at : CHUNK;
    double found = narrow_sum<Square>(x + at, count);
    bool trusted = found > count * 1.2e-31 && found < 3e38;
    if (!trusted && (found != 0 || largest_bits(x + at, count))) found = wide_sum<Square>(x + at, count);
    sum.middle += found;
  }
}
template <class T> INLINE void add_absolutes(const T* x, int64_t n, Sum& sum) {
  for (int64_t at = 0; at < n; at += CHUNK) {
    int64_t count = n - at < CHUNK ? n - at : CHUNK;
    double found = narrow_sum<Magnitude>(x + at, count);
    if (!(found < 3e38)) found = wide_sum<Magnitude>(x + at, count);
    sum.middle += found;
  }
}

constexpr double DOWN = 0x1p-600, UP = 0x1p600;
constexpr double MOST = 0x1p960;  // limit of a block's sum: 2^63 elements of such blocks stay within float64's range
template <class Power> INLINE double sum_of_doubles(const double* x, int64_t n, double scale) {
  double lanes[32] = {};
  int64_t i = 0;
  for (; i + 32 <= n; i += 32)
    for (int k = 0; k < 32; ++k) lanes[k] += Power::of(x[i + k] * scale);
  for (int k = 0; i < n; ++i, ++k) lanes[k] += Power::of(x[i] * scale);
  for (int width = 16; width; width /= 2)
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  return lanes[0];
}
INLINE void add_squares(const double* x, int64_t n, Sum& sum) {
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t count = n - at < BLOCK ? n - at : BLOCK;
    double found = sum_of_doubles<Square>(x + at, count, 1.0);
    if ((found > 0x1p-930 && found < MOST) || found != found) sum.middle += found;
    else if (found >= MOST) sum.large += sum_of_doubles<Square>(x + at, count, DOWN);
    else if (found != 0 || largest_bits(x + at, count)) sum.small += sum_of_doubles<Square>(x + at, count, UP);
  }
}
INLINE void add_absolutes(const double* x, int64_t n, Sum& sum) {
  for (int64_t at = 0; at < n; at += BLOCK)
    sum.middle += sum_of_doubles<Magnitude>(x + at, n - at < BLOCK ? n - at : BLOCK, 1.0);
}

// ---- non-finite elements ----
template <class T, class Bits> INLINE void count_nonfinite(const T* x, int64_t n, Bits top, int64_t* nan, int64_t* inf) {
  const Bits magnitude = (Bits)~((Bits)1 << (8 * sizeof(Bits) - 1));
  for (int64_t at = 0; at < n; at += BLOCK) {
    int64_t count = n - at < BLOCK ? n - at : BLOCK;
    if (!(largest_bits(x + at, count) >= top)) continue;
    for (int64_t i = 0; i < count; ++i) {
      Bits bits = raw<Bits>(x + at + i) & magnitude;
      *nan += bits > top;
      *inf += bits == top;
    }
  }
}
INLINE void add_nonfinite(const float* x, int64_t n, int64_t* nan, int64_t* inf) {
  count_nonfinite<float, uint32_t>(x, n, 0x7f800000u, nan, inf);
}
INLINE void add_nonfinite(const Bf16* x, int64_t n, int64_t* nan, int64_t* inf) {
  count_nonfinite<Bf16, uint16_t>(x, n, 0x7f80, nan, inf);
}
INLINE void add_nonfinite(const Fp16* x, int64_t n, int64_t* nan, int64_t* inf) {
  count_nonfinite<Fp16, uint16_t>(x, n, 0x7c00, nan, inf);
}
INLINE void add_nonfinite(const double* x, int64_t n, int64_t* nan, int64_t* inf) {
  count_nonfinite<double, uint64_t>(x, n, 0x7ff0000000000000u, nan, inf);
}

// ---- bounds: a block is tested first, and written only if an element is outside ----
template <class T> INLINE bool is_outside(const T* p, int64_t count, float low, float high) {
  VI out = {};
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    VF v = load(p + i);
    out |= (v < low) | (v > high);
  }
  if (i < count) {
    T rest[W];
    for (int k = 0; k < W; ++k) rest[k] = p[i];  // padding: an element of the block, so no other value is tested
    memcpy(rest, p + i, (count - i) * sizeof(T));
    VF v = load(rest);
    out |= (v < low) | (v > high);
  }
  return any(out);
}
INLINE bool is_outside(const Bf16* p, int64_t count, float low, float high) {
  VI out = {};
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    VU pairs = raw<VU>(p + i);
    VF even = (VF)(pairs << 16), odd = (VF)(pairs & 0xffff0000u);
    out |= (even < low) | (even > high) | (odd < low) | (odd > high);
  }
  bool rest = false;
  for (; i < count; ++i) {
    uint32_t bits = (uint32_t)p[i].bits << 16;
    float v = raw<float>(&bits);
    rest |= (v < low) | (v > high);
  }
  return any(out) || rest;
}
INLINE bool is_outside(const double* p, int64_t count, double low, double high) {
  int out = 0;
  for (int64_t i = 0; i < count; ++i) out |= (p[i] < low) | (p[i] > high);
  return out != 0;
}
// These functions also tell whether an element was outside.
INLINE VF clamped(VF v, float low, float high, VI& out) {  // NaN compares false and stays
  VI below = v < low, above = v > high;
  out |= below | above;
  v = below ? (VF){} + low : v;
  return above ? (VF){} + high : v;
}
template <class T> INLINE bool clamp_block(T* p, int64_t count, float low, float high) {
  VI out = {};
  int64_t i = 0;
  for (; i + W <= count; i += W) store(p + i, clamped(load(p + i), low, high, out));
  if (i < count) {
    T rest[W];
    for (int k = 0; k < W; ++k) rest[k] = p[i];
    memcpy(rest, p + i, (count - i) * sizeof(T));
    store(rest, clamped(load(rest), low, high, out));
    memcpy(p + i, rest, (count - i) * sizeof(T));
  }
  return any(out);
}
// Pairs again, without rounding: every result is a bound or the old element.
INLINE bool clamp_block(Bf16* p, int64_t count, float low, float high) {
  VI out = {};
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    VU pairs = raw<VU>(p + i);
    VU even = (VU)clamped((VF)(pairs << 16), low, high, out), odd = (VU)clamped((VF)(pairs & 0xffff0000u), low, high, out);
    VU both = (even >> 16) | odd;
    memcpy(p + i, &both, sizeof both);
  }
  for (; i < count; i += W) {
    Bf16 rest[W];
    int64_t left = count - i < W ? count - i : W;
    for (int k = 0; k < W; ++k) rest[k] = p[i];
    memcpy(rest, p + i, left * sizeof(Bf16));
    VU bits = (VU)clamped(load(rest), low, high, out) >> 16;
    VH h = __builtin_convertvector(bits, VH);
    memcpy(rest, &h, sizeof h);
    memcpy(p + i, rest, left * sizeof(Bf16));
  }
  return any(out);
}
INLINE bool clamp_block(double* p, int64_t count, double low, double high) {
  int out = 0;
  for (int64_t i = 0; i < count; ++i) {
    double v = p[i];
    out |= (v < low) | (v > high);
    v = v < low ? low : v;
    p[i] = v > high ? high : v;
  }
  return out != 0;
}

// ---- products ----
// If float32 would lose digits of the factor, the product is computed in float64. `factors` holds one factor for each
// element, or one for all.
template <class T> __attribute__((noinline)) void multiply_wide(T* x, int64_t n, const double* factors, bool for_all) {
  for (int64_t i = 0; i < n; i += W) {
    T rest[W] = {};
    int64_t left = n - i < W ? n - i : W;
    memcpy(rest, x + i, left * sizeof(T));
    VF v = load(rest);
    for (int k = 0; k < left; ++k) {
      double f = for_all ? *factors : factors[i + k];
      v[k] = (float)(v[k] * (is_tiny(f) ? f : (double)(float)f));
    }
    store(rest, v);
    memcpy(x + i, rest, left * sizeof(T));
  }
}
template <class T> INLINE void multiply(T* x, int64_t n, double factor) {
  if (is_tiny(factor)) return multiply_wide(x, n, &factor, true);
  float f = (float)factor;
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + W <= n; i += W) store(x + i, load(x + i) * f);
  if (i < n) {
    T rest[W] = {};
    memcpy(rest, x + i, (n - i) * sizeof(T));
    store(rest, load(rest) * f);
    memcpy(x + i, rest, (n - i) * sizeof(T));
  }
}
INLINE void multiply(Bf16* x, int64_t n, double factor) {
  if (is_tiny(factor)) return multiply_wide(x, n, &factor, true);
  float f = (float)factor;
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {  // pairs, as in add_lanes
    VU pairs = raw<VU>(x + i);
    VU out = (rounded((VF)(pairs << 16) * f) >> 16) | (rounded((VF)(pairs & 0xffff0000u) * f) & 0xffff0000u);
    memcpy(x + i, &out, sizeof out);
  }
  Bf16 rest[W] = {};
  for (; i < n; i += W) {
    int64_t count = n - i < W ? n - i : W;
    memcpy(rest, x + i, count * sizeof(Bf16));
    store(rest, load(rest) * f);
    memcpy(x + i, rest, count * sizeof(Bf16));
  }
}
INLINE void multiply(double* x, int64_t n, double factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// ---- columns: one sum, or one factor, for each element of a row ----
template <class T> INLINE void add_column_squares(const T* x, int64_t n, double* sums) {
  for (int64_t i = 0; i < n; i += W) {
    T rest[W] = {};
    int64_t left = n - i < W ? n - i : W;
    if (left < W) memcpy(rest, x + i, left * sizeof(T));
    VF v = load(left < W ? rest : x + i);
    for (int k = 0; k < left; ++k) sums[i + k] += (double)v[k] * (double)v[k];
  }
}
INLINE void add_column_squares(const double* x, int64_t n, double* sums) {
  for (int64_t i = 0; i < n; ++i) sums[i] += x[i] * x[i];
}
template <class T> INLINE void multiply_columns(T* x, int64_t n, const double* factors, bool tiny) {
  if (tiny) return multiply_wide(x, n, factors, false);
  for (int64_t i = 0; i < n; i += W) {
    T rest[W] = {};
    int64_t left = n - i < W ? n - i : W;
    T* at = left < W ? rest : x + i;
    if (left < W) memcpy(rest, x + i, left * sizeof(T));
    VF f = {};
    for (int k = 0; k < left; ++k) f[k] = (float)factors[i + k];
    store(at, load(at) * f);
    if (left < W) memcpy(x + i, rest, left * sizeof(T));
  }
}
INLINE void multiply_columns(double* x, int64_t n, const double* factors, bool) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factors[i];
}

// ---- normal numbers, from ChaCha20 (Bernstein, 2008) by Box and Muller's formula ----
//
// The key has 256 bits, and block b of the stream is the function's value at counter b. Any thread that adds noise to
// some part of a tensor therefore gets the numbers of that part. A tile is 16 blocks of 16 words: word w of block
// 16 t + l of stream 0 makes number 16 w + l of tile t. Words 2 j and 2 j + 1 make a pair: the first its radius
// sqrt(-2 ln u), the second its angle. u = (word + 1/2) / 2^32. If u is below 2^-16 it gets 32 more bits, from the same
// word of stream 1, so the tail reaches 9.5 standard deviations. Every operation is exact, on integers, or rounded as
// IEEE 754 defines, so the bits are the same everywhere.
constexpr int ROUNDS = 20;
constexpr int WORDS = 16;
constexpr uint32_t FEW = 1 << 16;

template <class V> INLINE V rotated(V v, int by) { return v << by | v >> (32 - by); }
template <class V> INLINE void quarter(V& a, V& b, V& c, V& d) {
  a += b, d = rotated(d ^ a, 16);
  c += d, b = rotated(b ^ c, 12);
  a += b, d = rotated(d ^ a, 8);
  c += d, b = rotated(b ^ c, 7);
}
// The words of W blocks with the counters low | high << 32.
template <class V> INLINE void chacha(const uint32_t* key, V low, uint32_t high, uint32_t stream, V (&x)[WORDS]) {
  V start[WORDS] = {V{} + 0x61707865u, V{} + 0x3320646eu, V{} + 0x79622d32u, V{} + 0x6b206574u};
  for (int i = 0; i < 8; ++i) start[4 + i] = V{} + key[i];
  start[12] = low, start[13] = V{} + high, start[14] = V{} + stream, start[15] = V{};
  for (int i = 0; i < WORDS; ++i) x[i] = start[i];
  for (int i = 0; i < ROUNDS; i += 2) {
    quarter(x[0], x[4], x[8], x[12]), quarter(x[1], x[5], x[9], x[13]);
    quarter(x[2], x[6], x[10], x[14]), quarter(x[3], x[7], x[11], x[15]);
    quarter(x[0], x[5], x[10], x[15]), quarter(x[1], x[6], x[11], x[12]);
    quarter(x[2], x[7], x[8], x[13]), quarter(x[3], x[4], x[9], x[14]);
  }
  for (int i = 0; i < WORDS; ++i) x[i] += start[i];
}

// (word + the same word of stream 1 / 2^32 + 1/2^33) / 2^32
__attribute__((noinline)) float small_uniform(const uint32_t* key, uint64_t block, int i, uint32_t word) {
  uint32_t more[WORDS];
  chacha<uint32_t>(key, (uint32_t)block, (uint32_t)(block >> 32), 1, more);
  return (float)((double)((uint64_t)word << 32 | more[i]) + 0.5) * 0x1p-64f;
}

INLINE VF root(VF v) {
  float each[W];
  memcpy(each, &v, sizeof v);
  for (int k = 0; k < W; ++k) each[k] = __builtin_sqrtf(each[k]);
  return raw<VF>(each);
}
// sqrt(-2 ln u), where u = 1 - y if `upper` is set and u = y otherwise; 0 < y <= 1/2.
INLINE VF radius(VF y, VI upper) {
  VI bits = (VI)y;
  VI above = (bits & 0x7fffff) > 0x3504f3;  // the mantissa is above sqrt(2)
  VI exponent = (bits >> 23) - 127 - above;
  VF f = (VF)((bits & 0x7fffff) | (above ? (VI){} + 0x3f000000 : (VI){} + 0x3f800000)) - 1.0f;
  VI near = y <= 0.29289323f;  // 1 - y is above sqrt(1/2)
  f = upper ? (near ? -y : 1.0f - (y + y)) : f;
  exponent = upper ? (near ? (VI){} : (VI){} - 1) : exponent;
  VF p = f * -0.07857349514961243f + 0.1288098394870758f;
  p = p * f - 0.13129232823848724f, p = p * f + 0.14181305468082428f, p = p * f - 0.1662452071905136f;
  p = p * f + 0.20002280175685883f, p = p * f - 0.25000810623168945f, p = p * f + 0.33333316445350647f;
  VF square = f * f, e = __builtin_convertvector(exponent, VF);
  VF logarithm = f + (p * (square * f) - 0.5f * square);
  return root((logarithm + e * 0.6931471805599453f) * -2.0f);
}
// Cosine and sine of (a + 1/2) / 2^32 of a turn.
INLINE void on_circle(VU a, VF& cosine, VF& sine) {
  VI offset = (VI)((VU)(((VI)(a << 2)) >> 1) | 1);  // 2 k + 1, where k is the signed distance from the nearest axis
  VF x = __builtin_convertvector(offset, VF) * 7.314590396335798e-10f;  // 2 pi / 2^33
  VU quadrant = (a + 0x20000000u) >> 30;
  VF z = x * x;
  VF s = z * -0.00019517297914717346f + 0.008332177996635437f;
  s = x + x * z * (s * z - 0.16666655242443085f);
  VF c = z * 2.443845005473122e-05f - 0.001388736767694354f;
  c = (1.0f - 0.5f * z) + z * z * (c * z + 0.04166664555668831f);
  VI swap = (VI)(quadrant & 1) != 0;
  cosine = (VF)((VU)(swap ? s : c) ^ ((quadrant + 1) & 2) << 30);
  sine = (VF)((VU)(swap ? c : s) ^ (quadrant & 2) << 30);
}

INLINE void add_tile(float* x, const uint32_t* key, uint64_t tile, float factor, float deviation) {
  for (int lane = 0; lane < WORDS; lane += W) {
    uint64_t block = tile * WORDS + lane;
    VU low, words[WORDS];
    for (int k = 0; k < W; ++k) low[k] = (uint32_t)block + k;
    chacha<VU>(key, low, (uint32_t)(block >> 32), 0, words);
    for (int i = 0; i < WORDS; i += 2) {
      VI upper = (VI)words[i] >> 31;
      VF y = (__builtin_convertvector((VI)words[i] ^ upper, VF) + 0.5f) * 0x1p-32f;
      if (__builtin_expect(any(words[i] < FEW), 0))
        for (int k = 0; k < W; ++k)
          if (words[i][k] < FEW) y[k] = small_uniform(key, block + k, i, words[i][k]);
      VF r = radius(y, upper) * deviation, cosine, sine;
      on_circle(words[i + 1], cosine, sine);
      float* at = x + i * WORDS + lane;
      store(at, load(at) * factor + r * cosine);
      store(at + WORDS, load(at + WORDS) * factor + r * sine);
    }
  }
}
void add_normal(float* x, int64_t n, const uint32_t* key, uint64_t tile, float factor, float deviation) {
  for (; n >= TILE; n -= TILE, x += TILE) add_tile(x, key, tile++, factor, deviation);
  if (n > 0) {
    float rest[TILE] = {};
    memcpy(rest, x, n * sizeof(float));
    add_tile(rest, key, tile, factor, deviation);
    memcpy(x, rest, n * sizeof(float));
  }
}

// ---- the functions of one dtype ----
template <class T> struct Of {
  static void squares(const void* x, int64_t n, Sum* sum) { add_squares((const T*)x, n, *sum); }
  static void absolutes(const void* x, int64_t n, Sum* sum) { add_absolutes((const T*)x, n, *sum); }
  static void largest(const void* x, int64_t n, Sum* sum) {
    double found = value_of(largest_bits((const T*)x, n), (const T*)x);
    if (!(found <= sum->middle) && sum->middle == sum->middle) sum->middle = found;
  }
  static void nonfinite(const void* x, int64_t n, int64_t* nan, int64_t* inf) { add_nonfinite((const T*)x, n, nan, inf); }
  static bool exceeds(const void* x, int64_t n, double low, double high) {
    for (int64_t at = 0; at < n; at += BLOCK)
      if (is_outside((const T*)x + at, n - at < BLOCK ? n - at : BLOCK, low, high)) return true;
    return false;
  }
  static void scale(void* x, int64_t n, double factor) { multiply((T*)x, n, factor); }
  static bool clamp(void* x, int64_t n, double low, double high) {
    bool wrote = false, last = false;
    for (int64_t at = 0; at < n; at += BLOCK) {
      int64_t count = n - at < BLOCK ? n - at : BLOCK;
      if (!last && !is_outside((const T*)x + at, count, low, high)) continue;
      last = clamp_block((T*)x + at, count, low, high);  // if it wrote, the next block is clamped without a test
      wrote = true;
    }
    return wrote;
  }
  static void column_squares(const void* x, int64_t n, double* sums) { add_column_squares((const T*)x, n, sums); }
  static void column_scale(void* x, int64_t n, const double* factors, bool tiny) { multiply_columns((T*)x, n, factors, tiny); }
};
}  // namespace

#define NAME2(isa) kernels_##isa
#define NAME(isa) NAME2(isa)
#define EACH(name) {Of<float>::name, Of<Bf16>::name, Of<Fp16>::name, Of<double>::name}
extern "C" __attribute__((visibility("hidden"))) const Kernels NAME(ISA) = {
    EACH(squares), EACH(absolutes), EACH(largest), EACH(nonfinite), EACH(exceeds),
    EACH(scale),   EACH(clamp),     EACH(column_squares), EACH(column_scale), add_normal};
