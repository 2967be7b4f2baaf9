"""Lossless differences between two tensors of one shape and dtype, as bytes.

Elements are taken as integers by their bits, so that neighbouring floats differ by one, and NaN payloads survive. The
difference of each element, modulo 2^bits, is folded so that small ones of either sign are small numbers (zigzag: 0, -1,
1, -2 become 0, 1, 2, 3) and divided into byte planes: after a small update the lowest has few values and the others are
nearly all zero. Each plane of each piece takes the shortest of these forms:

- nothing, if it is zero;
- gaps: a byte for the distance to each byte that is not zero, then those bytes;
- codes of 1, 2, 4 or 8 bits for each byte; the highest code of the first three stands for a byte that follows.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger]

# Elements that are coded at a time: what they need, 3 MB in float32, stays in a core's cache.
PIECE = 1 << 18
GAPS = 16  # the form of gaps; those of codes are their bits
ESCAPE = 255  # a gap that continues in the next byte
_PLANE = struct.Struct("<BII")  # the form, and the bytes of its two parts


def encode(values: Tensor, base: Tensor) -> Bytes:
    """The difference of a tensor to `base`, both contiguous on the CPU; at most 1 % longer than the tensor, and then as
    many bytes as headers take."""
    parts: list[Bytes] = []
    new, old = _words(values), _words(base)
    for start in range(0, len(new), PIECE):
        signed = (new[start : start + PIECE] - old[start : start + PIECE]).view(f"i{new.itemsize}")
        folded = ((signed << 1) ^ (signed >> (8 * new.itemsize - 1))).view(new.dtype)
        for shift in range(0, 8 * new.itemsize, 8):
            # By shifts, which are vectorised: every other byte of memory takes twice as long to collect.
            form, first, second = _shortest((folded >> shift).astype(np.uint8))
            header = np.frombuffer(_PLANE.pack(form, len(first), len(second)), np.uint8)
            parts += [header, first, second]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def decode(code: Bytes, base: Tensor, values: Tensor) -> None:
    """Write into `values` the tensor whose difference to `base` is `code`.

    Raises:
        ValueError: the code is not of a tensor of this size.
    """
    new, old = _words(values), _words(base)
    offset = 0
    for start in range(0, len(new), PIECE):
        count = min(PIECE, len(new) - start)
        folded = np.zeros(count, new.dtype)
        for shift in range(0, 8 * new.itemsize, 8):
            if len(code) < offset + _PLANE.size:
                raise ValueError("a difference of weights ends early")
            form, *lengths = _PLANE.unpack_from(code.data, offset)
            ends = np.cumsum([offset + _PLANE.size, *lengths])
            if form:
                plane = _expanded(form, code[ends[0] : ends[1]], code[ends[1] : ends[2]], count)
                folded |= plane.astype(new.dtype) << shift
            elif any(lengths):
                raise ValueError("a difference of weights is damaged: a plane without values has some")
            offset = int(ends[2])
        sign = -(folded & folded.dtype.type(1)).view(f"i{new.itemsize}")
        np.add(old[start : start + count], (folded >> 1) ^ sign.view(new.dtype), out=new[start : start + count])
    if offset != len(code):
        raise ValueError(f"a difference of weights has {len(code)} bytes, and not {offset}")


def _words(values: Tensor) -> Words:
    """The elements as unsigned integers of their size; those of 16 bytes as two."""
    size = min(values.element_size(), 8)
    words: Words = values.reshape(-1).view(torch.uint8).numpy().view(f"u{size}")
    return words


def _shortest(plane: Bytes) -> tuple[int, Bytes, Bytes]:
    """The shortest form of a plane: its number and two parts."""
    empty = plane[:0]
    changed = int(np.count_nonzero(plane))
    if not changed:
        return 0, empty, empty
    lengths = {8: len(plane), 1: -(-len(plane) // 8) + changed}
    for bits in (2, 4):
        escapes = int(np.count_nonzero(plane >= (1 << bits) - 1))
        lengths[bits] = -(-len(plane) * bits // 8) + escapes
    form = min(lengths, key=lengths.__getitem__)
    # Gaps take a byte each, and one more for every 255 bytes that are zero.
    if 2 * changed + (len(plane) - changed) // ESCAPE < lengths[form]:
        return GAPS, *_gaps(plane)
    if form == 8:
        return form, plane, empty
    highest = (1 << form) - 1
    return form, _pack(np.minimum(plane, highest), form), plane[plane >= highest]


def _expanded(form: int, first: Bytes, second: Bytes, count: int) -> Bytes:
    """The plane of `count` bytes in this form. ValueError: it is not one."""
    if form == 8 and len(first) == count and not len(second):
        return first
    if form in (1, 2, 4) and len(first) == -(-count * form // 8):
        plane = _unpack(first, form, count)
        escaped = plane == (1 << form) - 1
        if np.count_nonzero(escaped) == len(second):
            plane[escaped] = second
            return plane
    if form == GAPS:
        indices = np.cumsum(first, dtype=np.int64)[first != ESCAPE] + np.arange(np.count_nonzero(first != ESCAPE))
        if len(indices) == len(second) and (not len(indices) or indices[-1] < count):
            plane = np.zeros(count, np.uint8)
            plane[indices] = second
            return plane
    raise ValueError(f"a difference of weights is damaged: form {form} with {len(first)} and {len(second)} bytes")


def _gaps(plane: Bytes) -> tuple[Bytes, Bytes]:
    indices = np.flatnonzero(plane != 0)
    escapes, gap = np.divmod(np.diff(indices, prepend=-1) - 1, ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, ESCAPE, np.uint8)
    gaps[ends] = gap
    return gaps, plane[indices]


def _pack(codes: Bytes, bits: int) -> Bytes:
    """Codes of 1, 2 or 4 bits, several a byte, the first in the lowest bits."""
    if bits == 1:
        return np.packbits(codes, bitorder="little")
    several = 8 // bits
    padded = np.zeros(-(-len(codes) // several) * several, np.uint8)
    padded[: len(codes)] = codes
    packed = padded[::several].copy()
    for place in range(1, several):
        packed |= padded[place::several] << (bits * place)
    return packed


def _unpack(packed: Bytes, bits: int, count: int) -> Bytes:
    """Invert `_pack`."""
    if bits == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    several = 8 // bits
    codes = np.empty((len(packed), several), np.uint8)
    for place in range(several):
        codes[:, place] = (packed >> (bits * place)) & ((1 << bits) - 1)
    return codes.reshape(-1)[:count]
