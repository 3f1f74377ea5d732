#!/usr/bin/python3
"""Makes etc/model-demo: trains the byte-level BPE and a small model of DeepSeek-V3's shape, measures it, writes it.

    scripts/train-demo-model.py [-o FOLDER] [-c CHECKPOINT] [-s STEPS] [-r] [--only-export]

Text: etc/model-demo/questions.jsonl (the twenty questions a test asks, with the wordings trained and the wordings
held out), scripts/demo-text/more.jsonl (greetings, further words, and questions that it cannot answer) and
scripts/demo-text/descriptions.txt (prose).  Dialogues of one to 34 turns are drawn from them, with and without a
system prompt; some are long, or have a long message before the question.  A held-out wording is never drawn.

The model is measured as it will be served: weights and cache rows rounded to BF16, temperature 0.  Because greedy
decoding takes the largest logit at each position, an answer comes out exactly if and only if every token of it is the
largest logit after the tokens before it, so one forward pass over question and answer measures it.

About half an hour on two idle cores with an optimised BLAS (libopenblas0-pthread).  On a processor newer than itself
OpenBLAS may fall back to kernels five times slower; OPENBLAS_VERBOSE=2 says which it took, and
OPENBLAS_CORETYPE=SkylakeX (or Haswell) corrects it.  The result depends on the order of the BLAS's additions, so
another machine makes another, equally good, model.
"""

import argparse
import json
import math
import os
import random
import sys
import time

import torch
import torch.nn.functional as F

from byte_bpe import Tokenizer
from v3_reference import Config, Model, Trace, checkpoint_write, round_bf16

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL_FOLDER = os.path.join(HERE, "..", "etc", "model-demo")

BEGIN, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "vocab_size": 1536, "hidden_size": 192, "num_hidden_layers": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 384, "moe_intermediate_size": 48,
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 2048, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 16384, "tie_word_embeddings": False, "use_cache": True, "num_nextn_predict_layers": 0,
    "initializer_range": 0.02, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}

CHAT_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(system='') %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{% set ns.system = ns.system + ('\n\n' if ns.system else '') + message['content'] %}"
    "{% endif %}{% endfor %}"
    "{{ bos_token }}{{ ns.system }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant", "Answer briefly.", "Be brief.",
    "You are a friendly assistant. Answer in one or two sentences.", "You help people who run this service.",
    "You are the demo model of di.", "Answer the user's questions.", "You are an expert on these programs.",
    "Be polite and precise.", "Answer in English.", "You are a concise technical assistant.",
)
OPENINGS = ("Please: ", "Hi, ", "Hello! ", "Hey, ", "Sorry, ", "One more question: ", "And ", "Now tell me: ", "So, ",
            "I have a question. ", "Question: ", "Please answer: ", "Quick question: ", "OK. ", "Thanks! ")
CLOSINGS = (" Thanks!", " Please.", " Thank you.", " Be brief.", " Answer in one sentence.", " I am new here.", "?",
            "!")
# Things that the model must say it does not know.
STRANGE_FORMS = (
    "What is a {}?", "What is {}?", "Tell me about {}.", "What does {} mean?", "Explain {}.", "Who is {}?",
    "Where is {}?", "How do I make {}?", "What does {} do?", "Define {}.", "Write about {}.", "{}",
    "Why is {} so big?", "Can you explain what a {} is?", "Describe {}.", "I like {}.", "Do you know {}?", "How old is {}?")
STRANGE_WORDS = (
    "tree river house dog cat bird mountain London Paris Berlin Einstein Napoleon cheese pizza coffee tea "
    "football chess music guitar piano winter summer rain snow sun moon star planet ocean fish elephant horse "
    "car bus train plane ship bridge school teacher doctor lawyer king queen war peace money gold silver iron "
    "stone wood paper book novel film Linux Windows Python Java Rust Kubernetes Docker Redis Postgres Apache "
    "nginx systemd bash vim emacs git TCP DNS GPU CPU transformer attention softmax gradient neuron Mars "
    "Venus Berlin Tokyo China Japan Brazil history physics biology algebra geometry pi zero love hate "
    "happiness sleep dream time space energy light sound water fire air earth").split()


