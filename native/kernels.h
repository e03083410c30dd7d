// The functions of one instruction set, one for each dtype.
#pragma once
#include <stdint.h>

enum DType : uint8_t { F32, BF16, F16, F64, DTYPES };

// A sum of powers: middle + large * 2^1200 + small * 2^-1200. Only squares of float64 need the last two.
struct Sum {
  double middle, large, small;
};

struct Kernels {
  void (*squares[DTYPES])(const void* x, int64_t n, Sum* sum);     // adds to the sum
  void (*absolutes[DTYPES])(const void* x, int64_t n, Sum* sum);   // adds to the sum
  void (*largest[DTYPES])(const void* x, int64_t n, Sum* sum);     // middle = max(middle, |x|); NaN wins
  void (*nonfinite[DTYPES])(const void* x, int64_t n, int64_t* nan, int64_t* inf);  // adds to the counts
  bool (*exceeds[DTYPES])(const void* x, int64_t n, double low, double high);       // NaN does not exceed
  void (*scale[DTYPES])(void* x, int64_t n, double factor);
  bool (*clamp[DTYPES])(void* x, int64_t n, double low, double high);               // returns whether it wrote
  void (*column_squares[DTYPES])(const void* x, int64_t n, double* sums);    // sums[i] += x[i]^2
  void (*column_scale[DTYPES])(void* x, int64_t n, const double* factors, bool tiny);  // x[i] *= factors[i]; any is_tiny
  // x[i] = x[i] * factor + deviation * (normal number i, counted from `tile`); see "normal numbers" in kernels.cpp
  void (*add_normal)(float* x, int64_t n, const uint32_t* key, uint64_t tile, float factor, float deviation);
};

constexpr int64_t TILE = 256;  // how many normal numbers 16 blocks of the stream make

// Whether float32 would lose digits of a factor that is not negative.
static inline bool is_tiny(double factor) { return factor < 0x1p-126 && factor > 0; }
