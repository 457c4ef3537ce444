"""torch's scaled_dot_product_attention on the CPU, for bench_cpu:

  peer_torch.py FILE TYPE THREADS LAYERS H HKV D N_Q N_MAX N...

FILE holds q [N_q][H][d] and K, V [Hkv][n_max][d] in f32, head g's keys in its last n[g] rows; the output takes their
place. Prints the seconds of each run of the fastest mode that works, over LAYERS copies in turn, or why there is none.
"""
import sys
import time

try:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
except (ImportError, OSError) as error:
    sys.exit(print(f"missing: {error}; set TORCH_PYTHON to a Python that has torch".replace("\n", " ")))

path, dtype, threads, layers, H, Hkv, d, N_q, n_max, *n = [int(a) if a.isdigit() else a for a in sys.argv[1:]]
G = H // Hkv
torch.set_num_threads(threads)
dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
with open(path, "rb") as file:
    data = torch.frombuffer(bytearray(file.read()), dtype=torch.float32).to(dtype)
q, k, v = data.split([N_q * H * d, Hkv * n_max * d, Hkv * n_max * d])
q = q.view(1, N_q, H, d).transpose(1, 2).contiguous()
k, v = k.view(1, Hkv, n_max, d), v.view(1, Hkv, n_max, d)

# Heads of one length are one call, ragged ones a call each: (q, K, V) [1][heads][rows][d].
groups = [(0, Hkv)] if min(n) == n_max else [(g, g + 1) for g in range(Hkv)]
cut = [tuple(x[:, a:b, n_max - n[a]:] for x in (k, v)) for a, b in groups]
queries = [q[:, a * G:b * G] for a, b in groups]
copies = [[(k.clone(), v.clone()) for k, v in cut] for _ in range(layers)]
mask = torch.ones(N_q, n[0], dtype=torch.bool).tril(n[0] - N_q) if N_q > 1 else None
group_mask = mask if mask is None else mask.repeat(G, 1)


def grouped(layer):
    """The G heads of a group as rows of one matrix: K and V are read once."""
    return [sdpa(q.reshape(1, k.shape[1], -1, d), k, v, attn_mask=group_mask).view_as(q)
            for q, (k, v) in zip(queries, layer)]


def gqa(layer):
    return [sdpa(q, k, v, attn_mask=mask, enable_gqa=True) for q, (k, v) in zip(queries, layer)]


def causal(layer):
    """Without a mask in memory, where the queries are all there is."""
    if N_q != n_max:
        raise ValueError("not square")
    return [sdpa(q, k, v, is_causal=True, enable_gqa=True) for q, (k, v) in zip(queries, layer)]


def seconds(mode, i):
    start = time.perf_counter()
    mode(copies[i % layers])
    return time.perf_counter() - start


with torch.inference_mode():
    best, failed = (float("inf"), None), "no mode"
    for mode in (grouped, gqa, causal):
        try:
            best = min(best, (min(seconds(mode, i) for i in range(2)), mode), key=lambda pair: pair[0])
        except (RuntimeError, TypeError, ValueError) as error:    # this torch does not have it
            failed = " ".join(str(error).split())
    took, mode = best
    if mode is None:
        sys.exit(print("fails:", failed))
    out = torch.cat(mode(copies[0]), 1).transpose(1, 2).contiguous().float()
    with open(path, "wb") as file:
        file.write(out.numpy().tobytes())
    print(*(seconds(mode, i) for i in range(max(3, min(40, int(3 / took))))))
