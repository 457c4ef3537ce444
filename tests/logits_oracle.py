#!/usr/bin/env python3
"""Golden logits for the engine in examples/llama/, from two implementations that share no code with it or each other.

    tests/logits_oracle.py MODEL.gguf GOLDEN.txt [--ids FILE | --random N] [--first F] [--ours DUMP.f32]

The model is dequantised (gguf-py) to a file of f32 weights, so that "the model" means its weights exactly: on a
quantised file llama.cpp rounds the activations too. On that file run
  1. llama.cpp, f32 KV cache, no flash attention (bench/build_peers.sh builds it under $PEERS, default build/peers);
  2. the graph below in numpy float64.
Their difference is printed, as is llama.cpp's on the file as it is; GOLDEN gets the logits of 1 at positions F..N-1.
Token ids come from --ids or --random; without them ids and F come from the GOLDEN that stands there already. --ours
compares a dump of every logit of the engine (raw f32 [N-F][vocab]) with 1 as well. Needs numpy and gguf.
Format of GOLDEN, read by tests/test_logits.c:

    # comment lines
    tokens N first F vocab V top 5 fixed 16
    N ids, 16 fixed ids, then for each position: 5 x (id logit), best first, and the 16 fixed ids' logits
"""
import argparse
import os
import struct
import subprocess
import sys
import tempfile

import numpy as np
from gguf import GGUFReader, dequantize

TOP, FIXED = 5, 16


def weights(reader):
    return {t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in reader.tensors}


