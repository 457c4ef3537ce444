#!/usr/bin/env python3
"""Small random-weight models: every graph, rope variant and tensor type that the engine's GGUF reader knows.

    tests/make_random_gguf.py DIR [NAME...]        writes DIR/NAME.gguf, all of CASES without a NAME

Same bytes on every machine, so CI makes them again and the repository stores only the logits they must give
(tests/data/logits_NAME.txt). Quantised blocks are random bits under scales of a sane size: every code point of a type
occurs, which weights that went through a quantiser would not reach. The vocabulary is a real byte-level BPE (256
bytes, ten merges, three specials), so that the models also run under `dkv run`. Standard library only.
"""
import random
import struct
import sys
import zlib

# Tensor type of the matrices, query heads H, KV heads Hkv, head dim d, embedding E, FFN F
CASES = {
    # G 7, NEOX pairs, QKV bias
    "qwen2":  dict(arch="qwen2", type="F16", H=14, Hkv=2, d=16, E=224, F=160, bias=True, eps=1e-6, theta=1e6),
    # a factor for each rope frequency, separate output matrix
    "llama3": dict(arch="llama", type="BF16", H=8, Hkv=2, d=32, E=256, F=320, rope_freqs=True, tied=False, theta=5e5),
    # linear rope scaling, G 3
    "linear": dict(arch="llama", type="F32", H=9, Hkv=3, d=16, E=144, F=208, linear=4.0),
    # G 1, an eps that shows
    "mha":    dict(arch="llama", type="F16", H=4, Hkv=4, d=48, E=192, F=272, tied=False, eps=1e-2),
    # H d < E
    "nemo":   dict(arch="llama", type="F16", H=4, Hkv=2, d=32, E=192, F=272, tied=False),
    # the head dimensions of most models, G 3 and 8, a context of several chunks; rows unfit for vector loads, long rows
    "d64":    dict(arch="llama", type="F16", H=6, Hkv=2, d=64, E=126, F=190, context=8192),
    "d128":   dict(arch="qwen2", type="BF16", H=8, Hkv=1, d=128, E=128, F=1104, bias=True, context=8192),
    **{t.lower(): dict(arch="llama", type=t, H=4, Hkv=2, d=32, E=128, F=192)
       for t in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")},
    **{t.lower(): dict(arch="llama", type=t, H=8, Hkv=2, d=32, E=256, F=512) for t in ("Q4_K", "Q6_K")},
}
LAYERS, CONTEXT = 2, 2048
TYPE_ID = dict(F32=0, F16=1, Q4_0=2, Q4_1=3, Q5_0=6, Q5_1=7, Q8_0=8, Q4_K=12, Q6_K=14, BF16=30)
MERGES = ["t h", "th e", "i n", "a n", "e r", "Ġ the", "o n", "r e", "an d", "Ġ and"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def byte_chars():
    """GPT-2's printable stand-in for each byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in own]
    return [chr(b if b in own else 256 + rest.index(b)) for b in range(256)]


VOCAB = SPECIALS + byte_chars() + [m.replace(" ", "") for m in MERGES]


# ---- GGUF values ---------------------------------------------------------------------------------------------------

def string(s):
    b = s.encode()
    return struct.pack("<Q", len(b)) + b


def value(v):
    """Type number and bytes of a metadata value: int is u32, float f32, list of str or int an array."""
    if isinstance(v, bool):
        return struct.pack("<I?", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + string(v)
    kind, body = (8, b"".join(map(string, v))) if isinstance(v[0], str) else (5, struct.pack(f"<{len(v)}i", *v))
    return struct.pack("<IIQ", 9, kind, len(v)) + body


# ---- tensor data ---------------------------------------------------------------------------------------------------

def bits(rng, n):
    return rng.getrandbits(8 * n).to_bytes(n, "little")


def floats(rng, kind, n, mean, std):
    x = [mean + std * 3.4641 * (rng.random() - 0.5) for _ in range(n)]
    if kind == "F16":
        return struct.pack(f"<{n}e", *x)
    raw = struct.pack(f"<{n}f", *x)
    return raw if kind == "F32" else b"".join(raw[i + 2:i + 4] for i in range(0, 4 * n, 4))


def block(rng, kind, std):
    """One random block whose weights have about this std: divided by the std of the type's random codes."""
    j = std * (0.5 + rng.random())
    sign = rng.choice((-1, 1))
    if kind == "Q8_0":
        return struct.pack("<e", sign * j / 73.9) + bits(rng, 32)
    if kind == "Q4_0":
        return struct.pack("<e", sign * j / 4.61) + bits(rng, 16)
    if kind == "Q4_1":
        return struct.pack("<ee", sign * j / 4.61, -7.5 * sign * j / 4.61) + bits(rng, 16)
    if kind == "Q5_0":
        return struct.pack("<e", sign * j / 9.23) + bits(rng, 20)
    if kind == "Q5_1":
        return struct.pack("<ee", sign * j / 9.23, -15.5 * sign * j / 9.23) + bits(rng, 20)
    if kind == "Q4_K":
        return struct.pack("<ee", j / 255, 7.5 * j / 255) + bits(rng, 140)
    return bits(rng, 208) + struct.pack("<e", sign * j / 1367)  # Q6_K


BLOCK = dict(Q8_0=32, Q4_0=32, Q4_1=32, Q5_0=32, Q5_1=32, Q4_K=256, Q6_K=256)


def tensor(rng, kind, shape, std, mean=0.0):
    """shape is ggml's: columns first. Vectors stay f32, as converters leave them."""
    n = shape[0] * (shape[1] if len(shape) > 1 else 1)
    if len(shape) == 1:
        kind = "F32"
    if kind in BLOCK:
        assert shape[0] % BLOCK[kind] == 0
        return kind, shape, b"".join(block(rng, kind, std) for _ in range(n // BLOCK[kind]))
    return kind, shape, floats(rng, kind, n, mean, std)


# ---- a model -------------------------------------------------------------------------------------------------------

def metadata(name, c):
    a = c["arch"] + "."
    kv = {
        "general.architecture": c["arch"], "general.name": f"random {name}", "general.alignment": 32,
        a + "block_count": LAYERS, a + "context_length": c.get("context", CONTEXT), a + "embedding_length": c["E"],
        a + "feed_forward_length": c["F"], a + "attention.head_count": c["H"], a + "attention.head_count_kv": c["Hkv"],
        a + "attention.layer_norm_rms_epsilon": c.get("eps", 1e-5), a + "rope.freq_base": c.get("theta", 1e4),
        a + "rope.dimension_count": c["d"], a + "vocab_size": len(VOCAB),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2" if c["arch"] == "qwen2" else "smollm",
        "tokenizer.ggml.tokens": VOCAB, "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(VOCAB) - 3),
        "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": CHAT,
    }
    if "linear" in c:
        kv |= {a + "rope.scaling.type": "linear", a + "rope.scaling.factor": c["linear"]}
    if c["H"] * c["d"] != c["E"]:
        kv |= {a + "attention.key_length": c["d"], a + "attention.value_length": c["d"]}
    return kv


def tensors(rng, c):
    """Stds keep every stage in the range where a mistake shows: attention scores of std 1.7, logits of std 3."""
    E, F, q, kv, t, V = c["E"], c["F"], c["H"] * c["d"], c["Hkv"] * c["d"], c["type"], len(VOCAB)

    def make(shape, std, mean=0.0):
        return tensor(rng, t, shape, std, mean)

    w = {"token_embd.weight": make((E, V), 3 / E**0.5), "output_norm.weight": make((E,), 0.15, 1.0)}
    if not c.get("tied", True):
        w["output.weight"] = make((E, V), 3 / E**0.5)
    if c.get("rope_freqs"):
        w["rope_freqs.weight"] = make((c["d"] // 2,), 1.7, 4.0)
    for i in range(LAYERS):
        b = f"blk.{i}."
        w[b + "attn_norm.weight"] = make((E,), 0.15, 1.0)
        w[b + "attn_q.weight"] = make((E, q), 1.3 / E**0.5)
        w[b + "attn_k.weight"] = make((E, kv), 1.3 / E**0.5)
        w[b + "attn_v.weight"] = make((E, kv), 1.0 / E**0.5)
        if c.get("bias"):
            w |= {b + f"attn_{x}.bias": make((n,), 1.0) for x, n in (("q", q), ("k", kv), ("v", kv))}
        w[b + "attn_output.weight"] = make((q, E), 1.0 / q**0.5)
        w[b + "ffn_norm.weight"] = make((E,), 0.15, 1.0)
        w[b + "ffn_gate.weight"] = make((E, F), 1.5 / E**0.5)
        w[b + "ffn_up.weight"] = make((E, F), 1.5 / E**0.5)
        w[b + "ffn_down.weight"] = make((F, E), 1.0 / F**0.5)
    return w


def model(name):
    c = CASES[name]
    w = tensors(random.Random(zlib.crc32(name.encode())), c)
    kv = metadata(name, c)
    out = b"GGUF" + struct.pack("<IQQ", 3, len(w), len(kv))
    out += b"".join(string(k) + value(v) for k, v in kv.items())
    data = b""
    for key, (kind, shape, body) in w.items():
        out += string(key) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPE_ID[kind], len(data))
        data += body + bytes(-len(body) % 32)
    return out + bytes(-len(out) % 32) + data


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(CASES):
        sys.exit(f"usage: make_random_gguf.py DIR [NAME...]   NAME: {' '.join(CASES)}")
    for name in sys.argv[2:] or CASES:
        with open(f"{sys.argv[1]}/{name}.gguf", "wb") as f:
            f.write(model(name))
