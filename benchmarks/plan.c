/* The direct plan of castoff.policy.direct as a plain C loop, for benchmarks/plan.py to compare with. */
#include <stdint.h>
#include <string.h>

enum { FIFO, LRU, CLOCK };
enum { HITS, UNIQUE_HITS, UNIQUE_MISSES, REPEATED_MISSES, WINDOW_READS, PROMOTED, OVERFLOWS, COUNTS };

static int find(const int32_t *tags, int ways, int32_t token) {
    int found = -1;
    for (int way = 0; way < ways; way++)
        if (tags[way] == token) found = way;
    return found;
}

static int victim(int policy, const int32_t *used, int ways, int32_t *hand, int32_t *marks, int32_t now) {
    if (policy == LRU) {
        int32_t oldest = INT32_MAX;
        for (int way = 0; way < ways; way++)
            if (used[way] != now && used[way] < oldest) oldest = used[way];
        for (int way = 0; way < ways; way++)
            if (used[way] == oldest) return way;
        return -1;
    }
    uint32_t bits = (uint32_t)*marks;
    int way = *hand, looks = policy == CLOCK ? 2 * ways : ways;
    for (int look = 0; look < looks; look++) {
        int next = way + 1 < ways ? way + 1 : 0;
        if (used[way] != now) {
            if (policy == FIFO || !(bits >> way & 1)) {
                *hand = next;
                *marks = (int32_t)bits;
                return way;
            }
            bits &= ~(1u << way);
        }
        way = next;
    }
    return -1;
}

/* Slot of the table of overflowed ids that has the token, or the free one where it belongs. */
static uint32_t slot_of(const int32_t *keys, uint32_t last, int32_t token) {
    uint32_t slot = (uint32_t)((uint64_t)token * 2654435769u >> 15) & last;
    while (keys[slot] >= 0 && keys[slot] != token) slot = (slot + 1) & last;
    return slot;
}

/* `keys` and `values` have table_size entries, a power of two; all keys are -1 before and after. */
void plan_direct(
    int policy, int requests, int queries, int columns, int slots, int sets, int ways, int ring_tokens, int staging_rows,
    const int32_t *topk, const int64_t *slot_mapping, const int64_t *seq_lens, const int64_t *committed,
    const int64_t *request_slots, const int64_t *ring_first, int32_t *all_tags, int32_t *all_used, int32_t *all_hands,
    int32_t *all_marks, int32_t *keys, int32_t *values, int table_size, int32_t *all_rows, int32_t *all_fetch_ids,
    int32_t *all_fetch_rows, int32_t *counts, int32_t *all_stats) {
    int width = queries * columns, pool = sets * ways;
    for (int b = 0; b < requests; b++) {
        const int32_t *ids = topk + (int64_t)b * width;
        int32_t *rows = all_rows + (int64_t)b * width, *stats = all_stats + b * COUNTS;
        int32_t *fetch_ids = all_fetch_ids + (int64_t)b * width, *fetch_rows = all_fetch_rows + (int64_t)b * width;
        int64_t r = request_slots[b];
        int misses = 0, count = 0;
        memset(stats, 0, COUNTS * sizeof *stats);
        if (r < 0) {
            memset(rows, -1, width * sizeof *rows);
        } else {
            int32_t *tags = all_tags + r * pool, *used = all_used + r * pool;
            int32_t *hands = all_hands + r * sets, *marks = all_marks + r * sets;
            int32_t now = (int32_t)committed[b];
            int32_t pool_row = r * pool, ring_row = slots * pool + r * ring_tokens;
            int32_t staging_row = slots * (pool + ring_tokens) + r * staging_rows;
            for (int s = 0; s < queries; s++) {
                int64_t last = slot_mapping[b * queries + s] >= 0 ? seq_lens[b] - queries + s : -1;
                for (int position = s * columns; position < (s + 1) * columns; position++) {
                    int32_t token = ids[position];
                    if (token < 0 || token > last) {
                        rows[position] = -1;
                        continue;
                    }
                    if (token >= now) {
                        rows[position] = ring_row + token % ring_tokens;
                        stats[WINDOW_READS]++;
                        continue;
                    }
                    int first = token % sets * ways, way = find(tags + first, ways, token);
                    rows[position] = pool_row + first + way;
                    fetch_rows[stats[HITS]] = first + way;
                    stats[HITS] += way >= 0;
                    fetch_ids[misses] = position;
                    misses += way < 0;
                }
            }
            for (int hit = 0; hit < stats[HITS]; hit++) {
                stats[UNIQUE_HITS] += used[fetch_rows[hit]] != now;
                used[fetch_rows[hit]] = now;
            }
            for (int set = 0; policy == CLOCK && set < sets; set++) {
                uint32_t bits = 0;
                for (int way = 0; way < ways; way++) bits |= (uint32_t)(used[set * ways + way] == now) << way;
                marks[set] |= (int32_t)bits;
            }
            for (int miss = 0; miss < misses; miss++) {
                int position = fetch_ids[miss];
                int32_t token = ids[position];
                int set = token % sets, first = set * ways, way = find(tags + first, ways, token), row;
                if (way >= 0) {
                    rows[position] = pool_row + first + way;
                    continue;
                }
                way = victim(policy, used + first, ways, hands + set, marks + set, now);
                if (way >= 0) {
                    tags[first + way] = token;
                    used[first + way] = now;
                    row = pool_row + first + way;
                } else {
                    uint32_t slot = slot_of(keys, table_size - 1, token);
                    if (keys[slot] >= 0) {
                        rows[position] = values[slot];
                        continue;
                    }
                    keys[slot] = token;
                    values[slot] = row = staging_row + position;
                    stats[OVERFLOWS]++;
                }
                rows[position] = row;
                stats[token >= ring_first[b] ? PROMOTED : UNIQUE_MISSES]++;
                fetch_ids[count] = token >= ring_first[b] ? -2 - token : token;
                fetch_rows[count++] = row;
            }
            stats[REPEATED_MISSES] = misses - count;
            if (stats[OVERFLOWS]) memset(keys, -1, table_size * sizeof *keys);
        }
        memset(fetch_ids + count, -1, (width - count) * sizeof *fetch_ids);
        memset(fetch_rows + count, -1, (width - count) * sizeof *fetch_rows);
        counts[b] = count;
    }
}
