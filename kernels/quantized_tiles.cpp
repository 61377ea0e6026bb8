// Products of 4-bit and 8-bit weights (quantized.py) with bfloat16, by AMX: each weight is dequantized, rounded to
// bfloat16 and multiplied as a weight in bfloat16 is (tile_product.h).
//
// Numbers lie in tiles of 16 columns, each in units of 32 inputs, a step of tile_product.h. Scales, zero points and
// minimums lie as [tile][group][16].
//
// - Bytes have 128 added. 64 bytes of a unit are 8 columns: two neighbouring words of 32 bits are a column's, the first
//   with four even inputs, the second with four odd ones. So the numbers at one place of all words, in two such lines,
//   make a row of a tile of bfloat16.
// - Nibbles have 16 bytes a column in a unit: 8 words of 16 bits, of which word i has the inputs i, i + 8, i + 16, i + 24.
//   Up to 16 rows take another way (`Few`): the 16 weights that a group can have are a table, each column's numbers choose
//   from it, and the result is the left side of the product. So the bits are the same.
#include "call.h"
#include "int_lanes.h"
#include "tile_product.h"

#if HAS_TILES
namespace {

using namespace int_product;

constexpr int64_t AHEAD = 4096;  // bytes to prefetch, because the processor's own prefetching stops at each page

struct Weights {
    static constexpr bool IS_MADE = true;
    Form form;
    const uint8_t* numbers;
    const void* scales;
    const void* zeros;     // or null
    const void* minimums;  // or null
    ScaleType type;        // of scales and minimums
    const float* table;    // 16 values, or null
    int64_t steps, num_groups;
    int group_bits;  // a group has 2^group_bits inputs

    int64_t group_of(int64_t step, int half) const { return (step * amx::STEP + half * 16) >> group_bits; }

    // Weights of `vectors` tiles of columns, as [step][tile of columns].
    void make(int64_t panel, int vectors, int64_t first_step, int64_t end_step, char* place) const;
};

// The same number of 8 columns in pairs of lanes.
inline vf in_pairs(vf of_columns, int half) {
    const vi pairs = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    return __builtin_shuffle(of_columns, pairs + 8 * half);
}

// What is added to the weights of a group of 16 columns, besides scale times number.
template <Form F>
inline vf offsets_of(const Weights& w, int64_t index, vf scales) {
    if (w.zeros) return -(to_floats(load_zeros<F>(w.zeros, index) << 16 >> 16) * scales);
    if (w.minimums) return load_values(w.minimums, w.type, index);
    return scales * simd::splat(F == BYTES ? -128.0f : -8.0f);
}

// The scales and offsets of a group. Each number stands in a word above others, at `PLACES` places, so it is read as its
// product with a power of 256 or of 16. Scales divide by that, which is exact above 2^-102.
template <Form F, bool HAS_MINIMUMS>
struct Group {
    static constexpr int BITS = F == BYTES ? 8 : 4, PLACES = 4;
    vf scales[PLACES][2], offsets[2], table;

    Group(const Weights& w, int64_t index) {
        const vf own = load_values(w.scales, w.type, index);
        const vf offset = offsets_of<F>(w, index, own);
        table = F == TABLE ? simd::load(w.table) : vf{};
        for (int half = 0; half < 2; half++) {
            vf scale = in_pairs(own, half);
            for (int place = 0; place < PLACES; place++, scale = scale * simd::splat(1.0f / (1 << BITS)))
                scales[place][half] = scale;
            offsets[half] = in_pairs(offset, half);
        }
    }

