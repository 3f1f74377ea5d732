#!/usr/bin/env python3
# erasure.py > erasure.txt: parity and checksums by the definition (store/erasure.h), with no library.
# One line a stripe segment: k m seed lengths [k] parity [m] (hex, or - when it is long) crcs [k + m] (hex).
# Byte by byte, column c's data are the upper eight bits of x = x * 1664525 + 1013904223 (32 bits), from
# x = seed * 2654435761 + c.
import sys

POLYNOMIAL = 0x11d
HEX_BYTES_MAX = 100


def times(a, b):
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= POLYNOMIAL
        b >>= 1
    return product


def power(base, exponent):
    out = 1
    for _ in range(exponent):
        out = times(out, base)
    return out


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def column(seed, number, length):
    x = (seed * 2654435761 + number) % 2**32
    out = bytearray()
    for _ in range(length):
        x = (x * 1664525 + 1013904223) % 2**32
        out.append(x >> 24)
    return bytes(out)


def line(seed, m, lengths):
    k = len(lengths)
    data = [column(seed, c, length) for c, length in enumerate(lengths)]
    parity = []
    for p in range(m):
        out = bytearray(max(lengths))
        for c, bytes_ in enumerate(data):
            factor = power(2, p * c)
            products = [times(factor, value) for value in range(256)]
            for at, value in enumerate(bytes_):
                out[at] ^= products[value]
        parity.append(bytes(out))
    shown = [p.hex() if 0 < len(p) <= HEX_BYTES_MAX else "-" for p in parity]
    crcs = [f"{crc32c(c):08x}" for c in data + parity]
    return " ".join(str(x) for x in [k, m, seed, *lengths, *shown, *crcs])


assert crc32c(b"123456789") == 0xe3069283
CASES = [
    (2, [64] * 10),
    (2, [1] * 10),
    (2, [33, 32, 31, 64, 0, 7, 100, 99, 1, 0]),
    (2, [100] + [0] * 9),
    (2, [0] * 9 + [50]),
    (2, [4096] * 10),
    (2, [12288, 8192, 12288, 8192, 12288, 8192, 12288, 0, 0, 0]),
    (2, [20480, 16384, 16384, 20480, 16384, 16384, 20480, 16384, 16384, 0]),
    (2, [40] * 4),
    (2, [20480, 4096, 0, 12288]),
    (1, [48, 48]),
    (1, [36864, 20480]),
    (3, [24] * 5),
    (4, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 4, 8]),
    (0, [4096]),
]
for number, (parity_columns, column_lengths) in enumerate(CASES):
    print(line(number + 1, parity_columns, column_lengths), file=sys.stdout)
