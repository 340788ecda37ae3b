// Attention of token trees over vLLM's paged CPU cache, and the compaction of accepted tokens.
//
// One request contributes r query rows: row 0 is the root, rows 1..r-1 are tree nodes, parents
// first. Row i attends to the whole context and to the rows named by its 128-bit ancestor mask.
//
// The cache layout is the one that vLLM's ISAs "vec" and "vec16" write, for every dtype: per block
// and KV head first K transposed, [head_size][block_size], then V, [block_size][head_size].
//
// All rows of all query heads that share a KV head form one tile, so K and V are read once. The
// tokens are walked in tiles of kTile with an online softmax. One work item is (request, KV head,
// chunk of tokens); where a head has several chunks, each leaves (max, sum, weighted V) behind and
// whoever finishes last merges them in chunk order: the result does not depend on thread timing.
//
// kernels.py compiles this file and calls it through ctypes; the structs below are mirrored there.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <type_traits>

#include <omp.h>
#if defined(__F16C__)
#include <immintrin.h>
#elif !defined(__ARM_FP16_FORMAT_IEEE)
#error "float16 needs F16C (every x86 with AVX2) or ARM64"
#endif

extern "C" {

// The rows of one step, the same for all layers.
struct TreeRows {
  int64_t num_requests;
  const int32_t* query_start_loc;  // [num_requests + 1]
  const int32_t* seq_lens;         // [num_requests], context + rows
  const int32_t* block_table;      // [num_requests, >= blocks of the request]
  int64_t block_table_stride;
  const int32_t* tree_index;  // [num_requests], -1: leave the request alone
  const uint64_t* ancestors;  // [num_trees, 128, 2], bit j of row i: row i sees row j
  int64_t num_trees;
};

// The shapes of one layer. Strides count elements.
struct LayerShape {
  int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
  int64_t num_heads, num_kv_heads, head_size, block_size;
  int64_t query_stride, output_stride;  // from token to token
  int64_t block_stride, kv_head_stride;
  int64_t num_threads;
};

}  // extern "C"

namespace {

// Rows x 2 vectors of accumulators fill the registers of the machine, less those for operands.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxRows = 12;
#elif defined(__AVX__)
constexpr int kLanes = 8, kMaxRows = 6;
#else
constexpr int kLanes = 4, kMaxRows = 12;
#endif
constexpr int kTile = 128;        // tokens per softmax step
constexpr int kGranule = 16;      // chunks and blocks are multiples of it, and it of kLanes
constexpr int kMaxTreeRows = 128; // bits of an ancestor mask
constexpr int kMaxHeadSize = 512;
// A constant row stride of the query scratch keeps addresses in the inner loop constant. The odd
// number of cache lines spreads rows over the sets of the L1 cache.
constexpr int kQueryStride = kMaxHeadSize + 16;
// Below any real score, and finite, so that differences of two of them are not NaN.
constexpr float kLowest = -1e30f;
// Up to so many rows, 16-bit K and V are converted as they are loaded; for more, once per tile.
constexpr int kDirectRows = 4;
constexpr int64_t kMinChunk = 64;
constexpr int64_t kMaxChunk = 1024;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }

inline Vec load(const BFloat16* p) {
  HalfVec half;
  std::memcpy(&half, p, sizeof half);
  return (Vec)(__builtin_convertvector(half, UintVec) << 16);
}

inline void store(BFloat16* p, Vec x) {
  const UintVec bits = (UintVec)x;
  UintVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  rounded = x == x ? rounded : UintVec{} + 0x7fc0;               // NaN stays NaN
  const HalfVec half = __builtin_convertvector(rounded, HalfVec);
  std::memcpy(p, &half, sizeof half);
}

inline Vec load(const Float16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  Vec x;
  for (int i = 0; i < kLanes; i++) x[i] = ((const __fp16*)p)[i];
  return x;
#endif
}

inline void store(Float16* p, Vec x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; i++) ((__fp16*)p)[i] = x[i];
#endif
}

// 2^x for x <= 0, within 1e-7 relative; 0 below -126. NaN stays NaN.
inline Vec exp2_vec(Vec x) {
  const Vec clamped = x < -126.0f ? splat(-126.0f) : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer, left in the low bits of the mantissa.
  const Vec shifted = clamped + 12582912.0f;
  const Vec f = clamped - (shifted - 12582912.0f);
  // Least largest relative error of degree 6 on [-1/2, 1/2]: 2e-9.
  Vec p = splat(1.534581197e-4f);
  p = p * f + 1.339993138e-3f;
  p = p * f + 9.618488959e-3f;
  p = p * f + 5.550328777e-2f;
  p = p * f + 2.402264689e-1f;
  p = p * f + 6.931472057e-1f;
  p = p * f + 1.0f;
  const Vec result = (Vec)((IntVec)p + ((IntVec)shifted << 23));
  return x < -126.0f ? Vec{} : result;
}

