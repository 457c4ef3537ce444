#!/usr/bin/env python3
"""Our attention on a GPU beside its peers, in one process:

    bench/peers.py [--json FILE] [--only TEXT] [--lib build/libdistance_kv_cuda.so]

Peers: torch's flash and cuDNN attention, FlexAttention, FlashAttention-3 (the package fa3-fwd). Each contender is
checked against fp32 first. Then all take turns replaying a CUDA graph that goes through layers of keys and values,
together three times the L2 cache; medians of a launch. A peer that is missing or fails is recorded as such; a row that
fails says why.
"""
import argparse
import ctypes as c
import json
import math
import os
import sys
import time

# ---- the C API ---------------------------------------------------------------------------

F32, F16, BF16, I8, FP8 = range(5)
NAMES = ["f32", "f16", "bf16", "i8", "fp8"]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("type", c.c_int), ("stride_token", c.c_int64), ("stride_head", c.c_int64),
                ("stride_dim", c.c_int64)]


class Run(c.Structure):
    _fields_ = [("pos", c.c_int64), ("len", c.c_int64), ("row", c.c_int64)]


class Plan(c.Structure):
    _fields_ = [("L", c.c_int32), ("Hkv", c.c_int32), ("T_c", c.c_int64), ("pattern_crc", c.c_uint32),
                ("first", c.POINTER(c.c_int64)), ("rows", c.POINTER(c.c_int64)), ("runs", c.POINTER(Run))]


class Packed(c.Structure):
    _fields_ = [("data", c.c_void_p), ("type", c.c_int), ("Hkv", c.c_int32), ("d_k", c.c_int32), ("d_v", c.c_int32),
                ("rows", c.POINTER(c.c_int64)), ("capacity", c.c_int64)]


class Segment(c.Structure):
    _fields_ = [("packed", c.POINTER(Packed)), ("k", Tensor), ("v", Tensor), ("rows", c.POINTER(c.c_int64)),
                ("n", c.c_int64)]


class Attention(c.Structure):
    _fields_ = [("H", c.c_int32), ("Hkv", c.c_int32), ("d_k", c.c_int32), ("d_v", c.c_int32), ("N_q", c.c_int64),
                ("q", Tensor), ("out", Tensor), ("lse", c.c_void_p), ("context", Segment), ("tail", Segment),
                ("scale", c.c_float), ("softcap", c.c_float), ("sink", c.c_void_p)]


class Suffix(c.Structure):
    _fields_ = [("N_q", c.c_int64), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("out", Tensor), ("lse", c.c_void_p),
                ("out_relaxed", Tensor), ("lse_relaxed", c.c_void_p), ("d_out", Tensor), ("dq", Tensor), ("dk", Tensor),
                ("dv", Tensor)]


class Gated(c.Structure):
    _fields_ = [("H", c.c_int32), ("Hkv", c.c_int32), ("d_k", c.c_int32), ("d_v", c.c_int32), ("T_c", c.c_int64),
                ("W", c.c_int64), ("S", c.c_int64), ("R", c.c_int64), ("D", c.c_int64), ("scale", c.c_float),
                ("context", Segment), ("ln_u", c.c_void_p), ("open", c.c_void_p), ("suffix", c.POINTER(Suffix)),
                ("n_suffix", c.c_int64), ("d_ln_u", c.c_void_p)]


class Work(c.Structure):  # private, so only its size matters, and this is more
    _fields_ = [("bytes", c.c_uint64 * 128)]


def print_layout():
    """What tests/compile/layout.c prints of the header's structs."""
    for name, kind in (("dkv_tensor", Tensor), ("dkv_run", Run), ("dkv_plan", Plan), ("dkv_packed", Packed),
                       ("dkv_segment", Segment), ("dkv_attention", Attention), ("dkv_suffix", Suffix),
                       ("dkv_gated", Gated)):
        print(name, c.sizeof(kind))
        for field, _ in kind._fields_:
            print(name, field, getattr(kind, field).offset)
    print("dkv_cuda_work fits", c.sizeof(Work))
    print("dkv_cuda_gated fits", c.sizeof(Work))


if __name__ == "__main__" and sys.argv[1:] == ["--layout"]:
    sys.exit(print_layout())

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name has TEXT")
parser.add_argument("--lib", default=os.path.join(os.path.dirname(__file__), "../build/libdistance_kv_cuda.so"))
args = parser.parse_args()

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention as sdpa
except (ImportError, OSError) as error:
    sys.exit(f"peers.py: needs torch 2.5 or newer with CUDA: {error}")
