"""Triton's side of the model `tensorrt_llm`: converts tensors, hands requests to `runtime.serving`, nothing else."""

import json
import logging
import os
import sys
import threading
from dataclasses import fields
from pathlib import Path

import triton_python_backend_utils as pb_utils

REPO_ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPO_ROOT))

from triton_metrics import triton_metrics  # noqa: E402

from runtime.config import RuntimeConfig  # noqa: E402
from runtime.errors import CommitKVError, ConfigError  # noqa: E402
from runtime.loop import EngineLoop  # noqa: E402
from runtime.serving import logs  # noqa: E402
from runtime.serving.contract import (  # noqa: E402
    INPUTS,
    TENANT_PARAMETER,
    check_tenant_parameter,
    trusted_parameters,
)
from runtime.serving.identity import SignedIds, read_salt  # noqa: E402
from runtime.serving.metric_table import Reading  # noqa: E402
from runtime.serving.turns import Turns, process_stats  # noqa: E402
from runtime.serving.watch import Reporter  # noqa: E402
from runtime.warm_up import warm_up  # noqa: E402
from runtime.wiring import load_engine, resolve_policy  # noqa: E402
from triton_model_repo.triton_tensors import (  # noqa: E402
    FINAL,
    make_tensor,
    printable,
    read_inputs,
    read_parameters,
)

log = logging.getLogger("commitkv.model")

OWN_PARAMETERS = ("engine_dir", "default_policy", "grace_s", "log_level", "tenant_parameter")
# What a server whose engine has died may spend on telling its clients; perf.server then ends Triton too.
DYING_S = 1.0
DIED = 70


class TritonPythonModel:
    """One engine, one instance. Model parameters: see config.pbtxt."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            logs.configure(parameters.get("log_level", "info"))
            self._tenant_parameter = parameters.get("tenant_parameter") or TENANT_PARAMETER
            check_tenant_parameter(self._tenant_parameter)
            self._grace_s = float(parameters.get("grace_s", "30"))
            engine_dir = _path(parameters.get("engine_dir")) or REPO_ROOT / "engines" / "smollm2-135m"
            default_policy = parameters.get("default_policy") or None
            runtime_config = _runtime_config(parameters)
            ids = SignedIds(read_salt(_path(runtime_config.id_salt_file))) if runtime_config.id_salt_file else None
            engine = load_engine(engine_dir, runtime_config)
            if default_policy:
                default_policy = resolve_policy(str(_path(default_policy)), engine_dir)
            warm_up_s = warm_up(engine)
            log.info("warmed up in %.2f s", warm_up_s)
            self._loop = EngineLoop(engine, _leave)
            self._reporter = Reporter(triton_metrics(args["model_name"], args["model_version"]), self._read)
            self._turns = Turns(self._loop, default_policy, log.warning, ids, self._reporter)
        except CommitKVError as error:
            raise pb_utils.TritonModelException(printable(str(error))) from None

    def execute(self, requests):
        for request in requests:
            sink = _Sink(request)
            try:
                own = trusted_parameters(read_parameters(request), self._tenant_parameter)
                self._turns.handle(read_inputs(request, INPUTS), request.request_id(), sink, own)
            except Exception as error:
                log.exception("request %r", request.request_id())
                sink.fail("INTERNAL", f"internal error: {type(error).__name__}: {error}")

    def finalize(self):
        if hasattr(self, "_turns"):
            self._turns.close(self._grace_s)
            self._reporter.close()
            log.info("stopped")

    def _read(self):
        stats, checkpoints = self._loop.stats(), self._loop.checkpoint_figures()
        return Reading(stats, checkpoints, process_stats()["rss_bytes"], self._loop.is_alive)


def _leave():
    """The engine cannot go on. Triton would call a model ready that never answers; one that is gone is noticed."""
    threading.Timer(DYING_S, os._exit, (DIED,)).start()


def _path(text):
    """The stub runs Python isolated, with ASCII file names: other bytes travel as surrogates."""
    return Path(os.fsdecode(text.encode("utf-8"))) if text else None


def _runtime_config(parameters):
    """RuntimeConfig from the model parameters of the same names. Raises ConfigError."""
    kinds = {field.name: type(field.default) for field in fields(RuntimeConfig)}
    values = {}
    for key, text in parameters.items():
        if key in OWN_PARAMETERS:
            continue
        if key not in kinds:
            known = ", ".join((*OWN_PARAMETERS, *kinds))
            raise ConfigError(f"model parameter {key}: unknown, expected one of {known}; correct config.pbtxt")
        try:
            values[key] = kinds[key](text)
        except ValueError:
            raise ConfigError(f"model parameter {key}: got {text!r}, expected a number; correct config.pbtxt") from None
    return RuntimeConfig(**values)


class _Sink:
    """The response side of one request (`runtime.serving.turns.Sink`)."""

    def __init__(self, request):
        self._sender = request.get_response_sender()

    def send(self, outputs, final):
        tensors = [make_tensor(o.name, o.dtype, o.values) for o in outputs]
        self._sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=FINAL if final else 0)

    def fail(self, code, message):
        error = pb_utils.TritonError(printable(message), getattr(pb_utils.TritonError, code))
        self._sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), flags=FINAL)

    def is_cancelled(self):
        return self._sender.is_cancelled()
