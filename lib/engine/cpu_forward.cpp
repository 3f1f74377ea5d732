#include "engine/cpu_forward.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/assert.h"

namespace di::engine {

namespace {

// Rows of logits made at a time: bounds the largest buffer, and a wider batch gains nothing.
constexpr std::size_t head_rows_max = 64;

// Floats without initial values, aligned for vectors.
class Buffer {
 public:
  void take(std::size_t count) {
    data_.reset(static_cast<float*>(::operator new (count * sizeof(float) + 64, std::align_val_t{64})));
  }
  [[nodiscard]] float* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* data) const { ::operator delete (data, std::align_val_t{64}); }
  };
  std::unique_ptr<float, Free> data_;
};

// x[i] += y[i] * by, two roundings.
void add_scaled(float* x, const float* y, float by, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) x[i] = x[i] + y[i] * by;
}

void add(float* x, const float* y, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) x[i] = x[i] + y[i];
}

}  // namespace

struct CpuForward::Scratch {
  Buffer x;                                 // [rows, hidden] the residual stream
  Buffer normed;                            // [rows, hidden]
  Buffer out;                               // [rows, hidden] what a block adds to x
  Buffer q_a;                               // [rows, q_lora]
  Buffer q;                                 // [rows, heads * (qk_nope + qk_rope)]
  Buffer kv;                                // [rows, kv_lora + qk_rope]
  Buffer query;                             // [rows, heads, kv_lora + qk_rope] absorbed
  Buffer attended;                          // [rows, heads, kv_lora]
  Buffer value;                             // [rows, heads * v_head]
  Buffer gate;                              // [rows, widest MLP]
  Buffer up;                                // [rows, widest MLP]
  Buffer score;                             // [rows, experts]
  Buffer gathered;                          // [rows, hidden] rows of one expert
  Buffer expert_out;                        // [rows, hidden]
  Buffer route;                             // [experts + groups]
  Buffer attention;                         // of the kernel
  Buffer final_row;                         // [head_rows_max, hidden]
  Buffer logits;                            // [head_rows_max, vocab]
  std::vector<std::uint32_t> chosen;        // [rows, experts_per_token]
  std::vector<float> weight;                // [rows, experts_per_token]
  std::vector<std::uint32_t> expert_first;  // [experts + 1]
  std::vector<std::uint32_t> expert_slot;   // [rows * experts_per_token] slots in order of expert, then row
  std::vector<const std::byte*> blocks;     // of one sequence in one layer
};

CpuForward::CpuForward(const model::Shape& shape, const CpuWeights& weights, const kernels::Kernels& kernels,
                       CpuPool& pool, kernels::Format cache, std::uint32_t block_tokens,
                       std::uint32_t rows_max)
    : shape_(shape),
      weights_(weights),
      kernels_(kernels),
      pool_(pool),
      cache_(cache),
      block_tokens_(block_tokens),
      rows_max_(rows_max),
      scale_(softmax_scale(shape)),
      eps_(static_cast<float>(shape.rms_eps)),
      rotary_(shape),
      scratch_(std::make_unique<Scratch>()) {
  const std::size_t rows = rows_max;
  const std::size_t heads = shape.heads;
  const std::size_t width = std::max<std::size_t>(
      {shape.dense_width, std::size_t{shape.shared_experts} * shape.expert_width, shape.expert_width});
  Scratch& s = *scratch_;
  s.x.take(rows * shape.hidden);
  s.normed.take(rows * shape.hidden);
  s.out.take(rows * shape.hidden);
  s.q_a.take(rows * shape.q_lora);
  s.q.take(rows * heads * (shape.qk_nope + shape.qk_rope));
  s.kv.take(rows * shape.cache_width());
  s.query.take(rows * heads * shape.cache_width());
  s.attended.take(rows * heads * shape.kv_lora);
  s.value.take(rows * heads * shape.v_head);
  s.gate.take(rows * width);
  s.up.take(rows * width);
  s.score.take(rows * shape.experts);
  s.gathered.take(rows * shape.hidden);
  s.expert_out.take(rows * shape.hidden);
  s.route.take(shape.experts + shape.groups);
  s.attention.take(kernels::attention_scratch_count(heads, shape.kv_lora, shape.qk_rope));
  s.final_row.take(head_rows_max * shape.hidden);
  s.logits.take(head_rows_max * shape.vocab);
  s.chosen.resize(rows * shape.experts_per_token);
  s.weight.resize(rows * shape.experts_per_token);
  s.expert_first.resize(shape.experts + 1);
  s.expert_slot.resize(rows * shape.experts_per_token);
}