if not torch.cuda.is_available():
    sys.exit("peers.py: torch sees no GPU")
try:
    import fa3_fwd_interface as fa3
except (ImportError, OSError) as error:
    fa3, fa3_missing = None, " ".join(str(error).split())

lib = c.CDLL(os.path.abspath(args.lib))
lib.dkv_result_string.restype = c.c_char_p
for _name in ("dkv_cuda_attend", "dkv_cuda_prepare", "dkv_cuda_pack", "dkv_cuda_plan", "dkv_plan_from_positions",
              "dkv_cuda_gated_size", "dkv_cuda_gated_prepare", "dkv_cuda_gated_forward", "dkv_cuda_gated_backward"):
    getattr(lib, _name).restype = c.c_int


def check(result):
    if result:
        raise RuntimeError(lib.dkv_result_string(result).decode())


def stream():
    return c.c_void_p(torch.cuda.current_stream().cuda_stream)


def device_bytes(n):
    return torch.empty(max(int(n), 1), dtype=torch.uint8, device="cuda")


TYPES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}


def tensor_of(x):
    """[T][heads][d] of any strides."""
    e = x.element_size()
    return Tensor(x.data_ptr(), TYPES[x.dtype], x.stride(0) * e, x.stride(1) * e, x.stride(2) * e)


