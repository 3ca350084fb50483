#pragma once

namespace ringcomm {

/// The number of forks between the process that loaded the library and this one. An object of
/// another generation was inherited by fork(), without its threads, and must not be used.
int process_generation();

}  // namespace ringcomm