    // The weights of the numbers at `place` of all words.
    vf weights(vi words, int place, int half) const {
        // A shuffle reads the lowest four bits of a lane.
        if (F == TABLE) return __builtin_shuffle(table, words >> (place * BITS)) * scales[0][half];
        if (place >= PLACES) words = (vi)((vu)words >> (PLACES * BITS)), place -= PLACES;
        const vi alone = words & simd::splat_i(int32_t(((1u << BITS) - 1) << (place * BITS)));
        vf number = __builtin_convertvector((vu)alone, vf);
        if (F == BYTES && HAS_MINIMUMS) number -= simd::splat(128.0f * float(1u << (place * BITS)));
        return simd::fma(number, scales[place][half], offsets[half]);
    }
};

// Four lines of four columns as two vectors of 8 columns (a half) each: of the words 0 to 3, and of 4 to 7. A column's
// pair of lanes has the even words, then the odd ones.
inline void by_columns(const uint8_t* read, vi (&to)[2][2]) {
    typedef int64_t longs __attribute__((vector_size(64)));
    const __m512i order = _mm512_maskz_broadcast_i32x4(
        0xffff, _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for (int half = 0; half < 2; half++, read += 128) {
        const longs first = (longs)_mm512_shuffle_epi8((__m512i)simd::load_i(read), order);
        const longs second = (longs)_mm512_shuffle_epi8((__m512i)simd::load_i(read + 64), order);
        to[0][half] = (vi)__builtin_shuffle(first, second, longs{0, 2, 4, 6, 8, 10, 12, 14});
        to[1][half] = (vi)__builtin_shuffle(first, second, longs{1, 3, 5, 7, 9, 11, 13, 15});
    }
}

template <Form F, bool HAS_MINIMUMS>
void make_tiles(const Weights& w, int64_t tile, int64_t first, int64_t end, char* place, int64_t step_bytes) {
    constexpr int64_t UNIT_BYTES = F == BYTES ? 512 : 256;
    const uint8_t* read = w.numbers + (tile * w.steps + first) * UNIT_BYTES;
    int64_t current = w.group_of(first, 0);
    Group<F, HAS_MINIMUMS> group(w, (tile * w.num_groups + current) * LANES);
    for (int64_t step = first; step < end; step++, place += step_bytes, read += UNIT_BYTES) {
        vi words[2][2];
        if (F != BYTES) by_columns(read, words);
        for (int i = 0; i < UNIT_BYTES; i += 64) __builtin_prefetch(read + AHEAD + i);
        for (int half = 0; half < 2; half++) {  // of the inputs
            const int64_t own = w.group_of(step, half);
            if (own != current) group = {w, (tile * w.num_groups + own) * LANES}, current = own;
            const auto put = [&](int row, vi low, vi high, int at) {
                simd::store_i(place + row * tiles::ROW_BYTES,
                              simd::narrow(group.weights(low, at, 0), group.weights(high, at, 1)));
            };
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                if (F == BYTES) {
                    const uint8_t* line = read + half * 256 + i / 4 * 128;
                    put(half * 8 + i, simd::load_i(line), simd::load_i(line + 64), i % 4);
                } else {
                    const int nibble = half * 2 + i / 4;  // of a word; i % 4: of which words
                    put(nibble * 4 + i % 4, words[i % 4 / 2][0], words[i % 4 / 2][1], nibble + i % 2 * 4);
                }
            }
        }
    }
}

void Weights::make(int64_t panel, int vectors, int64_t first_step, int64_t end_step, char* place) const {
    const auto tiles = form == BYTES ? minimums ? make_tiles<BYTES, true> : make_tiles<BYTES, false>
                       : form == TABLE ? make_tiles<TABLE, false>
                       : minimums      ? make_tiles<NIBBLES, true>
                                       : make_tiles<NIBBLES, false>;
    for (int v = 0; v < vectors; v++)
        tiles(*this, panel * amx::VECTORS + v, first_step, end_step, place + v * amx::TILE_BYTES,
              vectors * amx::TILE_BYTES);
}

template <class T>
void put(const float* sums, const float* bias, int64_t column, int64_t n, T* out) {
    for (int64_t end = std::min(n, column + amx::COLUMNS); column < end; column += LANES, sums += LANES) {
        const int count = int(std::min<int64_t>(LANES, n - column));
        vf total = simd::load(sums);
        if (bias) total += simd::load_part(bias + column, count);
        store_first(out + column, total, count);
    }
}

// -- up to 16 rows of nibbles --------------------------------------------------------------------------------------

// GCC 12 would load one lane and copy it by a second instruction.
inline vf all_of(const float* p) {
    vf v;
    asm("vbroadcastss %1, %0" : "=v"(v) : "m"(*p));
    return v;
}

// The weights that the numbers 0 to 15 stand for, in a group of 16 columns. A vector has two columns.
template <Form F>
struct Tables {
    vi of[LANES / 2] = {};
    int64_t group = -1;

