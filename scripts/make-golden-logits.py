#!/usr/bin/python3
"""Writes tests/golden/logits: random tiny models of the DeepSeek-V3 architecture, an input, the expected output.

    scripts/make-golden-logits.py [FOLDER]

Each case is a folder:
    config.json            Hugging Face keys
    model.safetensors      weights, or two shards and model.safetensors.index.json
    input.json             {"token_ids": [T]}
    expected.safetensors   F32: logits [T, vocab]; for each layer N, kv.N [T, kv_lora_rank + qk_rope_head_dim]: the
                           latent after its norm, then the rotated key; router_margin_min [1]

The expectation is for the causal forward pass over the whole input from position 0 with a float32 cache.  It is
computed in float64 from the stored (rounded) weights and rounded once at the end, so that the error an engine shows
is its own and the files do not depend on the BLAS of the machine.  The measure is the error per row,
max|a - b| / max|b|, and the limit 1e-4 in float32: see tests/golden/logits/README.md.

Inputs are drawn token by token so that every router decision, of groups and of experts, wins by more than 1e-3:
below that a correct engine may choose otherwise and nothing could be said about its numbers.

Checked by hand against the inference code DeepSeek published for V3 (inference/model.py at commit 9b4e978; on a CPU in
float32, with its kernel module stubbed, rms_norm supplied and the router bias added for small widths): the largest
error per row over all cases is 9e-6 in the logits, in its naive and its absorbed form, and 7e-6 in the cache rows.
moe-freq-no-norm is outside what that code can express and was not compared.

Each of these mistakes, made on purpose in the reference, moves some case's row by more than 1e-2: rotating halves,
each part of YaRN left out or always on, its ramp clamped at the last pair, no router bias, the bias also in the
weights, a group scored by its best expert alone, no group limit, no or undue normalisation, no scaling factor, a norm
left out, another epsilon, no shared expert.
"""

import json
import os
import shutil
import sys

import torch

from v3_reference import Config, Model, Trace, checkpoint_write, safetensors_write

SEED = 20240
MARGIN_MIN = 2e-3

BASE = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "float32",
    "vocab_size": 61, "hidden_size": 28, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": None, "kv_lora_rank": 20,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10, "intermediate_size": 26,
    "moe_intermediate_size": 7, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1,
}


def yarn(factor, original, beta_fast=32, beta_slow=1, mscale=1.0):
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": original, "beta_fast": beta_fast,
            "beta_slow": beta_slow, "mscale": mscale, "mscale_all_dim": mscale}


