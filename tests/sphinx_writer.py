"""Write a CMU Sphinx language model bit by bit, to test its reader.

The layout follows `ngram_model_trie_write_bin` of pocketsphinx.
"""
import math
import struct


def bits(number, width): return [number >> i & 1 for i in range(width)]


def packed(entries, widths):
    "Pack entries of numbers into bits, lowest first, padded to bytes and followed by 8 more bytes."
    row = []
    for entry in entries:
        for number, width in zip(entry, widths, strict=True): row += bits(number, width)
    row += [0]*(-len(row) % 8)
    return bytes(sum(bit << i for i, bit in enumerate(row[at:at + 8])) for at in range(0, len(row), 8)) + bytes(8)


def quantized(values):
    "A table of 65,536 numbers, starting with the distinct values, and the index of each value."
    table = sorted(set(values))
    return struct.pack('<65536f', *table, *[0]*(65536 - len(table))), {v: i for i, v in enumerate(table)}


def sphinx_file(grams, words=None, spare=0):
    """The bytes of a model. `grams` has per order n-grams (words with spaces) with log10 probability and backoff.

    `words` are in the order of their numbers, sorted by default. `spare` unreachable bigrams are also counted,
    as in the English model."""
    words = words or sorted(grams[0])
    order = len(grams)
    def log(x): return struct.unpack('f', struct.pack('f', x/math.log10(1.0001)))[0]
    # n-grams of each order from the last word to the first
    nodes = [{tuple(words.index(w) for w in reversed(gram.split())): tuple(map(log, values))
              for gram, values in level.items()} for level in grams]
    keys = [sorted(level) for level in nodes]
    counts = [len(k) for k in keys]
    if spare: counts[1] += spare
    def first_child(n, key): return sum(k[:n] < key for k in keys[n])

    head = b'Trie Language Model' + bytes([order]) + struct.pack(f'<{order}I', *counts)
    out = head + struct.pack('<i', 1)
    places = []
    for n in range(2, order + 1):
        table, prob = quantized(p for p, _ in nodes[n - 1].values())
        out += table
        backoff = {}
        if n < order:
            table, backoff = quantized(b for _, b in nodes[n - 1].values())
            out += table
        places.append((prob, backoff))
    for key in keys[0]: out += struct.pack('<ffI', *nodes[0][key], first_child(1, key))
    out += struct.pack('<ffI', 0, 0, len(keys[1]))
    for n, (prob, backoff) in enumerate(places, 2):
        entries = []
        widths = [counts[0].bit_length(), 16]
        for key in keys[n - 1]:
            p, b = nodes[n - 1][key]
            entries.append([key[-1], backoff[b], prob[p], first_child(n, key)] if n < order else [key[-1], prob[p]])
        if n < order:
            widths += [16, counts[n].bit_length()]
            entries.append([0, 0, 0, len(keys[n])])
        else: entries.append([0, 0])
        if n == 2 and spare: entries += [[0]*len(widths)]*spare
        out += packed(entries, widths)
    text = b''.join(w.encode() + b'\0' for w in words)
    return out + struct.pack('<I', len(text)) + text
