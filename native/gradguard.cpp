// A plain C interface to the kernels: lists of addresses in, numbers out. It needs no torch, Python or C++ runtime, and
// starts no threads of its own.
//
// Work is cut into chunks, each within one tensor. Consecutive chunks form a task, and threads take tasks from a shared
// counter. Every chunk has its own sum. These are joined in order, so the number of threads does not change the bits.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define API extern "C" __attribute__((visibility("default")))

// ---- the instruction set ----
#if defined(__x86_64__)
extern "C" const Kernels kernels_1, kernels_3, kernels_4;  // x86-64, x86-64-v3 and x86-64-v4
static const Kernels* kernels_at(int level) {
  __builtin_cpu_init();
  bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
  if (level >= 4 && v4) return &kernels_4;
  if (level >= 3 && v3) return &kernels_3;  // every processor with AVX2 has F16C
  return &kernels_1;
}
static int level_of(const Kernels* k) { return k == &kernels_4 ? 4 : k == &kernels_3 ? 3 : 1; }
#else
extern "C" const Kernels kernels_1;
static const Kernels* kernels_at(int) { return &kernels_1; }
static int level_of(const Kernels*) { return 1; }
#endif
static const Kernels* use = kernels_at(4);

// Use the best instruction set of this machine up to `level`, and return its level. For tests.
API int gg_use_level(int level) {
  use = kernels_at(level);
  return level_of(use);
}
API int gg_interface() { return 5; }

// ---- subnormal numbers ----
// Keeps this thread from flushing subnormal numbers to 0 (torch.set_flush_denormal) as long as the object exists. Some
// threads of a pool flush and others do not, and results must not depend on which thread takes which chunk.
struct Subnormals {
#if defined(__x86_64__)
  static constexpr unsigned FLUSH = 0x8040;  // the bits for results and for operands
  unsigned before = __builtin_ia32_stmxcsr();
  Subnormals() {
    if (before & FLUSH) __builtin_ia32_ldmxcsr(before & ~FLUSH);
  }
  ~Subnormals() {
    if (before & FLUSH) __builtin_ia32_ldmxcsr(before);
  }
#elif defined(__aarch64__)
  static constexpr uint64_t FLUSH = 1 << 24 | 1 << 19;  // the bits for float32 and float64, and for float16
  uint64_t before;
  Subnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    if (before & FLUSH) __asm__ volatile("msr fpcr, %0" ::"r"(before & ~FLUSH));
  }
  ~Subnormals() {
    if (before & FLUSH) __asm__ volatile("msr fpcr, %0" ::"r"(before));
  }
#endif
  Subnormals(const Subnormals&) = delete;
};

// ---- threads ----
typedef void (*Body)(int64_t begin, int64_t end, void* context);
// torch's own thread pool: the caller passes the function `torch_parallel_for` of libtorch_cpu, so nothing is linked.
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);
struct Threads {
  int64_t count;
  ParallelFor parallel;
};

static const int64_t SIZE[DTYPES] = {4, 2, 2, 8};
static const int64_t CHUNK = 1 << 15;  // elements
static const int64_t TASK = 1 << 17;   // elements: 512 kB of float32
static const int64_t ALONE = 1 << 16;  // elements below which one thread is faster

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class F> static void for_tasks(int64_t tasks, int64_t elements, const Threads* threads, const F& each) {
  int64_t count = smaller(threads->count, tasks);
  if (count <= 1 || elements < ALONE || !threads->parallel) {
    for (int64_t i = 0; i < tasks; ++i) each(i);
    return;
  }
  struct Job {
    const F* each;
    int64_t tasks, next;
  } job = {&each, tasks, 0};
  threads->parallel(0, count, 1, [](int64_t, int64_t, void* context) {
    Subnormals kept;
    Job& job = *(Job*)context;
    for (int64_t i; (i = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED)) < job.tasks;) (*job.each)(i);
  }, &job);
}

// ---- memory: freed at the end of a call ----
template <class T> struct Room {
  T* at = nullptr;
  int64_t size = 0;
  explicit Room(int64_t n) : at((T*)calloc(n > 0 ? n : 1, sizeof(T))), size(n) {}
  Room(const Room&) = delete;
  ~Room() { free(at); }
  T& operator[](int64_t i) const { return at[i]; }
};
enum Status { DONE = 0, NO_MEMORY = 1 };

// ---- lists of tensors ----
struct List {
  const uint64_t* at;      // addresses
  const int64_t* numel;
  const uint8_t* dtype;
  int64_t count;
};
struct Chunk {
  char* at;
  int64_t n, tensor;
};
struct Work {
  Room<Chunk> chunks;
  Room<int64_t> tasks;  // the first chunk of each task, then the number of chunks
  int64_t chunk_count = 0, task_count = 0, elements = 0;

