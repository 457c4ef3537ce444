/* torch.h: the pattern in a file that torch.save wrote, {"pattern": uint8 [L][H][D], "keep_ratio": float}.

   Nothing in the file is executed: its pickle is read by a machine that knows the few instructions such a dict
   needs, and refuses all others. The file is untrusted: whatever is returned was checked to lie inside it.

   file     a zip of stored entries: NAME/data.pkl, NAME/data/KEY (a storage's elements), and others
   data.pkl a dict; its tensor is a call of torch._utils._rebuild_tensor_v2 (storage, offset, sizes, strides, ...) */
#ifndef TORCH_H
#define TORCH_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int64_t dim[3], stride[3]; /* L, H, D; in elements */
    const uint8_t *values;     /* of [0][0][0]; points into the file */
    double keep_ratio;         /* -1: not there */
} torch_pattern;

/* 0 = ok; else err holds one line. */
int torch_read_pattern(torch_pattern *out, const void *file, size_t size, char *err, size_t err_size);

#endif
