#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

/// Of bytes in a file, to find those that have changed: the CRC-32C of the CRC-32Cs of three equal
/// parts, of whole words, and the rest with the last. Three, because the CPU's instruction takes
/// three cycles and can begin one in each. The same on every machine.
std::uint32_t checksum(const void* data, std::size_t num_bytes);

}  // namespace ringcomm
