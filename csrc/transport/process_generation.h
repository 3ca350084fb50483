#pragma once

namespace ringcomm {

/// How many forks lie between this process and the one that loaded the library, as a number to
/// compare: what was made in another generation came here by a fork, without its threads, and must
/// not be used.
int process_generation();

}  // namespace ringcomm