  static int64_t most(const List* list) {
    int64_t n = 0;
    for (int64_t t = 0; t < list->count; ++t) n += (list->numel[t] + CHUNK - 1) / CHUNK;
    return n;
  }
  explicit Work(const List* list) : chunks(most(list)), tasks(chunks.size + 1) {
    if (!is_there()) return;
    int64_t in_task = TASK;
    for (int64_t t = 0; t < list->count; ++t)
      for (int64_t start = 0; start < list->numel[t]; start += CHUNK) {
        int64_t n = smaller(CHUNK, list->numel[t] - start);
        if (in_task >= TASK) tasks[task_count++] = chunk_count, in_task = 0;
        chunks[chunk_count++] = {(char*)list->at[t] + start * SIZE[list->dtype[t]], n, t};
        in_task += n, elements += n;
      }
    tasks[task_count] = chunk_count;
  }
  bool is_there() const { return chunks.at && tasks.at; }
  template <class F> void for_chunks(const Threads* threads, const F& each) const {
    for_tasks(task_count, elements, threads, [&](int64_t i) {
      for (int64_t c = tasks[i]; c < tasks[i + 1]; ++c) each(c);
    });
  }
};

// ---- norms ----
enum Order { ONE = 1, TWO = 2, INFINITE = 3 };

static const double DOWN = 0x1p-600, UP = 0x1p600, MOST = 0x1p960, LEAST = 0x1p-930;
static double root(const Sum& s) {
  if (s.middle != s.middle || s.large != s.large) return NAN;
  if (s.large > 0) return __builtin_sqrt(s.large + s.middle * DOWN * DOWN) * 0x1p600;
  if (s.middle > 0 && s.small > 0) return __builtin_sqrt(s.middle + s.small * DOWN * DOWN);
  return s.middle > 0 ? __builtin_sqrt(s.middle) : __builtin_sqrt(s.small) * 0x1p-600;
}
static double norm_of(const Sum& s, Order order) { return order == TWO ? root(s) : s.middle; }
static void join(Sum& a, const Sum& b, Order order) {
  if (order != INFINITE) a.middle += b.middle, a.large += b.large, a.small += b.small;
  else if (!(b.middle <= a.middle) && a.middle == a.middle) a.middle = b.middle;
}

// The norm of all tensors; also that of each tensor if `norms` is not null.
API int gg_norm(const List* list, int order_code, double* norm, double* norms, const Threads* threads) {
  Subnormals kept;
  Order order = (Order)order_code;
  Work w(list);
  Room<Sum> sums(w.chunks.size);
  if (!w.is_there() || !sums.at) return NO_MEMORY;
  auto measure = order == ONE ? use->absolutes : order == TWO ? use->squares : use->largest;
  w.for_chunks(threads, [&](int64_t c) {
    measure[list->dtype[w.chunks[c].tensor]](w.chunks[c].at, w.chunks[c].n, &sums[c]);
  });
  Sum all = {};
  if (norms) memset(norms, 0, list->count * sizeof(double));
  for (int64_t c = 0; c < w.chunk_count;) {
    Sum one = {};
    int64_t tensor = w.chunks[c].tensor;
    for (; c < w.chunk_count && w.chunks[c].tensor == tensor; ++c) join(one, sums[c], order);
    if (norms) norms[tensor] = norm_of(one, order);
    join(all, one, order);
  }
  *norm = norm_of(all, order);
  return DONE;
}

// ---- samples: every stride-th element of each tensor, all of one dtype, stored in order in `before`, `changes` ----
struct SampleList {
  const uint64_t* at;      // the first element of each tensor
  const int64_t* numel;    // the number of sampled elements
  const int64_t* stride;   // the distance between them, in elements
  char *before, *changes;
  int64_t count, dtype;
};
template <class F> static int for_samples(const SampleList* list, const Threads* threads, const F& each) {
  Room<int64_t> first(list->count + 1);
  if (!first.at) return NO_MEMORY;
  for (int64_t t = 0; t < list->count; ++t) first[t + 1] = first[t] + list->numel[t];
  for_tasks(list->count, first[list->count], threads, [&](int64_t t) { each(t, first[t]); });
  return DONE;
}
template <class T> static int take(const SampleList* list, const Threads* threads) {
  return for_samples(list, threads, [&](int64_t t, int64_t first) {
    const T* now = (const T*)list->at[t];
    T* before = (T*)list->before + first;
    for (int64_t i = 0; i < list->numel[t]; ++i) before[i] = now[i * list->stride[t]];
  });
}
template <class T> static int moved(const SampleList* list, double* norms, const Threads* threads) {
  return for_samples(list, threads, [&](int64_t t, int64_t first) {
    const T* now = (const T*)list->at[t];
    T *before = (T*)list->before + first, *changes = (T*)list->changes + first;
    for (int64_t i = 0; i < list->numel[t]; ++i) changes[i] = now[i * list->stride[t]] - before[i];
    Sum of_change = {}, of_weight = {};
    use->squares[list->dtype](changes, list->numel[t], &of_change);
    use->squares[list->dtype](before, list->numel[t], &of_weight);
    norms[t] = root(of_change), norms[list->count + t] = root(of_weight);
  });
}
// gg_take stores the elements before a step. gg_moved then computes their changes, and two lists of 2-norms: of the
// changes of each tensor, then of its elements before. For float32 and float64.
API int gg_take(const SampleList* list, const Threads* threads) {
  Subnormals kept;
  return list->dtype == F64 ? take<double>(list, threads) : take<float>(list, threads);
}
API int gg_moved(const SampleList* list, double* norms, const Threads* threads) {
  Subnormals kept;
  return list->dtype == F64 ? moved<double>(list, norms, threads) : moved<float>(list, norms, threads);
}