CpuForward::~CpuForward() = default;

void CpuForward::multiply(const float* x, std::size_t x_stride, const Matrix& w, float* y,
                          std::size_t y_stride, std::size_t rows) const {
  kernels_.matmul({.x = x,
                   .x_stride = x_stride,
                   .w = w.data,
                   .format = w.format,
                   .y = y,
                   .y_stride = y_stride,
                   .rows = rows,
                   .n = w.n,
                   .k = w.k});
}

void CpuForward::begin(std::vector<ForwardPart> parts) {
  parts_ = std::move(parts);
  rows_ = 0;
  const Matrix& table = weights_.embedding;
  const std::size_t row_bytes = table.k * (table.format == kernels::Format::f32 ? 4 : 2);
  for (const ForwardPart& part : parts_) {
    DI_ASSERT(rows_ + part.tokens.size() <= rows_max_);
    const auto last = part.first_position + static_cast<std::uint32_t>(part.tokens.size());
    DI_ASSERT(last <= part.blocks.size() * block_tokens_);
    rotary_.extend(last);
    for (const std::uint32_t token : part.tokens) {
      DI_ASSERT(token < shape_.vocab);
      kernels::widen(table.data + token * row_bytes, table.format, scratch_->x.get() + rows_ * shape_.hidden,
                     shape_.hidden);
      ++rows_;
    }
  }
}

void CpuForward::keep(const std::vector<bool>& parts) {
  DI_ASSERT(parts.size() == parts_.size());
  float* x = scratch_->x.get();
  std::size_t from = 0, to = 0, left = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const std::size_t rows = parts_[i].tokens.size();
    if (parts[i]) {
      if (from != to)
        std::memmove(x + to * shape_.hidden, x + from * shape_.hidden, rows * shape_.hidden * sizeof(float));
      parts_[left++] = parts_[i];
      to += rows;
    }
    from += rows;
  }
  parts_.resize(left);
  rows_ = to;
}

void CpuForward::layers(std::uint32_t first, std::uint32_t last) {
  if (rows_ == 0) return;
  Scratch& s = *scratch_;
  const std::size_t hidden = shape_.hidden;
  for (std::uint32_t index = first; index < last; ++index) {
    const CpuLayer& layer = weights_.layers[index];
    kernels_.rmsnorm(s.x.get(), hidden, layer.attention_norm.data(), eps_, s.normed.get(), hidden, rows_,
                     hidden);
    attention(layer, index);
    add(s.x.get(), s.out.get(), rows_ * hidden);

    kernels_.rmsnorm(s.x.get(), hidden, layer.mlp_norm.data(), eps_, s.normed.get(), hidden, rows_, hidden);
    if (layer.experts.empty()) {
      dense(layer.mlp, s.normed.get(), rows_, s.out.get());
    } else {
      experts(layer);
    }
    add(s.x.get(), s.out.get(), rows_ * hidden);
  }
}

