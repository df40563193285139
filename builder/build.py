"""Command line: turn a model into an engine directory. `python builder/build.py` builds the default model.

Arguments are read here and nowhere else; the work is in `engine_writer`, the readers in `weights/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script: only the script's own folder is on the path
    sys.path.insert(0, str(ROOT))

try:
    import torch
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: package {missing.name} is not installed for {sys.executable}; run 'make setup' once, "
        f"then use .venv/bin/python"
    )

from builder.default_model import ENGINE_NAME, default_gguf  # noqa: E402
from builder.engine_writer import (  # noqa: E402
    ContentWriter,
    WeightForm,
    check_output,
    check_tensors,
    weights_writer,
    write_engine,
)
from builder.lower_trt import EngineShape, PluginInsert  # noqa: E402
from builder.plan_report import memory_report, parse_bytes  # noqa: E402
from builder.rotation import RotatedValues  # noqa: E402
from builder.trt_api import PACKAGES, check_sm, load_builder  # noqa: E402
from builder.trt_api import Builder as TrtBuilder  # noqa: E402
from builder.trt_engine import block_format_of, check_limits, native_shape, plan_writer, trt_facts  # noqa: E402
from builder.weights.checkpoint import Checkpoint, parse_tokenizer  # noqa: E402
from builder.weights.detect import read_checkpoint  # noqa: E402
from plugins.linear.native import runs_bf16  # noqa: E402
from runtime import manifest  # noqa: E402
from runtime.config import DTYPE_BYTES, DType, EngineLimits, ModelSpec, RuntimeConfig, WeightDType  # noqa: E402
from runtime.errors import CheckpointError, CommitKVError, ConfigError, ManifestError  # noqa: E402
from runtime.manifest import EngineFile, Manifest, SourceModel, TokenInfo, TrtFacts  # noqa: E402
from runtime.policy.check import check_model  # noqa: E402
from runtime.policy.policy_file import POLICY_FILE, is_policy_file, load_policy, read_policy_file  # noqa: E402
from runtime.policy.registry import ALL_POLICIES, get_policy  # noqa: E402

DEFAULT_SEQ_LEN = 8192
TARGETS = ("cpu", "trt", "trt-rtx")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; every option has a default."""
    parser = argparse.ArgumentParser(prog="build.py", description="Build an engine directory from a model.")
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        help="GGUF file, Hugging Face directory, or TensorRT-LLM <= 1.2 checkpoint directory "
        "(default: SmolLM2-135M-Instruct, fetched once)",
    )
    add("--tokenizer", type=Path, help="directory with tokenizer.json, instead of the model's own")
    add(
        "--target",
        choices=TARGETS,
        default="cpu",
        help="what runs the engine: trt for data-centre GPUs, trt-rtx for RTX cards (default %(default)s)",
    )
    add("--sm", type=int, help="of the GPU, 10 * major + minor, such as 120 (default: of the GPU here)")
    add(
        "--max-step-tokens",
        type=int,
        default=RuntimeConfig.tokens_per_step,
        help="rows of one step of a GPU engine, over all sequences (default %(default)s)",
    )
    add(
        "--dtype",
        choices=("auto", *DTYPE_BYTES),
        default="auto",
        help="weights and activations (auto: bf16; fp32 on a CPU that has no kernel for it)",
    )
    add(
        "--weight-dtype",
        choices=get_args(WeightDType),
        default=EngineLimits.weight_dtype,
        help="matrices: as --dtype, or int8 with one scale per output (default %(default)s)",
    )
    add("--rotate-values", action="store_true", help="keep V rotated: its four bits lose half as much (off)")
    add("--kv-dtype", choices=tuple(DTYPE_BYTES), help="active pages (default: as --dtype)")
    for name, text in (
        ("max_batch_size", "sequences in one step"),
        ("page_tokens", "tokens of a page"),
        ("block_entries", "entries of a committed block"),
    ):
        default = getattr(EngineLimits, name)
        add(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} (default %(default)s)")
    add(
        "--max-seq-len",
        type=int,
        help=f"tokens of a conversation (default: the model's context, at most {DEFAULT_SEQ_LEN})",
    )
    add(
        "--policy",
        default=EngineLimits.policy,
        help=f"default policy: {', '.join(ALL_POLICIES)}, or a policy file ending in .json (default %(default)s)",
    )
    add("--output", type=Path, help="engine directory (default: engines/<model name>)")
    add("--dry-run", action="store_true", help="print the memory plan and write nothing")
    add("--kv-memory", default="1GiB", help="KV budget of the memory plan (default %(default)s)")
    add("--force", action="store_true", help="build even if the engine is up to date")
    return parser.parse_args(argv)