class OurPlan:
    """One layer. positions: a list for each KV head of ascending positions below T_c; None: all."""

    def __init__(self, T_c, Hkv, positions=None):
        flat = counts = None
        if positions is not None:
            flat = (c.c_int64 * sum(map(len, positions)))(*[i for at in positions for i in at])
            counts = (c.c_int64 * Hkv)(*map(len, positions))
        size, self.host, self.dev = c.c_size_t(), Plan(), Plan()
        call = lambda mem: check(lib.dkv_plan_from_positions(c.byref(self.host), mem, c.byref(size), 1, Hkv,
                                                             c.c_int64(T_c), flat, counts))
        call(None)
        self.memory = (c.c_int64 * (size.value // 8 + 1))()
        call(self.memory)
        check(lib.dkv_cuda_plan(c.byref(self.dev), None, c.byref(size), c.byref(self.host), stream()))
        self.memory_dev = device_bytes(size.value)
        check(lib.dkv_cuda_plan(c.byref(self.dev), c.c_void_p(self.memory_dev.data_ptr()), c.byref(size),
                                c.byref(self.host), stream()))
        torch.cuda.synchronize()


class OurPacked:
    def __init__(self, plan, type, k, v):
        """k, v [T_c][Hkv][d], already on the device."""
        self.plan, self.type, self.struct, self.size, self.d = plan, type, Packed(), c.c_size_t(), k.shape[2]
        self.source = Segment(None, tensor_of(k), tensor_of(v), None, k.shape[0])
        self.keep, self.memory = (k, v), None
        self.call(None)
        self.memory = device_bytes(self.size.value)
        self.pack()

    def call(self, at):
        check(lib.dkv_cuda_pack(c.byref(self.struct), at, c.byref(self.size), self.type, c.byref(self.plan.host),
                                c.byref(self.plan.dev), 0, self.d, self.d, c.byref(self.source), stream()))

    def pack(self):
        self.call(c.c_void_p(self.memory.data_ptr()))


class OurAttention:
    """A batch, a list of (q [N_q][H][d], packed or None, tail k, tail v [n][Hkv][d], out [N_q][H][d])."""

    def __init__(self, batch):
        n, self.keep, self.work = len(batch), batch, Work()
        a = (Attention * n)()
        for x, (q, packed, k, v, out) in zip(a, batch):
            x.H, x.Hkv, x.d_k, x.d_v, x.N_q = q.shape[1], k.shape[1], q.shape[2], q.shape[2], q.shape[0]
            x.q, x.out = tensor_of(q), tensor_of(out)
            x.tail = Segment(None, tensor_of(k), tensor_of(v), None, k.shape[0])
            if packed:
                x.context.packed = c.pointer(packed.struct)
        block, ws = c.c_size_t(), c.c_size_t()
        check(lib.dkv_cuda_attend_size(c.byref(block), c.byref(ws), a, c.c_int64(n)))
        self.block, self.ws = device_bytes(block.value), device_bytes(ws.value)
        self.lengths = torch.tensor([x[2].shape[0] for x in batch], dtype=torch.int64, device="cuda")
        check(lib.dkv_cuda_prepare(c.byref(self.work), a, c.c_int64(n), c.c_void_p(self.lengths.data_ptr()),
                                   c.c_void_p(self.block.data_ptr()), block, c.c_void_p(self.ws.data_ptr()), ws, 0,
                                   stream()))

    def __call__(self):
        check(lib.dkv_cuda_attend(c.byref(self.work), stream()))


class OurGated:
    """Forward and backward of one suffix over one context: x, a GatedData's layer."""

    def __init__(self, data, x):
        self.keep, self.work = x, Work()
        floats = lambda *shape: torch.full(shape, math.nan, device="cuda")
        N, d = data.N, data.d
        self.out, self.relaxed, self.dq = floats(N, H, d), floats(N, H, d), floats(N, H, d)
        self.dk, self.dv = floats(N, HKV, d), floats(N, HKV, d)
        self.lse, self.lse_relaxed, self.d_ln_u = floats(N, H), floats(N, H), floats(HKV, data.D)
        at = lambda y: c.c_void_p(y.data_ptr())
        suffix = Suffix(N, tensor_of(x["q"]), tensor_of(x["ks"]), tensor_of(x["vs"]), tensor_of(self.out), at(self.lse),
                        tensor_of(self.relaxed), at(self.lse_relaxed), tensor_of(x["d_out"]), tensor_of(self.dq),
                        tensor_of(self.dk), tensor_of(self.dv))
        context = Segment(None, tensor_of(x["k"].transpose(0, 1)), tensor_of(x["v"].transpose(0, 1)), None, data.T)
        gated = Gated(H, HKV, d, d, data.T, data.W, data.S, data.R, data.D, 0, context, at(x["ln_u"]),
                      at(x["open"]) if data.through else None, c.pointer(suffix), 1, at(self.d_ln_u))
        block, ws = c.c_size_t(), c.c_size_t()
        check(lib.dkv_cuda_gated_size(c.byref(block), c.byref(ws), c.byref(gated), c.c_int64(1)))
        self.block, self.ws = device_bytes(block.value), device_bytes(ws.value)
        check(lib.dkv_cuda_gated_prepare(c.byref(self.work), c.byref(gated), c.c_int64(1), at(self.block), block,
                                         at(self.ws), ws, stream()))

    def __call__(self):
        check(lib.dkv_cuda_gated_forward(c.byref(self.work), stream()))
        check(lib.dkv_cuda_gated_backward(c.byref(self.work), stream()))


# ---- timing: all contenders in turn -------------------------------------------------------

def graph_of(calls):
    """A graph of all calls; they have run before, so that everything is compiled and allocated."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return graph


def milliseconds(graph, n):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / n


def median(x):
    return sorted(x)[len(x) // 2]


def take_turns(contenders):
    """contenders: name -> calls, one a layer. -> name -> sorted times of a call, name -> why there are none."""
    graphs, times, failed = {}, {}, {}
    for name, calls in contenders.items():
        try:
            graphs[name] = graph_of(calls)
            first = milliseconds(graphs[name], len(calls))
            times[name] = []
            rounds = 20 if first * len(calls) < 20 else 7 if first * len(calls) < 200 else 3
        except Exception as error:  # a peer may raise anything
            failed[name] = brief(error)
            graphs.pop(name, None)
            torch.cuda.synchronize()
            continue
        graphs[name] = (graphs[name], len(calls), rounds)
    for turn in range(20):
        for name, (graph, n, rounds) in graphs.items():
            if turn < rounds:
                times[name].append(milliseconds(graph, n))
    return {name: sorted(t) for name, t in times.items()}, failed


def brief(error):
    return " ".join(str(error).split())[:140] or type(error).__name__


# ---- correctness ---------------------------------------------------------------------------

def sampled(N_q):
    return sorted({0, N_q // 2, N_q - 1})


def reference(q, k, v, visible):
    """fp32 [rows][H][d]. q likewise; k, v for each KV head [n][d], of which row r sees the first visible[r](g)."""
    G, out = q.shape[1] // len(k), torch.empty(q.shape, dtype=torch.float32, device="cuda")
    for g in range(len(k)):
        x = q[:, g * G:(g + 1) * G].float() / math.sqrt(q.shape[2])
        s = torch.einsum("rhd,nd->rhn", x, k[g].float())
        for r, n in enumerate(visible):
            s[r, :, n(g):] = -math.inf
        out[:, g * G:(g + 1) * G] = torch.einsum("rhn,nd->rhd", s.softmax(-1), v[g].float())
    return out


def error_of(out, want):
    """Greatest error over the greatest output; out is [rows][H][d]."""
    return ((out.float() - want).abs().max() / want.abs().max()).item()


# ---- rows -------------------------------------------------------------------------------------

H, HKV = 32, 8
L2 = torch.cuda.get_device_properties(0).L2_cache_size
K = 1024


def normal(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def kept_positions(T_c, kept):
    """By unequal heads, from 0.2 to 1.8 times as much; sink, recent, and bins of 128."""
    generator, all_heads = torch.Generator().manual_seed(1), []
    for g in range(HKV):
        share = kept * (0.2 + 1.6 * g / (HKV - 1))
        at = torch.arange(T_c)
        bins = torch.rand(T_c // 128 + 1, generator=generator) < share
        all_heads.append(at[bins[(T_c - 1 - at) // 128] | (at < 128) | (at >= T_c - 1024)].tolist())
    return all_heads


def layers_for(bytes, pairs):
    """Three times the L2 cache, and four launches a graph if they are short: pairs of query and key."""
    return 1 if pairs > 1 << 28 else 2 if bytes > 2 << 30 else max(4, min(16, 1 + int(3 * L2 / bytes)))


class Data:
    """Layers of q [B][N][H][d], K and V [B][T][Hkv][d]: the last N keys are the queries' own."""

    def __init__(self, B, T, N, d):
        self.B, self.T, self.N, self.d = B, T, N, d
        layers = range(layers_for(B * T * HKV * d * 4, N * T))
        self.q = [normal(B, N, H, d) for _ in layers]
        self.k = [normal(B, T, HKV, d) for _ in layers]
        self.v = [normal(B, T, HKV, d) for _ in layers]
        self.out = [torch.full((B, N, H, d), math.nan, dtype=torch.bfloat16, device="cuda") for _ in layers]


def ours(data, type, positions=None, tail=None):
    """Calls, one a layer. tail rows are dense, the rest is packed."""
    tail = tail or data.N
    plan = OurPlan(data.T - tail, HKV, positions) if data.T > tail else None
    calls = []
    for q, k, v, out in zip(data.q, data.k, data.v, data.out):
        x = torch.float16 if type in (I8, FP8) else torch.bfloat16
        batch = []
        for b in range(data.B):
            packed = OurPacked(plan, type, k[b, :-tail], v[b, :-tail]) if plan else None
            batch.append((q[b].to(x), packed, k[b, -tail:].to(x), v[b, -tail:].to(x), out[b].view(x)))
        calls.append(OurAttention(batch))
    return calls


def fa3_calls(data, splits, causal=True, fp8=False):
    if not fa3:
        raise RuntimeError("missing: " + fa3_missing)
    q, k, v = data.q, data.k, data.v
    if fp8:
        q, k, v = ([x.to(torch.float8_e4m3fn) for x in y] for y in (q, k, v))
    if data.N == data.T:
        return [lambda q=q, k=k, v=v: fa3.flash_attn_func(q, k, v, causal=True) for q, k, v in zip(q, k, v)]
    return [lambda q=q, k=k, v=v: fa3.flash_attn_with_kvcache(q, k, v, causal=causal, pack_gqa=True, num_splits=splits)
            for q, k, v in zip(q, k, v)]


def best_fa3(data, fp8=False):
    """The number of splits that is fastest here."""
    if data.N == data.T or not fa3:
        return fa3_calls(data, 1, fp8=fp8)
    best = (math.inf, None, 0)
    for splits in ((0, 1, 2, 4) if data.N > 512 else (0, 4, 8, 12, 16, 24, 32, 64)):
        try:
            calls = fa3_calls(data, splits, fp8=fp8)
            for call in calls:
                call()
            graph = graph_of(calls)
            took = median([milliseconds(graph, len(calls)) for _ in range(5)])
            best = min(best, (took, calls, splits), key=lambda x: x[0])
        except Exception as error:
            print(f"    fa3 with {splits} splits: {brief(error)}", flush=True)
    if best[1] is None:
        raise RuntimeError("no number of splits works")
    return best[1]


def sdpa_calls(data, backend):
    """[B][H][T][d] views of the same memory."""
    def call(q, k, v):
        options = {"is_causal": True} if data.N == data.T else {}
        if 1 < data.N < data.T:
            options = {"attn_mask": causal_lower_right(data.N, data.T)}
        with sdpa_kernel(backend):
            out = sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True, **options)
        return out.transpose(1, 2)
    return [lambda q=q, k=k, v=v: call(q, k, v) for q, k, v in zip(data.q, data.k, data.v)]


def flex_calls(data):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    compiled = torch.compile(flex_attention, dynamic=False)
    first, mask = data.T - data.N, None
    if data.N > 1:
        mask = create_block_mask(lambda b, h, i, j: i + first >= j, None, None, data.N, data.T, device="cuda")
    return [lambda q=q, k=k, v=v: compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask,
                                           enable_gqa=True).transpose(1, 2)
            for q, k, v in zip(data.q, data.k, data.v)]


