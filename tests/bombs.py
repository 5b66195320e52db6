"""Uploads that are small outside and huge inside, for tests and for bench/attacks.py."""

import gzip
import io
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq


def long_name(kind):
    """A tar whose first header says that a name of 400 MB follows."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = kind, 400 * 1024**2
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as packed:
        packed.write(header.tobuf(tarfile.GNU_FORMAT))
        for _ in range(400):
            packed.write(b"x" * 1024**2)
    return buffer.getvalue()


def parquet(rows, value):
    """Rows that are all alike, which take no room."""
    buffer = io.BytesIO()
    part = pa.table({"input": pa.repeat(pa.scalar(value), rows // 50)})
    with pq.ParquetWriter(buffer, part.schema) as writer:
        for _ in range(50):
            writer.write_table(part)
    return buffer.getvalue()