def default_dtype(target: str) -> DType:
    """bf16, which no activation overflows, where it is fast."""
    return "bf16" if target != "cpu" or runs_bf16() else "fp32"


def make_limits(args: argparse.Namespace, checkpoint: Checkpoint) -> EngineLimits:
    """The engine's limits, checked against the model; ConfigError or CheckpointError."""
    context = checkpoint.spec.max_positions
    length = min(DEFAULT_SEQ_LEN, context) if args.max_seq_len is None else args.max_seq_len
    if length > context:
        raise ConfigError(
            f"max_seq_len: got {length}, expected at most {context}, the context of {checkpoint.spec.name}; "
            f"pass --max-seq-len {context} or less"
        )
    window = checkpoint.sliding_window
    if window is not None and window < length:
        raise CheckpointError(
            f"{checkpoint.spec.name}: attention slides over {window} tokens, expected no window shorter than the "
            f"engine's {length}; pass --max-seq-len {window} or less, up to which the answers are exact"
        )
    dtype: DType = args.dtype if args.dtype != "auto" else default_dtype(args.target)
    check_model(get_policy(args.policy), checkpoint.spec)
    return EngineLimits(
        dtype=dtype,
        kv_dtype=args.kv_dtype or dtype,
        max_batch_size=args.max_batch_size,
        max_seq_len=length,
        page_tokens=args.page_tokens,
        block_entries=args.block_entries,
        policy=args.policy,
        weight_dtype=args.weight_dtype,
        rotate_values=args.rotate_values,
    )


def make_manifest(
    checkpoint: Checkpoint, limits: EngineLimits, source: SourceModel, trt: TrtFacts | None = None
) -> Manifest:
    """The manifest of an engine that has no files yet; trt: None for the CPU."""
    tokenizer = parse_tokenizer(checkpoint.tokenizer.tokenizer_json, checkpoint.files[0])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > checkpoint.spec.vocab_size:
        raise CheckpointError(
            f"{checkpoint.spec.name}: the tokenizer has {size} tokens, expected at most the model's "
            f"{checkpoint.spec.vocab_size}; pass the tokenizer that belongs to the model"
        )
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    versions: tuple[tuple[str, str], ...]
    versions = (("commitkv", manifest.COMMITKV_VERSION), ("torch", str(torch.__version__)))
    if trt is not None:
        versions += ((trt.package, trt.version),)
    return Manifest(
        target="cpu" if trt is None else "trt" if trt.package == "tensorrt" else "trt-rtx",
        model=checkpoint.spec,
        limits=limits,
        tokens=TokenInfo(
            bos_token=checkpoint.tokenizer.bos_token,
            eos_token=checkpoint.tokenizer.eos_token,
            add_bos=checkpoint.tokenizer.add_bos,
            special_tokens=tuple((token.content, index) for index, token in added if token.special),
        ),
        source=source,
        files=(),
        versions=versions,
        built_at=datetime.now(UTC).isoformat(timespec="seconds"),
        trt=trt,
    )


def is_up_to_date(output: Path, wanted: Manifest, policy_text: str | None) -> bool:
    """Whether `output` is a sound engine of the same source, options, policy file and versions."""
    try:
        found = manifest.load(output)
    except ManifestError:
        return False
    if policy_text is not None and (
        not found.has_file(POLICY_FILE) or (output / POLICY_FILE).read_text(encoding="utf-8") != policy_text
    ):
        return False
    return dataclasses.replace(found, files=(), built_at=wanted.built_at) == wanted


