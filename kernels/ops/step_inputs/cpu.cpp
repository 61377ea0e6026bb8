// A decode step's inputs. Only the block table entries of a row's tokens are copied.

#include <algorithm>

#include "cpu/call.h"

// slots, positions, out_ids, out_seq_lens [rows]; token_ids [slots, ids_stride]; out_write_slots [groups, rows];
// out_tables [groups, rows, width].
static void step_inputs(const int64_t* slots, const int64_t* positions, const int64_t* token_ids,
                        const int32_t* block_tables, int64_t* out_ids, int64_t* out_write_slots, int32_t* out_seq_lens,
                        int32_t* out_tables, int64_t num_rows, int64_t num_groups, int64_t width, int64_t ids_stride,
                        int64_t group_stride, int64_t slot_stride, int64_t block_size, int64_t padding_block) {
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t slot = slots[row], position = positions[row], last = position / block_size;
        out_ids[row] = slot < 0 ? 0 : token_ids[slot * ids_stride + position];
        out_seq_lens[row] = int32_t(position + 1);
        for (int64_t group = 0; group < num_groups; group++) {
            int32_t* goal = out_tables + (group * num_rows + row) * width;
            if (slot < 0)
                std::fill_n(goal, last + 1, int32_t(padding_block));
            else
                std::copy_n(block_tables + group * group_stride + slot * slot_stride, last + 1, goal);
            out_write_slots[group * num_rows + row] = goal[last] * block_size + position % block_size;
        }
    }
}
INFERD_EXPORT(step_inputs)