// normed -> out.
void CpuForward::attention(const CpuLayer& layer, std::uint32_t index) {
  Scratch& s = *scratch_;
  const std::size_t hidden = shape_.hidden, heads = shape_.heads;
  const std::size_t nope = shape_.qk_nope, rope = shape_.qk_rope, latent = shape_.kv_lora;
  const std::size_t q_head = nope + rope, width = latent + rope;
  const std::size_t row_bytes = width * (cache_ == kernels::Format::f32 ? 4 : 2);

  if (shape_.q_lora == 0) {
    multiply(s.normed.get(), hidden, layer.q_b, s.q.get(), heads * q_head, rows_);
  } else {
    const std::size_t lora = shape_.q_lora;
    multiply(s.normed.get(), hidden, layer.q_a, s.q_a.get(), lora, rows_);
    kernels_.rmsnorm(s.q_a.get(), lora, layer.q_norm.data(), eps_, s.q_a.get(), lora, rows_, lora);
    multiply(s.q_a.get(), lora, layer.q_b, s.q.get(), heads * q_head, rows_);
  }
  // Queries in the space of the cache rows: scores need no expanded keys.
  for (std::size_t head = 0; head < heads; ++head) {
    multiply(s.q.get() + head * q_head, heads * q_head, layer.key[head], s.query.get() + head * width,
             heads * width, rows_);
  }
  multiply(s.normed.get(), hidden, layer.kv_a, s.kv.get(), width, rows_);
  kernels_.rmsnorm(s.kv.get(), width, layer.kv_norm.data(), eps_, s.kv.get(), width, rows_, latent);

  std::size_t row = 0;
  for (const ForwardPart& part : parts_) {
    for (std::size_t i = 0; i < part.tokens.size(); ++i, ++row) {
      const auto position = static_cast<std::uint32_t>(part.first_position + i);
      const float* cosine = rotary_.cosine(position);
      const float* sine = rotary_.sine(position);
      for (std::size_t head = 0; head < heads; ++head) {
        float* to = s.query.get() + (row * heads + head) * width + latent;
        std::memcpy(to, s.q.get() + row * heads * q_head + head * q_head + nope, rope * sizeof(float));
        kernels::rope(to, cosine, sine, rope / 2);
      }
      float* kv = s.kv.get() + row * width;
      kernels::rope(kv + latent, cosine, sine, rope / 2);
      std::byte* block = pool_.at(index, part.blocks[position / block_tokens_]);
      kernels::narrow(kv, cache_, block + position % block_tokens_ * row_bytes, width);
    }
  }

  row = 0;
  for (const ForwardPart& part : parts_) {
    const std::size_t positions = part.first_position + part.tokens.size();
    s.blocks.clear();
    for (std::size_t block = 0; block * block_tokens_ < positions; ++block) {
      s.blocks.push_back(pool_.at(index, part.blocks[block]));
    }
    kernels_.attention({.q = s.query.get() + row * heads * width,
                        .out = s.attended.get() + row * heads * latent,
                        .blocks = s.blocks.data(),
                        .block_tokens = block_tokens_,
                        .format = cache_,
                        .rows = part.tokens.size(),
                        .heads = heads,
                        .latent = latent,
                        .rope = rope,
                        .first_position = part.first_position,
                        .scale = scale_,
                        .scratch = s.attention.get()});
    row += part.tokens.size();
  }
  const std::size_t v_head = shape_.v_head;
  for (std::size_t head = 0; head < heads; ++head) {
    multiply(s.attended.get() + head * latent, heads * latent, layer.value[head],
             s.value.get() + head * v_head, heads * v_head, rows_);
  }
  multiply(s.value.get(), heads * v_head, layer.output, s.out.get(), hidden, rows_);
}

void CpuForward::dense(const Mlp& mlp, const float* x, std::size_t rows, float* out) {
  Scratch& s = *scratch_;
  const std::size_t width = mlp.gate.n;
  multiply(x, mlp.gate.k, mlp.gate, s.gate.get(), width, rows);
  multiply(x, mlp.up.k, mlp.up, s.up.get(), width, rows);
  kernels_.silu_mul(s.gate.get(), s.up.get(), s.gate.get(), rows * width);
  multiply(s.gate.get(), width, mlp.down, out, mlp.down.n, rows);
}