def peer_makers(data, names):
    makers = {"fa3": lambda: best_fa3(data), "flash": lambda: sdpa_calls(data, SDPBackend.FLASH_ATTENTION),
              "cudnn": lambda: sdpa_calls(data, SDPBackend.CUDNN_ATTENTION), "flex": lambda: flex_calls(data),
              "fa3 fp8": lambda: best_fa3(data, fp8=True)}
    return {name: makers[name] for name in names}


rows, our_ms = [], {}


def verdict(reached):
    return "ok  " if reached else "MISS"


def finish(name, type, calls, makers, wanted, allowed, bytes, flops, bars, tera_bytes=0):
    """Checks ours and then every peer: calls give (or ours has written) layer 0's output, wanted(out) its error. Times
    those that are right, prints, records. bars: (peer or "ours: row", greatest ratio of our time to its)."""
    row = {"case": name, "device": torch.cuda.get_device_name(), "dtype": type, "bytes": bytes, "flops": flops,
           "peers": {}, "peers_failed": {}}
    for call in calls:
        call()
    row["max_err"] = wanted(None)
    if not row["max_err"] <= allowed:
        raise RuntimeError(f"ours is wrong: error {row['max_err']:.1e}")
    contenders = {"ours": calls}
    for peer, make in makers.items():
        try:
            made = make()
            out = [call() for call in made][0]
            torch.cuda.synchronize()
            error = wanted(out)
            if not error <= max(allowed, 0.3 if "fp8" in peer else 0):
                raise RuntimeError(f"wrong: error {error:.1e}")
            contenders[peer] = made
        except Exception as error:
            row["peers_failed"][peer] = brief(error)
    times, failed = take_turns(contenders)
    if "ours" in failed:
        raise RuntimeError(failed["ours"])
    row["peers_failed"].update(failed)
    mine = times.pop("ours")
    row.update(ours_ms=median(mine), ours_min_ms=mine[0], ours_max_ms=mine[-1], runs=len(mine))
    row["peers"] = {peer: median(t) for peer, t in times.items()}
    our_ms[name] = row["ours_ms"]
    verdicts = []
    for peer, most in bars:
        against = row["peers"].get(peer) or our_ms.get(peer)
        if against:
            share = row["ours_ms"] / against
            verdicts.append(f"{verdict(share <= most)} {share:.3f} of {peer}'s time, bar {most:.2f}")
    if tera_bytes:
        rate = bytes / row["ours_ms"] / 1e9
        verdicts.append(f"{verdict(rate >= tera_bytes)} {rate:.2f} TB/s, bar {tera_bytes}")
    row["bars"] = verdicts
    rows.append(row)
    peers = "  ".join(f"{peer} {ms:.4f} ({row['ours_ms'] / ms:.3f})" for peer, ms in row["peers"].items())
    print(f"{name:38} {type:4} ours {row['ours_ms']:9.4f} ms [{mine[0]:.4f} {mine[-1]:.4f}] "
          f"{bytes / row['ours_ms'] / 1e9:6.2f} TB/s {flops / row['ours_ms'] / 1e9:5.0f} TF/s  "
          f"err {row['max_err']:.1e}  {peers}")
    for line in verdicts + [f"{peer} fails: {why}" for peer, why in row["peers_failed"].items()]:
        print("    " + line)
    sys.stdout.flush()


