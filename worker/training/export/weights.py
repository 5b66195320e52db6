"""A model's weights as they lie in files, read one at a time: memory is that of one tensor."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

SHARD_BYTES = 500 * 10**6  # written from memory, so twice that is held


class StoredWeights(Mapping[str, torch.Tensor]):
    """The tensors of some safetensors files, by name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._where: dict[str, Path] = {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                self._where |= dict.fromkeys(tensors.keys(), Path(file))

    def __getitem__(self, name: str) -> torch.Tensor:
        # Opened anew each time: what stays mapped counts as memory of ours.
        with safe_open(self._where[name], "pt") as tensors:
            return tensors.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def dtype(self, name: str) -> torch.dtype:
        """The type of one tensor; only its first row is read."""
        with safe_open(self._where[name], "pt") as tensors:
            return tensors.get_slice(name)[:1].dtype

    def count(self, name: str) -> int:
        """Numbers in one tensor, without reading it."""
        with safe_open(self._where[name], "pt") as tensors:
            return math.prod(tensors.get_slice(name).get_shape())

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in set(self._where.values()))


def weights_of(model: str) -> StoredWeights | None:
    """The weights of a directory or of a model of the hub; None: not as safetensors."""
    options = {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(model, SAFE_WEIGHTS_INDEX_NAME, **options)
    if index:
        files, _ = get_checkpoint_shard_files(model, index)
        return StoredWeights([Path(file) for file in files])
    single = cached_file(model, SAFE_WEIGHTS_NAME, **options)
    return StoredWeights([Path(single)]) if single else None


class Computed(Mapping[str, torch.Tensor]):
    """Tensors that are made when they are asked for."""

    def __init__(self, names: Sequence[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def save_sharded(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors as a model's safetensors files; no more than one file's are held at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    held: dict[str, torch.Tensor] = {}
    size, total = 0, 0
    where: dict[str, int] = {}
    parts: list[Path] = []

    def flush() -> None:
        nonlocal held, size
        parts.append(folder / f".part-{len(parts)}")
        save_file(held, parts[-1], metadata={"format": "pt"})
        parts[-1].chmod(0o644)
        held, size = {}, 0

    for name, tensor in tensors.items():
        bytes_ = tensor.numel() * tensor.element_size()
        if held and size + bytes_ > SHARD_BYTES:
            flush()
        held[name] = tensor.contiguous()
        where[name] = len(parts)
        size, total = size + bytes_, total + bytes_
    flush()
    if len(parts) == 1:
        parts[0].rename(folder / SAFE_WEIGHTS_NAME)
        return
    names = [f"model-{at + 1:05}-of-{len(parts):05}.safetensors" for at in range(len(parts))]
    for part, name in zip(parts, names, strict=True):
        part.rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[at] for name, at in where.items()},
    }
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1))
