#include "cuda/collectives/header_words.h"

#include <cstring>

namespace ringcomm::cuda {
namespace {

// Member by member: between them a struct has bytes that hold anything.
template <class Visit>
void visit_members(auto& header, const Visit& visit) {
  visit(header.num_elems);
  visit(header.root);
  visit(header.op);
  visit(header.dtype);
  visit(header.reduction);
  visit(header.algorithm);
  visit(header.is_uneven);
  visit(header.has_update);
  visit(header.element_name);
  visit(header.update.lr);
  visit(header.update.weight_decay);
  visit(header.update.grad_scale);
  visit(header.update.coefficients);
  visit(header.update.step);
  visit(header.update.optimizer);
  visit(header.update.param_dtype);
  visit(header.update.is_nesterov);
  visit(header.update.has_master);
}

constexpr std::size_t kMemberBytes = 8 + 4 + 6 + 16 + 3 * 8 + 24 + 4 + 4;
static_assert(kMemberBytes <= sizeof(HeaderWords));

}  // namespace

HeaderWords to_words(const CallHeader& header) {
  HeaderWords words = {};
  auto* at = reinterpret_cast<char*>(words.data());
  visit_members(header, [&](const auto& member) {
    std::memcpy(at, &member, sizeof member);
    at += sizeof member;
  });
  return words;
}

CallHeader from_words(const std::uint32_t* words) {
  CallHeader header;
  const auto* at = reinterpret_cast<const char*>(words);
  visit_members(header, [&](auto& member) {
    std::memcpy(&member, at, sizeof member);
    at += sizeof member;
  });
  return header;
}

}  // namespace ringcomm::cuda