// ---- writes ----
// Whether two tensors share memory: two threads must not multiply one element. A radix sort orders the addresses.
template <class F> static bool overlap(const uint64_t* at, int64_t count, const F& bytes) {
  const int DIGIT = 11, PLACES = 1 << DIGIT;
  Room<int64_t> order(2 * count);
  if (!order.at) return true;
  uint64_t same = ~(uint64_t)0;  // the bits that are equal in all addresses: no pass needs them
  for (int64_t i = 1; i < count; ++i) same &= ~(at[i] ^ at[0]);
  int64_t *from = order.at, *to = order.at + count, kept = 0;
  for (int64_t i = 0; i < count; ++i)
    if (bytes(i) > 0) from[kept++] = i;
  for (int shift = 0; shift < 64; shift += DIGIT) {
    if (!(~same >> shift & (PLACES - 1))) continue;
    int64_t start[PLACES + 1] = {};
    for (int64_t i = 0; i < kept; ++i) ++start[(at[from[i]] >> shift & (PLACES - 1)) + 1];
    for (int k = 0; k < PLACES; ++k) start[k + 1] += start[k];
    for (int64_t i = 0; i < kept; ++i) to[start[at[from[i]] >> shift & (PLACES - 1)]++] = from[i];
    int64_t* other = from;
    from = to, to = other;
  }
  for (int64_t i = 1; i < kept; ++i)
    if (at[from[i - 1]] + bytes(from[i - 1]) > at[from[i]]) return true;
  return false;
}

// Tasks run in reverse order: the norm has read the last elements most recently, so they are still in the cache.
API int gg_scale(const List* list, double factor, const Threads* threads) {
  Subnormals kept;
  Work w(list);
  if (!w.is_there()) return NO_MEMORY;
  Threads alone = {1, nullptr};
  if (overlap(list->at, list->count, [&](int64_t t) { return list->numel[t] * SIZE[list->dtype[t]]; })) threads = &alone;
  for_tasks(w.task_count, w.elements, threads, [&](int64_t i) {
    int64_t task = w.task_count - 1 - i;
    for (int64_t c = w.tasks[task + 1]; c-- > w.tasks[task];)
      use->scale[list->dtype[w.chunks[c].tensor]](w.chunks[c].at, w.chunks[c].n, factor);
  });
  return DONE;
}

// `low` and `high` hold a bound for each dtype, rounded to it; `written` becomes 1 for each tensor that was written.
API int gg_clamp(const List* list, const double* low, const double* high, uint8_t* written, const Threads* threads) {
  Subnormals kept;
  Work w(list);
  if (!w.is_there()) return NO_MEMORY;
  memset(written, 0, list->count);
  w.for_chunks(threads, [&](int64_t c) {
    int64_t t = w.chunks[c].tensor;
    uint8_t d = list->dtype[t];
    if (use->clamp[d](w.chunks[c].at, w.chunks[c].n, low[d], high[d])) __atomic_store_n(&written[t], 1, __ATOMIC_RELAXED);
  });
  return DONE;
}
API int gg_exceeds(const List* list, const double* low, const double* high, int* found, const Threads* threads) {
  Subnormals kept;
  Work w(list);
  if (!w.is_there()) return NO_MEMORY;
  int any = 0;
  w.for_chunks(threads, [&](int64_t c) {
    if (__atomic_load_n(&any, __ATOMIC_RELAXED)) return;
    uint8_t d = list->dtype[w.chunks[c].tensor];
    if (use->exceeds[d](w.chunks[c].at, w.chunks[c].n, low[d], high[d])) __atomic_store_n(&any, 1, __ATOMIC_RELAXED);
  });
  *found = any;
  return DONE;
}

// ---- non-finite elements of each tensor ----
API int gg_nonfinite(const List* list, int64_t* nan, int64_t* inf, const Threads* threads) {
  Subnormals kept;
  Work w(list);
  Room<int64_t> counts(2 * w.chunks.size);
  if (!w.is_there() || !counts.at) return NO_MEMORY;
  w.for_chunks(threads, [&](int64_t c) {
    use->nonfinite[list->dtype[w.chunks[c].tensor]](w.chunks[c].at, w.chunks[c].n, &counts[2 * c], &counts[2 * c + 1]);
  });
  memset(nan, 0, list->count * sizeof(int64_t));
  memset(inf, 0, list->count * sizeof(int64_t));
  for (int64_t c = 0; c < w.chunk_count; ++c) {
    nan[w.chunks[c].tensor] += counts[2 * c];
    inf[w.chunks[c].tensor] += counts[2 * c + 1];
  }
  return DONE;
}