def write_f32(src, reader, w, dst):
    """The same file with every tensor f32: header and metadata copied as bytes, the tensor table written anew."""
    with open(src, "rb") as f:
        head = f.read(reader.tensors[0].field.offset)
    align, table, at = int(reader.alignment), b"", 0
    for t in reader.tensors:
        name = t.name.encode()
        table += struct.pack("<Q", len(name)) + name
        table += struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape, 0, at)
        at += -(-4 * w[t.name].size // align) * align
    with open(dst, "wb") as f:
        f.write(head + table)
        f.write(bytes(-f.tell() % align))
        for t in reader.tensors:
            f.write(w[t.name].astype("<f4").tobytes())
            f.write(bytes(-f.tell() % align))


def llama_cpp(path, ids, first):
    tool = os.path.join(os.environ.get("PEERS", "build/peers"), "bin/llama_logits")
    text = " ".join(map(str, ids)).encode()
    out = subprocess.run([tool, path, str(first), "2"], input=text, stdout=subprocess.PIPE, check=True).stdout
    return np.frombuffer(out, "<f4").reshape(len(ids) - first, -1)


class Graph:
    """Llama and Qwen2 in float64, all positions at once. Shapes: x [N][E], q [H][N][d], k v [Hkv][N][d]."""

    def __init__(self, reader, w):
        def key(name, default=None):
            f = reader.fields.get(name.replace("ARCH", arch))
            return default if f is None else f.contents()
        arch = "?"
        arch = key("general.architecture")
        self.w, self.neox = w, arch == "qwen2"
        self.L, self.H = key("ARCH.block_count"), key("ARCH.attention.head_count")
        self.Hkv, self.E = key("ARCH.attention.head_count_kv", self.H), key("ARCH.embedding_length")
        self.d = key("ARCH.attention.key_length", self.E // self.H)
        self.eps = key("ARCH.attention.layer_norm_rms_epsilon")
        self.theta, self.factor = key("ARCH.rope.freq_base", 1e4), key("ARCH.rope.scaling.factor", 1.0)
        assert key("ARCH.rope.scaling.type", "linear") == "linear"
        assert key("ARCH.rope.dimension_count", self.d) == self.d

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[name]

    def mul(self, x, name):
        return x @ self.w[name + ".weight"].astype(float).T + self.w.get(name + ".bias", 0.0)

    def heads(self, x, n):
        return x.reshape(len(x), n, self.d).transpose(1, 0, 2)

    def rope(self, x):
        angle = self.theta ** (-np.arange(0, self.d, 2) / self.d) / self.w.get("rope_freqs.weight", 1.0) / self.factor
        turn = np.exp(1j * np.arange(x.shape[1])[:, None] * angle)
        if self.neox:
            z = (x[..., : self.d // 2] + 1j * x[..., self.d // 2:]) * turn
            return np.concatenate((z.real, z.imag), -1)
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack((z.real, z.imag), -1).reshape(x.shape)

    def attend(self, x, b):
        q = self.rope(self.heads(self.mul(x, b + "attn_q"), self.H))
        k = self.rope(self.heads(self.mul(x, b + "attn_k"), self.Hkv))
        v = self.heads(self.mul(x, b + "attn_v"), self.Hkv)
        out = []
        for h in range(self.H):
            g = h // (self.H // self.Hkv)
            s = np.where(np.tri(len(x), dtype=bool), q[h] @ k[g].T / self.d**0.5, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            out.append(p / p.sum(-1, keepdims=True) @ v[g])
        return self.mul(np.concatenate(out, -1), b + "attn_output")

    def ffn(self, x, b):
        gate = self.mul(x, b + "ffn_gate")
        return self.mul(gate / (1 + np.exp(-gate)) * self.mul(x, b + "ffn_up"), b + "ffn_down")

    def logits(self, ids, first):
        x = self.w["token_embd.weight"][ids].astype(float)
        for i in range(self.L):
            b = f"blk.{i}."
            x = x + self.attend(self.norm(x, b + "attn_norm.weight"), b)
            x = x + self.ffn(self.norm(x, b + "ffn_norm.weight"), b)
        x = self.norm(x[first:], "output_norm.weight")
        return self.mul(x, "output" if "output.weight" in self.w else "token_embd")


def compare(what, a, gold):
    d, top = np.abs(a - gold), np.sort(gold, -1)
    wrong = a.argmax(-1) != gold.argmax(-1)
    gap = (top[:, -1] - top[:, -2])[wrong].max(initial=0.0)
    print(f"  {what}: max |d| {d.max():.2e}, rms {np.sqrt((d * d).mean()):.2e}, "
          f"top-1 differs at {wrong.sum()} of {len(d)}, largest gap there {gap:.2e}")


def read_words(path):
    with open(path) as f:
        return [x for line in f if not line.startswith("#") for x in line.split()]


def tokens(a, V):
    """ids and the first position to check"""
    if a.random:
        return [i * (i + 7) % V for i in range(1, a.random + 1)], a.first
    if a.ids:
        return [int(x) for x in read_words(a.ids)], a.first
    words = read_words(a.golden)
    return [int(x) for x in words[10:10 + int(words[1])]], int(words[3])


def write_golden(path, model, ids, first, logits):
    V = logits.shape[1]
    fixed = [(2 * i + 1) * V // (2 * FIXED) for i in range(FIXED)]
    with open(path, "w") as f:
        f.write(f"# {os.path.basename(model)} as f32: logits of llama.cpp, f32 KV cache, no flash attention.\n"
                "# Made by tests/logits_oracle.py, which describes the format.\n"
                f"tokens {len(ids)} first {first} vocab {V} top {TOP} fixed {FIXED}\n")
        for i in range(0, len(ids), 24):
            f.write(" ".join(map(str, ids[i:i + 24])) + "\n")
        f.write(" ".join(map(str, fixed)) + "\n")
        for row in logits:
            best = np.argsort(-row, kind="stable")[:TOP]
            f.write(" ".join([f"{i} {row[i]:.4f}" for i in best] + [f"{row[i]:.4f}" for i in fixed]) + "\n")


def main():
    p = argparse.ArgumentParser(usage=__doc__.split("\n")[2].strip())
    for name in ("model", "golden", "--ids", "--ours"):
        p.add_argument(name)
    p.add_argument("--random", type=int)
    p.add_argument("--first", type=int, default=0)
    a = p.parse_args()
    reader = GGUFReader(a.model)
    w = weights(reader)
    V = len(w["token_embd.weight"])
    ids, first = tokens(a, V)
    with tempfile.TemporaryDirectory() as tmp:
        write_f32(a.model, reader, w, tmp + "/f32.gguf")
        gold = llama_cpp(tmp + "/f32.gguf", ids, first)
    print(f"{os.path.basename(a.model)}: {len(gold)} positions, vocab {V}, "
          f"logits {gold.min():.1f} .. {gold.max():.1f}, std {gold.std():.2f}")
    compare("numpy float64       ", Graph(reader, w).logits(ids, first), gold)
    compare("llama.cpp, file as is", llama_cpp(a.model, ids, first), gold)
    if a.ours:
        compare("ours                ", np.fromfile(a.ours, "<f4").reshape(gold.shape), gold)
    write_golden(a.golden, a.model, ids, first, gold)


if __name__ == "__main__":
    main()
