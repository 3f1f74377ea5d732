#!/usr/bin/env python3
# Computes the vectors of chain.jsonl from their inputs with nothing but hashlib, and compares.
# Run by hand after changing either: python3 tests/golden/kv/chain.py
import hashlib
import hmac
import json
import pathlib
import struct
import sys


def f(data):
    return struct.pack("<I", len(data)) + data


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def answer(v):
    salt = hmac.new(bytes.fromhex(v["secret"]),
                    f(b"DIKV0 salt") + f(v["domain"].encode()) + f(v["user_id"].encode()) + f(v["cache_salt"].encode()),
                    hashlib.sha256).digest()
    root = sha(f(b"DIKV0 root"), f(bytes.fromhex(v["fingerprint"])), f(bytes.fromhex(v["revision"])),
               f(v["adapter"].encode()), f(salt))
    if v["public"]:
        root = sha(f(b"DIKV0 private"), f(bytes.fromhex(v["public"])), f(salt))
    last, keys, size = root, [], v["block_tokens"]
    for block in range(len(v["tokens"]) // size):
        ids = v["tokens"][block * size:(block + 1) * size]
        images = [bytes.fromhex(d) for b, d in v["images"] if b == block]
        last = sha(f(b"DIKV0 block"), f(last), f(struct.pack("<%dI" % size, *ids)), struct.pack("<I", len(images)),
                   *[f(d) for d in images])
        keys.append(last.hex())
    return {"salt": salt.hex(), "root": root.hex(), "keys": keys}


def main():
    path = pathlib.Path(__file__).with_name("chain.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if "--write" in sys.argv:
        path.write_text("".join(json.dumps({**v, **answer(v)}) + "\n" for v in lines))
        return 0
    wrong = [v["name"] for v in lines if any(v.get(k) != x for k, x in answer(v).items())]
    print("wrong: " + ", ".join(wrong) if wrong else "%d vectors agree" % len(lines))
    return 1 if wrong else 0


sys.exit(main())