// ---- units: a tensor is [groups, before, units, after] in memory, with groups * units units ----
struct Shape {
  int64_t groups, before, units, after;
};
struct UnitList {
  const uint64_t* at;
  const Shape* shape;
  const uint8_t* dtype;
  int64_t count;
};
// If `before` is 1, each unit is a contiguous run of memory (a row); otherwise units are side by side (columns).
static bool are_rows(const Shape& s) { return s.before == 1; }

static const int64_t SPAN = 1 << 11;  // columns that are summed at a time: 16 kB of float64

// A piece of work. Rows: units [first, first + count), or a part of one long unit. Columns: elements [start, start + n)
// of each row of one group, where `first` is the group.
struct Piece {
  int64_t tensor, first, count, start, n, unit;
};
struct UnitWork {
  Room<Piece> pieces;
  Room<int64_t> tasks;
  int64_t piece_count = 0, task_count = 0, elements = 0, units = 0;

  template <class F> static void cut(const UnitList* list, const F& each) {
    int64_t unit = 0;
    for (int64_t t = 0; t < list->count; ++t) {
      const Shape& s = list->shape[t];
      int64_t all = s.groups * s.units;
      if (s.after && s.before && are_rows(s) && s.after <= CHUNK) {
        int64_t together = CHUNK / s.after;
        for (int64_t u = 0; u < all; u += together) {
          int64_t count = smaller(together, all - u);
          each(Piece{t, u, count, 0, s.after, unit + u}, count * s.after);
        }
      } else if (s.after && s.before && are_rows(s)) {
        for (int64_t u = 0; u < all; ++u)
          for (int64_t start = 0; start < s.after; start += CHUNK)
            each(Piece{t, u, 1, start, smaller(CHUNK, s.after - start), unit + u}, smaller(CHUNK, s.after - start));
      } else if (s.after && s.before) {
        int64_t together = s.after < SPAN ? SPAN / s.after : 1;
        for (int64_t g = 0; g < s.groups; ++g)
          for (int64_t u = 0; u < s.units; u += together) {
            int64_t count = smaller(together, s.units - u);
            each(Piece{t, g, count, u * s.after, count * s.after, unit + g * s.units + u}, count * s.after * s.before);
          }
      }
      unit += all;
    }
  }
  static int64_t most(const UnitList* list) {
    int64_t n = 0;
    cut(list, [&](const Piece&, int64_t) { ++n; });
    return n;
  }
  explicit UnitWork(const UnitList* list) : pieces(most(list)), tasks(pieces.size + 1) {
    if (!is_there()) return;
    int64_t in_task = TASK;
    cut(list, [&](const Piece& piece, int64_t size) {
      if (in_task >= TASK) tasks[task_count++] = piece_count, in_task = 0;
      pieces[piece_count++] = piece;
      in_task += size, elements += size;
    });
    tasks[task_count] = piece_count;
    for (int64_t t = 0; t < list->count; ++t) units += list->shape[t].groups * list->shape[t].units;
  }
  bool is_there() const { return pieces.at && tasks.at; }
};

static char* row_of(const UnitList* list, const Piece& p, int64_t unit) {
  return (char*)list->at[p.tensor] + ((p.first + unit) * list->shape[p.tensor].after + p.start) * SIZE[list->dtype[p.tensor]];
}
static char* line_of(const UnitList* list, const Piece& p, int64_t before) {
  const Shape& s = list->shape[p.tensor];
  return (char*)list->at[p.tensor] + ((p.first * s.before + before) * s.units * s.after + p.start) * SIZE[list->dtype[p.tensor]];
}