def source_sha256(files: Sequence[Path]) -> str:
    """SHA-256 over the names and contents of the files a model was read from."""
    lines = sorted(f"{path.name} {manifest.file_sha256(path)}" for path in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def make_content(
    args: argparse.Namespace, checkpoint: Checkpoint, limits: EngineLimits, builder: TrtBuilder | None
) -> tuple[ContentWriter, TrtFacts | None]:
    """What writes the engine's weights or plan, and what the manifest says of TensorRT. builder: None for the CPU."""
    if builder is None:
        return weights_writer(checkpoint, WeightForm(limits.dtype, limits.weight_dtype == "int8")), None
    shape = make_shape(args, checkpoint.spec, limits, builder.sm)
    if args.target == "trt-rtx":
        return plan_writer(builder, shape, checkpoint), trt_facts(builder, shape)

    def make_insert() -> PluginInsert:
        from builder.trt_insert import plugin_insert  # compiles kernels: only where they are needed

        return plugin_insert(builder.api, shape, builder.sm)

    return plan_writer(builder, shape, checkpoint, make_insert), trt_facts(builder, shape)


def make_shape(args: argparse.Namespace, spec: ModelSpec, limits: EngineLimits, sm: int) -> EngineShape:
    """Shape of a GPU engine; ConfigError for what its form does not run."""
    check_limits(limits)
    if args.target == "trt-rtx":
        return native_shape(spec, limits, args.max_step_tokens)
    from builder.trt_insert import plugin_step

    step = plugin_step(spec, limits, args.max_step_tokens, block_format_of(spec, limits), sm)
    shape = EngineShape(spec, limits, step)
    shape.interface.sha256()  # counts every table
    return shape


def read_policy(text: str) -> str | None:
    """The content of a policy file, None for a policy's name. Raises ConfigError or UnknownPolicyError."""
    if not is_policy_file(text):
        get_policy(text)
        return None
    read_policy_file(Path(text))
    return Path(text).read_text(encoding="utf-8")


def build(args: argparse.Namespace) -> None:
    """Everything after argument parsing; raises CommitKVError."""
    policy_text = read_policy(args.policy)
    kv_memory_bytes = parse_bytes(args.kv_memory, "kv-memory")
    builder = None if args.target == "cpu" or args.dry_run else load_builder(args.target, args.sm)
    model = args.model or default_gguf(ROOT / "models")
    checkpoint = read_checkpoint(model, args.tokenizer)
    if policy_text is not None:
        args.policy = load_policy(Path(args.policy), checkpoint.spec).name
    limits = make_limits(args, checkpoint)
    if limits.rotate_values:
        checkpoint = dataclasses.replace(checkpoint, tensors=RotatedValues(checkpoint.tensors, checkpoint.spec))
    check_tensors(checkpoint)
    if args.dry_run:
        if args.target != "cpu":
            sm = check_sm(args.target, args.sm) if args.sm is not None else PACKAGES[args.target].sms[-1]
            make_shape(args, checkpoint.spec, limits, sm)
        print(memory_report(checkpoint.spec, limits, kv_memory_bytes))
        return
    name = ENGINE_NAME if args.model is None else checkpoint.spec.name
    output: Path = args.output or ROOT / "engines" / (name if builder is None else f"{name}-sm{builder.sm}")
    check_output(output)
    write_content, trt = make_content(args, checkpoint, limits, builder)
    source = SourceModel(checkpoint.spec.name, checkpoint.kind, source_sha256(checkpoint.files))
    wanted = make_manifest(checkpoint, limits, source, trt)
    if not args.force and is_up_to_date(output, wanted, policy_text):
        print(f"{output} is up to date (--force builds it again)")
        return
    started = time.monotonic()

    def with_files(files: tuple[EngineFile, ...]) -> Manifest:
        return dataclasses.replace(wanted, files=files)

    write_engine(checkpoint, write_content, output, with_files, policy_text)
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"built {output}: {limits.dtype}, {size / 1e6:.0f} MB, {time.monotonic() - started:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on standard error."""
    try:
        build(parse_arguments(argv))
    except CommitKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
