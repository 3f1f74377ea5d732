#!/usr/bin/python3
"""The DeepSeek-V3 architecture in plain torch: the truth the engine is compared with.

It is written to be read next to the engine, not to be fast: attention is in the naive form (keys and values are
expanded from the cache row for every position), experts are a loop.  The engine uses the absorbed form over pages, so
that the two share no shortcut.  The same module trains the demo model.

Module attributes carry the published Hugging Face names, so `state_dict()` keys are the tensor names of a checkpoint.

Conventions that a reader of papers cannot guess:

  RoPE      rotates adjacent pairs (2i, 2i+1).  The checkpoint's weights are in that order.
  YaRN      is on when rope_scaling is present and max_position_embeddings > original_max_position_embeddings; then
            it holds for every position, also the first.  Per pair i the frequency is a blend of the plain one and the
            one divided by `factor`; the blend is a linear ramp over the pair index between the two pairs that make
            beta_fast and beta_slow turns over the original length.  The softmax scale is multiplied by
            (0.1 * mscale_all_dim * ln(factor) + 1)^2.  mscale must equal mscale_all_dim, as in V3: otherwise
            the rotation itself would be scaled, which is refused here.
  Router    sigmoid scores; the bias takes part in choosing only.  A group's score is the sum of its two best biased
            scores; experts of groups not chosen cannot be chosen.  Weights are the unbiased scores, divided by their
            sum when norm_topk_prob (also for one expert), times routed_scaling_factor.
  Norms     all use rms_norm_eps, also those of the latents.
  Cache     one row per position and layer: the latent after its norm, then the key's rotated part.
"""

import json
import math
import os
import struct

import numpy
import torch
from torch import nn
import torch.nn.functional as F


class ConfigError(Exception):
    """A config.json that this file does not describe."""


class Config:
    """The keys of config.json that change the result; everything else is ignored."""

    REQUIRED = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
        "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace",
        "max_position_embeddings",
    )
    DEFAULTS = {
        "q_lora_rank": None, "moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None,
    }
    FIXED = {
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False,
    }

    def __init__(self, values):
        for key in self.REQUIRED:
            if key not in values:
                raise ConfigError(f"config.json has no {key}")
            setattr(self, key, values[key])
        for key, default in self.DEFAULTS.items():
            setattr(self, key, values.get(key, default))
        for key, only in self.FIXED.items():
            if values.get(key, only) != only:
                raise ConfigError(f"{key} must be {only!r}, is {values[key]!r}")
        if self.qk_rope_head_dim % 2:
            raise ConfigError("qk_rope_head_dim must be even")
        if self.n_routed_experts % self.n_group or self.n_routed_experts // self.n_group < min(2, self.n_group):
            raise ConfigError("n_group must divide n_routed_experts into groups of at least two")
        allowed = self.n_routed_experts // self.n_group * self.topk_group
        if not 0 < self.topk_group <= self.n_group or not 0 < self.num_experts_per_tok <= allowed:
            raise ConfigError("topk_group or num_experts_per_tok out of range")
        self.yarn = None
        if self.rope_scaling is not None:
            scaling = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
            scaling.update(self.rope_scaling)
            if scaling.get("type", scaling.get("rope_type")) != "yarn":
                raise ConfigError("rope_scaling.type must be \"yarn\"")
            if scaling["mscale"] != scaling["mscale_all_dim"]:
                raise ConfigError("rope_scaling.mscale must equal mscale_all_dim")
            if self.max_position_embeddings > scaling["original_max_position_embeddings"]:
                self.yarn = scaling

    @staticmethod
    def load(path):
        with open(path, encoding="utf-8") as file:
            return Config(json.load(file))

    def layer_is_dense(self, index):
        return index < self.first_k_dense_replace or index % self.moe_layer_freq != 0

    def cache_width(self):
        return self.kv_lora_rank + self.qk_rope_head_dim


def rope_frequencies(config):
    """Radians per position, one for each adjacent pair: [qk_rope_head_dim / 2], float64."""
    dim = config.qk_rope_head_dim
    plain = config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if config.yarn is None:
        return plain
    length = config.yarn["original_max_position_embeddings"]

    def pair_with_turns(turns):
        # Solves length * theta^(-2i/dim) = 2 pi turns for i.
        return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(config.rope_theta))

    # The clamp to dim - 1, though there are only dim / 2 pairs, is the published behaviour and moves the slope.
    first = max(math.floor(pair_with_turns(config.yarn["beta_fast"])), 0)
    last = min(math.ceil(pair_with_turns(config.yarn["beta_slow"])), dim - 1)
    span = last - first if last != first else 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float64) - first) / span).clamp(0, 1)
    return plain * (1 - slow) + plain / config.yarn["factor"] * slow


def softmax_scale(config):
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if config.yarn is not None:
        scale *= (0.1 * config.yarn["mscale_all_dim"] * math.log(config.yarn["factor"]) + 1.0) ** 2
    return scale