    void set(const Weights& w, int64_t tile, int64_t own) {
        if (group == own) return;
        group = own;
        const int64_t index = (tile * w.num_groups + group) * LANES;
        alignas(64) float scales[LANES], offsets[LANES];
        const vf scale = load_values(w.scales, w.type, index);
        simd::store(scales, scale);
        if (F != TABLE) simd::store(offsets, offsets_of<F>(w, index, scale));
        const vf numbers = F == TABLE ? simd::load(w.table) : vf{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const auto weights = [&](int c) {
            return F == TABLE ? numbers * all_of(scales + c) : simd::fma(numbers, all_of(scales + c), all_of(offsets + c));
        };
#pragma GCC unroll 8
        for (int c = 0; c < LANES; c += 2) of[c / 2] = simd::narrow(weights(c), weights(c + 1));
    }
};

typedef uint16_t halves __attribute__((vector_size(64)));

// The weights of 16 columns in a step. Groups of 16 inputs (HAS_TWO) have a table each.
template <Form F, bool HAS_TWO>
inline void make_rows(const Weights& w, int64_t tile, int64_t step, Tables<F> (&tables)[2], char* place) {
    constexpr halves SHIFTS = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4,
                               8, 8, 8, 8, 8, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12};
    constexpr halves SECOND = {0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,
                               32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32};
    tables[0].set(w, tile, w.group_of(step, 0));
    if (HAS_TWO) tables[1].set(w, tile, w.group_of(step, 1));
    const uint8_t* read = w.numbers + (tile * w.steps + step) * 256;
    for (int i = 0; i < 256; i += 64) __builtin_prefetch(read + AHEAD + i);
#pragma GCC unroll 16
    for (int c = 0; c < LANES; c++) {
        const __m512i words = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128((const __m128i*)(read + c * 16)));
        const halves at = ((halves)words >> SHIFTS & 15) | uint16_t(c % 2 * 16);
        const __m512i first = (__m512i)tables[0].of[c / 2], second = (__m512i)tables[1].of[c / 2];
        // GCC 12 would take the slow shuffle of two vectors for that of one.
        const __m512i chosen = HAS_TWO ? _mm512_permutex2var_epi16(first, (__m512i)(at | SECOND), second)
                                       : _mm512_maskz_permutexvar_epi16(~0u, (__m512i)at, first);
        simd::store_i(place + c * tiles::ROW_BYTES, (vi)chosen);
    }
}

// The product of up to 16 rows. Its left side is weights of 16 columns by 32 inputs, its right side 16 pairs of inputs
// by rows. So it has the sums of a column behind each other.
template <Form F, bool HAS_TWO, class Put>
class Few {
  public:
    Few(const amx::Problem& p, const Weights& w, const Put& put) : p_(p), w_(w), put_(put) {}

    void run(int num_threads) {
        pack_rows(num_threads);
        const int64_t panels = p_.panels(), turn = std::max<int64_t>(1, panels / (4 * num_threads));
        parallel_for_dynamic((panels + turn - 1) / turn, num_threads, [&](int64_t i) {
            tiles::Tiles registers;
            registers.set(shape());
            for (int64_t panel = i * turn; panel < std::min(panels, (i + 1) * turn); panel++)
                p_.n - panel * amx::COLUMNS > LANES ? run_panel<2>(panel) : run_panel<1>(panel);
        });
    }

