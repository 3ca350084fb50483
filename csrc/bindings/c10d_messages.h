#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "host/wait.h"
#include "transport/messenger.h"

namespace ringcomm {

struct GroupOptions;

/// Messages by the send and recv of any backend of torch.distributed that moves CPU tensors: Gloo,
/// MPI, another package's. Messages with one tag must match in the order of their calls and may be
/// shorter than their receive, and Work::abort() (as Gloo's) or Backend::abort() (as most others')
/// must end waits: Gloo's time-outs end all messages of a group. The backend is for these alone.
std::unique_ptr<Messenger> messages_over(c10::intrusive_ptr<c10d::Backend> backend);

/// A new backend of torch.distributed for the messages of one group, created by
/// ringcomm.message_backend. `purpose` is for error messages. Collective over the group; takes the
/// GIL. Throws what `look` throws, and Error.
c10::intrusive_ptr<c10d::Backend> make_message_backend(const std::string& name,
                                                       const c10::intrusive_ptr<c10d::Store>& store,
                                                       const std::string& key, int rank, int size,
                                                       const GroupOptions& options,
                                                       const LookForRanks& look,
                                                       const std::string& purpose);

}  // namespace ringcomm
