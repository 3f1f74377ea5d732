// directory/stripes.h: the committed stripes of the store: their blocks, checksums and columns.
//
// A stripe is k data and m parity columns of which those are stored that kv/stripe.h says.  The directory
// needs no layout for that: how many parts a page has follows from the offered bytes when a put opens, and
// from the checksums of the code when it is committed or found on a store.
//
// A million stripes of ten pages are tens of millions of blocks, so a stripe is one small struct and one
// allocation with its columns, checksums and keys.  It is named by its id outside and by its slot, a number
// that is used again, inside.  What goes first when room is needed is kv/evict.h's business.
//
// Pure.  Owner: the directory's thread.  Bound: the callers' (blocks_max of index.h).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "base/rng.h"
#include "base/time.h"
#include "kv/evict.h"
#include "wire/ids.h"
#include "wire/messages.h"

namespace di::directory {

inline constexpr std::size_t page_keys_max = 4096;   // far above any layout's page_blocks
inline constexpr std::size_t page_segments_max = 8;  // kv::groups_max
// Payload of 1 TiB in a page is a lie; sums of such sizes stay far inside 64 bits.
inline constexpr std::uint64_t page_bytes_max = std::uint64_t{1} << 40;
// wire::VolumeState::state
inline constexpr std::uint8_t volume_failed = 2;
inline constexpr std::uint64_t stripe_id_max = (std::uint64_t{1} << 56) - 1;

struct Geometry {
  std::uint16_t data_columns = 1;
  std::uint16_t parity_columns = 0;

  // "10+2".  Errors: invalid.
  static Result<Geometry> parse(std::string_view text);
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::uint32_t columns() const { return std::uint32_t{data_columns} + parity_columns; }
  bool operator==(const Geometry&) const = default;
};

// Which columns a stripe has; the numbers are those of kv::StripeShape.
struct StripeForm {
  std::uint16_t data_columns = 1;
  std::uint16_t parity_columns = 0;
  std::uint16_t pages = 1;
  std::uint16_t parts = 1;

  // Of a put of these pages; at most `geometry.data_columns` of them.
  static StripeForm of_put(Geometry geometry, std::span<const wire::PutPage> pages);
  // Of a header or commit.  No columns and no checksums at all: one page as it is.
  // Errors: invalid: the code does not fit the pages.
  static Result<StripeForm> of_code(const wire::StripeCode& code, std::span<const wire::PutPage> pages);

  [[nodiscard]] std::uint32_t data_stored() const { return std::uint32_t{pages} * parts; }
  [[nodiscard]] std::uint32_t columns_stored() const { return data_stored() + parity_columns; }
  [[nodiscard]] std::uint16_t stored_column(std::uint32_t i) const {
    return static_cast<std::uint16_t>(i < data_stored() ? i : data_columns + (i - data_stored()));
  }
  [[nodiscard]] bool is_parity(std::uint32_t column) const {
    return column >= data_columns && column < std::uint32_t{data_columns} + parity_columns;
  }
  [[nodiscard]] bool is_stored(std::uint32_t column) const {
    return column < data_stored() || is_parity(column);
  }
  [[nodiscard]] bool has_code() const { return parity_columns > 0 || parts > 1; }
  // Checksums of the code when a page has `segments` segments.
  [[nodiscard]] std::size_t code_crcs(std::size_t segments) const {
    return ((parts == 1 ? std::size_t{0} : data_stored()) + parity_columns) * segments;
  }
  bool operator==(const StripeForm&) const = default;
};

// One to ten pages, each with keys, checksums and bytes within the bounds, equally many segments, and each
// below the one before it.
[[nodiscard]] bool pages_valid(std::span<const wire::PutPage> pages);

// What the column takes on its volume, without the header; `page_bytes` has every page of the stripe.
[[nodiscard]] std::uint64_t column_bytes_of(const StripeForm& form, std::span<const std::uint64_t> page_bytes,
                                            std::uint32_t column);

// StripeColumn::seen of what the catalogue said and no inventory has shown yet.
inline constexpr std::uint32_t unseen = UINT32_MAX;

struct StripeColumn {
  std::uint32_t store = 0;  // number of index.h
  std::uint16_t volume = 0;
  std::uint16_t column = 0;
  std::uint32_t seen = 0;  // number of the store's inventory that showed it
};

// What is said of a stripe as a whole.
struct StripeName {
  std::uint64_t id = 0;
  Key fingerprint;           // layout
  std::uint64_t tenant = 0;  // whose it is: every page of it is of one chain
};

// A committed stripe as the catalogue keeps it.
struct StripeRow {
  std::uint64_t id = 0;
  Key fingerprint;
  std::uint64_t tenant = 0;
  std::uint32_t born_s = 0;  // of its commit, by the wall; 0: not known
  std::vector<wire::PutPage> pages;
  wire::StripeCode code;
  std::vector<wire::Column> columns;
  bool operator==(const StripeRow&) const = default;
};
// Its row is another, or gone.
struct StripeChange {
  std::uint64_t id = 0;
  std::optional<StripeRow> row;
};

class Stripe {
 public:
  // `code` has form.code_crcs() checksums.
  Stripe(const StripeName& name, std::span<const wire::PutPage> pages, StripeForm form,
         std::span<const std::uint32_t> code_crcs);