def rotate_pairs(x, angles):
    """x [..., T, H, R] or [..., T, R] with angles [T, R/2]; the position axis is found by x's rank."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if x.dim() == 4:
        cos, sin = cos[:, None, :], sin[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def round_bf16(x):
    """To the nearest BF16 value, ties to even, kept in x's own type."""
    return x.float().bfloat16().to(x.dtype)


class Trace:
    """What one forward pass saw, for tests: cache rows by layer, the smallest router margin and expert counts."""

    def __init__(self):
        self.kv = {}              # layer -> [B, T, cache_width], as attention read them
        self.router_margin = None  # [B, T]: smallest gap over layers, groups and experts
        self.expert_tokens = {}   # layer -> [n_routed_experts]

    def note_margin(self, margin):
        self.router_margin = margin if self.router_margin is None else torch.minimum(self.router_margin, margin)


class RmsNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def projection(width_in, width_out):
    return nn.Linear(width_in, width_out, bias=False)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        heads = config.num_attention_heads
        q_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        if config.q_lora_rank is None:
            self.q_proj = projection(config.hidden_size, q_width)
        else:
            self.q_a_proj = projection(config.hidden_size, config.q_lora_rank)
            self.q_a_layernorm = RmsNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = projection(config.q_lora_rank, q_width)
        self.kv_a_proj_with_mqa = projection(config.hidden_size, config.cache_width())
        self.kv_a_layernorm = RmsNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = projection(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = projection(heads * config.v_head_dim, config.hidden_size)
        self.scale = softmax_scale(config)

    def forward(self, x, angles, past, cache_bf16):
        """x [B, T, hidden], angles [T, rope/2], past [B, P, cache_width] or None.

        Returns the output and all cache rows [B, P + T, cache_width]."""
        config = self.config
        batch, tokens, _ = x.shape
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim

        if config.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, tokens, heads, nope + rope)
        q_nope, q_rope = q.split((nope, rope), dim=-1)
        q_rope = rotate_pairs(q_rope, angles)

        latent, k_rope = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, rope), dim=-1)
        rows = torch.cat((self.kv_a_layernorm(latent), rotate_pairs(k_rope, angles)), dim=-1)
        if cache_bf16:
            rows = round_bf16(rows)
        if past is not None:
            rows = torch.cat((past, rows), dim=1)

        # From here on only the cache rows are read, as after a hit or a hand-over.
        latent, k_rope = rows.split((config.kv_lora_rank, rope), dim=-1)
        expanded = self.kv_b_proj(latent).view(batch, rows.shape[1], heads, nope + config.v_head_dim)
        k_nope, v = expanded.split((nope, config.v_head_dim), dim=-1)
        scores = torch.einsum("bshd,bthd->bhst", q_nope, k_nope) + torch.einsum("bshd,btd->bhst", q_rope, k_rope)
        scores = scores * self.scale
        future = torch.ones(tokens, rows.shape[1], dtype=torch.bool).triu_(1 + rows.shape[1] - tokens)
        scores = scores.masked_fill(future, float("-inf"))
        out = torch.einsum("bhst,bthd->bshd", scores.softmax(dim=-1), v)
        return self.o_proj(out.flatten(2)), rows


class Mlp(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.gate_proj = projection(hidden, width)
        self.up_proj = projection(hidden, width)
        self.down_proj = projection(width, hidden)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.n_routed_experts), requires_grad=False)

    def forward(self, x):
        """x [N, hidden].  Returns chosen experts [N, k], their weights [N, k] and the margin of the choice [N]."""
        config = self.config
        scores = F.linear(x, self.weight).sigmoid()
        biased = scores.detach() + self.e_score_correction_bias
        margin = torch.full(x.shape[:1], float("inf"), dtype=x.dtype)
        if config.n_group > 1:
            grouped = biased.view(x.shape[0], config.n_group, -1)
            group_score = grouped.topk(2, dim=-1).values.sum(-1)
            ranked, order = group_score.sort(dim=-1, descending=True)
            if config.topk_group < config.n_group:
                margin = ranked[:, config.topk_group - 1] - ranked[:, config.topk_group]
            open_group = torch.zeros_like(group_score, dtype=torch.bool)
            open_group.scatter_(1, order[:, :config.topk_group], True)
            biased = grouped.masked_fill(~open_group[:, :, None], float("-inf")).flatten(1)
        ranked, order = biased.sort(dim=-1, descending=True)
        chosen = order[:, :config.num_experts_per_tok]
        if config.num_experts_per_tok < config.n_routed_experts:
            # The first one left out is -inf when every expert of the open groups is chosen: then the gap is infinite.
            gap = ranked[:, config.num_experts_per_tok - 1] - ranked[:, config.num_experts_per_tok]
            margin = torch.minimum(margin, gap)
        weights = scores.gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights * config.routed_scaling_factor, margin