  private:
    static constexpr int64_t LAG = 3, PLACES = 4;  // steps between making weights and multiplying by them: stores take their time
    const amx::Problem& p_;
    const Weights& w_;
    const Put& put_;
    const uint32_t* rows_;  // [step][16 pairs of inputs][row]

    tiles::Shape shape() const {
        tiles::Shape shape;
        for (const int tile : {0, 1, 6}) shape.set(tile, 16), shape.row_bytes[tile] = uint16_t(4 * p_.rows);
        for (const int tile : {4, 5}) shape.set(tile, 16);
        return shape;
    }

    void pack_rows(int num_threads) {
        static thread_local simd::Buffer<uint32_t> packed;
        packed.resize(std::max<size_t>(packed.size(), w_.steps * 16 * p_.rows));
        uint32_t* to = packed.data();
        rows_ = to;
        parallel_for(w_.steps, p_.rows < 4 ? 1 : num_threads, [&](int64_t step) {
            for (int64_t row = 0; row < p_.rows; row++) {
                alignas(64) uint32_t pairs[16];
                amx::pack_step(p_, row, step, reinterpret_cast<char*>(pairs));
                for (int pair = 0; pair < 16; pair++) to[(step * 16 + pair) * p_.rows + row] = pairs[pair];
            }
        });
    }

    template <int V>
    void run_panel(int64_t panel) {
        alignas(64) char made[PLACES][V][amx::TILE_BYTES];
        alignas(64) float sums[V][LANES * LANES];  // [column][row]
        Tables<F> tables[V][2];
        _tile_zero(0);
        if (V == 2) _tile_zero(1);
        for (int64_t step = 0; step < w_.steps + LAG; step++) {
            if (step < w_.steps)
                for (int v = 0; v < V; v++)
                    make_rows<F, HAS_TWO>(w_, panel * amx::VECTORS + v, step, tables[v], made[step % PLACES][v]);
            if (step < LAG) continue;
            const auto& ready = made[(step - LAG) % PLACES];
            tiles::wait_for_stores();
            _tile_loadd(6, rows_ + (step - LAG) * 16 * p_.rows, 4 * p_.rows);
            _tile_loadd(4, ready[0], tiles::ROW_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            if (V == 2) {
                _tile_loadd(5, ready[V - 1], tiles::ROW_BYTES);
                _tile_dpbf16ps(1, 5, 6);
            }
        }
        _tile_stored(0, sums[0], 4 * p_.rows);
        if (V == 2) _tile_stored(1, sums[V - 1], 4 * p_.rows);
        tiles::wait_for_stores();
        for (int64_t row = 0; row < p_.rows; row++) {
            alignas(64) float of_row[amx::COLUMNS];
            for (int c = 0; c < V * LANES; c++) of_row[c] = sums[c / LANES][c % LANES * p_.rows + row];
            put_(row, panel * amx::COLUMNS, of_row);
        }
    }
};

template <class Put>
void run(const amx::Problem& p, const Weights& w, int num_threads, const Put& put) {
    const bool has_two = w.group_bits == 4;
    if (w.form == BYTES || p.rows > LANES)
        amx::run(p, w, num_threads, put);
    else if (w.form == TABLE)
        has_two ? Few<TABLE, true, Put>(p, w, put).run(num_threads) : Few<TABLE, false, Put>(p, w, put).run(num_threads);
    else if (has_two)
        Few<NIBBLES, true, Put>(p, w, put).run(num_threads);
    else
        Few<NIBBLES, false, Put>(p, w, put).run(num_threads);
}

// -- packing ---------------------------------------------------------------------------------------------------------

// Calls pack(32 numbers, unit, column of its tile), with zeros behind the ends.
template <class Pack>
void pack_units(const uint8_t* q, int64_t out_size, int64_t in_size, int num_threads, const Pack& pack) {
    const int64_t steps = amx::steps_of(in_size);
    parallel_for((out_size + LANES - 1) / LANES, num_threads, [&](int64_t tile) {
        for (int64_t step = 0; step < steps; step++)
            for (int64_t c = 0; c < LANES; c++) {
                const int64_t column = tile * LANES + c, first = step * amx::STEP;
                const int64_t left = column < out_size ? std::min(amx::STEP, in_size - first) : 0;
                uint8_t numbers[amx::STEP] = {};
                std::memcpy(numbers, q + column * in_size + first, left);
                pack(numbers, tile * steps + step, c);
            }
    });
}

inline uint64_t eight(const uint8_t* numbers) {
    uint64_t bits;
    std::memcpy(&bits, numbers, sizeof bits);
    return bits;
}

}  // namespace

