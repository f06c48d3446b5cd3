"""Forge folders: change an entry of a JSON file or bytes of an array, and give both valid checksums."""

import json
import zlib

from smoothgrad_jax.data import durable_files

VALUES = [None, True, 0, -7, 1, 3, 10**18, 1e300, float("nan"), float("inf"), "", "x", "/etc/passwd", [], [1], {}]


def places(value, path=()):
    """Yield the path of every entry of a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def forge_json(rng, path):
    """Replace or remove a random entry, and return its path and the new value."""
    body = json.loads(path.read_text())
    body.pop("checksum", None)
    found = list(places(body))
    place, value = found[rng.integers(len(found))], VALUES[rng.integers(len(VALUES))]
    parent = body
    for key in place[:-1]:
        parent = parent[key]
    if rng.random() < 0.2 and isinstance(parent, dict):
        del parent[place[-1]]
        value = "removed"
    else:
        parent[place[-1]] = value
    path.unlink()
    durable_files.write_json(path, body)
    return place, value


def forge_array(rng, path, description):
    """Change, cut or extend the bytes of a file, and store its new size and checksum in the description."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(["header", "bytes", "word", "cut", "extend"])
    start = min(128, len(content) - 1) if kind != "header" else 0
    place = int(rng.integers(start, len(content) if kind != "header" else min(128, len(content))))
    if kind in ("header", "bytes"):
        content[place] = int(rng.integers(256))
    elif kind == "word":  # a whole element: large, negative, NaN
        place -= place % 8
        content[place : place + 8] = rng.choice([b"\xff" * 8, b"\xf9" + b"\xff" * 7, b"\0" * 8, b"\x7f" * 8])
    elif kind == "cut":
        del content[place:]
    else:
        content += bytes(8)
    path.write_bytes(content)
    body = json.loads(description.read_text())
    body.pop("checksum", None)
    files = body["state"]["files"] if "state" in body else body["files"]
    entry = files[path.name if path.name in files else path.stem]
    entry |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    description.unlink()
    durable_files.write_json(description, body)
    return path.name, str(kind), place