def attention_row(name, type, T, N, names, bars, B=1, d=128, tera_bytes=0):
    """Uniform: everything is kept."""
    data = Data(B, T, N, d)
    own = ours(data, type, tail=N)
    at = sampled(N)
    want = [reference(data.q[0][b][at], data.k[0][b].unbind(1), data.v[0][b].unbind(1),
                      [lambda g, r=r: T - N + 1 + r for r in at]) for b in {0, B - 1}]

    def wanted(out):
        x = torch.float16 if out is None and type in (I8, FP8) else torch.bfloat16
        out = data.out[0].view(x) if out is None else out
        return max(error_of(out[b][at], w) for b, w in zip({0, B - 1}, want))
    e = 1 if type in (I8, FP8) else 2
    bytes = B * (2 * T * HKV * d * e + 4 * N * H * d)
    flops = 4 * d * B * H * N * (T - (N - 1) / 2)
    finish(name, NAMES[type], own, peer_makers(data, names), wanted,
           {FP8: 0.15, I8: 0.06}.get(type, 0.02), bytes, flops, bars, tera_bytes)


def ragged_row(name, T_c, kept, tail, N, bars, dense):
    """dense: FA3 over all T_c keys; else over as many keys for every head as ours have on average."""
    positions = kept_positions(T_c, kept)
    total = sum(map(len, positions)) + HKV * tail
    data = Data(1, T_c + tail, N, 128)
    own = ours(data, BF16, positions, tail)
    peer_data = data
    if not dense:
        peer_data = Data(1, total // HKV, N, 128)
    at = sampled(N)
    heads = [torch.tensor(p + list(range(T_c, T_c + tail)), device="cuda") for p in positions]
    want = reference(data.q[0][0][at], [data.k[0][0][h, g] for g, h in enumerate(heads)],
                     [data.v[0][0][h, g] for g, h in enumerate(heads)],
                     [lambda g, r=r: len(heads[g]) - N + 1 + r for r in at])

    def wanted(out):
        return error_of(data.out[0][0][at], want) if out is None else 0.0  # FA3 has other keys; checked elsewhere
    flops = 4 * 128 * H * N * (total / HKV - (N - 1) / 2)
    finish(name, "bf16", own, peer_makers(peer_data, ["fa3"]), wanted, 0.02, total * 512 + 4 * N * H * 128, flops, bars)


def pack_row(name, type, head_major, bar):
    T_c, d = 128 * K, 128
    positions = kept_positions(T_c, 0.4)
    make = (lambda: normal(HKV, T_c, d).transpose(0, 1)) if head_major else (lambda: normal(T_c, HKV, d))
    k, v = [make(), make()], [make(), make()]
    plan = OurPlan(T_c, HKV, positions)
    packed = [OurPacked(plan, type, k[i], v[i]) for i in range(2)]
    rows_kept = sum(map(len, positions))
    bytes = rows_kept * 2 * d * (2 + (1 if type in (I8, FP8) else 2))
    source, target = device_bytes(bytes // 2), device_bytes(bytes // 2)
    source.random_(0, 255)

    def wanted(out):
        if out is not None or type in (I8, FP8):
            return 0.0  # a copy; 8-bit layouts are checked by make test-cuda
        first = packed[0].memory[:len(positions[0]) * d * 2].view(torch.bfloat16).view(-1, d)
        return (first.float() - k[0][positions[0], 0].float()).abs().max().item()
    finish(name, NAMES[type], [p.pack for p in packed],
           {"copy": lambda: [lambda: target.copy_(source)]}, wanted, 0.0, bytes, 0, [("copy", 1 / bar)])


class GatedData:
    """Layers of a context's K, V [HKV][T][d] with gates, and one suffix of N queries with its gradient."""

    S, R, W = 128, 1024, 128

    def __init__(self, T, N, d, through):
        self.T, self.N, self.d, self.through, self.D = T, N, d, through, (T - self.S - self.R + self.W - 1) // self.W
        self.layers = []
        for _ in range(layers_for(T * HKV * d * 4, N * T)):
            self.layers.append({
                "k": normal(HKV, T, d), "v": normal(HKV, T, d), "q": normal(N, H, d), "ks": normal(N, HKV, d),
                "vs": normal(N, HKV, d), "d_out": normal(N, H, d),
                "ln_u": (0.1 + 0.9 * torch.rand(HKV, self.D, device="cuda")).log(),
                "open": (torch.rand(HKV, self.D, device="cuda") < 0.4).to(torch.uint8)})

    def of_keys(self, gates):
        """[HKV][D] of bins, nearest first -> [HKV][T] of keys; 0 in sink and recent."""
        keys = gates.flip(1).repeat_interleave(self.W, 1)[:, -(self.T - self.S - self.R):]
        return torch.nn.functional.pad(keys, (self.S, self.R))


def eager_step(data, x, type):
    """What the reference does: all rows in memory, one softmax (straight-through: two), autograd. -> out, gradients by
    q and ln u."""
    q, ks, vs, ln_u = (x[name].to(type if name != "ln_u" else torch.float32).requires_grad_()
                       for name in ("q", "ks", "vs", "ln_u"))
    k, v, G = x["k"].to(type), x["v"].to(type), H // HKV
    rows = q.view(data.N, HKV, G, data.d).permute(1, 2, 0, 3).reshape(HKV, -1, data.d)
    s = (rows @ k.transpose(1, 2)).float() / math.sqrt(data.d)
    own = (rows @ ks.permute(1, 2, 0)).float() / math.sqrt(data.d)
    later = torch.ones(data.N, data.N, dtype=torch.bool, device="cuda").triu(1).repeat(G, 1)
    own = own.masked_fill(later, -math.inf)
    p = torch.cat([s + data.of_keys(ln_u)[:, None], own], 2).softmax(2)
    if data.through:
        shut = (1 - data.of_keys(1 - x["open"].float()))[:, None] == 0
        binary = torch.cat([s.masked_fill(shut, -math.inf), own], 2).softmax(2)
        p = p + (binary - p).detach()
    out = p.to(type) @ torch.cat([v, vs.transpose(0, 1)], 1)
    out = out.view(HKV, G, data.N, data.d).permute(2, 0, 1, 3).reshape(data.N, H, data.d)
    dq, d_ln_u = torch.autograd.grad(out, (q, ln_u), x["d_out"].to(type))
    return out.detach(), dq, d_ln_u


def flex_step(data, x, compiled):
    """FlexAttention with the gate as a score_mod; relaxed only."""
    q = x["q"].transpose(0, 1)[None].requires_grad_()
    ln_u = x["ln_u"].clone().requires_grad_()
    k = torch.cat([x["k"], x["ks"].transpose(0, 1)], 1)[None]
    v = torch.cat([x["v"], x["vs"].transpose(0, 1)], 1)[None]
    far = data.T - data.R

    def gate(score, b, h, i, j):
        inside = (j >= data.S) & (j < far)
        bin = torch.where(inside, (far - 1 - j) // data.W, 0)
        score = score + torch.where(inside, ln_u[h // (H // HKV), bin], 0.0)
        return torch.where(j <= data.T + i, score, -math.inf)
    out = compiled(q, k, v, score_mod=gate, enable_gqa=True)
    dq, d_ln_u = torch.autograd.grad(out, (q, ln_u), x["d_out"].transpose(0, 1)[None])
    return out[0].transpose(0, 1).detach(), dq[0].transpose(0, 1), d_ln_u


def gated_row(name, T, N, d=128, through=False, compilers=False, bars=()):
    """Forward and backward; FA3's is the ungated forward alone, the floor. compilers: minutes more."""
    with torch.inference_mode(False), torch.enable_grad():
        data = GatedData(T, N, d, through)
        own = [OurGated(data, x) for x in data.layers]
        want = eager_step(data, data.layers[0], torch.float32)

        def wanted(out):
            if out is None:
                out = own[0].out, own[0].dq, own[0].d_ln_u
            return 0.0 if out == "ungated" else max(map(error_of, out, want))

        def fa3_forward():
            if not fa3:
                raise RuntimeError("missing: " + fa3_missing)
            kv = [(x["k"].transpose(0, 1)[None], x["v"].transpose(0, 1)[None]) for x in data.layers]
            return [lambda x=x, k=k, v=v: (fa3.flash_attn_with_kvcache(x["q"][None], k, v, pack_gqa=True), "ungated")[1]
                    for x, (k, v) in zip(data.layers, kv)]

        def steps(step):
            return [lambda x=x: step(data, x, torch.bfloat16) for x in data.layers]
        makers = {"eager": lambda: steps(eager_step), "fa3 forward": fa3_forward}
        if compilers:
            from torch.nn.attention.flex_attention import flex_attention
            flex = torch.compile(flex_attention, dynamic=False)
            makers["compiled"] = lambda: steps(torch.compile(eager_step, dynamic=False))
            if not through:
                makers["flex"] = lambda: [lambda x=x: flex_step(data, x, flex) for x in data.layers]
        flops = 10 * d * H * N * T + (4 * d * H * N * T * 0.4 if through else 0)
        finish(name, "bf16", own, makers, wanted, 0.05, 2 * HKV * T * d * 4, flops, bars)


# name -> what to run. Bars are the greatest share of a peer's time, or least TB/s, that we want to reach.
TABLE = {}


def row_of(name, kind, *a, **b):
    TABLE[name] = lambda: kind(name, *a, **b)


for _name, _B, _T, _bar in (("B1 128K", 1, 128, 0.98), ("B1 32K", 1, 32, 0.92), ("B8 128K", 8, 128, 0.98)):
    row_of(f"uniform decode {_name}", attention_row, BF16, _T * K, 1,
           ["fa3", "cudnn", "flash"] + (["flex"] if _name == "B1 128K" else []), [("fa3", _bar), ("cudnn", 1.01)], B=_B)
for _tail in (1, 1 * K, 8 * K):
    row_of(f"ragged decode 40% of 128K, tail {_tail}", ragged_row, 128 * K, 0.4, _tail, 1, [("fa3", 0.93)], False)
for _N in (2, 4, 8):
    row_of(f"suffix {_N} over 128K", attention_row, BF16, 128 * K, _N, ["fa3"], [("uniform decode B1 128K", 1.05)])
for _N in (32, 128):
    row_of(f"suffix {_N} over 128K", attention_row, BF16, 128 * K, _N, ["fa3", "flash"], [("fa3", 1.02)])
for _N in (2, 4, 8, 32, 128):
    row_of(f"suffix {_N} over 40% of 128K", ragged_row, 128 * K, 0.4, _N, _N, [("fa3", 0.46)], True)
for _type in (FP8, I8):
    for _B, _T, _bar in ((1, 64, 3.3), (1, 128, 3.7), (8, 128, 4.0)):
        row_of(f"{NAMES[_type]} decode B{_B} {_T}K", attention_row, _type, _T * K, 1, ["fa3 fp8"], [], B=_B,
               tera_bytes=_bar)
for _d in (128, 64):
    for _T in (8, 32, 128):
        row_of(f"prefill d{_d} {_T}K", attention_row, BF16, _T * K, _T * K, ["fa3", "cudnn", "flash"],
               [("fa3", 1.0 if (_d, _T) == (128, 8) else 0.98), ("cudnn", 1 / 0.95)], d=_d)
row_of("prefill chunk of 8K over 128K", attention_row, BF16, 128 * K, 8 * K, ["fa3", "flash"], [("fa3", 0.98)])
for _type in (BF16, I8, FP8):
    row_of(f"pack {NAMES[_type]} from head-major", pack_row, _type, True, 0.92)
    row_of(f"pack {NAMES[_type]} from [T][Hkv][d]", pack_row, _type, False, 0.85)


for _N in (32, 128, 512):
    row_of(f"gated {_N} over 128K", gated_row, 130816, _N, compilers=_N == 128, bars=[("eager", 1 / 21)])
    row_of(f"gated through {_N} over 128K", gated_row, 130816, _N, through=True, bars=[(f"gated {_N} over 128K", 1.3)])
for _T in (8, 32):
    row_of(f"gated 32 over {_T}K", gated_row, _T * K, 32)
row_of("gated 128 over 130749 keys", gated_row, 130749, 128, bars=[("gated 128 over 128K", 1.02)])
row_of("gated 128 over 128K, d 64", gated_row, 130816, 128, d=64)


def main():
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.cuda.get_device_properties(0)
    print(f"{device.name}, {device.multi_processor_count} multiprocessors, L2 {L2 >> 20} MB; "
          f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
          f"fa3 {'yes' if fa3 else 'missing: ' + fa3_missing}")
    print("ours: median [min max] of a launch; peers: median (our time / theirs)\n", flush=True)
    begin, bad = time.time(), 0
    for name, run in TABLE.items():
        if args.only not in name:
            continue
        try:
            with torch.inference_mode():
                run()
        except Exception as error:
            bad = 1
            rows.append({"case": name, "failed": brief(error)})
            print(f"{name:38} fails: {brief(error)}", flush=True)
        torch.cuda.empty_cache()
        if args.json:
            with open(args.json, "w") as file:
                json.dump(rows, file, indent=1)
    print(f"\n{time.time() - begin:.0f} s")
    return bad


if __name__ == "__main__":
    sys.exit(main())