class Moe(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = Router(config)
        self.experts = nn.ModuleList(
            Mlp(config.hidden_size, config.moe_intermediate_size) for _ in range(config.n_routed_experts))
        self.shared_experts = Mlp(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x, trace, layer):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        chosen, weights, margin = self.gate(x)
        if trace is not None:
            trace.note_margin(margin.view(shape[:2]))
            trace.expert_tokens[layer] = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        out = self.shared_experts(x)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            if row.numel():
                out = out.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return out.view(shape)


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.index = index
        self.dense = config.layer_is_dense(index)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size) if self.dense else Moe(config)

    def forward(self, x, angles, past, cache_bf16, trace):
        out, rows = self.self_attn(self.input_layernorm(x), angles, past, cache_bf16)
        x = x + out
        normed = self.post_attention_layernorm(x)
        x = x + (self.mlp(normed) if self.dense else self.mlp(normed, trace, self.index))
        return x, rows


class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = projection(config.hidden_size, config.vocab_size)
        self.frequencies = rope_frequencies(config)

    def forward(self, tokens, past=None, cache_bf16=False, trace=None):
        """tokens [B, T]; past = list of cache rows by layer, or None.

        Returns logits [B, T, vocab] and the list of all cache rows by layer, to be given back as `past`."""
        start = 0 if past is None else past[0].shape[1]
        positions = torch.arange(start, start + tokens.shape[1], dtype=torch.float64)
        angles = positions[:, None] * self.frequencies[None, :]
        x = self.model.embed_tokens(tokens)
        cache = []
        for index, layer in enumerate(self.model.layers):
            x, rows = layer(x, angles, None if past is None else past[index], cache_bf16, trace)
            cache.append(rows)
            if trace is not None:
                trace.kv[index] = rows
        return self.lm_head(self.model.norm(x)), cache

    @torch.no_grad()
    def generate(self, prompt, tokens_max, stop_ids, cache_bf16=True):
        """Greedy continuation of a list of token ids; the stop token is not part of the result."""
        out = []
        logits, cache = self(torch.tensor([prompt]), cache_bf16=cache_bf16)
        while len(out) < tokens_max:
            token = int(logits[0, -1].argmax())
            if token in stop_ids:
                break
            out.append(token)
            logits, cache = self(torch.tensor([[token]]), past=cache, cache_bf16=cache_bf16)
        return out

    @staticmethod
    def load(folder):
        model = Model(Config.load(os.path.join(folder, "config.json")))
        model.load_state_dict({name: tensor.float() for name, tensor in checkpoint_read(folder).items()})
        return model.eval()


# safetensors: 8 bytes little-endian header length, a JSON object of {name: {dtype, shape, data_offsets}}, raw bytes.
# Offsets count from the end of the header.  The header is padded with spaces so that the data starts at a multiple of
# eight.

def safetensors_write(path, tensors, metadata=None):
    """tensors: {name: float32, float64 (stored as F32) or bfloat16 tensor}.

    F32 tensors come first, as in Hugging Face's writer, so that each lies at a multiple of its element size."""
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1].dtype == torch.bfloat16))
    header = {}
    if metadata:
        header["__metadata__"] = metadata
    blobs, offset = [], 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:
            dtype, blob = "BF16", tensor.view(torch.int16).numpy().astype("<i2").tobytes()
        else:
            dtype, blob = "F32", tensor.float().numpy().astype("<f4").tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for blob in blobs:
            file.write(blob)


def safetensors_read(path):
    with open(path, "rb") as file:
        data = file.read()
    header_bytes = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + header_bytes])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "F32":
            flat = torch.from_numpy(numpy.frombuffer(data[begin:end], dtype="<f4").copy())
        elif entry["dtype"] == "BF16":
            flat = torch.from_numpy(numpy.frombuffer(data[begin:end], dtype="<i2").copy()).view(torch.bfloat16)
        else:
            raise ValueError(f"{path}: {name}: dtype {entry['dtype']}")
        tensors[name] = flat.view(entry["shape"])
    return tensors


def checkpoint_write(folder, tensors, shard_count=1):
    """One model.safetensors, or shard_count files of about equal bytes and model.safetensors.index.json."""
    metadata = {"format": "pt"}
    if shard_count == 1:
        safetensors_write(os.path.join(folder, "model.safetensors"), tensors, metadata)
        return
    total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    shards, written_bytes = [{} for _ in range(shard_count)], 0
    for name, tensor in tensors.items():
        shards[min(written_bytes * shard_count // total_bytes, shard_count - 1)][name] = tensor
        written_bytes += tensor.numel() * tensor.element_size()
    weight_map = {}
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{shard_count:05d}.safetensors"
        safetensors_write(os.path.join(folder, file_name), shard, metadata)
        weight_map.update({name: file_name for name in shard})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, file, indent=2)
        file.write("\n")


def checkpoint_read(folder):
    index_path = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index_path):
        return safetensors_read(os.path.join(folder, "model.safetensors"))
    with open(index_path, encoding="utf-8") as file:
        weight_map = json.load(file)["weight_map"]
    tensors = {}
    for file_name in sorted(set(weight_map.values())):
        tensors.update(safetensors_read(os.path.join(folder, file_name)))
    return {name: tensors[name] for name in weight_map}
