"""Tables as pyarrow writes them unless it is told otherwise: dictionaries and statistics of every column, Arrow's
schema beside Parquet's, and settings with spaces. Readers take them as well."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq


def in_arrows_layout(root: Path) -> int:
    """Write every table below a folder anew in that layout; returns how many files there are."""
    files = sorted(root.rglob("*.parquet"))
    for path in files:
        content = pq.read_table(path, partitioning=None)
        metadata = dict(content.schema.metadata)
        if b"hacpo.settings" in metadata:
            settings = json.loads(metadata[b"hacpo.settings"])
            metadata[b"hacpo.settings"] = json.dumps(settings, sort_keys=True, ensure_ascii=False).encode()
        content = content.replace_schema_metadata(metadata)
        path.unlink()  # which may be a link to an object of DVC's cache
        pq.write_table(content, path, compression="zstd", write_page_checksum=True)
    return len(files)