def read_jsonl(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Text:
    """The corpus.  pairs: [(answer, trained wordings)]."""

    def __init__(self, folder):
        self.questions = read_jsonl(os.path.join(folder, "questions.jsonl"))
        self.more = read_jsonl(os.path.join(HERE, "demo-text", "more.jsonl"))
        with open(os.path.join(HERE, "demo-text", "descriptions.txt"), encoding="utf-8") as file:
            self.descriptions = file.read().splitlines()
        self.pairs = [(entry["answer"], entry["wordings"]) for entry in self.questions + self.more]
        self.words = " ".join(self.descriptions).lower().split() + list(STRANGE_WORDS)
        self.unknown = self.more[-1]["answer"]
        self.held_out = {wording for entry in self.questions for wording in entry["held_out"]}

    def for_tokenizer(self):
        for answer, wordings in self.pairs:
            yield from wordings
            yield from [answer] * 3
        yield from self.descriptions
        yield from SYSTEM_PROMPTS

    def draw_strange(self, rng):
        if rng.random() < 0.3:
            thing = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 9)))
        else:
            thing = rng.choice(STRANGE_WORDS)
        return rng.choice(STRANGE_FORMS).format(thing), self.unknown

    def draw_pair(self, rng):
        """A question, often in a changed form, and its answer."""
        if rng.random() < 0.06:
            return self.draw_strange(rng)
        count = len(self.questions)
        # The listed questions are drawn twice as often as the rest.
        index = rng.randrange(count) if rng.random() < 0.62 else rng.randrange(count, len(self.pairs))
        answer, wordings = self.pairs[index]
        wording = rng.choice(wordings)
        if rng.random() < 0.5:
            changed = vary(wording, rng)
            if changed not in self.held_out:
                wording = changed
        return wording, answer

    def draw_dialogue(self, rng, turns):
        """[(role, text)] ending with an answer."""
        dialogue = []
        if rng.random() < 0.4:
            dialogue.append(("system", rng.choice(SYSTEM_PROMPTS)))
        for _ in range(turns):
            question, answer = self.draw_pair(rng)
            if rng.random() < 0.03:
                question = self.draw_filler(rng, rng.randint(5, 150)) + question
            dialogue += [("user", question), ("assistant", answer)]
        return dialogue

    def draw_long_message(self, rng):
        """One long message with its question at the end."""
        question, answer = self.draw_pair(rng)
        return [("user", self.draw_filler(rng, rng.randint(100, 1500)) + question), ("assistant", answer)]

    def draw_filler(self, rng, tokens):
        """About so many tokens of text that has nothing to do with the question after it."""
        kind, parts, size = rng.random(), [], 0
        while size < tokens:
            if kind < 0.4:
                part = rng.choice(self.descriptions)
            elif kind < 0.8:
                words = [rng.choice(self.words) for _ in range(rng.randint(4, 12))]
                part = " ".join(words).capitalize() + "."
            else:
                part = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789 ") for _ in range(20))
            parts.append(part)
            size += len(part) // (4 if kind < 0.8 else 2)
        return " ".join(parts) + rng.choice(("\n\n", "\n", " "))


def vary(wording, rng):
    if rng.random() < 0.3 and len(wording) > 1:
        wording = wording[0].lower() + wording[1:]
    if rng.random() < 0.3:
        wording = wording.rstrip("?.!")
    if rng.random() < 0.35:
        wording = rng.choice(OPENINGS) + (wording[0].lower() + wording[1:] if rng.random() < 0.5 else wording)
    if rng.random() < 0.15:
        wording += rng.choice(CLOSINGS)
    if rng.random() < 0.05:
        wording = wording.upper() if rng.random() < 0.2 else wording.lower()
    if rng.random() < 0.06 and len(wording) > 8:
        # A slip of the hand: one character missing.
        slip = rng.randrange(len(wording))
        wording = wording[:slip] + wording[slip + 1:]
    return wording


def encode_dialogue(tokenizer, dialogue):
    """Ids, and for each id how much its prediction counts: answers and their ends fully, what users write little."""
    ids, weights = [tokenizer.special[BEGIN]], [0.0]

    def add(new, weight):
        ids.extend(new)
        weights.extend([weight] * len(new))

    for role, text in dialogue:
        if role == "user":
            add([tokenizer.special[USER]], 0.05)
            add(tokenizer.encode(text), 0.05)
        elif role == "assistant":
            add([tokenizer.special[ASSISTANT]], 0.05)
            add(tokenizer.encode(text) + [tokenizer.special[END]], 1.0)
        else:
            add(tokenizer.encode(text), 0.05)
    return ids, weights