static void measure_rows(const UnitList* list, const Piece& p, Sum* sums) {
  for (int64_t u = 0; u < p.count; ++u) use->squares[list->dtype[p.tensor]](row_of(list, p, u), p.n, &sums[u]);
}
// Squares of float64 may leave its range. Columns whose plain sum shows this are summed again from elements scaled down
// or up. The limits are the same as for rows, in kernels.cpp.
static void add_columns_of_all_sizes(const UnitList* list, const Piece& p, int64_t start, int64_t n, const double* square,
                                     Sum* sums) {
  const Shape& s = list->shape[p.tensor];
  double down[SPAN] = {}, up[SPAN] = {};
  for (int64_t b = 0; b < s.before; ++b) {
    const double* x = (const double*)line_of(list, p, b) + start;
    for (int64_t i = 0; i < n; ++i) {
      double small = x[i] * DOWN, large = x[i] * UP;
      down[i] += small * small, up[i] += large * large;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    Sum& sum = sums[(start + i) / s.after];
    if (square[i] >= MOST) sum.large += down[i];
    else if (square[i] <= LEAST) sum.small += up[i];
    else sum.middle += square[i];  // NaN too
  }
}
// Wide pieces of columns are processed SPAN elements at a time.
static void measure_columns(const UnitList* list, const Piece& p, Sum* sums) {
  const Shape& s = list->shape[p.tensor];
  uint8_t d = list->dtype[p.tensor];
  double square[SPAN];
  for (int64_t start = 0; start < p.n; start += SPAN) {
    int64_t n = smaller(SPAN, p.n - start);
    memset(square, 0, n * sizeof(double));
    for (int64_t b = 0; b < s.before; ++b) use->column_squares[d](line_of(list, p, b) + start * SIZE[d], n, square);
    bool leaves = false;
    for (int64_t i = 0; d == F64 && i < n; ++i) leaves |= square[i] >= MOST || square[i] <= LEAST;
    if (leaves) add_columns_of_all_sizes(list, p, start, n, square, sums);
    else
      for (int64_t i = 0; i < n; ++i) sums[(start + i) / s.after].middle += square[i];
  }
}

// The 2-norm of each unit of each tensor, in order.
API int gg_unit_norms(const UnitList* list, double* norms, const Threads* threads) {
  Subnormals kept;
  UnitWork w(list);
  int64_t slots = 0;
  for (int64_t i = 0; w.is_there() && i < w.piece_count; ++i) slots += w.pieces[i].count;
  Room<Sum> sums(slots);
  Room<int64_t> slot(w.piece_count);
  if (!w.is_there() || !sums.at || !slot.at) return NO_MEMORY;
  for (int64_t i = 1; i < w.piece_count; ++i) slot[i] = slot[i - 1] + w.pieces[i - 1].count;
  for_tasks(w.task_count, w.elements, threads, [&](int64_t task) {
    for (int64_t i = w.tasks[task]; i < w.tasks[task + 1]; ++i) {
      const Piece& p = w.pieces[i];
      (are_rows(list->shape[p.tensor]) ? measure_rows : measure_columns)(list, p, &sums[slot[i]]);
    }
  });
  memset(norms, 0, w.units * sizeof(double));
  for (int64_t i = 0; i < w.piece_count;) {
    const Piece& p = w.pieces[i];
    if (p.count > 1 || !are_rows(list->shape[p.tensor])) {
      for (int64_t u = 0; u < p.count; ++u) norms[p.unit + u] = root(sums[slot[i] + u]);
      ++i;
      continue;
    }
    Sum one = {};  // of all pieces of a long unit
    int64_t unit = p.unit;
    for (; i < w.piece_count && w.pieces[i].unit == unit && w.pieces[i].count == 1; ++i) join(one, sums[slot[i]], TWO);
    norms[unit] = root(one);
  }
  return DONE;
}

static bool units_overlap(const UnitList* list) {
  return overlap(list->at, list->count, [&](int64_t t) {
    const Shape& s = list->shape[t];
    return s.groups * s.before * s.units * s.after * SIZE[list->dtype[t]];
  });
}
static void scale_rows(const UnitList* list, const Piece& p, const double* factors) {
  for (int64_t u = 0; u < p.count; ++u)
    if (factors[u] != 1) use->scale[list->dtype[p.tensor]](row_of(list, p, u), p.n, factors[u]);
}
static void scale_columns(const UnitList* list, const Piece& p, const double* factors) {
  const Shape& s = list->shape[p.tensor];
  uint8_t d = list->dtype[p.tensor];
  double each[SPAN];
  for (int64_t start = 0; start < p.n; start += SPAN) {
    int64_t n = smaller(SPAN, p.n - start);
    bool binds = false, tiny = false;
    for (int64_t i = 0; i < n; ++i)
      each[i] = factors[(start + i) / s.after], binds |= each[i] != 1, tiny |= is_tiny(each[i]);
    for (int64_t b = 0; binds && b < s.before; ++b)
      use->column_scale[d](line_of(list, p, b) + start * SIZE[d], n, each, tiny);
  }
}

// Multiply each unit by its own factor. A unit with factor 1 is not written, unless it is a column beside another one.
API int gg_unit_scale(const UnitList* list, const double* factors, const Threads* threads) {
  Subnormals kept;
  UnitWork w(list);
  if (!w.is_there()) return NO_MEMORY;
  Threads alone = {1, nullptr};
  if (units_overlap(list)) threads = &alone;
  for_tasks(w.task_count, w.elements, threads, [&](int64_t i) {
    int64_t task = w.task_count - 1 - i;  // in reverse order, as in gg_scale
    for (int64_t k = w.tasks[task + 1]; k-- > w.tasks[task];) {
      const Piece& p = w.pieces[k];
      (are_rows(list->shape[p.tensor]) ? scale_rows : scale_columns)(list, p, factors + p.unit);
    }
  });
  return DONE;
}

// ---- adaptive clipping: each unit of a gradient is bounded by the same unit of its weight ----
// `whole` is the factor; where float64 would lose digits of it, `first` * `second` is more exact.
struct Factor {
  double whole, first, second;
};
static Factor factor_for(double norm, double weight, double threshold, double eps) {
  double bound = (weight < eps ? eps : weight) * threshold;  // NaN stays
  double whole = norm > bound ? bound / norm : 1;
  if (!(whole < 0x1p-1022 && bound > 0 && norm < INFINITY)) return {whole, whole, 1};
  return {whole, 0x1p-1021, bound * 0x1p1021 / norm};
}

// Measure the units of weights and gradients, and scale the gradients' units while they are in the cache. The results
// are `norms` (of the gradients' units), `factors` (of the units) and `norm` (of all gradients).
API int gg_unit_clip(const UnitList* weights, const UnitList* grads, double threshold, double eps, double* norms,
                     double* factors, double* norm, const Threads* threads) {
  Subnormals kept;
  UnitWork w(grads);
  Room<Sum> parts(2 * w.pieces.size);  // for the pieces of long units: gradient, weight
  Room<Factor> of_parts(w.pieces.size);
  if (!w.is_there() || !parts.at || !of_parts.at) return NO_MEMORY;
  Threads alone = {1, nullptr};
  if (units_overlap(grads)) threads = &alone;
  memset(norms, 0, w.units * sizeof(double));
  for (int64_t u = 0; u < w.units; ++u) factors[u] = 1;
  auto is_part = [&](const Piece& p) { return are_rows(grads->shape[p.tensor]) && p.n < grads->shape[p.tensor].after; };
  for_tasks(w.task_count, w.elements, threads, [&](int64_t task) {
    for (int64_t i = w.tasks[task]; i < w.tasks[task + 1]; ++i) {
      const Piece& p = w.pieces[i];
      if (is_part(p)) {
        measure_rows(grads, p, &parts[2 * i]);
        measure_rows(weights, p, &parts[2 * i + 1]);
      } else if (are_rows(grads->shape[p.tensor])) {
        Piece row = p;
        row.count = 1;
        for (int64_t u = 0; u < p.count; ++u, ++row.first, ++row.unit) {
          Sum g = {}, v = {};
          measure_rows(grads, row, &g);
          measure_rows(weights, row, &v);
          norms[row.unit] = root(g);
          Factor factor = factor_for(norms[row.unit], root(v), threshold, eps);
          factors[row.unit] = factor.whole;
          scale_rows(grads, row, &factor.first);
          scale_rows(grads, row, &factor.second);
        }
      } else {
        Sum g[SPAN] = {}, v[SPAN] = {};
        measure_columns(grads, p, g);
        measure_columns(weights, p, v);
        double first[SPAN], second[SPAN];
        bool is_split = false;
        for (int64_t u = 0; u < p.count; ++u) {
          norms[p.unit + u] = root(g[u]);
          Factor factor = factor_for(norms[p.unit + u], root(v[u]), threshold, eps);
          factors[p.unit + u] = factor.whole, first[u] = factor.first, second[u] = factor.second;
          is_split |= factor.second != 1;
        }
        scale_columns(grads, p, first);
        if (is_split) scale_columns(grads, p, second);
      }
    }
  });
  for (int64_t i = 0; i < w.piece_count;) {
    if (!is_part(w.pieces[i])) {
      ++i;
      continue;
    }
    Sum g = {}, v = {};
    int64_t unit = w.pieces[i].unit, first = i;
    for (; i < w.piece_count && w.pieces[i].unit == unit; ++i) join(g, parts[2 * i], TWO), join(v, parts[2 * i + 1], TWO);
    norms[unit] = root(g);
    Factor factor = factor_for(norms[unit], root(v), threshold, eps);
    factors[unit] = factor.whole;
    for (int64_t k = first; k < i; ++k) of_parts[k] = factor;
  }
  for_tasks(w.task_count, w.elements, threads, [&](int64_t i) {
    int64_t task = w.task_count - 1 - i;
    for (int64_t k = w.tasks[task + 1]; k-- > w.tasks[task];)
      if (is_part(w.pieces[k])) {
        scale_rows(grads, w.pieces[k], &of_parts[k].first);
        scale_rows(grads, w.pieces[k], &of_parts[k].second);
      }
  });
  Sum all = {};
  use->squares[F64](norms, w.units, &all);
  *norm = root(all);
  return DONE;
}

// ---- noise ----
// x = x * factor + deviation * (standard normal numbers), for float32 tensors only. Each tensor begins a new tile; the
// first is `tile`. The caller must not use a tile twice under one key. The bits do not depend on the threads.
API int gg_add_normal(const List* list, const uint32_t* key, uint64_t tile, double factor, double deviation,
                      const Threads* threads) {
  Subnormals kept;
  Work w(list);
  Room<uint64_t> first(w.chunks.size);
  if (!w.is_there() || !first.at) return NO_MEMORY;
  for (int64_t c = 0; c < w.chunk_count; ++c) {
    first[c] = tile;
    tile += (w.chunks[c].n + TILE - 1) / TILE;  // only a tensor's last chunk can end within a tile
  }
  Threads alone = {1, nullptr};
  if (overlap(list->at, list->count, [&](int64_t t) { return list->numel[t] * SIZE[F32]; })) threads = &alone;
  w.for_chunks(threads, [&](int64_t c) {
    use->add_normal((float*)w.chunks[c].at, w.chunks[c].n, key, first[c], (float)factor, (float)deviation);
  });
  return DONE;
}

// ---- comparison of an instruction set with the plain one on this machine: the library is used only if they agree ----
static uint32_t random_bits(uint64_t& state) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 32);
}
template <class T> static bool same(const T* a, const T* b, int64_t n) { return memcmp(a, b, n * sizeof(T)) == 0; }

