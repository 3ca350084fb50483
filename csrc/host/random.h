#pragma once

#include <cstdint>
#include <string>

namespace ringcomm::host {

/// Bits that nobody can guess.
std::uint64_t random_number();
/// 32 hexadecimal digits of 128 such bits.
std::string random_text();

}  // namespace ringcomm::host