// q [out_size, in_size] of int8, or of uint8 in 0..15 -> numbers, of columns up to a multiple of 16 and inputs up to a
// multiple of 32.
static void quantized_tiles_pack(const uint8_t* q, int64_t is_short, int64_t out_size, int64_t in_size,
                                 uint8_t* numbers, int64_t num_threads) {
    if (is_short)
        return pack_units(q, out_size, in_size, int(num_threads), [&](const uint8_t* own, int64_t unit, int64_t c) {
            __m128i words = _mm_setzero_si128();
            for (int i = 3; i >= 0; i--)
                words = _mm_or_si128(_mm_slli_epi16(words, 4), _mm_cvtepu8_epi16(_mm_cvtsi64_si128(eight(own + 8 * i))));
            std::memcpy(numbers + (unit * LANES + c) * 16, &words, sizeof words);
        });
    pack_units(q, out_size, in_size, int(num_threads), [&](const uint8_t* own, int64_t unit, int64_t c) {
        for (int i = 0; i < 4; i++) {
            const uint64_t bits = eight(own + 8 * i) ^ 0x8080808080808080, even = 0x00ff00ff00ff00ff;
            const uint64_t words = _pext_u64(bits, even) | _pext_u64(bits, ~even) << 32;
            std::memcpy(numbers + unit * 512 + i * 128 + c * 8, &words, sizeof words);
        }
    });
}
INFERD_EXPORT(quantized_tiles_pack)

// out [num_rows, out_size] = x [num_rows, in_size] W^T + bias. x is bfloat16, out that or fp32. A group has
// 2^group_bits inputs. Scales and minimums are of `scale_type`, zero points bytes or, of 8-bit weights, 16 bits.
// A table has 16 values. What a layout does not have is null.
static void quantized_tiles(const simd::bf16* x, int64_t num_rows, int64_t in_size, int64_t out_size,
                            const uint8_t* numbers, int64_t is_short, const void* scales, int64_t scale_type,
                            const void* zeros, const void* minimums, const float* table, const float* bias,
                            const int32_t* order, int64_t num_groups, int64_t group_bits, void* out, int64_t is_bf16,
                            int64_t num_threads) {
    const Form form = !is_short ? BYTES : table ? TABLE : NIBBLES;
    const Weights weights{form, numbers, scales, zeros, minimums, ScaleType(scale_type), table,
                          amx::steps_of(in_size), num_groups, int(group_bits)};
    const amx::Problem problem{x, num_rows, in_size, in_size, out_size, order};
    if (num_rows == 0) return;
    run(problem, weights, int(num_threads), [&](int64_t row, int64_t column, const float* sums) {
        if (is_bf16)
            put(sums, bias, column, out_size, static_cast<simd::bf16*>(out) + row * out_size);
        else
            put(sums, bias, column, out_size, static_cast<float*>(out) + row * out_size);
    });
}
INFERD_EXPORT(quantized_tiles)
#endif
