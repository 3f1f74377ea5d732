#include "directory/stripes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <new>

#include "base/assert.h"
#include "kv/stripe.h"

namespace di::directory {

namespace {

constexpr std::uint64_t unit_bytes = 4096;

Error invalid(std::string message) {
  return {Code::invalid, 0, std::move(message)};
}

bool page_valid(const wire::PutPage& page) {
  return !page.keys.empty() && page.keys.size() <= page_keys_max && !page.crcs.empty() &&
         page.crcs.size() <= page_segments_max && page.bytes > 0 && page.bytes <= page_bytes_max;
}

}  // namespace

// ---- Geometry and form -------------------------------------------------------------------------

Result<Geometry> Geometry::parse(std::string_view text) {
  const std::size_t plus = text.find('+');
  Geometry out;
  const auto number = [](std::string_view digits, std::uint16_t& value) {
    const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return end.ec == std::errc{} && end.ptr == digits.data() + digits.size();
  };
  if (plus == std::string_view::npos || !number(text.substr(0, plus), out.data_columns) ||
      !number(text.substr(plus + 1), out.parity_columns) || out.data_columns == 0 ||
      out.columns() > kv::stripe_columns_max) {
    return invalid("'" + std::string(text) + "' is no geometry: k+m, with k at least 1 and k + m at most " +
                   std::to_string(kv::stripe_columns_max));
  }
  if (out.parity_columns == 0 && out.data_columns > 1) {
    return invalid("'" + std::string(text) +
                   "': several data columns without parity lose a page with any of them");
  }
  return out;
}

std::string Geometry::text() const {
  return std::to_string(data_columns) + "+" + std::to_string(parity_columns);
}

StripeForm StripeForm::of_put(Geometry geometry, std::span<const wire::PutPage> pages) {
  std::uint64_t shortest = pages.front().bytes;
  for (const wire::PutPage& page : pages) shortest = std::min(shortest, page.bytes);
  StripeForm form;
  form.data_columns = geometry.data_columns;
  form.parity_columns = geometry.parity_columns;
  form.pages = static_cast<std::uint16_t>(pages.size());
  form.parts = static_cast<std::uint16_t>(kv::stripe_parts(geometry.data_columns, form.pages, shortest));
  return form;
}

Result<StripeForm> StripeForm::of_code(const wire::StripeCode& code, std::span<const wire::PutPage> pages) {
  StripeForm form;
  form.pages = static_cast<std::uint16_t>(pages.size());
  if (code.data_columns == 0 && code.parity_columns == 0 && code.crcs.empty()) {
    if (pages.size() != 1) return invalid("several pages without a code");
    return form;
  }
  form.data_columns = code.data_columns;
  form.parity_columns = code.parity_columns;
  if (form.data_columns == 0 ||
      std::uint32_t{form.data_columns} + form.parity_columns > kv::stripe_columns_max) {
    return invalid("no geometry");
  }
  if (pages.size() > form.data_columns) return invalid("more pages than data columns");
  const std::size_t segments = pages.front().crcs.size();
  const std::size_t rows = code.crcs.size() / segments;
  if (code.crcs.size() % segments != 0 || rows < form.parity_columns) return invalid("checksums are missing");
  const std::size_t part_rows = rows - form.parity_columns;
  if (part_rows > 0) {
    if (part_rows % pages.size() != 0) return invalid("parts of a page are missing");
    form.parts = static_cast<std::uint16_t>(std::min<std::size_t>(part_rows / pages.size(), UINT16_MAX));
    if (form.parts < 2 || form.data_stored() > form.data_columns)
      return invalid("more parts than data columns");
  }
  return form;
}

bool pages_valid(std::span<const wire::PutPage> pages) {
  if (pages.empty() || pages.size() > kv::stripe_pages_max) return false;
  for (std::size_t p = 0; p < pages.size(); ++p) {
    if (!page_valid(pages[p]) || pages[p].crcs.size() != pages[0].crcs.size()) return false;
    if (p > 0 && pages[p].parent != pages[p - 1].keys.back()) return false;
  }
  return true;
}

std::uint64_t column_bytes_of(const StripeForm& form, std::span<const std::uint64_t> page_bytes,
                              std::uint32_t column) {
  DI_ASSERT(form.is_stored(column) && page_bytes.size() == form.pages);
  const auto part_bytes = [&](std::uint64_t bytes) {
    if (form.parts == 1) return bytes;
    const std::uint64_t units = (bytes + unit_bytes - 1) / unit_bytes;
    return (units + form.parts - 1) / form.parts * unit_bytes;
  };
  if (column < form.data_stored()) return part_bytes(page_bytes[column / form.parts]);
  // Parity is as long as the longest data column.
  return part_bytes(*std::max_element(page_bytes.begin(), page_bytes.end()));
}

// ---- Stripe ------------------------------------------------------------------------------------

static_assert(std::is_trivially_copyable_v<Key> && alignof(Key) == 1);
static_assert(alignof(StripeColumn) == alignof(std::uint32_t) && sizeof(StripeColumn) % 4 == 0);

Stripe::Stripe(const StripeName& name, std::span<const wire::PutPage> pages, StripeForm form,
               std::span<const std::uint32_t> code_crcs)
    : name_(name), parent_(pages.front().parent), form_(form) {
  DI_ASSERT(pages.size() == form.pages);
  DI_ASSERT(code_crcs.size() == form.code_crcs(pages.front().crcs.size()));
  for (const wire::PutPage& page : pages) {
    blocks_ += static_cast<std::uint32_t>(page.keys.size());
    crcs_ += static_cast<std::uint32_t>(page.crcs.size());
  }
  crcs_ += static_cast<std::uint32_t>(code_crcs.size());
  body_ = std::make_unique<std::byte[]>(keys_at() + sizeof(Key) * blocks_);
  std::uint32_t first = 0;
  std::byte* head = body_.get();
  std::byte* crc = body_.get() + crcs_at();
  std::byte* key = body_.get() + keys_at();
  const auto copy = [](std::byte*& to, const void* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
  };
  for (const wire::PutPage& page : pages) {
    new (head) PageHead{page.bytes, first, static_cast<std::uint32_t>(page.crcs.size())};
    head += sizeof(PageHead);
    first += static_cast<std::uint32_t>(page.keys.size());
    copy(crc, page.crcs.data(), page.crcs.size() * sizeof(std::uint32_t));
    copy(key, page.keys.data(), page.keys.size() * sizeof(Key));
  }
  if (!code_crcs.empty()) copy(crc, code_crcs.data(), code_crcs.size_bytes());
}

std::span<const Stripe::PageHead> Stripe::heads() const {
  return {reinterpret_cast<const PageHead*>(body_.get()), form_.pages};
}
std::span<const Key> Stripe::keys() const {
  return {reinterpret_cast<const Key*>(body_.get() + keys_at()), blocks_};
}
std::span<const StripeColumn> Stripe::columns() const {
  return {reinterpret_cast<const StripeColumn*>(body_.get() + columns_at()), columns_};
}
std::span<StripeColumn> Stripe::columns() {
  return {reinterpret_cast<StripeColumn*>(body_.get() + columns_at()), columns_};
}

std::uint32_t Stripe::page_blocks(std::uint32_t page) const {
  const auto all = heads();
  return (page + 1 < all.size() ? all[page + 1].first : blocks_) - all[page].first;
}

std::uint32_t Stripe::page_of_block(std::uint32_t block) const {
  const auto all = heads();
  std::uint32_t page = 0;
  while (page + 1 < all.size() && all[page + 1].first <= block) ++page;
  return page;
}

std::span<const Key> Stripe::page_keys(std::uint32_t page) const {
  return keys().subspan(page_first(page), page_blocks(page));
}

std::span<const std::uint32_t> Stripe::page_crcs(std::uint32_t page) const {
  const std::size_t segments = heads()[page].segments;  // of every page of the stripe
  return all_page_crcs().subspan(segments * page, segments);
}

const Key& Stripe::page_parent(std::uint32_t page) const {
  return page == 0 ? parent_ : keys()[page_first(page) - 1];
}

std::span<const std::uint32_t> Stripe::all_page_crcs() const {
  return {reinterpret_cast<const std::uint32_t*>(body_.get() + crcs_at()),
          std::size_t{heads()[0].segments} * form_.pages};
}

std::span<const std::uint32_t> Stripe::code_crcs() const {
  const std::size_t before = std::size_t{heads()[0].segments} * form_.pages;
  return {reinterpret_cast<const std::uint32_t*>(body_.get() + crcs_at()) + before, crcs_ - before};
}

std::vector<wire::PutPage> Stripe::put_pages() const {
  std::vector<wire::PutPage> out;
  for (std::uint32_t p = 0; p < pages(); ++p) {
    const auto keys = page_keys(p);
    const auto crcs = page_crcs(p);
    out.push_back({page_parent(p), {keys.begin(), keys.end()}, {crcs.begin(), crcs.end()}, page_bytes(p)});
  }
  return out;
}

wire::StripeCode Stripe::code() const {
  const auto crcs = code_crcs();
  return {form_.data_columns, form_.parity_columns, {crcs.begin(), crcs.end()}};
}

bool Stripe::is(const StripeName& name, std::span<const wire::PutPage> pages, const StripeForm& form) const {
  if (name.fingerprint != name_.fingerprint || name.tenant != name_.tenant || form != form_ ||
      pages.front().parent != parent_) {
    return false;
  }
  for (std::uint32_t p = 0; p < form_.pages; ++p) {
    const auto keys = page_keys(p);
    const auto crcs = page_crcs(p);
    if (page_bytes(p) != pages[p].bytes ||
        !std::equal(keys.begin(), keys.end(), pages[p].keys.begin(), pages[p].keys.end()) ||
        !std::equal(crcs.begin(), crcs.end(), pages[p].crcs.begin(), pages[p].crcs.end())) {
      return false;
    }
  }
  return true;
}

std::uint64_t Stripe::column_bytes(std::uint32_t column) const {
  std::array<std::uint64_t, kv::stripe_pages_max> bytes{};
  for (std::uint32_t p = 0; p < form_.pages; ++p) bytes[p] = page_bytes(p);
  return column_bytes_of(form_, std::span(bytes).first(form_.pages), column);
}

const StripeColumn* Stripe::column(std::uint32_t number) const {
  for (const StripeColumn& column : columns()) {
    if (column.column == number) return &column;
  }
  return nullptr;
}

void Stripe::column_add(const StripeColumn& column) {
  DI_ASSERT(form_.is_stored(column.column) && this->column(column.column) == nullptr);
  std::byte* const base = body_.get() + columns_at();
  std::size_t at = columns_++;
  new (base + at * sizeof(StripeColumn)) StripeColumn(column);
  const auto all = columns();
  for (; at > 0 && all[at - 1].column > all[at].column; --at) std::swap(all[at - 1], all[at]);
}

void Stripe::column_remove(std::uint32_t number) {
  const auto all = columns();
  const auto at =
      std::find_if(all.begin(), all.end(), [&](const StripeColumn& c) { return c.column == number; });
  DI_ASSERT(at != all.end());
  std::move(at + 1, all.end(), at);
  --columns_;
}

// ---- Table -------------------------------------------------------------------------------------

std::uint32_t StripeTable::add(Stripe stripe) {
  std::uint32_t slot = 0;
  const std::uint64_t id = stripe.id();
  if (free_.empty()) {
    slot = static_cast<std::uint32_t>(slots_.size());
    slots_.emplace_back(std::move(stripe));
  } else {
    slot = free_.back();
    free_.pop_back();
    slots_[slot].emplace(std::move(stripe));
  }
  const bool added = ids_.emplace(id, slot).second;
  DI_ASSERT(added);
  return slot;
}

void StripeTable::erase(std::uint32_t slot) {
  ids_.erase(slots_[slot]->id());
  slots_[slot].reset();
  free_.push_back(slot);
}

std::uint32_t StripeTable::draw(Rng& rng) const {
  if (slots_.empty()) return none;
  const auto slot = static_cast<std::uint32_t>(rng.below(slots_.size()));
  return slots_[slot] ? slot : none;
}

std::uint32_t StripeTable::find(std::uint64_t id) const {
  const auto at = ids_.find(id);
  return at == ids_.end() ? none : at->second;
}

}  // namespace di::directory