// 0 if `better` computes the bits of `plain` for every kernel and dtype, else 1 + the dtype. Takes a millisecond.
static int differs(const Kernels* plain, const Kernels* better) {
  const int64_t N = 4500;  // two blocks and a remainder
  Room<double> given(N), one(N), two(N), sums(2 * N), factors(N);
  if (!given.at || !one.at || !two.at || !sums.at || !factors.at) return 1;
  uint64_t state = 1;
  const uint32_t key[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  plain->add_normal((float*)one.at, N, key, ((uint64_t)1 << 28) - 9, 0.3f, 2.5f);  // the block counter passes 2^32
  better->add_normal((float*)two.at, N, key, ((uint64_t)1 << 28) - 9, 0.3f, 2.5f);
  if (!same((float*)one.at, (float*)two.at, N)) return 1 + F32;
  for (int d = 0; d < DTYPES; ++d)
    for (int round = 0; round < 4; ++round) {
      int64_t n = round == 3 ? 77 : N, bytes = n * SIZE[d];
      for (int64_t i = 0; i < n; ++i) {
        factors[i] = (double)(random_bits(state) >> 8) * 0x1p-24;
        double v = ((double)random_bits(state) * 0x1p-31 - 1) * (round == 1 ? 0x1p-70 : round == 2 ? 0x1p70 : 1);
        float f = (float)v;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        uint16_t b = bits >> 16, h = random_bits(state) & (round == 2 ? 0xffff : 0xbbff);
        if ((h & 0x7c00) == 0x7c00) h &= 0xfc00;  // no NaN: the bits of NaN may differ
        memcpy((char*)given.at + i * SIZE[d], d == F64 ? (void*)&v : d == F32 ? (void*)&f : d == BF16 ? (void*)&b : (void*)&h, SIZE[d]);
      }
      Sum a[3] = {}, b[3] = {};
      plain->squares[d](given.at, n, &a[0]), better->squares[d](given.at, n, &b[0]);
      plain->absolutes[d](given.at, n, &a[1]), better->absolutes[d](given.at, n, &b[1]);
      plain->largest[d](given.at, n, &a[2]), better->largest[d](given.at, n, &b[2]);
      if (!same(a, b, 3)) return 1 + d;
      int64_t counts[4] = {};
      plain->nonfinite[d](given.at, n, &counts[0], &counts[1]);
      better->nonfinite[d](given.at, n, &counts[2], &counts[3]);
      if (counts[0] != counts[2] || counts[1] != counts[3]) return 1 + d;
      memset(sums.at, 0, 2 * n * sizeof(double));
      plain->column_squares[d](given.at, n, sums.at);
      better->column_squares[d](given.at, n, sums.at + n);
      if (!same(sums.at, sums.at + n, n)) return 1 + d;
      double limit = d == F16 ? 0.25 : round == 1 ? 0x1p-72 : round == 2 ? 0x1p68 : 0.25;
      for (int64_t i = 0; i < n; i += 3) factors[i] *= 0x1p-150;
      for (int write = 0; write < 5; ++write) {
        memcpy(one.at, given.at, bytes), memcpy(two.at, given.at, bytes);
        bool a = true, b = true;
        if (write == 0) plain->scale[d](one.at, n, 0.3), better->scale[d](two.at, n, 0.3);
        if (write == 1) plain->scale[d](one.at, n, 0x1.8p-130), better->scale[d](two.at, n, 0x1.8p-130);
        if (write > 2) {  // some factors are tiny
          plain->column_scale[d](one.at, n, factors.at, write == 4);
          better->column_scale[d](two.at, n, factors.at, write == 4);
        }
        if (write == 2) {
          a = plain->exceeds[d](one.at, n, -limit, limit), b = better->exceeds[d](two.at, n, -limit, limit);
          a ^= plain->clamp[d](one.at, n, -limit, limit), b ^= better->clamp[d](two.at, n, -limit, limit);
        }
        if (a != b) return 1 + d;
        for (int64_t i = 0; i < n; ++i) {  // inf * 0 is NaN
          const char *x = (char*)one.at + i * SIZE[d], *y = (char*)two.at + i * SIZE[d];
          if (memcmp(x, y, SIZE[d]) && !(d == F16 && (x[1] & 0x7c) == 0x7c && (y[1] & 0x7c) == 0x7c)) return 1 + d;
        }
      }
    }
  return 0;
}
API int gg_check_level() {
  Subnormals kept;
  return use == kernels_at(1) ? 0 : differs(kernels_at(1), use);
}

// ---- a Python list of tensors, through the exchange table of DLPack: no libtorch, no Python.h ----
// Called with the GIL held (ctypes.PyDLL). The caller passes the two functions of Python, so nothing is linked.
namespace dlpack {
struct DataType { uint8_t code, bits; uint16_t lanes; };
struct Tensor {
  void* data;
  int32_t device_type, device_id, ndim;
  DataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct Exchange {
  struct { uint32_t major, minor; } version;
  void* previous;
  void *allocate, *managed_from, *managed_to;
  int (*from_py_object)(void* object, Tensor* out);
  void* stream;
};
enum { CPU = 1, CUDA = 2, FLOAT = 2, BFLOAT = 4 };
}  // namespace dlpack

struct Python {
  const dlpack::Exchange* exchange;
  void* (*list_item)(void* list, intptr_t i);  // PyList_GetItem: returns a borrowed reference
  void (*clear_error)();                       // PyErr_Clear
};

static int dtype_of(dlpack::DataType d) {
  if (d.lanes != 1) return -1;
  if (d.code == dlpack::FLOAT) return d.bits == 32 ? F32 : d.bits == 16 ? F16 : d.bits == 64 ? F64 : -1;
  return d.code == dlpack::BFLOAT && d.bits == 16 ? BF16 : -1;
}
// Whether dimensions [from, ndim) fill a block of memory in any order; with `in_order`, in the usual order.
static bool is_block(const dlpack::Tensor& t, int from, int64_t numel, bool in_order) {
  if (numel <= 1 || !t.strides) return true;
  int64_t expected = 1;
  bool usual = true;
  for (int d = t.ndim - 1; usual && d >= from; --d) {
    if (t.shape[d] != 1 && t.strides[d] != expected) usual = false;
    expected *= t.shape[d];
  }
  if (usual || in_order) return usual;
  expected = 1;
  uint64_t used = 0;
  if (t.ndim > 64) return false;
  for (int k = from; k < t.ndim; ++k) {  // find the next outer dimension: its stride is the size of the inner ones
    int found = -1;
    for (int d = from; d < t.ndim && found < 0; ++d)
      if (!(used >> d & 1) && (t.shape[d] == 1 || t.strides[d] == expected)) found = d;
    if (found < 0) return false;
    used |= (uint64_t)1 << found;
    expected *= t.shape[found];
  }
  return true;
}
static bool look(const Python* py, void* list, int64_t i, int gpu, dlpack::Tensor* t, int64_t* numel, uint8_t* dtype) {
  if (py->exchange->from_py_object(py->list_item(list, i), t) != 0) {
    py->clear_error();
    return false;
  }
  int code = dtype_of(t->dtype);
  bool is_there = gpu < 0 ? t->device_type == dlpack::CPU : t->device_type == dlpack::CUDA && t->device_id == gpu;
  if (!is_there || code < 0) return false;
  *numel = 1, *dtype = (uint8_t)code;
  for (int d = 0; d < t->ndim; ++d) *numel *= t->shape[d];
  return t->data || !*numel;
}

// Returns n if every tensor is a block of memory of one of the four dtypes, on the CPU (gpu = -1) or on that GPU; else
// the index of the first that is not.
API int64_t gg_collect(const Python* py, void* list, int64_t n, int gpu, uint64_t* at, int64_t* numel, uint8_t* dtype) {
  for (int64_t i = 0; i < n; ++i) {
    dlpack::Tensor t;
    if (!look(py, list, i, gpu, &t, &numel[i], &dtype[i]) || !is_block(t, 0, numel[i], false)) return i;
    at[i] = (uint64_t)t.data + t.byte_offset;
  }
  return n;
}

// As gg_collect, for tensors with units along dimension `dims[i]` (-1: the whole tensor is one) in `groups[i]` groups.
API int64_t gg_collect_units(const Python* py, void* list, int64_t n, const int32_t* dims, const int32_t* groups,
                             uint64_t* at, Shape* shape, uint8_t* dtype) {
  for (int64_t i = 0; i < n; ++i) {
    dlpack::Tensor t;
    int64_t numel;
    if (!look(py, list, i, -1, &t, &numel, &dtype[i])) return i;
    at[i] = (uint64_t)t.data + t.byte_offset;
    int d = dims[i];
    if (d < 0 || t.ndim == 0) {
      if (!is_block(t, 0, numel, false)) return i;
      shape[i] = {1, 1, 1, numel};
      continue;
    }
    if (d >= t.ndim || groups[i] < 1 || t.shape[0] % groups[i]) return i;
    Shape s = {groups[i], 1, 0, 1};
    if (d == 0) s.units = t.shape[0] / s.groups;
    else s.units = t.shape[d], s.before = t.shape[0] / s.groups;
    for (int k = 1; k < d; ++k) s.before *= t.shape[k];
    for (int k = d + 1; k < t.ndim; ++k) s.after *= t.shape[k];
    bool rows = d == 0 && (t.shape[0] == 1 || t.strides[0] == s.after) && is_block(t, 1, s.after, false);
    if (numel && !rows && !is_block(t, 0, numel, true)) return i;
    shape[i] = s;
  }
  return n;
}
