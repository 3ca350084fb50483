#pragma once

#include <functional>

#include "collectives/carrier.h"
#include "collectives/collective.h"

namespace ringcomm {

/// reduce_scatter_update_all_gather as a reduce_scatter, the update, and an all_gather, for
/// carriers that know no update: `run` carries out a collective of uneven shares. Equal to the
/// fused form to the last bit where that reduces in the same order.
Traffic update_in_parts(const Collective& call, int rank, int world_size,
                        const std::function<Traffic(const Collective&)>& run);

}  // namespace ringcomm