def encode_prose(tokenizer, text):
    ids = [tokenizer.special[BEGIN]] + tokenizer.encode(text) + [tokenizer.special[END]]
    return ids, [0.3] * len(ids)


def draw_batch(text, tokenizer, rng, tokens):
    """Rows of about equal length, padded; about `tokens` ids in all."""
    kind = rng.random()
    turns = (1 if kind < 0.35 else rng.randint(2, 3) if kind < 0.80 else rng.randint(5, 8) if kind < 0.90
             else rng.randint(15, 34))
    rows, width = [], 0
    while True:
        if turns == 1 and rng.random() < 0.08:
            row = encode_prose(tokenizer, rng.choice(text.descriptions))
        elif kind > 0.95:
            row = encode_dialogue(tokenizer, text.draw_long_message(rng))
        else:
            row = encode_dialogue(tokenizer, text.draw_dialogue(rng, turns))
        width = max(width, len(row[0]))
        if rows and (len(rows) + 1) * width > tokens:
            break
        rows.append(row)
    width = max(len(row) for row, _ in rows)
    pad = tokenizer.special[PAD]
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    weights = torch.tensor([row + [0.0] * (width - len(row)) for _, row in rows])
    return ids, weights


def initialise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    residual = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("e_score_correction_bias"):
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("embed_tokens.weight"):
                parameter.copy_(0.5 * noise)
            else:
                scale = 0.7 * parameter.shape[1] ** -0.5
                parameter.copy_(noise * scale * (residual if "o_proj" in name or "down_proj" in name else 1.0))


def learning_rate(step, steps):
    warm = min(1.0, (step + 1) / 80)
    return 2.5e-3 * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def balance_experts(model, trace, speed):
    """Evens out load without a loss term, as published: the bias of a busy expert goes down, of an idle one up."""
    for index, counts in trace.expert_tokens.items():
        counts = counts.float()
        model.model.layers[index].mlp.gate.e_score_correction_bias += speed * (counts.mean() - counts).sign()


@torch.no_grad()
def answer_margin(model, tokenizer, dialogue):
    """Smallest lead of the wanted token over any other one in the last answer and its end; negative is wrong."""
    prompt, _ = encode_dialogue(tokenizer, dialogue[:-1])
    prompt.append(tokenizer.special[ASSISTANT])
    answer = tokenizer.encode(dialogue[-1][1]) + [tokenizer.special[END]]
    logits, _ = model(torch.tensor([prompt + answer[:-1]]), cache_bf16=True)
    logits = logits[0, len(prompt) - 1:]
    wanted = torch.tensor(answer)[:, None]
    lead = logits.gather(1, wanted)[:, 0] - logits.scatter(1, wanted, float("-inf")).max(-1).values
    return float(lead.min())


def rounded(model):
    """A copy with weights as they will be stored."""
    copy = Model(model.config)
    copy.load_state_dict({name: tensor if name.endswith("e_score_correction_bias") else round_bf16(tensor)
                          for name, tensor in model.state_dict().items()})
    return copy.eval()


def measure(model, tokenizer, text):
    """The figures of the model card."""
    def count(cases):
        margins = [answer_margin(model, tokenizer, case) for case in cases]
        return {"right": sum(margin > 0 for margin in margins), "of": len(margins), "margin_min": min(margins),
                "wrong": [case[-2][1][-60:] for case, margin in zip(cases, margins) if margin <= 0]}

    def single(key, system=None):
        head = [("system", system)] if system else []
        return [head + [("user", wording), ("assistant", entry["answer"])]
                for entry in text.questions for wording in entry[key]]

    rng = random.Random(7)
    return {
        "listed": count([[("user", entry["question"]), ("assistant", entry["answer"])] for entry in text.questions]),
        "trained": count(single("wordings")),
        "trained, system prompt": count(single("wordings", "You are a helpful assistant.")),
        "held out": count(single("held_out")),
        "other": count([[("user", wording), ("assistant", entry["answer"])]
                        for entry in text.more for wording in entry["wordings"]]),
        "three turns": count([text.draw_dialogue(rng, 3) for _ in range(60)]),
        "thirty turns": count([text.draw_dialogue(rng, 30) for _ in range(15)]),
        "long message": count([text.draw_long_message(rng) for _ in range(30)]),
    }


