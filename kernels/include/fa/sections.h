// Sections: the heads whose work tiles are computed at the same time, so that their K and V stay in L2.
#pragma once

#include <stdint.h>

#include <algorithm>

#include "fa_forward.h"

namespace fa {

// K and V of a section should fit in L2 (50 MB) besides Q and O.
constexpr int64_t SECTION_BYTES = 32 << 20;

// Returns the number of heads of a section.  If no keys after a query are hidden, work tiles are nearly equally long, and heads are
// computed one after another, so that few heads are in L2 at a time.
inline int section_heads_of(const FaForwardArgs* args, int element_bytes) {
  const bool hides_later_keys = args->causal != FA_CAUSAL_NONE || fa_copy_args(args).features & FA_WINDOW_RIGHT;
  if (!hides_later_keys) return 1;
  const int64_t kv_bytes = args->seq_k * args->head_dim * 2 * element_bytes;
  const int64_t head_bytes = std::max<int64_t>(1, kv_bytes / (args->heads / args->kv_heads));
  int64_t heads = 1;
  while (heads * 2 * head_bytes <= SECTION_BYTES && heads < args->batch * args->heads) heads *= 2;
  return static_cast<int>(heads);
}

}  // namespace fa
