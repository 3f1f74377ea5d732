// base/result.h: a value or an Error.  GCC 12 has no std::expected in C++20.
#pragma once

#include <utility>
#include <variant>

#include "base/assert.h"
#include "base/error.h"

namespace di {

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit on purpose
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit on purpose

  explicit operator bool() const { return state_.index() == 0; }
  [[nodiscard]] bool ok() const { return state_.index() == 0; }

  // Undefined without a value would be a bug of ours: asserted.
  [[nodiscard]] T& value() & {
    DI_ASSERT(ok());
    return std::get<0>(state_);
  }
  [[nodiscard]] const T& value() const& {
    DI_ASSERT(ok());
    return std::get<0>(state_);
  }
  [[nodiscard]] T&& value() && {
    DI_ASSERT(ok());
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  [[nodiscard]] const Error& error() const {
    DI_ASSERT(!ok());
    return std::get<1>(state_);
  }

 private:
  std::variant<T, Error> state_;
};

struct Ok {};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Ok) {}                                                     // NOLINT: implicit on purpose
  Result(Error error) : failed_(true), error_(std::move(error)) {}  // NOLINT: implicit on purpose

  explicit operator bool() const { return !failed_; }
  [[nodiscard]] bool ok() const { return !failed_; }
  [[nodiscard]] const Error& error() const {
    DI_ASSERT(failed_);
    return error_;
  }

 private:
  bool failed_ = false;
  Error error_;
};

using Status = Result<void>;

}  // namespace di

// Leaves the enclosing function with the error of a Status-valued expression.
#define DI_TRY(expression)                                        \
  do {                                                            \
    if (auto di_try_status = (expression); !di_try_status.ok()) { \
      return di_try_status.error();                               \
    }                                                             \
  } while (false)
