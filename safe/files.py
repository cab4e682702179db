"""Files that are whole or absent, and the .safetensors format.

A .safetensors file has a number n (8 bytes, little-endian), n bytes of JSON {name: {dtype, shape, data_offsets}}, and
then the tensors' bytes.
"""

import json
import math
import mmap
import os
import zlib

import numpy as np
import torch

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
                      "U8": torch.uint8, "BOOL": torch.bool, "I64": torch.int64}


def read_safetensors(path):
    """{name: tensor} of a .safetensors file, mapped into memory and read when used. ValueError if it is damaged."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start].decode())
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            dtype, (begin, end) = SAFETENSORS_DTYPES[entry["dtype"]], entry["data_offsets"]
            count = math.prod(entry["shape"])
            if end - begin != count * dtype.itemsize or begin < 0 or start + end > len(data):
                raise ValueError(f"{name} lies outside the file: it is cut short or damaged")
            values = torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin)
            tensors[name] = values.view(entry["shape"])
        return tensors
    except Exception as error:  # noqa: BLE001  anything may stand in a damaged header
        raise ValueError(f"{path}: not a whole .safetensors file ({error})") from None


def write_safetensors(path, entries, get):
    """Write tensors {name: (dtype, shape)}. get(name) returns one at a time, so that memory need not hold all."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in entries.items():
        end = offset + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def blocks():
        yield len(text).to_bytes(8, "little") + text
        for name, (dtype, _) in entries.items():
            yield get(name).detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy().data

    return write_blocks(path, blocks())


def write_file(path, text):
    return write_blocks(path, [text.encode()])


def write_blocks(path, blocks):
    """Write a file that has its name only when all of it is on the disk. Returns its {"bytes", "crc32"}."""
    size = crc = 0
    with open(path + ".part", "wb") as file:
        for block in blocks:
            file.write(block)
            size += len(block)
            crc = zlib.crc32(block, crc)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)
    return {"bytes": size, "crc32": crc}


def sync_folder(path):
    """Bring a folder to the disk: it holds its files' names, which a power cut could lose otherwise."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def crc_of_file(path):
    return zlib.crc32(np.memmap(path, np.uint8, "r"))
