// Prints a hash of each kernel's result bits for each instruction set of the machine, on numbers that are the same
// everywhere. tests/tensors/test_kernels.py holds the hashes that every processor must print.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "gradguard.cpp"

static uint64_t state = 1;
static uint32_t next() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 32);
}
static uint64_t hash(const void* bytes, size_t n, uint64_t h = 1469598103934665603u) {
  for (size_t i = 0; i < n; ++i) h = (h ^ ((const uint8_t*)bytes)[i]) * 1099511628211u;
  return h;
}

static const int64_t LENGTHS[] = {0, 1, 3, 15, 16, 17, 31, 63, 64, 65, 100, 2047, 2048, 2049, 5000, 32767, 32769, 70001};
enum { COUNT = sizeof LENGTHS / sizeof *LENGTHS, TOTAL = 300000 };
alignas(64) static uint8_t memory[8 * TOTAL + 64], before[8 * TOTAL + 64];

// Returns finite numbers whose exponents span `spread` binary digits, some of them 0.
static void fill(DType dtype, int spread) {
  memset(before, 0, sizeof before);
  for (int64_t i = 0; i < TOTAL; ++i) {
    uint32_t r = next();
    double v = ldexp((double)(int32_t)next(), -31 + (int)(r % (2 * spread + 1)) - spread) * (r % 17 != 0);
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (dtype == F64) memcpy(before + 8 * i, &v, 8);
    if (dtype == F32) memcpy(before + 4 * i, &f, 4);
    if (dtype == BF16) { uint16_t h = bits >> 16; memcpy(before + 2 * i, &h, 2); }
    if (dtype == F16) { uint16_t h = (uint16_t)(r >> 16) & 0xbbff; memcpy(before + 2 * i, &h, 2); }
  }
}

int main() {
  const char* names[] = {"float32", "bfloat16", "float16", "float64"};
  const int spreads[] = {60, 60, 8, 900};
  for (int level = 1; level <= 4; ++level) {
    if (gg_use_level(level) != level) continue;
    state = 1;
    for (int d = 0; d < DTYPES; ++d)
      for (int wide = 0; wide < 2; ++wide) {
        int spread = wide ? spreads[d] : 3;
        fill((DType)d, spread);
        uint64_t at[COUNT];
        uint8_t dtype[COUNT];
        Shape shape[COUNT];
        int64_t start = 0, units = 0;
        for (int t = 0; t < COUNT; ++t) {
          at[t] = (uint64_t)memory + start * SIZE[d], dtype[t] = d, start += LENGTHS[t] + 1;
          int64_t row = t % 3 == 0 ? 1 : t % 3 == 1 ? 5 : LENGTHS[t];
          if (row > LENGTHS[t] || !row) row = 1;
          shape[t] = t % 2 || d == F64 ? Shape{1, 1, LENGTHS[t] / row, row} : Shape{1, LENGTHS[t] / row, row, 1};
          units += shape[t].groups * shape[t].units;
        }
        List list = {at, LENGTHS, dtype, COUNT};
        UnitList cut = {at, shape, dtype, COUNT};
        Threads threads = {1, nullptr};
        memcpy(memory, before, sizeof memory);
        double norms[COUNT], norm;
        for (int order = 1; order <= 3; ++order) {
          gg_norm(&list, order, &norm, norms, &threads);
          printf("%d %s %d norm%d %016llx\n", level, names[d], spread, order, (unsigned long long)hash(norms, sizeof norms, hash(&norm, 8)));
        }
        Room<double> of_units(units), factors(units);
        gg_unit_norms(&cut, of_units.at, &threads);
        printf("%d %s %d units %016llx\n", level, names[d], spread, (unsigned long long)hash(of_units.at, 8 * units));
        for (int64_t u = 0; u < units; ++u) factors[u] = u % 3 ? 1.0 / (1 + u % 7) : 1.0;
        gg_unit_scale(&cut, factors.at, &threads);
        gg_scale(&list, 0.3, &threads);
        printf("%d %s %d scale %016llx\n", level, names[d], spread, (unsigned long long)hash(memory, sizeof memory));
        double low[] = {-0.25, -0.25, -0.25, -0.25}, high[] = {0.5, 0.5, 0.5, 0.5};
        uint8_t written[COUNT];
        gg_clamp(&list, low, high, written, &threads);
        printf("%d %s %d clamp %016llx\n", level, names[d], spread, (unsigned long long)hash(memory, sizeof memory, hash(written, COUNT)));
        if (d != F32) continue;
        const uint32_t key[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        gg_add_normal(&list, key, ((uint64_t)1 << 28) - 9, 0.3, 2.5, &threads);
        printf("%d %s %d normal %016llx\n", level, names[d], spread, (unsigned long long)hash(memory, sizeof memory));
      }
  }
}