inline float exp2_scalar(float x) { return exp2_vec(splat(x))[0]; }

// Folds N numbers onto half as many, again and again, until one is left. (Folding half vectors
// would take fewer instructions, but makes GCC keep the loop before it in memory.)
template <int N, typename Combine>
inline float fold(const float* numbers, Combine combine) {
  if constexpr (N == 1) {
    return numbers[0];
  } else {
    float folded[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; i++) folded[i] = combine(numbers[i], numbers[i + N / 2]);
    return fold<N / 2>(folded, combine);
  }
}

inline float largest(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  return fold<kLanes>(lanes, [](float a, float b) { return a > b ? a : b; });
}

inline float total(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  return fold<kLanes>(lanes, [](float a, float b) { return a + b; });
}

// c[ROWS, VECS * kLanes] (+)= a[ROWS, depth] * b[depth, VECS * kLanes].
template <int ROWS, int VECS, int A_STRIDE, bool ACCUMULATE, typename B>
inline void multiply_block(const float* a, const B* b, int64_t b_stride, float* c,
                           int64_t c_stride, int64_t depth) {
  Vec sums[ROWS][VECS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++)
      sums[r][v] = ACCUMULATE ? load(c + r * c_stride + v * kLanes) : Vec{};
  for (int64_t k = 0; k < depth; k++) {
    Vec row[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) row[v] = load(b + k * b_stride + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vec factor = splat(a[r * A_STRIDE + k]);
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) sums[r][v] += factor * row[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <int ROWS, int A_STRIDE, bool ACCUMULATE, typename B>
inline void multiply(const float* a, const B* b, int64_t b_stride, float* c, int64_t c_stride,
                     int64_t depth, int64_t columns) {
  // Few rows need more vectors, to keep enough independent sums in flight.
  constexpr int kWide = ROWS * 2 <= kMaxRows ? 4 : 2;
  int64_t j = 0;
  for (; j + kWide * kLanes <= columns; j += kWide * kLanes)
    multiply_block<ROWS, kWide, A_STRIDE, ACCUMULATE>(a, b + j, b_stride, c + j, c_stride, depth);
  for (; j < columns; j += kLanes)
    multiply_block<ROWS, 1, A_STRIDE, ACCUMULATE>(a, b + j, b_stride, c + j, c_stride, depth);
}

// Consecutive tokens of one block, B being the type of the cache or float32.
template <typename B>
struct Piece {
  const B* keys;    // [head_size, >= tokens rounded up to kLanes], row stride key_stride
  const B* values;  // [tokens, head_size]
  int64_t key_stride;
  int64_t offset, tokens;  // within the tile
};

template <typename B>
struct Tile {
  Piece<B> pieces[kTile / kGranule];
  int num_pieces;
  int64_t tokens;
  int64_t tree_start;  // where the context ends, counted from the tile's first token
};

// The softmax in progress of all rows that share a KV head.
struct Rows {
  const float* query;  // [rows, kQueryStride], scaled by scale * log2(e)
  float* sums;         // [rows, head_size], weighted V
  float* max;          // [rows]
  float* weight;       // [rows], sum of the weights
  int64_t head_size;
  int64_t group;             // query heads per KV head; row = node * group + head
  const uint64_t* ancestors;  // [128, 2]
  int64_t num_nodes;          // root included
};

// Bits position .. position + kLanes - 1 of a row's mask over all tokens, position 0 being the
// root, for position > -kLanes. Context tokens (negative positions) are always visible.
inline uint32_t visible(unsigned __int128 mask, int64_t position) {
  if (position >= kMaxTreeRows) return 0;
  if (position >= 0) return uint32_t(mask >> position);
  return uint32_t(mask << -position) | ((1u << -position) - 1);
}

template <int ROWS, typename B>
void attend(const Rows& rows, int64_t first_row, const Tile<B>& tile) {
  alignas(64) float scores[ROWS * kTile];
  const int64_t padded = (tile.tokens + kLanes - 1) / kLanes * kLanes;
  const float* query = rows.query + first_row * kQueryStride;
  for (int i = 0; i < tile.num_pieces; i++) {
    const Piece<B>& piece = tile.pieces[i];
    const int64_t columns = (piece.tokens + kLanes - 1) / kLanes * kLanes;
    multiply<ROWS, kQueryStride, false>(query, piece.keys, piece.key_stride,
                                        scores + piece.offset, kTile, rows.head_size, columns);
  }

  if (tile.tree_start < padded) {
    IntVec lane_bit;
    for (int i = 0; i < kLanes; i++) lane_bit[i] = 1 << i;
    const Vec hidden = splat(-__builtin_inff());
    // Tokens past the end of the sequence are hidden with the nodes that do not exist.
    const unsigned __int128 existing = ~(unsigned __int128)0 >> (kMaxTreeRows - rows.num_nodes);
    for (int r = 0; r < ROWS; r++) {
      const uint64_t* words = rows.ancestors + (first_row + r) / rows.group * 2;
      const unsigned __int128 mask =
          ((unsigned __int128)words[1] << 64 | words[0]) & existing;
      for (int64_t j = std::max<int64_t>(tile.tree_start, 0) / kLanes * kLanes; j < padded;
           j += kLanes) {
        float* p = scores + r * kTile + j;
        const IntVec bits = IntVec{} + int32_t(visible(mask, j - tile.tree_start));
        store(p, (bits & lane_bit) != 0 ? load(p) : hidden);
      }
    }
  }

  for (int r = 0; r < ROWS; r++) {
    float* p = scores + r * kTile;
    Vec maxima = load(p);
    for (int64_t j = kLanes; j < padded; j += kLanes) {
      const Vec x = load(p + j);
      maxima = x > maxima ? x : maxima;
    }
    float& max = rows.max[first_row + r];
    float& weight = rows.weight[first_row + r];
    const float new_max = largest(maxima);
    if (new_max > max) {
      const float correction = exp2_scalar(max - new_max);
      float* sums = rows.sums + (first_row + r) * rows.head_size;
      for (int64_t d = 0; d < rows.head_size; d += kLanes)
        store(sums + d, load(sums + d) * correction);
      weight *= correction;
      max = new_max;
    }
    Vec weights = {};
    for (int64_t j = 0; j < padded; j += kLanes) {
      const Vec x = exp2_vec(load(p + j) - max);
      store(p + j, x);
      weights += x;
    }
    weight += total(weights);
  }

  float* sums = rows.sums + first_row * rows.head_size;
  for (int i = 0; i < tile.num_pieces; i++) {
    const Piece<B>& piece = tile.pieces[i];
    // Exactly the tokens there are: what lies behind them in the block may be NaN.
    multiply<ROWS, kTile, true>(scores + piece.offset, piece.values, rows.head_size, sums,
                                rows.head_size, piece.tokens, rows.head_size);
  }
}

// attend<rows> for a number of rows known at run time.
template <int ROWS = 1, typename B>
void attend_rows(int64_t num_rows, const Rows& rows, int64_t first_row, const Tile<B>& tile) {
  if constexpr (ROWS < (sizeof(B) == 4 ? kMaxRows : kDirectRows)) {
    if (num_rows != ROWS) return attend_rows<ROWS + 1>(num_rows, rows, first_row, tile);
  }
  attend<ROWS>(rows, first_row, tile);
}

// One request and KV head.
struct Job {
  int64_t request, kv_head, num_chunks;
  float* partials;  // of its chunks, one after the other; null if there is one chunk only
  std::atomic<int64_t> chunks_left;
};

// One chunk of a job: tokens first..last-1.
struct Item {
  Job* job;
  int64_t chunk, first, last;
};

// A chunk's partial result is [rows, head_size] sums, [rows] maxima, [rows] weights.
inline int64_t partial_size(int64_t rows, int64_t head_size) {
  return (rows * (head_size + 2) + kLanes - 1) / kLanes * kLanes;
}

// Memory that only grows; one per calling thread, shared out to its workers.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
      if (data_ == nullptr) size_ = 0;
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

template <typename T>
class TreeAttention {
 public:
  TreeAttention(const TreeRows& rows, const LayerShape& shape, const T* query, const T* cache,
                T* output, float scale)
      : rows_(rows), shape_(shape), query_(query), cache_(cache), output_(output), scale_(scale),
        group_(shape.num_heads / shape.num_kv_heads) {}

  int run() {
    static thread_local Scratch scratch;
    int64_t max_rows = 0, total_cost = 0;
    for (int64_t b = 0; b < rows_.num_requests; b++) {
      const int64_t tree = rows_.tree_index[b], nodes = num_nodes(b);
      if (tree < 0 || nodes == 0) continue;
      if (tree >= rows_.num_trees) return 1;
      if (nodes > kMaxTreeRows || nodes > rows_.seq_lens[b]) return 2;
      max_rows = std::max(max_rows, nodes * group_);
      total_cost += cost(b) * shape_.num_kv_heads;
    }
    if (max_rows == 0) return 0;

    int64_t num_jobs = 0, num_items = 0, partial_floats = 0;
    for (int64_t b = 0; b < rows_.num_requests; b++) {
      const int64_t chunks = num_chunks(b, total_cost);
      if (chunks == 0) continue;
      num_jobs += shape_.num_kv_heads;
      num_items += chunks * shape_.num_kv_heads;
      if (chunks > 1)
        partial_floats += chunks * shape_.num_kv_heads *
                          partial_size(num_nodes(b) * group_, shape_.head_size);
    }
    const int64_t thread_floats = worker_floats(max_rows);
    const int64_t num_threads = std::min(shape_.num_threads, num_items);
    char* memory = scratch.get((partial_floats + thread_floats * num_threads) * sizeof(float) +
                               num_items * sizeof(Item) + num_jobs * sizeof(Job));
    if (memory == nullptr) return 3;
    float* partials = reinterpret_cast<float*>(memory);
    float* workers = partials + partial_floats;
    Item* items = reinterpret_cast<Item*>(workers + thread_floats * num_threads);
    Job* jobs = reinterpret_cast<Job*>(items + num_items);
    plan(total_cost, partials, items, jobs);

    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
      float* worker = workers + omp_get_thread_num() * thread_floats;
      for (int64_t i = next++; i < num_items; i = next++) {
        Job& job = *items[i].job;
        compute(items[i], worker, max_rows);
        if (job.partials && --job.chunks_left == 0) merge(job);
      }
    }
    return 0;
  }

 private:
  int64_t num_nodes(int64_t b) const {
    return rows_.query_start_loc[b + 1] - rows_.query_start_loc[b];
  }
  int64_t cost(int64_t b) const { return num_nodes(b) * group_ * rows_.seq_lens[b]; }

  // How many chunks each KV head of a request is cut into; 0 for requests to leave alone.
  int64_t num_chunks(int64_t b, int64_t total_cost) const {
    if (rows_.tree_index[b] < 0 || num_nodes(b) == 0) return 0;
    const int64_t threads = shape_.num_threads;
    if (threads == 1) return 1;
    // Cut what would take one thread more than half of its fair share.
    const int64_t wanted = (2 * threads * cost(b) + total_cost - 1) / total_cost;
    // The heads' chunks together shall come out even over the threads.
    const int64_t even = threads / std::gcd(threads, shape_.num_kv_heads);
    const int64_t tokens = rows_.seq_lens[b];
    int64_t chunks = wanted <= 1 ? 1 : (wanted + even - 1) / even * even;
    if (wanted > 1) {
      const int64_t least = (tokens + kMaxChunk - 1) / kMaxChunk;
      chunks = std::max(chunks, (least + even - 1) / even * even);
    }
    return std::max<int64_t>(1, std::min(chunks, tokens / kMinChunk));
  }

  void plan(int64_t total_cost, float* partials, Item* item, Job* job) const {
    for (int64_t b = 0; b < rows_.num_requests; b++) {
      const int64_t chunks = num_chunks(b, total_cost);
      if (chunks == 0) continue;
      const int64_t tokens = rows_.seq_lens[b];
      const int64_t granules = (tokens + kGranule - 1) / kGranule;
      for (int64_t head = 0; head < shape_.num_kv_heads; head++, job++) {
        new (job) Job{b, head, chunks, chunks > 1 ? partials : nullptr, {chunks}};
        if (chunks > 1) partials += chunks * partial_size(num_nodes(b) * group_, shape_.head_size);
        for (int64_t c = 0; c < chunks; c++)
          *item++ = {job, c, granules * c / chunks * kGranule,
                     std::min(granules * (c + 1) / chunks * kGranule, tokens)};
      }
    }
  }

  // One worker's scratch: query, sums, maxima, weights; for 16-bit dtypes also a tile of K and V.
  int64_t worker_floats(int64_t max_rows) const {
    const int64_t converted = sizeof(T) == 4 ? 0 : 2 * kTile * shape_.head_size;
    return max_rows * kQueryStride + partial_size(max_rows, shape_.head_size) + converted;
  }

  void compute(const Item& item, float* scratch, int64_t max_rows) const {
    const Job& job = *item.job;
    const int64_t head_size = shape_.head_size;
    const int64_t nodes = num_nodes(job.request), num_rows = nodes * group_;
    float* query = scratch;
    float* sums = job.partials ? job.partials + item.chunk * partial_size(num_rows, head_size)
                               : query + max_rows * kQueryStride;
    float* converted = query + max_rows * kQueryStride + partial_size(max_rows, head_size);
    Rows rows;
    rows.query = query;
    rows.sums = sums;
    rows.max = sums + num_rows * head_size;
    rows.weight = rows.max + num_rows;
    rows.head_size = head_size;
    rows.group = group_;
    rows.ancestors = rows_.ancestors + rows_.tree_index[job.request] * (kMaxTreeRows * 2);
    rows.num_nodes = nodes;

    const float log2_e = 1.44269504088896f;
    const int64_t first_query = rows_.query_start_loc[job.request];
    for (int64_t i = 0; i < num_rows; i++) {
      const T* source = query_ + (first_query + i / group_) * shape_.query_stride +
                        (job.kv_head * group_ + i % group_) * head_size;
      for (int64_t d = 0; d < head_size; d += kLanes)
        store(query + i * kQueryStride + d, load(source + d) * (scale_ * log2_e));
    }
    std::fill(sums, sums + num_rows * head_size, 0.0f);
    std::fill(rows.max, rows.max + num_rows, kLowest);
    std::fill(rows.weight, rows.weight + num_rows, 0.0f);

    if (num_rows <= kDirectRows)
      attend_tiles<T>(item, rows, num_rows, converted);
    else
      attend_tiles<float>(item, rows, num_rows, converted);
    if (job.partials) return;
    for (int64_t i = 0; i < num_rows; i++) {
      T* target = output_row(job.request, job.kv_head, i);
      const float factor = 1.0f / rows.weight[i];
      for (int64_t d = 0; d < head_size; d += kLanes)
        store(target + d, load(sums + i * head_size + d) * factor);
    }
  }

  T* output_row(int64_t request, int64_t kv_head, int64_t row) const {
    return output_ + (rows_.query_start_loc[request] + row / group_) * shape_.output_stride +
           (kv_head * group_ + row % group_) * shape_.head_size;
  }

  template <typename B>
  void attend_tiles(const Item& item, const Rows& rows, int64_t num_rows, float* converted) const {
    const int64_t groups = (num_rows + kMaxRows - 1) / kMaxRows;
    for (int64_t first = item.first; first < item.last; first += kTile) {
      Tile<B> tile;
      make_tile(*item.job, first, item.last, converted, tile);
      for (int64_t g = 0; g < groups; g++) {
        const int64_t row = num_rows * g / groups;
        attend_rows(num_rows * (g + 1) / groups - row, rows, row, tile);
      }
    }
  }

  // The tokens from `first` to `last`, at most kTile: pointers into the cache, or a float32 copy of
  // just this tile.
  template <typename B>
  void make_tile(const Job& job, int64_t first, int64_t last, float* converted,
                 Tile<B>& tile) const {
    const int64_t block_size = shape_.block_size, head_size = shape_.head_size;
    const int32_t* blocks = rows_.block_table + job.request * rows_.block_table_stride;
    float* converted_values = converted + kTile * head_size;
    tile.tokens = std::min<int64_t>(kTile, last - first);
    tile.tree_start = rows_.seq_lens[job.request] - num_nodes(job.request) - first;
    tile.num_pieces = 0;
    for (int64_t offset = 0; offset < tile.tokens;) {
      const int64_t token = first + offset, place = token % block_size;
      const int64_t tokens = std::min(block_size - place, tile.tokens - offset);
      const T* block = cache_ + blocks[token / block_size] * shape_.block_stride +
                       job.kv_head * shape_.kv_head_stride;
      const T* keys = block + place;
      const T* values = block + (block_size + place) * head_size;
      if constexpr (std::is_same_v<B, T>) {
        tile.pieces[tile.num_pieces++] = {keys, values, block_size, offset, tokens};
      } else {
        for (int64_t d = 0; d < head_size; d++)
          for (int64_t j = 0; j < tokens; j += kLanes)
            store(converted + d * kTile + offset + j, load(keys + d * block_size + j));
        for (int64_t j = 0; j < tokens * head_size; j += kLanes)
          store(converted_values + offset * head_size + j, load(values + j));
      }
      offset += tokens;
    }
    if constexpr (!std::is_same_v<B, T>) {
      tile.pieces[0] = {converted, converted_values, kTile, 0, tile.tokens};
      tile.num_pieces = 1;
    }
  }

  void merge(const Job& job) const {
    const int64_t head_size = shape_.head_size, num_rows = num_nodes(job.request) * group_;
    const int64_t size = partial_size(num_rows, head_size);
    for (int64_t i = 0; i < num_rows; i++) {
      const float* sums = job.partials + i * head_size;      // of the first chunk
      float* max = job.partials + num_rows * head_size + i;  // likewise
      float overall = kLowest, weight = 0.0f;
      for (int64_t c = 0; c < job.num_chunks; c++) overall = std::max(overall, max[c * size]);
      for (int64_t c = 0; c < job.num_chunks; c++) {
        max[c * size] = exp2_scalar(max[c * size] - overall);  // from here on the chunk's factor
        weight += max[c * size] * max[c * size + num_rows];
      }
      T* target = output_row(job.request, job.kv_head, i);
      for (int64_t d = 0; d < head_size; d += kLanes) {
        Vec sum = {};
        for (int64_t c = 0; c < job.num_chunks; c++)
          sum += load(sums + c * size + d) * max[c * size];
        store(target + d, sum / weight);
      }
    }
  }

  const TreeRows& rows_;
  const LayerShape& shape_;
  const T* query_;
  const T* cache_;
  T* output_;
  const float scale_;
  const int64_t group_;
};

template <typename T>
int run_tree_attention(const TreeRows* rows, const LayerShape* shape, const void* query,
                       const void* cache, void* output, float scale) {
  return TreeAttention<T>(*rows, *shape, static_cast<const T*>(query),
                          static_cast<const T*>(cache), static_cast<T*>(output), scale)
      .run();
}

template <typename T>
void move_slots_in_layer(T* cache, const LayerShape& shape, int64_t num_moves,
                         const int64_t* sources, const int64_t* targets) {
  const int64_t block_size = shape.block_size, head_size = shape.head_size;
  for (int64_t head = 0; head < shape.num_kv_heads; head++) {
    T* base = cache + head * shape.kv_head_stride;
    for (int64_t m = 0; m < num_moves; m++) {
      if (sources[m] == targets[m]) continue;
      const int64_t source_place = sources[m] % block_size;
      const int64_t target_place = targets[m] % block_size;
      const T* source = base + sources[m] / block_size * shape.block_stride;
      T* target = base + targets[m] / block_size * shape.block_stride;
      for (int64_t d = 0; d < head_size; d++)
        target[d * block_size + target_place] = source[d * block_size + source_place];
      std::memcpy(target + (block_size + target_place) * head_size,
                  source + (block_size + source_place) * head_size, head_size * sizeof(T));
    }
  }
}

}  // namespace

extern "C" {

// output[t, head] = attention of query[t, head], for the tokens of all requests with a tree.
// Returns 0, or 1: tree_index out of range, 2: a request with too many rows, 3: out of memory.
int medusa_tree_attention(const TreeRows* rows, const LayerShape* shape, const void* query,
                          const void* cache, void* output, float scale) {
  switch (shape->dtype) {
    case 0: return run_tree_attention<float>(rows, shape, query, cache, output, scale);
    case 1: return run_tree_attention<BFloat16>(rows, shape, query, cache, output, scale);
    default: return run_tree_attention<Float16>(rows, shape, query, cache, output, scale);
  }
}

// Copies K and V from slot sources[m] to slot targets[m], in order, in every layer.
void medusa_move_slots(void* const* caches, int64_t num_layers, const LayerShape* shape,
                       int64_t num_moves, const int64_t* sources, const int64_t* targets) {
#pragma omp parallel for schedule(static) num_threads(shape->num_threads) \
    if (shape->num_threads > 1 && num_layers > 1)
  for (int64_t layer = 0; layer < num_layers; layer++) {
    if (shape->dtype == 0)
      move_slots_in_layer(static_cast<uint32_t*>(caches[layer]), *shape, num_moves, sources,
                          targets);
    else
      move_slots_in_layer(static_cast<uint16_t*>(caches[layer]), *shape, num_moves, sources,
                          targets);
  }
}

}  // extern "C"