# name: (token count, shards, changes to BASE)
CASES = {
    "plain": (33, 1, {}),
    "one-token": (1, 1, {
        "hidden_size": 33, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 101, "q_lora_rank": 7}),
    "q-lora-groups": (70, 1, {
        "q_lora_rank": 18, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}),
    # The YaRN numbers of the published V3 configuration; with 8 pairs the ramp has inner points.
    "yarn-v3": (90, 1, {
        "vocab_size": 43, "q_lora_rank": 18, "qk_rope_head_dim": 16, "max_position_embeddings": 163840,
        "rope_scaling": yarn(40, 4096)}),
    "yarn-short-two-dense": (65, 1, {
        "vocab_size": 47, "num_hidden_layers": 4, "first_k_dense_replace": 2, "qk_rope_head_dim": 10,
        "rope_theta": 10.0, "n_routed_experts": 6, "n_group": 2, "topk_group": 1,
        "rope_scaling": yarn(4, 64, 8, 1, 0.707)}),
    # rope_scaling is present, and off: the longest position is no more than the original one.
    "yarn-off": (40, 1, {"max_position_embeddings": 64, "rope_scaling": yarn(8, 64, 4, 1), "num_hidden_layers": 2}),
    "all-moe": (64, 1, {
        "num_hidden_layers": 2, "first_k_dense_replace": 0, "n_routed_experts": 12, "n_group": 3, "topk_group": 2,
        "num_experts_per_tok": 4, "n_shared_experts": 2, "routed_scaling_factor": 1.7}),
    "bf16": (50, 1, {
        "torch_dtype": "bfloat16", "hidden_size": 37, "q_lora_rank": 17, "qk_rope_head_dim": 2, "kv_lora_rank": 13,
        "v_head_dim": 9, "moe_intermediate_size": 11}),
    "bf16-sharded": (75, 2, {
        "torch_dtype": "bfloat16", "hidden_size": 32, "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 8,
        "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 512, "rope_scaling": yarn(8, 64)}),
    # Every second layer is dense, the weights are not normalised, and the epsilon is large enough to be seen.
    "moe-freq-no-norm": (20, 1, {
        "num_hidden_layers": 3, "first_k_dense_replace": 0, "moe_layer_freq": 2, "norm_topk_prob": False,
        "rms_norm_eps": 1e-2}),
}


def random_model(config, generator, bf16):
    """Weights that leave no operation without effect: norms away from one, a router bias that changes choices."""
    model = Model(config)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            value = 0.1 * noise
        elif "norm" in name:
            value = 1.0 + 0.2 * noise
        elif name.endswith("embed_tokens.weight"):
            value = noise
        else:
            value = 1.5 * noise / tensor.shape[1] ** 0.5
        # The published checkpoints keep the router bias in F32 among BF16 weights.
        if bf16 and not name.endswith("e_score_correction_bias"):
            value = value.bfloat16()
        tensor.copy_(value)
    return model


def stored(model, bf16):
    return {name: tensor.clone() if not bf16 or name.endswith("e_score_correction_bias") else tensor.bfloat16()
            for name, tensor in model.state_dict().items()}


def draw_tokens(model, count, generator):
    """Extends the input by one token at a time, refusing those with a narrow router decision."""
    tokens, cache = [], None
    while len(tokens) < count:
        token = int(torch.randint(0, model.config.vocab_size, (1,), generator=generator))
        trace = Trace()
        _, extended = model(torch.tensor([[token]]), past=cache, trace=trace)
        if float(trace.router_margin.min()) > MARGIN_MIN:
            tokens.append(token)
            cache = extended
    return tokens


@torch.no_grad()
def write_case(folder, name, seed):
    token_count, shard_count, changes = CASES[name]
    values = dict(BASE, **changes)
    values["num_key_value_heads"] = values["num_attention_heads"]
    config, bf16 = Config(values), values["torch_dtype"] == "bfloat16"
    generator = torch.Generator().manual_seed(seed)
    model = random_model(config, generator, bf16).eval()
    weights = stored(model, bf16)
    model = model.double()
    tokens = draw_tokens(model, token_count, generator)
    trace = Trace()
    logits, _ = model(torch.tensor([tokens]), trace=trace)

    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(values, file, indent=2)
        file.write("\n")
    checkpoint_write(folder, weights, shard_count)
    with open(os.path.join(folder, "input.json"), "w", encoding="utf-8") as file:
        json.dump({"token_ids": tokens}, file)
        file.write("\n")
    expected = {"logits": logits[0]}
    expected.update({f"kv.{layer}": rows[0] for layer, rows in trace.kv.items()})
    expected["router_margin_min"] = trace.router_margin.min().reshape(1)
    safetensors_write(os.path.join(folder, "expected.safetensors"), expected)
    total_bytes = sum(entry.stat().st_size for entry in os.scandir(folder))
    print(f"{name}: {token_count} tokens, router margin {float(trace.router_margin.min()):.2e}, {total_bytes} bytes")


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "..", "tests", "golden", "logits")
    for index, name in enumerate(CASES):
        folder = os.path.join(root, name)
        shutil.rmtree(folder, ignore_errors=True)
        write_case(folder, name, SEED + index)


if __name__ == "__main__":
    main()
