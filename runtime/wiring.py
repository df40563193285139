"""Where the pure half, the device half and the builder's model meet: an engine directory becomes an engine."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from builder.lower_torch import TORCH_DECODER_FORMS, DecoderForms, load_decoder
from plugins import native_build
from plugins.append.native import make_append
from plugins.attend.native import make_attend
from plugins.commit.native import make_commit
from plugins.linear.native import make_linear
from plugins.pointwise.native import make_pointwise
from runtime import manifest as manifests
from runtime.chat_format import ChatFormat
from runtime.checkpoint_hook import CheckpointHook
from runtime.checkpoint_store import CheckpointStore, StoreLimits
from runtime.checkpoints import Checkpoints, engine_fingerprint
from runtime.commit_worker import CommitWorker
from runtime.config import RuntimeConfig
from runtime.engine import Engine
from runtime.engine_interface import StepLimits, make_interface
from runtime.engine_parts import EngineParts
from runtime.errors import ConfigError, ManifestError
from runtime.executor_torch import TORCH_FORMS, Forms, TorchExecutor
from runtime.intake import Intake
from runtime.kv_manager import KvManager
from runtime.kv_storage import ArenaPlace, KvStorage
from runtime.kv_transfer import KvTransfer
from runtime.manifest import Manifest
from runtime.paged_executor import PagedExecutor
from runtime.policy.check import check_model
from runtime.policy.policy_file import POLICY_FILE, is_policy_file, load_policy
from runtime.policy.registry import get_policy
from runtime.step import Executor
from runtime.text import EngineTokenizer
from runtime.trace import Trace

log = logging.getLogger(__name__)

PROBE_REQUEST = "Repeat the previous text exactly."


def load_engine(engine_dir: Path, config: RuntimeConfig, *, verify: bool = True) -> Engine:
    """Loads an engine and the device it runs on: engines built for the CPU run on either device of `RuntimeConfig`.

    verify: compare the hash of every file with the manifest. Raises ManifestError, ConfigError or DeviceError.
    """
    return Engine(load_parts(engine_dir, config, verify=verify))


def load_parts(engine_dir: Path, config: RuntimeConfig, *, verify: bool = True) -> EngineParts:
    """What `load_engine` makes an engine of; evaluation also talks to the executor itself."""
    manifest = manifests.load(engine_dir, target=None if config.device == "cuda" else "cpu", verify=verify)
    spec, limits = manifest.model, manifest.limits
    if manifest.has_file(POLICY_FILE):
        load_policy(engine_dir / POLICY_FILE, spec)
    check_model(get_policy(limits.policy), spec)  # refused at start, not at the first turn
    torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
    manager = _make_manager(manifest, config)
    make_executor = _EXECUTORS[config.device]
    executor = make_executor(engine_dir, manifest, manager, config)
    tokenizer = load_tokenizer(engine_dir, manifest)
    chat_format = load_chat_format(engine_dir, manifest)
    probe_prompt, _ = tokenizer.encode(chat_format.next_turn(PROBE_REQUEST, False).text, (0, 0))
    if manifest.trt is not None:
        check_step_tokens(config, manifest.trt.step, len(probe_prompt))
    log.info("loaded %s: %d layers, %s weights, policy %s", engine_dir, spec.num_layers, limits.dtype, limits.policy)
    return EngineParts(
        spec=spec,
        limits=limits,
        config=config,
        manager=manager,
        executor=executor,
        intake=Intake(tokenizer, chat_format, limits.policy, limits.max_seq_len),
        probe_prompt=tuple(probe_prompt),
        boundaries=boundary_tokens(manifest, probe_prompt),
        observer=_start_trace(config, manager, executor),
        checkpoints=_open_checkpoints(config, manifest, manager, executor),
        commit_worker=_commit_worker() if _commits_aside(config) else None,
    )


def _commits_aside(config: RuntimeConfig) -> bool:
    """Whether another thread may draw and write commits. On a GPU they share its staging memory with the steps."""
    return config.background_commits and config.device == "cpu"


def _commit_worker() -> CommitWorker:
    """On its thread torch uses no others: of several with low priority each would wait for the last, operation by
    operation."""
    worker, told = CommitWorker(), threading.Event()
    num_threads = torch.get_num_threads()

    def prepare() -> None:
        torch.get_num_threads()  # a thread takes over the number of all when it first asks, and once only
        torch.set_num_threads(1)

    worker.run(prepare, told.set)
    told.wait()
    torch.set_num_threads(num_threads)  # that of all again; the thread's own stays
    return worker


def _start_trace(config: RuntimeConfig, manager: KvManager, executor: Executor) -> Trace | None:
    """Raises ConfigError for a file that cannot be made."""
    if not config.trace_file:
        return None
    assert isinstance(executor, PagedExecutor)
    executor.watcher = Trace(Path(config.trace_file), manager, manager.spec)
    return executor.watcher


def _open_checkpoints(
    config: RuntimeConfig, manifest: Manifest, manager: KvManager, executor: Executor
) -> CheckpointHook:
    """Raises ConfigError for a URL that cannot be written to."""
    if not config.checkpoint_url:
        return CheckpointHook()
    assert isinstance(executor, PagedExecutor)
    limits = StoreLimits(config.checkpoint_queue_bytes, config.checkpoint_max_count, config.checkpoint_max_age_s)
    store = CheckpointStore(config.checkpoint_url, limits)
    transfer = KvTransfer(executor.storage)
    return Checkpoints(engine_fingerprint(manifest), manager, transfer, store, config.checkpoint_wait_s)


def check_step_tokens(config: RuntimeConfig, step: StepLimits, prompt_tokens: int) -> None:
    """Raises ConfigError where steps or probes would be larger than the engine takes. prompt_tokens: of a probe."""
    for name, got, most in (
        ("tokens_per_step", config.tokens_per_step, step.max_step_tokens),
        ("probe_tokens_per_step", config.probe_tokens_per_step, step.max_step_tokens - prompt_tokens),
    ):
        if got > most:
            raise ConfigError(
                f"{name}: got {got}, expected at most {most} with an engine for steps of {step.max_step_tokens} tokens "
                f"(a probe's request takes {prompt_tokens}); lower it, or build with a larger --max-step-tokens"
            )


def _make_manager(manifest: Manifest, config: RuntimeConfig) -> KvManager:
    """A TensorRT engine reads one block format, and its arenas are tensors that TensorRT can count."""
    spec, limits, facts = manifest.model, manifest.limits, manifest.trt
    if facts is None:
        return KvManager(spec, limits, config.kv_memory_bytes)
    interface = make_interface(spec, limits, facts.step)
    most = (interface.dim("pages").most, interface.dim("blocks").most)
    return KvManager(spec, limits, config.kv_memory_bytes, facts.step.block_format, most)


def _cpu_executor(engine_dir: Path, manifest: Manifest, manager: KvManager, config: RuntimeConfig) -> Executor:
    spec, limits = manifest.model, manifest.limits
    storage = KvStorage(spec, limits, manager.num_pages, manager.num_blocks)
    num_threads = torch.get_num_threads()
    decoder_forms, forms = choose_forms(num_threads, 1 if _commits_aside(config) else num_threads)
    decoder = load_decoder(engine_dir / manifests.WEIGHTS_FILE, spec, limits.dtype, forms=decoder_forms)
    return TorchExecutor(decoder, spec, limits, storage, forms)


def _gpu_executor(engine_dir: Path, manifest: Manifest, manager: KvManager, _: RuntimeConfig) -> Executor:
    """The TensorRT engine of a trt manifest; torch with our kernels for one built for the CPU."""
    from runtime import gpu  # needs packages that a CPU does without

    spec, limits = manifest.model, manifest.limits
    policy = get_policy(limits.policy)
    gpu.check_kernels(spec, limits, policy)
    device = gpu.open_gpu()
    kernels = gpu.open_kernels(device)
    if manifest.target == "trt":
        from runtime.trt_loading import trt_executor  # needs TensorRT

        return trt_executor(engine_dir / manifests.PLAN_FILE, manifest, manager, kernels)
    if manifest.target != "cpu":
        raise ManifestError(
            f"engine: {engine_dir} was built for {manifest.target}, expected cpu or trt on device cuda; an engine of "
            f"plain layers has no kernels of ours to run; build it with --target cpu or trt"
        )
    gpu.check_room(gpu.arena_bytes(manager, limits, policy), device)
    storage = KvStorage(spec, limits, manager.num_pages, manager.num_blocks, ArenaPlace(device))
    decoder = load_decoder(engine_dir / manifests.WEIGHTS_FILE, spec, limits.dtype, str(device))
    return gpu.gpu_executor(decoder, spec, limits, storage, kernels)


_EXECUTORS = {"cpu": _cpu_executor, "cuda": _gpu_executor}


def resolve_policy(text: str, engine_dir: Path) -> str:
    """The name of a policy, given as that or as a policy file for the engine's model, which is read.

    Raises UnknownPolicyError, ConfigError or ManifestError.
    """
    if not is_policy_file(text):
        return get_policy(text).name
    return load_policy(Path(text), manifests.load(engine_dir, verify=False).model).name


def boundary_tokens(manifest: Manifest, turn: Sequence[int]) -> frozenset[int]:
    """Ids that separate messages: special tokens that the chat template writes into a turn, and those that end answers.

    turn: tokens of any rendered user message.
    """
    special = {token_id for _, token_id in manifest.tokens.special_tokens}
    return frozenset(special.intersection(turn) | set(manifest.model.eos_token_ids))


def load_tokenizer(engine_dir: Path, manifest: Manifest) -> EngineTokenizer:
    """The tokenizer of an engine directory."""
    tokens = manifest.tokens
    bos = manifest.model.bos_token_id if tokens.add_bos else None
    return EngineTokenizer(engine_dir / manifests.TOKENIZER_FILE, tuple(text for text, _ in tokens.special_tokens), bos)


def load_chat_format(engine_dir: Path, manifest: Manifest) -> ChatFormat:
    """The chat template of an engine directory, or the plain form for a model without one."""
    template = None
    if manifest.has_file(manifests.CHAT_TEMPLATE_FILE):
        template = (engine_dir / manifests.CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
    return ChatFormat(
        template,
        bos_token=manifest.tokens.bos_token,
        eos_token=manifest.tokens.eos_token,
        end_tokens=manifest.end_tokens,
    )


def choose_forms(num_threads: int, commit_threads: int = 1) -> tuple[DecoderForms, Forms]:
    """The native form of every operation, torch's where this machine cannot have it (said once in the log)."""
    if native_build.find_compiler() is None:
        log.warning("no C++ compiler found (%s); the slower torch forms are used", ", ".join(native_build.COMPILERS))
        return TORCH_DECODER_FORMS, TORCH_FORMS
    line, publish = make_commit(commit_threads) or (TORCH_FORMS.draw_line, TORCH_FORMS.publish)
    decoder_forms = DecoderForms(
        linear=make_linear(num_threads) or TORCH_DECODER_FORMS.linear,
        pointwise=make_pointwise(num_threads) or TORCH_DECODER_FORMS.pointwise,
    )
    forms = Forms(
        append=make_append(num_threads) or TORCH_FORMS.append,
        attend=make_attend(num_threads) or TORCH_FORMS.attend,
        draw_line=line,
        publish=publish,
    )
    return decoder_forms, forms
