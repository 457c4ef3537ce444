#!/usr/bin/env python3
"""A model of any shape with random weights and another model's tokenizer: what a pattern costs before one has the model.

    bench/random_model.py LIKE.gguf OUT.gguf [--layers L --heads H --kv-heads Hkv --head-dim d --embedding E
                          --feed-forward F --vocabulary V --context N]          (defaults: Llama-3.1-8B)

Matrices are bf16 windows, each at an offset of its own, into one sheet of random numbers of std 1/sqrt(E), so that the
file takes a gigabyte where the model takes sixteen; an engine that copies its weights, as device_cuda.cu does, has them
all apart. The vocabulary is filled up with tokens that no text has. LIKE.gguf may be cut behind its metadata. Standard
library only.
"""
import argparse
import os
import random
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
from make_random_gguf import TYPE_ID, floats, string, value  # noqa: E402

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of each type of metadata
DRAWN = (1 << 20) + 7  # numbers; the sheet repeats them, at another column in each row
STEP = 16 * 7919       # numbers between the windows of two matrices


def read(f, kind):
    """The next metadata value of a file: its bytes if a number, a str, or a list."""
    if kind == 8:
        return f.read(*struct.unpack("<Q", f.read(8))).decode()
    if kind != 9:
        return f.read(SIZES[kind])
    inner, n = struct.unpack("<IQ", f.read(12))
    return [read(f, inner) if inner == 8 else struct.unpack("<i", f.read(4))[0] for _ in range(n)]


def tokenizer(path, V):
    """Name to bytes of the keys of a tokenizer, with V tokens."""
    keys = {}
    with open(path, "rb") as f:
        n = struct.unpack("<4sIQQ", f.read(24))[3]
        for _ in range(n):
            name, kind = read(f, 8), struct.unpack("<I", f.read(4))[0]
            v = read(f, kind)
            if name == "tokenizer.ggml.tokens":
                v += [f"<|unused_{i}|>" for i in range(len(v), V)]
            if name == "tokenizer.ggml.token_type":
                v += [3] * (V - len(v))
            if name.startswith("tokenizer."):
                keys[name] = struct.pack("<I", kind) + v if isinstance(v, bytes) else value(v)
    return keys


def metadata(o):
    a = "llama."
    own = {
        "general.architecture": "llama", "general.name": f"random {o.layers}x{o.embedding}", "general.alignment": 32,
        a + "block_count": o.layers, a + "context_length": o.context, a + "embedding_length": o.embedding,
        a + "feed_forward_length": o.feed_forward, a + "attention.head_count": o.heads,
        a + "attention.head_count_kv": o.kv_heads, a + "attention.key_length": o.head_dim,
        a + "attention.value_length": o.head_dim, a + "attention.layer_norm_rms_epsilon": 1e-5,
        a + "rope.freq_base": 5e5, a + "rope.dimension_count": o.head_dim, a + "vocab_size": o.vocabulary,
    }
    return {k: value(v) for k, v in own.items()} | tokenizer(o.like, o.vocabulary)


def shapes(o):
    """Columns first."""
    E, F, q, kv = o.embedding, o.feed_forward, o.heads * o.head_dim, o.kv_heads * o.head_dim
    yield from (("token_embd.weight", (E, o.vocabulary)), ("output.weight", (E, o.vocabulary)),
                ("output_norm.weight", (E,)))
    for i in range(o.layers):
        for name, shape in (("attn_norm", (E,)), ("attn_q", (E, q)), ("attn_k", (E, kv)), ("attn_v", (E, kv)),
                            ("attn_output", (q, E)), ("ffn_norm", (E,)), ("ffn_gate", (E, F)), ("ffn_up", (E, F)),
                            ("ffn_down", (F, E))):
            yield f"blk.{i}.{name}.weight", shape


def write(o):
    kv, all_shapes = metadata(o), list(shapes(o))
    ones = struct.pack("<f", 1) * o.embedding  # all vectors, and then the sheet
    sheet = -(-len(ones) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(all_shapes), len(kv)) + b"".join(string(k) + v for k, v in kv.items())
    for i, (name, shape) in enumerate(all_shapes):
        kind, at = ("BF16", sheet + 2 * STEP * i) if len(shape) == 2 else ("F32", 0)
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPE_ID[kind], at)
    drawn = floats(random.Random(0), "BF16", DRAWN, 0, o.embedding**-0.5)
    most = max(shape[0] * shape[-1] for _, shape in all_shapes) + STEP * len(all_shapes)
    with open(o.out, "wb") as f:
        f.write(head + bytes(-len(head) % 32) + ones + bytes(sheet - len(ones)))
        for left in range(2 * most, 0, -len(drawn)):
            f.write(drawn[:left])


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("like"), p.add_argument("out")
    for name, default in (("layers", 32), ("heads", 32), ("kv-heads", 8), ("head-dim", 128), ("embedding", 4096),
                          ("feed-forward", 14336), ("vocabulary", 128256), ("context", 131072)):
        p.add_argument("--" + name, type=int, default=default)
    write(p.parse_args())
