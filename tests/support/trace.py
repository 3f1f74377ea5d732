"""Requests with the shape of a recorded trace: which prefixes they share, how long prompts and answers are, a sixteenth of
it.  Recorded ones are those of the Mooncake project (`hash_ids`: an id for each block of a prompt, equal for equal
prefixes), read where DI_TRACE names a file; generated ones have the same shape.
"""

import json
import os
import random

from fleet import words

# A block of a trace has 512 tokens, and here as many as a block of the demo model.
BLOCK_TOKENS = 32
SCALE = 512 // BLOCK_TOKENS


def recorded(count):
    """The first requests of the file that DI_TRACE names; none without it."""
    path = os.environ.get("DI_TRACE")
    if not path:
        return None
    with open(path) as file:
        return [json.loads(line) for line, _ in zip(file, range(count))]


def generated(count, seed):
    """Conversations that begin with the same block; half of the requests continue one of the last.  Lengths as in the
    conversation trace: a median prompt of 15 new blocks, a tenth with more than 50, answers of a few hundred tokens."""
    rng = random.Random(seed)
    rows, open_ones, fresh = [], [], 1
    for _ in range(count):
        before = [0]
        if open_ones and rng.random() < 0.5:
            before = open_ones.pop(rng.randrange(len(open_ones)))
        new = max(1, min(200, round(rng.lognormvariate(2.3, 1.0))))
        ids = before + list(range(fresh, fresh + new))
        fresh += new
        open_ones = [*open_ones, ids][-16:]
        rows.append({"input_length": 512 * len(ids) - rng.randrange(512), "output_length": rng.randint(3, 800), "hash_ids": ids})
    return rows


def prompt_of(row):
    """Text of which as many blocks are equal as the trace says."""
    return " ".join(words(BLOCK_TOKENS, seed=block) for block in row["hash_ids"])


def answer_tokens(row):
    return max(1, row["output_length"] // SCALE)
