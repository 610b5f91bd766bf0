// What the filters tell about a row, and prefill_settle.cu tells in turn.
#pragma once

#include "query_row.cuh"

constexpr u32 NOT_COLLECTED = 0xffffffffu;  // in place of a list's length

// The host reads the same: prefill_layout.py.
struct RowRecord {
    u32 length;       // of the row's list, or NOT_COLLECTED
    u32 has_totals;   // its entries are positions and totals, else positions and bounds
    u32 has_bias;     // some entry of a list of totals has a bias that is not 0
    u32 num_scored;   // entries that were scored exactly
    u32 is_exact;     // all of the row's keys were
    Radius radius;    // of a list of totals
};