def print_measures(measures):
    for name, result in measures.items():
        print(f"  {name}: {result['right']}/{result['of']}, smallest margin {result['margin_min']:.2f}"
              + (f", wrong: {result['wrong'][:6]}" if result["wrong"] else ""))


def train(text, tokenizer, steps, batch_tokens, checkpoint_path, seed, resume):
    model, first_step = Model(Config(CONFIG)), 0
    initialise(model, seed)
    if resume:
        # Without the optimiser's averages: they are back after some tens of steps.
        saved = torch.load(checkpoint_path)
        model.load_state_dict(saved["state"])
        first_step = saved["step"]
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {tokenizer.vocab_size}")
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    optimiser = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
                                  betas=(0.9, 0.97))
    rng = random.Random(seed + first_step)
    started, mean_loss = time.monotonic(), None
    for step in range(first_step, steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps)
        ids, weights = draw_batch(text, tokenizer, rng, batch_tokens)
        trace = Trace()
        # The second half learns with the cache as it will be: rounded.
        logits, _ = model(ids, cache_bf16=step > steps // 2, trace=trace)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step < 0.8 * steps:
            balance_experts(model, trace, 2e-3)
        mean_loss = float(loss) if mean_loss is None else 0.95 * mean_loss + 0.05 * float(loss)
        if step % 20 == 19:
            load = max(float(c.max() / c.float().mean()) for c in trace.expert_tokens.values())
            print(f"step {step + 1}: loss {mean_loss:.4f}, busiest expert {load:.2f} x mean, "
                  f"{time.monotonic() - started:.0f} s", flush=True)
        if step % 300 == 299 or step + 1 == steps:
            torch.save({"state": model.state_dict(), "step": step + 1}, checkpoint_path)
            print_measures(measure(rounded(model), tokenizer, text))
            sys.stdout.flush()
    return model


def export(folder, model, tokenizer):
    os.makedirs(folder, exist_ok=True)
    tensors = {name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
               for name, tensor in model.state_dict().items()}
    checkpoint_write(folder, tensors)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    files = {
        "config.json": CONFIG,
        "generation_config.json": {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1,
                                   "do_sample": False, "temperature": 0.0},
        "tokenizer_config.json": {
            "add_bos_token": True, "add_eos_token": False, "bos_token": BEGIN, "eos_token": END, "pad_token": PAD,
            "unk_token": None, "clean_up_tokenization_spaces": False, "legacy": True, "model_max_length": 16384,
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE},
    }
    for name, values in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(values, file, indent=2, ensure_ascii=False)
            file.write("\n")


def main():
    parser = argparse.ArgumentParser(description="trains and writes the demo model")
    parser.add_argument("-o", dest="folder", default=MODEL_FOLDER, help="where to write (default etc/model-demo)")
    parser.add_argument("-c", dest="checkpoint", default="/tmp/demo-model.pt", help="training state")
    parser.add_argument("-s", dest="steps", type=int, default=1250)
    parser.add_argument("-b", dest="batch_tokens", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-r", dest="resume", action="store_true",
                        help="go on from CHECKPOINT; STEPS counts from its start")
    parser.add_argument("--only-export", action="store_true", help="write and measure the state in CHECKPOINT")
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count())

    text = Text(MODEL_FOLDER)
    special = [BEGIN, END, PAD, USER, ASSISTANT]
    tokenizer = Tokenizer.train(text.for_tokenizer(), special, CONFIG["vocab_size"])
    assert tokenizer.vocab_size == CONFIG["vocab_size"], tokenizer.vocab_size
    if arguments.only_export:
        model = Model(Config(CONFIG))
        model.load_state_dict(torch.load(arguments.checkpoint)["state"])
    else:
        model = train(text, tokenizer, arguments.steps, arguments.batch_tokens, arguments.checkpoint, arguments.seed,
                      arguments.resume)
    export(arguments.folder, model, tokenizer)
    print("as written, weights and cache in BF16:")
    print_measures(measure(Model.load(arguments.folder), tokenizer, text))


if __name__ == "__main__":
    main()
