"""A volume's file from outside, as di-volume(5) has it: which columns are in it, and hands that damage them.

Written from the manual, not with the daemon's code.  What a running daemon writes shows here at once: a page of the slot
table follows a put within 100 ms, so a reader waits until the table says what is expected (`wait_for`).
"""

import dataclasses
import os
import pathlib
import struct

RECORD = 64
SUPERBLOCK = 4096
ALIGN = 4096


@dataclasses.dataclass(frozen=True)
class Column:
    path: pathlib.Path
    offset: int          # of the slot
    slot_bytes: int
    header_bytes: int
    payload_bytes: int
    stripe: int
    column: int

    @property
    def name(self):
        return self.stripe, self.column

    @property
    def used_bytes(self):
        """Header and payload; behind them nothing means anything."""
        return self.header_bytes + self.payload_bytes


class Volume:
    def __init__(self, path):
        self.path = pathlib.Path(path)

    def columns(self):
        """The live slots, by the slot table, of which the header says the same."""
        out = []
        with open(self.path, "rb") as file:
            first = self.superblock(file)
            length, segment_bytes, segments, records = struct.unpack_from("<QQII", first, 48)
            segment_table, slot_table, segments_at = struct.unpack_from("<QQQ", first, 72)
            assert length == self.path.stat().st_size, (self.path, length)
            file.seek(segment_table)
            table = file.read(segments * RECORD)
            for segment in range(segments):
                bound, generation, slot_bytes, header_bytes = struct.unpack_from("<IIII", table, segment * RECORD + 4)
                if bound != 1:
                    continue
                count = min(records, segment_bytes // slot_bytes)
                file.seek(slot_table + segment * records * RECORD)
                rows = file.read(count * RECORD)
                for slot in range(count):
                    of, stripe, _, payload, column, live = struct.unpack_from("<IQQIHB", rows, slot * RECORD + 4)
                    if live != 1 or of != generation:
                        continue
                    offset = segments_at + segment * segment_bytes + slot * slot_bytes
                    out.append(Column(self.path, offset, slot_bytes, header_bytes, payload, stripe, column))
        return out

    @staticmethod
    def superblock(file):
        """The valid one with the higher sequence; here: one that begins as it should."""
        file.seek(0)
        pages = [file.read(SUPERBLOCK) for _ in range(2)]
        good = [page for page in pages if page[:8] == b"DIVOLUME"]
        return max(good, key=lambda page: struct.unpack_from("<Q", page, 32)[0])


def read(column):
    """Header and payload, as they are now."""
    with open(column.path, "rb") as file:
        file.seek(column.offset)
        return file.read(column.used_bytes)


def payload(column):
    return read(column)[column.header_bytes:]


def is_named(column):
    """Whether the header says what the slot table says."""
    head = read(column)[:column.header_bytes]
    return (head[:8] == b"DISLOT01" and struct.unpack_from("<Q", head, 24)[0] == column.offset and
            struct.unpack_from("<H", head, 60)[0] == column.column and
            struct.unpack_from("<Q", head, 64)[0] == column.stripe)


def write(column, at, data):
    """Into the slot, behind the daemon's back; through to the device."""
    with open(column.path, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, column.offset + at)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), column.offset, column.slot_bytes, os.POSIX_FADV_DONTNEED)


# What a disk does to what was written.  Each takes the slot, another one of the same length, and a generator of random
# numbers; it returns what it did, or None when nothing was changed that anybody could see.

def flip_payload(column, _, rng):
    return flip(column, rng.randrange(column.header_bytes, column.used_bytes), rng)


def flip_header(column, _, rng):
    return flip(column, rng.randrange(column.header_bytes), rng)


def flip(column, at, rng):
    byte = read(column)[at] ^ 1 << rng.randrange(8)
    write(column, at, bytes([byte]))
    return f"a bit of byte {at}"


def tear(column, other, rng):
    """One half is what it should be, the other is what was there before, or somebody else's."""
    half = column.used_bytes // 2 // ALIGN * ALIGN
    at, end = (half, column.used_bytes) if rng.random() < 0.5 else (0, half)
    mine = read(column)[at:end]
    theirs = read(other)[at:end] if rng.random() < 0.5 else b""
    return overwrite(column, at, mine, theirs.ljust(len(mine), b"\0"), "torn")


def misdirect(column, other, _):
    """The write of another slot went here, header and all."""
    mine = read(column)
    return overwrite(column, 0, mine, read(other).ljust(len(mine), b"\0")[:len(mine)], "another slot's write")


def misdirect_payload(column, other, _):
    """A part of another slot's write went here, 4 KiB or more, and missed the header."""
    mine = payload(column)
    theirs = payload(other).ljust(len(mine), b"\0")[:len(mine)]
    return overwrite(column, column.header_bytes, mine, theirs, "another slot's payload")


def overwrite(column, at, mine, theirs, what):
    if mine == theirs:
        return None
    write(column, at, theirs)
    return f"{what}: {len(theirs)} bytes at {at}"


DAMAGES = [flip_payload, flip_header, tear, misdirect, misdirect_payload]