  [[nodiscard]] std::uint64_t id() const { return name_.id; }
  [[nodiscard]] const Key& fingerprint() const { return name_.fingerprint; }
  [[nodiscard]] std::uint64_t tenant() const { return name_.tenant; }
  [[nodiscard]] const Key& parent() const { return parent_; }
  [[nodiscard]] const StripeForm& form() const { return form_; }
  [[nodiscard]] std::uint32_t blocks() const { return blocks_; }
  [[nodiscard]] std::span<const Key> keys() const;

  [[nodiscard]] std::uint32_t pages() const { return form_.pages; }
  [[nodiscard]] std::uint32_t page_first(std::uint32_t page) const { return heads()[page].first; }
  [[nodiscard]] std::uint32_t page_blocks(std::uint32_t page) const;
  [[nodiscard]] std::uint32_t page_of_block(std::uint32_t block) const;
  [[nodiscard]] std::uint64_t page_bytes(std::uint32_t page) const { return heads()[page].bytes; }
  [[nodiscard]] std::span<const Key> page_keys(std::uint32_t page) const;
  [[nodiscard]] std::span<const std::uint32_t> page_crcs(std::uint32_t page) const;
  [[nodiscard]] const Key& page_parent(std::uint32_t page) const;
  [[nodiscard]] std::span<const std::uint32_t> all_page_crcs() const;
  [[nodiscard]] std::span<const std::uint32_t> code_crcs() const;
  [[nodiscard]] std::vector<wire::PutPage> put_pages() const;
  [[nodiscard]] wire::StripeCode code() const;
  // But for the id.
  [[nodiscard]] bool is(const StripeName& name, std::span<const wire::PutPage> pages,
                        const StripeForm& form) const;
  [[nodiscard]] std::uint64_t column_bytes(std::uint32_t column) const;

  // Those that are somewhere, at most one entry per column, in the order of their numbers.
  [[nodiscard]] std::span<const StripeColumn> columns() const;
  [[nodiscard]] std::span<StripeColumn> columns();
  [[nodiscard]] const StripeColumn* column(std::uint32_t number) const;
  void column_add(const StripeColumn& column);
  void column_remove(std::uint32_t number);

  std::uint64_t published = 0;  // counts commits: the lower one owns a key
  Instant used_at;
  kv::Evictor::Item item = kv::Evictor::item_none;
  std::uint32_t born_s = 0;  // as in its row

  // The catalogue has a row of it, or is being given one.
  [[nodiscard]] bool recorded() const { return recorded_; }
  void set_recorded() { recorded_ = true; }

 private:
  struct PageHead {
    std::uint64_t bytes;
    std::uint32_t first;  // block
    std::uint32_t segments;
  };
  [[nodiscard]] std::span<const PageHead> heads() const;
  [[nodiscard]] std::size_t columns_at() const { return sizeof(PageHead) * form_.pages; }
  [[nodiscard]] std::size_t crcs_at() const {
    return columns_at() + sizeof(StripeColumn) * form_.columns_stored();
  }
  [[nodiscard]] std::size_t keys_at() const { return crcs_at() + sizeof(std::uint32_t) * crcs_; }

  StripeName name_;
  Key parent_;
  StripeForm form_;
  std::uint32_t blocks_ = 0;
  std::uint32_t crcs_ = 0;
  std::uint16_t columns_ = 0;  // present
  bool recorded_ = false;
  // PageHead[pages], StripeColumn[columns_stored()], checksums, Key[blocks].
  std::unique_ptr<std::byte[]> body_;
};

class StripeTable {
 public:
  static constexpr std::uint32_t none = UINT32_MAX;

  // The slot.  The id is not there yet.
  std::uint32_t add(Stripe stripe);
  void erase(std::uint32_t slot);

  [[nodiscard]] std::uint32_t find(std::uint64_t id) const;  // none when it is not there
  [[nodiscard]] const Stripe& at(std::uint32_t slot) const { return *slots_[slot]; }
  [[nodiscard]] Stripe& at(std::uint32_t slot) { return *slots_[slot]; }
  [[nodiscard]] std::size_t count() const { return ids_.size(); }
  // One of them, each as likely as the next; none when luck finds an empty slot.
  [[nodiscard]] std::uint32_t draw(Rng& rng) const;
  // By id, in order.
  [[nodiscard]] const std::map<std::uint64_t, std::uint32_t>& ids() const { return ids_; }

 private:
  std::deque<std::optional<Stripe>> slots_;
  std::vector<std::uint32_t> free_;
  std::map<std::uint64_t, std::uint32_t> ids_;
};

}  // namespace di::directory
