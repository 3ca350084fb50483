#pragma once

#include <array>
#include <cstdint>

#include "collectives/collective.h"
#include "cuda/kernels/control.h"

namespace ringcomm::cuda {

using HeaderWords = std::array<std::uint32_t, kHeaderWords>;

/// A header as kernels compare it, without the call's number, which a replayed graph cannot change.
HeaderWords to_words(const CallHeader& header);
CallHeader from_words(const std::uint32_t* words);

}  // namespace ringcomm::cuda
