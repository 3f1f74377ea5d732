// request/emit.h: tokens of one request in index order, each once, whatever order legs deliver them in.
//
// Pure.  Token 0 of an attempt comes from prefill and the next ones from decode, over different
// connections, so a later index may arrive first; it waits here.  Bound: early_max tokens wait.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/result.h"
#include "wire/messages.h"

namespace di::request {

inline constexpr std::size_t early_max = 4096;

class InOrder {
 public:
  struct Item {
    std::uint32_t index = 0;
    wire::TokenValue token;
    wire::Finish finish = wire::Finish::none;
  };

  // Items that became due, in order.  Repeated and old indexes give nothing.
  // Errors: no_space when early_max tokens wait already (the request is to re-enter).
  Result<std::vector<Item>> take(Item item);
  // The attempt is over: what waited belongs to nobody.
  void drop_early() { early_.clear(); }

  [[nodiscard]] std::uint32_t next_index() const { return next_index_; }
  [[nodiscard]] bool has_gap() const { return !early_.empty(); }

 private:
  std::uint32_t next_index_ = 0;
  std::map<std::uint32_t, Item> early_;
};

}  // namespace di::request