// normed -> out.  The shared experts come first, then each row's experts in ascending order, whatever other
// rows chose.
void CpuForward::experts(const CpuLayer& layer) {
  Scratch& s = *scratch_;
  const std::size_t hidden = shape_.hidden, count = shape_.experts, per_row = shape_.experts_per_token;
  multiply(s.normed.get(), hidden, layer.router, s.score.get(), count, rows_);
  kernels_.sigmoid(s.score.get(), s.score.get(), rows_ * count);
  for (std::size_t row = 0; row < rows_; ++row) {
    kernels::route({.score = s.score.get() + row * count,
                    .bias = layer.router_bias.data(),
                    .experts = count,
                    .groups = shape_.groups,
                    .groups_kept = shape_.groups_per_token,
                    .chosen = per_row,
                    .normalize = shape_.normalize_weights,
                    .scale = static_cast<float>(shape_.routed_scale)},
                   s.chosen.data() + row * per_row, s.weight.data() + row * per_row, s.route.get());
  }

  // Slots sorted by expert (a counting sort, which keeps rows in order).
  std::ranges::fill(s.expert_first, 0u);
  const std::size_t slots = rows_ * per_row;
  for (std::size_t slot = 0; slot < slots; ++slot) ++s.expert_first[s.chosen[slot] + 1];
  for (std::size_t expert = 0; expert < count; ++expert) s.expert_first[expert + 1] += s.expert_first[expert];
  for (std::size_t slot = 0; slot < slots; ++slot) {
    s.expert_slot[s.expert_first[s.chosen[slot]]++] = static_cast<std::uint32_t>(slot);
  }

  if (layer.mlp.gate.n > 0) {
    dense(layer.mlp, s.normed.get(), rows_, s.out.get());
  } else {
    std::fill_n(s.out.get(), rows_ * hidden, 0.0f);
  }
  // Filling moved each start to the start of the next expert.
  std::size_t first = 0;
  for (std::size_t expert = 0; expert < count; ++expert) {
    const std::size_t last = s.expert_first[expert];
    // Rows that chose this expert; at most one slot of a row, unless its scores are NaN.
    for (std::size_t done = first; done < last;) {
      const std::size_t rows = std::min<std::size_t>(last - done, rows_);
      for (std::size_t i = 0; i < rows; ++i) {
        const std::size_t row = s.expert_slot[done + i] / per_row;
        std::memcpy(s.gathered.get() + i * hidden, s.normed.get() + row * hidden, hidden * sizeof(float));
      }
      dense(layer.experts[expert], s.gathered.get(), rows, s.expert_out.get());
      for (std::size_t i = 0; i < rows; ++i) {
        const std::size_t slot = s.expert_slot[done + i];
        add_scaled(s.out.get() + slot / per_row * hidden, s.expert_out.get() + i * hidden, s.weight[slot],
                   hidden);
      }
      done += rows;
    }
    first = last;
  }
}

void CpuForward::logits(const std::vector<Row>& rows,
                        const std::function<void(const Row&, std::span<const float>)>& done) {
  Scratch& s = *scratch_;
  const std::size_t hidden = shape_.hidden;
  std::vector<std::size_t> part_first;
  std::size_t sum = 0;
  for (const ForwardPart& part : parts_) {
    part_first.push_back(sum);
    sum += part.tokens.size();
  }
  for (std::size_t first = 0; first < rows.size(); first += head_rows_max) {
    const std::size_t count = std::min(head_rows_max, rows.size() - first);
    for (std::size_t i = 0; i < count; ++i) {
      const Row& row = rows[first + i];
      DI_ASSERT(row.part < parts_.size() && row.row < parts_[row.part].tokens.size());
      std::memcpy(s.final_row.get() + i * hidden, s.x.get() + (part_first[row.part] + row.row) * hidden,
                  hidden * sizeof(float));
    }
    kernels_.rmsnorm(s.final_row.get(), hidden, weights_.norm.data(), eps_, s.final_row.get(), hidden, count,
                     hidden);
    multiply(s.final_row.get(), hidden, weights_.head, s.logits.get(), shape_.vocab, count);
    for (std::size_t i = 0; i < count; ++i)
      done(rows[first + i], {s.logits.get() + i * shape_.vocab, shape_.vocab});
  }
}

}  // namespace di::engine
